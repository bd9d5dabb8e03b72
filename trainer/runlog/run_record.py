"""The record of a run: config.json in its folder, whether the run has finished, and whether it has ended early."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.core.errors import DataError, UsageError
from pipeline.core.json_values import build, parse_object
from trainer.config import Config
from trainer.coordination.cohorts import Cohort, Cohorts
from trainer.home.place import Place, is_file
from trainer.run_files import CONFIG, RESULT

if TYPE_CHECKING:
    from trainer.data.shards import Shards  # loading it takes a second, which --help should not


@dataclass(frozen=True)
class RunRecord:
    """The content of config.json.

    Attributes:
        config: the configuration.
        num_workers, rows: workers and distinct training examples of the shards.
        shards: digest of the shards' content.
        simulated: settings of the virtual cluster, for virtual-time runs.
        threads: threads per worker, for a run on a cluster; 0 otherwise.
    """

    config: Config
    num_workers: int
    rows: int
    shards: str
    simulated: dict[str, Any] | None = None
    threads: int = 0

    @classmethod
    def from_config(cls, config: Config, shards: Shards) -> RunRecord:
        return cls(config, config.num_workers(shards.num_workers), shards.rows, shards.digest)

    @property
    def cohorts(self) -> Cohorts:
        """The cohorts of the run; a single one unless its workers or its mini-batch have changed."""
        single = Cohorts((Cohort(self.num_workers, self.config.data.batch_size),))
        return self.config.cohorts if self.config.cohorts.entries else single

    @property
    def steps(self) -> int:
        """The clock at which the workers end."""
        return self.config.steps_per_worker(self.rows)

    @property
    def mini_batches(self) -> int:
        """The mini-batches per worker in the whole run."""
        return self.config.mini_batches_per_worker(self.rows)

    def essentials(self) -> dict[str, Any]:
        """Return the values that a resumed run must not change, by name; the shards first, as they set the workers."""
        # A resume may change the workers, and says so in the cohorts.
        about = {"worker count": self.cohorts.first.workers, "shard digest": self.shards}
        machines = {name: value for name, value in (self.simulated or {}).items() if name != "workers"}
        virtual = {"virtual machines": machines} if self.simulated is not None else {}
        return about | virtual | self.config.essentials()

    def to_json(self) -> dict[str, Any]:
        about = {"num_workers": self.num_workers, "rows": self.rows, "digest": self.shards}
        virtual = {"simulated": self.simulated} if self.simulated is not None else {}
        threads = {"threads": self.threads} if self.threads else {}
        return {"config": self.config.to_json(), "shards": about} | virtual | threads

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> RunRecord:
        """Parse a record. Raises KeyError, TypeError, ValueError or UsageError if it is not of this version."""
        about = values["shards"]
        config = Config.from_json(values["config"])
        # ``build`` checks types, so that a damaged config.json is refused here with the name of the wrong value.
        return build(
            cls,
            {
                "config": config,
                "num_workers": about["num_workers"],
                "rows": about["rows"],
                "shards": about["digest"],
                "simulated": values.get("simulated"),
                "threads": values.get("threads", 0),
            },
        )


@dataclass(frozen=True)
class SavedRun:
    """The run in a folder, as its config.json describes it.

    Attributes:
        record: the content of config.json; None if there is none, or it is damaged.
        error: the error about a damaged config.json; None if it is whole or missing.
    """

    record: RunRecord | None = None
    error: DataError | None = None

    def intact(self) -> RunRecord | None:
        """Return the record; None if there is none. Raises DataError if it is damaged."""
        if self.error:
            raise self.error
        return self.record


def read_record(output: Place) -> RunRecord:
    """Read the record of the run in a folder. Raises OSError, and the errors of ``from_json`` if it is damaged."""
    return RunRecord.from_json(parse_object((output / CONFIG).read_bytes()))


def saved_run(output: Place, *, overwrite: bool = False) -> SavedRun:
    """Read the record of the run in a folder, if there is one. Raises OSError.

    overwrite: a run in the folder does not count, because it will be deleted."""
    # Without a folder a start is refused later.
    if overwrite or is_file(output):
        return SavedRun()
    try:
        return SavedRun(read_record(output))
    except (FileNotFoundError, NotADirectoryError):
        return SavedRun()
    except (ValueError, KeyError, TypeError, UsageError) as error:
        return SavedRun(
            error=DataError(
                f"{output / CONFIG} is damaged, or of another version ({error}); continue it with the version that wrote it,"
                " or choose another --output, or --overwrite"
            )
        )


def is_finished(output: Place) -> bool:
    """Return whether the run in a folder has finished."""
    return bool(_result(output).get("cause") == "finished")


def has_stopped_early(output: Place) -> bool:
    """Return whether evaluations have ended the finished run in a folder early."""
    return _result(output).get("early_stop") is not None


def _result(output: Place) -> dict[str, Any]:
    """Return the content of result.json; empty if it is missing, damaged or cannot be read."""
    try:
        return parse_object((output / RESULT).read_bytes())
    except (OSError, ValueError):
        return {}
