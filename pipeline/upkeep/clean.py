"""``python -m pipeline clean``: lists the leftovers of killed runs beside a committed set, and deletes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipeline.core import command_line
from pipeline.core.errors import DataError, JobError
from pipeline.core.program import execute
from pipeline.core.shardset.attempt import ATTEMPTS, Attempt, refuse_link, seems_alive
from pipeline.core.shardset.commit import own_files, remove_leftovers, unlisted_files
from pipeline.core.shardset.manifest import read_committed
from pipeline.core.shardset.versions import NAME, is_behind
from pipeline.core.storage.store import Store, configured_store

MANY = 20  # paths that are printed


class Leftovers(NamedTuple):
    """The leftovers of killed runs in the folder of a committed set.

    Attributes:
        files: files of this program that the manifest does not list.
        attempts: folders of dead runs.
        live: folders of runs that may be running.
        behind: whether manifest.json is older than the set.
    """

    files: list[str]
    attempts: list[str]
    live: list[str]
    behind: bool

    @property
    def paths(self) -> list[str]:
        return [*self.attempts, *self.files]

    def subtract(self, left: Leftovers) -> Leftovers:
        """Return those that are gone. left: the leftovers after a deletion, by which runs that may be running count."""
        present = {*left.files, *left.attempts, *left.live}
        attempts = [path for path in self.attempts if path not in present]
        return Leftovers([path for path in self.files if path not in present], attempts, left.live, self.behind)


def leftovers(store: Store, uri: str) -> Leftovers:
    """Return the files that killed runs have left in a folder, without writing anything.

    Files of runs that may be running do not count. Raises DataError if the folder does not exist."""
    uri = store.resolve(uri)
    if not store.exists(uri):
        raise DataError(f"{uri} does not exist; name the folder of a shard set")
    refuse_link(uri)
    committed = read_committed(store, uri)
    attempts = [entry for entry in store.list(f"{uri}/{ATTEMPTS}") if entry.is_dir]
    live = [entry.path for entry in attempts if seems_alive(store, uri, entry.name)]
    dead = [entry.path for entry in attempts if entry.path not in live]
    stray = unlisted_files(own_files(store, uri)[0], committed, lambda attempt: seems_alive(store, uri, attempt))
    return Leftovers([file.path for file in stray], dead, live, is_behind(store, uri))


def clean(store: Store, uri: str) -> int:
    """Delete the leftovers; return the number of deleted files outside of the attempts' folders."""
    with Attempt(store, store.resolve(uri)) as attempt:  # its start deletes the folders of dead attempts
        return remove_leftovers(attempt)


def print_some(paths: Sequence[str]) -> None:
    """Print up to MANY paths, one per line, and the number of the others."""
    for path in paths[:MANY]:
        print(path)
    if len(paths) > MANY:
        print(f"... and {len(paths) - MANY:,} more")


def main(argv: Sequence[str]) -> None:
    """List the files that killed runs have left beside a committed set, and delete them with --yes."""
    flags = command_line.parser("python -m pipeline clean", main.__doc__, "")
    flags.add_argument("uri", metavar="URI", help="folder of a shard set, local, hdfs:// or s3://")
    flags.add_argument("--yes", action="store_true", help="delete the listed files")

    def run() -> int:
        args = command_line.parse(flags, argv)
        store = configured_store()
        # Listed before the deletion, which leaves nothing to list.
        listed = leftovers(store, args.uri)
        undeleted: list[str] = []
        if args.yes and (listed.paths or listed.behind):
            clean(store, args.uri)
            # The store's clock, by which the deletion judges, can differ from this machine's.
            after = leftovers(store, args.uri)
            undeleted = [path for path in listed.paths if path in after.paths]
            listed = listed.subtract(after)
        print_some(listed.paths)
        if listed.paths:
            verb = "deleted" if args.yes else "would be deleted; --yes deletes them"
            print(f"{len(listed.attempts)} attempts and {len(listed.files)} files: {verb}")
        elif not undeleted:
            print("no leftovers")
        if listed.behind:
            verb = "is" if args.yes else "would be"
            print(f"{NAME} is older than the set, because a run was killed during its commit: it {verb} updated")
        if listed.live:
            print(f"{len(listed.live)} runs may still be active there: their files are kept")
        if undeleted:
            print_some(undeleted)
            raise JobError(
                f"{len(undeleted)} attempts and files are still there: run it as their owner, unless their run is active by"
                " the store's clock"
            )
        return 0

    execute(run, interrupted="run it again")
