"""The log of a run, made durable up to a checkpoint."""

from __future__ import annotations

from contextlib import suppress

from pipeline.core.atomic import sync
from trainer.home.folders import Folders
from trainer.home.segments import copy
from trainer.run_files import PUSHES
from trainer.runlog.example_ledger import ExampleLedger


def secure_log(folders: Folders, ledger: ExampleLedger | None, version: int) -> None:
    """Make the log durable up to the checkpoint of a version before that becomes visible.

    Raises OSError, and SupersededError if a later start leads the run.

    Args:
        folders: of the run.
        ledger: of the checkpoint's generation; None without --example-ledger.
        version: of the checkpoint.
    """
    if not folders.is_local:
        copy(folders)
    else:
        with suppress(FileNotFoundError):
            sync(folders.work / PUSHES)
    if ledger:
        ledger.write(version)
