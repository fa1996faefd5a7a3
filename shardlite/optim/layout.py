"""Where an optimizer's shards and their moments lie in memory, and which of them one kernel call can step.

A shard is a view into a flat buffer. It starts at a multiple of 32 elements, and the zeros up to the next multiple
belong to it, in this buffer and in the buffer of gradients. Moments are stored in arenas, in the same order but
without gaps:

    shards    [ p0 p0 p0 0 | p1 p1 0 0 | .. .. .. .. | p2 p2 p2 p2 | p3 ... ]     padded to 32, drawn as 4
    moments   [ m0 m0 m0 0 | m1 m1 0 0 | m2 m2 m2 m2 | m3 ... ]
    rows      [     0      |     1     |      2      |   3    ]                   which step counts and scalars apply
    gradient       yes          yes          None       yes
    on a CPU  [       first run        ]             [ second ]                   one kernel call each
    on a GPU  [                   one run                     ]                   a table says that p2 is not stepped

A run is updated element by element, so its bits do not depend on how a buffer is cut into runs, with one exception:
PyTorch's CPU code rounds the last `n % 16` elements of a tensor differently. So runs end at multiples of 32.

All moments of an optimizer have one format (`shardlite_kernels.moments`). A group of 32 starts at a parameter or at a
cut between ranks, which is at a multiple of 32, so the content of a group does not depend on the rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import is_
from typing import Any

import torch
from shardlite_kernels import FORMATS, SCALE_BLOCK, State, decode, encode
from torch import Tensor

from shardlite.optim.counts import CountRow, Group, HostCounts, RunSlice, StepCounts, counts_for
from shardlite.params import ALIGN, ShardInfo, is_padded, round_up

_MOMENTS = ("exp_avg", "exp_avg_sq")
_EXPONENTS = ("exp_avg_exponent", "exp_avg_sq_exponent")


class OptimizerLayout:
    """The places of shards and their states, which do not change from step to step.

    A frozen shard keeps its place if it has a state. Parameters that are no shards have no place.
    """

    def __init__(self, groups: Sequence[Group], states: Mapping[Tensor, Any], moments: str) -> None:
        self._members: list[list[StateSlot]] = []
        number = 0
        for index, group in enumerate(groups):
            numbered = enumerate(group["params"], number)
            number += len(group["params"])
            shards = [(param, n) for n, param in numbered if ShardInfo.is_of(param)]
            self._members.append([StateSlot(p, index, n) for p, n in shards if p.requires_grad or states.get(p)])
        slots = [slot for members in self._members for slot in members]
        self.by_param = {slot.param: slot for slot in slots}
        for neighbours in _by_storage(slots):
            Arena(neighbours, moments)
        self.counts = _make_counts(slots)
        self.slots = sorted(slots, key=lambda slot: (id(slot.arena), slot.start, slot.end))

    def fits(self, groups: Sequence[Group]) -> bool:
        """Return whether `groups` hold the shards of this layout, and none of them has moved."""
        if len(groups) != len(self._members):
            return False
        for group, slots in zip(groups, self._members, strict=True):
            shards = [p for p in group["params"] if p in self.by_param or (p.requires_grad and ShardInfo.is_of(p))]
            if len(shards) != len(slots):
                return False
            for slot, param in zip(slots, shards, strict=True):
                if slot.param is not param or slot.address != param.data_ptr():
                    return False
        return True

    @torch.no_grad()
    def adopt(self, states: dict[Tensor, Any]) -> None:
        """Move all existing `states` of shards into the arenas."""
        for slot in self.slots:
            if states.get(slot.param) and not slot.holds(states[slot.param]):
                slot.adopt(states)

    def active(self, states: dict[Tensor, Any]) -> list[StateSlot]:
        """Return the trainable slots that have a gradient, after moving their states into the arenas."""
        slots = [slot for slot in self.slots if slot.param.requires_grad and slot.param.grad is not None]
        for slot in slots:
            check_dense(slot.param.grad)
            if not slot.holds(states.get(slot.param)):
                slot.adopt(states)
        return slots


class StateSlot:
    """The place of one shard in its storage, in elements, and of its state in the arenas."""

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
        self.end = self.start + param.numel()
        self.stop = self.start + round_up(param.numel(), ALIGN)  # with its padding

    def adopt(self, states: dict[Tensor, Any]) -> None:
        """Copy the entry of `states` for this shard (or zeros) into the arenas, and replace it by views of them."""
        given = states.get(self.param)
        check_state(self.param, given)
        if not given:
            for mine in self.state.values():
                mine.zero_()
        elif not self.holds(given):
            self._copy_from(given)
        states[self.param] = dict(self.state)

    def _copy_from(self, given: dict[str, Any]) -> None:
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


class Arena:
    """The moments of all shards in one storage: one buffer each, as long as the padded shards together."""

    rows: Tensor
    """[G], the row of each group of 32 elements; [0] if it is not used."""

    def __init__(self, slots: list[StateSlot], moments: str) -> None:
        self._slots = slots
        numel = 0
        for slot in slots:
            slot.arena, slot.arena_offset = self, numel
            numel += slot.stop - slot.start
        param = slots[0].param
        coded = moments == "int8"
        dtype = param.dtype if moments == "fp32" and slots[0].part.low is None else FORMATS[moments]
        self.avg = torch.zeros(numel, dtype=dtype, device=param.device)
        self.sq = torch.zeros(numel, dtype=torch.uint8 if coded else dtype, device=param.device)
        self.exponents = torch.zeros(2 if coded else 0, numel // SCALE_BLOCK, dtype=torch.uint8, device=param.device)
        self._runs: dict[tuple[int, int], tuple[State, Tensor]] = {}

    def fill_rows(self) -> None:
        """Compute the row of each group, for kernels and for stochastic rounding of moments."""
        if isinstance(self._slots[0].counts, HostCounts) and self.avg.dtype in (torch.float32, torch.float64):
            self.rows = torch.empty(0, dtype=torch.int16)
            return
        rows = torch.zeros(self.avg.numel() // SCALE_BLOCK, dtype=torch.int64)
        for slot in self._slots:
            stop = slot.arena_offset + slot.stop - slot.start
            rows[slot.arena_offset // SCALE_BLOCK : stop // SCALE_BLOCK] = slot.row
        narrow = len(self._slots[0].counts.steps) <= torch.iinfo(torch.int16).max
        self.rows = rows.to(self.avg.device, torch.int16 if narrow else torch.int32)

    def entry(self, slot: StateSlot) -> dict[str, Tensor]:
        """Return the optimizer state of one shard: moments in its shape, and their exponents."""
        avg, sq, *exponents = self.state(slot, slot.start, slot.end).codes()
        entry = {name: moment.view(slot.param.shape) for name, moment in zip(_MOMENTS, (avg, sq), strict=True)}
        return entry | {name: each for name, each in zip(_EXPONENTS, exponents, strict=True) if each is not None}

    def run(self, first: StateSlot, start: int, stop: int) -> tuple[State, Tensor]:
        """Return `state(first, start, stop)` and its rows, cached."""
        if len(self._runs) > 4 * len(self._slots):
            self._runs.clear()  # bounds the cache when the set of shards with gradients keeps changing
        run = self._runs.get((start, stop))
        if run is None:
            begin = first.arena_offset + start - first.start
            rows = self.rows[begin // SCALE_BLOCK : -(-(begin + stop - start) // SCALE_BLOCK)]
            run = self._runs[start, stop] = self.state(first, start, stop), rows
        return run

    def state(self, first: StateSlot, start: int, stop: int) -> State:
        """Return the flat tensors to step from `start` to `stop` in a contiguous run that begins with `first`."""
        begin = first.arena_offset + start - first.start
        end = begin + stop - start
        here, groups = slice(begin, end), slice(begin // SCALE_BLOCK, -(-end // SCALE_BLOCK))
        low = first.part.low
        if low is not None:
            low = _flat(low, first.low_start + start - first.start, first.low_start + stop - first.start)
        exponents = (each[groups] for each in self.exponents) if len(self.exponents) else (None, None)
        return State(_flat(first.param, start, stop), self.avg[here], self.sq[here], low, *exponents)


def _by_storage(slots: Sequence[StateSlot]) -> list[list[StateSlot]]:
    """Group slots by storage, in memory order. Empty storages are not merged."""
    storages: dict[Any, list[StateSlot]] = {}
    for index, slot in enumerate(slots):
        param = slot.param
        key = (param.untyped_storage().data_ptr() or -1 - index, param.dtype, param.device)
        storages.setdefault(key, []).append(slot)
    return [sorted(slots, key=lambda slot: (slot.start, slot.end)) for slots in storages.values()]


def _make_counts(slots: Sequence[StateSlot]) -> list[StepCounts]:
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
        arena.fill_rows()
    return made


# ---- runs -----------------------------------------------------------------------------------------------------------


def by_counts(slots: Sequence[StateSlot]) -> dict[StepCounts, list[int]]:
    """Return the rows of `slots` for each of the step counts."""
    rows: dict[StepCounts, list[int]] = {}
    for slot in slots:
        rows.setdefault(slot.counts, []).append(slot.row)
    return rows


def contiguous_runs(slots: Sequence[StateSlot]) -> Iterator[ContiguousRun]:
    """Group `slots`, in memory order, into contiguous runs. Slots without elements are skipped."""
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


class ContiguousRun:
    """Shards that one call can step, with gradients at the same distances in one buffer."""

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
            yield slice_of(self.first, start, body), _flat(self._grad, begin, begin + body - start)
        if body < stop:
            ours = _flat(self._grad, begin + body - start, begin + end - start)
            copy = ours.new_zeros(stop - body)
            copy[: end - body] = ours
            yield slice_of(self.first, body, stop), copy
            ours.copy_(copy[: end - body])  # the step may have divided it by a scale

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


def slice_of(first: StateSlot, start: int, stop: int) -> RunSlice:
    """Return elements `[start, stop)` of the storage, in a contiguous run that begins with `first`."""
    state, rows = first.arena.run(first, start, stop)
    return RunSlice(state, rows, first.arena_offset + start - first.start, first.row)


def _flat(tensor: Tensor, start: int, stop: int) -> Tensor:
    """View elements `[start, stop)` of the tensor's storage, outside of autograd."""
    return torch.as_strided(tensor.data, (stop - start,), (1,), start)


# ---- states ---------------------------------------------------------------------------------------------------------


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


def check_dense(grad: Tensor | None) -> None:
    """Raise a `ValueError` if a gradient is sparse."""
    if grad is not None and grad.layout is not torch.strided:
        raise ValueError(f"AdamW: gradients must be dense, got a {grad.layout} gradient")


def canonical(entry: Mapping[str, Any], device: torch.device | None = None) -> dict[str, Any]:
    """Return the state of one parameter with moments decoded to fp32, which is exact.

    Decoded moments are on `device`, or on their own device. A state that is not narrow is returned unchanged.
    """
    if not _is_narrow(entry):
        return dict(entry)
    avg, sq = (entry[name] for name in _MOMENTS)
    flats = decode(avg.reshape(-1), sq.reshape(-1), *(entry.get(name) for name in _EXPONENTS))
    moments = {name: m.view(avg.shape).to(device or m.device) for name, m in zip(_MOMENTS, flats, strict=True)}
    return {"step": entry["step"], **moments}


Decoder = tuple[Callable[..., Tensor], Sequence[Tensor]]
"""A function, and the tensors that it decodes."""


def decoders(entry: Mapping[str, Any]) -> dict[str, Decoder]:
    """Return what decodes each moment as `canonical` does, by name. Nothing if the state is not narrow."""
    if not _is_narrow(entry):
        return {}
    codes = {name: value for name, value in entry.items() if name != "step"}

    def decode(name: str, *given: Tensor) -> Tensor:
        moment: Tensor = canonical({"step": None, **dict(zip(codes, given, strict=True))})[name]
        return moment

    return {name: (partial(decode, name), list(codes.values())) for name in _MOMENTS}


def _is_narrow(entry: Mapping[str, Any]) -> bool:
    return entry[_MOMENTS[0]].dtype in (torch.bfloat16, torch.int8)
