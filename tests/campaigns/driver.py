"""jobs/distribution_aware.py as if on another host: whether another driver lives is told by its heart alone, and soon.

CHAOS_HOST: the name of that host; without it, the job is as it is."""

import os
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LEASE_S, HEARTBEAT_S = 3.0, 0.3

if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    if host := os.environ.get("CHAOS_HOST"):
        from pipeline.core.shardset import attempt

        here = attempt.whoami
        attempt.whoami = lambda: here() | {"host": host}
        assert attempt.Attempt.__init__.__kwdefaults__
        attempt.Attempt.__init__.__kwdefaults__.update(lease_s=LEASE_S, heartbeat_s=HEARTBEAT_S)
    runpy.run_path(str(ROOT / "jobs" / "distribution_aware.py"), run_name="__main__")
