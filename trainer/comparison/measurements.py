"""The measurements of a run, for a comparison with others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from trainer.checkpoints.read import newest_state
from trainer.config import Config
from trainer.coordination.cohorts import Cohort
from trainer.exchange import EXCHANGES
from trainer.leader.peer_checkpoints import PeerTimes
from trainer.plan import FLOAT_BYTES
from trainer.run_files import CHECKPOINTS
from trainer.runlog.kinds.base import LogEvent
from trainer.runlog.kinds.peers import ConsensusEvent
from trainer.runlog.kinds.run import StageEvent
from trainer.runlog.read import evaluations
from trainer.runlog.result import Result

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Measurements:
    """The measurements of a run. The times of a run in virtual time are virtual.

    Attributes:
        label: the contender, as written after --compare, or the folder of the run.
        images_per_s: training images per second.
        updates: number of updates.
        refused: number of refused gradients.
        staleness_mean: in versions.
        staleness_max: in versions.
        sent_bytes: bytes of gradients, parameters and models that all processes have sent; None before the first
            checkpoint.
        total_s: seconds of training.
        final_loss: of the last evaluation; without evaluations the end of ``loss``.
        final_accuracy: of the last evaluation; None without evaluations.
        consensus: root of the mean squared distance of the workers' models from their mean, at the end of the last
            epoch; None if they have one model.
        seconds: float64 [G], times of accepted gradients.
        loss: float64 [G], mean loss of the last N accepted gradients at these times, for N workers.
        evaluated_s: float64 [E], times of the evaluated checkpoints.
        accuracy: float64 [E], evaluation accuracy at these times.
        to_loss: seconds until ``loss`` is as low as the goal, None if never.
        to_accuracy: seconds until ``accuracy`` is as high as the goal, None if never.
    """

    label: str
    images_per_s: float | None
    updates: int
    refused: int
    staleness_mean: float | None
    staleness_max: int | None
    sent_bytes: int | None
    total_s: float | None
    final_loss: float | None
    final_accuracy: float | None
    consensus: float | None
    seconds: Floats
    loss: Floats
    evaluated_s: Floats
    accuracy: Floats
    to_loss: float | None = None
    to_accuracy: float | None = None


def measure(label: str, config: Config, result: Result, events: Sequence[LogEvent]) -> Measurements:
    """Return the measurements of a run so far, without the times to a goal.

    Its loss curve is the moving average over as many accepted pushes as there are workers.

    Args:
        label: see Measurements.
        config: the configuration of the run.
        result: its result.
        events: its events; the ``train`` events may be thinned.
    """
    pushes = result.pushes()
    used = pushes[pushes["accepted"] == 1]
    loss = used["loss"].rolling(result.num_workers).mean().to_numpy()
    is_known = ~np.isnan(loss) & bool(np.nansum(loss))  # all False if no losses were computed: they are all 0 then
    loss = loss[is_known]
    evaluated = [event for event in evaluations(events) if event.accuracy is not None and event.seconds is not None]
    distances = [event.distance for event in events if isinstance(event, ConsensusEvent)]
    return Measurements(
        label=label,
        images_per_s=result.images_per_second,
        updates=result.updates,
        refused=result.rejected,
        staleness_mean=result.staleness["mean"],
        staleness_max=result.staleness["max"],
        sent_bytes=sent_bytes(config, result, events, pushes["version"].to_numpy()),
        total_s=result.seconds,
        final_loss=float(loss[-1]) if result.final_loss is None and len(loss) else result.final_loss,
        final_accuracy=result.final_accuracy,
        consensus=distances[-1] if distances else None,
        seconds=used["seconds"].to_numpy()[is_known],
        loss=loss,
        evaluated_s=np.array([event.seconds for event in evaluated], np.float64),
        accuracy=np.array([event.accuracy for event in evaluated], np.float64),
    )


def sent_bytes(
    config: Config, result: Result, events: Sequence[LogEvent], versions: Ints, until: int | None = None
) -> int | None:
    """Return the bytes that all processes have sent for the gradients of a run, headers apart; None without checkpoints.

    Args:
        config: the configuration of the run.
        result: its result.
        events: its events that count.
        versions: of every push that counts, refused ones included.
        until: the version up to which bytes are counted; None for the end. Workers with models of their own report their
            bytes at the ends of epochs only: None is returned for another version.
    """
    root = result.output / CHECKPOINTS
    state = newest_state(root)
    if state is None:
        return None
    times = PeerTimes.from_state(state)
    if times.begun:  # workers with models of their own, whose links the engine counts
        if until is None:
            return times.sent_bytes
        reports = {event.version: event.sent_bytes for event in events if isinstance(event, ConsensusEvent)}
        return reports.get(until)
    versions = versions if until is None else versions[versions <= until]
    stages = [event for event in events if isinstance(event, StageEvent)]
    cohorts = config.cohorts.entries or (Cohort(result.num_workers),)
    # A stage, and a cohort of workers, made the updates of the versions after the one that it began with.
    begins = sorted({event.version for event in stages} | {cohort.version for cohort in cohorts})
    pushes = [int((versions > begin).sum()) for begin in begins]
    sizes = []
    for begin in begins:
        names = [event.exchange for event in stages if event.version <= begin]
        exchange = EXCHANGES[names[-1]]() if names else config.exchange
        workers = [each.workers for each in cohorts if each.version <= begin][-1]
        sizes.append(exchange.vectors_per_gradient(workers))
    gradients = [more - fewer for more, fewer in zip(pushes, [*pushes[1:], 0], strict=True)]
    gradients[0] += len(versions) - pushes[0]
    vectors = sum(count * size for count, size in zip(gradients, sizes, strict=True))
    return round(vectors * FLOAT_BYTES * (state.num_parameters + state.num_buffers))


def lowest_common_loss(runs: Sequence[Measurements]) -> float | None:
    """Return the lowest loss that every run with losses reaches; None if no run has any."""
    return max((float(run.loss.min()) for run in runs if len(run.loss)), default=None)


def highest_common_accuracy(runs: Sequence[Measurements]) -> float | None:
    """Return the highest evaluation accuracy that every run with evaluations reaches; None if no run has any."""
    return min((float(run.accuracy.max()) for run in runs if len(run.accuracy)), default=None)


def time_to(values: Floats, seconds: Floats, goal: float | None) -> float | None:
    """Return the seconds until a value is first at most ``goal``; None if it never is, or without a goal."""
    reached = np.flatnonzero(values <= (np.nan if goal is None else goal))
    return float(seconds[reached[0]]) if len(reached) else None


def with_times(run: Measurements, loss: float | None, accuracy: float | None) -> Measurements:
    """Return a run with the times to the goals. loss, accuracy: the goals; None: there is none."""
    falling = None if accuracy is None else -accuracy
    return replace(
        run,
        to_loss=time_to(run.loss, run.seconds, loss),
        to_accuracy=time_to(-run.accuracy, run.evaluated_s, falling),
    )
