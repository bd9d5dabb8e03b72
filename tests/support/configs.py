"""A trainer's configuration out of flat values, for tests that care about a few of them."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from pipeline.core.specs import Spec
from trainer.config import Config, Data, Optimiser, Processes, RunSpec
from trainer.exchange import EXCHANGES
from trainer.models import model_from_json
from trainer.protocols import PROTOCOLS
from trainer.sampling import SAMPLERS


def make_config(
    shards: Path | str = "s",
    output: Path | str = "o",
    *,
    model: str = "resnet20",
    protocol: str = "asp",
    exchange: str = "parameter-server",
    **values: Any,
) -> Config:
    """The parts of a Config, each with those of the values that it has; a model's and a protocol's own ones too."""
    if not values.keys() & {"epochs", "steps"}:
        values["steps"] = 1
    kinds: dict[str, type[Spec]] = {"data": Data, "optimiser": Optimiser, "processes": Processes, "run": RunSpec}
    values.pop("sampler", None)  # of ``change``: a name that ``sampling`` has too
    sampler = SAMPLERS[values.get("sampling", "shuffle")]
    chosen_sampler = sampler(**_take(sampler, values))
    own = _take(PROTOCOLS[protocol], values)
    chosen_protocol = PROTOCOLS[protocol](**own)
    chosen_exchange = EXCHANGES[exchange](**_take(EXCHANGES[exchange], values))
    chosen_model = model_from_json(
        {"name": model} | {key: values.pop(key) for key in ("norm", "shortcut", "intercept", "stem") if key in values}
    )
    given = {"shards": str(shards), "output": str(output)} | values
    parts = {name: kind(**_take(kind, given)) for name, kind in kinds.items()}
    assert not given, f"no part of a configuration has {', '.join(given)}"
    chosen: dict[str, Any] = {"model": chosen_model, "protocol": chosen_protocol, "exchange": chosen_exchange}
    return Config(**chosen, sampler=chosen_sampler, **parts)  # type: ignore[arg-type]


def _take(kind: type[Spec], values: dict[str, Any]) -> dict[str, Any]:
    return {item.name: values.pop(item.name) for item in fields(kind) if item.name in values}


def change(config: Config, **values: Any) -> Config:
    """The same configuration but for some flat values."""
    flat: dict[str, Any] = {}
    for part, held in config.to_json().items():
        flat |= {part if key == "name" else key: value for key, value in held.items()}
    other_model = values.get("model", flat["model"]) != flat["model"]
    other_protocol = values.get("protocol", flat["protocol"]) != flat["protocol"]
    dropped = {item.name for item in fields(config.model)} if other_model else set()
    dropped |= {item.name for item in fields(config.protocol)} if other_protocol else set()
    return make_config(**{key: value for key, value in flat.items() if key not in dropped} | values)
