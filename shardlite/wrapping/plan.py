"""Plan a wrapped model before memory is allocated: units, flats (flat parameters) and device. Ranks compare plans.

In: a module and the options. Out: a `Plan`. This file does not use values of parameters.

Legend: `W` ranks that share a model.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import torch
from shardlite_kernels import stats_block
from torch import Tensor, nn

from shardlite.comm import Ranks, agree
from shardlite.config import QUANTIZABLE, Precision
from shardlite.params import ALIGN, ROOT, Layout
from shardlite.params.layout import lay_out
from shardlite.wrapping import init, validate
from shardlite.wrapping.keep import Dtypes, dtypes_of
from shardlite.wrapping.offload import can_offload, moment_nbytes
from shardlite.wrapping.partition import UnitPlan, applies, partition_module
from shardlite.wrapping.validate import Options


class FlatPlan(NamedTuple):
    """A planned flat: the parameters of one kind in a unit, which share one buffer."""

    layout: Layout
    compute: torch.dtype
    reduce: torch.dtype
    params: Sequence[nn.Parameter]
    split: bool = False
    """Whether weights are stored in two parts. If so, the layout describes the upper part."""

    quantized: bool = False
    """Whether gathers send 8-bit codes."""

    replicated: bool = False
    """Whether every rank keeps and steps all weights, at any stage."""


def plan_flats(
    plan: UnitPlan,
    world_size: int,
    precision: Precision,
    kept: Mapping[Tensor, torch.dtype],
    *,
    grain: int = ALIGN,
    device: torch.device,
) -> list[FlatPlan]:
    """Return the plans of a unit's flats, one per kind of parameters, in the order of their first parameters.

    Args:
        plan: planned unit.
        world_size: number of ranks that share the model.
        precision: dtypes of the model.
        kept: dtypes of the parameters that are not gathered in the compute dtype. They are gathered without codes, and
            their gradients are summed in at least fp32.
        grain: number of elements. The length of each shard is a multiple of this number.
        device: device of the full weights.
    """
    quantized = world_size > 1 and not plan.replicated and applies(precision.quantized_gather, plan)
    kinds: dict[tuple[torch.dtype, torch.dtype, bool], dict[nn.Parameter, str]] = {}
    for param, name in plan.params.items():
        master = precision.master_of(param.dtype, trainable=param.requires_grad)
        compute = kept.get(param, precision.compute_of(param.dtype))
        kinds.setdefault((master, compute, param.requires_grad), {})[param] = name
    flats = []
    for (master, compute, trainable), members in kinds.items():
        split = precision.splits(master, compute, trainable=trainable)
        stored = compute if split else master
        layout = lay_out(
            [(name, tuple(param.shape)) for param, name in members.items()],
            dtype=stored,
            trainable=trainable,
            world_size=world_size,
            grain=grain,
            matrix_align=max(ALIGN, _matrix_bytes(device) // compute.itemsize),
        )
        params, is_kept = list(members), any(param in kept for param in members)
        as_codes = quantized and not is_kept and stored in QUANTIZABLE and compute in QUANTIZABLE
        reduce = precision.reduce_of(master)
        reduce = torch.promote_types(reduce, torch.float32) if is_kept else reduce
        flats.append(FlatPlan(layout, compute, reduce, params, split, as_codes, plan.replicated))
    return flats


class Plan(NamedTuple):
    """Planned units, flats and device of a model."""

    units: Sequence[UnitPlan]
    flats: Sequence[Sequence[FlatPlan]]
    """Planned flats of each unit."""

    device: torch.device
    dtypes: Dtypes
    in_parts: bool = False
    """Whether gradients are added in a tree over the parts of a global batch, even on a single rank."""

    offloaded: Sequence[bool] = ()
    """Whether the optimizer states of each unit are kept in host memory."""

    @property
    def casts(self) -> bool:
        """Whether any weights are split, or stored in a dtype that differs from the compute dtype."""
        return any(flat.split or flat.compute != flat.layout.dtype for flat in chain.from_iterable(self.flats))


def agree_on_plan(module: nn.Module, options: Options, groups: Ranks, wrapper: type[nn.Module]) -> Plan:
    """Plan the units of a module, and check that all ranks have the same plan.

    Raises:
        LayoutError: the module or an option is invalid on this or another rank, or plans differ.
        CommError: a rank did not arrive within the timeout.
    """
    problem, plan, facts = None, None, []
    try:
        validate.check_module(module, options.precision, options.ignored, wrapper=wrapper)
        validate.check_options(module, options, groups)
        validate.tie(module, options.ignored)
        validate.check_replicated(module, options)
        init.check(module, options.init, options.ignored, first=groups.is_first)
        on_gpu = torch.cuda.is_available() and groups.carry("cuda")
        device = validate.device_for(module, options.device, torch.device("cuda" if on_gpu else "cpu"))
        plan = plan_units(module, options, groups.shards, device)
        settings = (
            f"stage {options.stage}",
            f"prefetch {options.prefetch}",
            f"{replace(options.precision, quantized_gather=False, keep=None)}",  # `_describe` compares both
            f"{options.route}",
            f"buffers {options.buffers!r}",
            f"{options.memory_limit or 'no memory limit'}",
            f"{options.offload or 'no offload'}",
        )
        facts = [*settings, f"shards on {plan.device.type}", *_describe(plan)]
    except Exception as error:  # all types are caught, because other ranks wait for this rank
        problem = error
    agree(groups, facts, problem, what="what each rank wraps", timeout=options.timeout)
    assert plan is not None, "`agree` has raised any problem"
    return plan


def plan_units(module: nn.Module, options: Options, world_size: int, device: torch.device) -> Plan:
    """Plan the units of a checked module for `world_size` ranks, without comparing the plan with other ranks.

    Raises:
        LayoutError: the option `units` is invalid.
        ValueError: the option `offload` is below the smallest unit.
    """
    units = partition_module(module, options.units, options.ignored, options.replicated)
    # With order="tree", norms combine statistics of blocks. No cut may divide a block, or norms would depend on `W`.
    grain = stats_block(torch.empty(0, device=device)) if options.route.order == "tree" else ALIGN
    roots = [unit.module for unit in units if unit.params]
    dtypes = dtypes_of(module, options.precision, roots, options.ignored)
    flats = [plan_flats(unit, world_size, options.precision, dtypes.kept, grain=grain, device=device) for unit in units]
    in_parts, offloaded = options.route.order == "tree", _offloaded(flats, options, device)
    return Plan(units, flats, device, dtypes, in_parts, offloaded)


def _offloaded(flats: Sequence[Sequence[FlatPlan]], options: Options, device: torch.device) -> Sequence[bool]:
    """Return whether the states of each unit are kept in host memory.

    Moments count as fp32. If `options.offload` is a number of bytes, they count in the format of
    `options.memory_limit`.

    Raises:
        ValueError: the smallest unit is larger than the bytes that may stay on the GPU.
    """
    if options.offload is None or not can_offload(device):
        return [False] * len(flats)
    limit = options.memory_limit
    state = "fp32" if limit is None or options.offload.resident is None else limit.state
    return options.offload.choose([sum(_state_nbytes(flat, options, state) for flat in unit) for unit in flats])


def _state_nbytes(flat: FlatPlan, options: Options, state: str) -> int:
    """Return the bytes of a flat's states on the rank with the longest shard."""
    if not flat.layout.trainable:
        return 0
    whole = options.stage == 0 or flat.replicated
    numel = flat.layout.real.full_numel if whole else flat.layout.real.shard_numel
    master = torch.float32 if flat.split else flat.layout.dtype
    return moment_nbytes(numel, master, state) + flat.split * numel


def _matrix_bytes(device: torch.device) -> int:
    """Return the alignment of matrices in the full weights, in bytes.

    When cuBLAS chooses an algorithm, it considers the alignment of a matrix up to 256 bytes. PyTorch's allocator aligns
    the matrices of a plain model to 512 bytes. With less alignment, a sharded model could get a different algorithm,
    and different bits.
    """
    return 256 if device.type == "cuda" else 0


def _describe(plan: Plan) -> Iterable[str]:
    if plan.dtypes.inputs:
        yield f"{len(plan.dtypes.inputs)} modules that cast inputs"
    for unit, flats in zip(plan.units, plan.flats, strict=True):
        for flat in flats:
            kind = (
                f"{flat.layout.dtype}, {'trainable' if flat.layout.trainable else 'frozen'}, gathered as {flat.compute}"
            )
            place = f"in unit {unit.name or ROOT!r}{', gathered as codes' * flat.quantized}"
            for slot, param in zip(flat.layout.slots, flat.params, strict=True):
                source = ", read from a file" * (init.values_of(param) is not None)
                yield f"parameter {slot.name} {list(slot.shape)} ({kind}) {place}{source}"
