"""Failure reports: after a failure, each rank publishes what it was doing. So every error describes all ranks.

Without a failure or a long wait nothing is published, so reports take no time. After a failure, connections may be
closed (gloo closes a connection that has timed out). So reports are sent through the store of the process group.

During a long wait, a rank checks whether another rank has failed, because the wait would then never end. The waiting
rank also publishes the operations that it waits in, and reads the operations of other ranks. If all ranks wait, and no
operation is common to all of them, the ranks are deadlocked. In both cases an error is raised immediately.
"""

import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock, get_ident
from typing import NoReturn

from torch.distributed.elastic.multiprocessing.errors.error_handler import ErrorHandler

from shardlite.comm.control.collective_waits import (
    collective_of,
    collectives_started,
    may_end_alone,
    needs_all,
    watch_collectives,
)
from shardlite.comm.control.frames import frame_of
from shardlite.comm.control.interrupts import BRIDGES, LIBRARIES, SLOW, line_of_program, raise_pending_interrupt
from shardlite.comm.control.store import bounded_store
from shardlite.errors import EVERY_RANK, SAME_PASSES, CommError

log = logging.getLogger("shardlite")

PATIENCE = 2.0
"""Seconds that a rank waits for reports of other ranks after its first failure. Ranks fail at about the same time."""

_LOOK = 0.02
"""Seconds between two reads of the other ranks' reports."""

_BEATS = 2
"""Number of times that each rank must publish the same operations before the waits count as a deadlock."""

_EAGER = 16
"""Number of deadlock checks in a wait before checks become rare. Afterwards, only every `_EAGER`-th check is made,
because long waits of many ranks would otherwise burden the store.
"""

_FAILED = -1
"""Key of the board's entry that holds the number of a rank that has failed permanently."""


class StoreReports:
    """A board of reports, one per rank, in the store of the default process group. All ranks pass the same name."""

    def __init__(self, name: str) -> None:
        self._store = bounded_store()
        self._name = name

    def put(self, rank: int, note: str) -> None:
        """Replace the report of `rank`. Has no effect if the store does not answer."""
        with suppress(RuntimeError):  # the process that kept the store may have ended
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
    """The error file of `torchrun`, written atomically. `torchrun` ends the run if it reads an incomplete file."""

    def record_exception(self, e: BaseException) -> None:
        """Write an error to the file. Has no effect without `torchrun`."""
        super().record_exception(e)
        if part := self._get_error_file_path():
            Path(part).replace(part.removesuffix(_PART))

    def _get_error_file_path(self) -> str | None:
        whole = super()._get_error_file_path()
        return f"{whole}{_PART}" if whole else None


class FailureReports:
    """The failure reports of ranks that exchange messages, as accessed by one rank."""

    def __init__(
        self,
        board: StoreReports,
        rank: int,
        world_size: int,
        waits: StoreReports | None = None,
        is_gone: Callable[[int], bool] = lambda rank: False,
        members: Iterable[int] = (),
    ) -> None:
        """Create the reports of `rank`. Must be called on the program's thread.

        Args:
            board: the board of failure reports.
            rank: this rank.
            world_size: number of ranks.
            waits: the board of the operations that ranks wait in, or `None` if these are not published.
            is_gone: returns whether the process of a rank has ended.
            members: numbers of the ranks in the default process group. Empty: waits in collectives of the program are
                not published.
        """
        self._is_gone = is_gone
        self._board = board
        self._waits = waits
        self._thread = get_ident()
        self._running: dict[int, object] = {}  # operations by thread
        self._asked = self._beats = 0
        self._first: dict[int, tuple[int, str]] = {}  # by rank: count and text of the first report with the latest text
        self._deadlock_reason = ""
        self.verdict: CommError | None = None
        """Error that ends all waits of this rank, or `None`. It was found by an operation that no caller waits for."""

        self.deciding = Lock()
        """Held while an operation collects reports for a verdict. By then the rank has failed, for all its threads."""

        self.failed = ""
        """Why this rank has failed permanently, or `""`. A failed rank starts no further operations."""

        self._has_published_failure = False
        self._messages = 0  # number of completed messages, so that reports of a rank that moves data differ
        self._rank = rank
        self._others = [other for other in range(world_size) if other != rank]
        self._patience = PATIENCE
        self._members = frozenset(members)
        self._collective = ("", "")  # the latest look: name of the program's collective, and line of the program
        self._looks = 0  # number of looks that have found this collective
        if waits is not None and self._members:
            watch_collectives(self.publish_collective)
        self._comparing = Lock()  # several queues may fail at the same time
        self._since: float | None = None  # time of the current report, which several queues read

    def leave(self, note: str) -> float:
        """Publish what this rank was doing, unless a report is already published: later failures result from the first.

        Return the time of the first report, by `time.monotonic()`.
        """
        since = self._since
        if since is None:
            since = self._since = time.monotonic()
            self._board.put(self._rank, note)
        return since

    def fail(self, note: str) -> float:
        """Publish a permanent failure: this rank starts no further operations, and other ranks need not wait for it.

        Return the time of the first report, by `time.monotonic()`.
        """
        since = self.leave(note)
        self.failed = self.failed or note
        if not self._has_published_failure:
            self._has_published_failure = True
            self._board.put(_FAILED, str(self._rank))
        return since

    def withdraw(self) -> None:
        """Withdraw this rank's report, because the rank continues."""
        if self._since is not None and not self.failed:
            self._since = None
            self._board.put(self._rank, "")

    def begin_operation(self, operation: object) -> None:
        """Record that an operation begins on this thread; `str(operation)` names it. Nested operations are ignored."""
        thread = get_ident()
        self._running.setdefault(thread, operation)
        _by_thread[thread] = self

    def end_operation(self, operation: object) -> None:
        """Record that the operation has ended."""
        thread = get_ident()
        if self._running.get(thread) is operation:
            del self._running[thread]
            _by_thread.pop(thread, None)

    @contextmanager
    def watching(self, what: str) -> Iterator[Callable[[], str]]:
        """Treat the block as an operation, for waits without messages, in the store. `what` names it on all ranks.

        Yield a function that returns why the wait will never end, or `""`. It may be called on any thread.

        Raises:
            TimeoutError: the block has raised it. The text describes the other ranks.
        """
        self.begin_operation(what)
        try:
            yield lambda: self.deadlock_reason() or self.missing_rank()
            self.record_progress()
        except TimeoutError:
            raise TimeoutError(self.compare(what, "timed out")) from None
        finally:
            self.end_operation(what)

    def deadlock_reason(self) -> str:
        """Return why this rank will never continue, or `""`. Call this every `SLOW` seconds of a wait.

        Only the program's thread detects that the ranks are deadlocked. Other threads read the result of this thread.

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
        """Return which rank will not respond again and why, or `""`. May be called on any thread."""
        gone = next((other for other in self._others if self._is_gone(other)), None)
        return self._failure() or ("" if gone is None else f"rank {gone} is gone: its process has ended")

    def abort_wait(self, why: str) -> NoReturn:
        """End a wait that will never succeed.

        Raises:
            CommError: always.
        """
        self.raise_verdict()
        if why.startswith(_STANDSTILL):
            raise CommError(why)  # `why` already describes all ranks
        waiting = self._inside()
        raise CommError(f"{waiting}: {why}{self.compare(waiting, why)}")

    def raise_verdict(self) -> None:
        """If an operation that no caller waits for has found an error, raise this error.

        Raises:
            CommError: this rank cannot continue.
        """
        if self.verdict is not None:
            raise self.verdict

    def _inside(self) -> str:
        """Return the names of the operations that this rank runs."""
        return " and ".join(sorted(map(str, list(self._running.values())))) or "an operation that others are in"

    def _failure(self) -> str:
        """Return which rank has failed, or `""`. After a failure of this rank, first let its other operations end."""
        if self.failed:
            is_soon = self._since is not None and time.monotonic() < self._since + self._patience + SLOW
            return "" if is_soon else f"this rank has failed before: {self.failed}"
        with suppress(RuntimeError):  # the process that kept the store may have ended
            failed = int(self._board.read(_FAILED) or self._rank)
            text = "" if self._waits is None or failed == self._rank else self._waits.read(failed)
            if text.startswith(_STANDSTILL):
                return text
            if failed != self._rank:
                return f"rank {failed} has failed: {self._board.read(failed)}"
        return ""

    def _standstill(self) -> str:
        """Return why no rank will ever continue, or `""`.

        Each rank repeatedly publishes where it waits, with an increasing count. A rank that continues publishes a
        different text. If all ranks have published the same text several times while this rank watched, they all waited
        at the same time. The first rank that detects the deadlock publishes the deadlock. This rank then stops waiting,
        so other ranks could not detect the deadlock themselves.
        """
        if self._waits is None:
            return ""
        self._asked += 1
        if self._asked > _EAGER and self._asked % _EAGER:
            return ""
        self._beats += 1
        inside = sorted(map(str, list(self._running.values())))
        own = self._wait_text(self.call_site(), *inside)
        self._waits.put(self._rank, own)
        try:
            texts = {self._rank: own} | {other: self._waits.read(other) for other in self._others}
        except RuntimeError:  # the process that kept the store may have ended
            return ""
        if standstill := next((text for text in texts.values() if text.startswith(_STANDSTILL)), ""):
            return standstill
        beats = {}
        for rank, text in texts.items():
            beat, _, where = text.partition("\n")
            beats[rank] = int(beat or 0)
            if not where or self._first.get(rank, (0, ""))[1] != where:
                self._first[rank] = (beats[rank], where)
        operations = {rank: where.splitlines()[2:] for rank, (_, where) in self._first.items()}
        long = all(beats[rank] - beat >= _BEATS for rank, (beat, _) in self._first.items())
        if not long or not all(operations.values()) or set.intersection(*map(set, operations.values())):
            return ""
        started = {rank: int(where.split()[1]) for rank, (_, where) in self._first.items()}
        if _may_end(operations, started):
            return ""
        each = (
            f"\n  rank {rank} in {' and '.join(operations[rank])}{self._first[rank][1].splitlines()[1]}"
            for rank in sorted(operations)
        )
        remedy = _remedy(map(" ".join, operations.values()))
        reducing = all(any(text.startswith("reduce-scatter") for text in texts) for texts in operations.values())
        standstill = f"{_STANDSTILL}{''.join(each)}{remedy}\n{_SAME_GRADIENTS if reducing else EVERY_RANK}"
        self._waits.put(self._rank, standstill)
        # The failure is published after the standstill, because ranks that see the failure then read the standstill.
        self.fail(f"{' and '.join(inside)}{self.call_site()}")
        return standstill

    def publish_collective(self) -> None:
        """If the program has waited in a collective of all these ranks since the last call, publish this wait.

        Called on the thread of `collective_waits.py`. Ranks inside this library read what is published.
        """
        found = ("", "") if self._thread in self._running else collective_of(self._thread, self._members)
        before, self._collective = self._collective, found
        self._looks = self._looks + 1 if found == before else 0
        if self._waits is None:  # these reports have ended
            return
        if found == before and found[0]:
            if self._looks <= _EAGER or self._looks % _EAGER == 0:
                self._beats += 1
                running = sorted(map(str, list(self._running.values())))
                self._waits.put(self._rank, self._wait_text(found[1], found[0], *running))
        elif before[0]:
            self._waits.put(self._rank, "")

    def _wait_text(self, site: str, *operations: str) -> str:
        """Return a line of counts, the line of the program, and the operations, to be published."""
        counts = f"{self._messages} {collectives_started(self._members)}"
        return "\n".join([str(self._beats), counts, site, *operations])

    def record_progress(self) -> None:
        """Withdraw the published waits, because a message has completed."""
        self._messages += 1
        if self._waits is not None and self._first and not self._deadlock_reason and get_ident() == self._thread:
            self._first, self._asked = {}, 0
            self._waits.put(self._rank, "")

    def call_site(self) -> str:
        """Return the line of the program that called this library, or `""`."""
        frame, found = frame_of(self._thread), None
        while frame is not None:  # from the innermost frame outwards, to find the outermost call of the library
            if frame.f_code.co_filename.startswith(LIBRARIES[0]) and not frame.f_code.co_filename.startswith(BRIDGES):
                found = line_of_program(frame) or found
            frame = frame.f_back
        return "" if found is None else f", called in {found.f_code.co_filename}, line {found.f_lineno}"

    def compare(self, note: str, why: str) -> str:
        """Publish `note` with the line of the program, wait for the other ranks' reports, and return their text.

        First, log `note` and the reason `why` this rank has failed, and write both to the error file of `torchrun`,
        because `torchrun` may end this process soon. Later failures of this rank do not wait again.
        """
        log.error("rank %d: %s: %s", self._rank, note, why)
        with self._comparing:
            if self._since is None:
                with suppress(OSError):
                    _ErrorFile().record_exception(CommError(f"{note}: {why}"))
            self.failed = self.failed or f"{note}: {why}"
            deadline = self.fail(f"{note}{self.call_site()}") + self._patience
        if _STANDSTILL in why:
            return ""  # `why` already describes all ranks
        found: dict[int, str] = {}
        read = self._board.read
        try:
            while len(found) < len(self._others):
                found |= {other: text for other in self._others if other not in found and (text := read(other))}
                found |= {other: _GONE for other in self._others if other not in found and self._is_gone(other)}
                if time.monotonic() > deadline:
                    break
                time.sleep(_LOOK)
        except RuntimeError as error:
            return f" (What other ranks were doing is not known: {error})"
        each = "".join(f"\n  Meanwhile rank {other}: {found.get(other, _SILENT)}" for other in self._others)
        if len(found) < len(self._others):
            each += f"\n{EVERY_RANK}"
        return each if SAME_PASSES in why or " ended in " in why else f"{each}{_remedy([note, *found.values()])}"


def _may_end(operations: Mapping[int, Sequence[str]], started: Mapping[int, int]) -> bool:
    """Return whether a rank waits in a collective for data that another rank has sent, and not for another rank.

    After a broadcast, for example, the source continues before the other ranks have received all data. If another rank
    has started as many of the program's collectives as the waiting rank, it has called this collective too. In a
    gather, senders also continue early, but the destination waits until all ranks have called the gather.

    Args:
        operations: names of the operations of each rank.
        started: number of the program's collectives that each rank has started.
    """
    return any(
        (all if any(map(needs_all, own)) else any)(
            started[other] >= started[rank] for other, its in operations.items() if not {*own} & {*its}
        )
        for rank, own in operations.items()
        if any(map(may_end_alone, own))
    )


def _remedy(reports: Iterable[str]) -> str:
    """Return advice if the reports name different steps, or `""`."""
    steps = [found for text in reports if (found := set(re.findall(r" at step (\d+)", text)))]
    return f"\n{SAME_PASSES}" if steps and not set.intersection(*steps) else ""


_by_thread: dict[int, FailureReports] = {}
"""Failure reports of the current operation, by thread."""


def reports_of_thread() -> FailureReports | None:
    """Return the failure reports of this thread's current operation, or `None`."""
    return _by_thread.get(get_ident())


_SAME_GRADIENTS = "Every rank must train the same parameters: change requires_grad on every rank at the same step"
_STANDSTILL = "ranks wait for each other in different operations, and none will ever continue:"
_GONE = "has said nothing; its process has ended"
_SILENT = "has said nothing; it computes, waits for something else (such as torch.distributed.barrier()), or is gone"
