"""Allocate the memory of planned units: shards, and those full weights that have permanent memory.

    stage   the optimizer steps               full weights
    0       all weights [W*S]                 the same memory, or cast from it
    1, 2    a shard [S], which is a part of   permanent
            the full weights if both have
            the same dtype
    3       a shard [S] in an arena           in buffers, while they are needed
    any     as at stage 0, for `replicate`
    1 rank  all weights; each parameter is its own shard, unless weights are cast

An arena is one contiguous buffer with this rank's shards of all units. A flat (flat parameter) is the parameters of one
kind in a unit.

Legend: `W` ranks that share a model, `S` elements per shard; a full buffer has `W*S` elements.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shardlite.comm import Context, problem_in
from shardlite.params import OFFLOADED, ROOT, Flat, HostStates, OffloadedFlat, Shard, ShardInfo, Unit, allocate_arenas
from shardlite.wrapping.init import broadcast_buffers, broadcast_init
from shardlite.wrapping.partition import UnitPlan, applies
from shardlite.wrapping.plan import FlatPlan, Plan
from shardlite.wrapping.validate import Options, mark_wrapped


class Placement(NamedTuple):
    """The weights that this rank stores."""

    rank: int | None
    """Rank whose shard the optimizer of this process steps, or `None` if this optimizer steps all shards."""

    permanent: bool
    """Whether full weights have permanent memory."""

    single_rank: bool
    """Whether each parameter is its own shard. True for one rank without casts and without sums over parts."""

    keep_unsharded: Callable[[UnitPlan], bool]
    """Function that returns whether a unit stays unsharded from its forward to the end of the backward."""

    def of(self, flat: FlatPlan) -> "Placement":
        """Return the placement of a flat. The weights of a replicated flat are placed as at stage 0."""
        return self._replace(rank=None, permanent=True) if flat.replicated else self


class Wrapped(NamedTuple):
    """A module whose parameters are in units, with rank 0's values."""

    module: nn.Module
    plan: Plan
    options: Options
    context: Context
    placement: Placement
    units: Sequence[Unit]


def wrap(module: nn.Module, plan: Plan, options: Options, context: Context) -> Wrapped:
    """Allocate shards, move rank 0's values into them, and initialize parameters on the meta device.

    Raises:
        LayoutError: a parameter is not initialized, or a driver refuses to pin host memory. Raised on every rank. The
            module can no longer be used.
    """
    placement = placement_of(plan, options, context.transport.rank, context.world_size)
    units: list[Unit] = []
    if any(plan.offloaded):  # the driver of a single rank may refuse to pin memory
        context.agree("offload", problem_in(lambda: units.extend(build_units(plan, placement))))
    else:
        units = build_units(plan, placement)
    error = broadcast_init(plan.units, units, module, options.init, context)
    mark_wrapped(units)
    context.agree("initial values", error)
    broadcast_buffers(module, context, options.compound)
    for flat in flats_of(units):
        kept = [flat.local, flat.full, flat.low if flat.states is None else None]
        context.ledger.track("parameters", *(memory for memory in kept if memory is not None))
        if flat.states is not None and flat.low is not None:
            context.ledger.track(OFFLOADED, flat.low)
    for buffer in module.buffers():
        context.ledger.track("buffers", buffer)
    context.trim(keep=0)
    return Wrapped(module, plan, options, context, placement, units)


def placement_of(plan: Plan, options: Options, rank: int, world_size: int) -> Placement:
    """Return the placement for `rank` among the `world_size` ranks that shard a model."""
    single_rank = world_size == 1 and not plan.casts and not plan.in_parts
    return Placement(
        rank=None if options.stage == 0 or single_rank else rank,
        permanent=options.stage < 3 or single_rank,
        single_rank=single_rank,
        keep_unsharded=lambda unit: unit.name == "" or not applies(options.reshard_after_forward, unit),
    )


def build_units(plan: Plan, placement: Placement) -> list[Unit]:
    """Allocate memory and return the units. Their weights are zero. The root comes first if it has parameters.

    The memory is private to this process, so a forked child gets a copy.
    """
    flats_to_be = list(chain.from_iterable(plan.flats))
    places = _allocate(flats_to_be, placement, plan.device)
    offloaded = plan.offloaded or [False] * len(plan.units)
    states = [HostStates(plan.device) if each else None for each in offloaded]
    of_flats = [each for each, mine in zip(states, plan.flats, strict=True) for _ in mine]
    lows = _allocate_lower_parts(flats_to_be, of_flats, placement, plan.device)
    units: list[Unit] = []
    for start, mine, host in zip(plan.units, plan.flats, states, strict=True):
        flats = [_make_flat(flat, *next(places), next(lows), host, placement) for flat in mine]
        if flats:
            name, keep_unsharded = start.name or ROOT, placement.keep_unsharded(start)
            replicated = start.replicated and not placement.single_rank
            is_root = name == ROOT or replicated  # gradients of replicated parameters arrive at any time, too
            unit = Unit(len(units), name, flats, is_root, keep_unsharded, replicated)
            units.append(unit)
            if host is not None:
                host.waits = unit.needs_gather and not (replicated or placement.single_rank)
    if len(units) == 1:
        units[0].is_root = False  # a single unit needs none of the root's special cases
    return units


def _allocate(
    flats: Sequence[FlatPlan], placement: Placement, device: torch.device
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """For each flat, yield the memory of this rank's part, and the permanent memory of full weights or `None`.

    If part and full weights have the same dtype, the part is a view of the full weights.
    """
    in_place = [placement.of(flat).permanent and flat.compute == flat.layout.dtype for flat in flats]
    lengths = [
        flat.layout.full_numel if there or placement.of(flat).rank is None else flat.layout.shard_numel
        for flat, there in zip(flats, in_place, strict=True)
    ]
    kept = allocate_arenas([(flat.layout.dtype, flat.layout.trainable) for flat in flats], lengths, device)
    cast = [flat for flat, there in zip(flats, in_place, strict=True) if placement.of(flat).permanent and not there]
    kinds = [(flat.compute, flat.layout.trainable) for flat in cast]
    fulls = iter(allocate_arenas(kinds, [flat.layout.full_numel for flat in cast], device))
    for flat, there, local in zip(flats, in_place, kept, strict=True):
        if not there:
            yield local, next(fulls) if placement.of(flat).permanent else None
        elif (rank := placement.of(flat).rank) is None:
            yield local, local
        else:
            yield local[slice(*flat.layout.shard_range(rank))], local


def _allocate_lower_parts(
    flats: Sequence[FlatPlan], states: Sequence[HostStates | None], placement: Placement, device: torch.device
) -> Iterator[Tensor | None]:
    """For each flat, yield the memory for the lower part of its weights, or `None` if its weights are not split.

    The memory is in the flat's entry of `states`, if that is not `None`.
    """

    def length(flat: FlatPlan) -> int:
        return flat.layout.full_numel if placement.of(flat).rank is None else flat.layout.shard_numel

    stay = [flat for flat, host in zip(flats, states, strict=True) if flat.split and host is None]
    kinds = [(torch.int8, flat.layout.trainable) for flat in stay]
    lows = iter(allocate_arenas(kinds, [*map(length, stay)], device))
    for flat, host in zip(flats, states, strict=True):
        if not flat.split:
            yield None
        else:
            yield next(lows) if host is None else host.zeros(length(flat), torch.int8)


def _make_flat(
    plan: FlatPlan,
    local: Tensor,
    full: Tensor | None,
    low: Tensor | None,
    states: HostStates | None,
    placement: Placement,
) -> Flat:
    """Create the flat of `plan` in the given memory."""
    flat = (Flat if states is None else OffloadedFlat)(
        layout=plan.layout,
        compute=plan.compute,
        reduce=plan.reduce,
        quantized=plan.quantized,
        params=plan.params,
        rank=placement.of(plan).rank,
        # `.data` gives this part of the arena its own version counter, which all its shards share. If each shard had a
        # counter, the counters would differ between ranks, because code that skips an empty shard does not increment
        # its counter. Ranks would then disagree on whether full weights are stale.
        local=local.data,
        low=low,
        states=states,
        full=full,
    )
    flat.shards = plan.params if placement.single_rank else _make_shards(flat)
    if placement.single_rank:
        for param in plan.params:
            ShardInfo(states=states).mark(param)
    return flat


def _make_shards(flat: Flat) -> Sequence[nn.Parameter]:
    """Return the shards of a flat, which the optimizer steps."""
    views, own = flat.shard_views(flat.local), flat.own_range(flat.layout)
    shards = [Shard(view, requires_grad=flat.layout.trainable) for view in views]
    for index, (slot, shard) in enumerate(zip(flat.layout.slots, shards, strict=True)):
        first, stop = slot.within(*own)
        shard.__dict__.update(flat.params[index].__dict__)  # the program's attributes, such as `_no_weight_decay`
        low = None if flat.low is None else flat.low[first:stop]
        ShardInfo(own[0] + first - slot.start, low, flat.states).mark(shard)
        if flat.low is not None:
            shard.grad_dtype = None  # allows fp32 gradients, although the upper part is bf16
    return shards


def part_of(units: Sequence[Unit]) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function `part(param, tensor)`, which returns the part of `tensor` that belongs to the shard of `param`.

    The tensor must have the shape of the parameter.
    """
    places = {param: (flat, index) for flat in flats_of(units) for index, param in enumerate(flat.params)}

    def part(param: Tensor, tensor: Tensor) -> Tensor:
        flat, index = places[param]  # type: ignore[index]
        return flat.part_of(index, tensor)

    return part


def flats_of(units: Sequence[Unit]) -> list[Flat]:
    """Return the flats of all units, in the order of the units."""
    return [flat for unit in units for flat in unit.flats]
