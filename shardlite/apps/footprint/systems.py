"""The systems whose memory is compared: each has the same model, cut into the same units, and fused AdamW.

| name | what it is |
|---|---|
| `activations` | forward and backward of the plain model, whose gradients are dropped as they arrive; also in bf16 |
| `plain` | the plain model on each rank by itself |
| `ddp` | `DistributedDataParallel`, gradients as views of its buckets |
| `zero` | the same with `ZeroRedundancyOptimizer` (ZeRO-1, by whole parameters) |
| `fsdp1`, `fsdp2` | `FullyShardedDataParallel` and `fully_shard` on the units that ShardLite finds, then on the root |
| `deepspeed1` to `deepspeed3` | DeepSpeed in fp32 at stages 1 to 3 of ZeRO, where it is installed |
| `stage0` to `stage3` | ShardLite |
| the others | ShardLite at stage 3 in other formats; `compact` has all of them and `in_backward` |
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shardlite import AdamW, Precision, ShardLite
from shardlite.apps.plan.plan import Setting
from shardlite.apps.plan.source import Source
from shardlite.build import partition_module

OPTIONS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
"""Of AdamW. They do not change what is held."""

ADAMW = f"fused AdamW, lr {OPTIONS['lr']:g}, betas {OPTIONS['betas']}, weight decay {OPTIONS['weight_decay']}"
OPTIMIZER = f"{ADAMW}, no clipping"


@dataclass(frozen=True)
class Trainer:
    """One system, ready to train on one batch."""

    model: nn.Module
    loss: Callable[[], Tensor]
    """Runs the forward and returns the loss []."""

    update: Callable[[], None]
    """Steps the parameters and drops the gradients."""

    backward: Callable[[Tensor], object] = torch.autograd.backward

    def step(self) -> None:
        """Take one step of training."""
        loss = self.loss()
        self.backward(loss)
        self.update()


Build = Callable[[Source, dist.ProcessGroup], Trainer]


@dataclass(frozen=True, kw_only=True)
class System:
    """One system: how it is built, and how its memory is planned if it is ShardLite."""

    build: Build
    setting: Setting | None = None
    prepare: Callable[[], object] = lambda: None
    """Imports what the system needs, before anything is measured."""

    package: str = "torch"
    """What has to be installed."""

    @property
    def missing(self) -> str:
        """Return why the system cannot run here, or nothing."""
        if find_spec(self.package) is not None:
            return ""
        return f"{self.package} is not installed; pip install {self.package}"


def units_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules that ShardLite would gather as a whole, the inner ones first, without the root."""
    plans = partition_module(model, None)
    return [plan.module for plan in reversed(plans) if plan.params and plan.module is not model]


def wrap_ddp(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    """Return PyTorch's data parallel: nothing is sharded."""
    return DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)


def wrap_fsdp1(
    model: nn.Module, units: Sequence[nn.Module], group: dist.ProcessGroup, precision: Precision
) -> nn.Module:
    """Return PyTorch's older full sharding, which has flat parameters, too. See `wrap_fsdp2` for the arguments."""
    chosen = set(units)
    policy = None
    if precision.compute is not None:
        policy = MixedPrecision(param_dtype=precision.compute, reduce_dtype=precision.reduce)
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
    model: nn.Module, units: Sequence[nn.Module], group: dist.ProcessGroup, precision: Precision
) -> nn.Module:
    """Shard a model by PyTorch's `fully_shard`, unit by unit, and return it.

    Args:
        model: on the device on which it is trained.
        units: modules that are gathered each as a whole, the inner ones first, without the root.
        group: all ranks.
        precision: `compute` and `reduce` are used. Without `compute` gradients are reduced in their own dtype.
    """
    mesh = DeviceMesh.from_group(group, _device_of(model).type)
    reduce = None if precision.compute is None else precision.reduce
    policy = MixedPrecisionPolicy(param_dtype=precision.compute, reduce_dtype=reduce)
    for unit in [*units, model]:
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    return model


def _device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _import_zero() -> type[Optimizer]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # PyTorch 2.13 compiles a part of it by `torch.jit`
        from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer


def zero_optimizer(params: Iterable[nn.Parameter], group: dist.ProcessGroup) -> Optimizer:
    """Return PyTorch's optimizer that shards its state by whole parameters (ZeRO stage 1)."""
    make: Any = _import_zero()
    optimizer: Optimizer = make(params, torch.optim.AdamW, process_group=group, fused=True, **OPTIONS)
    return optimizer


def deepspeed_engine(
    model: nn.Module,
    units: Sequence[nn.Module],
    optimizer: Optimizer,
    *,
    stage: int,
    accumulation: int = 1,
    max_norm: float | None = None,
) -> Any:
    """Return DeepSpeed's engine on the default group. Its buckets have the size of the largest of `units`.

    The default is 2 GB. DeepSpeed has to be installed.

    Args:
        model: on the device on which it is trained.
        units: modules that ShardLite gathers as a whole; without any, a bucket has the size of the model.
        optimizer: of the model's parameters.
        stage: of ZeRO, 1 to 3.
        accumulation: micro-batches in a step.
        max_norm: to which gradients are clipped; `None` clips nothing.
    """
    import deepspeed

    numel = max(sum(param.numel() for param in unit.parameters()) for unit in units or [model])
    config = {
        "train_micro_batch_size_per_gpu": 1,  # it counts no samples
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": max_norm or 0.0,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": numel, "allgather_bucket_size": numel},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    return engine


def torch_adamw(params: Iterable[nn.Parameter]) -> Optimizer:
    """Return PyTorch's fused AdamW with `OPTIONS`."""
    return torch.optim.AdamW(params, fused=True, **OPTIONS)


def _trainer(source: Source, model: nn.Module, optimizer: Optimizer) -> Trainer:
    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Trainer(model, source.loss(model, None), update)


def _build_activations(source: Source, group: dist.ProcessGroup, *, dtype: torch.dtype | None) -> Trainer:
    del group
    model = source.make().to(dtype)

    def drop(param: Tensor) -> None:
        param.grad = None

    for param in model.parameters():
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(drop)  # type: ignore[no-untyped-call]
    return Trainer(model, source.loss(model, dtype), lambda: None)


def _build_plain(source: Source, group: dist.ProcessGroup) -> Trainer:
    del group
    model = source.make()
    return _trainer(source, model, torch_adamw(model.parameters()))


def _build_ddp(source: Source, group: dist.ProcessGroup) -> Trainer:
    model = wrap_ddp(source.make(), group)
    return _trainer(source, model, torch_adamw(model.parameters()))


def _build_zero(source: Source, group: dist.ProcessGroup) -> Trainer:
    model = wrap_ddp(source.make(), group)
    return _trainer(source, model, zero_optimizer(model.parameters(), group))


def _build_fsdp(
    source: Source,
    group: dist.ProcessGroup,
    *,
    wrap: Callable[[nn.Module, Sequence[nn.Module], dist.ProcessGroup, Precision], nn.Module],
) -> Trainer:
    model = source.make()
    model = wrap(model, units_of(model), group, Precision())
    return _trainer(source, model, torch_adamw(model.parameters()))


def _build_deepspeed(source: Source, group: dist.ProcessGroup, *, stage: int) -> Trainer:
    del group  # it takes the default group
    model = source.make()
    engine = deepspeed_engine(model, units_of(model), torch_adamw(model.parameters()), stage=stage)
    return Trainer(engine, source.loss(engine, None), engine.step, engine.backward)


def _build_shardlite(source: Source, group: dist.ProcessGroup, *, setting: Setting) -> Trainer:
    model = ShardLite(
        source.make(), stage=setting.stage, precision=setting.precision, prefetch=setting.prefetch, group=group
    )
    optimizer = AdamW(model.parameters(), state=setting.state, in_backward=setting.in_backward, **OPTIONS)
    return _trainer(source, model, optimizer)


def _shardlite(**choices: Any) -> System:
    setting = Setting(on_gpu=False, **choices)
    return System(build=partial(_build_shardlite, setting=setting), setting=setting)


def _deepspeed(stage: int) -> System:
    def prepare() -> None:
        import deepspeed  # noqa: F401

    return System(build=partial(_build_deepspeed, stage=stage), prepare=prepare, package="deepspeed")


_BF16 = Precision(compute=torch.bfloat16)
_SPLIT = Precision(compute=torch.bfloat16, master="split24")

SYSTEMS: dict[str, System] = {
    "activations": System(build=partial(_build_activations, dtype=None)),
    "activations, bf16": System(build=partial(_build_activations, dtype=torch.bfloat16)),
    "plain": System(build=_build_plain),
    "ddp": System(build=_build_ddp),
    "zero": System(build=_build_zero, prepare=_import_zero),
    "fsdp1": System(build=partial(_build_fsdp, wrap=wrap_fsdp1)),
    "fsdp2": System(build=partial(_build_fsdp, wrap=wrap_fsdp2)),
    **{f"deepspeed{stage}": _deepspeed(stage) for stage in (1, 2, 3)},
    **{f"stage{stage}": _shardlite(stage=stage) for stage in range(4)},
    "in_backward": _shardlite(in_backward=True),
    "in_backward, prefetch 0": _shardlite(in_backward=True, prefetch=0),
    "bf16": _shardlite(precision=_BF16),
    "bf16, split24": _shardlite(precision=_SPLIT),
    "bf16, int8": _shardlite(precision=_BF16, state="int8"),
    "compact": _shardlite(precision=_SPLIT, state="int8", in_backward=True),
}
"""By name. Those of PyTorch come first, then DeepSpeed's, then ShardLite's."""
