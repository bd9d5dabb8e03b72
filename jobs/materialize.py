"""Write the shards of an assignment: a committed assignment, or any table of (id, worker)."""

import sys
from pathlib import Path

if Path(__file__).resolve().parent.name == "jobs":  # not a copy that Spark made in a folder that others may write to
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipeline.runs.materialize_command import run_materializing
from pipeline.runs.program import execute


def main() -> int:
    return run_materializing("materialize.py", __doc__)


if __name__ == "__main__":
    execute(main)
