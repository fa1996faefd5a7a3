"""Messages over NCCL, and communicators in addition to that of a process group. Models use them one after the other.

Gathers and reductions run at the same time, and at the same time as the program's own collectives. NCCL matches
operations by their order alone, so each of the three has its own communicator. One takes memory of the GPU: 52 MiB on
an H200 (torch 2.11.0, NCCL 2.28.9). So the communicator of a deleted model serves the next model over the same ranks:

- Ranks collect garbage at different times. They tell each other which communicators are free, and take the first that
  is free on all of them.
- An operation of the former model may still wait for a rank that will never start it. So ranks also tell each other how
  many operations each communicator has started. If the numbers differ it stays unused.
- The former model may have used another stream. Each operation is ordered after the last one (`turn`).

Communicators are shut down when the program ends, not when a model is deleted: that is a collective call, and garbage
is collected on any thread.
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
from shardlite.comm.transport.base import BatchedTransport, Completed, Message, Pending
from shardlite.comm.transport.gloo import GroupTransport, InFlight, Posted, global_ranks, refused
from shardlite.config import Route
from shardlite.errors import LayoutError

MOST_IN_BATCH = 64
"""Operations in one group of NCCL. It cuts longer ones into kernels that may differ between ranks, which then wait for
each other for good (https://github.com/pytorch/pytorch/issues/174288).
"""


class Communicator:
    """A communicator of NCCL, for one transport at a time.

    Communicators of one `purpose` have equal ranks and options, and can replace each other.
    """

    def __init__(
        self, name: str, backend: Backend, device: torch.device, purpose: object, *, registers: bool = False
    ) -> None:
        self.name = name
        """Equal on all ranks."""

        self.backend: Any = backend
        self.purpose = purpose
        self.operations = 0
        """Number of operations that were started."""

        self.registers = registers
        """Whether it has an allocator whose memory is registered with it."""

        self.is_free = False
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._captured = False

    def lend(self, user: object) -> None:
        """Let `user` have the communicator until it is garbage, whichever thread collects it."""
        self.is_free = False
        weakref.finalize(user, self._take_back).atexit = False

    def _take_back(self) -> None:
        """Set a flag, and take no lock: the thread that collects garbage may hold it."""
        self.is_free = True

    def turn(self) -> None:
        """Begin an operation on the current stream, after the last one, which may be on another stream.

        NCCL needs the operations of a communicator in one order. Streams of one model are ordered by its queue; those
        of two models that use the communicator one after the other are not. A stream that a CUDA graph captures waits
        for no other: PyTorch has waited for the GPU before.
        """
        self.operations += 1
        stream = torch.cuda.current_stream(self._device)
        captured = torch.cuda.is_current_stream_capturing()
        if self._stream is not None and self._stream != stream and captured == self._captured:
            stream.wait_stream(self._stream)
        self._stream, self._captured = stream, captured

    def empty(self, nbytes: int) -> Tensor:
        """Return uninitialised memory [nbytes] of NCCL's allocator, registered with this communicator.

        It comes from a `torch.cuda.MemPool` of the backend, which it registers, and deregisters before it shuts down.
        What is freed returns to this pool: the next model with the communicator may have it, other tensors may not.
        """
        memory: Tensor = self.backend.allocate_tensor(nbytes, dtype=torch.uint8, device=self._device)
        return memory


_all: list[Communicator] = []
"""In the order in which they were made, which is equal on all ranks."""

_lock = Lock()
"""Of those who look for free ones."""


def communicator(
    group: dist.ProcessGroup,
    device: torch.device,
    timeout: timedelta,
    route: Route,
    some: Sequence[int] | None = None,
) -> Communicator:
    """Return a communicator between the ranks of `group` that nothing else uses. Collective.

    It is between `some` of them, this one included, if given. Ranks give the same or have none in common.

    Raises:
        LayoutError: `route.registered`, and a rank does not have NCCL's allocator.
        CommError: ranks did not arrive, or cannot be connected.
    """
    device = device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
    if route.registered:
        _check_allocator(group, timeout)
    members = range(group.size()) if some is None else some
    options = _options(group, members, timeout, route)
    purpose = _purpose(group, device, timeout, route, options)
    offered = _reserve(purpose)
    taken: Communicator | None = None
    try:
        taken, name = _agree(group, members, offered, timeout)
        if taken is None:
            backend = _connected(group, members, device, name, options, route)
            taken = Communicator(name, backend, device, purpose, registers=route.registered)
            _keep(taken)
        return taken
    finally:
        for each in offered:
            each.is_free = each is not taken


def _reserve(purpose: object) -> list[Communicator]:
    """Return the free communicators of a purpose, which nobody else gets meanwhile."""
    with _lock:
        found = [each for each in _all if each.is_free and each.purpose == purpose]
        for each in found:
            each.is_free = False
        return found


def _agree(
    group: dist.ProcessGroup, members: Sequence[int], offered: Sequence[Communicator], timeout: timedelta
) -> tuple[Communicator | None, str]:
    """Return the first communicator that all `members` offer, if any, and a name for a new one."""
    # The name is new, so that nothing is found under it that others have left in the store.
    mine = [secrets.token_hex(8), [[each.name, each.operations] for each in offered]]
    everyone = all_gather_json(group, mine, "an additional communicator of NCCL", timeout)
    rows = [everyone[each] for each in members]
    name, first = rows[0]
    # The first in the order of one rank: threads that wrap models at once may have made them in another one elsewhere.
    common = next((each for each, operations in first if all([each, operations] in theirs for _, theirs in rows)), None)
    return next((each for each in offered if each.name == common), None), name


def _connected(
    group: dist.ProcessGroup, members: Sequence[int], device: torch.device, name: str, options: Any, route: Route
) -> Backend:
    """Return a new backend under a name that all ranks have agreed on. Collective."""
    options.group_name = f"shardlite {name}"
    store = PrefixStore(f"shardlite/nccl/{name}", _get_default_store())
    try:
        made = dist.ProcessGroupNCCL(store, members.index(group.rank()), len(members), options)
        if route.registered:  # which takes a communicator, and NCCL's is made by the first operation otherwise
            made.eager_connect_single_device(device)
    except RuntimeError as error:
        raise refused(group, members, "nccl", error) from error
    return made


def _options(group: dist.ProcessGroup, members: Sequence[int], timeout: timedelta, route: Route) -> Any:
    """Return the options of the group's own communicator, with those of the route."""
    options: Any = dist.ProcessGroupNCCL.Options()
    options.config = _backend_of(group).options.config
    options.global_ranks_in_group = global_ranks(group, members)
    options.is_high_priority_stream = route.high_priority
    options._timeout = timeout
    if route.max_ctas is not None:
        options.config.max_ctas = route.max_ctas
        options.config.min_ctas = min(options.config.min_ctas, route.max_ctas)  # the smallest integer if not set
    return options


def _purpose(
    group: dist.ProcessGroup, device: torch.device, timeout: timedelta, route: Route, options: Any
) -> tuple[object, ...]:
    """Return all that communicators must have in common to replace each other.

    The route is part of it because messages run on a stream of NCCL's, and collectives on the current stream.
    """
    config = options.config
    settings = [getattr(config, name) for name in dir(config) if not name.startswith("_")]
    own = [each for each in settings if not callable(each)]
    return (_get_default_store(), group.rank(), *options.global_ranks_in_group, device, timeout, route, *own)


def _backend_of(group: dist.ProcessGroup) -> Any:
    return group._get_backend(torch.device("cuda"))


def _check_allocator(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Check that every rank has NCCL's allocator. Collective.

    Raises:
        LayoutError: one does not; the error has the words of the backend.
    """
    rows = all_gather_json(group, _why_no_allocator(group), "whether NCCL's allocator is available", timeout)
    missing = next((f"rank {rank}: {why}" for rank, why in enumerate(rows) if why), "")
    if missing:
        raise LayoutError(
            f"Route(registered=True) takes NCCL's allocator, which is not available. The backend says on {missing}. "
            "PyTorch offers it with NCCL 2.19 or newer on GPUs whose driver supports multicast, as those of virtual "
            "machines may not: leave registered=True out"
        )


def _why_no_allocator(group: dist.ProcessGroup) -> str:
    """Return what the backend says of its allocator if that is not available, else `""`."""
    try:
        allocator = _backend_of(group).mem_allocator
    except RuntimeError as error:
        return str(error)
    return "" if allocator is not None else "it has no allocator"


def _keep(made: Communicator) -> None:
    if not _all:
        atexit.register(_close)
    _all.append(made)


def _close() -> None:
    """Shut down all communicators, after their last operations. All ranks do so in one order."""
    while _all:
        _all.pop().backend.shutdown()


class NcclTransport(GroupTransport, BatchedTransport):
    """Messages over `group` (`None`: the default group), whose backend for the tensors' device is NCCL, or over a
    communicator, which the transport has until it is collected as garbage.

    It guarantees less than other transports. NCCL has no tags: it matches messages by their order alone. So all ranks
    must start their exchanges in one order, from one thread at a time, and concurrent operations need separate process
    groups.

    A wait lets the current stream wait for the messages and returns. A late or dead peer is therefore detected by the
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
        """Let the current stream wait for the communicator's last operation."""
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
