"""Notes: when something has failed each rank says what it was doing, so that every error can tell of all ranks.

Nothing is said, and nothing costs, before. The way of the messages themselves is closed then (gloo closes a connection
that has timed out), so notes go where the ranks found each other: the store of the process group.

A rank that has waited for long looks at whether another one has failed: then it will never go on. It says in which
operations it waits, too, and looks at what the others say. If all of them wait, and no operation is one that all are
in, none will ever go on. Both are errors at once.
"""

import logging
import sys
import time
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from threading import get_ident
from typing import NoReturn, Protocol

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from shardlite.comm.control.interrupts import SLOW, give_way
from shardlite.comm.control.store import bounded_store
from shardlite.comm.control.uncaught import LIBRARIES
from shardlite.errors import CommError

log = logging.getLogger("shardlite")

PATIENCE = 2.0
"""Seconds after its first failure in which a rank waits for the notes of others, which fail at about that time."""

_LOOK = 0.02
"""Seconds between two looks."""

_BEATS = 2
"""How often each rank has to say that it still waits in the same operations."""

_EAGER = 16
"""After so many looks in one wait, only one in so many is taken: it may be a long one, of many ranks."""

_FAILED = -1
"""Where ranks leave the number of one that has failed for good."""

_OWN = LIBRARIES[0]


class ReportBoard(Protocol):
    """Where notes are left."""

    def put(self, rank: int, note: str) -> None:
        """Leave a rank's note, instead of its last one."""

    def read(self, rank: int) -> str:
        """Return a rank's note, which is empty if it has left none."""


class FailureReports:
    """The notes of ranks that exchange messages, as one of them sees them."""

    def __init__(
        self,
        board: ReportBoard,
        rank: int,
        world_size: int,
        patience: float = PATIENCE,
        waits: ReportBoard | None = None,
        is_gone: Callable[[int], bool] = lambda rank: False,
    ) -> None:
        """`waits` is where ranks say what they wait in, if they do; `is_gone` tells of a rank that will say no more.

        The program runs on the thread that calls this.
        """
        self._is_gone = is_gone
        self._board = board
        self._waits = waits
        self._thread = get_ident()
        self._running: dict[int, object] = {}  # by thread
        self._asked = self._beats = 0
        self._first: dict[int, tuple[int, str]] = {}  # by rank: what it said when it first said the same as now
        self._hopeless = ""
        self.failed = ""
        """Why this rank takes part in nothing more, once it has failed for good."""

        self._has_told = False
        self._messages = 0  # that are over: who moves data says something new each time
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

    def fail(self, note: str) -> float:
        """Leave a note for good: this rank takes part in nothing more, and others need not wait for it.

        Return when the note that stands was left, by `time.monotonic()`.
        """
        since = self.leave(note)
        self.failed = self.failed or note
        if not self._has_told:
            self._has_told = True
            with suppress(RuntimeError):
                self._board.put(_FAILED, str(self._rank))
        return since

    def withdraw(self) -> None:
        """Take the note back: this rank goes on."""
        if self._since is not None and not self.failed:
            self._since = None
            with suppress(RuntimeError):
                self._board.put(self._rank, "")

    def begin(self, operation: object) -> None:
        """Note an operation that begins on this thread, whose `str` is its name; one inside another is a part of it."""
        thread = get_ident()
        self._running.setdefault(thread, operation)
        _watching[thread] = self

    def end(self, operation: object) -> None:
        """Note that it is over."""
        thread = get_ident()
        if self._running.get(thread) is operation:
            del self._running[thread]
            _watching.pop(thread, None)

    def hopeless(self) -> str:
        """Return why this rank will never go on, or nothing. To be called again and again while it waits, each `SLOW`.

        Whether all ranks stand still only the thread of the program finds out; its other threads hear of it.

        Raises:
            KeyboardInterrupt: Ctrl-C has come meanwhile.
        """
        give_way(f"{self._inside()}{self.place()}")
        if not self._hopeless:
            self._hopeless = self._failure() or (self._standstill() if get_ident() == self._thread else "")
        return self._hopeless

    def give_up(self, why: str) -> NoReturn:
        """End a wait that is hopeless.

        Raises:
            CommError: always.
        """
        if why.startswith(_STANDSTILL):
            raise CommError(why)  # which has all that there is to say
        waiting = self._inside()
        raise CommError(f"{waiting}: {why}{self.compare(waiting, why)}")

    def _inside(self) -> str:
        """Name the operations that this rank is in."""
        return " and ".join(sorted(map(str, list(self._running.values())))) or "an operation that others are in"

    def _failure(self) -> str:
        """Say which other rank has failed, if any has. An operation of this one that has failed ends by itself soon."""
        if self.failed:
            is_soon = self._since is not None and time.monotonic() < self._since + self._patience + SLOW
            return "" if is_soon else f"this rank has failed before: {self.failed}"
        with suppress(RuntimeError):  # the store may be gone with the process that kept it
            failed = int(self._board.read(_FAILED) or self._rank)
            said = "" if self._waits is None or failed == self._rank else self._waits.read(failed)
            if said.startswith(_STANDSTILL):
                return said
            if failed != self._rank:
                return f"rank {failed} has failed: {self._board.read(failed)}"
        return ""

    def _standstill(self) -> str:
        """Return why no rank will ever go on, or nothing.

        Each rank says where it waits again and again, so that what one says that goes on meanwhile grows old. If all
        have said the same several times while this one watched, there was a moment when all of them waited there. Who
        sees that first says so to the others, which would otherwise watch a rank that waits no more.
        """
        if self._waits is None:
            return ""
        self._asked += 1
        if self._asked > _EAGER and self._asked % _EAGER:
            return ""
        self._beats += 1
        inside = sorted(map(str, list(self._running.values())))
        said = "\n".join([str(self._beats), str(self._messages), self.place(), *inside])
        try:
            self._waits.put(self._rank, said)
            told = {self._rank: said} | {other: self._waits.read(other) for other in self._others}
        except RuntimeError:  # the store may be gone with the process that kept it
            return ""
        if standstill := next((words for words in told.values() if words.startswith(_STANDSTILL)), ""):
            return standstill
        beats = {}
        for rank, words in told.items():
            beat, _, where = words.partition("\n")
            beats[rank] = int(beat or 0)
            if not where or self._first.get(rank, (0, ""))[1] != where:
                self._first[rank] = (beats[rank], where)
        operations = {rank: where.splitlines()[2:] for rank, (_, where) in self._first.items()}
        long = all(beats[rank] - beat >= _BEATS for rank, (beat, _) in self._first.items())
        if not long or not all(operations.values()) or set.intersection(*map(set, operations.values())):
            return ""
        each = (
            f"\n  rank {rank} in {' and '.join(operations[rank])}{self._first[rank][1].splitlines()[1]}"
            for rank in sorted(operations)
        )
        standstill = f"{_STANDSTILL}{''.join(each)}"
        with suppress(RuntimeError):
            self._waits.put(self._rank, standstill)
        self.fail(f"{' and '.join(inside)}{self.place()}")  # after its words, which whoever hears of it reads
        return standstill

    def goes_on(self) -> None:
        """Take back what was said of waiting: a message is over."""
        self._messages += 1
        if self._waits is not None and self._first and not self._hopeless and get_ident() == self._thread:
            self._first, self._asked = {}, 0
            with suppress(RuntimeError):
                self._waits.put(self._rank, "")

    def place(self) -> str:
        """Say where in the program this rank is: the line that called this library, or nothing if there is none."""
        frame, found = sys._current_frames().get(self._thread), None
        while frame is not None:  # from the inside out: the outermost call of the library counts
            if frame.f_code.co_filename.startswith(_OWN):
                outer = frame.f_back
                while outer is not None and outer.f_code.co_filename.startswith(LIBRARIES):
                    outer = outer.f_back
                found = outer or found
            frame = frame.f_back
        return "" if found is None else f", called in {found.f_code.co_filename}, line {found.f_lineno}"

    def compare(self, note: str, why: str) -> str:
        """Leave a note, with the place in the program, wait for those of the others, and return what all others did.

        Log the note and `why` this rank has failed before that, and write both to the error file that `torchrun` reads,
        which may end this process soon. What fails after that in this rank does not wait for the others again.
        """
        log.error("rank %d: %s: %s", self._rank, note, why)
        if self._since is None:
            with suppress(OSError):
                get_error_handler().record_exception(CommError(f"{note}: {why}"))
        self.failed = self.failed or f"{note}: {why}"
        deadline = self.fail(f"{note}{self.place()}") + self._patience
        if _STANDSTILL in why:
            return ""  # it says what each rank does
        told: dict[int, str] = {}
        try:
            while len(told) < len(self._others):
                told |= {other: said for other in self._others if other not in told and (said := self._read(other))}
                told |= {other: _GONE for other in self._others if other not in told and self._is_gone(other)}
                if time.monotonic() > deadline:
                    break
                time.sleep(_LOOK)
        except RuntimeError as error:
            return f" (What other ranks were doing is not known: {error})"
        return "".join(f"\n  Meanwhile rank {other}: {told.get(other, _SILENT)}" for other in self._others)

    def _read(self, other: int) -> str:
        return self._board.read(other)


_watching: dict[int, FailureReports] = {}
"""By thread: those of the operation that it is in."""


def watching() -> FailureReports | None:
    """Return the notes of the operation that this thread is in, if it has any."""
    return _watching.get(get_ident())


_STANDSTILL = "ranks wait for each other in different operations, and none will ever go on:"
_GONE = "has said nothing; its process has ended"
_SILENT = "has said nothing; it computes, waits for something else, or is gone"


class StoreReports:
    """A board in the store of the default process group, under a name that all its ranks use."""

    def __init__(self, name: str) -> None:
        self._store = bounded_store()
        self._name = name

    def put(self, rank: int, note: str) -> None:
        """Leave a rank's note, instead of its last one.

        Raises:
            CommError: the store does not answer.
        """
        self._store.ask(lambda store: store.set(self._key(rank), note), PATIENCE)

    def read(self, rank: int) -> str:
        """Return a rank's note, which is empty if it has left none.

        Raises:
            CommError: the store does not answer.
        """
        key = self._key(rank)
        return self._store.ask(lambda store: store.get(key).decode() if store.check([key]) else "", PATIENCE)

    def _key(self, rank: int) -> str:
        return f"shardlite/{self._name}/{rank}"


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
