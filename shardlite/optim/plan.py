"""The optimizer layout: slots of all parameters, and the contiguous runs of them that one kernel call can step.

    parameters  [ p0 p0 p0 0 | p1 p1 0 0 | p2 p2 p2 p2 | p3 ... ]     padded to 32, drawn as 4
    gradient         yes          yes          None      yes
    on a CPU    [       first run        ]             [ second ]     one kernel call each
    on a GPU    [                   one run                     ]     a table says that p2 is not stepped

A run is updated element by element, so its bits do not depend on how a buffer is cut into runs, with one exception:
PyTorch's CPU code rounds the last `n % 16` elements of a tensor differently. So runs end at multiples of 32 wherever
the buffer is long enough. A parameter with its own storage is a run of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor

from shardlite.optim.arena_slots import StateSlot, assign_arenas, flat
from shardlite.optim.step_counts import CountRow, Group, RunSlice, StepCounts, counts_for
from shardlite.params import ALIGN, is_padded


class ContiguousRun:
    """Parameters that one call can step, with gradients at the same distances in one buffer."""

    def __init__(self, slot: StateSlot, grad: Tensor) -> None:
        self.first = self._last = slot
        self._padded = is_padded(grad) and grad.is_contiguous()
        self._given, self._grad = grad, grad.contiguous()

    def extend(self, slot: StateSlot, grad: Tensor) -> bool:
        """Append `slot` if it continues the run, and only padding lies between its gradient and the last one."""
        distance, padded = (slot.start - self.first.start) * grad.element_size(), is_padded(grad)
        fits = (
            follows(slot, self._last)
            and ((self._padded and padded) or slot.start == self._last.end)
            and grad.data_ptr() == self._grad.data_ptr() + distance
            and grad.untyped_storage().data_ptr() == self._grad.untyped_storage().data_ptr()
            and grad.dtype == self._grad.dtype
            and grad.is_contiguous()
        )
        if fits:
            self._last, self._padded = slot, padded
        return fits

    def pieces(self) -> Iterator[tuple[RunSlice, Tensor]]:
        """Yield each piece to step with its gradient. Step each before requesting the next.

        If the gradient is padded, the run is one piece. Otherwise the part within the last 32 elements is a piece of
        its own, with a padded copy of its gradient.
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

    def _piece(self, start: int, stop: int, grad: Tensor) -> tuple[RunSlice, Tensor]:
        first = self.first
        state, rows = first.arena.run(first, start, stop)
        return RunSlice(state, rows, first.arena_offset + start - first.start, first.row), grad

    def give_back(self) -> None:
        """Copy a gradient that was made contiguous back to the given one."""
        if self._grad is not self._given:
            self._given.copy_(self._grad)


def follows(slot: StateSlot, last: StateSlot) -> bool:
    """Return whether one call can step `last` and `slot`, which is behind it in memory."""
    distance = slot.start - last.start
    return (
        slot.arena is last.arena
        and slot.arena_offset - last.arena_offset == distance
        and slot.low_start - last.low_start == (distance if slot.part.low is not None else 0)
        and slot.counts.together(last.row, slot.row, adjacent=slot.start == last.stop)
    )


def contiguous_runs(slots: Sequence[StateSlot]) -> Iterator[ContiguousRun]:
    """Group `slots`, in memory order, into contiguous runs. Slots without elements or gradient are skipped."""
    run = None
    for slot in slots:
        grad = slot.param.grad
        if grad is None or slot.start == slot.end:
            continue
        if run is None or not run.extend(slot, grad):
            if run is not None:
                yield run
            run = ContiguousRun(slot, grad)
    if run is not None:
        yield run


class OptimizerLayout:
    """The places of parameters and states, which do not change from step to step.

    A frozen parameter keeps its place if it has a state.
    """

    def __init__(self, groups: Sequence[Group], states: Mapping[Tensor, Any], moments: str) -> None:
        number = count()
        numbered = [[(param, next(number)) for param in group["params"]] for group in groups]
        self._members = [
            [StateSlot(param, index, n) for param, n in pairs if param.requires_grad or states.get(param)]
            for index, pairs in enumerate(numbered)
        ]
        slots = [slot for slots in self._members for slot in slots]
        self.by_param = {slot.param: slot for slot in slots}
        assign_arenas(slots, moments)
        self.counts = _number(slots)
        self.slots = sorted(slots, key=lambda slot: (id(slot.arena), slot.start, slot.end))

    def fits(self, groups: Sequence[Group]) -> bool:
        """Return whether `groups` hold the parameters of this layout, and none of them has moved."""
        if len(groups) != len(self._members):
            return False
        for group, slots in zip(groups, self._members, strict=True):
            params = [param for param in group["params"] if param.requires_grad or param in self.by_param]
            if len(params) != len(slots):
                return False
            for slot, param in zip(slots, params, strict=True):
                if slot.param is not param or slot.address != param.data_ptr():
                    return False
        return True

    @torch.no_grad()
    def adopt(self, states: dict[Tensor, Any]) -> None:
        """Move all existing `states` into the arenas."""
        for slot in self.slots:
            if states.get(slot.param) and not slot.holds(states[slot.param]):
                slot.adopt(states)


def _number(slots: Sequence[StateSlot]) -> list[StepCounts]:
    """Assign each slot a row of step counts on its device. Return the step counts."""
    by_device: dict[torch.device, list[StateSlot]] = {}
    for slot in slots:
        by_device.setdefault(slot.param.device, []).append(slot)
    made = []
    for device, neighbours in by_device.items():
        rows = [CountRow(slot.group, slot.number, slot.arena_offset - slot.part.offset) for slot in neighbours]
        counts = counts_for(neighbours[0].param)(rows, device)
        made.append(counts)
        for row, slot in enumerate(neighbours):
            slot.counts, slot.row = counts, row
            slot.state = {"step": counts.steps[row], **slot.arena.entry(slot)}
    for arena in {id(slot.arena): slot.arena for slot in slots}.values():
        arena.name_rows()
    return made


def active(slots: Sequence[StateSlot], states: dict[Tensor, Any]) -> list[StateSlot]:
    """Return the slots that are trainable and have a gradient, after moving their states into the arenas."""
    active = [slot for slot in slots if slot.param.requires_grad and slot.param.grad is not None]
    for slot in active:
        if slot.param.grad.layout is not torch.strided:  # type: ignore[union-attr]
            raise ValueError(f"AdamW: gradients must be dense, got a {slot.param.grad.layout} gradient")  # type: ignore[union-attr]
        if not slot.holds(states.get(slot.param)):
            slot.adopt(states)
    return active


def by_counts(stepped: Sequence[StateSlot]) -> dict[StepCounts, list[int]]:
    """Return the rows of `stepped` for each of the step counts."""
    rows: dict[StepCounts, list[int]] = {}
    for slot in stepped:
        rows.setdefault(slot.counts, []).append(slot.row)
    return rows


def update(stepped: Sequence[StateSlot], unscale: bool, bad: Tensor | None = None) -> None:
    """Step the slots, run by run. `bad` [], int32, becomes 1 if a gradient is not finite."""
    for run in contiguous_runs(stepped):
        for stretch, grad in run.pieces():
            run.first.counts.update(stretch, grad, bad)
        if unscale:
            run.give_back()
