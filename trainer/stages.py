"""The stages of a run: which exchange and protocol train it until when. Pure.

A stage ends with a checkpoint. The next stage begins with that checkpoint as a new generation, in which the version, the
accepted gradients, the clocks and the schedule of the learning rate continue. A run that is killed at any moment
therefore continues in the right stage: the stage follows from the checkpoint that is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from trainer.config import Config
from trainer.coordination.stragglers import StragglerRule
from trainer.exchange.switching import Switching
from trainer.exchange.sync_switch import SyncSwitch

START = "start of the run"


class Stage(NamedTuple):
    """A stage of a run.

    Attributes:
        number: its number, from 0.
        config: the configuration of the run with the exchange and protocol of the stage. Learning rate and momentum
            default to those of that protocol.
        until: accepted gradients of the run at which the stage ends; None if it ends with the run.
        reason: why the stage begins, in words; "" until a rule has decided that it does.
        by_rule: whether a rule may end the stage earlier, after the evaluation of an epoch. ``until`` is then the end of
            the last epoch after which it may; if it has not decided by then, the stage lasts until the end of the run.
        straggler_rule: the rule by which a straggler ends the stage before ``until``; None for no such rule.
    """

    number: int
    config: Config
    until: int | None
    reason: str
    by_rule: bool = False
    straggler_rule: StragglerRule | None = None

    @property
    def may_end_early(self) -> bool:
        """Return whether a rule may end the stage before ``until``."""
        return self.by_rule or self.straggler_rule is not None


class Continuation(NamedTuple):
    """The checkpoint from which a start continues a run.

    Attributes:
        stage: number of the stage that continues from it, from 0.
        version: number of updates so far.
        accepted: gradients in those updates.
    """

    stage: int
    version: int
    accepted: int


def straggler_rule(config: Config) -> StragglerRule | None:
    """Return the rule by which a straggler ends the first stage of a run; None if the run has none."""
    exchange = config.exchange
    if not isinstance(exchange, SyncSwitch) or exchange.straggler is None:
        return None
    return StragglerRule(exchange.straggler, exchange.straggler_window)


def build_stages(config: Config, num_workers: int, rows: int) -> tuple[Stage, ...]:
    """Return the stages of a run. num_workers: n; rows: distinct training examples.

    After a change of workers the switch comes at the same share of the epochs, or at once if that is over. Whether the run
    is in its second stage already is in its checkpoint."""
    configs = config.stage_configs()
    if len(configs) == 1:
        return (Stage(0, configs[0], None, START),)
    first, second = configs
    exchange = config.exchange
    assert isinstance(exchange, Switching), "only these have stages"
    cohort = config.cohorts.present
    per_epoch = config.steps_per_epoch(rows)
    # As if the present workers had trained all epochs of the run: with so many steps each, the first at clock ``begin``.
    begin = cohort.clock - cohort.epoch_steps
    steps = config.steps_per_worker(rows) - begin
    if exchange.switches_by_rule:
        last = -(-steps // per_epoch) - 1  # a switch after the last epoch would leave nothing for the second stage
        latest = cohort.total(begin + last * per_epoch, num_workers)
        return Stage(0, first, latest, START, by_rule=True), Stage(1, second, None, "")
    switch = exchange.switch_step(steps, per_epoch)
    # With a switch at the end of the run there is no second stage, and with one at the start no first stage.
    until = None if switch >= steps else cohort.total(begin + switch, num_workers)
    reason = START if until == 0 else exchange.switch_reason()
    rule = straggler_rule(config)
    return Stage(0, first, until, START, straggler_rule=rule), Stage(1, second, None, reason)


def stage_after(
    stages: Sequence[Stage], index: int, accepted: int, reason: str | None = None, *, has_ended: bool = False
) -> Stage:
    """Return the stage that continues from a checkpoint. It is never earlier than the stage of the checkpoint.

    Args:
        stages: of the run.
        index: number of the stage that made the checkpoint.
        accepted: gradients in the checkpoint.
        reason: why a rule ends the stage with this checkpoint; None if it does not.
        has_ended: whether the stage has ended with this checkpoint, maybe by the plan of another length or other workers.
    """
    stage = stages[index]
    if stage.may_end_early and reason is not None:
        return stages[index + 1]._replace(reason=reason)
    if has_ended:
        return stages[index + 1]
    if stage.by_rule:
        return stage if stage.until is not None and accepted < stage.until else stage._replace(until=None)
    return next(stage for stage in stages[index:] if stage.until is None or accepted < stage.until)
