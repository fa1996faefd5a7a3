"""A bucket: where one unit's gradients of this rank lie until they are reduced.

Legend: `W` ranks, `S` elements per shard.
"""

from collections.abc import Iterator, Set
from dataclasses import dataclass, field

from torch import Tensor

from shardlite.layout import Layout
from shardlite.phase import Gradients, check_move
from shardlite.unit import Unit


@dataclass(eq=False)
class Bucket:
    """One unit's gradients before they are reduced."""

    unit: Unit
    phase: Gradients = Gradients.EMPTY
    full: list[Tensor] = field(default_factory=list)
    """[W*S] for each trainable flat."""

    used: set[tuple[int, int]] = field(default_factory=set)
    """(flat, slot) of the gradients that the bucket holds."""

    arrivals: int = 0
    """How many gradients came in the backward that is running; a reentrant backward brings several per parameter."""

    def move(self, to: Gradients) -> None:
        """Change the phase.

        Raises:
            PhaseError: the move is illegal.
        """
        check_move(self.unit.name, self.phase, to)
        self.phase = to

    def complete(self, rounds: int) -> bool:
        """Whether every parameter has got `rounds` gradients in the backward that is running."""
        return self.arrivals == rounds * sum(len(flat.params) for flat in self.unit.trainable)

    def add(self, flat: int, slot: int, grad: Tensor) -> None:
        """Put a gradient in its place, or on top of what is there already."""
        place = self.unit.trainable[flat].layout.slots[slot]
        target = self.full[flat][place.start : place.stop].view(place.shape)
        dense = grad.to_dense() if grad.is_sparse else grad
        if (flat, slot) in self.used:
            target.add_(dense)
        else:
            target.copy_(dense)
        self.used.add((flat, slot))
        self.arrivals += 1

    def zero_the_rest(self) -> None:
        """Zero the padding and the places of gradients that did not come: the memory comes uninitialised."""
        for i, (flat, full) in enumerate(zip(self.unit.trainable, self.full, strict=True)):
            for start, stop in _gaps(flat.layout, {slot for f, slot in self.used if f == i}):
                full[start:stop].zero_()

    def flags(self) -> list[int]:
        """Return 1 for each trainable parameter that has a gradient here, else 0."""
        return [int((i, j) in self.used) for i, flat in enumerate(self.unit.trainable) for j in range(len(flat.params))]

    def clear(self) -> None:
        """Empty the bucket, and give its memory back."""
        self.full = []
        self.used.clear()
        if self.phase is not Gradients.EMPTY:
            self.move(Gradients.EMPTY)


def _gaps(layout: Layout, used: Set[int]) -> Iterator[tuple[int, int]]:
    """Yield the ranges of a full buffer that no used slot covers."""
    end = 0
    for i, slot in enumerate(layout.slots):
        if i in used:
            if slot.start > end:
                yield end, slot.start
            end = slot.stop
    if end < layout.full_numel:
        yield end, layout.full_numel
