"""From a plain model to units: agree with the other ranks on what it is, lay it out, spread rank 0's values.

Legend: `W` ranks that share a model, `S` elements per shard; a full buffer has `W*S` elements.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardlite.arena import carve
from shardlite.config import Precision
from shardlite.errors import LayoutError
from shardlite.layout import Layout, lay_out
from shardlite.materialise import Initialiser, children_first
from shardlite.partition import ROOT, UnitPlan
from shardlite.ring import Operation, all_reduce, broadcast
from shardlite.transport import Groups, Transport
from shardlite.unit import Flat, Shared, Unit

_instances = count()


def agree(groups: Groups, facts: Sequence[str], problem: Exception | None) -> None:
    """Make sure that what all ranks are about to do is the same, and that none has a `problem`.

    A control message, not tensors: it goes by `torch.distributed`. A rank with a problem takes part, so that no other
    rank waits for it in vain. Ranks are numbered within their group.

    Raises:
        LayoutError: some other rank has a problem, or a rank differs from rank 0; on every rank.
        Exception: `problem` itself, on the rank that has it.
    """
    trouble = None if problem is None else str(problem)
    for group in groups.all:
        everyone: list[tuple[list[str], str | None]] = [([], None)] * dist.get_world_size(group)
        dist.all_gather_object(everyone, (list(facts), trouble), group=group)
        trouble = trouble or _trouble(everyone)
    if problem is not None:
        raise problem
    if trouble is not None:
        raise LayoutError(trouble)


def _trouble(everyone: Sequence[tuple[list[str], str | None]]) -> str | None:
    """Return what is wrong with some rank of a group."""
    for rank, (theirs, trouble) in enumerate(everyone):
        if trouble is not None:
            return f"rank {rank}: {trouble}"
        if theirs != everyone[0][0]:
            return f"ranks wrapped different models: {_first_difference(everyone[0][0], theirs, rank)}"
    return None


def is_first(groups: Groups) -> bool:
    """Tell whether this is the rank whose values all others get."""
    return all(dist.get_rank(group) == 0 for group in groups.all)


def default_device(groups: Groups) -> torch.device:
    """Return where shards are if nobody says it: on the GPU, if there is one and the groups can talk to it."""
    talk = all("cuda" in dist.get_backend_config(group) for group in groups.all)
    return torch.device("cuda" if talk and torch.cuda.is_available() else "cpu")


def number(groups: Groups) -> int:
    """Return a number for a wrapped model that is the same on all ranks, and new on each of them."""
    highest = next(_instances)
    for group in groups.all:
        numbers = [0] * dist.get_world_size(group)
        dist.all_gather_object(numbers, highest, group=group)
        highest = max(numbers)
    return highest


def open_connections(transports: Iterable[Transport | None], device: torch.device) -> None:
    """Send something over each transport that makes its connections at the first message, and so needs an order."""
    for transport in transports:
        if transport is not None and transport.batched:
            all_reduce(torch.zeros(transport.world_size, device=device), transport)


def _first_difference(expected: Sequence[str], got: Sequence[str], rank: int) -> str:
    for ours, theirs in zip(expected, got, strict=False):
        if ours != theirs:
            return f"rank 0 has {ours}, rank {rank} has {theirs}"
    return f"rank 0 has {len(expected)} entries, rank {rank} has {len(got)}"


@dataclass(frozen=True)
class FlatPlan:
    """One flat to be."""

    layout: Layout
    compute: torch.dtype
    reduce: torch.dtype
    params: Sequence[nn.Parameter]


def plan_flats(plan: UnitPlan, world_size: int, precision: Precision) -> list[FlatPlan]:
    """Lay out a unit: one flat for each kind of parameters in it, in the order of their first ones."""
    kinds: dict[tuple[torch.dtype, torch.dtype, bool], dict[nn.Parameter, str]] = {}
    for param, name in plan.params.items():
        master = precision.master_of(param.dtype, trainable=param.requires_grad)
        kinds.setdefault((master, precision.compute_of(param.dtype), param.requires_grad), {})[param] = name
    flats = []
    for (master, compute, trainable), members in kinds.items():
        shapes = [(name, tuple(param.shape)) for param, name in members.items()]
        layout = lay_out(shapes, dtype=master, trainable=trainable, world_size=world_size)
        flats.append(FlatPlan(layout, compute, precision.reduce_of(master), list(members)))
    return flats


@dataclass(frozen=True)
class Memory:
    """What this rank keeps of the weights."""

    rank: int | None
    """Whose shard the optimizer steps here; `None` if it steps all of them."""

    permanent: bool
    """Whether the full weights always have memory."""

    alone: bool
    """Whether nobody else is there and no cast is due, so that the module's parameters can be their own shards."""

    resident: Callable[[UnitPlan], bool]
    """Whether a unit stays gathered from its forward to the end of the backward."""


def build_units(
    plans: Sequence[UnitPlan], flat_plans: Sequence[Sequence[FlatPlan]], memory: Memory, device: torch.device
) -> list[Unit]:
    """Allocate memory, and return the units, the root first if it has any parameters. Their weights are undefined."""
    everything = [flat for mine in flat_plans for flat in mine]
    places = iter(_allocate(everything, memory, device))
    units: list[Unit] = []
    for plan, mine in zip(plans, flat_plans, strict=True):
        flats = [_make_flat(flat, *next(places), memory) for flat in mine]
        if flats:
            units.append(Unit(len(units), plan.name or ROOT, flats, resident=memory.resident(plan)))
    return units


def _allocate(flats: Sequence[FlatPlan], memory: Memory, device: torch.device) -> list[tuple[Tensor, Tensor | None]]:
    """Return for each flat what this rank keeps, and the memory of the full weights if they have some.

    Where both have the same dtype the former is a part of the latter.
    """
    in_place = [memory.permanent and flat.compute == flat.layout.dtype for flat in flats]
    lengths = [
        flat.layout.full_numel if whole or memory.rank is None else flat.layout.shard_numel
        for flat, whole in zip(flats, in_place, strict=True)
    ]
    kept = carve([(flat.layout.dtype, flat.layout.trainable) for flat in flats], lengths, device)
    cast = [flat for flat, whole in zip(flats, in_place, strict=True) if memory.permanent and not whole]
    kinds = [(flat.compute, flat.layout.trainable) for flat in cast]
    fulls = iter(carve(kinds, [flat.layout.full_numel for flat in cast], device))
    places: list[tuple[Tensor, Tensor | None]] = []
    for flat, whole, local in zip(flats, in_place, kept, strict=True):
        if not whole:
            places.append((local, next(fulls) if memory.permanent else None))
        elif memory.rank is None:
            places.append((local, local))
        else:
            places.append((local[slice(*flat.layout.shard_range(memory.rank))], local))
    return places


def _make_flat(plan: FlatPlan, local: Tensor, full: Tensor | None, memory: Memory) -> Flat:
    """Tie a plan to this rank's memory."""
    flat = Flat(
        layout=plan.layout,
        compute=plan.compute,
        reduce=plan.reduce,
        params=plan.params,
        rank=memory.rank,
        # `.data` gives this part of the arena a version counter of its own, which all its shards share. A counter per
        # shard would not do: a shard may be empty, and code that skips empty tensors would leave ranks with different
        # opinions on whether a gather is stale.
        local=local.data,
        full=full,
    )
    views = flat.shard_views(flat.local)
    trainable = plan.layout.trainable
    flat.shards = plan.params if memory.alone else [nn.Parameter(view, requires_grad=trainable) for view in views]
    return flat


def spread(
    plans: Sequence[UnitPlan], units: Sequence[Unit], module: nn.Module, shared: Shared, initialiser: Initialiser
) -> None:
    """Give all ranks rank 0's values of the parameters, and these their new memory.

    A unit's values are sent as soon as all modules inside of it have some, and then its parameters give up the memory
    that they had: more than one unit, and those around it, is never there as a whole.
    """
    by_name = {unit.name: unit for unit in units}
    ends = {plan.module: by_name[plan.name or ROOT] for plan in plans if plan.params}
    for each in children_first(module):
        initialiser.initialise(each)
        if each in ends:
            spread_values(ends[each], shared.counted("values"), lambda param: param.detach())
            ends[each].unbind()
            initialiser.sent(ends[each].params())
    for unit in units:
        if not unit.follows:
            unit.bind()
    for buffer in module.buffers():
        if buffer.device != shared.device:
            buffer.data = buffer.to(shared.device)


def part_of(units: Sequence[Unit]) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function that cuts a tensor like one of the module's parameters into what belongs to its shard."""
    places = {param: (flat, row) for flat in flats_of(units) for row, param in enumerate(flat.params)}

    def part(param: Tensor, tensor: Tensor) -> Tensor:
        flat, row = places[param]  # type: ignore[index]
        return flat.part_of(row, tensor)

    return part


def spread_values(unit: Unit, transports: Sequence[Transport], value: Callable[[nn.Parameter], Tensor]) -> None:
    """Set a unit's shards on every rank to what `value` gives on rank 0 for each of the module's parameters.

    The unit's weights exist a second time, whole, only while they are sent round.
    """
    first = all(transport.rank == 0 for transport in transports)
    with torch.no_grad():
        for i, flat in enumerate(unit.flats):
            whole = flat.local if flat.rank is None else flat.local.new_zeros(flat.layout.full_numel)
            if first:
                for param, view in flat.views(whole):
                    view.copy_(value(param))
            for transport in transports:
                broadcast(whole, transport, operation=Operation(f"the values of unit {unit.name!r}, flat {i}"))
            if flat.rank is not None:
                flat.local.copy_(flat.own_part(whole))


def spread_buffers(module: nn.Module, transports: Sequence[Transport]) -> None:
    """Copy rank 0's buffers (running statistics and the like) to every rank.

    Equal ones are not written to: a mask may be an expanded view, which cannot be.
    """
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            flat = buffer.detach().reshape(-1).clone()
            for transport in transports:
                broadcast(flat, transport, operation=Operation(f"buffer {name!r}"))
            if not torch.equal(flat.view(buffer.shape), buffer):
                buffer.copy_(flat.view(buffer.shape))


def flats_of(units: Sequence[Unit]) -> list[Flat]:
    """Return all flats, in the order of their units."""
    return [flat for unit in units for flat in unit.flats]
