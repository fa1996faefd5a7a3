"""What an optimizer has found out about its parameters, and one step of some of them by their gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor

from shardlite.optim.arena_slots import Slot, place
from shardlite.optim.runs import runs
from shardlite.optim.step_counts import Group, Row, StepCounts, Stretch, counts_for


class Plan:
    """What stays the same from step to step: where parameters lie, in which order, and where their states are.

    A parameter that is frozen keeps its place if it has a state.
    """

    def __init__(self, groups: Sequence[Group], states: Mapping[Tensor, Any], moments: str) -> None:
        number = count()
        numbered = [[(param, next(number)) for param in group["params"]] for group in groups]
        self._members = [
            [Slot(param, index, n) for param, n in pairs if param.requires_grad or states.get(param)]
            for index, pairs in enumerate(numbered)
        ]
        slots = [slot for slots in self._members for slot in slots]
        self.by_param = {slot.param: slot for slot in slots}
        place(slots, moments)
        self.counts = _number(slots)
        self.slots = sorted(slots, key=lambda slot: (id(slot.arena), slot.start, slot.end))

    def fits(self, groups: Sequence[Group]) -> bool:
        """Whether `groups` have the parameters that this plan was made for, and none of them has moved."""
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
        """Move all `states` that exist into the arenas."""
        for slot in self.slots:
            if states.get(slot.param) and not slot.holds(states[slot.param]):
                slot.adopt(states)


def _number(slots: Sequence[Slot]) -> list[StepCounts]:
    """Give each slot a row of step counts on the device that steps it, and return these."""
    by_device: dict[torch.device, list[Slot]] = {}
    for slot in slots:
        by_device.setdefault(slot.param.device, []).append(slot)
    made = []
    for device, neighbours in by_device.items():
        rows = [Row(slot.group, slot.number, slot.place - slot.part.offset) for slot in neighbours]
        counts = counts_for(neighbours[0].param)(rows, device)
        made.append(counts)
        for row, slot in enumerate(neighbours):
            slot.counts, slot.row = counts, row
            slot.state = {"step": counts.steps[row], **slot.arena.entry(slot)}
    for arena in {id(slot.arena): slot.arena for slot in slots}.values():
        arena.name_rows()
    return made


def active(slots: Sequence[Slot], states: dict[Tensor, Any]) -> list[Slot]:
    """Those of `slots` that are trainable and have a gradient. Their states are in the arenas then."""
    active = [slot for slot in slots if slot.param.requires_grad and slot.param.grad is not None]
    for slot in active:
        if slot.param.grad.layout is not torch.strided:  # type: ignore[union-attr]
            raise ValueError(f"AdamW: gradients must be dense, got a {slot.param.grad.layout} gradient")  # type: ignore[union-attr]
        if not slot.holds(states.get(slot.param)):
            slot.adopt(states)
    return active


def by_counts(stepped: Sequence[Slot]) -> dict[StepCounts, list[int]]:
    """The rows of `stepped` in each of the step counts."""
    rows: dict[StepCounts, list[int]] = {}
    for slot in stepped:
        rows.setdefault(slot.counts, []).append(slot.row)
    return rows


def update(stepped: Sequence[Slot], unscale: bool, bad: Tensor | None = None) -> None:
    """Step the slots, run by run; `bad` [], int32, becomes 1 if a gradient is not finite."""
    for run in runs(stepped):
        for state, grad, begin in run.pieces():
            rows = run.first.arena.rows_of(begin, state)
            run.first.counts.update(Stretch(state, rows, begin, run.first.row), grad, bad)
        if unscale:
            run.give_back()
