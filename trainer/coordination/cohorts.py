"""Cohorts: the workers between two changes of their number or their mini-batch. Pure.

A run may be resumed with another number of workers or another mini-batch. The checkpoint with which it resumes ends a cohort
and begins the next one. All workers of a cohort begin at the first clock that none of the cohort before had reached, so that
the pair of a worker and a clock still names one step of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from pipeline.core.json_values import build, fits
from pipeline.core.specs import Spec
from trainer.coordination.passes import WORD


class CohortSize(NamedTuple):
    """The workers of a cohort, and the global mini-batch that they divide."""

    workers: int
    batch_size: int

    def __str__(self) -> str:
        return f"--workers {self.workers} --batch-size {self.batch_size}"


@dataclass(frozen=True)
class Cohort:
    """The workers of a part of a run, and the progress with which they begin.

    Attributes:
        workers: their number; 0 for the number of shards.
        batch_size: the global mini-batch.
        version: updates before the cohort, the version of the checkpoint with which it begins.
        accepted: gradients in those updates; in a run that counts rounds as if no worker had ever been absent.
        clock: the first clock of its workers.
        turn: passes over the rows that have ended: all workers of the cohort before had ended them, or the rest is left out;
            0 for a mixture, each of whose sets has passes of its own, and with --repartition importance.
        taken: mini-batches per worker before the cohort, of whatever size.
        epoch_steps: mini-batches per worker of this cohort that the epochs before it are worth.
        ends: clocks at which the workers of the cohort before ended.
        left_out: rows of passes that some workers of the cohort before had not drawn, and nobody draws.
        foreign: mini-batches of other workers' examples among the steps of each of those workers in their cohort; empty
            for a run without an exchange of examples.
    """

    workers: int = 0
    batch_size: int = 0
    version: int = 0
    accepted: int = 0
    clock: int = 0
    turn: int = 0
    taken: int = 0
    epoch_steps: int = 0
    ends: tuple[int, ...] = ()
    left_out: int = 0
    foreign: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "ends", tuple(self.ends))  # JSON has lists
        object.__setattr__(self, "foreign", tuple(self.foreign))

    @property
    def size(self) -> CohortSize:
        return CohortSize(self.workers, self.batch_size)

    @property
    def own_ends(self) -> tuple[int, ...]:
        """The clocks in ``ends``, without the mini-batches of other workers' examples: own rows are drawn by them."""
        return own_clocks(self.ends, self.foreign)

    def check(self, before: Cohort | None) -> None:
        """Raise ValueError unless this cohort can follow another one, or begin a run if there is none before it."""
        numbers = (self.version, self.accepted, self.clock, self.turn, self.taken, self.epoch_steps, self.left_out)
        if min(self.workers, self.batch_size) < 1 or min(numbers) < 0:
            raise ValueError(
                f"a cohort has {self.workers} workers, a mini-batch of {self.batch_size}, or a number below 0"
            )
        if before is None:
            if self != Cohort(self.workers, self.batch_size):
                raise ValueError("the first cohort does not begin the run")
        elif self.version < before.version or self.accepted < before.accepted or self.turn < before.turn:
            raise ValueError(f"a cohort of version {self.version} follows one of version {before.version}")
        # Each worker of the cohort before has ended at a clock, and this one begins at the greatest.
        elif len(self.ends) != before.workers or max(self.ends) != self.clock:
            raise ValueError(f"{before.workers} workers ended at {len(self.ends)} clocks, up to {self.clock}")
        elif len(self.foreign) not in (0, before.workers) or min(self.own_ends) < 0:
            raise ValueError(f"{before.workers} workers have {len(self.foreign)} numbers of foreign mini-batches")

    def last_step(self, *, steps: int | None, epochs: int, steps_per_epoch: int) -> int:
        """Return the clock at which a run of a length ends, if all workers keep pace.

        Args:
            steps: mini-batches per worker in the whole run; None if ``epochs`` counts.
            epochs: passes over the training examples.
            steps_per_epoch: mini-batches per worker and epoch in this cohort.
        """
        if steps is not None:
            return steps + self.clock - self.taken
        return epochs * steps_per_epoch + self.clock - self.epoch_steps

    def total(self, steps: int, num_workers: int) -> int:
        """Return the accepted gradients of a run in which all workers of this cohort end at the clock ``steps``."""
        return self.accepted + max(0, steps - self.clock) * num_workers

    def gradients(self, accepted: int, num_workers: int) -> int:
        """Return the gradients of workers of this cohort that the epochs up to ``accepted`` gradients are worth."""
        return accepted - self.accepted + self.epoch_steps * num_workers

    def mini_batches(self, epoch: float, steps_per_epoch: int) -> float:
        """Return the global mini-batches of the run up to a global epoch, of whatever size.

        steps_per_epoch: mini-batches per worker and epoch in this cohort."""
        return epoch * steps_per_epoch + (self.taken - self.epoch_steps)

    def epochs(self, steps: int, steps_per_epoch: int) -> float:
        """Return the global epoch at the clock ``steps``. steps_per_epoch: mini-batches per worker in this cohort."""
        return (steps - self.clock + self.epoch_steps) / steps_per_epoch

    def ends_epoch(self, steps: int, steps_per_epoch: int) -> bool:
        """Return whether an epoch ends at the clock ``steps``. steps_per_epoch: mini-batches per worker in this cohort."""
        return (steps - self.clock + self.epoch_steps) % steps_per_epoch == 0


def own_clocks(clocks: Sequence[int], foreign: Sequence[int]) -> tuple[int, ...]:
    """Return the clocks of workers without their foreign mini-batches. foreign: of each worker; empty for none."""
    return tuple(clock - count for clock, count in zip(clocks, foreign or [0] * len(clocks), strict=True))


FIRST = Cohort()


@dataclass(frozen=True)
class Cohorts(Spec):
    """All cohorts of a run in their order, the present one last; empty for a run with a single one."""

    entries: tuple[Cohort, ...] = ()

    @property
    def first(self) -> Cohort:
        return self.entries[0] if self.entries else FIRST

    @property
    def present(self) -> Cohort:
        return self.entries[-1] if self.entries else FIRST

    @property
    def previous(self) -> Cohort:
        """The cohort before the present one."""
        return self.entries[-2] if self.entries else FIRST

    def begins_at(self, version: int) -> bool:
        """Return whether the present cohort follows another one and begins with the checkpoint of a version."""
        return bool(self.entries) and self.present.version == version

    def up_to(self, version: int) -> tuple[Cohort, ...]:
        """Return the cohorts that have made an update up to a version. The first one always counts."""
        return tuple(each for each in self.entries if each is self.first or each.version < version)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Cohorts:
        """Build the cohorts from the result of ``to_json``. Raises ValueError for other values."""
        if not fits(values, dict[str, list[dict[str, Any]]]) or values.keys() - {"entries"}:
            raise ValueError("its cohorts are no list of objects")
        entries = tuple(build(Cohort, entry) for entry in values.get("entries", ()))
        if len(entries) == 1:
            raise ValueError("it has a single cohort")
        for number, cohort in enumerate(entries):
            cohort.check(entries[number - 1] if number else None)
        return cls(entries)

    def to_json(self) -> dict[str, Any]:
        lists = [{"ends": list(cohort.ends), "foreign": list(cohort.foreign)} for cohort in self.entries]
        return {"entries": [asdict(cohort) | values for cohort, values in zip(self.entries, lists, strict=True)]}


SINGLE = Cohorts()


class CheckpointProgress(NamedTuple):
    """The progress of a run in a checkpoint.

    Attributes:
        version: updates so far.
        accepted: gradients in them.
        clocks: of each worker.
        gossip: state of the exchange of examples.
    """

    version: int
    accepted: int
    clocks: Mapping[int, int]
    gossip: Mapping[str, Any] = {}

    def count_rounds(self, before: Cohort) -> CheckpointProgress:
        """Return the progress of a run that counts rounds, in which nobody makes up for the rounds of an absent worker.

        It is as if all workers of the cohort that ends, ``before``, had been present all the time."""
        accepted = before.accepted + (self.version - before.version) * before.workers
        return self._replace(accepted=accepted, clocks=dict.fromkeys(range(before.workers), self.version))


def next_cohort(
    before: Cohort,
    *,
    size: CohortSize,
    progress: CheckpointProgress,
    turn: int,
    left_out: int,
    steps_per_epoch: tuple[int, int],
    foreign: tuple[int, ...] = (),
) -> Cohort:
    """Return the cohort that follows another one.

    Args:
        before: the cohort that ends.
        size: of the next cohort.
        progress: of the checkpoint with which the next one begins.
        turn, left_out, foreign: see Cohort.
        steps_per_epoch: mini-batches per worker and epoch before and after.
    """
    own, later = steps_per_epoch
    version, accepted, clocks, _ = progress
    # Rounded down to whole steps: the next epoch then ends with an update of all workers, and no end of an epoch is
    # skipped, because the number of whole epochs stays the same.
    epoch_steps = before.gradients(accepted, before.workers) * later // (before.workers * own)
    return Cohort(
        *size,
        version,
        accepted,
        clock=max(clocks.values()),
        turn=turn,
        taken=before.taken + (accepted - before.accepted) // before.workers,
        epoch_steps=epoch_steps,
        ends=tuple(clocks[worker] for worker in range(before.workers)),
        left_out=left_out,
        foreign=foreign,
    )


def begin_passes(state: Mapping[str, Any], cohort: Cohort) -> dict[str, Any]:
    """Return the state of Passes with which a cohort continues the passes of the cohort before.

    Its workers have drawn nothing yet. The sum of all rows so far is given to worker 0. In a pass that is interrupted,
    rows of later passes do not count, so that its entry begins with their sum negated.

    state: of the cohort before; empty if rows have no fingerprints."""
    if not state:
        return {}
    sums: Mapping[str, int] = state["sums"]
    ended: Mapping[str, int] = state["ended"]
    total = sum(sums.values()) % WORD
    at = {}
    latest = max([*ended.values(), *map(int, state["at"])], default=0)
    for number in range(cohort.turn + 1, latest + 1):
        within, count = state["at"].get(str(number), (0, 0))
        if count != sum(value >= number for value in ended.values()):
            # A worker ended it in one mini-batch with another pass, so that its sum up to there is not known. The number of
            # workers that have ended it never becomes theirs, and it is logged together with the pass after it.
            at[str(number)] = [0, -cohort.workers]
            continue
        # The workers that have not ended the pass have drawn no rows of later ones.
        within += sum(sum_ for worker, sum_ in sums.items() if ended.get(worker, 0) < number)
        at[str(number)] = [(within - total) % WORD, 0]
    return {
        "sums": {"0": total},
        "ended": {str(worker): cohort.turn for worker in range(cohort.workers)},
        "at": at,
        "last": list(state["last"]),
    }
