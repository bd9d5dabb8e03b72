"""The stage in which a run continues from a checkpoint, by its plan or by a rule that has decided about the checkpoint."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from trainer.checkpoints.decisions import StopDecision, read_switch, stop_of
from trainer.checkpoints.read import evaluation_of, read_state
from trainer.checkpoints.resumption import state_to_restore
from trainer.checkpoints.slice_file import broken
from trainer.checkpoints.state import STATE, RunState, folder_of
from trainer.config import Config, RunFacts
from trainer.coordination.stragglers import reason_of
from trainer.exchange.strategy_switch import StrategySwitch
from trainer.home.place import Place
from trainer.runlog.events import log_event
from trainer.stages import Continuation, Stage, build_stages, stage_after, straggler_rule


def next_stage(
    config: Config, stages: Sequence[Stage], root: Place, state: RunState, stop: StopDecision | None = None
) -> Stage:
    """Return the stage that continues from a checkpoint: the one that made it, if the run ends early with it.

    Raises DataError for a checkpoint of a stage that the run does not have, and OSError.

    Args:
        config: the run.
        stages: its stages.
        root: folder of checkpoints.
        state: of the checkpoint.
        stop: the decision to end the run early; None if there is none.
    """
    if stop and stop.version == state.version and state.stage < len(stages):
        # The rule of the stage decides nothing any more.
        return stages[state.stage]._replace(by_rule=False)
    if state.stage + state.ends_stage >= len(stages):
        raise broken(folder_of(root, state.version) / STATE, f"is of stage {state.stage}")
    reason = _rule_reason(config, root, state)
    return stage_after(stages, state.stage, state.accepted, reason, has_ended=state.ends_stage)


def _rule_reason(config: Config, root: Place, state: RunState) -> str | None:
    """Return in words why a rule ends the stage with a checkpoint; None if it does not. Arguments as of ``next_stage``."""
    exchange = config.exchange
    if rule := straggler_rule(config):
        return reason_of(state.stragglers, rule.window)
    if not isinstance(exchange, StrategySwitch):
        return None
    switch = read_switch(root)
    if not switch or switch.version != state.version:
        return None
    where = " on held-out rows" if exchange.switch_on == "holdout" else ""
    change = f"{switch.change:.4g} % per epoch"
    return f"the loss{where} changes by {change}, less than {exchange.switch_threshold:g} %"


class SwitchWatch:
    """Looks whether the rule of a stage has decided.

    root: folder of checkpoints; look_s: least seconds between two looks."""

    def __init__(self, root: Place, look_s: float) -> None:
        self.root = root
        self.look_s = look_s
        self._looked_at = -math.inf

    def is_decided(self, last: int | None, now: float) -> bool:
        """Return whether the rule ends the stage, or no evaluation is missing by which it could.

        last: version of the complete checkpoint with which the stage ends in any case; None before it. now: the caller's
        clock in seconds."""
        if now - self._looked_at < self.look_s:
            return False
        self._looked_at = now
        if read_switch(self.root):
            return True
        return last is not None and evaluation_of(self.root, read_state(self.root, last)) is not None


def log_stage(log: Path, stage: Stage, state: RunState) -> None:
    """Log that a stage begins. log: folder of the log; state: of the checkpoint with which it begins."""
    config = stage.config
    # At the version of the checkpoint, so that a roll-back to an earlier one makes the stage void.
    log_event(
        log,
        "stage",
        stage=stage.number,
        exchange=config.exchange.name,
        protocol=config.protocol.name,
        version=state.version,
        epoch=state.epoch,
        seconds=state.seconds,
        learning_rate=config.learning_rate,
        momentum=config.coefficient,
        reason=stage.reason,
    )


def find_continuation(config: Config, facts: RunFacts, root: Place) -> Continuation | None:
    """Return where a start continues a run with several stages; None for other runs, and without a checkpoint.

    Changes nothing. Raises DataError as ``next_stage``, and OSError.

    config, facts: the run; root: folder of checkpoints."""
    stages = build_stages(config, facts.num_workers, facts.rows)
    if len(stages) == 1:
        return None
    stop = stop_of(root, config)
    state = state_to_restore(root, by_rule=stages[0].by_rule, stop=stop)
    if state is None:
        return None
    return Continuation(next_stage(config, stages, root, state, stop).number, state.version, state.accepted)
