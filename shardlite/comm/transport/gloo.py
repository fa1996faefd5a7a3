"""Transports over process groups of `torch.distributed`, by point-to-point messages of gloo.

| transport | for | how |
|---|---|---|
| `GlooTransport` | CPU tensors | one message per call |
| `StagedTransport` | CUDA tensors over gloo, which cannot send them | each message is copied through host memory |

Failures of `torch.distributed` become `CommError`s that name both ranks. `nccl.py` does the same over NCCL.

Operations that run at the same time over a backend without tags each need a connection of their own (`reconnect`).
`dist.new_group` does not suit a library: its groups are never freed before the program ends, it deadlocks if ranks are
in different numbers of groups (it names a group by that number), and where the default group is bound to a device, all
ranks of the program have to call it. A backend that is created directly has none of these problems.
"""

import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from threading import current_thread, main_thread
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Backend
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from shardlite.comm.control.failure_reports import FailureReports, reports_of_thread
from shardlite.comm.control.interrupts import SLOW
from shardlite.comm.control.store import all_gather_json
from shardlite.comm.streams import HostWork, ThreadQueue, blocked
from shardlite.comm.transport.base import Completed, Message, Pending, Transport, check_on_host
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
        return self.failed(f"The peer died, is late or does another operation. The backend reports: {error}")


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
        reports = reports_of_thread()
        if reports is None or self.posted.timeout is None or current_thread() is not main_thread():
            self._wait(reports)
            return
        work = _waiter.submit(partial(self._wait, reports))
        while not work.ends_within(SLOW):
            if why := reports.deadlock_reason():
                raise self.posted.failed(why)
        work.wait()
        reports.record_progress()

    def _wait(self, reports: FailureReports | None) -> None:
        limit = () if self.posted.timeout is None else (self.posted.timeout,)
        try:
            with blocked(self.hang_up):
                for work in self.works:
                    if not work.wait(*limit):
                        raise RuntimeError("the operation was aborted")
                    if reports is not None:
                        reports.record_progress()
        except RuntimeError as error:
            raise self.posted.refused(error) from error


class _Waiter:
    """A thread that waits in the backend for the program's thread; a new one while the last one is blocked."""

    def __init__(self) -> None:
        self._queue: ThreadQueue | None = None
        self._latest: HostWork | None = None

    def submit(self, wait: Callable[[], None]) -> HostWork:
        """Run `wait` on the thread."""
        if self._queue is None or (self._latest is not None and not self._latest.done()):
            self._queue = ThreadQueue("waiter", farewell=0.0)
        self._latest = self._queue.submit(wait)
        return self._latest

    def forget(self) -> None:
        """Drop the thread in a forked child: it is its parent's."""
        self._queue = self._latest = None


_waiter = _Waiter()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_waiter.forget)


def member_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return `group`, or the default group for `None`.

    Raises:
        LayoutError: this process is not a member.
    """
    if dist.get_rank(group) < 0:
        raise LayoutError("this process is not a member of the process group that it was given")
    everyone = dist.group.WORLD
    assert everyone is not None, "the rank was asked for above"
    return everyone if group is None else group


def reconnect(group: dist.ProcessGroup, timeout: timedelta, some: Sequence[int] | None = None) -> Backend:
    """Return a new backend between the ranks of `group`, in their order. Collective.

    It is between `some` of them, this one included, if given. Ranks give the same or have none in common. Its
    connections are closed when it is freed.

    Raises:
        CommError: ranks did not arrive, or cannot be connected.
    """
    members = range(group.size()) if some is None else some
    # The token is new, so that nothing is found under this name that others have left in the store.
    tokens = all_gather_json(group, secrets.token_hex(8), "another connection over gloo", timeout)
    try:
        return over_gloo(tokens[members[0]], members.index(group.rank()), len(members), timeout)
    except RuntimeError as error:
        raise refused(group, members, "gloo", error) from error


def refused(group: dist.ProcessGroup, members: Sequence[int], backend: str, error: RuntimeError) -> CommError:
    """Return an error that says who cannot be connected over a backend, and what that says."""
    return CommError(
        f"rank {group.rank()} cannot open another connection to ranks {global_ranks(group, members)} over {backend}. "
        f"The backend reports: {error}"
    )


def global_ranks(group: dist.ProcessGroup, members: Sequence[int]) -> list[int]:
    """Return the numbers that some ranks of a group have in the default one."""
    ranks = dist.get_process_group_ranks(group)
    return [ranks[each] for each in members]


def over_gloo(name: str, rank: int, size: int, timeout: timedelta) -> Backend:
    """Return a new backend between `size` ranks, which call this with one new name. Collective.

    Raises:
        RuntimeError: ranks cannot be connected.
    """
    store = PrefixStore(f"shardlite/gloo/{name}", _get_default_store())
    made = dist.ProcessGroupGloo(store, rank, size, timeout)
    # A rank may be connected while its peers still wait to hear of it, and closes the connection when it drops `made`.
    made.barrier().wait()  # type: ignore[attr-defined]  # it is not in the stubs
    return made


class GroupTransport(Transport):
    """A transport over `group`: a process group, `None` for the default one, or a backend of `reconnect`."""

    _timeout: timedelta | None = None
    """Maximum time of a wait, or `None`: that of the group."""

    def __init__(self, group: dist.ProcessGroup | Backend | None) -> None:
        self._group: Any = group if isinstance(group, Backend) else member_group(group)
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
