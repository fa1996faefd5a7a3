"""A bucket: where one unit's gradients of this rank lie until they are reduced.

Those of the root come first and last in a backward (of a head and of an embedding, say). So the root's bucket gets no
memory before its last gradient: the first of each parameter stays the tensor that autograd made.

Legend: `W` ranks, `S` elements per shard.
"""

from collections.abc import Iterator, Set
from dataclasses import dataclass, field

from torch import Tensor, nn

from shardlite.errors import PhaseError
from shardlite.params import Empty, Flat, Gradients, Layout, Slot, Unit, check_move


@dataclass(eq=False)
class Bucket:
    """One unit's gradients before they are reduced."""

    unit: Unit
    phase: Gradients = Gradients.EMPTY
    flats: list[Flat] = field(init=False)
    """The unit's flats that have gradients."""

    full: list[Tensor] = field(default_factory=list)
    """For each of them a full buffer in the layout and the dtype of its gradients."""

    early: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    """Gradients that came while there is no such buffer, as autograd made them."""

    used: set[nn.Parameter] = field(default_factory=set)
    """Those of the module's parameters whose gradients the bucket holds."""

    reduced: bool = False
    """Whether it was sent round in the backward that is running."""

    arrivals: int = 0
    """How many gradients came in the backward that is running; a reentrant backward brings several per parameter."""

    def __post_init__(self) -> None:
        self.follow_requires_grad()

    def move(self, to: Gradients) -> None:
        """Change the phase.

        Raises:
            PhaseError: the move is illegal.
        """
        check_move(self.unit.name, self.phase, to)
        self.phase = to

    def complete(self, rounds: int) -> bool:
        """Whether every parameter has got `rounds` gradients in the backward that is running."""
        return self.arrivals == rounds * len(self._places)

    def needs_memory(self, param: nn.Parameter, *, waits: bool) -> bool:
        """Whether there is none for the next gradient of a parameter; one of the root may wait for it if `waits`."""
        return not self.full and not (waits and self.unit.is_root and param not in self.early)

    def fill(self, empty: Empty) -> None:
        """Get memory, and put there what came early."""
        self.full = [empty(flat.gradients.full_numel, flat.reduce) for flat in self.flats]
        if self.phase is Gradients.EMPTY:
            self.move(Gradients.FILLING)
        while self.early:
            self._place_of(*self._places[(early := self.early.popitem())[0]]).copy_(early[1])
            del early  # one after the other they go

    def add(self, param: nn.Parameter, grad: Tensor | None, *, is_watched: bool) -> None:
        """Put a gradient in its place, cast to the dtype of the sum, or on top of what is there already.

        Pass `None` for one that does not count (`join`): it has come, and contributes nothing. `is_watched` says that
        others may write to it.

        Raises:
            PhaseError: the parameter was frozen between its forward and this backward.
        """
        if (place := self._places.get(param)) is None:
            raise PhaseError(
                f"parameter {self._name_of(param)!r} got a gradient, but did not require one at the latest forward: "
                "change requires_grad after the backward"
            )
        self.arrivals += 1
        if grad is None:
            return
        dense = grad.to_dense() if grad.is_sparse else grad
        if not self.full:
            self._keep_early(param, dense.clone() if is_watched else dense)
        elif param in self.used:
            self._place_of(*place).add_(dense)
        else:
            self._place_of(*place).copy_(dense)
        self.used.add(param)

    def _keep_early(self, param: nn.Parameter, grad: Tensor) -> None:
        self.early[param] = grad
        if self.phase is Gradients.EMPTY:
            self.move(Gradients.FILLING)

    def _place_of(self, flat: int, slot: Slot) -> Tensor:
        """View a gradient's place, in its shape."""
        return self.full[flat][slot.start : slot.stop].view(slot.shape)

    def gradient(self, param: nn.Parameter) -> Tensor | None:
        """Return what is there of a parameter's gradient."""
        if self.phase is not Gradients.FILLING or param not in self.used:
            return None
        return self.early[param] if param in self.early else self._place_of(*self._places[param])

    def multiply(self, factor: float) -> None:
        """Multiply all that is there."""
        for full in self.full:
            full.mul_(factor)
        for param, grad in self.early.items():
            self.early[param] = grad.to(self.flats[self._places[param][0]].reduce) * factor

    def drop(self, param: nn.Parameter) -> None:
        """Forget it."""
        if self.phase is Gradients.FILLING:
            self.used.discard(param)
            self.early.pop(param, None)
            if not self.used:
                self.clear()

    def _name_of(self, param: nn.Parameter) -> str:
        members = (
            (each, slot) for flat in self.unit.flats for each, slot in zip(flat.params, flat.layout.slots, strict=True)
        )
        return next(slot.name for each, slot in members if each is param)

    def zero_the_rest(self) -> None:
        """Zero the padding and the places of gradients that did not come: the memory comes uninitialised."""
        for flat, full in zip(self.flats, self.full, strict=True):
            used = {i for i, row in enumerate(flat.rows) if flat.params[row] in self.used}
            for start, stop in _gaps(flat.gradients, used):
                full[start:stop].zero_()

    def flags(self) -> list[int]:
        """Return 1 for each parameter that has a gradient here, 0 for each other one that might have."""
        return [int(flat.params[row] in self.used) for flat in self.flats for row in flat.rows]

    def first_bad(self) -> int | None:
        """Return the place among the flags of the first gradient that has a NaN or an infinity. The host waits."""
        rows = [(flat.params[row], slot, i) for i, flat in enumerate(self.flats) for row, slot in _slots(flat)]
        for place, (param, slot, i) in enumerate(rows):
            if param in self.used and not self.full[i][slot.start : slot.stop].isfinite().all():
                return place
        return None

    def follow_requires_grad(self) -> None:
        """Take note of which parameters have gradients now. To be called while the bucket is empty."""
        for flat in self.unit.flats:
            flat.follow_requires_grad()
        self.flats = self.unit.trainable
        self._places = {flat.params[row]: (i, slot) for i, flat in enumerate(self.flats) for row, slot in _slots(flat)}

    def clear(self) -> None:
        """Empty the bucket, and give its memory back."""
        self.full = []
        self.early.clear()
        self.used.clear()
        if self.phase is not Gradients.EMPTY:
            self.move(Gradients.EMPTY)


def _slots(flat: Flat) -> Iterator[tuple[int, Slot]]:
    return zip(flat.rows, flat.gradients.slots, strict=True)


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
