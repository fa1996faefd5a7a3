"""Boards for failure reports without a process group."""

from collections.abc import MutableMapping


class SharedBoard:
    """A board in the memory of one process."""

    def __init__(self) -> None:
        self._notes: MutableMapping[int, str] = {}

    def put(self, rank: int, note: str) -> None:
        """Replace the report of `rank`."""
        self._notes[rank] = note

    def read(self, rank: int) -> str:
        """Return the report of `rank`, or `""`."""
        return self._notes.get(rank, "")
