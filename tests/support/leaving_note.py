"""A role that writes the value of an environment variable into a file, and ends."""

from __future__ import annotations

import os
from pathlib import Path


def main(text: str) -> None:
    Path(text).write_text(os.environ.get("WIDTH_OF_A_NET", ""))
