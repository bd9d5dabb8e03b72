"""``python -m trainer.cluster.child``: one part as a process of its own, told by its standard input what it is."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading

from trainer.cluster.launcher import Slot
from trainer.cluster.part import run_part
from trainer.cluster.rendezvous import Lost


def main() -> int:
    """Returns 0 once the part has told its end, whatever that was."""
    for number in (signal.SIGINT, signal.SIGTERM):  # terminals and schedulers send them to all; the starter decides
        signal.signal(number, signal.SIG_IGN)
    invitation, slot = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_starter, name="lifeline", daemon=True).start()
    try:
        run_part(invitation, Slot(**slot))
    except Lost as error:
        print(f"a host's part ends: {error}", file=sys.stderr)
        return 1
    return 0


def _end_with_starter() -> None:
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
