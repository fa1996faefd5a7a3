"""Broadcast of rank 0's initial values to all ranks, unit by unit. Knows nothing of how modules are initialised.

Legend: `W` ranks that share a model, `S` elements per shard; a full buffer has `W*S` elements.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from shardlite.build.meta_init import Initializer, children_first
from shardlite.comm import CHUNK_BYTES, Context, broadcast
from shardlite.params import ROOT, Flat, Unit, UnitPlan

_CHUNKS = 4
"""Messages per rank in a piece of values. The last rank of the chain waits for one message per rank before it."""


def broadcast_init(
    plans: Sequence[UnitPlan], units: Sequence[Unit], module: nn.Module, context: Context, initializer: Initializer
) -> None:
    """Set all ranks' parameters to rank 0's values, in their new memory.

    A unit's values are sent as soon as all modules inside it are initialised, and then the former memory of its
    parameters is freed. So at most one unit, and the units around it, have whole values at a time.
    """
    by_name = {unit.name: unit for unit in units}
    ends = {plan.module: by_name[plan.name or ROOT] for plan in plans if plan.params}
    for each in children_first(module):
        initializer.initialise(each)
        if each in ends:
            broadcast_values(ends[each], context, lambda param: param.detach(), sent=Flat.unbind)
            initializer.sent(ends[each].params())
    for unit in units:
        if not unit.needs_gather:
            unit.bind()
    for buffer in module.buffers():
        if buffer.device != context.device:
            buffer.data = buffer.to(context.device)


def broadcast_values(
    unit: Unit,
    context: Context,
    value: Callable[[nn.Parameter], Tensor],
    *,
    sent: Callable[[Flat], None] = lambda _: None,
) -> None:
    """Set a unit's shards on every rank to `value(param)` of rank 0, for each parameter of the module.

    Values are sent piece by piece through the same memory: a first write to a page takes longer than all that is done
    with it. `sent` is called for each flat when `value` is no longer called for its parameters.
    """
    with torch.no_grad():
        for i, flat in enumerate(unit.flats):
            if context.rank != 0:
                sent(flat)
            _broadcast_flat(flat, context, value, f"the values of unit {unit.name!r}, flat {i}")
            if context.rank == 0:
                sent(flat)


def _broadcast_flat(flat: Flat, context: Context, value: Callable[[nn.Parameter], Tensor], what: str) -> None:
    numel, source = flat.layout.full_numel, _Source(flat, value)
    length = _CHUNKS * context.world_size * CHUNK_BYTES // flat.master.itemsize
    memory = context.empty(min(length, numel), flat.master)
    context.ledger.track("staging", memory)
    for start in range(0, numel, length):
        piece = memory[: numel - start]
        if context.rank == 0:
            source.write(piece, start)
        operation = context.operation(what, "values")
        for transport in context.transports:
            broadcast(piece, transport, operation=operation)
        _keep(flat, piece, start)


class _Source:
    """The values of a flat as a full buffer [W*S], of which any piece can be written, in ascending order."""

    def __init__(self, flat: Flat, value: Callable[[nn.Parameter], Tensor]) -> None:
        self._flat = flat
        self._value = value
        self._cut: tuple[int, Tensor] = (-1, torch.empty(0))
        """The row and values of the latest parameter that did not fit into a piece: if strided, they are a copy."""

    def write(self, piece: Tensor, start: int) -> None:
        """Write elements `[start, start + n)` to `piece` [n], and zeros between parameters."""
        piece.zero_()
        for row, (param, slot) in enumerate(zip(self._flat.params, self._flat.layout.slots, strict=True)):
            begin, end = slot.within(start, start + piece.numel())
            if end - begin == slot.numel:
                piece[begin:end].view(slot.shape).copy_(self._value(param))
            elif begin < end:
                if self._cut[0] != row:
                    self._cut = row, self._value(param).reshape(-1)
                offset = start - slot.start
                piece[begin:end].copy_(self._cut[1][begin + offset : end + offset])


def _keep(flat: Flat, piece: Tensor, start: int) -> None:
    """Store what of elements `[start, start + n)` of a full buffer this rank keeps."""
    first, stop = flat.own_range(flat.layout)
    begin, end = max(first, start), min(stop, start + piece.numel())
    if begin < end:
        flat.write(piece[begin - start : end - start], begin - first)


def broadcast_buffers(module: nn.Module, context: Context) -> None:
    """Copy rank 0's buffers (for example running statistics) to every rank.

    Equal buffers are not written: a mask may be an expanded view, which does not allow writes.
    """
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            flat = buffer.detach().reshape(-1).clone()
            operation = context.operation(f"buffer {name!r}", "buffers")
            for transport in context.transports:
                broadcast(flat, transport, operation=operation)
            if not torch.equal(flat.view(buffer.shape), buffer):
                buffer.copy_(flat.view(buffer.shape))
