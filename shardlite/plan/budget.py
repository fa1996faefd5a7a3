"""From a model's plan, compute its bytes by purpose. For this, the same layouts are allocated on the meta device.

In: a `Plan` and a `Recipe`. Out: a `Budget` with the exact bytes of permanent memory and the sizes of temporary memory.
`timeline.py` computes when temporary memory exists. A budget contains no activations. A flat (flat parameter) is the
parameters of one kind in a unit.

Legend: `W` ranks that share a model, `S` elements per shard; a full buffer has `W*S` elements.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from shardlite_kernels import SCALE_BLOCK
from shardlite_kernels.adamw_cpu import chunk_nbytes, temporary_nbytes

from shardlite.comm.transport.loans import BLOCK
from shardlite.comm.transport.staging import rows_numel
from shardlite.grads.policy import mean_stays
from shardlite.optim.offload import BUFFERS, buffer_nbytes
from shardlite.params import ALIGN, Flat, Unit, round_up, storage_key
from shardlite.wrapping import Options, Plan, build_units, moment_nbytes, placement_of
from shardlite.wrapping.allocate import Placement

_META = torch.device("meta")

_NARROW_SLOTS = torch.iinfo(torch.int16).max
"""Maximum number of parameters at which the optimizer's table has 2 bytes per group. With more parameters it has 4."""

_COUNT_NBYTES = 4
"""Bytes of a parameter's step count."""

HELD = ("parameters", "optimizer state", "offload buffers", "buffers", "staging", "chunks of a step")
"""The purposes of the memory that a rank holds from step to step."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The options of a training run that determine the bytes of a step."""

    options: Options = field(default_factory=Options)
    world_size: int = 1
    """Number of ranks that share the model."""

    device: torch.device = torch.device("cpu")  # noqa: RUF009 (immutable)
    state: str = "fp32"
    """Format of the moments, as in `AdamW(state=...)`."""

    in_backward: bool = False
    """Whether the optimizer steps in the backward."""

    @property
    def on_gpu(self) -> bool:
        """Whether the model is on a GPU."""
        return self.device.type == "cuda"

    @property
    def saves_memory(self) -> bool:
        """Whether a backward gives up overlap to save memory."""
        return self.in_backward and not self.on_gpu


@dataclass(frozen=True, kw_only=True)
class FlatBudget:
    """Sizes of one trainable flat, in bytes."""

    bucket: int
    mean: int
    """Bytes of separate memory for the reduced gradient, or 0 if the gradient stays in the bucket."""

    sent: int
    """Bytes that this rank sends in one reduction."""

    @property
    def gradient(self) -> int:
        """Bytes of the reduced gradient, if the step is not in the backward."""
        return self.mean or self.bucket


@dataclass(frozen=True, kw_only=True)
class UnitBudget:
    """Sizes of one unit, in bytes."""

    name: str
    is_root: bool
    keep_unsharded: bool
    full: int
    """Bytes of a buffer for the full weights."""

    codes: int
    """Bytes of the 8-bit codes and scales of all ranks in a quantized gather."""

    sent: int
    """Bytes that this rank sends in one gather."""

    gathers: bool
    """Whether full weights must be gathered or cast."""

    flats: Sequence[FlatBudget]
    params: int
    """Number of trainable parameters."""

    step: int
    """Bytes that the optimizer reads and writes to step this rank's shards."""

    offloaded: int
    """Bytes of optimizer states that a step copies from host memory to the GPU, and back."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Bytes of one rank by purpose, and the sizes of temporary memory."""

    recipe: Recipe
    held: dict[str, int]
    """Bytes that are held from step to step, by purpose."""

    units: Sequence[UnitBudget]
    permanent: bool
    """Whether full weights have permanent memory."""

    single_rank: bool
    """Whether gradients stay autograd's own tensors, without buckets."""

    temporaries: int
    """Bytes that are allocated and freed in the optimizer's step."""

    host_nbytes: int
    """Bytes of pinned host memory for offloaded states."""

    @property
    def waiting(self) -> dict[int, int]:
        """The units whose step ends in the next forward, before they are used, with the bytes of their gradients."""
        waiting = [(i, unit) for i, unit in enumerate(self.units) if unit.gathers and unit.offloaded]
        return {i: sum(flat.gradient for flat in unit.flats) for i, unit in waiting if not self.recipe.in_backward}


def budget_of(plan: Plan, recipe: Recipe, *, rank: int = 0, buffers: int = 0) -> Budget:
    """Return the budget of `rank`. `buffers` is the number of bytes of the module's buffers. Nothing is allocated."""
    placement = placement_of(plan, recipe.options, rank, recipe.world_size)
    units = build_units(plan._replace(device=_META), placement)
    flats = list(chain.from_iterable(unit.flats for unit in units))
    arenas = _offloaded_arenas(flats, recipe)
    held = {
        "parameters": _storage_nbytes(flats),
        "optimizer state": sum(_state_nbytes(flats, recipe)),
        "offload buffers": BUFFERS * buffer_nbytes(max(arenas, default=0)),
        "buffers": buffers,
        "staging": max((_staging_nbytes(flat, recipe) for flat in flats if flat.trainable_slots), default=0),
        "chunks of a step": 0 if recipe.on_gpu else _chunk_nbytes(flats, recipe),
    }
    return Budget(
        recipe=recipe,
        held=held,
        units=[_unit_budget(unit, recipe, placement) for unit in units],
        permanent=placement.permanent,
        single_rank=placement.single_rank,
        temporaries=0 if recipe.on_gpu or recipe.in_backward else temporary_nbytes(_longest(flats), recipe.state),
        host_nbytes=sum(arenas) + sum(map(_low_gaps, flats)),
    )


def _unit_budget(unit: Unit, recipe: Recipe, placement: Placement) -> UnitBudget:
    return UnitBudget(
        name=unit.name,
        is_root=unit.is_root,
        keep_unsharded=unit.keep_unsharded,
        full=unit.nbytes,
        codes=sum(recipe.world_size * flat.layout.codes_nbytes for flat in unit.flats if flat.quantized),
        sent=sum(_sent_by_gather(flat) for flat in unit.flats),
        gathers=unit.needs_gather and not (placement.single_rank or unit.replicated),
        flats=[_flat_budget(flat, recipe) for flat in unit.trainable],
        params=sum(len(flat.trainable_slots) for flat in unit.trainable),
        step=sum(_step_nbytes(flat, recipe) for flat in unit.trainable),
        offloaded=sum(_offloaded_nbytes(flat, recipe) for flat in unit.trainable if flat.states),
    )


def _flat_budget(flat: Flat, recipe: Recipe) -> FlatBudget:
    """Return the budget of a flat. `grads/policy.py` decides where its mean is."""
    full, world_size, master = flat.gradients.full_numel, recipe.world_size, flat.master.to_real()
    same = flat.reduce == master
    sent = (world_size - 1) * (full // world_size) * flat.reduce.itemsize
    mean = full // world_size * master.itemsize
    if flat.rank is None:
        sent += (world_size - 1) * mean  # the all-gather of the means
        mean *= world_size
    elif recipe.in_backward and world_size > 1:
        mean = 0  # the last addition of the reduction steps the weights
    if same and (flat.rank is None or mean_stays(recipe.options.stage, world_size)):
        mean = 0
    return FlatBudget(bucket=full * flat.reduce.itemsize, mean=mean, sent=sent)


def _sent_by_gather(flat: Flat) -> int:
    if flat.rank is None:
        return 0
    shard = flat.layout.codes_nbytes if flat.quantized else flat.layout.shard_numel * flat.compute.itemsize
    return (flat.layout.world_size - 1) * shard


def _staging_nbytes(flat: Flat, recipe: Recipe) -> int:
    """Return the bytes of memory where messages of a reduction arrive.

    Collectives need one row per rank, and shared memory needs one block. With two ranks, collectives need one row, and
    shared memory needs nothing, because each rank reads the other's bucket in place.
    """
    shard, itemsize = flat.gradients.shard_numel, flat.reduce.itemsize
    if recipe.world_size == 1:
        return 0
    if recipe.on_gpu:
        return rows_numel(shard, recipe.world_size, itemsize) * itemsize
    return min(BLOCK, shard) * itemsize if recipe.world_size > 2 else 0


def _storage_nbytes(flats: Iterable[Flat]) -> int:
    """Return the bytes of the flats' memory on the model's device. Each storage counts once."""
    tensors = [(flat.local, flat.full, flat.low if flat.states is None else None) for flat in flats]
    kept = (each for each in chain.from_iterable(tensors) if each is not None)
    return sum({storage_key(each): each.untyped_storage().nbytes() for each in kept}.values())


def _own_numel(flat: Flat) -> int:
    """Return the number of elements in each moment of this rank: the padded lengths of its parts of all slots."""
    own = flat.own_range(flat.layout.real)
    parts = (slot.within(*own) for slot in flat.layout.real.slots)
    return sum(round_up(stop - start, ALIGN) for start, stop in parts)


def _state_nbytes(flats: Sequence[Flat], recipe: Recipe) -> Iterable[int]:
    """Yield the bytes of moments, of the tables that GPU kernels and narrow moments need, and of step counts.

    Moments in host memory are left out.
    """
    trained = [flat for flat in flats if flat.layout.trainable]
    slots = sum(len(flat.layout.slots) for flat in trained)
    wide = torch.int16.itemsize if slots <= _NARROW_SLOTS else torch.int32.itemsize
    for flat in trained:
        numel = _own_numel(flat)
        yield moment_nbytes(numel, flat.master, recipe.state) if flat.states is None else 0
        if recipe.on_gpu or recipe.state != "fp32":
            yield numel // SCALE_BLOCK * wide
    yield slots * _COUNT_NBYTES


def _step_nbytes(flat: Flat, recipe: Recipe) -> int:
    """Return the bytes that a step moves. A step reads and writes weights and moments, and only reads the gradient."""
    numel = _own_numel(flat)
    weights = sum(each.nbytes for each in (flat.local, flat.low) if each is not None)
    return 2 * (weights + moment_nbytes(numel, flat.master, recipe.state)) + numel * flat.master.to_real().itemsize


def _offloaded_nbytes(flat: Flat, recipe: Recipe) -> int:
    """Return the bytes of a flat's states: both moments, and the low bits of split weights."""
    numel = _own_numel(flat)
    return moment_nbytes(numel, flat.master, recipe.state) + (flat.low is not None) * numel


def _offloaded_arenas(flats: Sequence[Flat], recipe: Recipe) -> Sequence[int]:
    """Return the bytes of the states in each arena in host memory. A unit has an arena for each dtype of weights."""
    arenas = Counter[tuple[int, torch.dtype]]()
    for flat in flats:
        if flat.states is not None and flat.layout.trainable:
            arenas[id(flat.states), flat.layout.dtype] += _offloaded_nbytes(flat, recipe)
    return [*arenas.values()]


def _low_gaps(flat: Flat) -> int:
    """Return the bytes in host memory around a flat's low bits: these are laid out like the weights, with all gaps."""
    return 0 if flat.states is None or flat.low is None else flat.low.nbytes - _own_numel(flat)


def _chunk_nbytes(flats: Sequence[Flat], recipe: Recipe) -> int:
    trained = [flat for flat in flats if flat.layout.trainable]
    sums = recipe.in_backward and recipe.world_size > 1 and recipe.options.stage > 0
    longest = _longest(flats)
    if sums and recipe.world_size > 2:
        longest = min(longest, BLOCK)  # several messages are added block by block
    split = any(flat.low is not None for flat in trained)
    return chunk_nbytes(longest, split=split, narrow=recipe.state != "fp32", sums=sums)


def _longest(flats: Sequence[Flat]) -> int:
    """Return the maximum number of elements that one call steps."""
    return max((flat.local.numel() for flat in flats if flat.layout.trainable), default=0)
