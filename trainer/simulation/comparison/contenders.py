"""The contenders of a comparison: which exchanges and protocols, as --compare names them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, get_type_hints

from pipeline.core.errors import UsageError
from pipeline.core.specs import OPTION, Spec, find
from trainer.config import Config, Optimiser
from trainer.exchange import EXCHANGES, Exchange
from trainer.exchange.parameter_server import ParameterServer
from trainer.exchange.strategy_switch import StrategySwitch
from trainer.protocols import PROTOCOLS, Protocol
from trainer.protocols.asp import ASP

MEMBERS = {**PROTOCOLS, **EXCHANGES}
WITHOUT_SERVERS = tuple(name for name in EXCHANGES if name != ParameterServer.name)
GROUPS = {"protocols": tuple(PROTOCOLS), "exchanges": WITHOUT_SERVERS, "all": (*PROTOCOLS, *WITHOUT_SERVERS)}


@dataclass(frozen=True)
class Contender:
    """An exchange, with a protocol if the exchange has none of its own."""

    exchange: Exchange = ParameterServer()
    protocol: Protocol = ASP()

    def configure(self, config: Config, optimiser: Optimiser) -> Config:
        """Return the configuration of its run. Raises UsageError for options that its exchange does not support.

        optimiser: without defaults, so that the run gets those of its exchange and protocol."""
        # An exchange without servers refuses several, which other contenders may have.
        servers = 1 if self.exchange.protocol else config.processes.servers
        processes = replace(config.processes, servers=servers)
        return replace(config, exchange=self.exchange, protocol=self.protocol, optimiser=optimiser, processes=processes)


def parse_contenders(text: str, protocol: Protocol | None = None, *, evaluates: bool = True) -> dict[str, Contender]:
    """Parse a list such as ``asp,ssp:3,all-reduce,matcha:budget=0.25`` and return the contenders by their text.

    Values after a colon are assigned to the member's parameters in the order of their definition, advanced ones last,
    or by NAME=VALUE; a switch is yes or no. Parameters without a value keep their defaults. Raises UsageError.

    Args:
        text: names of protocols, exchanges and groups.
        protocol: of the contender ``parameter-server``; asp if None.
        evaluates: whether runs have evaluations, from which strategy-switch decides when to switch. Without them a
            group has it with a fixed share of the epochs.
    """
    contenders: dict[str, Contender] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        for label in GROUPS.get(part, (part,)):
            if part in GROUPS and label == StrategySwitch.name and not evaluates:
                label += ":0.5"
            contenders[label] = _contender(label, protocol or ASP())
    if not contenders:
        raise UsageError(f"--compare names nothing: give a list such as asp,ssp:3,all-reduce, or {', '.join(GROUPS)}")
    return contenders


def _contender(label: str, protocol: Protocol) -> Contender:
    """Return the contender of a label such as ``ssp:3``. Raises UsageError. protocol: as for ``parse_contenders``."""
    name, *values = label.split(":")
    kind = find(MEMBERS, "--compare", name)
    parsers = _parsers(kind)
    parameters: dict[str, Any] = {}
    free = iter(parsers)
    for value in values:
        key, equals, after = value.partition("=")
        # A path of --topology may contain an equals sign.
        named = bool(equals) and key.replace("-", "_") in parsers
        field = key.replace("-", "_") if named else next(free, None)
        if field is None or field in parameters:
            options = " and ".join(parser.replace("_", "-") for parser in parsers)
            raise UsageError(f"--compare {label}: {name} takes {options or 'no parameter'}")
        parameters[field] = parsers[field](label, after if named else value)
    member = kind(**parameters)
    if isinstance(member, Protocol):
        return Contender(protocol=member)
    assert isinstance(member, Exchange), "a member is a protocol or an exchange"
    return Contender(member, protocol if member.protocol is None and not member.stages() else ASP())


def _parsers(kind: type[Spec]) -> dict[str, Callable[[str, str], Any]]:
    """Return parser(label, text) of each parameter of a member, advanced parameters last."""
    hints = get_type_hints(kind)
    options = [(item.name, item.metadata[OPTION]) for item in fields(kind) if OPTION in item.metadata]
    options.sort(key=lambda named: named[1].advanced)  # stable
    return {name: partial(_value, hints[name], about.parse) for name, about in options}


def _value(hint: Any, parse: Callable[[str], Any] | None, label: str, text: str) -> Any:
    """Convert a parameter's text to the type of its field. Raises UsageError.

    Args:
        hint: the type.
        parse: the parser of the flag, or None.
        label: the contender, for the message.
        text: the text of the value.
    """
    kind = next((kind for kind in (int, float) if hint in (kind, kind | None)), None)
    if parse is not None:
        return parse(text)
    # A word such as false must not switch an option on.
    if hint is bool:
        if text not in ("yes", "no"):
            raise UsageError(f"--compare {label}: {text!r} must be yes or no")
        return text == "yes"
    if kind is None:
        return text
    try:
        return kind(text)
    except ValueError:
        number = "whole number" if kind is int else "number"
        raise UsageError(f"--compare {label}: {text!r} is no {number}") from None
