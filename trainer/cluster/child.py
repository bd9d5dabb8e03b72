"""``python -m trainer.cluster.child``: one part as a process of its own, told by its standard input what it is."""

from __future__ import annotations

import json
import os
import sys
import threading

from trainer.cluster.launcher import Slot
from trainer.cluster.part import run_part


def main() -> int:
    """Returns 0 once the part has told its end, whatever that was. Raises Lost."""
    invitation, slot = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_starter, name="lifeline", daemon=True).start()
    run_part(invitation, Slot(**slot))
    return 0


def _end_with_starter() -> None:
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
