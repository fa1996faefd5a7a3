"""Which process this is: a forked child has all objects of its parent, but neither its threads nor its connections."""

import os

from shardlite.errors import CommError


class Owner:
    """The process that something belongs to."""

    def __init__(self) -> None:
        self._number = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this is that process."""
        return os.getpid() == self._number

    def check(self) -> None:
        """Check that this is that process.

        Raises:
            CommError: it is a child of it.
        """
        if not self.is_here:
            raise CommError(
                f"process {os.getpid()} was forked from {self._number}, which is a rank: it has no connections to "
                "other ranks. It may use what it has a copy of: at stages 0 to 2 full weights, if they were up to date "
                "when it was forked. Call what takes other ranks, such as full_state_dict(), before the fork"
            )
