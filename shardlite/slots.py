"""Where an optimizer's parameters lie in memory, where their moments do, and which neighbours one kernel call can step.

A parameter of `ShardLite` is a view into a flat buffer. It starts at a multiple of 32 elements, and the zeros up to the
next multiple belong to it, in this buffer and in that of the gradients alike. Moments lie in arenas of their own, in
the same order, without what lies between parameters and is not ours (a full buffer also holds other ranks' parts):

    parameters  [ p0 p0 p0 0 | p1 p1 0 0 | .. .. .. .. | p2 p2 p2 p2 | p3 ... ]     padded to 32, drawn as 4
    moments     [ m0 m0 m0 0 | m1 m1 0 0 | m2 m2 m2 m2 | m3 ... ]
    gradient         yes          yes                        None       yes
    runs        [       first run        ]                           [ second ]     one kernel call each

A run is updated element by element, so bits would not depend on how a buffer is cut into runs but for one thing:
PyTorch's CPU code rounds the last `n % 16` elements of a tensor in another way than the rest. Hence runs end at
multiples of 32 wherever the buffer reaches so far. A parameter with a storage of its own is a run of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from shardlite.counts import StepCounts
from shardlite.layout import ALIGN, round_up

_MOMENTS = ("exp_avg", "exp_avg_sq")
_STATE = ("step", *_MOMENTS)


class Slot:
    """Where one parameter lies in its storage, in elements, and its state in the arenas."""

    __slots__ = ("address", "arena", "counts", "end", "group", "param", "place", "row", "start", "state", "stop")

    arena: Arena
    counts: StepCounts
    place: int  # of the moments in the arena
    row: int  # of the step counts
    state: dict[str, Tensor]

    def __init__(self, param: Tensor, group: int) -> None:
        self.param = param
        self.group = group
        self.address = param.data_ptr()
        self.start = int(param.storage_offset())
        self.end = self.stop = self.start + param.numel()  # `stop` may grow to include padding

    def adopt(self, states: dict[Tensor, Any]) -> None:
        """Copy the entry of `states` for this parameter (or zeros) into the arenas, and make it refer to them."""
        given = states.get(self.param)
        check_state(self.param, given)
        for name, mine in self.state.items():
            value = given[name] if given else 0.0
            if value is not mine:
                mine.copy_(value) if isinstance(value, Tensor) else mine.fill_(value)
        states[self.param] = dict(self.state)

    def holds(self, state: dict[str, Any] | None) -> bool:
        """Whether `state` refers to the arenas, so was neither replaced from outside nor never made."""
        mine = self.state
        return bool(state) and all(state.get(name) is mine[name] for name in _STATE)  # type: ignore[union-attr]

    def include_padding(self, next_start: int) -> None:
        """Move `stop` to the next multiple of 32, if what lies up to there is in the storage and is nobody's: zero."""
        stop = min(round_up(self.end, ALIGN), next_start, _storage_numel(self.param))
        if self.start % ALIGN == 0 and stop > self.end and not _flat(self.param, self.end, stop).any():
            self.stop = stop


class Arena:
    """The moments of the parameters in one storage: one buffer each, as long as the padded parameters are together."""

    def __init__(self, slots: list[Slot]) -> None:
        self._slots = slots
        numel = _assign_places(slots)
        param = slots[0].param
        self._moments = [torch.zeros(numel, dtype=param.dtype, device=param.device) for _ in _MOMENTS]
        self._runs: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}

    def moments(self, slot: Slot) -> dict[str, Tensor]:
        """The moments of one parameter, in its shape."""
        here = slice(slot.place, slot.place + slot.param.numel())
        return {name: moment[here].view(slot.param.shape) for name, moment in zip(_MOMENTS, self._moments, strict=True)}

    def run(self, first: Slot, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
        """The parameters and the two moments from `start` to `stop` in a run that begins with `first`, flat."""
        if len(self._runs) > 4 * len(self._slots):
            self._runs.clear()  # which parameters have gradients changes all the time: do not collect every combination
        if (start, stop) not in self._runs:
            here = slice(first.place + start - first.start, first.place + stop - first.start)
            exp_avg, exp_avg_sq = (moment[here] for moment in self._moments)
            self._runs[start, stop] = _flat(first.param, start, stop), exp_avg, exp_avg_sq
        return self._runs[start, stop]


class Run:
    """Parameters that follow each other without a gap, with gradients that do so too, after the same steps."""

    def __init__(self, slot: Slot, grad: Tensor) -> None:
        self.first = self._last = slot
        self._history = slot.counts.history[slot.row]
        self._given, self._grad = grad, grad.contiguous()
        self._address, self._itemsize = self._grad.data_ptr(), self._grad.element_size()
        # Elements from the start of the first gradient to the end of its storage: what lies there is one buffer.
        self._offset = int(self._grad.storage_offset())
        self._reach = _storage_numel(self._grad) - self._offset

    def extend(self, slot: Slot, grad: Tensor) -> bool:
        """Take `slot` in if it belongs here."""
        first, last = self.first, self._last
        fits = (
            slot.start == last.stop
            and slot.arena is last.arena
            and slot.counts.history[slot.row] == self._history
            and grad.data_ptr() == self._address + (slot.start - first.start) * self._itemsize
            and slot.end - first.start <= self._reach
            and grad.dtype == self._grad.dtype
            and grad.is_contiguous()
        )
        if fits:
            self._last = slot
        return fits

    def pieces(self, addresses: set[int]) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Yield parameters, gradients and both moments, flat, each to be stepped before the next is asked for.

        That is the run whole if its gradient has padding too. If it has none, its memory ends or another gradient lies
        there (`addresses` are where gradients start): then what reaches into the last 32 elements is stepped by itself,
        with a padded copy of its gradient.
        """
        start, end, stop = self.first.start, self._last.end, self._last.stop
        padding = range(self._address + (end - start) * self._itemsize, self._address + (stop - start) * self._itemsize)
        padded = stop - start <= self._reach and not any(place in addresses for place in padding[:: self._itemsize])
        body = stop if padded or stop == end else start + (end - start) // ALIGN * ALIGN
        if body > start:
            yield self._piece(start, body, _flat(self._grad, self._offset, self._offset + body - start))
        if body < stop:
            ours = _flat(self._grad, self._offset + body - start, self._offset + end - start)
            copy = ours.new_zeros(stop - body)
            copy[: end - body] = ours
            yield self._piece(body, stop, copy)
            ours.copy_(copy[: end - body])  # the step may have divided it by a scale

    def _piece(self, start: int, stop: int, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        param, exp_avg, exp_avg_sq = self.first.arena.run(self.first, start, stop)
        return param, grad, exp_avg, exp_avg_sq

    def give_back(self) -> None:
        """Write a gradient that was copied to be contiguous back to where it came from."""
        if self._grad is not self._given:
            self._given.copy_(self._grad)


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


def place(slots: Sequence[Slot]) -> None:
    """Give each slot its padding and its moments.

    Raises:
        ValueError: two parameters share memory.
    """
    for neighbours in _by_storage(slots):
        _settle_borders(neighbours)
        arena = Arena(neighbours)
        for slot in neighbours:
            slot.arena = arena
            slot.state = {"step": slot.counts.steps[slot.row], **arena.moments(slot)}


def check_state(param: Tensor, state: dict[str, Any] | None) -> None:
    """Refuse what is not this optimizer's state. An empty one is: that of a parameter before its first step.

    Raises:
        ValueError: the entries, or the shape of a moment, are not those of AdamW for `param`.
    """
    if not state:
        return
    if set(state) != set(_STATE):
        raise ValueError(f"AdamW: the state of a parameter must be {', '.join(_STATE)}, got {', '.join(state)}")
    for name in _MOMENTS:
        if state[name].shape != param.shape:
            raise ValueError(f"AdamW: {name} has shape {tuple(state[name].shape)}, its parameter {tuple(param.shape)}")


def _by_storage(slots: Sequence[Slot]) -> list[list[Slot]]:
    """The slots of each storage in the order of memory. Storages without memory (no elements) are not one storage."""
    storages: dict[Any, list[Slot]] = {}
    for index, slot in enumerate(slots):
        param = slot.param
        key = (param.untyped_storage().data_ptr() or -1 - index, param.dtype, param.device)
        storages.setdefault(key, []).append(slot)
    return [sorted(slots, key=lambda slot: (slot.start, slot.end)) for slots in storages.values()]


def _settle_borders(neighbours: list[Slot]) -> None:
    """Let each of the parameters of a storage, in the order of memory, have its padding."""
    for slot, following in pairwise(neighbours):
        if following.start < slot.end:
            raise ValueError(
                f"AdamW: the parameters of shapes {tuple(slot.param.shape)} and {tuple(following.param.shape)} "
                "share memory; give the optimizer one of them"
            )
        slot.include_padding(following.start)
    neighbours[-1].include_padding(round_up(neighbours[-1].end, ALIGN))


def _assign_places(slots: list[Slot]) -> int:
    """Close the gaps between `slots`, and keep side by side what is so; return how many elements that takes.

    What follows a gap starts at a multiple of 32: memory is then read 16 bytes at a time.
    """
    end, stop = 0, slots[0].start
    for slot in slots:
        slot.place = end if slot.start == stop else round_up(end, ALIGN)
        end, stop = slot.place + slot.stop - slot.start, slot.stop
    return round_up(end, ALIGN)


def _flat(tensor: Tensor, start: int, stop: int) -> Tensor:
    """Elements [start, stop) of the tensor's storage, outside of autograd."""
    return torch.as_strided(tensor.data, (stop - start,), (1,), start)


def _storage_numel(tensor: Tensor) -> int:
    return int(tensor.untyped_storage().nbytes()) // tensor.element_size()
