"""Shared-memory transport: a message stays in the memory of its sender, where the receiver reads it.

    sender      announces it in the receiver's mailbox, and waits until it was taken
    receiver    copies it to its place, or reads it in place; then signs the receipt

So a message is copied once at most. It is copied once more if it is not in the shared heap: allocate buffers that are
sent by `empty`.

A waiting thread also takes messages for other threads of its process, so ranks may wait in any order. A rank whose wait
fails gives up and marks itself so: messages that it has announced may change from then on.
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

from shardlite.comm.control.failure_reports import watching
from shardlite.comm.control.interrupts import SLOW
from shardlite.comm.shm.heap import Heap, Mapping
from shardlite.comm.shm.mailbox import PLACES, Announcement, Control, Receipts
from shardlite.comm.transport.base import Completed, Loan, Pending, Transport, check_on_host
from shardlite.config import Algorithm
from shardlite.errors import CommError
from shardlite.telemetry import Held, Ledger

_T = TypeVar("_T")

_Route = tuple[int, int]  # peer, tag

_LOOK = 0.05
"""Seconds between two checks whether the other ranks are alive."""

_TRIES = 3
"""Number of mailbox reads before a thread sleeps, which costs more than a short wait."""

_MANY_TRIES = 100
"""The same for the main thread if each rank has a core: a quarter of a millisecond in which no other thread runs."""


_HALF = PLACES // 2


class Neighbours:
    """The ranks of one host, as seen by one of them: their memory, and open messages with them."""

    def __init__(self, rank: int, heap: Heap, mappings: Sequence[Mapping], alive: Callable[[int], bool]) -> None:
        self.rank = rank
        self.heap = heap
        self.world_size = len(mappings)
        self._mappings = mappings
        self._alive = alive
        self._controls = [Control(each, rank, self.world_size) for each in mappings]
        self._mine = self._controls[rank]
        self._lock = threading.RLock()
        self._others = [r for r in range(self.world_size) if r != rank]
        self._sent = [0] * self.world_size
        self._seen = [0] * self.world_size
        self._outbox: list[deque[Announcement]] = [deque() for _ in mappings]
        self._receipts = Receipts(heap, self.world_size)
        self._words = [each.words(0, each.nbytes // 4) for each in mappings]
        self._kept: dict[tuple[int, int], Tensor] = {}
        self._expected: dict[_Route, deque[_Arriving]] = {}
        self._early: dict[_Route, deque[Announcement]] = {}
        self._to_copy: deque[_Arriving] = deque()
        self._has_core = self.world_size <= len(os.sched_getaffinity(0))
        self._broken = ""
        self._waiting = 0  # number of threads
        self._books = Ledger()

    def held(self) -> dict[str, Held]:
        """Return the bytes of message copies, of control words, and of pages kept for the next block."""
        control, idle = self._mine.nbytes + self._receipts.nbytes, self.heap.warm
        return {**self._books.held(), "mailboxes": Held(control, control), "idle shared memory": Held(idle, idle)}

    def send(self, tensor: Tensor, peer: int, tag: int, limit: float) -> "_Departing":
        """Announce a message [n], at once or when the peer has read enough earlier announcements."""
        source = tensor.detach()
        offset = self.heap.offset_of(source)
        if offset is None:
            room = self.heap.empty(source.nbytes).view(source.dtype)
            self._books.track("messages", room)
            source = room.copy_(source)
            offset = self.heap.offset_of(source)
            assert offset is not None, "it was made there"
        with self._lock:
            number = self._sent[peer] + 1
            receipt = self._receipts.open(number)
            self._sent[peer] = number
            message = Announcement(number, tag, _kind(source.dtype), offset, source.nbytes, receipt)
            self._kept[peer, number] = source
            self._outbox[peer].append(message)
            self._announce(peer)
        return _Departing(self, peer, message, source, limit)

    def expect(self, arriving: "_Arriving") -> None:
        """Match `arriving` with the first unmatched message of its peer and tag, now or when it arrives."""
        route = arriving.peer, arriving.tag
        with self._lock:
            message = _next(self._early, route)
            if message is not None:
                self._match(arriving, message)
            else:
                self._expected.setdefault(route, deque()).append(arriving)

    def wait(self, done: Callable[[], bool], words: Callable[[], str], peer: int, limit: float) -> None:
        """Wait until `done`, which depends on `peer`. Take all messages that arrive meanwhile.

        Raises:
            CommError: the peer is gone, a rank has given up, a header is damaged, or nothing happened within `limit`
                seconds.
        """
        with self._lock:
            self._waiting += 1
        try:
            self._wait(done, words, peer, limit)
        finally:
            with self._lock:
                self._waiting -= 1

    def _wait(self, done: Callable[[], bool], words: Callable[[], str], peer: int, limit: float) -> None:
        now = time.monotonic()
        deadline, slow, watch = now + limit, now + SLOW, watching()
        tries, enough = 0, _TRIES
        if self._has_core and threading.current_thread() is threading.main_thread():
            enough = _MANY_TRIES
        while True:
            heard = self._mine.bell()
            self._progress(words)
            if done():
                if watch is not None:
                    watch.record_progress()
                return
            if self._broken:
                raise CommError(f"{words()} failed: {self._broken}")
            tries += 1
            if tries < enough:
                continue
            now = time.monotonic()
            left = deadline - now
            if watch is not None and now > slow:
                slow = now + SLOW
                if why := watch.deadlock_reason():
                    self.fail(words, why)
            if left <= 0:
                self.fail(words, f"nothing happened within {limit:g} s. The peer is late or does another operation.")
            self._mine.sleep(heard, min(left, _LOOK))
            if self._mine.bell() == heard and (missing := self._missing(peer)):
                self._progress(words)  # it may have done its part just before it ended
                if done():
                    return
                self.fail(words, missing)

    def _progress(self, words: Callable[[], str]) -> None:
        """Read all announcements, and copy messages that have a destination."""
        with self._lock:
            for peer in self._others:
                self._announce(peer)
                try:
                    while (message := self._mine.read(peer, self._seen[peer] + 1)) is not None:
                        self._seen[peer] += 1
                        if message.number % _HALF == 0:
                            self._controls[peer].ring()  # it may wait for a place
                        self._check_bounds(peer, message)
                        self._sort(peer, message)
                except ValueError as error:
                    self.fail(words, f"rank {peer} sent what cannot be read: {error}")
        while self._to_copy:
            try:
                arriving = self._to_copy.popleft()
            except IndexError:  # another thread was faster
                return
            arriving.copy()
            self.take(arriving)

    def _check_bounds(self, peer: int, message: Announcement) -> None:
        """Check that a message and its receipt are inside the peer's heap.

        Raises:
            ValueError: one of them is not.
        """
        nbytes = self._mappings[peer].nbytes
        if message.offset + message.nbytes > nbytes or message.receipt + 4 > nbytes or message.receipt % 4:
            raise ValueError(
                f"the header of its message {message.number} names bytes {message.offset} to "
                f"{message.offset + message.nbytes} and receipt {message.receipt} of {nbytes} bytes"
            )

    def _sort(self, peer: int, message: Announcement) -> None:
        route = peer, message.tag
        arriving = _next(self._expected, route)
        if arriving is not None:
            self._match(arriving, message)
        else:
            self._early.setdefault(route, deque()).append(message)

    def _match(self, arriving: "_Arriving", message: Announcement) -> None:
        arriving.message = message
        if arriving.tensor is not None and arriving.fits(message):
            self._to_copy.append(arriving)

    def copy(self, peer: int, message: Announcement, tensor: Tensor) -> None:
        """Copy a message to a tensor as bytes. Memory meters would count a PyTorch view of another rank's memory."""
        ctypes.memmove(tensor.data_ptr(), self._mappings[peer].address + message.offset, message.nbytes)

    def view(self, peer: int, message: Announcement, dtype: torch.dtype) -> Tensor:
        """View a message in its sender's memory."""
        return self._mappings[peer].tensor(message.offset, message.nbytes // dtype.itemsize, dtype)

    def take(self, arriving: "_Arriving") -> None:
        """Sign the receipt of a message.

        Raises:
            CommError: its sender has given up, so that the message may have changed.
        """
        assert arriving.message is not None, "it has come"
        peer = arriving.peer
        if self._controls[peer].has_quit:
            self.fail(arriving.words, self._missing(peer))
        with self._lock:
            self._words[peer][arriving.message.receipt // 4] = arriving.message.number & 0xFFFFFFFF
            arriving.taken = True
            self._controls[peer].ring()
            if self._waiting > 1 and arriving.tensor is not None:
                self._mine.ring()  # another thread may be waiting for this one

    def was_taken(self, message: Announcement) -> bool:
        """Return whether a message of this rank was taken, so that it may be overwritten."""
        return self._receipts.is_signed(message.receipt, message.number)

    def drop(self, peer: int, message: Announcement) -> None:
        """Release a message that was taken."""
        if self._kept.pop((peer, message.number), None) is not None:
            self._receipts.close(message.receipt)

    def _announce(self, peer: int) -> None:
        """Announce queued messages while there are free places.

        A peer that waits for anything reads all announcements, so no message has to be taken before another.
        """
        outbox, control = self._outbox[peer], self._controls[peer]
        while outbox and control.has_place(outbox[0].number):
            control.announce(outbox.popleft())

    def is_gone(self, peer: int) -> bool:
        """Return whether the process of a rank has ended."""
        return peer != self.rank and not self._alive(peer)

    def _missing(self, peer: int) -> str:
        """Return which ranks will never answer a rank that waits for `peer`, or `""`.

        Other ranks that are gone may have finished first. If they were needed, the rank that waits for them gives up.
        """
        quitters = [r for r in self._others if self._controls[r].has_quit]
        gone = [r for r in self._others if r not in quitters and self.is_gone(r)]
        if not quitters and peer not in gone:
            return ""
        said = [f"rank {r} is gone: its process has ended." for r in gone]
        return " ".join([*said, *(f"rank {r} has given up: an operation of its own failed." for r in quitters)])

    def fail(self, words: Callable[[], str], why: str) -> NoReturn:
        """Give up, and wake the other ranks.

        Raises:
            CommError: always.
        """
        with self._lock:
            if not self._broken:
                self._broken = why
                self._mine.quit()
                for peer in self._others:
                    self._controls[peer].ring()
        raise CommError(f"{words()} failed: {why}")


class SharedMemoryTransport(Transport):
    """Messages between the processes of one host, each completed within `timeout` of being waited for.

    After a wait has ended in a `CommError`, the connection is closed for good, as over gloo, and the run must end.
    """

    lends = True
    algorithm: Algorithm = "direct"

    def __init__(self, neighbours: Neighbours, timeout: timedelta) -> None:
        self._neighbours = self.holder = neighbours
        self._limit = timeout.total_seconds()
        self.rank = neighbours.rank
        self.world_size = neighbours.world_size

    def empty(self, nbytes: int, device: torch.device) -> Tensor:
        """Return uninitialised memory [nbytes] that is sent from without a copy."""
        return self._neighbours.heap.empty(nbytes) if device.type == "cpu" else super().empty(nbytes, device)

    def trim(self, *, keep: int | None = None) -> None:
        """Free pages that were not used since the last call, or all free pages except `keep` bytes."""
        self._neighbours.heap.trim(keep=keep)

    def is_gone(self, peer: int) -> bool:
        """Return whether the process of rank `peer` has ended."""
        return self._neighbours.is_gone(peer)

    def isend(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """Announce `tensor` to rank `peer`."""
        check_on_host("SharedMemoryTransport", tensor)
        return self._neighbours.send(tensor, peer, tag, self._limit) if tensor.numel() else Completed()

    def irecv(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """Expect the next message with `tag` from rank `peer`, and copy it into `tensor`."""
        check_on_host("SharedMemoryTransport", tensor)
        if not tensor.numel():
            return Completed()
        arriving = _Arriving(self._neighbours, peer, tag, tensor.numel(), tensor.dtype, self._limit, tensor.detach())
        self._neighbours.expect(arriving)
        return arriving

    def borrow(self, numel: int, dtype: torch.dtype, peer: int, tag: int) -> Loan:
        """Expect the next message with `tag` from rank `peer`, to be read in place."""
        arriving = _Arriving(self._neighbours, peer, tag, numel, dtype, self._limit, None)
        self._neighbours.expect(arriving)
        return arriving


@dataclass(eq=False)
class _Departing:
    """A message from this rank."""

    neighbours: Neighbours
    peer: int
    message: Announcement
    tensor: Tensor
    limit: float
    over: bool = False

    def wait(self) -> None:
        """Wait until the peer has taken the message."""
        if not self.over:
            self.neighbours.wait(self._done, self.words, self.peer, self.limit)
            self.over = True
            self.neighbours.drop(self.peer, self.message)

    def _done(self) -> bool:
        return self.neighbours.was_taken(self.message)

    def words(self) -> str:
        return (
            f"rank {self.neighbours.rank} sending to rank {self.peer} "
            f"({self.tensor.numel()} elements of {self.tensor.dtype}, {self.tensor.nbytes} bytes, "
            f"tag {self.message.tag})"
        )


@dataclass(eq=False)
class _Arriving:
    """A message to this rank: copied into `tensor`, or read in place."""

    neighbours: Neighbours
    peer: int
    tag: int
    numel: int
    dtype: torch.dtype
    limit: float
    tensor: Tensor | None
    message: Announcement | None = None
    taken: bool = False

    def wait(self) -> None:
        """Wait until the message was copied to `tensor`."""
        self.neighbours.wait(self._is_taken, self.words, self.peer, self.limit)

    def look(self) -> Tensor:
        """Wait for the message, and view it in the sender's memory until `give_back()`."""
        self.neighbours.wait(self._has_come, self.words, self.peer, self.limit)
        assert self.message is not None, "waited for"
        return self.neighbours.view(self.peer, self.message, self.dtype)

    def give_back(self) -> None:
        """Allow the sender to overwrite the message."""
        self.neighbours.take(self)

    def copy(self) -> None:
        """Copy the message to `tensor`."""
        assert self.tensor is not None, "it is not to be lent"
        assert self.message is not None, "it has come"
        self.neighbours.copy(self.peer, self.message, self.tensor)

    def fits(self, message: Announcement) -> bool:
        """Return whether a message has the expected size and dtype."""
        return (message.nbytes, message.kind) == (self.numel * self.dtype.itemsize, _kind(self.dtype))

    def _is_taken(self) -> bool:
        return self._has_come() and self.taken

    def _has_come(self) -> bool:
        if self.message is not None and not self.fits(self.message):
            self.neighbours.fail(self.words, f"the peer sent {self.message.nbytes} bytes of another kind.")
        return self.message is not None

    def words(self) -> str:
        return (
            f"rank {self.neighbours.rank} receiving from rank {self.peer} "
            f"({self.numel} elements of {self.dtype}, {self.numel * self.dtype.itemsize} bytes, tag {self.tag})"
        )


def _next(queues: dict[_Route, deque[_T]], route: _Route) -> _T | None:
    """Take the first in the queue of a route, or `None`. Empty queues are deleted, because there are many routes."""
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
