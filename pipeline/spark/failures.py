"""Error lines for failures of a cluster that Spark reports as stack traces."""

from __future__ import annotations

import re

PYTHON = "start executors with a Python that has this project's packages, by PYSPARK_PYTHON or --archives"
# An error without a message is found only under a bare name, as Python prints built-in ones.
RAISED = re.compile(
    r"^(?:(?:: |Caused by: )?(?:[\w.$]+\.)?(\w*(?:Error|Exception|Interrupt)): (.+)|(\w+Error))$", re.MULTILINE
)
FULL_DISK = re.compile(r"No space left on device(?!: ')")  # Python's own message contains a path and is clear enough


def cluster_failure(text: str) -> str | None:
    """Return the error line for a failure whose remedy is missing in Spark's report; None for any other failure.

    text: the report, with its stack traces."""
    if match := re.search(r"No module named '([\w.]+)'", text):
        # The project's own packages can be shipped with the job; other packages must be installed on the executors.
        if match[1].partition(".")[0] in ("pipeline", "trainer"):
            return f"executors lack {match[1]}: ship it by --py-files (python -m pipeline zip makes the file)"
        return f"the executors' Python lacks {match[1]}: {PYTHON}"
    if "PYTHON_VERSION_MISMATCH" in text or "different version in worker" in text:
        return f"executors have another Python than the driver: {PYTHON}"
    if match := re.search(r'Cannot run program "([^"]+)"', text):
        return f"executors cannot run {match[1]}: {PYTHON}"
    if "All masters are unresponsive" in text:
        return "the Spark master does not answer: check --master, and that the master runs"
    if FULL_DISK.search(text):
        return (
            "no space left on a machine of the cluster: see the folders of spark.local.dir (YARN: its local folders) and"
            " TMPDIR there"
        )
    return None


def raised_error(text: str) -> str | None:
    """Return the innermost error in Spark's report, its type and message in one line; None if there is none.

    text: the report, with its stack traces."""
    errors = RAISED.findall(text)
    return ": ".join(filter(None, errors[-1])) if errors else None
