"""Pieces: ranges of a flat (flat parameter) that contain full parameters, each gathered at once.

Legend: `W` ranks that share a model, `n` elements of a piece.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from shardlite.comm import Context, Operation, Transport, all_gather, cut_up
from shardlite.errors import LayoutError
from shardlite.params import Flat, Slot, Unit

PURPOSE = "full state"
"""The purpose under which `traffic()` counts these gathers."""


@dataclass(frozen=True, eq=False)
class Piece:
    """Consecutive parameters of a flat, which are gathered together."""

    unit: Unit
    flat: Flat
    indices: range
    """Indices of the parameters' slots."""

    dtype: torch.dtype
    """Dtype of the gathered values. Each rank casts its own shard, so a narrow dtype also takes fewer messages."""

    @cached_property
    def slots(self) -> Sequence[Slot]:
        """The slots of the parameters."""
        return self.flat.layout.slots[self.indices.start : self.indices.stop]

    @property
    def start(self) -> int:
        """Index in the full buffer of the first element."""
        return self.slots[0].start

    @property
    def numel(self) -> int:
        """Number of elements, `n`, including the padding between parameters."""
        return self.slots[-1].stop - self.start

    @property
    def nbytes(self) -> int:
        """Bytes of the gathered piece."""
        return self.numel * self.dtype.itemsize

    @property
    def largest(self) -> int:
        """Bytes of the largest parameter."""
        return max(slot.numel for slot in self.slots) * self.dtype.itemsize

    def operation(self, context: Context) -> Operation:
        """Return the name of the gather. Call this at the same place on every rank."""
        what = f"the full state of unit {self.unit.name!r}, flat {self.unit.flats.index(self.flat)}"
        return context.operation(what, PURPOSE, self.unit.name)

    def gather(self, context: Context) -> Tensor:
        """Return the values, [n]. Collective. The values may share memory with the weights."""
        if self.flat.rank is None and self.dtype == self.flat.master:
            return self.flat.weights(self.start, self.start + self.numel)
        full = self.empty(context)
        self.fill(full, context.inline[0], self.operation(context))
        return full

    def empty(self, context: Context) -> Tensor:
        """Return uninitialized memory for the values, [n]."""
        full = context.empty(self.numel, self.dtype)
        context.ledger.track("staging", full)
        return full

    def fill(self, full: Tensor, transport: Transport, operation: Operation) -> None:
        """Gather the values into `full` [n]. A cast of shards has the same bits as a cast of full parameters."""
        start, stop = self.start, self.start + self.numel
        own = self.flat.own_range(self.flat.layout)
        first, last = max(own[0], start), min(own[1], stop)
        if first < last:
            full[first - start : last - start].copy_(self.flat.weights(first - own[0], last - own[0]))
        if self.flat.rank is not None:
            cuts = [min(max(cut, start), stop) - start for cut in self.flat.layout.cuts]
            all_gather(full, transport, cut=cut_up(self.numel, self.dtype, transport, cuts), operation=operation)

    def views(self, full: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """For each parameter, yield the module's own parameter and its view of the values [n]."""
        for index, slot in zip(self.indices, self.slots, strict=True):
            yield self.flat.params[index], full[slot.start - self.start : slot.stop - self.start].view(slot.shape)


def pieces_of(
    units: Iterable[Unit],
    *,
    dtype: torch.dtype | None = None,
    only: Collection[Tensor] | None = None,
    max_bytes: int | None = None,
) -> list[Piece]:
    """Divide the parameters of `units` into pieces, in the order of units, flats and slots.

    Args:
        units: the units.
        dtype: dtype of floating-point values. `None` keeps the dtype in which the model stores them.
        only: the parameters to gather. `None` means all of them.
        max_bytes: bound on the memory of an iteration: two pieces, and a copy of one parameter. `None` makes a piece
            of each flat.

    Raises:
        LayoutError: a parameter is too large for `max_bytes`.
    """
    pieces = []
    for unit in units:
        for flat in unit.flats:
            kept = flat.master if dtype is None or not flat.master.is_floating_point else dtype
            for indices in _runs(flat, kept.itemsize, only, None if max_bytes is None else max_bytes // 3):
                pieces.append(Piece(unit, flat, indices, kept))
    if max_bytes is not None:
        _check_bound(pieces, max_bytes)
    return pieces


def _runs(flat: Flat, itemsize: int, only: Collection[Tensor] | None, limit: int | None) -> Iterator[range]:
    """Yield ranges of slots: of the wanted parameters, and of at most `limit` bytes unless it is a single parameter."""
    slots, first, stop = flat.layout.slots, 0, 0
    for index, param in enumerate(flat.params):
        wanted = only is None or param in only
        nbytes = (slots[index].stop - slots[first].start) * itemsize
        if stop > first and (not wanted or (limit is not None and nbytes > limit)):
            yield range(first, stop)
            first = stop
        if wanted:
            first = first if stop > first else index
            stop = index + 1
        else:
            first = stop = index + 1
    if stop > first:
        yield range(first, stop)


def _check_bound(pieces: Iterable[Piece], max_bytes: int) -> None:
    slots = ((2 * slot.numel * piece.dtype.itemsize, slot.name) for piece in pieces for slot in piece.slots)
    least, name = max(slots, default=(0, ""))
    if least > max_bytes:
        raise LayoutError(
            f"full_parameters(max_bytes={max_bytes}): parameter {name!r} takes {least // 2} bytes, and as many for "
            f"the copy that is returned: pass max_bytes={least} or more"
        )


def gather_param(context: Context, flat: Flat, index: int, local: Tensor) -> Tensor:
    """Gather a tensor in the shape of one parameter of a flat. `local` [n] is this rank's part. Collective."""
    slot, cuts = flat.layout.slots[index], flat.cuts_of(index)
    if flat.rank is None or slot.numel == 0:
        return local.reshape(slot.shape).clone()
    full = context.empty(slot.numel, local.dtype)
    context.ledger.track("staging", full)
    full[cuts[flat.rank] : cuts[flat.rank + 1]].copy_(local)
    operation = context.operation(f"the full tensor of {slot.name!r}", "full state")
    transport = context.inline[0]
    all_gather(full, transport, cut=cut_up(slot.numel, local.dtype, transport, cuts), operation=operation)
    return full.view(slot.shape).clone()
