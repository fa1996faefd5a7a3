"""Bytes of a wrapped model by purpose, from its plan alone: the same layouts and the same allocation, on meta.

In: a `Plan`, a `Placement` and a `Recipe`. Out: a `Budget`, exact for what is held from step to step, and the sizes of
what comes and goes. `timeline.py` says when. Activations are the program's and not in it.

Legend: `W` ranks that share a model, `S` elements per shard; a full buffer has `W*S` elements.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from shardlite_kernels import FORMATS, SCALE_BLOCK, chunk_nbytes, temporary_nbytes
from torch import Tensor

from shardlite.build.allocate import Placement, build_units, placement_of
from shardlite.build.plan import Plan
from shardlite.comm import BLOCK, rows_numel
from shardlite.params import ALIGN, Flat, Unit, UnitRule, round_up, storage_key

_META = torch.device("meta")

_NARROW_ROWS = torch.iinfo(torch.int16).max
"""Parameters up to which the optimizer's table of rows has 2 bytes per group, else 4."""

_GRAIN = 1024
"""Elements: slices of a reduction are multiples of it."""

_SCALARS = 4
"""Bytes of a parameter's step count."""

HELD = ("parameters", "optimizer state", "buffers", "staging", "chunks of a step")
"""Purposes of what is held from step to step."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What decides the bytes of a step beside the plan of the units."""

    stage: int = 3
    world_size: int = 1
    prefetch: int = 1
    state: str = "fp32"
    """Format of the moments, as `AdamW(state=...)`."""

    in_backward: bool = False
    """Whether the optimizer steps in the backward."""

    on_gpu: bool = False


@dataclass(frozen=True, kw_only=True)
class FlatBudget:
    """Sizes of one trainable flat, in bytes."""

    bucket: int
    mean: int
    """Memory for the reduced gradient beside the bucket; 0 if it stays in the bucket."""

    sent: int
    """By this rank in one reduction."""


@dataclass(frozen=True, kw_only=True)
class UnitBudget:
    """Sizes of one unit, in bytes."""

    name: str
    is_root: bool
    keep_unsharded: bool
    full: int
    """Of a buffer for the full weights."""

    codes: int
    """Of the payloads of a quantized gather."""

    sent: int
    """By this rank in one gather."""

    gathers: bool
    """Whether full weights have to be made from shards or cast."""

    flats: Sequence[FlatBudget]
    params: int
    """Number of parameters that get gradients."""

    step: int
    """Bytes that the step of this rank's part reads and writes."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Bytes of one rank by purpose, and the sizes of what comes and goes."""

    recipe: Recipe
    held: dict[str, int]
    """What is held from step to step, by purpose."""

    units: Sequence[UnitBudget]
    permanent: bool
    """Whether full weights have permanent memory."""

    single_rank: bool
    """Whether gradients are autograd's own, with no buckets."""

    temporaries: int
    """Made and dropped in the optimizer's step."""


def budget_of(plan: Plan, recipe: Recipe, *, reshard: UnitRule = True, rank: int = 0, buffers: int = 0) -> Budget:
    """Return the budget of `rank`, given the module's own `buffers` in bytes. Allocates nothing."""
    placement = placement_of(plan, recipe.stage, rank, recipe.world_size, reshard)
    units = build_units(replace(plan, device=_META), placement)
    flats = list(chain.from_iterable(unit.flats for unit in units))
    held = {
        "parameters": _storage_nbytes(flats),
        "optimizer state": sum(_state_nbytes(flats, recipe)),
        "buffers": buffers,
        "staging": max((_staging_nbytes(flat, recipe) for flat in flats if flat.rows), default=0),
        "chunks of a step": 0 if recipe.on_gpu else _chunk_nbytes(flats, recipe),
    }
    return Budget(
        recipe=recipe,
        held=held,
        units=[_unit_budget(unit, recipe, placement) for unit in units],
        permanent=placement.permanent,
        single_rank=placement.single_rank,
        temporaries=0 if recipe.on_gpu or recipe.in_backward else temporary_nbytes(_longest(flats), recipe.state),
    )


def _unit_budget(unit: Unit, recipe: Recipe, placement: Placement) -> UnitBudget:
    return UnitBudget(
        name=unit.name,
        is_root=unit.is_root,
        keep_unsharded=unit.keep_unsharded,
        full=unit.nbytes,
        codes=sum(recipe.world_size * flat.layout.codes_nbytes for flat in unit.flats if flat.quantized),
        sent=sum(_sent_by_gather(flat) for flat in unit.flats),
        gathers=unit.needs_gather and not placement.single_rank,
        flats=[_flat_budget(flat, recipe) for flat in unit.trainable],
        params=sum(len(flat.rows) for flat in unit.trainable),
        step=sum(_step_nbytes(flat, recipe) for flat in unit.trainable),
    )


def _flat_budget(flat: Flat, recipe: Recipe) -> FlatBudget:
    """Place the mean as `grads/reduce.py` does."""
    layout, same = flat.gradients, flat.reduce == flat.master
    bucket, world_size = layout.full_numel * flat.reduce.itemsize, recipe.world_size
    shard = layout.full_numel // world_size
    sent = (world_size - 1) * shard * flat.reduce.itemsize
    if recipe.stage == 0:
        gathered = (world_size - 1) * shard * flat.master.itemsize
        return FlatBudget(
            bucket=bucket, mean=0 if same else layout.full_numel * flat.master.itemsize, sent=sent + gathered
        )
    if recipe.in_backward and world_size > 1:
        return FlatBudget(bucket=bucket, mean=0, sent=sent)  # the last hop is the step
    in_bucket = (recipe.stage == 1 or world_size == 1) and same
    return FlatBudget(bucket=bucket, mean=0 if in_bucket else shard * flat.master.itemsize, sent=sent)


def _sent_by_gather(flat: Flat) -> int:
    if flat.rank is None:
        return 0
    shard = flat.layout.codes_nbytes if flat.quantized else flat.layout.shard_numel * flat.compute.itemsize
    return (flat.layout.world_size - 1) * shard


def _staging_nbytes(flat: Flat, recipe: Recipe) -> int:
    """Return where messages of a reduction arrive: over collectives a row of each rank, over shared memory one block.

    Two ranks have less to receive: over collectives one row, and over shared memory each reads the other's memory.
    """
    shard, itemsize = flat.gradients.shard_numel, flat.reduce.itemsize
    if recipe.world_size == 1:
        return 0
    if recipe.on_gpu:
        return rows_numel(shard, recipe.world_size, itemsize, _GRAIN) * itemsize
    return min(BLOCK, shard) * itemsize if recipe.world_size > 2 else 0


def _storage_nbytes(flats: Iterable[Flat]) -> int:
    """Return the bytes of the flats' memory, each storage once."""
    tensors = [each for flat in flats for each in (flat.local, flat.low, flat.full) if each is not None]
    return sum({storage_key(each): each.untyped_storage().nbytes() for each in tensors}.values())


def _own_numel(flat: Flat) -> int:
    """Return the elements of this rank's moments: each slot's part, padded."""
    own = flat.own_range(flat.layout)
    parts = (slot.within(*own) for slot in flat.layout.slots)
    return sum(round_up(stop - start, ALIGN) for start, stop in parts)


def _moment_nbytes(flat: Flat, numel: int, state: str) -> int:
    """Return the bytes of two moments."""
    dtype = flat.master if state == "fp32" else FORMATS[state]
    exponents = 2 * (numel // SCALE_BLOCK) if state == "int8" else 0
    return 2 * numel * dtype.itemsize + exponents


def _state_nbytes(flats: Sequence[Flat], recipe: Recipe) -> Iterable[int]:
    """Yield the bytes of moments, of the table of rows that narrow moments and kernels need, and of step counts."""
    trained = [flat for flat in flats if flat.layout.trainable]
    rows = sum(len(flat.layout.slots) for flat in trained)
    wide = torch.int16.itemsize if rows <= _NARROW_ROWS else torch.int32.itemsize
    for flat in trained:
        numel = _own_numel(flat)
        yield _moment_nbytes(flat, numel, recipe.state)
        if recipe.on_gpu or recipe.state != "fp32":
            yield numel // SCALE_BLOCK * wide
    yield rows * _SCALARS


def _step_nbytes(flat: Flat, recipe: Recipe) -> int:
    """Return what a step reads and writes: weights and moments both, the gradient once."""
    numel = _own_numel(flat)
    weights = _nbytes([flat.local, flat.low])
    return 2 * (weights + _moment_nbytes(flat, numel, recipe.state)) + numel * flat.master.itemsize


def _nbytes(tensors: Iterable[Tensor | None]) -> int:
    return sum(each.nbytes for each in tensors if each is not None)


def _chunk_nbytes(flats: Sequence[Flat], recipe: Recipe) -> int:
    trained = [flat for flat in flats if flat.layout.trainable]
    sums = recipe.in_backward and recipe.world_size > 1 and recipe.stage > 0
    longest = _longest(flats)
    if sums and recipe.world_size > 2:
        longest = min(longest, BLOCK)  # a sum of several messages is made block by block
    split = any(flat.low is not None for flat in trained)
    return chunk_nbytes(longest, split=split, narrow=recipe.state != "fp32", sums=sums)


def _longest(flats: Sequence[Flat]) -> int:
    """Return the elements of the longest part that one call steps."""
    return max((flat.local.numel() for flat in flats if flat.layout.trainable), default=0)
