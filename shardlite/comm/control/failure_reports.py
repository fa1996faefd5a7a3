"""Failure reports: each rank publishes what it was doing when something fails, so that every error describes all ranks.

Nothing is published, and nothing costs time, before the first failure. By then the connections of messages may be
closed (gloo closes a connection that has timed out), so reports go through the store of the process group.

A rank that has waited for long checks whether another rank has failed, because then the wait will never end. It also
publishes the operations that it waits in, and reads those of the others. If all ranks wait, and no operation is common
to all, none will ever continue. Both cases raise an error at once.
"""

import logging
import re
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from threading import Lock, get_ident
from typing import NoReturn

from torch.distributed.elastic.multiprocessing.errors.error_handler import ErrorHandler

from shardlite.comm.control.interrupts import LIBRARIES, SLOW, raise_pending_interrupt
from shardlite.comm.control.store import bounded_store
from shardlite.errors import SAME_PASSES, CommError

log = logging.getLogger("shardlite")

PATIENCE = 2.0
"""Seconds that a rank waits after its first failure for reports of other ranks, which fail at about the same time."""

_LOOK = 0.02
"""Seconds between two reads of the board."""

_BEATS = 2
"""Number of times each rank must publish that it still waits in the same operations."""

_EAGER = 16
"""After this many checks in one wait, only one in this many is made: the wait may be long, and of many ranks."""

_FAILED = -1
"""Board entry for the number of a rank that has failed permanently."""

_OWN = LIBRARIES[0]


class StoreReports:
    """A board in the store of the default process group, under a name that is equal on all its ranks."""

    def __init__(self, name: str) -> None:
        self._store = bounded_store()
        self._name = name

    def put(self, rank: int, note: str) -> None:
        """Replace the report of `rank`.

        Raises:
            CommError: the store does not answer.
        """
        self._store.ask(lambda store: store.set(self._key(rank), note), PATIENCE)

    def read(self, rank: int) -> str:
        """Return the report of `rank`, or `""`.

        Raises:
            CommError: the store does not answer.
        """
        key = self._key(rank)
        return self._store.ask(lambda store: store.get(key).decode() if store.check([key]) else "", PATIENCE)

    def _key(self, rank: int) -> str:
        return f"shardlite/{self._name}/{rank}"


_PART = ".part"


class _ErrorFile(ErrorHandler):
    """The error file of `torchrun`, which appears whole: `torchrun` ends the run if it reads part of one."""

    def record_exception(self, e: BaseException) -> None:
        """Write an error to it. Without `torchrun` there is none, and nothing is written."""
        super().record_exception(e)
        if part := self._get_error_file_path():
            Path(part).replace(part.removesuffix(_PART))

    def _get_error_file_path(self) -> str | None:
        whole = super()._get_error_file_path()
        return f"{whole}{_PART}" if whole else None


class FailureReports:
    """The failure reports of ranks that exchange messages, from the view of one rank."""

    def __init__(
        self,
        board: StoreReports,
        rank: int,
        world_size: int,
        patience: float = PATIENCE,
        waits: StoreReports | None = None,
        is_gone: Callable[[int], bool] = lambda rank: False,
    ) -> None:
        """Create the reports of `rank`. The program must run on the calling thread.

        Args:
            board: where reports are published.
            rank: this rank.
            world_size: number of ranks.
            patience: seconds to wait for other reports after a failure.
            waits: where ranks publish the operations they wait in, or `None`.
            is_gone: returns whether the process of a rank has ended.
        """
        self._is_gone = is_gone
        self._board = board
        self._waits = waits
        self._thread = get_ident()
        self._running: dict[int, object] = {}  # by thread
        self._asked = self._beats = 0
        self._first: dict[int, tuple[int, str]] = {}  # by rank: beat and text of its first report equal to the current
        self._deadlock_reason = ""
        self.verdict: CommError | None = None
        """What ends all waits of this rank: an error of an operation that nothing waits in."""

        self.failed = ""
        """Why this rank has failed permanently, or `""`. A failed rank takes part in no further operation."""

        self._has_told = False
        self._messages = 0  # completed ones: a rank that moves data publishes a new text each time
        self._rank = rank
        self._others = [other for other in range(world_size) if other != rank]
        self._patience = patience
        self._comparing = Lock()  # several queues may fail at once
        self._since: float | None = None  # when the current report was published; several queues read it

    def leave(self, note: str) -> float:
        """Publish what this rank was doing. The first report stays: later failures follow from it.

        Return the time of that report, by `time.monotonic()`.
        """
        since = self._since
        if since is None:
            since = self._since = time.monotonic()
            with suppress(RuntimeError):  # the store may be gone with the process that kept it
                self._board.put(self._rank, note)
        return since

    def fail(self, note: str) -> float:
        """Publish a permanent failure: this rank takes part in nothing more, and others need not wait for it.

        Return the time of the first report, by `time.monotonic()`.
        """
        since = self.leave(note)
        self.failed = self.failed or note
        if not self._has_told:
            self._has_told = True
            with suppress(RuntimeError):
                self._board.put(_FAILED, str(self._rank))
        return since

    def withdraw(self) -> None:
        """Withdraw the report: this rank continues."""
        if self._since is not None and not self.failed:
            self._since = None
            with suppress(RuntimeError):
                self._board.put(self._rank, "")

    def begin_operation(self, operation: object) -> None:
        """Record that an operation begins on this thread, named by `str(operation)`. Nested ones are parts of it."""
        thread = get_ident()
        self._running.setdefault(thread, operation)
        _by_thread[thread] = self

    def end_operation(self, operation: object) -> None:
        """Record that the operation has ended."""
        thread = get_ident()
        if self._running.get(thread) is operation:
            del self._running[thread]
            _by_thread.pop(thread, None)

    def deadlock_reason(self) -> str:
        """Return why this rank will never continue, or `""`. Call it every `SLOW` seconds of a wait.

        Only the program's thread detects that all ranks stand still. Other threads read its result.

        Raises:
            KeyboardInterrupt: Ctrl-C is pending.
        """
        raise_pending_interrupt(f"{self._inside()}{self.call_site()}")
        if self.verdict is not None:
            return str(self.verdict)
        if not self._deadlock_reason:
            self._deadlock_reason = self._failure() or (self._standstill() if get_ident() == self._thread else "")
        return self._deadlock_reason

    def missing_rank(self) -> str:
        """Return the rank that will not respond again, and why, or `""`. May be called on any thread."""
        gone = next((other for other in self._others if self._is_gone(other)), None)
        return self._failure() or ("" if gone is None else f"rank {gone} is gone: its process has ended")

    def abort_wait(self, why: str) -> NoReturn:
        """End a hopeless wait.

        Raises:
            CommError: always.
        """
        self.raise_verdict()
        if why.startswith(_STANDSTILL):
            raise CommError(why)  # it already describes all ranks
        waiting = self._inside()
        raise CommError(f"{waiting}: {why}{self.compare(waiting, why)}")

    def raise_verdict(self) -> None:
        """Raise what an operation has found that nothing waited in.

        Raises:
            CommError: it has found that this rank cannot continue.
        """
        if self.verdict is not None:
            raise self.verdict

    def _inside(self) -> str:
        """Return the names of the operations that this rank is in."""
        return " and ".join(sorted(map(str, list(self._running.values())))) or "an operation that others are in"

    def _failure(self) -> str:
        """Return which rank has failed, or `""`. An operation of this rank that has failed will soon end by itself."""
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
        """Return why no rank will ever continue, or `""`.

        Each rank repeatedly publishes where it waits, with a rising count, so that the report of a rank that continues
        becomes outdated. If all ranks have published the same several times while this one watched, there was a moment
        when all of them waited there. The first rank to detect it publishes the result, because others would otherwise
        watch a rank that no longer waits.
        """
        if self._waits is None:
            return ""
        self._asked += 1
        if self._asked > _EAGER and self._asked % _EAGER:
            return ""
        self._beats += 1
        inside = sorted(map(str, list(self._running.values())))
        said = "\n".join([str(self._beats), str(self._messages), self.call_site(), *inside])
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
        standstill = f"{_STANDSTILL}{''.join(each)}{_remedy(map(' '.join, operations.values()))}"
        with suppress(RuntimeError):
            self._waits.put(self._rank, standstill)
        # After publishing the standstill, which ranks that see the failure read.
        self.fail(f"{' and '.join(inside)}{self.call_site()}")
        return standstill

    def record_progress(self) -> None:
        """Withdraw what was published about waiting, because a message has completed."""
        self._messages += 1
        if self._waits is not None and self._first and not self._deadlock_reason and get_ident() == self._thread:
            self._first, self._asked = {}, 0
            with suppress(RuntimeError):
                self._waits.put(self._rank, "")

    def call_site(self) -> str:
        """Return the line of the program that called this library, or `""`."""
        frame, found = sys._current_frames().get(self._thread), None
        while frame is not None:  # from the innermost frame out: the outermost call of the library counts
            if frame.f_code.co_filename.startswith(_OWN):
                outer = frame.f_back
                while outer is not None and outer.f_code.co_filename.startswith(LIBRARIES):
                    outer = outer.f_back
                found = outer or found
            frame = frame.f_back
        return "" if found is None else f", called in {found.f_code.co_filename}, line {found.f_lineno}"

    def compare(self, note: str, why: str) -> str:
        """Publish `note` with the place in the program, wait for the other ranks' reports, and return them as text.

        Before that, log the note and `why` this rank has failed, and write both to the error file of `torchrun`, which
        may end this process soon. Later failures of this rank do not wait again.
        """
        log.error("rank %d: %s: %s", self._rank, note, why)
        with self._comparing:
            if self._since is None:
                with suppress(OSError):
                    _ErrorFile().record_exception(CommError(f"{note}: {why}"))
            self.failed = self.failed or f"{note}: {why}"
            deadline = self.fail(f"{note}{self.call_site()}") + self._patience
        if _STANDSTILL in why:
            return ""  # it says what each rank does
        told: dict[int, str] = {}
        read = self._board.read
        try:
            while len(told) < len(self._others):
                told |= {other: said for other in self._others if other not in told and (said := read(other))}
                told |= {other: _GONE for other in self._others if other not in told and self._is_gone(other)}
                if time.monotonic() > deadline:
                    break
                time.sleep(_LOOK)
        except RuntimeError as error:
            return f" (What other ranks were doing is not known: {error})"
        each = "".join(f"\n  Meanwhile rank {other}: {told.get(other, _SILENT)}" for other in self._others)
        return each if SAME_PASSES in why else f"{each}{_remedy([note, *told.values()])}"


def _remedy(said: Iterable[str]) -> str:
    """Return what to do, if ranks that say what they do are in no common step."""
    steps = [found for words in said if (found := set(re.findall(r" at step (\d+)", words)))]
    return f"\n{SAME_PASSES}" if steps and not set.intersection(*steps) else ""


_by_thread: dict[int, FailureReports] = {}
"""By thread: the failure reports of its current operation."""


def reports_of_thread() -> FailureReports | None:
    """Return the failure reports of this thread's current operation, or `None`."""
    return _by_thread.get(get_ident())


_STANDSTILL = "ranks wait for each other in different operations, and none will ever go on:"
_GONE = "has said nothing; its process has ended"
_SILENT = "has said nothing; it computes, waits for something else, or is gone"
