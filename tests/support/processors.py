"""The same program on several processors: kernels of OpenBLAS and vector units of numpy that it would choose there."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from typing import Any

from tests.clusters.machine import ROOT


def assert_same_bits(program: str) -> None:
    """Run a program as several processors would: its results agree, though floats computed plainly are rounded apart.

    program: prints a JSON list of the digest of its results, that of a plain product of floats, and the architectures of
    the BLAS kernels in use."""
    numpys_own: Any = importlib.import_module("numpy._core._multiarray_umath")
    chosen = " ".join(name for name in numpys_own.__cpu_dispatch__ if numpys_own.__cpu_features__[name])
    found = []
    for more in (
        {"OPENBLAS_NUM_THREADS": "1"},
        {"OPENBLAS_NUM_THREADS": "2", "OPENBLAS_CORETYPE": "Haswell"},
        {"OPENBLAS_NUM_THREADS": "1", "OPENBLAS_CORETYPE": "Prescott", "NPY_DISABLE_CPU_FEATURES": chosen},
    ):
        env = {**os.environ, "PYTHONPATH": str(ROOT), **more}
        done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
        found.append(json.loads(done.stdout))
    assert len({digest for digest, _, _ in found}) == 1
    if len({str(architectures) for _, _, architectures in found}) > 1:
        assert len({plain for _, plain, _ in found}) > 1, "these kernels round in one way: the test shows nothing"
