"""Messages over NCCL, and additional communicators, which models reuse one after the other.

Gathers and reductions run concurrently, along with the program's own collectives. NCCL matches operations only by their
order, so gathers, reductions and the program use separate communicators. A communicator takes GPU memory: 52 MiB on an
H200 (torch 2.11.0, NCCL 2.28.9). Therefore the communicator of a deleted model is reused by the next model over the
same ranks:

- Ranks collect garbage at different times. So they exchange lists of their free communicators, and take the first
  communicator that is free on all ranks.
- An operation of the former model may still wait for a rank that will never start it. So ranks also exchange the number
  of operations that each communicator has started. If the numbers differ, the communicator stays unused.
- The former model may have used another stream. So each operation is ordered after the previous operation (`turn`).

Communicators are shut down when the program ends and not when a model is deleted. The reason is that shutting down is a
collective call, but Python may collect a model at any time and on any thread.
"""

import atexit
import secrets
import weakref
from collections.abc import Sequence
from datetime import timedelta
from threading import Lock
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Backend
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from shardlite.comm.control.store import all_gather_json
from shardlite.comm.transport.batches import BatchTransport
from shardlite.comm.transport.gloo import GroupTransport, InFlight, Posted, global_ranks, refused
from shardlite.comm.transport.messages import Completed, Message, Pending
from shardlite.config import Route
from shardlite.errors import LayoutError

MOST_IN_BATCH = 64
"""Maximum number of operations in one NCCL group. NCCL splits longer groups into kernels. The split may differ between
ranks, which then deadlock (https://github.com/pytorch/pytorch/issues/174288).
"""


class Communicator:
    """An NCCL communicator, used by one transport at a time.

    Communicators with the same `purpose` have equal ranks and options, so one communicator can replace another.
    """

    def __init__(
        self, name: str, backend: Backend, device: torch.device, purpose: object, *, registers: bool = False
    ) -> None:
        self.name = name
        """Name of the communicator. It is equal on all ranks."""

        self.backend: Any = backend
        self.purpose = purpose
        self.operations = 0
        """Number of operations that this communicator has started."""

        self.registers = registers
        """Whether the communicator has an allocator for registered memory."""

        self.is_free = False
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._captured = False

    def lend(self, user: object) -> None:
        """Reserve the communicator for `user` until `user` is garbage-collected, on any thread."""
        self.is_free = False
        # The finalizer takes no lock, because the thread that collects garbage may already hold the lock.
        weakref.finalize(user, setattr, self, "is_free", True).atexit = False

    def turn(self) -> None:
        """Begin an operation on the current stream, after the previous operation, which may be on another stream.

        NCCL requires one order of the operations of a communicator. The queue of a model orders the model's streams.
        But nothing else orders the streams of two models that use the communicator one after the other. A stream that a
        CUDA graph captures does not wait for other streams, because PyTorch has waited for the GPU before the capture.
        """
        self.operations += 1
        stream = torch.cuda.current_stream(self._device)
        captured = torch.cuda.is_current_stream_capturing()
        if self._stream is not None and self._stream != stream and captured == self._captured:
            stream.wait_stream(self._stream)
        self._stream, self._captured = stream, captured

    def empty(self, nbytes: int) -> Tensor:
        """Return uninitialized memory [nbytes] of NCCL's allocator, registered with this communicator.

        The memory is allocated from a `torch.cuda.MemPool` of the backend. The backend registers the pool, and
        deregisters the pool before shutting down. Freed memory returns to the pool, so only models that use this
        communicator can reuse the memory.
        """
        memory: Tensor = self.backend.allocate_tensor(nbytes, dtype=torch.uint8, device=self._device)
        return memory


_all: list[Communicator] = []
"""All communicators in the order of their creation, which is equal on all ranks."""

_lock = Lock()
"""Held while a thread reserves free communicators."""


def communicator(
    group: dist.ProcessGroup, device: torch.device, timeout: timedelta, route: Route, some: Sequence[int] | None = None
) -> Communicator:
    """Return an unused communicator between the ranks of `group`. Collective.

    If `some` is not `None`, the communicator connects only the ranks in `some`, which must include this rank. Any two
    ranks must pass either the same list or disjoint lists.

    Raises:
        LayoutError: `route.registered` is set, and NCCL's allocator is not available on a rank.
        CommError: a rank did not arrive or cannot be connected.
    """
    device = device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
    if route.registered:
        _check_allocator(group, timeout)
    members = range(group.size()) if some is None else some
    options = _options(group, members, timeout, route)
    purpose = _purpose(group, device, timeout, route, options)
    with _lock:
        offered = [each for each in _all if each.is_free and each.purpose == purpose]
        for each in offered:
            each.is_free = False
    taken: Communicator | None = None
    try:
        taken, name = _agree(group, members, offered, timeout)
        if taken is None:
            backend = _connected(group, members, device, name, options, route)
            taken = Communicator(name, backend, device, purpose, registers=route.registered)
            if not _all:
                atexit.register(_close)
            _all.append(taken)
        return taken
    finally:
        for each in offered:
            each.is_free = each is not taken


def _agree(
    group: dist.ProcessGroup, members: Sequence[int], offered: Sequence[Communicator], timeout: timedelta
) -> tuple[Communicator | None, str]:
    """Return the first communicator that all `members` offer, if any, and a name for a new communicator."""
    # The name is random, so the store contains no entries of an earlier group under the same name.
    mine = [secrets.token_hex(8), [[each.name, each.operations] for each in offered]]
    everyone = all_gather_json(group, mine, "an additional communicator of NCCL", timeout)
    rows = [everyone[each] for each in members]
    name, first = rows[0]
    # Search in the order of the first member, because ranks whose threads wrap models concurrently may create
    # communicators in different orders.
    common = next((each for each, operations in first if all([each, operations] in theirs for _, theirs in rows)), None)
    return next((each for each in offered if each.name == common), None), name


def _connected(
    group: dist.ProcessGroup, members: Sequence[int], device: torch.device, name: str, options: Any, route: Route
) -> Backend:
    """Return a new backend, under a name that is equal on all ranks. Collective."""
    options.group_name = f"shardlite {name}"
    store = PrefixStore(f"shardlite/nccl/{name}", _get_default_store())
    try:
        made = dist.ProcessGroupNCCL(store, members.index(group.rank()), len(members), options)
        if route.registered:
            # Registration requires a communicator. By default, NCCL creates the communicator at the first operation.
            made.eager_connect_single_device(device)
    except RuntimeError as error:
        raise refused(group, members, "nccl", error) from error
    return made


def _options(group: dist.ProcessGroup, members: Sequence[int], timeout: timedelta, route: Route) -> Any:
    """Return the options of the group's own communicator, overridden by the options of the route."""
    options: Any = dist.ProcessGroupNCCL.Options()
    options.config = _backend_of(group).options.config
    options.global_ranks_in_group = global_ranks(group, members)
    options.is_high_priority_stream = route.high_priority
    options._timeout = timeout
    if route.max_ctas is not None:
        options.config.max_ctas = route.max_ctas
        options.config.min_ctas = min(options.config.min_ctas, route.max_ctas)  # the default is the smallest integer
    return options


def _purpose(
    group: dist.ProcessGroup, device: torch.device, timeout: timedelta, route: Route, options: Any
) -> tuple[object, ...]:
    """Return everything that must be equal for one communicator to replace another.

    The result includes the route, because transports that send messages use the communicator on NCCL's own stream, and
    transports of whole collectives use it on the current stream.
    """
    config = options.config
    own = [each for name in dir(config) if name[0] != "_" and not callable(each := getattr(config, name))]
    return (_get_default_store(), group.rank(), *options.global_ranks_in_group, device, timeout, route, *own)


def _backend_of(group: dist.ProcessGroup) -> Any:
    return group._get_backend(torch.device("cuda"))


def _check_allocator(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Check that NCCL's allocator is available on every rank. Collective.

    Raises:
        LayoutError: the allocator is not available on a rank; the error quotes the backend.
    """
    try:
        reason = "" if _backend_of(group).mem_allocator is not None else "it has no allocator"
    except RuntimeError as error:
        reason = str(error)
    rows = all_gather_json(group, reason, "whether NCCL's allocator is available", timeout)
    missing = next((f"rank {rank}: {why}" for rank, why in enumerate(rows) if why), "")
    if missing:
        raise LayoutError(
            "Route(registered=True) requires NCCL's allocator, which is not available. The backend reports on "
            f"{missing}. PyTorch provides it with NCCL 2.19 or newer on GPUs whose driver supports multicast, which "
            "drivers of virtual machines may not. Remove registered=True"
        )


def _close() -> None:
    """Shut down all communicators after their final operations, in an order that is equal on all ranks."""
    while _all:
        _all.pop().backend.shutdown()


class NcclTransport(BatchTransport, GroupTransport):
    """Messages over NCCL: over `group` (`None` is the default group), or over a communicator.

    The transport reserves its communicator until the transport is garbage-collected. `NcclTransport` guarantees less
    than other transports: NCCL has no tags, and matches messages only by their order. So all ranks must start their
    exchanges in one order, from one thread at a time, and concurrent operations need separate process groups.

    A wait lets the current stream wait for the messages, and returns immediately. So the process group's watchdog
    detects a late or dead peer, after the timeout of the group, and by default ends the process. A `CommError` is
    raised only for immediate failures.
    """

    blocking = False

    _communicator: Communicator | None = None
    """Communicator of the messages. `None` means the group's own communicator, whose operations the program orders."""

    def __init__(self, group: dist.ProcessGroup | Backend | Communicator | None) -> None:
        if isinstance(group, Communicator):
            super().__init__(group.backend)
            self._communicator = group
            group.lend(self)
        else:
            super().__init__(group)

    def empty_persistent(self, nbytes: int, device: torch.device) -> Tensor:
        """Return memory [nbytes] for a long-lived buffer, registered with the communicator if the route selects it."""
        if self._communicator is None or not self._communicator.registers:
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
        return self._communicator.empty(nbytes)

    def _take_turn(self) -> None:
        """Order an operation on the current stream after the communicator's previous operation."""
        if self._communicator is not None:
            self._communicator.turn()

    def _backend(self, device: torch.device) -> Any:
        return self._group if isinstance(self._group, Backend) else self._group._get_backend(device)

    def exchange(self, messages: Sequence[Message], tag: int) -> Pending:
        """Start all `messages` in one batch.

        The first exchange over a group creates the group's communicator, unless the group was initialized eagerly. This
        exchange returns after every rank of the group has called its own first exchange.
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
    """Post messages one by one, as bytes, because NCCL does not support 16-bit integers."""
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
