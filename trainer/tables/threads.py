"""Sets how the threads of torch wait, before torch is loaded."""

from __future__ import annotations

import os

POLICY = "OMP_WAIT_POLICY"  # of OpenMP, whose threads compute torch's operations


def sleep_while_waiting() -> None:
    """Make torch's threads sleep between operations, unless the user has set OMP_WAIT_POLICY.

    By default they spin, and take the cores from each other as soon as other programs run on them. Has no effect after
    torch is loaded, and none on results."""
    os.environ.setdefault(POLICY, "passive")
