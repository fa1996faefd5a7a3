"""Transports over process groups of `torch.distributed`, by point-to-point messages.

| transport | for | how |
|---|---|---|
| `GlooTransport` | CPU tensors | one message per call |
| `NcclTransport` | CUDA tensors | the messages of a step go in one batch |
| `StagedTransport` | CUDA tensors over gloo, which cannot send them | each message is copied through host memory |

Failures of `torch.distributed` become `CommError`s that name both ranks.
"""

import os
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from threading import current_thread, main_thread
from time import monotonic, sleep
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Backend

from shardlite.comm.control.failure_reports import FailureReports, watching
from shardlite.comm.control.interrupts import SLOW
from shardlite.comm.control.worker import Worker
from shardlite.comm.transport.base import BatchedTransport, Completed, Message, Pending, Transport, check_on_host
from shardlite.comm.transport.communicators import Communicator
from shardlite.errors import CommError, LayoutError
from shardlite.telemetry import Ledger


class Posted(NamedTuple):
    """Messages, or a whole collective, and what their errors report.

    Without a `timeout` the process group's own applies.
    """

    rank: int
    messages: Sequence[Message] = ()
    tag: int = 0
    timeout: timedelta | None = None
    collective: str = ""
    tensors: Sequence[Tensor] = ()
    """Of the collective."""

    def failed(self, why: str) -> CommError:
        """Return the error for these messages."""
        limit = "" if self.timeout is None else f", timeout {self.timeout.total_seconds():g} s"
        return CommError(f"{self.describe()}{limit}. {why}")

    def describe(self) -> str:
        """Say what has failed."""
        if self.collective:
            return f"rank {self.rank} in {self.collective} failed: {max(each.nbytes for each in self.tensors)} bytes"
        doing = " and ".join(dict.fromkeys(message.route for message in self.messages))
        nbytes = sum(message.tensor.nbytes for message in self.messages)
        return f"rank {self.rank} {doing} failed: {nbytes} bytes, tag {self.tag}"

    def refused(self, error: RuntimeError) -> CommError:
        """Return the `CommError` for an error of the backend."""
        return self.failed(f"The peer died, is late or does another operation. The backend says: {error}")


class InFlight(NamedTuple):
    """Messages in the backend. Holds their tensors, because gloo keeps only the addresses."""

    works: Sequence[dist.Work]
    posted: Posted
    hang_up: Callable[[], None] | None = None
    """Closes the connections, which ends all waits on them."""

    def wait(self) -> None:
        """Wait for all messages, each for at most the timeout.

        A wait in the backend blocks its thread. The program's thread must stay interruptible and check for failures of
        other ranks, so it lets another thread wait there.
        """
        watch = watching()
        if watch is None or self.posted.timeout is None or current_thread() is not main_thread():
            self._wait(watch)
            return
        waiting = _waiter().submit(partial(self._wait, watch))
        while True:
            try:
                waiting.result(SLOW)
                return watch.record_progress()
            except FutureTimeoutError:
                if not waiting.done() and (why := watch.deadlock_reason()):
                    raise self.posted.failed(why) from None

    def _wait(self, watch: FailureReports | None) -> None:
        limit = () if self.posted.timeout is None else (self.posted.timeout,)
        mark = object()
        if self.hang_up is not None:
            _waits[mark] = self.hang_up
        try:
            for work in self.works:
                if not work.wait(*limit):
                    raise RuntimeError("the operation was aborted")
                if watch is not None:
                    watch.record_progress()
        except RuntimeError as error:
            raise self.posted.refused(error) from error
        finally:
            _waits.pop(mark, None)


def joined(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return `group`, or the default group for `None`.

    Raises:
        LayoutError: this process is not a member.
    """
    if dist.get_rank(group) < 0:
        raise LayoutError("this process is not a member of the process group that it was given")
    everyone = dist.group.WORLD
    assert everyone is not None, "the rank was asked for above"
    return everyone if group is None else group


MOST_IN_BATCH = 64
"""Operations in one group of NCCL. It cuts longer ones into kernels that may differ between ranks, which then wait for
each other for good (https://github.com/pytorch/pytorch/issues/174288).
"""

_waits: dict[object, Callable[[], None]] = {}
"""Functions that end the waits in which threads are blocked now."""

_FAREWELL = 1.0
"""Seconds for threads to leave waits that were ended."""

_LOOK = 1e-3
"""Seconds between two checks whether they have left."""


def end_waits() -> None:
    """End all waits in which threads are blocked, at the end of the program.

    A thread that returns from the backend after the interpreter is gone would crash the process (SIGABRT).
    """
    deadline = monotonic() + _FAREWELL
    for hang_up in list(_waits.values()):
        hang_up()
    while _waits and monotonic() < deadline:
        sleep(_LOOK)


weakref.finalize(Posted, end_waits)  # at interpreter exit, after the finalizers of queues, which were made later


_waiters = [Worker("shardlite-waiter")]


def _waiter() -> Worker:
    """Return the worker that waits in the backend for the program's thread; a new one if the last one is busy."""
    if not _waiters[0].is_idle:
        _waiters[0] = Worker("shardlite-waiter")
    return _waiters[0]


def _forget() -> None:
    """Drop threads and waits in a forked child: they are its parent's."""
    _waits.clear()
    _waiters[0] = Worker("shardlite-waiter")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


class GroupTransport(Transport):
    """A transport over `group`: a process group, `None` for the default one, or a backend of `reconnect`."""

    _timeout: timedelta | None = None
    """Maximum time of a wait, or `None`: that of the group."""

    def __init__(self, group: dist.ProcessGroup | Backend | None) -> None:
        self._group: Any = group if isinstance(group, Backend) else joined(group)
        self.rank = self._group.rank()
        self.world_size = self._group.size()

    def _hang_up(self) -> None:
        """End the waits in which threads are blocked. A no-op if waits do not block."""


class GlooTransport(GroupTransport):
    """Messages over `group` (`None`: the default group), each completed within `timeout` of being waited for.

    Gloo closes the connection of two ranks for good once a wait between them has timed out: after a `CommError` the
    process group is lost and the run must end.
    """

    def __init__(self, group: dist.ProcessGroup | Backend | None, timeout: timedelta) -> None:
        super().__init__(group)
        self._timeout = timeout

    def isend(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """Start sending `tensor` to rank `peer` of the group."""
        return self._start(Message(tensor, peer, outgoing=True), tag)

    def irecv(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """Start receiving the next message with `tag` from rank `peer` of the group into `tensor`."""
        return self._start(Message(tensor, peer, outgoing=False), tag)

    def _start(self, message: Message, tag: int) -> Pending:
        """Post a message by the group's own methods: `dist.isend` costs twice as much Python time."""
        check_on_host("GlooTransport", message.tensor)
        if message.tensor.numel() == 0:
            return Completed()
        posted = Posted(self.rank, (message,), tag, self._timeout)
        start = self._group.send if message.outgoing else self._group.recv
        try:
            return InFlight((start([message.tensor], message.peer, tag),), posted, self._hang_up)
        except RuntimeError as error:
            raise posted.refused(error) from error

    def _hang_up(self) -> None:
        """Close all connections, by waits that time out."""
        for distance in range(1, self.world_size):
            with suppress(RuntimeError):
                peer = (self.rank + distance) % self.world_size
                self._group.recv([torch.empty(1)], peer, _NEVER_SENT).wait(timedelta(milliseconds=1))


_NEVER_SENT = 0x7FFFFFFF
"""A tag that messages have with probability 2^-31. At the end of a program a collision is harmless."""


class NcclTransport(GroupTransport, BatchedTransport):
    """Messages over `group` (`None`: the default group), whose backend for the tensors' device is NCCL, or over a
    communicator beside it, which the transport has until it is garbage.

    It guarantees less than other transports. NCCL has no tags: it matches messages by their order alone. So all ranks
    must start their exchanges in one order, from one thread at a time, and concurrent operations need separate process
    groups.

    A wait puts the current stream behind the messages and returns. A late or dead peer is therefore detected by the
    process group's watchdog, after the timeout of the group, which by default ends the process; a `CommError` is raised
    only for immediate failures.
    """

    _communicator: Communicator | None = None
    """`None`: that of the group, whose operations the program orders."""

    def __init__(self, group: dist.ProcessGroup | Backend | Communicator | None) -> None:
        if isinstance(group, Communicator):
            super().__init__(group.backend)
            self._communicator = group
            group.lend(self)
        else:
            super().__init__(group)

    def empty_persistent(self, nbytes: int, device: torch.device) -> Tensor:
        """Return memory [nbytes] for a buffer that is kept, registered with the communicator if the route says so."""
        if self._communicator is None or not self._communicator.registers:
            return super().empty_persistent(nbytes, device)
        return self._communicator.empty(nbytes)

    def _take_turn(self) -> None:
        """Put the current stream behind the communicator's last operation."""
        if self._communicator is not None:
            self._communicator.turn()

    def _backend(self, device: torch.device) -> Any:
        return self._group if isinstance(self._group, Backend) else self._group._get_backend(device)

    def exchange(self, messages: Sequence[Message], tag: int) -> Pending:
        """Start all `messages` in one batch.

        The first exchange over a group creates its communicator, unless the group was initialised eagerly. That call
        returns once every rank of the group has called its first exchange.
        """
        self._take_turn()
        batch = [message for message in messages if message.tensor.numel()]
        if not batch:
            return Completed()
        posted = Posted(self.rank, messages, tag)
        backend = self._backend(batch[0].tensor.device)
        try:
            works = _batched(backend, batch, tag) if backend.supports_coalescing else _posted(backend, batch, tag)
        except RuntimeError as error:
            raise posted.refused(error) from error
        return InFlight(works, posted)


def _posted(backend: Any, messages: Sequence[Message], tag: int) -> list[dist.Work]:
    """Post messages one by one, as bytes: NCCL has no 16-bit integers."""
    return [
        (backend.send if each.outgoing else backend.recv)([each.tensor.detach().view(torch.uint8)], each.peer, tag)
        for each in messages
    ]


def _batched(backend: Any, messages: Sequence[Message], tag: int) -> list[dist.Work]:
    """Post messages as one group of the backend."""
    assert len(messages) <= MOST_IN_BATCH, f"a batch of {len(messages)} messages may hang"
    backend._start_coalescing()
    try:
        _posted(backend, messages, tag)
    finally:
        work = backend._end_coalescing()
    return [work]


class StagedTransport(Transport):
    """Messages over `group` through a `GlooTransport`, of tensors on any device.

    Copies run on the current stream of the tensor's device: a send reads results enqueued before it, and operations
    enqueued after `wait` see the received data. Host memory for CUDA tensors is pinned, so that copies run at full
    speed.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout: timedelta) -> None:
        self._host = GlooTransport(group, timeout)
        self.holder = self._books = Ledger()
        self.rank = self._host.rank
        self.world_size = self._host.world_size

    def isend(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """Copy `tensor` to the host, wait for that copy, and start sending it to rank `peer` of the group."""
        staged = self._on_host(tensor)
        staged.copy_(tensor.detach(), non_blocking=True)
        _wait_for_copy(tensor.device)
        return self._host.isend(staged, peer, tag)

    def irecv(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """Start receiving the next message with `tag` from rank `peer` of the group, for `tensor`."""
        staged = self._on_host(tensor)
        return _Arriving(self._host.irecv(staged, peer, tag), staged, tensor)

    def _on_host(self, tensor: Tensor) -> Tensor:
        staged = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, requires_grad=False)
        self._books.track("pinned memory", staged)
        return staged


@dataclass(frozen=True)
class _Arriving:
    """A message that is received in host memory and copied to a device."""

    pending: Pending
    staged: Tensor
    tensor: Tensor

    def wait(self) -> None:
        """Wait for the message, and start its copy to the device.

        The copy may still run when `staged` is freed. That is safe: PyTorch records the copy with the pinned memory,
        and its allocator reuses the memory only after the copy is done.
        """
        self.pending.wait()
        self.tensor.detach().copy_(self.staged, non_blocking=True)


def _wait_for_copy(device: torch.device) -> None:
    """Block until the current stream of `device` has finished its work so far. CPU copies are finished at once."""
    if device.type == "cuda":
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # blocking: wait asleep
        copied.record(torch.cuda.current_stream(device))
        copied.synchronize()
