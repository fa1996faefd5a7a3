"""Buckets: the buffers that collect one unit's gradients until they are reduced.

The root's gradients arrive first and last in a backward (for example those of a head and of an embedding). So the
root's bucket allocates memory only at its last gradient, and keeps the tensors of autograd until then. On a GPU every
bucket does.

With order="tree" a bucket also sums earlier parts of the global batch, as a binary counter counts:

    part   kept before        addition               kept after
    0                                                [0]
    1      [0]                0 + 1                  [0+1]
    2      [0+1]                                     [0+1] [2]
    3      [0+1] [2]          2 + 3, then with 0+1   [(0+1)+(2+3)]

So consecutive parts, a power of two of them, are summed as a balanced binary tree. It is a branch of the tree over all
parts, wherever a rank begins. Of `n` parts at most `log2(n)` sums are kept between backwards.

In: gradients of single parameters. Out: full buffers to reduce. Starts no communication.

Legend: `W` ranks, `S` elements per shard.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from shardlite_kernels import hop
from torch import Tensor, nn

from shardlite.comm import Context, Transport
from shardlite.errors import PhaseError
from shardlite.params import Flat, Gradients, Slot, Unit, check_move

PURPOSE = "gradient buckets"
"""The ledger's name for the memory of buckets, and of gradients that are not copied to them yet."""


@dataclass(frozen=True)
class _Sum:
    """The sum of the gradients of consecutive parts: one full buffer [W*S] per flat."""

    parts: int
    full: Sequence[Tensor]


@dataclass(eq=False)
class PartSums:
    """Sums of the gradients of a unit's earlier parts, which are not reduced yet."""

    most: int
    """Maximum number of parts in a sum."""

    used: set[int] = field(default_factory=set)
    """The ids of the parameters that an earlier part used."""

    _sums: list[_Sum] = field(default_factory=list)
    """In the order of parts, so in decreasing order of size."""

    def __bool__(self) -> bool:
        """Return whether there are any."""
        return bool(self._sums)

    @property
    def parts(self) -> int:
        """Number of parts in all sums."""
        return sum(each.parts for each in self._sums)

    def add_to(self, full: Sequence[Tensor]) -> int:
        """Add sums of as many parts as `full` has to it, in place, until none is left. Return the parts in `full`."""
        parts = 1
        while self._sums and self._sums[-1].parts == parts < self.most:
            for own, earlier in zip(full, self._sums.pop().full, strict=True):
                hop(own, earlier, own)
            parts *= 2
        return parts

    def append(self, full: Sequence[Tensor], used: set[int]) -> None:
        """Add the gradients of the next part, in place."""
        self._sums.append(_Sum(self.add_to(full), full))
        self.used |= used

    def summands(self) -> Iterator[Sequence[Tensor]]:
        """Yield the sums in the order of their parts: one full buffer per flat."""
        return (each.full for each in self._sums)

    def clear(self) -> None:
        """Drop all sums."""
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
    """Autograd's tensors that arrived before `full` was allocated, by `id` of their parameters.

    Lookups are by `id` because the hash of a tensor is computed in Python.
    """

    places: dict[int, Tensor] = field(default_factory=dict)
    """Views of `full` for the gradient of each parameter, in its shape, by `id` of the parameter."""

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
        """Allocate the full buffers, and copy early gradients into them."""
        self.allocate()
        while self.early:
            self.places[(early := self.early.popitem())[0]].copy_(early[1])
            del early  # frees each gradient before the next is copied

    def allocate(self, carrier: Transport | None = None) -> None:
        """Allocate the full buffers, in memory of `carrier`, the transport that sends them, if given."""
        for flat in self.flats:
            numel = flat.gradients.full_numel
            if carrier is None:
                full = self.context.empty(numel, flat.reduce)
            else:
                full = carrier.empty_persistent(numel * flat.reduce.itemsize, self.context.device).view(flat.reduce)
            self.full.append(full)
            self.context.ledger.track(PURPOSE, full)
        cut = [view for flat, full in zip(self.flats, self.full, strict=True) for view in flat.gradients.views(full)]
        self.places = dict(zip(self._slots, cut, strict=True))
        if self.phase is Gradients.EMPTY:
            self.move(Gradients.FILLING)

    def copy_in(self) -> tuple[Callable[[], None], list[Tensor]]:
        """Return a function that copies early gradients into the full buffers and zeroes the rest, and its inputs.

        It runs on a stream, and uses only memory of the bucket.
        """
        places, early = [self.places[key] for key in self.early], [*self.early.values()]
        self.early.clear()
        return partial(_copy_and_zero, places, early, self._gaps()), early

    def add_gradient(self, param: nn.Parameter, grad: Tensor | None, *, has_user_hooks: bool) -> None:
        """Store a gradient, cast to the dtype of the reduction, or add it to the stored one.

        Args:
            param: the module's parameter.
            grad: its gradient. `None`: it is excluded by `join` and contributes zero.
            has_user_hooks: whether other code may write to `grad`, so that it must be copied.

        Raises:
            PhaseError: the parameter was frozen between its forward and this backward.
        """
        key = id(param)
        if key not in self._slots:
            raise PhaseError(
                f"parameter {self._name_of(param)!r} got a gradient, but did not require one at the latest forward: "
                "change requires_grad after the backward"
            )
        if grad is None:
            return
        dense = grad.to_dense() if grad.is_sparse else grad
        if not self.full:
            self.early[key] = early = dense.clone() if has_user_hooks else dense
            self.context.ledger.track(PURPOSE, early)
            if self.phase is Gradients.EMPTY:
                self.move(Gradients.FILLING)
        elif key in self.used:
            self.places[key].add_(dense)
        else:
            self.places[key].copy_(dense)
        self.used.add(key)

    def gradient(self, param: nn.Parameter) -> Tensor | None:
        """Return the collected gradient of `param`, or `None`."""
        key = id(param)
        if self.phase is not Gradients.FILLING or key not in self.used:
            return None
        return self.early[key] if key in self.early else self.places[key]

    def multiply(self, factor: float) -> None:
        """Multiply all collected gradients by `factor`."""
        for full in self.full:
            full.mul_(factor)
        for key, grad in self.early.items():
            self.early[key] = grad.to(self.flats[self._slots[key][0]].reduce) * factor

    def drop(self, param: nn.Parameter) -> None:
        """Drop the gradient of `param`, also that of earlier parts."""
        if id(param) in self.earlier.used:
            i, slot = self._slots[id(param)]
            for full in self.earlier.summands():
                full[i][slot.start : slot.stop].zero_()
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
        """Zero the padding and missing gradients, which are uninitialized. A reduction leaves padding zero."""
        if gaps := self._gaps():
            torch._foreach_zero_(gaps)

    def _gaps(self) -> list[Tensor]:
        gaps: list[Tensor] = []
        complete = len(self.used) == self.expected
        for flat, full in zip(self.flats, self.full, strict=True):
            unwritten = (
                flat.gradients.padding
                if complete
                else flat.gradients.gaps({i for i, used in enumerate(self.flags(flat)) if used})
            )
            gaps += [full[start:stop] for start, stop in unwritten]
        return gaps

    def flags(self, flat: Flat) -> list[int]:
        """Return one flag per parameter of `flat` that may have a gradient: 1 if the bucket holds one, else 0."""
        return [int(id(flat.params[index]) in self.used) for index in flat.trainable_slots]

    def first_bad(self) -> int | None:
        """Return the index in `flags` of the first gradient with a NaN or an infinity, or `None`. The host waits."""
        for place, (key, (i, slot)) in enumerate(self._slots.items()):
            own = self.early.get(key)
            grads = [own.to(self.flats[i].reduce)] if own is not None else []
            grads += [full[i][slot.start : slot.stop] for full in (self.full, *self.earlier.summands()) if full]
            if key in self.used and not all(grad.isfinite().all() for grad in grads):
                return place
        return None

    @property
    def accumulates(self) -> bool:
        """Whether there are gradients that are not reduced yet."""
        return self.phase is Gradients.FILLING or bool(self.earlier)

    def keep_part(self) -> None:
        """Move the gradients, with all gaps filled, to the sums over earlier parts."""
        self.earlier.append(self.full, self.used)
        self.full, self.places, self.used = [], {}, set()
        self.move(Gradients.EMPTY)

    def add_earlier_parts(self) -> int:
        """Add the gradients of earlier parts, except sums that stay separate. Return the number of all parts."""
        parts = self.earlier.add_to(self.full)
        self.used |= self.earlier.used
        return parts + self.earlier.parts

    def begin_reduction(self) -> None:
        """Accept no more gradients until `clear`. The bucket may have received none."""
        if self.phase is Gradients.EMPTY:
            self.move(Gradients.FILLING)
        self.move(Gradients.REDUCING)

    def follow_requires_grad(self) -> None:
        """Expect gradients of the parameters that require them now. Call it while the bucket is empty."""
        for flat in self.unit.flats:
            flat.follow_requires_grad()
        self.flats = self.unit.trainable
        self._slots: dict[int, tuple[int, Slot]] = {  # by `id` of the parameter: the index of its flat, and its slot
            id(flat.params[index]): (i, slot)
            for i, flat in enumerate(self.flats)
            for index, slot in zip(flat.trainable_slots, flat.gradients.slots, strict=True)
        }
        self.expected = len(self._slots)

    def release(self) -> None:
        """Release the full buffers. They may be the memory of gradients now."""
        self.full, self.places = [], {}

    def clear(self) -> None:
        """Empty the bucket."""
        self.release()
        self.early.clear()
        self.used.clear()
        self.earlier.clear()
        if self.phase is not Gradients.EMPTY:
            self.move(Gradients.EMPTY)


def _copy_and_zero(places: list[Tensor], grads: list[Tensor], gaps: list[Tensor]) -> None:
    if grads:
        torch._foreach_copy_(places, grads)
    if gaps:
        torch._foreach_zero_(gaps)
