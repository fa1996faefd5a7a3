"""The plan of a wrapped model, made before memory is allocated: units, flats and device. All ranks agree on it.

In: a module and the options. Out: a `Plan`. Knows nothing of values.

Legend: `W` ranks that share a model.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from shardlite_kernels import stats_block
from torch import nn

from shardlite.build import init, validate
from shardlite.build.partition import UnitPlan, applies, partition_module
from shardlite.build.validate import Options
from shardlite.comm import Ranks, agree
from shardlite.config import QUANTIZABLE, Precision
from shardlite.params import ALIGN, ROOT, Layout, lay_out

_CPU = torch.device("cpu")

_CUBLAS_BYTES = 256
"""Up to so many bytes cuBLAS looks at the alignment of a matrix when it chooses an algorithm."""


@dataclass(frozen=True)
class FlatPlan:
    """A planned flat."""

    layout: Layout
    compute: torch.dtype
    reduce: torch.dtype
    params: Sequence[nn.Parameter]
    split: bool = False
    """Whether weights are stored in two parts. The layout is then that of the upper part."""

    quantized: bool = False
    """Whether gathers send 8-bit codes."""


def plan_flats(
    plan: UnitPlan,
    world_size: int,
    precision: Precision,
    *,
    grain: int = ALIGN,
    device: torch.device = _CPU,
) -> list[FlatPlan]:
    """Plan the flats of a unit: one per kind of parameters, in the order of their first parameters.

    Shards are multiples of `grain` elements, and `device` is where the full weights will be.
    """
    quantized = world_size > 1 and applies(precision.quantized_gather, plan)
    kinds: dict[tuple[torch.dtype, torch.dtype, bool], dict[nn.Parameter, str]] = {}
    for param, name in plan.params.items():
        master = precision.master_of(param.dtype, trainable=param.requires_grad)
        kinds.setdefault((master, precision.compute_of(param.dtype), param.requires_grad), {})[param] = name
    flats = []
    for (master, compute, trainable), members in kinds.items():
        shapes = [(name, tuple(param.shape)) for param, name in members.items()]
        split = precision.splits(master, trainable=trainable)
        kept = compute if split else master
        layout = lay_out(
            shapes,
            dtype=kept,
            trainable=trainable,
            world_size=world_size,
            grain=grain,
            matrix_align=max(ALIGN, _matrix_bytes(device) // compute.itemsize),
        )
        as_codes = quantized and kept in QUANTIZABLE and compute in QUANTIZABLE
        flats.append(FlatPlan(layout, compute, precision.reduce_of(master), list(members), split, as_codes))
    return flats


@dataclass(frozen=True)
class Plan:
    """Units, flats and device of a model."""

    units: Sequence[UnitPlan]
    flats: Sequence[Sequence[FlatPlan]]
    """The flats of each unit."""

    device: torch.device
    in_parts: bool = False
    """Whether gradients are added in a tree over parts, on a single rank, too."""

    @property
    def casts(self) -> bool:
        """Whether any parameter is stored in another form than it is computed with."""
        return any(flat.split or flat.compute != flat.layout.dtype for flat in chain.from_iterable(self.flats))


def agree_on_plan(module: nn.Module, options: Options, groups: Ranks, wrapper: type[nn.Module]) -> Plan:
    """Plan the units of a module, and check that every rank has the same plan.

    Raises:
        LayoutError: the module or an option is invalid, here or on another rank.
        CommError: a rank did not arrive within the timeout.
    """
    problem, plan, facts = None, None, []
    try:
        plan = _make(module, options, groups, wrapper)
        settings = (
            f"stage {options.stage}",
            f"prefetch {options.prefetch}",
            f"{replace(options.precision, quantized_gather=False)}",  # each unit says whether it sends codes
            f"{options.route}",
            f"buffers {options.buffers!r}",
            f"{options.memory_limit or 'no memory limit'}",
        )
        facts = [*settings, f"shards on {plan.device.type}", *_describe(plan)]
    except Exception as error:  # any error: the other ranks are waiting for this one
        problem = error
    agree(groups, facts, problem, what="what each rank wraps", timeout=options.timeout)
    assert plan is not None, "a problem was raised"
    return plan


def _make(module: nn.Module, options: Options, groups: Ranks, wrapper: type[nn.Module]) -> Plan:
    validate.check_module(module, options.precision, options.ignored, wrapper=wrapper)
    validate.check_options(module, options, groups)
    validate.tie(module, options.ignored)
    init.check(module, options.init, options.ignored, first=groups.is_first)
    on_gpu = torch.cuda.is_available() and groups.carry("cuda")
    device = validate.device_for(module, options.device, torch.device("cuda" if on_gpu else "cpu"))
    return plan_units(module, options, groups.shards, device)


def plan_units(module: nn.Module, options: Options, world_size: int, device: torch.device) -> Plan:
    """Plan the units of a checked module for `world_size` ranks. Nothing is compared with other ranks.

    Raises:
        LayoutError: the option `units` is invalid.
    """
    units = partition_module(module, options.units, options.ignored)
    # Norms are added from statistics of blocks, which no cut may divide if it is not to change them.
    grain = stats_block(torch.empty(0, device=device)) if options.route.order == "tree" else ALIGN
    flats = [plan_flats(unit, world_size, options.precision, grain=grain, device=device) for unit in units]
    return Plan(units, flats, device, in_parts=options.route.order == "tree")


def _matrix_bytes(device: torch.device) -> int:
    """Return the multiple of bytes at which full matrices begin.

    PyTorch's allocator aligns the matrices of a plain model to 512 bytes. With less than cuBLAS looks at, a sharded
    model could be computed by another algorithm, and get other bits.
    """
    return _CUBLAS_BYTES if device.type == "cuda" else 0


def _describe(plan: Plan) -> Iterable[str]:
    for unit, flats in zip(plan.units, plan.flats, strict=True):
        for flat in flats:
            for line in flat.layout.describe():
                codes = ", gathered as codes" if flat.quantized else ""
                yield f"parameter {line} in unit {unit.name or ROOT!r}{codes}"
