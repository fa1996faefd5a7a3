"""Transports over process groups of `torch.distributed`, by point-to-point messages of gloo.

| transport | for | how |
|---|---|---|
| `GlooTransport` | CPU tensors | one message per call |
| `StagedTransport` | CUDA tensors (gloo sends only CPU tensors) | each message is copied through host memory |

Failures of `torch.distributed` are raised as `CommError`s that name both ranks. The transport over NCCL is in
`nccl.py`.

Over a backend without tags, operations that run concurrently need separate connections (`reconnect`). `dist.new_group`
does not suit a library, for three reasons. Groups of `dist.new_group` are only freed when the program ends. The call
deadlocks if ranks are in different numbers of groups, because the number is part of the group's name. And if the
default group is bound to a device, all ranks of the program must make the call. A backend that is created directly has
none of these problems.
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
from shardlite.comm.transport.base import Transport
from shardlite.comm.transport.messages import Completed, Message, Pending, check_on_host
from shardlite.errors import CommError, LayoutError
from shardlite.telemetry import Ledger


class Posted(NamedTuple):
    """Description of messages or of a whole collective, for errors."""

    rank: int
    messages: Sequence[Message] = ()
    tag: int = 0
    timeout: timedelta | None = None
    """Timeout of each wait. `None` uses the timeout of the process group."""

    collective: str = ""
    tensors: Sequence[Tensor] = ()
    """Tensors of the collective."""

    def failed(self, why: str) -> CommError:
        """Return a `CommError` that describes the messages or the collective, and gives the reason `why`."""
        if self.collective:
            what, doing, nbytes = "", f"in {self.collective}", max(each.nbytes for each in self.tensors)
        else:
            what, doing = f", tag {self.tag}", " and ".join(dict.fromkeys(message.route for message in self.messages))
            nbytes = sum(message.tensor.nbytes for message in self.messages)
        limit = "" if self.timeout is None else f", timeout {self.timeout.total_seconds():g} s"
        return CommError(f"rank {self.rank} {doing} failed: {nbytes} bytes{what}{limit}. {why}")

    def refused(self, error: RuntimeError) -> CommError:
        """Return the `CommError` for an error of the backend."""
        return self.failed(f"The peer died, is late, or runs a different operation. The backend reports: {error}")


class InFlight(NamedTuple):
    """Messages that the backend has started, with references to their tensors, because gloo keeps only addresses."""

    works: Sequence[dist.Work]
    posted: Posted
    hang_up: Callable[[], None] | None = None
    """Closes the connections, which ends all waits on them."""

    def wait(self) -> None:
        """Wait for all messages, for at most the timeout per message.

        A wait in the backend blocks the thread that waits. The program's thread must stay interruptible and check for
        failures of other ranks. So the program's thread lets another thread wait in the backend.
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
    """A thread that waits in the backend on behalf of the program's thread. A blocked thread is replaced."""

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
        """Forget the thread in a forked child, because only the parent has this thread."""
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
    assert everyone is not None, "get_rank has checked it"
    return everyone if group is None else group


def reconnect(group: dist.ProcessGroup, timeout: timedelta, some: Sequence[int] | None = None) -> Backend:
    """Return a new gloo backend between the ranks of `group`, in their order. Collective.

    If `some` is not `None`, the backend connects only the ranks in `some`, which must include this rank. Any two ranks
    must pass either the same list or disjoint lists. The connections are closed when the backend is freed.

    Raises:
        CommError: a rank did not arrive or cannot be connected.
    """
    members = range(group.size()) if some is None else some
    # The token is random, so the store contains no entries of an earlier group under the same token.
    tokens = all_gather_json(group, secrets.token_hex(8), "another connection over gloo", timeout)
    try:
        return over_gloo(tokens[members[0]], members.index(group.rank()), len(members), timeout)
    except RuntimeError as error:
        raise refused(group, members, "gloo", error) from error


def refused(group: dist.ProcessGroup, members: Sequence[int], backend: str, error: RuntimeError) -> CommError:
    """Return the `CommError` for the `members` of `group`, which a backend cannot connect."""
    return CommError(
        f"rank {group.rank()} cannot open another connection to ranks {global_ranks(group, members)} over {backend}. "
        f"The backend reports: {error}"
    )


def global_ranks(group: dist.ProcessGroup, members: Sequence[int]) -> list[int]:
    """Return the numbers that the ranks `members` of `group` have in the default group."""
    ranks = dist.get_process_group_ranks(group)
    return [ranks[each] for each in members]


def over_gloo(name: str, rank: int, size: int, timeout: timedelta) -> Backend:
    """Return a new gloo backend between `size` ranks. Collective; all ranks pass the same `name`, used only once.

    Raises:
        RuntimeError: ranks cannot be connected.
    """
    store = PrefixStore(f"shardlite/gloo/{name}", _get_default_store())
    made = dist.ProcessGroupGloo(store, rank, size, timeout)
    # Without a barrier, a rank could free `made`, which closes its connections, while its peers are still connecting.
    made.barrier().wait()  # type: ignore[attr-defined]  # not in the stubs
    return made


class GroupTransport(Transport):
    """A transport over `group`: a process group, `None` for the default group, or a backend of `reconnect`."""

    _timeout: timedelta | None = None
    """Timeout of each wait. `None` uses the timeout of the group."""

    def __init__(self, group: dist.ProcessGroup | Backend | None) -> None:
        self._group: Any = group if isinstance(group, Backend) else member_group(group)
        self.rank = self._group.rank()
        self.world_size = self._group.size()

    def _hang_up(self) -> None:
        """End the waits in which threads are blocked. Has no effect if waits of this transport do not block."""


class GlooTransport(GroupTransport):
    """Messages over `group` (`None` is the default group). A wait for a message takes at most `timeout`.

    If a wait times out, gloo permanently closes the connection of both ranks. So after a `CommError` the process group
    is unusable, and the run must end.
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
        """Post a message by the group's methods, because `dist.isend` takes twice as much Python time."""
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
        """Close all connections, by starting waits that time out."""
        for distance in range(1, self.world_size):
            with suppress(RuntimeError):
                peer = (self.rank + distance) % self.world_size
                self._group.recv([torch.empty(1)], peer, _NEVER_SENT).wait(timedelta(milliseconds=1))


_NEVER_SENT = 0x7FFFFFFF
"""A tag that a real message has only with probability 2^-31. Such a message does no harm: the program is ending."""


class StagedTransport(Transport):
    """Messages of tensors on any device over `group`, through a `GlooTransport`.

    Copies run on the current stream of the tensor's device. So a send reads the results of operations enqueued before
    it, and operations enqueued after `wait` read the received data. Host memory for CUDA tensors is pinned, so that
    copies run at full speed.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout: timedelta) -> None:
        self._host = GlooTransport(group, timeout)
        self.holder = self._books = Ledger()
        self.rank = self._host.rank
        self.world_size = self._host.world_size

    def isend(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """Copy `tensor` to the host, wait for the copy, and start sending it to rank `peer` of the group."""
        staged = self._on_host(tensor)
        staged.copy_(tensor.detach(), non_blocking=True)
        if tensor.is_cuda:
            copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # blocking: do not spin
            copied.record(torch.cuda.current_stream(tensor.device))
            copied.synchronize()
        return self._host.isend(staged, peer, tag)

    def irecv(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """Start receiving the next message with `tag` from rank `peer` of the group, into host memory for `tensor`."""
        staged = self._on_host(tensor)
        return _Arriving(self._host.irecv(staged, peer, tag), staged, tensor)

    def _on_host(self, tensor: Tensor) -> Tensor:
        staged = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, requires_grad=False)
        self._books.track("pinned memory", staged)
        return staged


@dataclass(frozen=True)
class _Arriving:
    """A message that is received in host memory, then copied to a device."""

    pending: Pending
    staged: Tensor
    tensor: Tensor

    def wait(self) -> None:
        """Wait for the message, and start its copy to the device.

        The copy may still run when `staged` is freed. This is safe, because PyTorch's allocator of pinned memory reuses
        the memory only after the copy has ended.
        """
        self.pending.wait()
        self.tensor.detach().copy_(self.staged, non_blocking=True)
