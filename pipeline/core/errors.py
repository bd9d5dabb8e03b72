"""The ways a job ends: every error that a user can mend carries its exit code and reads as one line."""


class JobError(Exception):
    """The run failed for a reason outside the input and the command line (exit 1)."""

    exit_code = 1


class Diverged(JobError):
    """A training run whose loss or parameters are no numbers any more."""


class UsageError(JobError):
    """The command line asks for something that cannot be done (exit 2)."""

    exit_code = 2


class UnsuitableError(UsageError):
    """A strategy's parameters do not suit the rows, as turned out once these were looked at."""


class DataError(JobError):
    """The input, or a committed shard set, breaks its contract (exit 3)."""

    exit_code = 3
