"""Simulate rank 0 of any number of ranks in one process. The other ranks do not exist, and always agree with rank 0.

The process group is PyTorch's "fake" backend. Its collectives move no data, so weights and losses are meaningless. Each
collective is replaced with one small operator, because the fake backend would copy this rank's part `W` times.
ShardLite runs as with NCCL on a GPU for which the host never waits: collectives and batches of messages do not block
the host, the program's thread launches operations, and each kernel of `shardlite_kernels` is one small operator. The
cost of launches by NCCL and Triton, and of messages between hosts, is not included.

Legend: `W` ranks.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
from shardlite_kernels import add_rows, hop, stats
from shardlite_kernels.adamw import adamw, add_rows_adamw, reduce_adamw
from shardlite_kernels.adamw_cpu import adamw_cpu
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardlite.comm import HostWork, Work
from shardlite.comm.chunking import Cut
from shardlite.comm.control import store
from shardlite.comm.operation import Operation
from shardlite.comm.transport.base import Transport
from shardlite.comm.transport.group_collectives import GroupCollectives, NcclCollectives
from shardlite.comm.transport.nccl import NcclTransport
from shardlite.config import Route
from shardlite.grads import StepOptions
from shardlite.lab.ranks import default_group

_STORAGE_ONLY = {"detach", "empty", "empty_like", "empty_strided", "new_empty", "resize_", "set_", "_unsafe_view"}
"""Operators that launch no kernel, although they do not return a view."""


_COLLECTIVES = (
    "_allgather_base",
    "all_gather_single",
    "_reduce_scatter_base",
    "reduce_scatter_single",
    "alltoall_base",
    "alltoall",
)
"""Methods of a process group. Their names depend on the version of PyTorch."""

_KERNELS = (hop, add_rows, stats, adamw, adamw_cpu, add_rows_adamw, reduce_adamw)
_TOKEN = torch.zeros(1)


def _launch(*_: Any, **__: Any) -> None:
    """Run one small operator in place of a launch."""
    _TOKEN.zero_()


def _nothing(*_: Any) -> None:
    """Do nothing."""


Replacement = Callable[..., dist.Work | None]
"""Function that replaces all collectives. Its arguments are the name and the arguments of the replaced method.

The function returns the work to wait for, or `None`.
"""


class HostMessages(GroupCollectives):
    """Collectives on the host, in which all other ranks have the values of this rank."""

    blocking = False

    def all_gather(self, full: Tensor, cut: Cut, operation: Operation) -> None:
        """Fill every segment of `full` [n] with this rank's segment."""
        del cut
        operation.count_collective((self.world_size - 1) * full.nbytes // self.world_size)
        rows = full.view(self.world_size, -1)
        rows.copy_(rows[self.rank].clone())

    def add_integers(self, numbers: Tensor) -> None:
        """Sum `numbers` [n] over the ranks in place."""
        numbers *= self.world_size


class _LaunchingQueue:
    """A queue that runs operations immediately on the calling thread, like a queue that launches them on a stream."""

    on_stream = True

    def submit(self, *operations: Callable[[], None], behind: object = None) -> Work:
        del behind
        work = HostWork()
        with work, torch.no_grad():
            for operation in operations:
                operation()
        return work

    def moment(self) -> object:
        """Return a moment that has passed, so that nobody waits for it."""
        return self

    def stream(self, behind: object = None) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        del behind
        return nullcontext()


def launching_queue(*_: Any, **__: Any) -> _LaunchingQueue:
    """Return a queue for CPU tensors."""
    return _LaunchingQueue()


@contextmanager
def fake_group(world_size: int, replacement: Replacement = _launch) -> Iterator[dist.ProcessGroup]:
    """Initialize a fake default process group of `world_size` ranks, as rank 0."""
    with ExitStack() as stack:
        group = stack.enter_context(default_group("fake", rank=0, world_size=world_size, store=dist.HashStore()))
        done = group.barrier()

        def replacing(name: str) -> Callable[..., dist.Work]:
            def collective(_: dist.ProcessGroup, *arguments: Any, **__: Any) -> dist.Work:
                return replacement(name, *arguments) or done

            return collective

        for name in filter(partial(hasattr, dist.ProcessGroup), _COLLECTIVES):
            stack.enter_context(mock.patch.object(dist.ProcessGroup, name, replacing(name)))
        # Ranks compare options by a sum that is 0, but all ranks of a fake group send what rank 0 sends.
        stack.enter_context(mock.patch.object(StepOptions, "note", _nothing))
        yield group


@contextmanager
def as_over_nccl() -> Iterator[None]:
    """Let ShardLite use a fake group within the block, with the transport "collectives" or "p2p" (rings)."""

    with as_one_rank(connect_as_over_nccl, launching_queue), replaced(dict.fromkeys(_KERNELS, _launch)):
        yield


def connect_as_over_nccl(group: dist.ProcessGroup | None, route: Route) -> NcclTransport:
    """Return the transport that a route selects with NCCL."""
    if route.transport == "collectives":
        transport = NcclCollectives(group)
        transport.fast = route.reduce == "fast"
        return transport
    rings = NcclTransport(group)
    rings.algorithm = "ring"
    return rings


@contextmanager
def as_one_rank(
    connect: Callable[[dist.ProcessGroup | None, Route], Transport], make_queue: Callable[..., object]
) -> Iterator[None]:
    """Let ShardLite use these transports and queues within the block. All ranks agree with rank 0."""

    def connect_by(group: dist.ProcessGroup | None, *_: Any, route: Route, **__: Any) -> Transport:
        return connect(group, route)

    def connect_hosts(group: dist.ProcessGroup | None, *_: Any, **__: Any) -> GroupCollectives:
        return HostMessages(group)

    def all_gather_json(group: dist.ProcessGroup | None, mine: Any, *_: Any, **__: Any) -> list[Any]:
        return [mine] * dist.get_world_size(group)

    with ExitStack() as patches:
        patches.enter_context(mock.patch("shardlite.comm.context.connect", connect_by))
        patches.enter_context(mock.patch("shardlite.comm.context.connect_hosts", connect_hosts))
        patches.enter_context(mock.patch("shardlite.comm.context.make_queue", make_queue))
        patches.enter_context(replaced({store.all_gather_json: all_gather_json}))
        yield


@contextmanager
def replaced(functions: Mapping[Callable[..., Any], Callable[..., Any]]) -> Iterator[None]:
    """Replace functions in all modules of the library and its kernels within the block."""
    by_id = {id(function): other for function, other in functions.items()}
    with ExitStack() as patches:
        for module in [module for path, module in sys.modules.items() if path.startswith("shardlite")]:
            for attribute, value in list(vars(module).items()):
                if id(value) in by_id:
                    patches.enter_context(mock.patch.object(module, attribute, by_id[id(value)]))
        yield


def all_reduce_bucket(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Communication hook of DDP that reduces a bucket. DDP's own hook needs a result that fake collectives lack."""
    dist.all_reduce(bucket.buffer(), async_op=True)
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count operators that launch a kernel, a copy or a collective on a GPU, and those that return a view."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        returns = func._schema.returns
        is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in returns)
        is_launch = not is_view and func._schema.name.split("::")[1] not in _STORAGE_ONLY
        self.counts.update({"views": int(is_view), "launches": int(is_launch)})
        return func(*args, **(kwargs or {}))


def operators(step: Callable[[], object]) -> Counter[str]:
    """Return the number of `views` of a step, and of `launches`: kernels, copies and collectives on a GPU.

    An operator counts as one launch, although a fused optimizer step over all parameters launches several kernels.
    """
    mode = _Operators()
    with mode:
        step()
    return mode.counts


def launches(step: Callable[[], object]) -> int:
    """Return the number of kernels, copies and collectives that a step launches on a GPU."""
    return operators(step)["launches"]
