"""Which neighbours one kernel call can step.

    parameters  [ p0 p0 p0 0 | p1 p1 0 0 | p2 p2 p2 p2 | p3 ... ]     padded to 32, drawn as 4
    gradient         yes          yes          None      yes
    on a CPU    [       first run        ]             [ second ]     one kernel call each
    on a GPU    [                   one run                     ]     a table says that p2 is left alone

A run is updated element by element, so bits would not depend on how a buffer is cut into runs but for one thing:
PyTorch's CPU code rounds the last `n % 16` elements of a tensor in another way than the rest. Hence runs end at
multiples of 32 wherever the buffer reaches so far. A parameter with a storage of its own is a run of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardlite_kernels import State
from torch import Tensor

from shardlite.optim.arena_slots import Slot, flat
from shardlite.params import ALIGN, is_padded


class Run:
    """Parameters that one call can step, with gradients that lie in one buffer in the same way."""

    def __init__(self, slot: Slot, grad: Tensor) -> None:
        self.first = self._last = slot
        self._padded = is_padded(grad) and grad.is_contiguous()
        self._given, self._grad = grad, grad.contiguous()

    def extend(self, slot: Slot, grad: Tensor) -> bool:
        """Take `slot` in if it belongs here, and only padding lies between its gradient and the one before."""
        distance = (slot.start - self.first.start) * grad.element_size()
        fits = (
            follows(slot, self._last)
            and ((self._padded and is_padded(grad)) or slot.start == self._last.end)
            and grad.data_ptr() == self._grad.data_ptr() + distance
            and grad.untyped_storage().data_ptr() == self._grad.untyped_storage().data_ptr()
            and grad.dtype == self._grad.dtype
            and grad.is_contiguous()
        )
        if fits:
            self._last, self._padded = slot, is_padded(grad)
        return fits

    def pieces(self) -> Iterator[tuple[State, Tensor, int]]:
        """Yield what is to be stepped by which gradient, and its place in the arena; step it before asking for more.

        That is the run whole if its gradient has padding too. If not, what reaches into the last 32 elements is stepped
        by itself, with a padded copy of its gradient.
        """
        start, end, stop = self.first.start, self._last.end, self._last.stop
        begin = int(self._grad.storage_offset())
        body = stop if self._padded or stop == end else start + (end - start) // ALIGN * ALIGN
        if body > start:
            yield self._piece(start, body, flat(self._grad, begin, begin + body - start))
        if body < stop:
            ours = flat(self._grad, begin + body - start, begin + end - start)
            copy = ours.new_zeros(stop - body)
            copy[: end - body] = ours
            yield self._piece(body, stop, copy)
            ours.copy_(copy[: end - body])  # the step may have divided it by a scale

    def _piece(self, start: int, stop: int, grad: Tensor) -> tuple[State, Tensor, int]:
        return self.first.arena.run(self.first, start, stop), grad, self.first.place + start - self.first.start

    def give_back(self) -> None:
        """Write a gradient that was copied to be contiguous back to where it came from."""
        if self._grad is not self._given:
            self._given.copy_(self._grad)


def follows(slot: Slot, last: Slot) -> bool:
    """Whether what is to be done with `last` and with `slot`, which lies behind it, can be one call."""
    distance = slot.start - last.start
    return (
        slot.arena is last.arena
        and slot.place - last.place == distance
        and slot.low_start - last.low_start == (distance if slot.part.low is not None else 0)
        and slot.counts.together(last.row, slot.row, adjacent=slot.start == last.stop)
    )


def runs(slots: Sequence[Slot]) -> Iterator[Run]:
    """Cut `slots`, which are in the order of memory and have gradients, into runs. Empty ones have nothing to step."""
    run = None
    for slot in slots:
        grad = slot.param.grad
        if grad is None or slot.start == slot.end:
            continue
        if run is None or not run.extend(slot, grad):
            if run is not None:
                yield run
            run = Run(slot, grad)
    if run is not None:
        yield run
