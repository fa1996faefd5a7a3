"""Rank 0 of any number of ranks in one process: the others cost nothing, and say what rank 0 says.

The process group is PyTorch's own "fake" one. Its collectives move nothing, so weights and losses mean nothing; each is
one small operator, because PyTorch's would copy this rank's part `W` times. ShardLite runs as over NCCL on a GPU that
is never behind: collectives and batches of messages do not block the host, operations are launched by the program's
thread, and each kernel of `shardlite_kernels` is one small operator instead. Not in it: what the launches of NCCL and
Triton and messages between hosts cost.

Legend: `W` ranks.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
from shardlite_kernels import adamw, adamw_cpu, add_rows, add_rows_adamw, hop, reduce_adamw, stats
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bench.support.ranks import default_group
from shardlite.comm import context
from shardlite.comm.chunking import Cut
from shardlite.comm.control import store
from shardlite.comm.streams import HostWork, Work
from shardlite.comm.transport.base import Transport
from shardlite.comm.transport.group_collectives import GroupCollectives, NcclCollectives
from shardlite.comm.transport.nccl import NcclTransport
from shardlite.config import Route

_STORAGE_ONLY = {"detach", "empty", "empty_like", "empty_strided", "new_empty", "resize_", "set_", "_unsafe_view"}
"""Operators of PyTorch that launch nothing though they return no view."""


_COLLECTIVES = (
    "_allgather_base",
    "all_gather_single",
    "_reduce_scatter_base",
    "reduce_scatter_single",
    "alltoall_base",
)
"""Methods of a process group; what PyTorch calls some of them depends on its version."""

_KERNELS = (hop, add_rows, stats, adamw, adamw_cpu, add_rows_adamw, reduce_adamw)
_TOKEN = torch.zeros(1)


def _launch(*_: Any, **__: Any) -> None:
    """Cost the host about as much as an operator does."""
    _TOKEN.zero_()


Replacement = Callable[..., dist.Work | None]
"""What a collective is replaced by: called with the name of its method, its target, its source, and the rest.

It returns what to wait for, or `None` if there is nothing.
"""


class HostMessages(GroupCollectives):
    """Agreements of the hosts, in which all ranks say the same."""

    blocking = False

    def all_gather(self, full: Tensor, cut: Cut) -> None:
        """Fill every segment of `full` [n] with this rank's."""
        del cut
        rows = full.view(self.world_size, -1)
        rows.copy_(rows[self.rank].clone())

    def all_reduce(self, numbers: Tensor) -> None:
        """Sum `numbers` [n] over the ranks in place."""
        numbers *= self.world_size


class _LaunchingQueue:
    """Runs operations when they are submitted, on the thread of the program, as one that launches them on a stream."""

    on_stream = True

    def submit(self, *operations: Callable[[], None], behind: object = None) -> Work:
        del behind
        work = HostWork()
        with work, torch.no_grad():
            for operation in operations:
                operation()
        return work

    def moment(self) -> object:
        """Return a moment, which is over."""
        return self

    def stream(self, behind: object = None) -> AbstractContextManager[None]:
        """No-op."""
        del behind
        return nullcontext()


def launching_queue(*_: Any, **__: Any) -> _LaunchingQueue:
    """Return a queue for tensors of the CPU."""
    return _LaunchingQueue()


@contextmanager
def fake_group(world_size: int, replacement: Replacement = _launch) -> Iterator[dist.ProcessGroup]:
    """Be rank 0 of a fake default process group of `world_size` ranks."""
    with ExitStack() as stack:
        group = stack.enter_context(default_group("fake", rank=0, world_size=world_size, store=dist.HashStore()))
        done = group.barrier()

        def replacing(name: str) -> Callable[..., dist.Work]:
            def collective(_: dist.ProcessGroup, *arguments: Any, **__: Any) -> dist.Work:
                return replacement(name, *arguments) or done

            return collective

        for name in filter(partial(hasattr, dist.ProcessGroup), _COLLECTIVES):
            stack.enter_context(mock.patch.object(dist.ProcessGroup, name, replacing(name)))
        yield group


@contextmanager
def as_over_nccl() -> Iterator[None]:
    """Within the block, ShardLite runs over a fake group, by the transport "collectives" or "p2p" (rings)."""

    with as_one_rank(connect_as_over_nccl, launching_queue), replaced(dict.fromkeys(_KERNELS, _launch)):
        yield


def connect_as_over_nccl(group: dist.ProcessGroup | None, route: Route) -> NcclTransport:
    """Return what a route selects over NCCL."""
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
    """Within the block, ShardLite has transports and queues of these functions, and all hosts say what rank 0 says."""

    def connect_by(group: dist.ProcessGroup | None, *_: Any, route: Route, **__: Any) -> Transport:
        return connect(group, route)

    def connect_hosts(group: dist.ProcessGroup | None, *_: Any, **__: Any) -> GroupCollectives:
        return HostMessages(group)

    def all_gather_json(group: dist.ProcessGroup | None, mine: Any, what: str, timeout: timedelta) -> list[Any]:
        del what, timeout
        return [mine] * dist.get_world_size(group)

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(context, "connect", connect_by))
        patches.enter_context(mock.patch.object(context, "connect_hosts", connect_hosts))
        patches.enter_context(mock.patch.object(context, "make_queue", make_queue))
        patches.enter_context(replaced({store.all_gather_json: all_gather_json}))
        yield


@contextmanager
def replaced(functions: Mapping[Callable[..., Any], Callable[..., Any]]) -> Iterator[None]:
    """Within the block, all modules of the library call other functions instead of their own."""
    by_id = {id(function): other for function, other in functions.items()}
    with ExitStack() as patches:
        for module in [module for path, module in sys.modules.items() if path.startswith("shardlite.")]:
            for attribute, value in list(vars(module).items()):
                if id(value) in by_id:
                    patches.enter_context(mock.patch.object(module, attribute, by_id[id(value)]))
        yield


def all_reduce_bucket(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Reduce a bucket of DDP, as a communication hook: the fake group's own future is without a result."""
    dist.all_reduce(bucket.buffer(), async_op=True)
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


class _Launches(TorchDispatchMode):
    """Counts operators that would launch a kernel, a copy or a collective on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        returns = func._schema.returns
        is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in returns)
        self.count += not is_view and func._schema.name.split("::")[1] not in _STORAGE_ONLY
        return func(*args, **(kwargs or {}))


def launches(step: Callable[[], object]) -> int:
    """Return how many kernels, copies and collectives a step would launch on a GPU.

    An operator of PyTorch is one, also a fused optimizer step over all parameters, which launches some more.
    """
    with _Launches() as mode:
        step()
    return mode.count
