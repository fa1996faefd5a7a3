"""Define the systems to compare. Each system trains the same model, in the same units, with fused AdamW.

| name | training |
|---|---|
| `activations` | forward and backward of the plain model, whose gradients are dropped; also in bf16 |
| `plain` | the unwrapped model, on each rank separately |
| `ddp` | `DistributedDataParallel`; gradients are views of its buckets |
| `zero` | `ddp` with `ZeroRedundancyOptimizer` (ZeRO-1, by whole parameters) |
| `fsdp1`, `fsdp2` | `FullyShardedDataParallel` and `fully_shard` on the units that ShardLite finds, then on the root |
| `deepspeed1` to `deepspeed3` | DeepSpeed in fp32 at stages 1 to 3 of ZeRO, if installed |
| `stage0` to `stage3` | ShardLite |
| the others | ShardLite at stage 3 in other formats; `compact` combines them with `in_backward` |
"""

import importlib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
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
"""Options of AdamW. They do not affect memory."""

ADAMW = f"fused AdamW, lr {OPTIONS['lr']:g}, betas {OPTIONS['betas']}, weight decay {OPTIONS['weight_decay']}"
OPTIMIZER = f"{ADAMW}, no clipping"

_ZERO = "torch.distributed.optim"


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """A model that one system has wrapped, ready to train on one batch."""

    model: nn.Module
    loss: Callable[[], Tensor]
    """Function that runs the forward and returns the loss []."""

    update: Callable[[], None]
    """Function that updates the parameters and drops the gradients."""

    backward: Callable[[Tensor], object] = torch.autograd.backward
    units: Mapping[str, nn.Module] = field(default_factory=dict)
    """Modules whose weights are gathered together, by name, without the root."""

    def step(self, enter: Callable[[str], object] = lambda _: None) -> None:
        """Take one training step. Call `enter` with the name of each phase when the phase begins."""
        enter("forward")
        loss = self.loss()
        enter("backward")
        self.backward(loss)
        enter("step")
        self.update()


Wrap = Callable[[nn.Module, Sequence[nn.Module], ProcessGroup, Precision], nn.Module]


@dataclass(frozen=True, kw_only=True)
class System:
    """A way to train a model."""

    build: Callable[[Source, ProcessGroup], Trainer]
    setting: Setting | None = None
    """The options of ShardLite, from which the memory of the system is predicted. `None` for other systems."""

    package: str = "torch"
    """The package that the system imports."""

    @property
    def missing(self) -> str:
        """Return why the system cannot run here, or `""` if it can."""
        if find_spec(self.package) is not None:
            return ""
        return f"{self.package} is not installed; pip install {self.package}"

    def prepare(self) -> None:
        """Import the package, so that the import is not measured."""
        _import(self.package)


def units_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules whose weights ShardLite gathers together, by name: outer modules first, without the root."""
    plans = partition_module(model, None)
    return {plan.name: plan.module for plan in plans if plan.params and plan.module is not model}


def wrap_ddp(model: nn.Module, group: ProcessGroup) -> nn.Module:
    """Wrap a model in PyTorch's `DistributedDataParallel`. Nothing is sharded."""
    return DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)


def wrap_fsdp1(model: nn.Module, units: Sequence[nn.Module], group: ProcessGroup, precision: Precision) -> nn.Module:
    """Wrap a model in PyTorch's FSDP1, which has flat parameters. The arguments are those of `wrap_fsdp2`."""
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
    model: nn.Module,
    units: Sequence[nn.Module],
    group: ProcessGroup,
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
    policy = MixedPrecisionPolicy(param_dtype=precision.compute, reduce_dtype=reduce)
    for unit in [*units, model]:
        reshard = False if unit in kept else None  # `None` is the default
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    return model


def _device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _import(package: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # PyTorch 2.13 compiles `optim` with `torch.jit`, which is deprecated
        return importlib.import_module(package)


def zero_optimizer(params: Iterable[nn.Parameter], group: ProcessGroup) -> Optimizer:
    """Return PyTorch's optimizer that shards its state by whole parameters (ZeRO stage 1)."""
    make = _import(_ZERO).ZeroRedundancyOptimizer
    optimizer: Optimizer = make(params, torch.optim.AdamW, process_group=group, fused=True, **OPTIONS)
    return optimizer


def torch_adamw(params: Iterable[nn.Parameter]) -> Optimizer:
    """Return PyTorch's fused AdamW with `OPTIONS`."""
    return torch.optim.AdamW(params, fused=True, **OPTIONS)


def shardlite_system(setting: Setting) -> System:
    """Return ShardLite with the options of `setting` as a system."""

    def wrap(module: nn.Module, _: object, group: ProcessGroup, precision: Precision) -> nn.Module:
        options: dict[str, Any] = {"stage": setting.stage, "precision": precision, "prefetch": setting.prefetch}
        return ShardLite(module, group=group, device="cpu", **options)

    def optimizer(params: Iterable[nn.Parameter], _: object) -> Optimizer:
        return AdamW(params, state=setting.state, in_backward=setting.in_backward, **OPTIONS)

    return wrapped_system(wrap, setting.precision, optimizer, setting=setting)


def wrapped_system(
    wrap: Wrap,
    precision: Precision = Precision(),  # noqa: B008  # frozen
    optimizer: Callable[[Iterable[nn.Parameter], ProcessGroup], Optimizer] = lambda params, _: torch_adamw(params),
    **others: Any,
) -> System:
    """Return a system that wraps a model and trains it with an optimizer.

    Args:
        wrap: function that wraps a model. It takes the arguments of `wrap_fsdp2`.
        precision: passed to `wrap`.
        optimizer: function that returns the optimizer of the wrapped model's parameters.
        **others: fields of the `System`.
    """

    def build(source: Source, group: ProcessGroup) -> Trainer:
        module = source.make()
        units = units_of(module)
        model = wrap(module, list(reversed(units.values())), group, precision)
        made = optimizer(model.parameters(), group)

        def update() -> None:
            made.step()
            made.zero_grad()

        return Trainer(model=model, loss=source.loss(model, None), update=update, units=units)

    return System(build=build, **others)


def _activations(dtype: torch.dtype | None) -> System:
    """Return a system that runs forward and backward of the plain model, and drops each gradient when it arrives."""

    def drop(param: Tensor) -> None:
        param.grad = None

    def build(source: Source, _: ProcessGroup) -> Trainer:
        model = source.make().to(dtype)
        for param in model.parameters():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(drop)  # type: ignore[no-untyped-call]
        return Trainer(model=model, loss=source.loss(model, dtype), update=lambda: None)

    return System(build=build)


def _deepspeed(stage: int) -> System:
    """Return DeepSpeed as a system. Its buckets are as large as the largest unit, because the default size is 2 GB."""

    def build(source: Source, _: ProcessGroup) -> Trainer:  # unused: DeepSpeed takes the default group
        import deepspeed

        model = source.make()
        units = list(units_of(model).values()) or [model]
        numel = max(sum(param.numel() for param in unit.parameters()) for unit in units)
        config = {
            "train_micro_batch_size_per_gpu": 1,  # required, but unused by a step
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
    "plain": wrapped_system(lambda model, *_: model),
    "ddp": wrapped_system(lambda model, _, group, __: wrap_ddp(model, group)),
    "zero": wrapped_system(lambda model, _, group, __: wrap_ddp(model, group), optimizer=zero_optimizer, package=_ZERO),
    "fsdp1": wrapped_system(wrap_fsdp1),
    "fsdp2": wrapped_system(wrap_fsdp2),
    **{f"deepspeed{stage}": _deepspeed(stage) for stage in (1, 2, 3)},
    **{f"stage{stage}": _shardlite(stage=stage) for stage in range(4)},
    "in_backward": _shardlite(in_backward=True),
    "in_backward, prefetch 0": _shardlite(in_backward=True, prefetch=0),
    "bf16": _shardlite(precision=_BF16),
    "bf16, split24": _shardlite(precision=_SPLIT),
    "bf16, int8": _shardlite(precision=_BF16, state="int8"),
    "compact": _shardlite(precision=_SPLIT, state="int8", in_backward=True),
}
"""All systems by name: PyTorch's, then DeepSpeed's, then ShardLite's."""
