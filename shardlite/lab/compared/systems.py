"""Systems of a comparison, built from the same plain model and stepped by the same optimizer.

| name | meaning |
|---|---|
| `floor` | forward and backward of the plain model, then AdamW on `1/W` of the parameters; no communication |
| `ddp`, `zero` | `DistributedDataParallel` with gradients as views of buckets; `zero` adds `ZeroRedundancyOptimizer` |
| `fsdp1`, `fsdp2` | `FullyShardedDataParallel` and `fully_shard` on every block, then on the root |
| `stage0` to `stage3` | ShardLite, which finds the same units automatically |
| `p2p`, `collectives` | ShardLite at stage 3, over the process group instead of shared memory |
| `tree` | ShardLite at stage 3 with `order="tree"`, and one part of a batch per rank: the same sums in another order |
| `activations` | forward and backward of the plain model, whose gradients are dropped; also in bf16 |
| `plain` | the plain model on each rank separately; under autocast in `MIXED` |
| `deepspeed1` to `deepspeed3` | DeepSpeed in fp32 at stages 1 to 3 of ZeRO, if installed |
| the others | ShardLite at stage 3 in other formats; `compact` combines them with `in_backward` |

All systems use fused AdamW. As is PyTorch's default, they free gradients after the step. With `compute`, weights in
fp32 are cast to this dtype for forward and backward, and gradients are reduced in fp32. FSDP1, FSDP2 and ShardLite have
an option for this; in the other systems the forward casts (`Cast`).

Legend: `W` ranks, `n` elements in all parameters.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shardlite import AdamW, Precision, Route, ShardLite
from shardlite.lab.compared.trainer import (
    Activations,
    Autocast,
    Cast,
    DeepSpeed,
    Floor,
    Format,
    Fsdp1,
    InParts,
    Trainer,
    flat,
    full_of_dtensor,
    join,
)
from shardlite.plan import Setting, Source

OPTIONS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
"""Options of AdamW. They do not affect memory."""

ADAMW = f"fused AdamW, lr {OPTIONS['lr']:g}, betas {OPTIONS['betas']}, weight decay {OPTIONS['weight_decay']}"
OPTIMIZER = f"{ADAMW}, no clipping"

_ZERO = "torch.distributed.optim"
"""The module of `ZeroRedundancyOptimizer`. Its import takes long."""

Build = Callable[[Any, dist.ProcessGroup], Trainer]
"""Function of a `Workload`, or of a `Source`, which has the same methods `model` and `units`."""


def computing_in(model: nn.Module, compute: torch.dtype | None) -> nn.Module:
    """Return the model, wrapped in `Cast` if `compute` is a dtype."""
    return model if compute is None else Cast(model, compute)


def build_floor(workload: Any, group: dist.ProcessGroup, *, compute: torch.dtype | None = None) -> Trainer:
    """Build the plain model, and one parameter [n/W] that represents this rank's shard."""
    share = nn.Parameter(torch.full((-(-workload.parameters() // group.size()),), 0.02, device=workload.device))
    share.grad = torch.full_like(share, 1e-3)
    return Floor(computing_in(workload.model(), compute), torch_adamw([share]), flat)


def build_floor_in_bf16(workload: Any, group: dist.ProcessGroup) -> Trainer:
    """Build the floor of a model in bf16, which casts nothing."""
    return build_floor(replace(workload, make=lambda: workload.make().bfloat16()), group)


def build_plain(
    workload: Any,
    group: dist.ProcessGroup,
    *,
    kind: type[Trainer] = Trainer,
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None,
) -> Trainer:
    """Build the plain model on each rank, without communication."""
    del group
    model = workload.model()
    return kind(model, (optimizer or torch_adamw)(model.parameters()), flat)


def build_activations(workload: Any, group: dist.ProcessGroup, *, dtype: torch.dtype | None = None) -> Trainer:
    """Build the plain model in a dtype. Its gradients are dropped when they arrive."""

    def drop(param: Tensor) -> None:
        param.grad = None

    trainer = build_plain(workload, group, kind=Activations)
    for param in trainer.model.to(dtype).parameters():
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(drop)  # type: ignore[no-untyped-call]
    return trainer


def build_ddp(
    workload: Any,
    group: dist.ProcessGroup,
    *,
    compute: torch.dtype | None = None,
    optimizer: Callable[[Iterable[nn.Parameter], dist.ProcessGroup], Optimizer] = lambda params, _: torch_adamw(params),
    kind: type[Trainer] = Trainer,
) -> Trainer:
    """Build `DistributedDataParallel`."""
    model = wrap_ddp(computing_in(workload.model(), compute), group)
    return kind(model, optimizer(model.parameters(), group), flat)


def build_fsdp1(workload: Any, group: dist.ProcessGroup, *, compute: torch.dtype | None = None) -> Trainer:
    """Build FSDP1, which has flat parameters. Without `compute`, gradients are reduced in their own dtype."""
    model = workload.model()
    chosen, policy = set(workload.units(model)), None
    if compute is not None:
        policy = fsdp.MixedPrecision(param_dtype=compute, reduce_dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FSDP is switching to use `NO_SHARD`")  # one rank has nothing to shard
        model = FullyShardedDataParallel(
            model,
            process_group=group,
            auto_wrap_policy=CustomPolicy(lambda module: module in chosen),
            device_id=next(model.parameters()).device,
            mixed_precision=policy,
            use_orig_params=True,
        )
    return Fsdp1(model, torch_adamw(model.parameters()), flat)


def build_fsdp2(
    workload: Any,
    group: dist.ProcessGroup,
    *,
    compute: torch.dtype | None = None,
    reduce: torch.dtype = torch.float32,
    tuned: bool = False,
    offload: fsdp.OffloadPolicy | None = None,
    optimizer: Callable[[nn.Module], Optimizer] = lambda model: torch_adamw(model.parameters()),
) -> Trainer:
    """Build FSDP2. With `compute`, weights are gathered in this dtype, and gradients are reduced in `reduce`.

    If `tuned`, the last block stays gathered until its backward, which comes next, as torchtitan does.
    """
    model = workload.model()
    units = workload.units(model)
    mesh = DeviceMesh.from_group(group, next(model.parameters()).device.type)
    policy = fsdp.MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=None if compute is None else reduce)
    options: dict[str, Any] = {} if offload is None else {"offload_policy": offload}
    for unit in [*units, model]:
        reshard = False if tuned and unit is units[-1] else None  # `None` is the default
        fsdp.fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard, **options)
    return Trainer(model, optimizer(model), full_of_dtensor)


def build_shardlite(
    workload: Any,
    group: dist.ProcessGroup,
    *,
    stage: int = 3,
    precision: Precision = Precision(),  # noqa: B008 (frozen)
    compute: torch.dtype | None = None,
    master: Any = None,
    state: str = "fp32",
    in_backward: bool = False,
    prefetch: int = 1,
    offload: bool | float | None = None,
    **route: Any,
) -> Trainer:
    """Build ShardLite over a `Route`. `compute` and `master` replace those of `precision`."""
    precision = replace(precision, compute=compute or precision.compute, master=master or precision.master)
    options: dict[str, Any] = {"precision": precision, "prefetch": prefetch, "offload": offload}
    options["device"] = workload.device
    model = ShardLite(workload.model(), stage=stage, group=group, route=Route(**route), **options)
    optimizer = AdamW(model.parameters(), state=state, in_backward=in_backward, **OPTIONS)
    if state != "fp32" or in_backward or precision.master == "split24":
        return Format(model, optimizer, flat)
    return Trainer(model, optimizer, flat if stage == 0 else partial(join, group=group))


def build_tree(workload: Any, group: dist.ProcessGroup) -> Trainer:
    """Build ShardLite at stage 3 with a sum of gradients that does not depend on the number of ranks."""
    trainer = build_shardlite(workload, group, order="tree", parts=group.size())
    return InParts(trainer.model, trainer.optimizer, trainer.full)


def build_deepspeed(workload: Any, _: dist.ProcessGroup, *, stage: int) -> Trainer:  # it takes the default group
    """Build DeepSpeed. Its buckets are as large as the largest unit, because the default size is 2 GB."""
    import deepspeed

    model = workload.model()
    units = workload.units(model) or [model]
    numel = max(sum(param.numel() for param in unit.parameters()) for unit in units)
    config = {
        "train_micro_batch_size_per_gpu": 1,  # required, but unused by a step
        "zero_optimization": {"stage": stage, "reduce_bucket_size": numel, "allgather_bucket_size": numel},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch_adamw(model.parameters())
    engine, *__ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    return DeepSpeed(engine, optimizer, flat)


def wrap_ddp(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    """Wrap a model in PyTorch's `DistributedDataParallel`. Nothing is sharded."""
    return DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)


def zero_optimizer(params: Iterable[nn.Parameter], group: dist.ProcessGroup) -> Optimizer:
    """Return PyTorch's optimizer that shards its state by whole parameters (ZeRO stage 1)."""
    make = _import_quietly(_ZERO).ZeroRedundancyOptimizer
    optimizer: Optimizer = make(params, torch.optim.AdamW, process_group=group, fused=True, **OPTIONS)
    return optimizer


def torch_adamw(params: Iterable[nn.Parameter]) -> Optimizer:
    """Return PyTorch's fused AdamW with `OPTIONS`."""
    return torch.optim.AdamW(params, fused=True, **OPTIONS)


def _import_quietly(package: str) -> Any:
    """Import a package without a warning. PyTorch 2.13 compiles `optim` with `torch.jit`, which is deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return importlib.import_module(package)


# ---- systems by name ------------------------------------------------------------------------------------------------

_BF16 = Precision(compute=torch.bfloat16)
_SPLIT = Precision(compute=torch.bfloat16, master="split24")

OPTIONS_OF_FORMATS: dict[str, dict[str, Any]] = {
    "in_backward": {"in_backward": True},
    "bf16": {"precision": _BF16},
    "bf16, split24": {"precision": _SPLIT},
    "bf16, int8": {"precision": _BF16, "state": "int8"},
    "compact": {"precision": _SPLIT, "state": "int8", "in_backward": True},
}
FORMATS: dict[str, Build] = {name: partial(build_shardlite, **each) for name, each in OPTIONS_OF_FORMATS.items()}
"""Formats of ShardLite at stage 3; `compact` combines the others. `bench.gpu` compares losses with a plain model's."""

STAGES: dict[str, Callable[..., Trainer]] = {f"stage{n}": partial(build_shardlite, stage=n) for n in range(4)}

SYSTEMS: dict[str, Build] = {"floor": build_floor, "ddp": build_ddp, "fsdp2": build_fsdp2, **STAGES}

TRANSPORTS: dict[str, Callable[..., Trainer]] = {
    name: partial(build_shardlite, transport=name) for name in ("p2p", "collectives")
}
"""ShardLite at stage 3 over the process group, which the other systems also use."""

ORDERS: dict[str, Build] = {"tree": build_tree}
"""ShardLite at stage 3 with a different order of addition."""

_OVER_NCCL = partial(build_shardlite, precision=_BF16, transport="collectives")
ON_GPU: dict[str, Build] = {
    "fsdp2": partial(build_fsdp2, compute=torch.bfloat16, tuned=True),
    "floor": build_floor_in_bf16,
    "exact": _OVER_NCCL,
    "fast": partial(_OVER_NCCL, reduce="fast"),
    "in_backward": partial(_OVER_NCCL, in_backward=True),
    "quantized": partial(_OVER_NCCL, precision=replace(_BF16, quantized_gather=True)),
    "registered": partial(_OVER_NCCL, registered=True),
    "symmetric_memory": partial(_OVER_NCCL, transport="symmetric_memory"),
    "ddp": partial(build_ddp, kind=Autocast),
}
"""Systems of the probes of GPUs. All compute in bf16 and reduce in fp32, except DDP, which has autocast."""

MIXED: dict[str, Build] = {
    "fsdp2": ON_GPU["fsdp2"],
    "plain": partial(build_plain, kind=Autocast),
    "standard": FORMATS["bf16"],
    "in_backward": partial(build_shardlite, precision=_BF16, in_backward=True),
    "compact": FORMATS["compact"],
}
"""Systems that compute in bf16 and reduce in fp32. `bench.gpu` compiles their blocks."""


@dataclass(frozen=True, kw_only=True)
class System:
    """A system whose memory is measured. It trains the model of a `Source`."""

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
        _import_quietly(self.package)

    def train(self, source: Source, group: dist.ProcessGroup) -> Trainer:
        """Return the system with the model of `source`, ready to train on its batch."""
        trainer = self.build(source, group)
        loss = source.loss(trainer.model, self.dtype)
        return replace(trainer, forward=lambda *_: loss())


def shardlite_system(setting: Setting) -> System:
    """Return ShardLite with the options of `setting` as a system."""
    names = ("stage", "precision", "state", "in_backward", "prefetch")
    return System(build=partial(build_shardlite, **{name: getattr(setting, name) for name in names}), setting=setting)


def fsdp2_system(precision: Precision) -> System:
    """Return FSDP2 with the dtypes of `precision` as a system."""
    return System(build=partial(build_fsdp2, compute=precision.compute, reduce=precision.reduce))


_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    **{f"stage{stage}": {"stage": stage} for stage in range(4)},
    **OPTIONS_OF_FORMATS,
    "in_backward, prefetch 0": {"in_backward": True, "prefetch": 0},
}
MEASURED: dict[str, System] = {
    "activations": System(build=build_activations),
    "activations, bf16": System(build=partial(build_activations, dtype=torch.bfloat16), dtype=torch.bfloat16),
    "plain": System(build=build_plain),
    "ddp": System(build=build_ddp),
    "zero": System(build=partial(build_ddp, optimizer=zero_optimizer), package=_ZERO),
    "fsdp1": System(build=build_fsdp1),
    "fsdp2": System(build=build_fsdp2),
    **{f"deepspeed{n}": System(build=partial(build_deepspeed, stage=n), package="deepspeed") for n in (1, 2, 3)},
    **{name: shardlite_system(Setting(on_gpu=False, **options)) for name, options in _SETTINGS.items()},
}
"""All systems whose memory is measured: PyTorch's, then DeepSpeed's, then ShardLite's."""
