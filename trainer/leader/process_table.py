"""The processes of workers that exchange among themselves: the last one to appear counts, and the one before must end."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class ProcessTable:
    """The current process of each worker.

    Attributes:
        current: by worker, the random number of its process.
        replaced: processes that a later one has replaced, for good.
    """

    current: dict[int, int] = field(default_factory=dict)
    replaced: set[int] = field(default_factory=set)

    def is_replaced(self, worker: int, process: int) -> bool:
        """Note that a process of a worker has sent a message, and return whether a later process has replaced it.

        A process whose first message this is counts as the later one."""
        if process in self.replaced:
            return True
        before = self.current.get(worker)
        if before is not None and before != process:
            self.replaced.add(before)
        self.current[worker] = process
        return False
