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
from shardlite.hooks import Site
from shardlite.layout import Layout, plan
from shardlite.partition import Part
from shardlite.ring import Operation, broadcast
from shardlite.transport import Transport
from shardlite.unit import Flat, Unit, make_flat

ROOT = "(root)"
"""The name of the unit that holds what no other unit does."""

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


def plan_parts(parts: Sequence[Part], world_size: int) -> list[list[Layout]]:
    """Lay out every part: one layout for each (dtype, trainable) in it."""
    return [
        [plan(_named_shapes(part, kind), dtype=kind[0], trainable=kind[1], world_size=world_size) for kind in kinds]
        for part in parts
        for kinds in [list(dict.fromkeys(_kind(param) for param in part.params))]
    ]


def build_units(
    parts: Sequence[Part], layouts: Sequence[Sequence[Layout]], transport: Transport, *, sharded: bool
) -> list[Unit]:
    """Allocate the arenas, move the parameters of rank 0 there, and return the units, the root first if it has any.

    Each unit's full weights exist a second time only while they are spread. Afterwards the module's parameters are
    placeholders or, where nothing is sharded, views of the arena.
    """
    device = torch.device("cpu")
    locals_ = iter(carve([layout for each in layouts for layout in each], sharded=sharded, device=device))
    units: list[Unit] = []
    for part, mine in zip(parts, layouts, strict=True):
        flats = [
            make_flat(layout, _members(part, layout), next(locals_), transport.rank if sharded else None)
            for layout in mine
        ]
        if flats:
            units.append(Unit(len(units), part.name or ROOT, flats, keep=part.name == ""))
    for unit in units:
        spread(unit, transport, lambda param: param.detach())
        if sharded:
            unit.unbind()
        else:
            for flat in unit.flats:
                for param, view in flat.views(flat.local):
                    param.data = view
    return units


def spread(unit: Unit, transport: Transport, value: Callable[[nn.Parameter], Tensor]) -> None:
    """Set a unit's shards on every rank to what `value` gives on rank 0 for each of the module's parameters."""
    with torch.no_grad():
        for i, flat in enumerate(unit.flats):
            layout = flat.layout
            whole = flat.sharded_range is None
            full = flat.local if whole else flat.local.new_zeros(layout.full_numel)
            if transport.rank == 0:
                for param, view in flat.views(full):
                    view.copy_(value(param))
            broadcast(full, transport, operation=Operation(f"the values of unit {unit.name!r}, part {i}"))
            if not whole:
                flat.local.copy_(full[slice(*layout.shard_range(transport.rank))])


def spread_buffers(module: nn.Module, transport: Transport) -> None:
    """Copy rank 0's buffers (running statistics and the like) to every rank."""
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            flat = buffer.detach().reshape(-1).clone()
            broadcast(flat, transport, operation=Operation(f"buffer {name!r}"))
            buffer.copy_(flat.view(buffer.shape))


def sites(module: nn.Module, units: Sequence[Unit]) -> dict[Unit, list[Site]]:
    """Return where the model keeps each unit's parameters; a tied one is kept in several places."""
    home = {param: unit for unit in units for param in unit.params()}
    found: dict[Unit, list[Site]] = {unit: [] for unit in units}
    for path, owner in module.named_modules():
        for attribute, param in owner._parameters.items():
            if param is not None:
                site = Site(f"{path}.{attribute}".lstrip("."), owner, attribute, param, param.requires_grad)
                found[home[param]].append(site)
    return found


def needs(module: nn.Module, parts: Sequence[Part], units: Sequence[Unit]) -> dict[nn.Module, list[Unit]]:
    """Return which units each module's forward needs: the one that starts at it, and those of its own parameters.

    The whole model is always among them, for a pass starts with it.
    """
    by_name = {unit.name: unit for unit in units}
    home = {param: unit for unit in units for param in unit.params()}
    starts = {part.module: by_name[part.name or ROOT] for part in parts if (part.name or ROOT) in by_name}
    wanted = {}
    for each in module.modules():
        own = [home[param] for param in each._parameters.values() if param is not None]
        start = [starts[each]] if each in starts else []
        if start or own or each is module:
            wanted[each] = list(dict.fromkeys(start + own))
    return wanted


def _kind(param: nn.Parameter) -> tuple[torch.dtype, bool]:
    return param.dtype, param.requires_grad


def _named_shapes(part: Part, kind: tuple[torch.dtype, bool]) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, tuple(param.shape)) for param, name in part.params.items() if _kind(param) == kind]


def _members(part: Part, layout: Layout) -> list[nn.Parameter]:
    return [param for param in part.params if _kind(param) == (layout.dtype, layout.trainable)]


def flats_of(units: Sequence[Unit]) -> list[Flat]:
    """Return all flats, in the order of their units."""
    return [flat for unit in units for flat in unit.flats]
