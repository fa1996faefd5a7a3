"""Slots: the places of an optimizer's parameters and moments in memory.

A parameter of `ShardLite` is a view into a flat buffer. It starts at a multiple of 32 elements, and the zeros up to the
next multiple belong to it, in this buffer and in the gradients' buffer. Moments are stored in separate arenas in the
same order, without the gaps between parameters (a full buffer also holds other ranks' parts):

    parameters  [ p0 p0 p0 0 | p1 p1 0 0 | .. .. .. .. | p2 p2 p2 p2 | p3 ... ]     padded to 32, drawn as 4
    moments     [ m0 m0 m0 0 | m1 m1 0 0 | m2 m2 m2 m2 | m3 ... ]
    rows        [     0      |     1     |      2      |   3    ]                   which step counts and scalars apply

All moments of an optimizer have one format (`shardlite_kernels.moments`). A group of 32 starts at a parameter or at a
cut between ranks, which is at a multiple of 32, so the content of a group does not depend on the rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from operator import is_
from typing import Any

import torch
from shardlite_kernels import FORMATS, SCALE_BLOCK, State, decode, encode
from torch import Tensor

from shardlite.optim.step_counts import HostCounts, StepCounts
from shardlite.params import ALIGN, ShardInfo, round_up

_MOMENTS = ("exp_avg", "exp_avg_sq")
_EXPONENTS = ("exp_avg_exponent", "exp_avg_sq_exponent")


class StateSlot:
    """The place of one parameter in its storage, in elements, and of its state in the arenas."""

    __slots__ = (
        *("address", "arena", "arena_offset", "counts", "end", "group", "low_start", "number", "param", "part", "row"),
        *("start", "state", "stop"),
    )

    arena: Arena
    counts: StepCounts
    arena_offset: int  # offset of the moments in the arena
    row: int  # index into the step counts
    state: dict[str, Tensor]

    def __init__(self, param: Tensor, group: int, number: int) -> None:
        self.param = param
        self.group = group
        self.number = number  # index among all parameters of the optimizer
        self.part = ShardInfo.of(param)
        self.address = param.data_ptr()
        self.start = int(param.storage_offset())
        self.low_start = 0 if self.part.low is None else int(self.part.low.storage_offset())
        self.end = self.stop = self.start + param.numel()  # `stop` may grow to include padding

    def adopt(self, states: dict[Tensor, Any]) -> None:
        """Copy the entry of `states` for this parameter (or zeros) into the arenas, and replace it by views of them."""
        given = states.get(self.param)
        check_state(self.param, given)
        if not given:
            for mine in self.state.values():
                mine.zero_()
        elif not self.holds(given):
            self._take(given)
        states[self.param] = dict(self.state)

    def _take(self, given: dict[str, Any]) -> None:
        step = given["step"]
        if step is not self.state["step"]:
            self.state["step"].copy_(step) if isinstance(step, Tensor) else self.state["step"].fill_(step)
        values = canonical(given)
        mine = self.arena.state(self, self.start, self.end)
        if mine.exact:
            for name in _MOMENTS:
                if given[name] is not self.state[name]:
                    self.state[name].copy_(values[name])
        else:
            m, v = (values[name].reshape(-1).to(self.param.device, torch.float32) for name in _MOMENTS)
            encode(m, v, *mine.codes(), random=None)

    def holds(self, state: dict[str, Any] | None) -> bool:
        """Return whether `state` consists of views of the arenas, so exists and was not replaced from outside."""
        mine = self.state
        return bool(state) and all(map(is_, map(state.get, mine), mine.values()))  # type: ignore[union-attr]

    def include_padding(self, next_start: int) -> None:
        """Extend `stop` to the next multiple of 32 if that memory is in the storage, in no parameter, and zero."""
        stop = min(round_up(self.end, ALIGN), next_start, storage_numel(self.param))
        if self.start % ALIGN == 0 and stop > self.end and not flat(self.param, self.end, stop).any():
            self.stop = stop


class Arena:
    """The moments of all parameters in one storage: one buffer each, as long as the padded parameters together."""

    rows: Tensor
    """[G], the row of each group of 32 elements; [0] if it is not used."""

    def __init__(self, slots: list[StateSlot], moments: str) -> None:
        self._slots = slots
        numel = _assign_places(slots)
        param = slots[0].param
        coded = moments == "int8"
        dtype = param.dtype if moments == "fp32" and slots[0].part.low is None else FORMATS[moments]
        self.avg = torch.zeros(numel, dtype=dtype, device=param.device)
        self.sq = torch.zeros(numel, dtype=torch.uint8 if coded else dtype, device=param.device)
        self.exponents = torch.zeros(2 if coded else 0, numel // SCALE_BLOCK, dtype=torch.uint8, device=param.device)
        self._runs: dict[tuple[int, int], tuple[State, Tensor]] = {}

    def name_rows(self) -> None:
        """Compute the row of each group, for kernels and for stochastic rounding of moments."""
        if isinstance(self._slots[0].counts, HostCounts) and self.avg.dtype in (torch.float32, torch.float64):
            self.rows = torch.empty(0, dtype=torch.int16)
            return
        rows = torch.zeros(self.avg.numel() // SCALE_BLOCK, dtype=torch.int64)
        for slot in self._slots:
            stop = slot.arena_offset + slot.stop - slot.start
            rows[slot.arena_offset // SCALE_BLOCK : -(-stop // SCALE_BLOCK)] = slot.row
        narrow = len(self._slots[0].counts.steps) <= torch.iinfo(torch.int16).max
        self.rows = rows.to(self.avg.device, torch.int16 if narrow else torch.int32)

    def _rows_of(self, begin: int, state: State) -> Tensor:
        """Return the rows [G] of the elements of `state`, which starts at `begin`."""
        return self.rows[begin // SCALE_BLOCK : -(-(begin + state.param.numel()) // SCALE_BLOCK)]

    def entry(self, slot: StateSlot) -> dict[str, Tensor]:
        """Return the optimizer state of one parameter: moments in its shape, and their exponents."""
        here = self.state(slot, slot.start, slot.end)
        avg, sq, *exponents = here.codes()
        entry = {name: moment.view(slot.param.shape) for name, moment in zip(_MOMENTS, (avg, sq), strict=True)}
        return entry | {name: each for name, each in zip(_EXPONENTS, exponents, strict=True) if each is not None}

    def run(self, first: StateSlot, start: int, stop: int) -> tuple[State, Tensor]:
        """Return `state(first, start, stop)` and its rows, cached."""
        if len(self._runs) > 4 * len(self._slots):
            self._runs.clear()  # bounds the cache when the set of parameters with gradients keeps changing
        run = self._runs.get((start, stop))
        if run is None:
            state = self.state(first, start, stop)
            rows = self._rows_of(first.arena_offset + start - first.start, state)
            run = self._runs[start, stop] = state, rows
        return run

    def state(self, first: StateSlot, start: int, stop: int) -> State:
        """Return the flat tensors to step from `start` to `stop` in a contiguous run that begins with `first`."""
        begin = first.arena_offset + start - first.start
        end = begin + stop - start
        here, groups = slice(begin, end), slice(begin // SCALE_BLOCK, -(-end // SCALE_BLOCK))
        low = first.part.low
        if low is not None:
            low = flat(low, first.low_start + start - first.start, first.low_start + stop - first.start)
        exponents = (each[groups] for each in self.exponents) if len(self.exponents) else (None, None)
        return State(flat(first.param, start, stop), self.avg[here], self.sq[here], low, *exponents)


def canonical(entry: Mapping[str, Any], device: torch.device | None = None) -> dict[str, Any]:
    """Return the state of one parameter with moments decoded to fp32, which is exact.

    Decoded moments are on `device`, or on their own device. A state that is not narrow is returned unchanged.
    """
    avg, sq = (entry[name] for name in _MOMENTS)
    if avg.dtype in (torch.bfloat16, torch.int8):
        flats = decode(avg.reshape(-1), sq.reshape(-1), *(entry.get(name) for name in _EXPONENTS))
        entry = {"step": entry["step"]}
        entry |= {name: m.view(avg.shape).to(device or m.device) for name, m in zip(_MOMENTS, flats, strict=True)}
    return dict(entry)


Decoder = tuple[Callable[..., Tensor], Sequence[Tensor]]
"""A function, and the tensors that it decodes."""


def decoders(entry: Mapping[str, Any]) -> dict[str, Decoder]:
    """Return what decodes each moment as `canonical` does, by name. Nothing if the state is not narrow."""
    if entry[_MOMENTS[0]].dtype not in (torch.bfloat16, torch.int8):
        return {}
    codes = {name: value for name, value in entry.items() if name != "step"}

    def decode(name: str, *given: Tensor) -> Tensor:
        moment: Tensor = canonical({"step": None, **dict(zip(codes, given, strict=True))})[name]
        return moment

    return {name: (partial(decode, name), list(codes.values())) for name in _MOMENTS}


def assign_arenas(slots: Sequence[StateSlot], moments: str) -> None:
    """Assign each slot its padding, and memory for its moments in the given format.

    Raises:
        ValueError: two parameters share memory.
    """
    for neighbours in _by_storage(slots):
        _settle_borders(neighbours)
        arena = Arena(neighbours, moments)
        for slot in neighbours:
            slot.arena = arena


def check_state(param: Tensor, state: dict[str, Any] | None) -> None:
    """Check the state of `param`. An empty state is valid: that of a parameter before its first step.

    Raises:
        ValueError: the entries or the shape of a moment differ from those of AdamW for `param`.
    """
    if not state:
        return
    names = {"step", *_MOMENTS}
    if set(state) not in (names, names | set(_EXPONENTS)):
        raise ValueError(f"AdamW: the state of a parameter must be step, {', '.join(_MOMENTS)}, got {', '.join(state)}")
    for name in _MOMENTS:
        if state[name].shape != param.shape:
            raise ValueError(f"AdamW: {name} has shape {tuple(state[name].shape)}, its parameter {tuple(param.shape)}")


def _by_storage(slots: Sequence[StateSlot]) -> list[list[StateSlot]]:
    """Group slots by storage, in memory order. Empty storages are not merged."""
    storages: dict[Any, list[StateSlot]] = {}
    for index, slot in enumerate(slots):
        param = slot.param
        key = (param.untyped_storage().data_ptr() or -1 - index, param.dtype, param.device)
        storages.setdefault(key, []).append(slot)
    return [sorted(slots, key=lambda slot: (slot.start, slot.end)) for slots in storages.values()]


def _settle_borders(neighbours: list[StateSlot]) -> None:
    """Assign padding to each parameter of one storage; `neighbours` are in memory order."""
    for slot, following in pairwise(neighbours):
        if following.start < slot.end:
            raise ValueError(
                f"AdamW: the parameters of shapes {tuple(slot.param.shape)} and {tuple(following.param.shape)} "
                "share memory; give the optimizer one of them"
            )
        slot.include_padding(following.start)
    neighbours[-1].include_padding(round_up(neighbours[-1].end, ALIGN))


def _assign_places(slots: list[StateSlot]) -> int:
    """Assign a place in the arena to each slot, without gaps. Return the number of elements needed.

    Each place is a multiple of 32, so that a group of 32 belongs to one parameter.
    """
    end = 0
    for slot in slots:
        slot.arena_offset = round_up(end, ALIGN)
        end = slot.arena_offset + slot.stop - slot.start
    return round_up(end, ALIGN)


def flat(tensor: Tensor, start: int, stop: int) -> Tensor:
    """View elements `[start, stop)` of the tensor's storage, outside of autograd."""
    return torch.as_strided(tensor.data, (stop - start,), (1,), start)


def storage_numel(tensor: Tensor) -> int:
    """Return how many elements the tensor's storage can hold."""
    return int(tensor.untyped_storage().nbytes()) // tensor.element_size()
