"""Fork detection. A forked child has copies of its parent's objects, but not the parent's threads and connections."""

import os

from shardlite.errors import CommError


class Owner:
    """Record of the process that created this object."""

    current = os.getpid()
    """Number of the current process. Each submitted operation is checked, and `os.getpid` would be a system call."""

    def __init__(self) -> None:
        self._number = Owner.current

    @property
    def is_here(self) -> bool:
        """Whether the current process is the owner."""
        return Owner.current == self._number

    def check(self) -> None:
        """Check that the current process is the owner.

        Raises:
            CommError: the current process is a forked child.
        """
        if Owner.current != self._number:
            raise CommError(
                f"process {Owner.current} was forked from {self._number}, which is a rank: it has no connections to "
                "other ranks. It may use its copy of the full weights, which exist at stages 0 to 2, if they were up "
                "to date when it was forked. Call collective functions, such as full_state_dict(), before the fork"
            )


def _after_fork() -> None:
    Owner.current = os.getpid()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
