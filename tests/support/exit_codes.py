"""The exit code of a command that runs in the process of the tests."""

from __future__ import annotations

import pytest

from pipeline.__main__ import main


def ended(*argv: object) -> int:
    """Return the exit code of a command of ``python -m pipeline``."""
    with pytest.raises(SystemExit) as end:
        main([str(value) for value in argv])
    assert isinstance(end.value.code, int)
    return end.value.code
