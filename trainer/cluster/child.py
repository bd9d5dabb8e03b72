"""``python -m trainer.cluster.child``: one part as a process, which reads its launch arguments and slot from stdin."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading

from pipeline.core.errors import JobError
from trainer.cluster.launcher import PartExecution
from trainer.cluster.part import run_part


def main() -> int:
    """Run the part. Returns 0 once it has reported its end, even a failure, and 1 if it should be restarted."""
    # Sent to all processes; the starter reacts. ``run_part`` handles SIGTERM meanwhile, which this host alone may get.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    arguments, slot = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_starter, name="lifeline", daemon=True).start()
    try:
        run_part(arguments, PartExecution(**slot))
    except JobError as error:
        print(f"this host's part of the run ends: {error}", file=sys.stderr)
        return 1
    return 0


def _end_with_starter() -> None:
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
