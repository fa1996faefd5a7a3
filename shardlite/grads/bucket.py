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
from torch import Tensor, nn

from shardlite.comm import Context, Moment, Transport
from shardlite.errors import PhaseError
from shardlite.grads.part_sums import PartSums
from shardlite.params import Flat, Gradients, Slot, Unit, check_move

PURPOSE = "gradient buckets"
"""How the ledger names the memory of buckets, and of gradients that wait for it."""


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

    reduced: bool = False
    """Whether the gradients of the current backward are reduced, or added to those of earlier parts."""

    expected: int = field(init=False)
    """Number of parameters that have gradients."""

    moment: Moment | None = None
    """Event after the last gradient of this backward, `None` if that is now. See `Reducer.enter`."""

    arrivals: int = 0
    """Number of gradients that arrived in the current backward. A reentrant backward brings several per parameter."""

    def __post_init__(self) -> None:
        self.follow_requires_grad()

    def move(self, to: Gradients) -> None:
        """Change the phase.

        Raises:
            PhaseError: the transition is illegal.
        """
        check_move(self.unit.name, self.phase, to)
        self.phase = to

    def complete(self, rounds: int) -> bool:
        """Return whether every parameter has received `rounds` gradients in the current backward."""
        return self.arrivals == rounds * self.expected

    def needs_memory(self, param: nn.Parameter, *, waits: bool) -> bool:
        """Return whether the buffers must be allocated before the next gradient of `param` is stored.

        With `waits`, the first gradient of a parameter can wait for them.
        """
        return not waits or id(param) in self.early

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
        self.arrivals += 1
        if grad is None:
            return
        dense = grad.to_dense() if grad.is_sparse else grad
        if not self.full:
            self.early[key] = dense.clone() if is_watched else dense
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
        self.reduced = True

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
        self.reduced = True

    def start_over(self) -> None:
        """Be ready for the next backward."""
        self.arrivals, self.reduced, self.moment = 0, False, None
        self.unit.begin_backward()

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


def make_buckets(units: Sequence[Unit], context: Context, most_parts: int) -> dict[Unit, Bucket]:
    """Make a bucket for each unit of a model. Sums of `most_parts` parts of a global batch are kept apart."""
    return {unit: Bucket(unit, context, PartSums(most_parts)) for unit in units}


def _slots(flat: Flat) -> Iterator[tuple[int, Slot]]:
    return zip(flat.rows, flat.gradients.slots, strict=True)
