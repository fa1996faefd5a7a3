"""ShardLite's rings as the collectives of FSDP2: `install(model)` after `fully_shard`.

FSDP2 lets each of its modules be given an all-gather and a reduce-scatter of one's own. Everything else stays FSDP2's:
its layout, its schedule, its streams, its casts. The all-reduce of hybrid sharding and the norm of DTensors stay
PyTorch's collectives. Nothing else of the library imports this file, so `import shardlite` does not import FSDP2.

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
from shardlite.config import AlgorithmName, Route, TransportName, check_timeout, transport_or_default
from shardlite.errors import LayoutError

_Op = dist.ReduceOp | dist.ReduceOp.RedOpType


def install(
    model: nn.Module,
    *,
    transport: TransportName = "auto",
    algorithm: AlgorithmName = "auto",
    timeout: timedelta = timedelta(minutes=10),
) -> "Installed":
    """Let every module of `model` that `fully_shard` has sharded gather and reduce by our rings from now on.

    All ranks call this, before training or between two steps. What FSDP2 computes stays as it is, but for the order of
    additions: shard `k` is summed in the order `k+1, k+2, ..., k`, over any transport, and a mean is that sum divided
    once. With two ranks that is the sum of every other collective.

    FSDP2's own settings keep their meaning. Means are divided in the last addition of the ring, so nothing is gained by
    `set_force_sum_reduction_for_comms`, and it is left as it is. `set_gradient_divide_factor` works over gloo too.

    Args:
        model: a module that `fully_shard` was called on, or one with such modules inside.
        transport, algorithm: how messages travel, see `shardlite.Route`. All but `"ring"` and `"direct"` add in other
            orders.
        timeout: how long a rank waits for a message of another one. Over NCCL the timeout of the group counts.

    Returns:
        What was installed; its `remove()` puts back what each module had before.

    Raises:
        LayoutError: there is no process group, or none that carries tensors on the model's device; the route cannot be
            taken; `fully_shard` was not called, or differently on another rank; a module is replicated only, shards its
            parameters over more than one mesh, or has gradients of a dtype that a ring cannot sum.
        TypeError: `timeout` is no `timedelta`.
        ValueError: `timeout` is not above zero; there is no such transport or algorithm.
    """
    check_timeout(timeout)
    route = Route(transport=transport_or_default(transport), algorithm=algorithm)
    ranks_of(None)
    parts = _parts(model)
    models = {group: _agree(group, parts, route, timeout) for group in dict.fromkeys(part.group for part in parts)}
    gathers = Ways("gather", timeout, route=route)
    reductions = Ways("reduce", timeout, route=route, apart=True)
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
    """The modules that gather and reduce by our rings."""

    _parts: "tuple[_Part, ...]"

    @property
    def names(self) -> list[str]:
        """Those of the modules, in their order within the model."""
        return [part.name for part in self._parts]

    def remove(self) -> None:
        """Let them gather and reduce as before; between two steps, and on all ranks."""
        for part in self._parts:
            part.set(*part.before)


class RingAllGather:
    """FSDP2's `AllGather`: every rank's shards of one module's parameters, [S], to all of them, [W*S]."""

    def __init__(self, whose: str, ways: "Ways", group: dist.ProcessGroup) -> None:
        self._label = f"all-gather of {whose}"
        self._ways = ways
        self._group = group
        self._sequence = 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a new buffer of the usual group to gather into; a shard is put into its own place in it."""
        return self._ways.empty(prod(size), dtype, self._group, device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Fill `output_tensor` [W*S] from each rank's `input_tensor` [S], on the current stream or beside it.

        Raises:
            LayoutError: the sizes do not fit together.
            CommError: a peer failed, is late or does another operation.
        """
        transport = self._ways.connect(group, output_tensor.device)
        own = _own_place(self._label, output_tensor, input_tensor, transport)
        if own.data_ptr() != input_tensor.data_ptr():
            own.copy_(input_tensor)
        self._sequence += 1
        operation = Operation(self._label, self._sequence)

        def gather() -> None:
            all_gather(output_tensor, transport, operation=operation)

        return self._ways.run(gather, transport, output_tensor.device, beside=async_op)


class RingReduceScatter:
    """FSDP2's `ReduceScatter`: every rank's gradients of one module, [W*S], to the sum or mean of each shard, [S]."""

    def __init__(self, whose: str, ways: "Ways", group: dist.ProcessGroup) -> None:
        self._label = f"reduce-scatter of {whose}"
        self._ways = ways
        self._group = group
        self._sequence = 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a new buffer of the usual group: for gradients, or for a shard of their sum."""
        return self._ways.empty(prod(size), dtype, self._group, device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: _Op,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Write shard `r` of the sum of `input_tensor` [W*S] to `output_tensor` [S], on the current stream or beside.

        `input_tensor` is overwritten with partial sums: FSDP2 keeps it only until the stream is done with it.

        Raises:
            LayoutError: the sizes do not fit together; a dtype or an operation that a ring cannot sum.
            CommError: a peer failed, is late or does another operation.
        """
        transport = self._ways.connect(group, input_tensor.device)
        _own_place(self._label, input_tensor, output_tensor, transport)
        factor, divisor = _scales(self._label, op, transport.world_size)
        self._sequence += 1
        operation = Operation(self._label, self._sequence)

        def reduce() -> None:
            if factor != 1:
                input_tensor.mul_(factor)
            reduce_scatter(input_tensor, transport, out=output_tensor, divisor=divisor, operation=operation)

        return self._ways.run(reduce, transport, input_tensor.device, beside=async_op)


class Ways:
    """The ways of one kind of collective: a transport per process group, and a lane per device.

    FSDP2 names the group at each call, since a module may use several: with `reshard_after_forward=2` the backward
    gathers within pairs of ranks, and `set_separate_reduce_scatter_group` makes another one for reductions.
    """

    def __init__(self, name: str, timeout: timedelta, *, route: Route, apart: bool = False) -> None:
        self._name = name
        self._timeout = timeout
        self._route = route
        self._apart = apart
        self._transports: dict[tuple[dist.ProcessGroup, torch.device], Transport] = {}
        self._queues: dict[torch.device, StreamQueue] = {}

    def connect(self, group: dist.ProcessGroup, device: torch.device) -> Transport:
        """Return the transport over `group`. All its ranks come to a new group at the same point."""
        if (group, device) not in self._transports:
            new = connect(group, device, self._timeout, route=self._route, apart=self._apart)
            self._transports[group, device] = new
        return self._transports[group, device]

    def empty(self, numel: int, dtype: torch.dtype, group: dist.ProcessGroup, device: torch.device) -> Tensor:
        """Return memory [numel], uninitialised, from which sending over `group` costs least."""
        return self.connect(group, device).empty(numel * dtype.itemsize, device).view(dtype)

    def run(
        self, operation: Callable[[], None], transport: Transport, device: torch.device, *, beside: bool
    ) -> "_Work | None":
        """Run an operation and return nothing, or start it `beside` the computation and return what FSDP2 waits for.

        On a GPU FSDP2 runs what it does not wait for on streams of its own, with events to order them. So the first way
        is right there, too: the operation belongs to the current stream, and over NCCL the host goes on at once.
        """
        if not beside:
            operation()
            return None
        if device not in self._queues:
            self._queues[device] = make_queue(f"fsdp2-{self._name}", device, blocking=transport.blocking)
        return _Work(self._queues[device].submit(operation))


class _Work(dist.Work):
    """An operation in flight in PyTorch's words. FSDP2 waits for nothing that is not a `Work`."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self._work = work

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Let what follows see the results, or raise what went wrong. The transport's own timeout counts."""
        self._work.wait()
        return True

    def is_completed(self) -> bool:
        """Whether there is nothing to wait for."""
        return self._work.done()


@dataclass(frozen=True)
class _Part:
    """One module that `fully_shard` was called on, and what FSDP2 keeps of it."""

    name: str
    module: FSDPModule
    group: dist.ProcessGroup
    device: torch.device
    before: tuple[Any, Any]
    """How it gathered and reduced."""

    def set(self, gather: Any, reduce: Any) -> None:
        """Let it gather and reduce in another way."""
        self.module.set_custom_all_gather(gather)
        self.module.set_custom_reduce_scatter(reduce)

    def describe(self) -> str:
        """Say what ranks must have in common."""
        parameters = [f"{name} {list(param.shape)}" for name, param in cast(nn.Module, self.module).named_parameters()]
        return f"{self.name} ({', '.join(parameters)}) on {self.device.type}"


def _parts(model: nn.Module) -> list[_Part]:
    """Return the sharded modules of `model`; those that were sharded together are one."""
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
    """Return what FSDP2 keeps of a module's parameters. PyTorch has had one group per module, and now a list."""
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
    """Look at one module, and refuse what a ring cannot serve."""
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
    """Make sure that all ranks of a group install the same, and return a name for it that is new on each of them."""
    ranks = Ranks(group)
    facts = [str(route), *(part.describe() for part in parts if part.group is group)]
    agree(ranks, facts, None, what="what each rank installs", timeout=timeout)
    model = identify(ranks, timeout)
    return f"{model.number} from rank {model.first}"


def _own_place(label: str, full: Tensor, shard: Tensor, transport: Transport) -> Tensor:
    """Return where this rank's shard lies in `full` [W*S]."""
    if full.numel() != transport.world_size * shard.numel():
        raise LayoutError(
            f"{label}: {full.numel()} elements are not {transport.world_size} shards of {shard.numel()} elements"
        )
    return full.narrow(0, transport.rank * shard.numel(), shard.numel())


def _scales(label: str, op: _Op, world_size: int) -> tuple[float, int]:
    """Return by what to multiply each rank's part before the sum, and by what to divide the sum.

    FSDP2 asks for a mean; for a sum, if it divides by itself; or, with a divisor of the user's, for a sum of parts that
    were multiplied by its reciprocal. Where that is 1/n for a whole n, the sum is divided by n instead: once, not W
    times, and correctly rounded.
    """
    kinds: Any = dist.ReduceOp.RedOpType
    asked: Any = dist.ReduceOp(op) if isinstance(op, kinds) else op
    kind, factor = asked.__getstate__()  # the only way to the factor
    if kind == kinds.SUM:
        return 1.0, 1
    if kind == kinds.AVG:
        return 1.0, world_size
    if kind == kinds.PREMUL_SUM:
        whole = round(1 / factor) if factor > 0 else 0
        return (1.0, whole) if 1 <= whole <= LARGEST_DIVISOR and 1 / whole == factor else (float(factor), 1)
    raise LayoutError(f"{label}: asked for {kind}, but a ring only adds: use SUM, AVG or PREMUL_SUM")
