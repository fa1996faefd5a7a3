"""Let FSDP2 communicate over ShardLite's rings: call `install(model)` after `fully_shard`.

    torchrun --nproc-per-node 2 examples/fsdp2_rings.py

FSDP2 accepts a custom all-gather and reduce-scatter for each of its modules. The rest of FSDP2 does not change: layout,
schedule, streams, casts, the all-reduce of hybrid sharding, and the norm of DTensors. The script trains a small GPT
with FSDP2's own collectives and with the rings. On two ranks both give the same bits.

Legend: `W` ranks over which a module is sharded, `S` elements in a rank's shard of all parameters of a module.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from shardlite_kernels.hop import LARGEST_DIVISOR
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from shardlite import LayoutError, Route
from shardlite.comm import Operation, ProgramStreams, StreamQueue, Transport, Work, all_gather
from shardlite.comm.collectives import SUMMABLE, StoreMean, reduce_scatter
from shardlite.comm.streams import make_queue
from shardlite.comm.transport.select import connect
from shardlite.lab.compared.gpt import GPT, GPTConfig


def install(model: nn.Module, route: Route = Route(), timeout: timedelta = timedelta(minutes=10)) -> list[str]:  # noqa: B008
    """Use ShardLite's rings in every module of `model` that `fully_shard` has sharded. Collective.

    Results differ from FSDP2's only in the order of additions: shard `k` is summed in the order `k+1, k+2, ..., k`, and
    a mean is this sum divided once. On two ranks the bits are equal.

    Args:
        model: a module on which `fully_shard` was called, or a module that contains such modules.
        route: transport and algorithm. Algorithms other than `"ring"` and `"direct"` add in other orders.
        timeout: maximum time to wait for a message. Over NCCL the timeout of the process group applies.

    Returns:
        The names of the modules, in their order in the model.

    Raises:
        LayoutError: If `fully_shard` was not called; if a module is only replicated, shards its parameters over several
            meshes, or has gradients of a dtype that a ring cannot sum; or if the route is not available.
    """
    found: dict[int, tuple[str, FSDPModule, Any]] = {}
    for name, module in model.named_modules():
        for params in _parameter_group(name or "(root)", module):
            found.setdefault(id(params), (name or "(root)", module, params))  # several modules may share a group
    if not found:
        raise LayoutError(
            f"{type(model).__name__} has no parameters that fully_shard has sharded: call "
            "torch.distributed.fsdp.fully_shard on its blocks and on itself, then install(model)"
        )
    gathers, reductions = Connections(route, timeout), Connections(route, timeout, reduces=True)
    for _, _, params in found.values():  # first connect everything, so that an error changes nothing
        for connections in (gathers, reductions):
            connections.connect(params.mesh_info.shard_process_group, params.device)
    for name, module, params in found.values():
        group = params.mesh_info.shard_process_group
        module.set_custom_all_gather(RingAllGather(name, gathers, group))
        module.set_custom_reduce_scatter(RingReduceScatter(name, reductions, group))
    return [name for name, _, _ in found.values()]


class Connections:
    """Holder of one transport for each process group that FSDP2 passes in its calls, and of one queue per device."""

    def __init__(self, route: Route, timeout: timedelta, *, reduces: bool = False) -> None:
        self._route, self._timeout, self._reduces = route, timeout, reduces
        self._transports: dict[tuple[dist.ProcessGroup, torch.device], Transport] = {}
        self._queues: dict[torch.device, StreamQueue] = {}

    def connect(self, group: dist.ProcessGroup, device: torch.device) -> Transport:
        """Return the transport over `group`. Collective on the first call for a group."""
        if (group, device) not in self._transports:
            new = connect(group, device, self._timeout, route=self._route, apart=True, reduces=self._reduces)
            self._transports[group, device] = new
        return self._transports[group, device]

    def run(
        self, operation: Callable[[], None], transport: Transport, device: torch.device, *, async_op: bool
    ) -> "RingWork | None":
        """Run an operation on the current stream, or start it on a separate stream and return its handle."""
        if not async_op:
            operation()
            return None
        if device not in self._queues:
            streams = ProgramStreams(device)
            self._queues[device] = make_queue("fsdp2", device, streams, blocking=transport.blocking)
        return RingWork(self._queues[device].submit(operation))


class RingWork(dist.Work):
    """An operation in flight, as a `dist.Work`, because FSDP2 waits only for this type."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self._work = work

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the results, or raise the operation's error. The transport's timeout applies, not `timeout`."""
        self._work.wait()
        return True


class _RingCollective:
    """Base class of the two collectives of a module."""

    kind: str

    def __init__(self, module: str, connections: Connections, group: dist.ProcessGroup) -> None:
        self._label = f"{self.kind} of FSDP2 module {module!r}"
        self._connections = connections
        self._group = group
        self._sequence = 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a new buffer in memory from which the transport sends without a copy."""
        nbytes = prod(size) * dtype.itemsize
        return self._connections.connect(self._group, device).empty(nbytes, device).view(dtype)

    def _next_operation(self) -> Operation:
        self._sequence += 1
        return Operation(self._label, self._sequence)


class RingAllGather(_RingCollective):
    """FSDP2's `AllGather`: gather every rank's shard of one module's parameters, [S], into [W*S]."""

    kind = "all-gather"

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Fill `output_tensor` [W*S] from each rank's `input_tensor` [S]."""
        transport = self._connections.connect(group, output_tensor.device)
        own = output_tensor.view(transport.world_size, -1)[transport.rank]
        if own.data_ptr() != input_tensor.data_ptr():
            own.copy_(input_tensor)
        operation = self._next_operation()

        def gather() -> None:
            all_gather(output_tensor, transport, operation=operation)

        return self._connections.run(gather, transport, output_tensor.device, async_op=async_op)


class RingReduceScatter(_RingCollective):
    """FSDP2's `ReduceScatter`: reduce all ranks' gradients of one module, [W*S], to the sum or mean of a shard, [S]."""

    kind = "reduce-scatter"

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Write this rank's shard of the sum of `input_tensor` [W*S] to `output_tensor` [S].

        `input_tensor` is overwritten with partial sums. FSDP2 keeps this tensor only until the stream has read it.

        Raises:
            LayoutError: If a ring cannot compute `op`.
        """
        transport = self._connections.connect(group, input_tensor.device)
        factor, divisor = _scales(op, transport.world_size)
        operation = self._next_operation()

        def reduce() -> None:
            if factor != 1:
                input_tensor.mul_(factor)
            reduce_scatter(input_tensor, transport, last=StoreMean(output_tensor, divisor), operation=operation)

        return self._connections.run(reduce, transport, input_tensor.device, async_op=async_op)


def _scales(op: Any, world_size: int) -> tuple[float, int]:
    """Return the factor for each rank's summand, and the divisor of the sum.

    FSDP2 requests a mean, or a sum if FSDP2 itself divides. With a user's divisor, FSDP2 requests a sum of terms that
    are multiplied by a factor. If this factor is 1/n for an integer n, the sum is divided by n instead, so that the
    result is rounded only once.
    """
    kinds: Any = dist.ReduceOp.RedOpType
    asked: Any = dist.ReduceOp(op) if isinstance(op, kinds) else op
    kind, factor = asked.__getstate__()  # PyTorch exposes the factor only there
    if kind == kinds.SUM:
        return 1.0, 1
    if kind == kinds.AVG:
        return 1.0, world_size
    if kind == kinds.PREMUL_SUM:
        whole = round(1 / factor) if factor > 0 else 0
        return (1.0, whole) if 1 <= whole <= LARGEST_DIVISOR and 1 / whole == factor else (float(factor), 1)
    raise LayoutError(f"FSDP2 requests {kind}, but a ring only adds: use SUM, AVG or PREMUL_SUM")


def _parameter_group(name: str, module: nn.Module) -> list[Any]:
    """Check that a ring supports the module, and return a list of FSDP2's parameter group, or an empty list."""
    if not isinstance(module, FSDPModule):
        return []
    state: Any = module._get_fsdp_state()  # one group or a list of groups, by PyTorch version
    groups = getattr(state, "_fsdp_param_groups", None) or list(filter(None, [getattr(state, "_fsdp_param_group", 0)]))
    if len(groups) > 1:
        raise LayoutError(
            f"FSDP2 module {name!r} shards its parameters over {len(groups)} meshes, and FSDP2 takes one all-gather "
            "per module: call fully_shard on the modules inside it that have a mesh of their own"
        )
    for params in groups:
        if getattr(params.mesh_info, "shard_process_group", None) is None:
            raise LayoutError(
                f"module {name!r} is replicated and not sharded, so it gathers nothing: give fully_shard a mesh with "
                "a dimension to shard over, or leave this module to PyTorch"
            )
        policy = params.mp_policy
        for weight in (each.sharded_param for each in params.fsdp_params):
            dtype = policy.reduce_dtype or policy.param_dtype or weight.dtype
            if weight.requires_grad and dtype not in SUMMABLE:
                raise LayoutError(
                    f"FSDP2 module {name!r} reduces gradients in {dtype}, which a ring cannot sum: choose another "
                    "reduce_dtype in its MixedPrecisionPolicy, torch.float32 for example"
                )
    return list(groups)


def train(rings: bool) -> dict[str, Tensor]:
    """Train a small GPT for three steps, and return its weights."""
    torch.manual_seed(0)
    config = GPTConfig(layers=2, width=64, heads=2, context=32)
    model = GPT(config)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    if rings:
        install(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    random = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        tokens = torch.randint(256, (4, config.context + 1), generator=random)
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.full_tensor() for name, param in model.named_parameters()}


def main() -> None:
    """Train with FSDP2's own collectives, then with the rings, and compare the weights."""
    dist.init_process_group("gloo")
    own, rings = train(rings=False), train(rings=True)
    largest = max(float((own[name] - rings[name]).detach().abs().max()) for name in own)
    if dist.get_rank() == 0:
        same = "the same bits" if largest == 0 else f"differences of at most {largest:.1e}"
        print(f"FSDP2's own collectives and ShardLite's rings give {same}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
