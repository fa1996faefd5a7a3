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

import torch
import torch.distributed as dist
from torch import Tensor

from shardlite.comm.control.failure_reports import FailureReports, watching
from shardlite.comm.control.interrupts import SLOW
from shardlite.comm.control.worker import Worker
from shardlite.comm.transport.base import Completed, Message, OneByOne, Pending, Plain
from shardlite.errors import CommError, LayoutError
from shardlite.telemetry import Ledger


@dataclass(frozen=True)
class Posted:
    """Messages with what an error has to say: who exchanges what with whom, under which tag, within what time.

    Without a `timeout` it is the process group that decides how long a message may take.
    """

    rank: int
    messages: Sequence[Message]
    tag: int
    timeout: timedelta | None = None

    def failed(self, why: str) -> CommError:
        """Return the error of these messages."""
        doing = " and ".join(dict.fromkeys(message.route for message in self.messages))
        nbytes = sum(message.tensor.nbytes for message in self.messages)
        limit = "" if self.timeout is None else f", timeout {self.timeout.total_seconds():g} s"
        return CommError(f"rank {self.rank} {doing} failed: {nbytes} bytes, tag {self.tag}{limit}. {why}")

    def refused(self, error: RuntimeError) -> CommError:
        """Return what the backend has raised in our words."""
        return self.failed(f"The peer died, is late or does another operation. The backend says: {error}")


@dataclass(frozen=True)
class InFlight:
    """Messages that the backend is working on; holds their tensors, because gloo keeps only the addresses."""

    works: Sequence[dist.Work]
    posted: Posted
    hang_up: Callable[[], None] | None = None
    """Closes the connections, so that all waits over them end."""

    def wait(self) -> None:
        """Wait for all of them, each for at most the timeout.

        The backend blocks the thread that waits in it. That of the program can be interrupted, and looks at whether
        other ranks have failed: so it has another one wait there.
        """
        watch = watching()
        if watch is None or self.posted.timeout is None or current_thread() is not main_thread():
            self._wait(watch)
            return
        waiting = _waiter().submit(partial(self._wait, watch))
        while True:
            try:
                waiting.result(SLOW)
                return watch.goes_on()
            except FutureTimeoutError:
                if not waiting.done() and (why := watch.hopeless()):
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
                    watch.goes_on()
        except RuntimeError as error:
            raise self.posted.refused(error) from error
        finally:
            _waits.pop(mark, None)


def joined(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return `group`, or the default one for `None`.

    Raises:
        LayoutError: this process is not a member.
    """
    if dist.get_rank(group) < 0:
        raise LayoutError("this process is not a member of the process group that it was given")
    everyone = dist.group.WORLD
    assert everyone is not None, "the rank was asked for above"
    return everyone if group is None else group


_waits: dict[object, Callable[[], None]] = {}
"""How to end each wait that blocks a thread now."""

_FAREWELL = 1.0
"""Seconds in which threads leave waits that have ended."""

_LOOK = 1e-3
"""Seconds between two looks at whether they have."""


def end_waits() -> None:
    """End all waits that block a thread, at the end of the program.

    A thread that comes back from the backend when the interpreter is gone would take the process down (SIGABRT).
    """
    deadline = monotonic() + _FAREWELL
    for hang_up in list(_waits.values()):
        hang_up()
    while _waits and monotonic() < deadline:
        sleep(_LOOK)


weakref.finalize(Posted, end_waits)  # when the interpreter ends, after lanes, which were made later, have waited


_waiters = [Worker("shardlite-waiter")]


def _waiter() -> Worker:
    """Return who waits in the backend for the thread of the program: a new one, if the last one is still at it."""
    if not _waiters[0].is_idle:
        _waiters[0] = Worker("shardlite-waiter")
    return _waiters[0]


def _forget() -> None:
    """Forget threads and waits in a forked child: they are its parent's."""
    _waits.clear()
    _waiters[0] = Worker("shardlite-waiter")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


class GlooTransport(OneByOne):
    """Messages over `group` (`None`: the default group), each to be done within `timeout` of being waited for.

    Gloo closes the connection of two ranks for good once a wait between them has timed out: after a `CommError` the
    process group is lost and the run must end.
    """

    blocking = True

    def __init__(self, group: dist.ProcessGroup | None, timeout: timedelta) -> None:
        self._group = joined(group)
        self._timeout = timeout
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)

    def isend(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """Start sending `tensor` to rank `peer` of the group."""
        return self._start(Message(tensor, peer, outgoing=True), tag)

    def irecv(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """Start receiving the next message with `tag` from rank `peer` of the group into `tensor`."""
        return self._start(Message(tensor, peer, outgoing=False), tag)

    def _start(self, message: Message, tag: int) -> Pending:
        """Hand a message to the backend, by the group's own methods: `dist.isend` costs twice as much Python."""
        _check(message.tensor)
        if message.tensor.numel() == 0:
            return Completed()
        posted = Posted(self.rank, (message,), tag, self._timeout)
        start = self._group.send if message.outgoing else self._group.recv
        try:
            return InFlight((start([message.tensor], message.peer, tag),), posted, self._hang_up)
        except RuntimeError as error:
            raise posted.refused(error) from error

    def _hang_up(self) -> None:
        """Close all connections, by a wait that times out."""
        with suppress(RuntimeError):
            peer = (self.rank + 1) % self.world_size
            self._group.recv([torch.empty(1)], peer, _NEVER_SENT).wait(timedelta(milliseconds=1))


_NEVER_SENT = 0x7FFFFFFF
"""A tag that no message has, but once in 2^31; at the end of a program that does no harm."""


def _check(tensor: Tensor) -> None:
    assert tensor.dim() == 1, f"a message is 1-D, got {tuple(tensor.shape)}"
    assert tensor.is_contiguous(), "a message is contiguous"
    if tensor.device.type != "cpu":
        # Gloo would hand the device address to a socket: "Bad address" at best, a crash at worst.
        raise LayoutError(f"GlooTransport sends CPU tensors, got one on {tensor.device}")


class NcclTransport(Plain):
    """Messages over `group` (`None`: the default group), whose backend for the tensors' device is NCCL.

    It promises less than other transports. NCCL knows no tags: it pairs messages by their order alone. So all ranks
    must start their exchanges in one order, from one thread at a time; operations that run at the same time need a
    process group each.

    A wait puts the current stream behind the messages and returns. A peer that is late or dead is therefore noticed by
    the process group's watchdog, after the timeout of the group, and by default that ends the process; a `CommError`
    comes only from what fails at once.
    """

    batched = True
    blocking = False

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = joined(group)
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)

    def isend(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """Start sending `tensor` to rank `peer` of the group: a batch of one."""
        return self.exchange([Message(tensor, peer, outgoing=True)], tag)

    def irecv(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """Start receiving from rank `peer` of the group into `tensor`: a batch of one."""
        return self.exchange([Message(tensor, peer, outgoing=False)], tag)

    def exchange(self, messages: Sequence[Message], tag: int) -> Pending:
        """Start all `messages` in one batch.

        The first exchange over a group creates its communicator, unless an eagerly initialised group has one: the call
        then returns once every rank of the group has come to an exchange of its own.
        """
        batch = [self._operation(message, tag) for message in messages if message.tensor.numel()]
        if not batch:
            return Completed()
        posted = Posted(self.rank, messages, tag)
        try:
            return InFlight(dist.batch_isend_irecv(batch), posted)
        except RuntimeError as error:
            raise posted.refused(error) from error

    def _operation(self, message: Message, tag: int) -> dist.P2POp:
        """Describe a message to PyTorch, as bytes: NCCL has no 16-bit integers."""
        start = dist.isend if message.outgoing else dist.irecv
        content = message.tensor.detach().view(torch.uint8)
        return dist.P2POp(start, content, group=self._group, tag=tag, group_peer=message.peer)


class StagedTransport(OneByOne):
    """Messages over `group` as of a `GlooTransport`, of tensors on any device.

    Copies run on the current stream of the tensor's device: a send sees what was put on it before, and what is put on
    it after `wait` sees what was received. Host memory is pinned for CUDA tensors, so that copies run at full speed.
    """

    blocking = True

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
    """A message that arrives in host memory and belongs on a device."""

    pending: Pending
    staged: Tensor
    tensor: Tensor

    def wait(self) -> None:
        """Wait for the message, and start its copy to the device.

        The copy may still run when `staged` is dropped. That is safe: PyTorch notes a copy from pinned memory with the
        memory, and its allocator hands the memory out again only after the copy is done.
        """
        self.pending.wait()
        self.tensor.detach().copy_(self.staged, non_blocking=True)


def _wait_for_copy(device: torch.device) -> None:
    """Block until what the current stream of `device` holds so far is done. On the CPU a copy is done at once."""
    if device.type == "cuda":
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # blocking: wait asleep
        copied.record(torch.cuda.current_stream(device))
        copied.synchronize()
