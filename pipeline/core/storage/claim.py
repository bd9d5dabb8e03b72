"""The claim of a path: of all processes that write a record there, exactly one succeeds, and all learn which one.

Versions of a set, the lease of a run's home, the starts and segments of its log and the records of a followed set rely
on it. A record is never replaced, and is deleted only once no process needs it."""

from __future__ import annotations

from pipeline.core.storage.store import Store


def claim(store: Store, uri: str, record: bytes, *, staged: str | None = None) -> bytes | None:
    """Write a record at a path if there is none, and return the one that is stored there.

    The caller owns the path if the stored record equals its own. Claimants that must exclude each other therefore write
    different records, for example with a random token; equal records share the claim. Safe to retry: if the answer to a
    write was lost, the stored record tells whether it was carried out. Costs a ``put_new`` or a rename, and one read if
    that fails.

    Args:
        store: the store of the path.
        uri: the path.
        record: the content to write.
        staged: a file with that content, which is moved to the path (default: a draft beside the path).

    Returns:
        The stored record; None if the path was taken and the record there has been deleted since.

    Raises:
        OSError: the outcome is unknown, or nothing was written.
    """
    try:
        if staged is None:
            store.put_new(uri, record)
        else:
            store.rename(staged, uri)
    except OSError as error:
        # The write may have succeeded although its answer was lost: the stored record decides.
        try:
            return store.read(uri)
        except OSError as unread:
            # If nothing can be read, the error of the write says more, unless it is only that the path is taken.
            if not isinstance(error, FileExistsError):
                raise error from None
            if not isinstance(unread, FileNotFoundError):
                raise
            return None
    return record
