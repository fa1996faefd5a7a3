"""Buckets: the buffer in which one unit's gradients are collected until they are reduced.

The root's gradients arrive first and last in a backward (for example those of a head and of an embedding). So the
root's bucket has no memory until its last gradient: until then it keeps the tensors that autograd made. On a GPU every
bucket does.

In: gradients of single parameters. Out: full buffers to reduce. Starts no communication.

Legend: `W` ranks, `S` elements per shard.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from shardlite_kernels import hop
from torch import Tensor, nn

from shardlite.comm import Context, Transport
from shardlite.errors import PhaseError
from shardlite.params import Flat, Gradients, Slot, Unit, check_move

PURPOSE = "gradient buckets"
"""How the ledger names the memory of buckets, and of gradients that wait for it."""


@dataclass(frozen=True)
class _Sum:
    """The gradients of some consecutive parts, added up: one full buffer [W*S] per flat."""

    parts: int
    full: Sequence[Tensor]


@dataclass(eq=False)
class PartSums:
    """What a unit's earlier parts have brought, and not been reduced."""

    most: int
    """Sums of so many parts are not added to any more."""

    used: set[int] = field(default_factory=set)
    """The ids of the parameters that an earlier part has used."""

    _sums: list[_Sum] = field(default_factory=list)
    """In the order of parts, so in falling order of size."""

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._sums)

    @property
    def parts(self) -> int:
        """Number of parts that are summed here."""
        return sum(each.parts for each in self._sums)

    def add_to(self, full: Sequence[Tensor]) -> int:
        """Add to the gradients of the next part, in place, the sums that count as many parts, one after the other.

        Return how many parts are in `full` then.
        """
        parts = 1
        while self._sums and self._sums[-1].parts == parts < self.most:
            _add(full, self._sums.pop().full)
            parts *= 2
        return parts

    def keep(self, full: Sequence[Tensor], used: set[int]) -> None:
        """Add to the gradients of the next part, in place, and keep the sum until later ones come."""
        self._sums.append(_Sum(self.add_to(full), full))
        self.used |= used

    def summands(self) -> Iterator[Sequence[Tensor]]:
        """Yield the sums, in the order of their parts: one full buffer per flat."""
        return (each.full for each in self._sums)

    def clear(self) -> None:
        """Forget all parts."""
        self._sums.clear()
        self.used.clear()


@dataclass(eq=False)
class Bucket:
    """One unit's gradients before they are reduced."""

    unit: Unit
    context: Context
    earlier: PartSums
    """Sums over earlier parts of the global batch."""

    phase: Gradients = Gradients.EMPTY
    flats: list[Flat] = field(init=False)
    """The unit's flats that have gradients."""

    full: list[Tensor] = field(default_factory=list)
    """One full buffer per flat, in the layout and dtype of its gradients."""

    early: dict[int, Tensor] = field(default_factory=dict)
    """Gradients that arrived before `full` was allocated, as autograd made them, by `id` of their parameters.

    The bucket looks parameters up by `id` because the hash of a tensor is computed in Python.
    """

    places: dict[int, Tensor] = field(default_factory=dict)
    """Views of `full` for the gradient of each parameter, in its shape, by its `id`."""

    used: set[int] = field(default_factory=set)
    """The ids of the module's parameters whose gradients the bucket holds."""

    expected: int = field(init=False)
    """Number of parameters that have gradients."""

    def __post_init__(self) -> None:
        self.follow_requires_grad()

    def move(self, to: Gradients) -> None:
        """Change the phase.

        Raises:
            PhaseError: the transition is illegal.
        """
        check_move(self.unit.name, self.phase, to)
        self.phase = to

    def fill(self) -> None:
        """Take memory for the full buffers, and copy early gradients into them."""
        self.take_memory()
        while self.early:
            self.places[(early := self.early.popitem())[0]].copy_(early[1])
            del early  # frees each gradient before the next is copied

    def take_memory(self, carrier: Transport | None = None) -> None:
        """Take memory for the full buffers: of `carrier`, the transport that sends them, if it is given."""
        for flat in self.flats:
            numel = flat.gradients.full_numel
            if carrier is None:
                full = self.context.empty(numel, flat.reduce)
            else:
                full = carrier.empty_persistent(numel * flat.reduce.itemsize, self.context.device).view(flat.reduce)
            self.full.append(full)
            self.context.ledger.track(PURPOSE, full)
        cut = [view for flat, full in zip(self.flats, self.full, strict=True) for view in flat.gradients.views(full)]
        self.places = dict(zip(self._flat_of, cut, strict=True))
        if self.phase is Gradients.EMPTY:
            self.move(Gradients.FILLING)

    def copy_in(self) -> tuple[Callable[[], None], list[Tensor]]:
        """Return what copies early gradients into the full buffers and zeroes the rest, and the gradients it reads.

        It is to be run on a stream, and touches nothing of the bucket but memory.
        """
        places, early, gaps = [self.places[key] for key in self.early], [*self.early.values()], self._gaps()
        self.early.clear()

        def run() -> None:
            if early:
                torch._foreach_copy_(places, early)
            if gaps:
                torch._foreach_zero_(gaps)

        return run, early

    def add(self, param: nn.Parameter, grad: Tensor | None, *, is_watched: bool) -> None:
        """Store a gradient, cast to the dtype of the reduction, or add it to the stored one.

        Pass `None` for a gradient excluded by `join`: it counts as arrived and contributes zero. `is_watched` says that
        other code may write to the tensor, so that it must be copied.

        Raises:
            PhaseError: the parameter was frozen between its forward and this backward.
        """
        key = id(param)
        if key not in self._flat_of:
            raise PhaseError(
                f"parameter {self._name_of(param)!r} got a gradient, but did not require one at the latest forward: "
                "change requires_grad after the backward"
            )
        if grad is None:
            return
        dense = grad.to_dense() if grad.is_sparse else grad
        if not self.full:
            self.early[key] = early = dense.clone() if is_watched else dense
            self.context.ledger.track(PURPOSE, early)
            if self.phase is Gradients.EMPTY:
                self.move(Gradients.FILLING)
        elif key in self.used:
            self.places[key].add_(dense)
        else:
            self.places[key].copy_(dense)
        self.used.add(key)

    def gradient(self, param: nn.Parameter) -> Tensor | None:
        """Return the gradient collected for `param`, or `None`."""
        key = id(param)
        if self.phase is not Gradients.FILLING or key not in self.used:
            return None
        return self.early[key] if key in self.early else self.places[key]

    def multiply(self, factor: float) -> None:
        """Multiply all collected gradients by `factor`."""
        for full in self.full:
            full.mul_(factor)
        for key, grad in self.early.items():
            self.early[key] = grad.to(self._flat_of[key].reduce) * factor

    def drop(self, param: nn.Parameter) -> None:
        """Drop the gradient of `param`, that of earlier parts, too."""
        if id(param) in self.earlier.used:
            rows = ((i, flat.params[row], slot) for i, flat in enumerate(self.flats) for row, slot in _slots(flat))
            place, slot = next((i, slot) for i, each, slot in rows if each is param)
            for full in self.earlier.summands():
                slot.view(full[place]).zero_()
            self.earlier.used.discard(id(param))
        if self.phase is Gradients.FILLING:
            self.used.discard(id(param))
            self.early.pop(id(param), None)
            if not self.used:
                self.clear()

    def _name_of(self, param: nn.Parameter) -> str:
        flat = next(flat for flat in self.unit.flats if any(each is param for each in flat.params))
        return next(slot.name for each, slot in zip(flat.params, flat.layout.slots, strict=True) if each is param)

    def zero_the_rest(self) -> None:
        """Zero the padding and the places of missing gradients. The buffers were allocated uninitialised.

        Padding stays zero: a reduction writes sums of zeros there.
        """
        if gaps := self._gaps():
            torch._foreach_zero_(gaps)

    def _gaps(self) -> list[Tensor]:
        gaps: list[Tensor] = []
        complete = len(self.used) == self.expected
        for flat, full in zip(self.flats, self.full, strict=True):
            unwritten = flat.gradients.padding if complete else flat.gradients.gaps(self._used_slots(flat))
            gaps += [full[start:stop] for start, stop in unwritten]
        return gaps

    def _used_slots(self, flat: Flat) -> set[int]:
        return {i for i, row in enumerate(flat.rows) if id(flat.params[row]) in self.used}

    def flags(self, flat: Flat) -> list[int]:
        """Return one flag per parameter of `flat` that may have a gradient: 1 if the bucket holds one, else 0."""
        return [int(id(flat.params[row]) in self.used) for row in flat.rows]

    def first_bad(self) -> int | None:
        """Return the flag index of the first gradient with a NaN or an infinity, or `None`. Synchronizes the host."""
        rows = [(flat.params[row], slot, i) for i, flat in enumerate(self.flats) for row, slot in _slots(flat)]
        for place, (param, slot, i) in enumerate(rows):
            own = self.early.get(id(param))
            grads = [own.to(self.flats[i].reduce)] if own is not None else []
            grads += [full[i][slot.start : slot.stop] for full in (self.full, *self.earlier.summands()) if full]
            if id(param) in self.used and not all(grad.isfinite().all() for grad in grads):
                return place
        return None

    @property
    def accumulates(self) -> bool:
        """Whether there are gradients that are not reduced yet."""
        return self.phase is Gradients.FILLING or bool(self.earlier)

    def keep_part(self) -> None:
        """Add the gradients to those of earlier parts, and be empty for the next part. Nothing may be missing."""
        self.earlier.keep(self.full, self.used)
        self.full, self.places, self.used = [], {}, set()
        self.move(Gradients.EMPTY)

    def add_earlier_parts(self) -> int:
        """Add the gradients of earlier parts, but for sums that are kept apart. Return the number of all parts."""
        parts = self.earlier.add_to(self.full)
        self.used |= self.earlier.used
        return parts + self.earlier.parts

    def begin_reduction(self) -> None:
        """Note that the gradients are on their way, so that no more may come in this backward; maybe there are none."""
        if self.phase is Gradients.EMPTY:
            self.move(Gradients.FILLING)
        self.move(Gradients.REDUCING)

    def follow_requires_grad(self) -> None:
        """Update which parameters have gradients. Call it while the bucket is empty."""
        for flat in self.unit.flats:
            flat.follow_requires_grad()
        self.flats = self.unit.trainable
        self._flat_of = {id(flat.params[row]): flat for flat in self.flats for row in flat.rows}
        self.expected = len(self._flat_of)

    def release(self) -> None:
        """Give up the memory, in which a gradient may lie now."""
        self.full, self.places = [], {}

    def clear(self) -> None:
        """Empty the bucket."""
        self.release()
        self.early.clear()
        self.used.clear()
        self.earlier.clear()
        if self.phase is not Gradients.EMPTY:
            self.move(Gradients.EMPTY)


def _slots(flat: Flat) -> Iterator[tuple[int, Slot]]:
    return zip(flat.rows, flat.gradients.slots, strict=True)


def _add(full: Sequence[Tensor], earlier: Sequence[Tensor]) -> None:
    """Add earlier gradients to later ones, in place."""
    for own, before in zip(full, earlier, strict=True):
        hop(own, before, own)
