"""From a plain model to units: agree with the other ranks on what it is, lay it out, spread rank 0's values.

Legend: `W` ranks, `S` elements per shard; a full buffer has `W*S` elements.
"""

from collections.abc import Callable, Sequence
from itertools import count

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardlite.arena import carve
from shardlite.errors import LayoutError
from shardlite.layout import Layout, lay_out
from shardlite.partition import ROOT, UnitPlan
from shardlite.ring import Operation, broadcast
from shardlite.transport import Transport
from shardlite.unit import Flat, Unit, make_flat

_instances = count()


def agree(group: dist.ProcessGroup | None, facts: Sequence[str], problem: Exception | None) -> None:
    """Make sure that what all ranks are about to do is the same, and that none has a `problem`.

    A control message, not tensors: it goes by `torch.distributed`. A rank with a problem takes part, so that no other
    rank waits for it in vain.

    Raises:
        LayoutError: some other rank has a problem, or a rank differs from rank 0; on every rank.
        Exception: `problem` itself, on the rank that has it.
    """
    mine = (list(facts), None if problem is None else str(problem))
    everyone: list[tuple[list[str], str | None]] = [mine] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    if problem is not None:
        raise problem
    for rank, (theirs, trouble) in enumerate(everyone):
        if trouble is not None:
            raise LayoutError(f"rank {rank}: {trouble}")
        if theirs != everyone[0][0]:
            raise LayoutError(f"ranks wrapped different models: {_first_difference(everyone[0][0], theirs, rank)}")


def number(group: dist.ProcessGroup | None) -> int:
    """Return a number for a wrapped model that is the same on all ranks, and new on each of them."""
    numbers = [0] * dist.get_world_size(group)
    dist.all_gather_object(numbers, next(_instances), group=group)
    return max(numbers)


def _first_difference(expected: Sequence[str], got: Sequence[str], rank: int) -> str:
    for ours, theirs in zip(expected, got, strict=False):
        if ours != theirs:
            return f"rank 0 has {ours}, rank {rank} has {theirs}"
    return f"rank 0 has {len(expected)} entries, rank {rank} has {len(got)}"


def plan_layouts(plans: Sequence[UnitPlan], world_size: int) -> list[list[Layout]]:
    """Lay out every unit: one layout for each (dtype, trainable) in it."""
    return [
        [lay_out(_named_shapes(plan, kind), dtype=kind[0], trainable=kind[1], world_size=world_size) for kind in kinds]
        for plan in plans
        for kinds in [list(dict.fromkeys(_kind(param) for param in plan.params))]
    ]


def build_units(
    plans: Sequence[UnitPlan], layouts: Sequence[Sequence[Layout]], transport: Transport, *, sharded: bool
) -> list[Unit]:
    """Allocate the arenas, move the parameters of rank 0 there, and return the units, the root first if it has any.

    Each unit's full weights exist a second time only while they are broadcast. Afterwards the module's parameters
    are placeholders or, where nothing is sharded, views of the arena.
    """
    device = torch.device("cpu")
    locals_ = iter(carve([layout for each in layouts for layout in each], sharded=sharded, device=device))
    units: list[Unit] = []
    for plan, mine in zip(plans, layouts, strict=True):
        flats = [
            make_flat(layout, _members(plan, layout), next(locals_), transport.rank if sharded else None)
            for layout in mine
        ]
        if flats:
            units.append(Unit(len(units), plan.name or ROOT, flats, resident=plan.name == ""))
    for unit in units:
        broadcast_values(unit, transport, lambda param: param.detach())
        if sharded:
            unit.unbind()
        else:
            for flat in unit.flats:
                for param, view in flat.views(flat.local):
                    param.data = view
    return units


def broadcast_values(unit: Unit, transport: Transport, value: Callable[[nn.Parameter], Tensor]) -> None:
    """Set a unit's shards on every rank to what `value` gives on rank 0 for each of the module's parameters."""
    with torch.no_grad():
        for i, flat in enumerate(unit.flats):
            layout = flat.layout
            whole = flat.sharded_range is None
            full = flat.local if whole else flat.local.new_zeros(layout.full_numel)
            if transport.rank == 0:
                for param, view in flat.views(full):
                    view.copy_(value(param))
            broadcast(full, transport, operation=Operation(f"the values of unit {unit.name!r}, flat {i}"))
            if not whole:
                flat.local.copy_(flat.own_part(full))


def broadcast_buffers(module: nn.Module, transport: Transport) -> None:
    """Copy rank 0's buffers (running statistics and the like) to every rank.

    Equal ones are not written to: a mask may be an expanded view, which cannot be.
    """
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            flat = buffer.detach().reshape(-1).clone()
            broadcast(flat, transport, operation=Operation(f"buffer {name!r}"))
            if not torch.equal(flat.view(buffer.shape), buffer):
                buffer.copy_(flat.view(buffer.shape))


def _kind(param: nn.Parameter) -> tuple[torch.dtype, bool]:
    return param.dtype, param.requires_grad


def _named_shapes(plan: UnitPlan, kind: tuple[torch.dtype, bool]) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, tuple(param.shape)) for param, name in plan.params.items() if _kind(param) == kind]


def _members(plan: UnitPlan, layout: Layout) -> list[nn.Parameter]:
    return [param for param in plan.params if _kind(param) == (layout.dtype, layout.trainable)]


def flats_of(units: Sequence[Unit]) -> list[Flat]:
    """Return all flats, in the order of their units."""
    return [flat for unit in units for flat in unit.flats]
