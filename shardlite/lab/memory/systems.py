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

from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shardlite import AdamW, Precision, ShardLite
from shardlite.lab import systems
from shardlite.lab.systems import OPTIONS, ZERO, Build, Trainer, flat, torch_adamw
from shardlite.plan import Setting, Source


@dataclass(frozen=True, kw_only=True)
class System:
    """A way to train a model."""

    build: Build
    setting: Setting | None = None
    """The options of ShardLite, from which the memory of the system is predicted. `None` for other systems."""

    dtype: torch.dtype | None = None
    """The dtype of the inputs, if it is not their own."""

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
        systems.import_quietly(self.package)

    def train(self, source: Source, group: ProcessGroup) -> Trainer:
        """Return the system with the model of `source`, ready to train on its batch."""
        trainer = self.build(source, group)
        loss = source.loss(trainer.model, self.dtype)
        return replace(trainer, forward=lambda *_: loss())


def shardlite_system(setting: Setting) -> System:
    """Return ShardLite with the options of `setting` as a system."""

    def build(source: Source, group: ProcessGroup) -> Trainer:
        options = {"stage": setting.stage, "precision": setting.precision, "prefetch": setting.prefetch}
        model = ShardLite(source.model(), group=group, device="cpu", **options)  # type: ignore[arg-type]
        optimizer = AdamW(model.parameters(), state=setting.state, in_backward=setting.in_backward, **OPTIONS)
        return Trainer(model, optimizer, flat)

    return System(build=build, setting=setting)


def fsdp2_system(precision: Precision) -> System:
    """Return FSDP2 with the dtypes of `precision` as a system."""

    def build(source: Source, group: ProcessGroup) -> Trainer:
        model = source.model()
        model = systems.wrap_fsdp2(model, source.units(model), group, precision)
        return Trainer(model, torch_adamw(model.parameters()), flat)

    return System(build=build)


class _Activations(Trainer):
    """A plain model whose gradients are dropped when they arrive, so nothing is left to update."""

    def update(self) -> None:
        """Do nothing."""


def _build_activations(source: Source, _: ProcessGroup, *, dtype: torch.dtype | None) -> Trainer:
    def drop(param: Tensor) -> None:
        param.grad = None

    model = source.model().to(dtype)
    for param in model.parameters():
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(drop)  # type: ignore[no-untyped-call]
    return _Activations(model, torch_adamw(model.parameters()), flat)


class _DeepSpeed(Trainer):
    """DeepSpeed, whose engine has its own backward and step."""

    def differentiate(self, loss: Tensor) -> None:
        """Run the backward of a loss."""
        self.model.backward(loss)  # type: ignore[operator]

    def update(self) -> None:
        """Step the shards."""
        self.model.step()  # type: ignore[operator]


def _build_deepspeed(source: Source, _: ProcessGroup, *, stage: int) -> Trainer:  # DeepSpeed takes the default group
    """Build DeepSpeed. Its buckets are as large as the largest unit, because the default size is 2 GB."""
    import deepspeed

    model = source.model()
    units = source.units(model) or [model]
    numel = max(sum(param.numel() for param in unit.parameters()) for unit in units)
    config = {
        "train_micro_batch_size_per_gpu": 1,  # required, but unused by a step
        "zero_optimization": {"stage": stage, "reduce_bucket_size": numel, "allgather_bucket_size": numel},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch_adamw(model.parameters())
    engine, *__ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    return _DeepSpeed(engine, optimizer, flat)


def _shardlite(**choices: object) -> System:
    return shardlite_system(Setting(on_gpu=False, **choices))  # type: ignore[arg-type]


SYSTEMS: dict[str, System] = {
    "activations": System(build=partial(_build_activations, dtype=None)),
    "activations, bf16": System(build=partial(_build_activations, dtype=torch.bfloat16), dtype=torch.bfloat16),
    "plain": System(build=systems.build_plain),
    "ddp": System(build=systems.build_ddp),
    "zero": System(build=systems.build_zero, package=ZERO),
    "fsdp1": System(build=systems.build_fsdp1),
    "fsdp2": System(build=systems.build_fsdp2),
    **{
        f"deepspeed{stage}": System(build=partial(_build_deepspeed, stage=stage), package="deepspeed")
        for stage in (1, 2, 3)
    },
    **{f"stage{stage}": _shardlite(stage=stage) for stage in range(4)},
    **{name: _shardlite(**options) for name, options in systems.OPTIONS_OF_FORMATS.items()},
    "in_backward, prefetch 0": _shardlite(in_backward=True, prefetch=0),
}
"""All systems by name: PyTorch's, then DeepSpeed's, then ShardLite's."""
