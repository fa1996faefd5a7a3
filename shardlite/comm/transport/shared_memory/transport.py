"""Shared-memory transport: a message stays in the memory of its sender, where the receiver reads it.

    sender      announces the message in the receiver's mailbox, and waits until the receiver has taken the message
    receiver    copies the message to its destination, or reads it in place; then signs the receipt

So a message is copied at most once. If the message is not in the shared heap, the sender also copies it to the heap. To
avoid this second copy, allocate buffers for sending with `empty`.

A waiting thread also takes messages for other threads of the same process, so ranks may wait in any order. A rank whose
wait fails marks itself as failed, because the messages that this rank has announced may change afterwards.
"""

import ctypes
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import NoReturn, TypeVar
from zlib import crc32

import torch
from torch import Tensor

from shardlite.comm.control.failure_reports import reports_of_thread
from shardlite.comm.control.interrupts import SLOW
from shardlite.comm.transport.loans import LendingTransport
from shardlite.comm.transport.messages import Completed, Loan, Pending, check_on_host
from shardlite.comm.transport.shared_memory.heap import Heap, Mapping
from shardlite.comm.transport.shared_memory.mailbox import PLACES, Announcement, Control, Receipts
from shardlite.config import Algorithm
from shardlite.errors import CommError
from shardlite.telemetry import Held, Ledger

_T = TypeVar("_T")

_Route = tuple[int, int]  # peer, tag

_LIVENESS = 0.05
"""Seconds between two checks whether the other ranks are alive."""

_TRIES = 3
"""Number of mailbox reads before a thread sleeps. Sleeping takes longer than a short wait."""

_MANY_TRIES = 100
"""Number of mailbox reads of the main thread if each rank has a core. The reads take about 0.25 ms, during which no
other thread runs.
"""

_HALF = PLACES // 2


class Neighbours:
    """The ranks of one host, as seen by this rank: all ranks' memory, and the open messages to and from this rank."""

    def __init__(self, rank: int, heap: Heap, mappings: Sequence[Mapping], alive: Callable[[int], bool]) -> None:
        self.rank = rank
        self.heap = heap
        self.world_size = len(mappings)
        self.mappings = mappings
        """Memory of all ranks."""

        self._alive = alive
        self._controls = [Control(each, rank, self.world_size) for each in mappings]
        self._mine = self._controls[rank]
        self._lock = threading.RLock()
        self._others = [r for r in range(self.world_size) if r != rank]
        self._sent = [0] * self.world_size
        self._seen = [0] * self.world_size
        self.receipts = Receipts(heap, self.world_size)
        self._words = [each.words(0, each.nbytes // 4) for each in mappings]
        self._untaken: dict[tuple[int, int], Tensor] = {}  # by peer and number
        self._expected: dict[_Route, deque[_Arriving]] = {}
        self._early: dict[_Route, deque[Announcement]] = {}
        self._to_copy: deque[_Arriving] = deque()
        self._has_core = self.world_size <= len(os.sched_getaffinity(0))
        self._broken = ""
        self._waiting = 0  # number of waiting threads
        self._ledger = Ledger()

    def held(self) -> dict[str, Held]:
        """Return the bytes of message copies, control words, and pages that are kept for the next block."""
        control, idle = self._mine.nbytes + self.receipts.nbytes, self.heap.warm
        return {**self._ledger.held(), "mailboxes": Held(control, control), "idle shared memory": Held(idle, idle)}

    def send(self, tensor: Tensor, peer: int, tag: int, limit: float) -> "_Departing":
        """Announce a message [n] immediately, or as soon as the peer has read enough earlier announcements."""
        offset = self.heap.offset_of(tensor)
        if offset is None:
            copy = self.heap.empty(tensor.nbytes).view(tensor.dtype)
            self._ledger.track("messages", copy)
            tensor = copy.copy_(tensor)
            offset = self.heap.offset_of(tensor)
            assert offset is not None, "it was allocated there"
        with self._lock:
            number = self._sent[peer] + 1
            receipt = self.receipts.open(number)
            self._sent[peer] = number
            announcement = Announcement(number, tag, _kind(tensor.dtype), offset, tensor.nbytes, receipt)
            self._untaken[peer, number] = tensor
            if self._controls[peer].announce(announcement):
                self._controls[peer].ring()
        return _Departing(self, peer, tag, tensor.numel(), tensor.dtype, limit, tensor, announcement)

    def expect(self, arriving: "_Arriving") -> "_Arriving":
        """Match `arriving` with the first unmatched message of the same peer and tag, now or when it arrives."""
        route = arriving.peer, arriving.tag
        with self._lock:
            announcement = _next(self._early, route)
            if announcement is not None:
                self._match(arriving, announcement)
            else:
                self._expected.setdefault(route, deque()).append(arriving)
        return arriving

    def wait(self, message: "_InFlight", done: Callable[[], bool]) -> None:
        """Wait until `done()` returns true, and take all messages that arrive meanwhile.

        Only an action of the peer of `message` makes `done()` true.

        Raises:
            CommError: the peer has ended, a rank has failed, a header is damaged, or the wait timed out.
        """
        with self._lock:
            self._waiting += 1
        try:
            self._wait(message, done)
        finally:
            with self._lock:
                self._waiting -= 1

    def _wait(self, message: "_InFlight", done: Callable[[], bool]) -> None:
        now = time.monotonic()
        deadline, slow, reports = now + message.limit, now + SLOW, reports_of_thread()
        tries, enough = 0, _TRIES
        if self._has_core and threading.current_thread() is threading.main_thread():
            enough = _MANY_TRIES
        while True:
            heard = self._mine.bell()
            self.progress(message)
            if done():
                if reports is not None:
                    reports.record_progress()
                return
            if self._broken:
                raise CommError(f"{message} failed: {self._broken}")
            tries += 1
            if tries < enough:
                continue
            now = time.monotonic()
            left = deadline - now
            if reports is not None and now > slow:
                slow = now + SLOW
                if why := reports.deadlock_reason():
                    self.fail(message, why)
            if left <= 0:
                why = f"nothing happened within {message.limit:g} s. The peer is late or runs a different operation."
                self.fail(message, why)
            self._mine.sleep(heard, min(left, _LIVENESS))
            if self._mine.bell() == heard and (missing := self._missing(message.peer)):
                self.progress(message)  # the peer may have answered just before it ended
                if done():
                    return
                self.fail(message, missing)

    def progress(self, waiting: "_InFlight") -> None:
        """Read all announcements, and copy all messages that have a destination. Errors name the message `waiting`."""
        with self._lock:
            for peer in self._others:
                if self._controls[peer].announce():
                    self._controls[peer].ring()
                try:
                    while (announcement := self._mine.read(peer, self._seen[peer] + 1)) is not None:
                        self._seen[peer] += 1
                        if announcement.number % _HALF == 0:
                            self._controls[peer].ring()  # the peer may wait for a free place
                        self._check_bounds(peer, announcement)
                        route = peer, announcement.tag
                        if (arriving := _next(self._expected, route)) is not None:
                            self._match(arriving, announcement)
                        else:
                            self._early.setdefault(route, deque()).append(announcement)
                except ValueError as error:
                    self.fail(waiting, f"rank {peer} sent unreadable data: {error}")
        while self._to_copy:
            try:
                arriving = self._to_copy.popleft()
            except IndexError:  # another thread has taken the last message
                return
            arriving.copy()
            self.acknowledge(arriving)

    def _check_bounds(self, peer: int, announcement: Announcement) -> None:
        """Check that the message and the receipt of an announcement are inside the peer's heap.

        Raises:
            ValueError: the message or the receipt is outside.
        """
        number, _, _, start, length, receipt = announcement
        nbytes = self.mappings[peer].nbytes
        if start + length > nbytes or receipt + 4 > nbytes or receipt % 4:
            raise ValueError(
                f"the header of its message {number} names bytes {start} to {start + length} and receipt {receipt} of "
                f"{nbytes} bytes"
            )

    def _match(self, arriving: "_Arriving", announcement: Announcement) -> None:
        arriving.announcement = announcement
        if arriving.tensor is not None and arriving.fits(announcement):
            self._to_copy.append(arriving)

    def acknowledge(self, arriving: "_Arriving") -> None:
        """Sign the receipt of a message.

        Raises:
            CommError: the sender has failed, so the message may have changed.
        """
        assert arriving.announcement is not None, "it has arrived"
        peer = arriving.peer
        if self._controls[peer].has_quit:
            self.fail(arriving, self._missing(peer))
        with self._lock:
            self._words[peer][arriving.announcement.receipt // 4] = arriving.announcement.number & 0xFFFFFFFF
            arriving.taken = True
            self._controls[peer].ring()
            if self._waiting > 1 and arriving.tensor is not None:
                self._mine.ring()  # another thread may be waiting for this message

    def release(self, peer: int, announcement: Announcement) -> None:
        """Release the memory of a message that was taken."""
        if self._untaken.pop((peer, announcement.number), None) is not None:
            self.receipts.close(announcement.receipt)

    def is_gone(self, peer: int) -> bool:
        """Return whether the process of a rank has ended."""
        return peer != self.rank and not self._alive(peer)

    def _missing(self, peer: int) -> str:
        """Return which ranks prevent an answer from `peer`, or `""`.

        A rank other than `peer` whose process has ended may have finished normally. If another rank still needs the
        ended rank, the waiting rank fails and marks itself as failed.
        """
        failed = [r for r in self._others if self._controls[r].has_quit]
        gone = [r for r in self._others if r not in failed and self.is_gone(r)]
        if not failed and peer not in gone:
            return ""
        reasons = [f"rank {r} is gone: its process has ended." for r in gone]
        return " ".join([*reasons, *(f"rank {r} has given up, because an operation of it failed." for r in failed)])

    def fail(self, message: "_InFlight", why: str) -> NoReturn:
        """Mark this rank as failed, wake the other ranks, and raise an error.

        Raises:
            CommError: always.
        """
        with self._lock:
            if not self._broken:
                self._broken = why
                self._mine.quit()
                for peer in self._others:
                    self._controls[peer].ring()
        raise CommError(f"{message} failed: {why}")


class SharedMemoryTransport(LendingTransport):
    """Messages between the processes of one host. A wait for a message takes at most `timeout`.

    After a wait has raised a `CommError`, the transport is unusable, as with gloo, and the run must end.
    """

    algorithm: Algorithm = "direct"

    def __init__(self, neighbours: Neighbours, timeout: timedelta) -> None:
        self._neighbours = self.holder = neighbours
        self._limit = timeout.total_seconds()
        self.rank = neighbours.rank
        self.world_size = neighbours.world_size

    def empty(self, nbytes: int, device: torch.device) -> Tensor:
        """Return uninitialized memory [nbytes] from which tensors are sent without a copy."""
        return self._neighbours.heap.empty(nbytes) if device.type == "cpu" else super().empty(nbytes, device)

    def trim(self, *, keep: int | None = None) -> None:
        """Free pages unused since the previous call. With `keep`, free all unused pages except `keep` bytes."""
        self._neighbours.heap.trim(keep=keep)

    def is_gone(self, peer: int) -> bool:
        """Return whether the process of rank `peer` has ended."""
        return self._neighbours.is_gone(peer)

    def isend(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """Announce `tensor` to rank `peer`."""
        check_on_host("SharedMemoryTransport", tensor)
        return self._neighbours.send(tensor.detach(), peer, tag, self._limit) if tensor.numel() else Completed()

    def irecv(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """Expect the next message with `tag` from rank `peer`, and copy it into `tensor`."""
        check_on_host("SharedMemoryTransport", tensor)
        if not tensor.numel():
            return Completed()
        tensor = tensor.detach()
        expected = _Arriving(self._neighbours, peer, tag, tensor.numel(), tensor.dtype, self._limit, tensor)
        return self._neighbours.expect(expected)

    def borrow(self, numel: int, dtype: torch.dtype, peer: int, tag: int) -> Loan:
        """Expect the next message with `tag` from rank `peer`, to be read in place."""
        return self._neighbours.expect(_Arriving(self._neighbours, peer, tag, numel, dtype, self._limit))


@dataclass(eq=False)
class _InFlight:
    """A message between this rank and `peer`."""

    neighbours: Neighbours
    peer: int
    tag: int
    numel: int
    dtype: torch.dtype
    limit: float
    tensor: Tensor | None = None
    """The tensor that is sent, or the destination of a received message. `None` if the message is read in place."""

    announcement: Announcement | None = None
    direction = "receiving from"

    def __str__(self) -> str:
        return (
            f"rank {self.neighbours.rank} {self.direction} rank {self.peer} "
            f"({self.numel} elements of {self.dtype}, {self.numel * self.dtype.itemsize} bytes, tag {self.tag})"
        )


@dataclass(eq=False)
class _Departing(_InFlight):
    """A message from this rank."""

    over: bool = False
    direction = "sending to"

    def wait(self) -> None:
        """Wait until the peer has taken the message."""
        if not self.over:
            assert self.announcement is not None, "it was announced"
            self.neighbours.wait(self, self.was_taken)
            self.over = True  # the receipt may be reused for another message
            self.neighbours.release(self.peer, self.announcement)

    def was_taken(self) -> bool:
        """Return whether the peer has taken the message."""
        assert self.announcement is not None, "it was announced"
        return self.neighbours.receipts.is_signed(self.announcement.receipt, self.announcement.number)


@dataclass(eq=False)
class _Arriving(_InFlight):
    """A message to this rank. It is copied into `tensor`, or read in the sender's memory if `tensor` is `None`."""

    taken: bool = False

    def wait(self) -> None:
        """Wait until the message has been copied to `tensor`."""
        self.neighbours.wait(self, lambda: self._has_arrived() and self.taken)

    def look(self) -> Tensor:
        """Wait for the message, and return a view of the sender's memory, which is valid until `give_back()`."""
        self.neighbours.wait(self, self._has_arrived)
        assert self.announcement is not None, "it has arrived"
        return self.neighbours.mappings[self.peer].tensor(self.announcement.offset, self.numel, self.dtype)

    def give_back(self) -> None:
        """Allow the sender to overwrite the message."""
        self.neighbours.acknowledge(self)

    def copy(self) -> None:
        """Copy the message to `tensor` by `memmove`, because memory meters would count a view of the peer's memory."""
        assert self.tensor is not None, "it is not read in place"
        assert self.announcement is not None, "it has arrived"
        source = self.neighbours.mappings[self.peer].address + self.announcement.offset
        ctypes.memmove(self.tensor.data_ptr(), source, self.announcement.nbytes)

    def fits(self, announcement: Announcement) -> bool:
        """Return whether a message has the expected size and dtype."""
        return (announcement.nbytes, announcement.kind) == (self.numel * self.dtype.itemsize, _kind(self.dtype))

    def _has_arrived(self) -> bool:
        if self.announcement is not None and not self.fits(self.announcement):
            self.neighbours.fail(self, f"the peer sent {self.announcement.nbytes} bytes of a different kind.")
        return self.announcement is not None


def _next(queues: dict[_Route, deque[_T]], route: _Route) -> _T | None:
    """Take the first item of a route's queue, or return `None`. Empty queues are deleted, as there are many routes."""
    queue = queues.get(route)
    if queue is None:
        return None
    first = queue.popleft()
    if not queue:
        del queues[route]
    return first


@cache
def _kind(dtype: torch.dtype) -> int:
    return crc32(str(dtype).encode())
