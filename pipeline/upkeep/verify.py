"""``python -m pipeline verify``: checks the files of a committed set, and with ``--deep`` every byte of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pipeline.core import command_line
from pipeline.core.command_line import as_typed
from pipeline.core.errors import DataError
from pipeline.core.program import execute
from pipeline.core.shardset.commit import has_leftovers
from pipeline.core.shardset.damage import all_damage
from pipeline.core.shardset.manifest import ShardSet, missing_files, open_committed
from pipeline.core.storage.store import configured_store

READERS = 16  # files read at once
MANY = 20  # lines of damage that are printed


def map_in_threads(fn: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """Map a function over items in threads; see ``Run``. Hashing and reading release the GIL."""
    with ThreadPoolExecutor(READERS) as pool:
        return list(pool.map(fn, items))


def verify(shards: ShardSet, *, deep: bool, checked: Collection[str] = ()) -> dict[str, str]:
    """Return a line per damaged file, by its path: by names and sizes, or by content if ``deep``.

    checked: paths of files whose content is not read."""
    return all_damage(shards, map_in_threads, checked) if deep else missing_files(shards)


def verify_newest(shards: ShardSet, *, deep: bool) -> tuple[ShardSet, list[str]]:
    """Verify a set that others may replace or append to meanwhile, and return the version that was read last and its damage.

    A commit deletes files of the version before. Their loss is no damage, but then the new files must be read too."""
    damage: dict[str, str] = {}
    checked = set[str]()
    while True:
        damage |= verify(shards, deep=deep, checked=checked)
        checked |= shards.paths()
        newest = open_committed(shards.store, shards.uri) if damage else shards
        listed = newest.paths()
        if damage.keys() <= listed:
            return shards, [*damage.values()]
        damage = {path: line for path, line in damage.items() if path in listed}
        shards = newest


def main(argv: Sequence[str]) -> None:
    """Compare the files of a committed set with its manifest; exit code 3 if any are damaged."""
    flags = command_line.parser("python -m pipeline verify", main.__doc__, "")
    flags.add_argument("uri", metavar="URI", help="folder of a committed set, local, hdfs:// or s3://")
    flags.add_argument(
        "--deep", action="store_true", help="also read every file: compare SHA-256, and check saved models"
    )

    def run() -> int:
        args = command_line.parse(flags, argv)
        shards, damage = verify_newest(open_committed(configured_store(), args.uri), deep=args.deep)
        for line in damage[:MANY]:
            print(line)
        files = len(shards.hashed_files())
        if damage:
            # A stream cannot make its committed rows again.
            is_stream = shards.manifest.stream is not None
            advice = "restore them from a copy" if is_stream else "repeat the job with --overwrite"
            are_unreadable = any("cannot be read" in line for line in damage)
            state = "are damaged or unreadable; if the store is well," if are_unreadable else "are damaged;"
            raise DataError(f"{shards.uri}: {len(damage):,} of {len(shards.paths()):,} files {state} {advice}")
        if args.deep:
            print(f"{shards.uri}: intact, every byte of {files:,} files is as committed")
        else:
            print(f"{shards.uri}: all {files:,} files exist and have the right size; --deep reads every byte")
        # Leftovers are no damage: readers only use files that the manifest lists.
        if has_leftovers(shards.store, shards):
            print(
                "there are files of killed or running runs beside the set;"
                f" {as_typed('python -m pipeline clean')} {shards.uri} lists those that can be deleted"
            )
        return 0

    execute(run, interrupted="run it again")
