"""Systems of a comparison, built from the same plain model and stepped by the same optimizer.

| name | meaning |
|---|---|
| `floor` | forward and backward of the plain model, then AdamW on `1/W` of the parameters; no communication |
| `ddp`, `zero` | `DistributedDataParallel` with gradients as views of buckets; `zero` adds `ZeroRedundancyOptimizer` |
| `fsdp1`, `fsdp2` | `FullyShardedDataParallel` and `fully_shard` on every block, then on the root |
| `stage0` to `stage3` | ShardLite, which finds the same units automatically |
| `p2p`, `collectives` | ShardLite at stage 3, over the process group instead of shared memory |
| `tree` | ShardLite at stage 3 with `order="tree"`, and one part of a batch per rank: the same sums in another order |

All systems use fused AdamW. As is PyTorch's default, they free gradients after the step. With `compute`, weights in
fp32 are cast to this dtype for forward and backward, and gradients are reduced in fp32. FSDP1, FSDP2 and ShardLite have
an option for this; in the other systems the forward casts (`Cast`).

Legend: `W` ranks, `n` elements in all parameters, `k` elements of one parameter on this rank.
"""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shardlite import AdamW, Precision, Route, ShardLite
from shardlite.config import ReduceName, TransportName
from shardlite.lab.workloads import Batch, Workload

OPTIONS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
"""Options of AdamW. They do not affect memory."""

ADAMW = f"fused AdamW, lr {OPTIONS['lr']:g}, betas {OPTIONS['betas']}, weight decay {OPTIONS['weight_decay']}"
OPTIMIZER = f"{ADAMW}, no clipping"

ZERO = "torch.distributed.optim"
"""The module of `ZeroRedundancyOptimizer`. Its import takes long."""


@dataclass(frozen=True)
class Trainer:
    """A system that has been built. `model(x, y)` returns the loss."""

    model: nn.Module
    optimizer: Optimizer
    whole: Callable[[Tensor], Tensor]
    """Function of a shard that returns the full parameter or gradient, flattened. Collective."""

    accumulation: int = 1
    """Number of micro-batches per batch. Gradients are reduced once, in the backward of the last micro-batch."""

    max_norm: float | None = None
    """Norm to which gradients are clipped; `None` does not clip."""

    forward: Callable[[nn.Module, Any], Tensor] = lambda model, batch: model(*batch)
    """Function of the model and a batch that returns the loss, []."""

    def backward(self, batch: Batch) -> Tensor:
        """Run forward and backward, and return the loss of this rank's batch, []."""
        if self.accumulation == 1:
            return self._backward(batch, 1)
        micro_batches = list(zip(*(each.chunk(self.accumulation) for each in batch), strict=True))
        with self._unsynced():
            losses = [self._backward(each, self.accumulation) for each in micro_batches[:-1]]
        losses.append(self._backward(micro_batches[-1], self.accumulation))
        return torch.stack(losses).sum()

    def loss(self, batch: Batch) -> Tensor:
        """Run the forward of one micro-batch, and return its loss, []."""
        return self.forward(self.model, batch)

    def differentiate(self, loss: Tensor) -> None:
        """Run the backward of a loss."""
        torch.autograd.backward(loss)

    def update(self) -> Tensor | None:
        """Clip if `max_norm` is set, step, and free the gradients.

        Return the norm before clipping, a scalar tensor, or `None` if the gradients are not clipped.
        """
        norm = None if self.max_norm is None else self.clip(self.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def clip(self, max_norm: float) -> Tensor:
        """Clip the gradients, with the model's own method if it has one. Return the norm before clipping, []."""
        clip: Any = getattr(self.model, "clip_grad_norm_", None)
        norm = clip(max_norm) if clip else nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def step(self, batch: Batch) -> Tensor:
        """Take one step of training, and return the loss, []."""
        loss = self.backward(batch)
        self.update()
        return loss

    def weights(self) -> dict[str, Tensor]:
        """Return all parameters, unsharded and flattened, by their names in the plain model."""
        return {name: self.whole(param.detach()) for name, param in self._named()}

    def gradients(self) -> dict[str, Tensor]:
        """Return all gradients, unsharded and flattened, by the names of their parameters."""
        return {name: self.whole(param.grad) for name, param in self._named() if param.grad is not None}

    def _backward(self, batch: Batch, parts: int) -> Tensor:
        """Run forward and backward of one of `parts` micro-batches, and return its share of the loss, []."""
        loss = self.loss(batch) if parts == 1 else self.loss(batch) / parts
        self.differentiate(loss)
        return loss.detach()

    @contextmanager
    def _unsynced(self) -> Iterator[None]:
        """Do not reduce gradients within the block. A plain model never reduces gradients."""
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(False)
            yield
            self.model.set_requires_gradient_sync(True)
        elif isinstance(self.model, DistributedDataParallel | FullyShardedDataParallel | ShardLite):
            with self.model.no_sync():
                yield
        else:
            yield

    def _named(self) -> Iterable[tuple[str, Tensor]]:
        """Yield parameters by their names in the plain model, without the prefixes of DDP and `Cast`."""
        return [(re.sub(r"^(module\.)+", "", name), param) for name, param in self.model.named_parameters()]


class Floor(Trainer):
    """A rank that does not communicate, and steps its shard as if the gradients of the shard were already reduced."""

    def update(self) -> Tensor | None:
        """Step `1/W` of the parameters, and drop the gradients of the model."""
        norm = None
        if self.max_norm is not None:
            norm = nn.utils.clip_grad_norm_(self.optimizer.param_groups[0]["params"], self.max_norm)
        self.optimizer.step()
        self.model.zero_grad()
        return norm


class Format(Trainer):
    """A system whose state is not fp32, so only its losses are comparable."""


class Fsdp1(Trainer):
    """An FSDP1 model. Its parameters are views of flat shards, except inside `summon_full_params`."""

    def weights(self) -> dict[str, Tensor]:
        """Return all parameters, unsharded and flattened, by their names in the plain model."""
        with FullyShardedDataParallel.summon_full_params(self.model, writeback=False):
            return super().weights()

    def gradients(self) -> dict[str, Tensor]:
        """Return all gradients, unsharded and flattened, by the names of their parameters."""
        with FullyShardedDataParallel.summon_full_params(self.model, writeback=False, with_grads=True):
            return super().gradients()

    def _named(self) -> Iterable[tuple[str, Tensor]]:
        return [(name.replace("_fsdp_wrapped_module.", ""), param) for name, param in self.model.named_parameters()]


class Autocast(Trainer):
    """A model under autocast to bf16, with weights in fp32."""

    def loss(self, batch: Batch) -> Tensor:
        """Run the forward of one micro-batch, and return its loss, []."""
        with torch.autocast(batch[0].device.type, torch.bfloat16):
            return super().loss(batch)


class InParts(Trainer):
    """A model with `order="tree"`, which requires a loop over `parts()`. Each rank has one part."""

    def backward(self, batch: Batch) -> Tensor:
        """Run forward and backward, and return the loss of this rank's batch, []."""
        assert isinstance(self.model, ShardLite)
        for _ in self.model.parts():
            loss = super().backward(batch)
        return loss


class Cast(nn.Module):
    """A model that runs with weights and inputs cast to `dtype`. Weights and gradients keep their dtype."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.module = model
        self.dtype = dtype

    def forward(self, *batch: Tensor) -> Tensor:
        """Return the loss, []."""
        cast = {name: param.to(self.dtype) for name, param in self.module.named_parameters()}
        inputs = tuple(each.to(self.dtype) if each.is_floating_point() else each for each in batch)
        loss: Tensor = functional_call(self.module, cast, inputs)
        return loss


def computing_in(model: nn.Module, compute: torch.dtype | None) -> nn.Module:
    """Return the model, wrapped in `Cast` if `compute` is a dtype."""
    return model if compute is None else Cast(model, compute)


Build = Callable[[Any, dist.ProcessGroup], Trainer]
"""Function of a `Workload`, or of a `Source`, which has the same methods `model` and `units`."""


def build_floor(workload: Workload, group: dist.ProcessGroup, *, compute: torch.dtype | None = None) -> Trainer:
    """Build the plain model, and one parameter [n/W] that represents this rank's shard."""
    share = nn.Parameter(torch.full((-(-workload.parameters() // group.size()),), 0.02, device=workload.device))
    share.grad = torch.full_like(share, 1e-3)
    return Floor(computing_in(workload.model(), compute), torch_adamw([share]), flat)


def build_ddp(workload: Workload, group: dist.ProcessGroup, *, compute: torch.dtype | None = None) -> Trainer:
    """Build `DistributedDataParallel`."""
    model = wrap_ddp(computing_in(workload.model(), compute), group)
    return Trainer(model, torch_adamw(model.parameters()), flat)


def build_floor_in_bf16(workload: Workload, group: dist.ProcessGroup) -> Trainer:
    """Build the floor of a model in bf16, which casts nothing."""
    return build_floor(replace(workload, make=lambda: workload.make().bfloat16()), group)


def build_fsdp2(
    workload: Workload, group: dist.ProcessGroup, *, compute: torch.dtype | None = None, tuned: bool = False
) -> Trainer:
    """Build FSDP2. With `compute`, weights are gathered in this dtype, and gradients are reduced in fp32.

    If `tuned`, the last block stays gathered until its backward, which comes next, as torchtitan does.
    """
    model = workload.model()
    units = workload.units(model)
    model = wrap_fsdp2(model, units, group, Precision(compute=compute), kept=units[-1:] if tuned else ())
    return Trainer(model, torch_adamw(model.parameters()), whole_of_dtensor)


def build_shardlite(
    workload: Workload,
    group: dist.ProcessGroup,
    *,
    stage: int,
    transport: TransportName = "auto",
    reduce: ReduceName = "exact",
    quantized_gather: bool = False,
    compute: torch.dtype | None = None,
) -> Trainer:
    """Build ShardLite at one stage."""
    model = ShardLite(
        workload.model(),
        stage=stage,
        group=group,
        route=Route(transport=transport, reduce=reduce),
        precision=Precision(compute=compute, quantized_gather=quantized_gather),
    )
    whole = flat if stage == 0 else partial(join, group=group)
    return Trainer(model, AdamW(model.parameters(), **OPTIONS), whole)


def build_tree(workload: Workload, group: dist.ProcessGroup) -> Trainer:
    """Build ShardLite at stage 3 with a sum of gradients that does not depend on the number of ranks."""
    model = ShardLite(workload.model(), group=group, route=Route(order="tree", parts=group.size()))
    return InParts(model, AdamW(model.parameters(), **OPTIONS), partial(join, group=group))


def build_plain(workload: Workload, group: dist.ProcessGroup) -> Trainer:
    """Build the plain model on each rank, without communication."""
    del group
    model = workload.model()
    return Trainer(model, torch_adamw(model.parameters()), flat)


def build_autocast(workload: Workload, group: dist.ProcessGroup) -> Trainer:
    """Build the plain model under autocast on each rank, without communication."""
    del group
    model = workload.model()
    return Autocast(model, torch_adamw(model.parameters()), flat)


def build_zero(workload: Workload, group: dist.ProcessGroup, *, compute: torch.dtype | None = None) -> Trainer:
    """Build DDP with `ZeroRedundancyOptimizer`, which shards its state by whole parameters (ZeRO stage 1)."""
    model = wrap_ddp(computing_in(workload.model(), compute), group)
    return Trainer(model, zero_optimizer(model.parameters(), group), flat)


def build_fsdp1(workload: Workload, group: dist.ProcessGroup, *, compute: torch.dtype | None = None) -> Trainer:
    """Build FSDP1."""
    model = workload.model()
    model = wrap_fsdp1(model, workload.units(model), group, Precision(compute=compute))
    return Fsdp1(model, torch_adamw(model.parameters()), flat)


def build_format(
    workload: Workload,
    group: dist.ProcessGroup,
    *,
    precision: Precision = Precision(),  # noqa: B008 (frozen)
    state: str = "fp32",
    in_backward: bool = False,
    transport: TransportName = "auto",
) -> Trainer:
    """Build ShardLite at stage 3 in one of its formats."""
    model = ShardLite(workload.model(), precision=precision, group=group, route=Route(transport=transport))
    return Format(model, AdamW(model.parameters(), state=state, in_backward=in_backward, **OPTIONS), flat)


_BF16 = Precision(compute=torch.bfloat16)
_SPLIT = Precision(compute=torch.bfloat16, master="split24")

OPTIONS_OF_FORMATS: dict[str, dict[str, Any]] = {
    "in_backward": {"in_backward": True},
    "bf16": {"precision": _BF16},
    "bf16, split24": {"precision": _SPLIT},
    "bf16, int8": {"precision": _BF16, "state": "int8"},
    "compact": {"precision": _SPLIT, "state": "int8", "in_backward": True},
}
FORMATS: dict[str, Build] = {name: partial(build_format, **each) for name, each in OPTIONS_OF_FORMATS.items()}
"""Formats of ShardLite at stage 3; `compact` combines the others. `bench.gpu` compares losses with a plain model's."""

MIXED: dict[str, Build] = {
    "fsdp2": partial(build_fsdp2, compute=torch.bfloat16, tuned=True),
    "plain": build_autocast,
    "standard": partial(build_format, precision=_BF16),
    "in_backward": partial(build_format, precision=_BF16, in_backward=True),
    "compact": FORMATS["compact"],
}
"""Systems that compute in bf16 and reduce in fp32. `bench.gpu` compiles their blocks."""

SYSTEMS: dict[str, Build] = {
    "floor": build_floor,
    "ddp": build_ddp,
    "fsdp2": build_fsdp2,
    **{f"stage{stage}": partial(build_shardlite, stage=stage) for stage in range(4)},
}

TRANSPORTS: dict[str, Build] = {
    "p2p": partial(build_shardlite, stage=3, transport="p2p"),
    "collectives": partial(build_shardlite, stage=3, transport="collectives"),
}
"""ShardLite at stage 3 over the process group, which the other systems also use."""

ORDERS: dict[str, Build] = {"tree": build_tree}
"""ShardLite at stage 3 with a different order of addition."""


Units = Sequence[nn.Module]


def wrap_ddp(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    """Wrap a model in PyTorch's `DistributedDataParallel`. Nothing is sharded."""
    return DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)


def wrap_fsdp1(
    model: nn.Module, units: Sequence[nn.Module], group: dist.ProcessGroup, precision: Precision
) -> nn.Module:
    """Wrap a model in PyTorch's FSDP1, which has flat parameters. The arguments are those of `wrap_fsdp2`."""
    chosen = set(units)
    policy = None
    if precision.compute is not None:
        policy = fsdp.MixedPrecision(param_dtype=precision.compute, reduce_dtype=precision.reduce)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FSDP is switching to use `NO_SHARD`")  # one rank has nothing to shard
        return FullyShardedDataParallel(
            model,
            process_group=group,
            auto_wrap_policy=CustomPolicy(lambda module: module in chosen),
            device_id=_device_of(model),
            mixed_precision=policy,
            use_orig_params=True,
        )


def wrap_fsdp2(
    model: nn.Module,
    units: Sequence[nn.Module],
    group: dist.ProcessGroup,
    precision: Precision,
    kept: Sequence[nn.Module] = (),
) -> nn.Module:
    """Shard a model with PyTorch's `fully_shard`, unit by unit, and return it.

    Args:
        model: the model, on the device where it is trained.
        units: modules whose weights are gathered together: inner modules first, without the root.
        group: all ranks.
        precision: only `compute` and `reduce` are used. Without `compute`, gradients are reduced in their own dtype.
        kept: units that stay gathered from their forward to their backward, as the root does.
    """
    mesh = DeviceMesh.from_group(group, _device_of(model).type)
    reduce = None if precision.compute is None else precision.reduce
    policy = fsdp.MixedPrecisionPolicy(param_dtype=precision.compute, reduce_dtype=reduce)
    for unit in [*units, model]:
        reshard = False if unit in kept else None  # `None` is the default
        fsdp.fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    return model


def _device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def import_quietly(package: str) -> Any:
    """Import a package without a warning. PyTorch 2.13 compiles `optim` with `torch.jit`, which is deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return importlib.import_module(package)


def zero_optimizer(params: Iterable[nn.Parameter], group: dist.ProcessGroup) -> Optimizer:
    """Return PyTorch's optimizer that shards its state by whole parameters (ZeRO stage 1)."""
    make = import_quietly(ZERO).ZeroRedundancyOptimizer
    optimizer: Optimizer = make(params, torch.optim.AdamW, process_group=group, fused=True, **OPTIONS)
    return optimizer


def torch_adamw(params: Iterable[nn.Parameter]) -> Optimizer:
    """Return PyTorch's fused AdamW with `OPTIONS`."""
    return torch.optim.AdamW(params, fused=True, **OPTIONS)


def flat(tensor: Tensor) -> Tensor:
    """Return a flat copy of a tensor."""
    return tensor.detach().reshape(-1).clone()


def whole_of_dtensor(tensor: Tensor) -> Tensor:
    """Return the full tensor of a DTensor, flattened. Collective."""
    assert isinstance(tensor, DTensor)
    return flat(tensor.full_tensor())


def join(local: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Concatenate the shards [k] of all ranks, in the order of ranks."""
    parts: list[Tensor] = [local] * group.size()
    dist.all_gather_object(parts, local.clone(), group=group)
    return torch.cat([part.reshape(-1) for part in parts])
