"""Notes: when something has failed each rank says what it was doing, so that every error can tell of all ranks.

Nothing is said, and nothing costs, before. The way of the messages themselves is closed then (gloo closes a connection
that has timed out), so notes go where the ranks found each other: the store of the process group.
"""

import time
from collections.abc import MutableMapping
from contextlib import suppress
from typing import Protocol

import torch.distributed as dist

PATIENCE = 2.0
"""Seconds after its first failure in which a rank waits for the notes of others, which fail at about that time."""

_LOOK = 0.02
"""Seconds between two looks."""


class Board(Protocol):
    """Where notes are left."""

    def put(self, rank: int, note: str) -> None:
        """Leave a rank's note, instead of its last one."""

    def read(self, rank: int) -> str:
        """Return a rank's note, which is empty if it has left none."""


class Notes:
    """The notes of ranks that exchange messages, as one of them sees them."""

    def __init__(self, board: Board, rank: int, world_size: int, patience: float = PATIENCE) -> None:
        self._board = board
        self._rank = rank
        self._others = [other for other in range(world_size) if other != rank]
        self._patience = patience
        self._since: float | None = None  # when the note that stands was left, which lanes ask for beside each other

    def leave(self, note: str) -> float:
        """Say what this rank was doing; what it has said before stays: later failures follow from the first.

        Return when the note that stands was left, by `time.monotonic()`.
        """
        since = self._since
        if since is None:
            since = self._since = time.monotonic()
            with suppress(RuntimeError):  # the store may be gone with the process that kept it
                self._board.put(self._rank, note)
        return since

    def withdraw(self) -> None:
        """Take the note back: this rank goes on."""
        if self._since is not None:
            self._since = None
            with suppress(RuntimeError):
                self._board.put(self._rank, "")

    def compare(self, note: str) -> str:
        """Leave a note, wait for those of the others, and return what all others were doing.

        What fails after that in this rank does not wait for them again.
        """
        deadline = self.leave(note) + self._patience
        told: dict[int, str] = {}
        try:
            while len(told) < len(self._others):
                told |= {other: said for other in self._others if other not in told and (said := self._read(other))}
                if time.monotonic() > deadline:
                    break
                time.sleep(_LOOK)
        except RuntimeError as error:
            return f" (What other ranks were doing is not known: {error})"
        return "".join(f"\n  Meanwhile rank {other}: {told.get(other, _SILENT)}" for other in self._others)

    def _read(self, other: int) -> str:
        return self._board.read(other)


_SILENT = "has said nothing; it computes, waits for something else, or is gone"


class StoreBoard:
    """A board in the store of the default process group, under a name that all its ranks use."""

    def __init__(self, name: str) -> None:
        self._store = dist.distributed_c10d.PrefixStore(f"shardlite/{name}", dist.distributed_c10d._get_default_store())

    def put(self, rank: int, note: str) -> None:
        """Leave a rank's note, instead of its last one."""
        self._store.set(str(rank), note)

    def read(self, rank: int) -> str:
        """Return a rank's note, which is empty if it has left none."""
        if not self._store.check([str(rank)]):
            return ""
        return str(self._store.get(str(rank)).decode())


class SharedBoard:
    """A board in the memory of one process."""

    def __init__(self) -> None:
        self._notes: MutableMapping[int, str] = {}

    def put(self, rank: int, note: str) -> None:
        """Leave a rank's note, instead of its last one."""
        self._notes[rank] = note

    def read(self, rank: int) -> str:
        """Return a rank's note, which is empty if it has left none."""
        return self._notes.get(rank, "")
