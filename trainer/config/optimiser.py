"""The options of a run about its optimiser."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pipeline.core.errors import UsageError
from pipeline.core.specs import Spec, option
from trainer.coordination.schedules import AUTO, RECIPES, are_drops, parse_drops
from trainer.models import ModelSpec
from trainer.models.own import is_reference

FRESH_MOMENTUM = 0.9
SGD = "sgd"
ADAM = "adam"
ADAPTIVE_RATE = 1e-3  # torch's default for Adam
DROPS = ", ".join(f"{name} at epochs {' and '.join(map(str, at))}" for name, at in sorted(RECIPES.items()) if at)


@dataclass(frozen=True)
class Optimiser(Spec):
    """The update rule on the servers, by default SGD with momentum.

    learning_rate is the single-process rate a. With n workers an update multiplies the sum of its gradients by a/n. For
    bsp this applies a to the mean of n gradients, for asp a/n to each gradient, and for an update of k gradients
    (k-bsp, k-batch-bsp) k*a/n to their mean. Protocols that weigh gradients, such as n-softsync, multiply each by its
    weight first. A rate or momentum of None means the default for the model and protocol; Config fills it in."""

    optimiser: str = option(
        SGD,
        "update rule of the parameters: sgd, adam, or module:function, which returns a torch.optim.Optimizer for a list of"
        " parameters",
        metavar="NAME",
        check=lambda name: name in (SGD, ADAM) or is_reference(name),
        expected="sgd, adam or module:function",
        advanced=True,
    )
    learning_rate: float | None = option(
        None,
        "learning rate of single-process SGD; each gradient of an update is multiplied by this rate divided by the number"
        " of workers (n-softsync: by the number of gradients in the update, except with adam)",
        above=0,
        shown=f"set by the model, lower if gradients can be stale; without sgd {ADAPTIVE_RATE:g}",
    )
    momentum: float | None = option(
        None,
        "momentum of SGD, kept on the servers; of adam the decay of the first moment",
        least=0,
        below=1,
        shown=f"{FRESH_MOMENTUM:g}; if gradients can be stale, set by the model, mostly {ModelSpec.stale_momentum:g}",
        advanced=True,
    )
    momentum_rule: Literal["auto", "heavy-ball", "nesterov", "look-ahead"] = option(
        "auto",
        "heavy-ball, nesterov: momentum decays with every update, as in SGD; look-ahead: it decays once per round of the"
        " workers, which compute gradients at the parameters extrapolated by it; auto: look-ahead if gradients can be stale,"
        " else heavy-ball",
        advanced=True,
    )
    weight_decay: float = option(
        2e-4, "coefficient of the L2 penalty, which is part of the loss", least=0, advanced=True
    )
    recipe: Literal["auto", "ch4", "ch6", "constant", "cosine", "inverse-sqrt"] = option(
        "auto",
        f"schedule of the learning rate: auto divides it by ten after 3/4 and 9/10 of the run, {DROPS}; constant keeps it;"
        " cosine lowers it to 0 along half a cosine; inverse-sqrt divides it by the square root of the number of"
        " mini-batches",
        advanced=True,
    )
    drops: tuple[float, ...] = option(
        (),
        "epochs at which the learning rate is divided by ten, such as 100,150, instead of --recipe",
        metavar="LIST",
        parse=parse_drops,
        check=are_drops,
        expected="positive epochs in increasing order, such as 100,150",
        shown="those of --recipe",
        advanced=True,
    )
    rate_warmup: float = option(
        0.0,
        "epochs in which the learning rate rises linearly to that of --recipe or --drops; 0: none",
        metavar="EPOCHS",
        least=0,
        advanced=True,
    )
    tolerance: float = option(
        0.0,
        "end the run early when a mini-batch changes the parameters by less than this fraction of their norm (or of 1, if"
        " the norm is smaller); 0 disables the test; needs --servers 1",
        least=0,
        advanced=True,
    )
    batch_norm: Literal["ema", "last", "recalibrate"] = option(
        "recalibrate",
        "running statistics of BatchNorm: ema averages them over the steps of all workers, last takes them from the last"
        " update, recalibrate computes them from training rows before each evaluation",
        advanced=True,
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "drops", tuple(self.drops))  # JSON has lists
        super().__post_init__()
        if self.drops and self.recipe != AUTO:
            raise UsageError(
                f"--drops and --recipe {self.recipe} both set the schedule of the learning rate: leave out one of them"
            )
        if self.rate_warmup and self.tolerance:
            raise UsageError(
                f"--rate-warmup {self.rate_warmup:g} begins with steps so small that --tolerance {self.tolerance:g} could"
                " end the run with them: leave out one of them"
            )
