"""ShardLite's collectives for FSDP2: `install(model)` after `fully_shard`.

FSDP2 accepts a custom all-gather and reduce-scatter for each of its modules. Everything else stays FSDP2's: layout,
schedule, streams and casts. The all-reduce of hybrid sharding and the norm of DTensors stay PyTorch's collectives. No
other file of the library imports this one, so `import shardlite` does not import FSDP2.

Legend: `W` ranks over which a module is sharded, `r` this rank, `S` elements per shard of all its parameters together.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from typing import Any, cast

import torch
import torch.distributed as dist
from shardlite_kernels.hop import LARGEST_DIVISOR
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shardlite.comm import (
    SUMMABLE,
    Operation,
    ProgramStreams,
    Ranks,
    StreamQueue,
    Transport,
    Work,
    agree,
    all_gather,
    connect,
    identify,
    make_queue,
    ranks_of,
    reduce_scatter,
)
from shardlite.config import AlgorithmName, Route, TransportName, check_timeout, with_environment
from shardlite.errors import LayoutError

_Op = dist.ReduceOp | dist.ReduceOp.RedOpType


def install(
    model: nn.Module,
    *,
    transport: TransportName = "auto",
    algorithm: AlgorithmName = "auto",
    timeout: timedelta = timedelta(minutes=10),
) -> "Installed":
    """Use ShardLite's rings for gathers and reductions of every module in `model` that `fully_shard` has sharded.

    Collective: call it before training or between two steps. Results differ from FSDP2's only in the order of
    additions: shard `k` is summed in the order `k+1, k+2, ..., k`, over any transport, and a mean is that sum divided
    once. With two ranks the sum equals that of every other collective.

    FSDP2's own settings keep their meaning. Means are divided in the last addition of the ring, so
    `set_force_sum_reduction_for_comms` has no benefit, and is not changed. `set_gradient_divide_factor` works over
    gloo, too.

    Args:
        model: a module that `fully_shard` was called on, or one with such modules inside.
        transport: see `shardlite.Route`.
        algorithm: see `shardlite.Route`. All but `"ring"` and `"direct"` add in other orders.
        timeout: how long a rank waits for a message of another one. Over NCCL the timeout of the group applies.

    Returns:
        A record of the installation; its `remove()` restores each module's former collectives.

    Raises:
        LayoutError: there is no process group, or none for tensors on the model's device; the route is not available;
            `fully_shard` was not called, or differently on another rank; a module is only replicated, shards its
            parameters over more than one mesh, or has gradients of a dtype that a ring cannot sum.
        TypeError: `timeout` is not a `timedelta`.
        ValueError: `timeout` is not positive; the transport or the algorithm is unknown.

    Example:
        >>> fully_shard(model)
        >>> installed = install(model, algorithm="direct")
    """
    check_timeout(timeout)
    route = with_environment(Route(transport=transport, algorithm=algorithm))
    ranks_of(None)
    parts = _parts(model)
    models = {group: _agree(group, parts, route, timeout) for group in dict.fromkeys(part.group for part in parts)}
    gathers = Connections("gather", timeout, route=route, apart=True)
    reductions = Connections("reduce", timeout, route=route, apart=True, reduces=True)
    for part in parts:  # before anything is changed
        for ways in (gathers, reductions):
            ways.connect(part.group, part.device)
    for part in parts:
        whose = f"FSDP2 module {part.name!r} of model {models[part.group]}"
        part.set(
            RingAllGather(whose, gathers, part.group),
            RingReduceScatter(whose, reductions, part.group),
        )
    return Installed(tuple(parts))


@dataclass(frozen=True)
class Installed:
    """The modules that gather and reduce with ShardLite's rings."""

    _parts: "tuple[_Part, ...]"

    @property
    def names(self) -> list[str]:
        """Names of the modules, in their order in the model."""
        return [part.name for part in self._parts]

    def remove(self) -> None:
        """Restore the former collectives. Call it between two steps, on all ranks."""
        for part in self._parts:
            part.set(*part.before)


class _RingCollective:
    """What both collectives of one module have."""

    _kind: str

    def __init__(self, whose: str, ways: "Connections", group: dist.ProcessGroup) -> None:
        self._label = f"{self._kind} of {whose}"
        self._ways = ways
        self._group = group
        self._sequence = 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a new buffer: to gather into, for gradients, or for a shard of their sum."""
        return self._ways.empty(prod(size), dtype, self._group, device)

    def _next_operation(self) -> Operation:
        self._sequence += 1
        return Operation(self._label, self._sequence)


class RingAllGather(_RingCollective):
    """FSDP2's `AllGather`: gather every rank's shard of one module's parameters, [S], into [W*S]."""

    _kind = "all-gather"

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Fill `output_tensor` [W*S] from each rank's `input_tensor` [S].

        It runs on the current stream or, with `async_op`, beside it.

        Raises:
            LayoutError: the sizes do not match.
            CommError: a peer failed, timed out or runs another operation.
        """
        transport = self._ways.connect(group, output_tensor.device)
        own = _own_place(self._label, output_tensor, input_tensor, transport)
        if own.data_ptr() != input_tensor.data_ptr():
            own.copy_(input_tensor)
        operation = self._next_operation()

        def gather() -> None:
            all_gather(output_tensor, transport, operation=operation)

        return self._ways.run(gather, transport, output_tensor.device, beside=async_op)


class RingReduceScatter(_RingCollective):
    """FSDP2's `ReduceScatter`: reduce all ranks' gradients of one module, [W*S], to the sum or mean of a shard, [S]."""

    _kind = "reduce-scatter"

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: _Op,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Write shard `r` of the sum of `input_tensor` [W*S] to `output_tensor` [S].

        It runs on the current stream or, with `async_op`, beside it. `input_tensor` is overwritten with partial sums:
        FSDP2 keeps it only until the stream is done with it.

        Raises:
            LayoutError: the sizes do not match; a dtype or an operation that a ring cannot sum.
            CommError: a peer failed, timed out or runs another operation.
        """
        transport = self._ways.connect(group, input_tensor.device)
        _own_place(self._label, input_tensor, output_tensor, transport)
        factor, divisor = _scales(self._label, op, transport.world_size)
        operation = self._next_operation()

        def reduce() -> None:
            if factor != 1:
                input_tensor.mul_(factor)
            reduce_scatter(input_tensor, transport, out=output_tensor, divisor=divisor, operation=operation)

        return self._ways.run(reduce, transport, input_tensor.device, beside=async_op)


class Connections:
    """Connections of one kind of collective: a transport per process group, and a queue per device.

    FSDP2 passes the group in each call, since a module may use several: with `reshard_after_forward=2` the backward
    gathers within pairs of ranks, and `set_separate_reduce_scatter_group` creates another group for reductions.
    """

    def __init__(
        self, name: str, timeout: timedelta, *, route: Route, apart: bool = False, reduces: bool = False
    ) -> None:
        self._name = name
        self._timeout = timeout
        self._route = route
        self._apart = apart
        self._reduces = reduces
        self._transports: dict[tuple[dist.ProcessGroup, torch.device], Transport] = {}
        self._queues: dict[torch.device, StreamQueue] = {}

    def connect(self, group: dist.ProcessGroup, device: torch.device) -> Transport:
        """Return the transport over `group`. Collective on the first call for a group."""
        if (group, device) not in self._transports:
            new = connect(group, device, self._timeout, route=self._route, apart=self._apart, reduces=self._reduces)
            self._transports[group, device] = new
        return self._transports[group, device]

    def empty(self, numel: int, dtype: torch.dtype, group: dist.ProcessGroup, device: torch.device) -> Tensor:
        """Return uninitialised memory [numel], from which sending over `group` costs least."""
        return self.connect(group, device).empty(numel * dtype.itemsize, device).view(dtype)

    def run(
        self, operation: Callable[[], None], transport: Transport, device: torch.device, *, beside: bool
    ) -> "_Work | None":
        """Run an operation and return `None`, or start it `beside` the computation and return its work.

        On a GPU, FSDP2 runs operations that it does not wait for on its own streams, and orders them by events. So
        `beside=False` is right there, too: the operation belongs to the current stream, and over NCCL the host does not
        block.
        """
        if not beside:
            operation()
            return None
        if device not in self._queues:
            streams = ProgramStreams(device)
            self._queues[device] = make_queue(f"fsdp2-{self._name}", device, streams, blocking=transport.blocking)
        return _Work(self._queues[device].submit(operation))


class _Work(dist.Work):
    """An operation in flight as a `dist.Work`, the only type that FSDP2 waits for."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self._work = work

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the results, or raise the operation's error. The transport's own timeout applies."""
        self._work.wait()
        return True

    def is_completed(self) -> bool:
        """Return whether the operation is done."""
        return self._work.done()


@dataclass(frozen=True)
class _Part:
    """A module that `fully_shard` was called on, and FSDP2's state of it."""

    name: str
    module: FSDPModule
    group: dist.ProcessGroup
    device: torch.device
    before: tuple[Any, Any]
    """Its former all-gather and reduce-scatter."""

    def set(self, gather: Any, reduce: Any) -> None:
        """Set its all-gather and reduce-scatter."""
        self.module.set_custom_all_gather(gather)
        self.module.set_custom_reduce_scatter(reduce)

    def describe(self) -> str:
        """Return a description that must be equal on all ranks."""
        parameters = [f"{name} {list(param.shape)}" for name, param in cast(nn.Module, self.module).named_parameters()]
        return f"{self.name} ({', '.join(parameters)}) on {self.device.type}"


def _parts(model: nn.Module) -> list[_Part]:
    """Return the sharded modules of `model`. Modules that were sharded together are one part."""
    parts: list[_Part] = []
    seen: set[int] = set()
    for name, module in model.named_modules():
        groups = _parameter_groups(module) if isinstance(module, FSDPModule) else []
        if groups and id(groups[0]) not in seen:
            seen.update(map(id, groups))
            parts.append(_part(name or "(root)", cast(FSDPModule, module), groups))
    if not parts:
        raise LayoutError(
            f"{type(model).__name__} has no parameters that fully_shard has sharded: call "
            "torch.distributed.fsdp.fully_shard on its blocks and on itself, then install(model)"
        )
    return parts


def _parameter_groups(module: FSDPModule) -> list[Any]:
    """Return FSDP2's parameter groups of a module. PyTorch versions have one group per module, or a list."""
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    if hasattr(state, "_fsdp_param_group"):
        return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    raise LayoutError(
        f"torch {torch.__version__} keeps FSDP2's groups of parameters where shardlite.apps.fsdp2 does not find them; "
        "it is known to work with torch 2.11 to 2.13"
    )


def _part(name: str, module: FSDPModule, groups: Sequence[Any]) -> _Part:
    """Return the part of one module, after checking that a ring can serve it."""
    if len(groups) > 1:
        raise LayoutError(
            f"FSDP2 module {name!r} shards its parameters over {len(groups)} meshes, and FSDP2 takes one all-gather "
            "per module: call fully_shard on the modules inside it that have a mesh of their own"
        )
    (params,) = groups
    shard_group = getattr(params.mesh_info, "shard_process_group", None)
    if shard_group is None:
        raise LayoutError(
            f"module {name!r} is replicated and not sharded, so it gathers nothing: give fully_shard a mesh with a "
            "dimension to shard over, or leave this module to PyTorch"
        )
    policy = params.mp_policy
    for each in params.fsdp_params:
        weight = each.sharded_param
        dtype = policy.reduce_dtype or policy.param_dtype or weight.dtype
        if weight.requires_grad and dtype not in SUMMABLE:
            raise LayoutError(
                f"FSDP2 module {name!r} reduces the gradients of {each._module_info.param_name!r} in {dtype}, which a "
                "ring cannot sum: choose another reduce_dtype in its MixedPrecisionPolicy, torch.float32 for example"
            )
    before = params._all_gather_comm, params._reduce_scatter_comm
    return _Part(name, module, shard_group, params.device, before)


def _agree(group: dist.ProcessGroup, parts: Sequence[_Part], route: Route, timeout: timedelta) -> str:
    """Check that all ranks of a group install the same. Return a name that is new on each of them."""
    ranks = Ranks(group)
    facts = [str(route), *(part.describe() for part in parts if part.group is group)]
    agree(ranks, facts, None, what="what each rank installs", timeout=timeout)
    model = identify(ranks, timeout)
    return f"{model.number} from rank {model.first}"


def _own_place(label: str, full: Tensor, shard: Tensor, transport: Transport) -> Tensor:
    """View this rank's shard in `full` [W*S]."""
    if full.numel() != transport.world_size * shard.numel():
        raise LayoutError(
            f"{label}: {full.numel()} elements are not {transport.world_size} shards of {shard.numel()} elements"
        )
    return full.narrow(0, transport.rank * shard.numel(), shard.numel())


def _scales(label: str, op: _Op, world_size: int) -> tuple[float, int]:
    """Return the factor for each rank's summand, and the divisor of the sum.

    FSDP2 asks for a mean; for a sum, if it divides itself; or, with a user's divisor, for a sum of parts multiplied by
    its reciprocal. If that is 1/n for an integer n, the sum is divided by n instead: once, not W times, and correctly
    rounded.
    """
    kinds: Any = dist.ReduceOp.RedOpType
    asked: Any = dist.ReduceOp(op) if isinstance(op, kinds) else op
    kind, factor = asked.__getstate__()  # the only access to the factor
    if kind == kinds.SUM:
        return 1.0, 1
    if kind == kinds.AVG:
        return 1.0, world_size
    if kind == kinds.PREMUL_SUM:
        whole = round(1 / factor) if factor > 0 else 0
        return (1.0, whole) if 1 <= whole <= LARGEST_DIVISOR and 1 / whole == factor else (float(factor), 1)
    raise LayoutError(f"{label}: asked for {kind}, but a ring only adds: use SUM, AVG or PREMUL_SUM")
