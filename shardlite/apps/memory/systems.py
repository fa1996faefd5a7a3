"""The systems that are compared. Each trains the same model, in the same units, with fused AdamW.

| name | what it is |
|---|---|
| `activations` | forward and backward of the plain model without its gradients; also in bf16 |
| `plain` | the unwrapped model, on each rank by itself |
| `ddp` | `DistributedDataParallel`, gradients as views of its buckets |
| `zero` | the same with `ZeroRedundancyOptimizer` (ZeRO-1, by whole parameters) |
| `fsdp1`, `fsdp2` | `FullyShardedDataParallel` and `fully_shard` on the units that ShardLite finds, then on the root |
| `deepspeed1` to `deepspeed3` | DeepSpeed in fp32 at stages 1 to 3 of ZeRO, where it is installed |
| `stage0` to `stage3` | ShardLite |
| the others | ShardLite at stage 3 in other formats; `compact` has all of them and `in_backward` |
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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
"""Options of AdamW. They do not change what is held."""

ADAMW = f"fused AdamW, lr {OPTIONS['lr']:g}, betas {OPTIONS['betas']}, weight decay {OPTIONS['weight_decay']}"
OPTIMIZER = f"{ADAMW}, no clipping"

_ZERO = "torch.distributed.optim"


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """A model, wrapped by one system, and ready to train on one batch."""

    model: nn.Module
    loss: Callable[[], Tensor]
    """Runs the forward and returns the loss []."""

    update: Callable[[], None]
    """Steps the parameters and drops the gradients."""

    backward: Callable[[Tensor], object] = torch.autograd.backward
    units: Mapping[str, nn.Module] = field(default_factory=dict)
    """The modules that are gathered each as a whole, by name, without the root. Empty for unsharded models."""

    def step(self, enter: Callable[[str], object] = lambda _: None) -> None:
        """Take one training step. `enter` is called with the name of each phase as it begins."""
        enter("forward")
        loss = self.loss()
        enter("backward")
        self.backward(loss)
        enter("step")
        self.update()


Build = Callable[[Source, dist.ProcessGroup], Trainer]


@dataclass(frozen=True, kw_only=True)
class System:
    """A way to train a model."""

    build: Build
    setting: Setting | None = None
    """What `shardlite plan` needs to predict it, if it is ShardLite."""

    package: str = "torch"
    """What has to be installed."""

    @property
    def missing(self) -> str:
        """Return why the system cannot run here, or an empty string."""
        if find_spec(self.package) is not None:
            return ""
        return f"{self.package} is not installed; pip install {self.package}"

    def prepare(self) -> None:
        """Import the package, so that the import is not measured."""
        _import(self.package)


def units_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that ShardLite gathers each as a whole, by name, outer ones first, without the root."""
    plans = partition_module(model, None)
    return {plan.name: plan.module for plan in plans if plan.params and plan.module is not model}


def wrap_ddp(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    """Wrap a model in PyTorch's data parallel. Nothing is sharded."""
    return DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)


def wrap_fsdp1(
    model: nn.Module, units: Sequence[nn.Module], group: dist.ProcessGroup, precision: Precision
) -> nn.Module:
    """Wrap a model in PyTorch's FSDP1, which has flat parameters. See `wrap_fsdp2` for the arguments."""
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
    """Shard a model with PyTorch's `fully_shard`, unit by unit, and return it.

    Args:
        model: the model, on the device on which it is trained.
        units: modules that are gathered each as a whole, inner ones first, without the root.
        group: all ranks.
        precision: only `compute` and `reduce` are used. Without `compute`, gradients are reduced in their own dtype.
    """
    mesh = DeviceMesh.from_group(group, _device_of(model).type)
    reduce = None if precision.compute is None else precision.reduce
    policy = MixedPrecisionPolicy(param_dtype=precision.compute, reduce_dtype=reduce)
    for unit in [*units, model]:
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    return model


def _device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _import(package: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # PyTorch 2.13 compiles `optim` by `torch.jit`
        return importlib.import_module(package)


def zero_optimizer(params: Iterable[nn.Parameter], group: dist.ProcessGroup) -> Optimizer:
    """Return PyTorch's optimizer that shards its state by whole parameters (ZeRO stage 1)."""
    make = _import(_ZERO).ZeroRedundancyOptimizer
    optimizer: Optimizer = make(params, torch.optim.AdamW, process_group=group, fused=True, **OPTIONS)
    return optimizer


def torch_adamw(params: Iterable[nn.Parameter]) -> Optimizer:
    """Return PyTorch's fused AdamW with `OPTIONS`."""
    return torch.optim.AdamW(params, fused=True, **OPTIONS)


def shardlite_system(setting: Setting) -> System:
    """Return ShardLite as a system, with the options of `setting`."""

    def build(source: Source, group: dist.ProcessGroup) -> Trainer:
        module = source.make()
        units = units_of(module)
        model = ShardLite(
            module,
            stage=setting.stage,
            precision=setting.precision,
            prefetch=setting.prefetch,
            group=group,
            device="cpu",
        )
        optimizer = AdamW(model.parameters(), state=setting.state, in_backward=setting.in_backward, **OPTIONS)
        return _trainer(source, model, optimizer, units)

    return System(build=build, setting=setting)


def fully_sharded_system(
    wrap: Callable[[nn.Module, Sequence[nn.Module], dist.ProcessGroup, Precision], nn.Module],
    precision: Precision = Precision(),  # noqa: B008  # frozen
) -> System:
    """Return a fully sharded system of PyTorch, wrapped by `wrap`."""

    def build(source: Source, group: dist.ProcessGroup) -> Trainer:
        module = source.make()
        units = units_of(module)
        model = wrap(module, list(reversed(units.values())), group, precision)
        return _trainer(source, model, torch_adamw(model.parameters()), units)

    return System(build=build)


def _trainer(
    source: Source, model: nn.Module, optimizer: Optimizer, units: Mapping[str, nn.Module] | None = None
) -> Trainer:
    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Trainer(model=model, loss=source.loss(model, None), update=update, units=units or {})


def _activations(dtype: torch.dtype | None) -> System:
    """Return forward and backward of the plain model. Gradients are dropped as they arrive."""

    def drop(param: Tensor) -> None:
        param.grad = None

    def build(source: Source, _: dist.ProcessGroup) -> Trainer:
        model = source.make().to(dtype)
        for param in model.parameters():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(drop)  # type: ignore[no-untyped-call]
        return Trainer(model=model, loss=source.loss(model, dtype), update=lambda: None)

    return System(build=build)


def _replicated(
    wrap: Callable[[nn.Module, dist.ProcessGroup], nn.Module],
    optimizer: Callable[[Iterable[nn.Parameter], dist.ProcessGroup], Optimizer],
    package: str = "torch",
) -> System:
    def build(source: Source, group: dist.ProcessGroup) -> Trainer:
        model = wrap(source.make(), group)
        return _trainer(source, model, optimizer(model.parameters(), group))

    return System(build=build, package=package)


def _deepspeed(stage: int) -> System:
    """Return DeepSpeed. Its buckets have the size of the largest unit, because the default size is 2 GB."""

    def build(source: Source, _: dist.ProcessGroup) -> Trainer:  # DeepSpeed uses the default group
        import deepspeed

        model = source.make()
        units = list(units_of(model).values()) or [model]
        numel = max(sum(param.numel() for param in unit.parameters()) for unit in units)
        config = {
            "train_micro_batch_size_per_gpu": 1,  # it counts no samples
            "zero_optimization": {"stage": stage, "reduce_bucket_size": numel, "allgather_bucket_size": numel},
            "zero_allow_untested_optimizer": True,
        }
        optimizer = torch_adamw(model.parameters())
        engine, *__ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
        return Trainer(model=engine, loss=source.loss(engine, None), update=engine.step, backward=engine.backward)

    return System(build=build, package="deepspeed")


def _shardlite(**choices: Any) -> System:
    return shardlite_system(Setting(on_gpu=False, **choices))


_BF16 = Precision(compute=torch.bfloat16)
_SPLIT = Precision(compute=torch.bfloat16, master="split24")

SYSTEMS: dict[str, System] = {
    "activations": _activations(None),
    "activations, bf16": _activations(torch.bfloat16),
    "plain": _replicated(lambda model, _: model, lambda params, _: torch_adamw(params)),
    "ddp": _replicated(wrap_ddp, lambda params, _: torch_adamw(params)),
    "zero": _replicated(wrap_ddp, zero_optimizer, _ZERO),
    "fsdp1": fully_sharded_system(wrap_fsdp1),
    "fsdp2": fully_sharded_system(wrap_fsdp2),
    **{f"deepspeed{stage}": _deepspeed(stage) for stage in (1, 2, 3)},
    **{f"stage{stage}": _shardlite(stage=stage) for stage in range(4)},
    "in_backward": _shardlite(in_backward=True),
    "in_backward, prefetch 0": _shardlite(in_backward=True, prefetch=0),
    "bf16": _shardlite(precision=_BF16),
    "bf16, split24": _shardlite(precision=_SPLIT),
    "bf16, int8": _shardlite(precision=_BF16, state="int8"),
    "compact": _shardlite(precision=_SPLIT, state="int8", in_backward=True),
}
"""By name. PyTorch's systems come first, then DeepSpeed's, then ShardLite's."""
