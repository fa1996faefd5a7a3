"""Fork detection. A forked child has copies of its parent's objects, but not the parent's threads and connections."""

import os

from shardlite.errors import CommError


class Owner:
    """Record of the process that created this object."""

    def __init__(self) -> None:
        self._number = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether the current process is the owner."""
        return os.getpid() == self._number

    def check(self) -> None:
        """Check that the current process is the owner.

        Raises:
            CommError: the current process is a forked child.
        """
        if os.getpid() != self._number:
            raise CommError(
                f"process {os.getpid()} is a forked child of rank process {self._number} and cannot communicate. It "
                "can read the weights it inherited (stages 0 to 2). Call collectives, such as full_state_dict(), "
                "before forking"
            )
