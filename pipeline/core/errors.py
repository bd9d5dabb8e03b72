"""Errors that a user can fix. Each has an exit code, and its message is one line."""

MOST_CHARACTERS = 1500  # of a message about damaged data


class JobError(Exception):
    """The run failed for a reason outside the input and the command line (exit 1)."""

    exit_code = 1


class DivergenceError(JobError):
    """The loss or the parameters of a training run are not finite (exit 1)."""


class UsageError(JobError):
    """The command line asks for something impossible (exit 2)."""

    exit_code = 2


class UnsuitableError(UsageError):
    """A strategy's parameters do not fit the rows, which was only found when these were read (exit 2)."""


class DataError(JobError):
    """The input or a committed shard set is broken (exit 3).

    Messages quote what is wrong in the data, which can be of any length, so a long one is cut in its middle."""

    exit_code = 3

    def __init__(self, message: str) -> None:
        half = MOST_CHARACTERS // 2
        super().__init__(message if len(message) <= MOST_CHARACTERS else f"{message[:half]} ... {message[-half:]}")


def error_class(exit_code: int) -> type[JobError]:
    """Return the class of the error with which a process has ended; JobError for any other exit code."""
    return {error.exit_code: error for error in (UsageError, DataError)}.get(exit_code, JobError)
