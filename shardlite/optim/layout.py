"""Memory layout of an optimizer's shards and moments, and the runs of shards that one kernel call can step.

A shard is a view into a flat buffer, and starts at a multiple of 32 elements. The zeros from the end of a shard to the
next multiple of 32 are the shard's padding. The buffer of gradients has the same padding. Moments are stored in buffers
called arenas, in the order of the shards, padded but without the gaps between shards:

    shards    [ p0 p0 p0 0 | p1 p1 0 0 | .. .. .. .. | p2 p2 p2 p2 | p3 ... ]     padded to 32, drawn as 4
    moments   [ m0 m0 m0 0 | m1 m1 0 0 | m2 m2 m2 m2 | m3 ... ]
    rows      [     0      |     1     |      2      |   3    ]                   index of step counts and scalars
    gradient       yes          yes          None       yes
    on a CPU  [       first run        ]             [ second ]                   one kernel call each
    on a GPU  [                   one run                     ]                   a table excludes p2 from the step

A run is a sequence of shards that one kernel call steps. Each element is updated alone, so the bits do not depend on
how a buffer is cut into runs. There is one exception: PyTorch's CPU code rounds the last `n % 16` elements of a tensor
differently. So runs end at multiples of 32.

All moments of an optimizer have one format (`shardlite_kernels.moments`). A group of 32 elements starts at a parameter
or at a cut between ranks. Cuts are at multiples of 32, so the elements of a group do not depend on the rank.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import count
from operator import is_
from typing import Any, NamedTuple, TypeVar

import torch
from shardlite_kernels import FORMATS, SCALE_BLOCK, State, use_triton
from shardlite_kernels.moments import encode
from torch import Tensor

from shardlite.errors import LayoutError
from shardlite.optim.counts import Amp, DeviceCounts, Group, HostCounts, RunSlice, StepCounts
from shardlite.optim.entries import EXPONENTS, MOMENTS, canonical, check_dense, check_state
from shardlite.optim.offload import OffloadedSteps
from shardlite.params import ALIGN, HostStates, ShardInfo, as_real, round_up
from shardlite.params.layout import PADDED, is_padded
from shardlite.params.parameters import begin_step, late


class OptimizerLayout:
    """The places of shards and of their states, which do not change from step to step.

    A frozen shard has a place if it has a state. Parameters that are not shards have no place.
    """

    def __init__(self, groups: Sequence[Group], states: Mapping[Tensor, Any], moments: str) -> None:
        numbers = count()
        numbered = [[(param, next(numbers)) for param in group["params"]] for group in groups]
        members = [
            [StateSlot(p, i, n) for p, n in params if ShardInfo.is_of(p) and (p.requires_grad or states.get(p))]
            for i, params in enumerate(numbered)
        ]
        self._places = [[(id(slot.param), slot.param.data_ptr()) for slot in slots] for slots in members]
        slots = [slot for slots in members for slot in slots]
        self.by_id = {id(slot.param): slot for slot in slots}  # the hash of a tensor is computed in Python
        self.arenas = [Arena(each, moments) for each in _grouped(slots, StateSlot.storage)]
        arenas = [(arena.states.device, arena.nbytes) for arena in self.arenas if arena.states is not None]
        if len({device for device, _ in arenas}) > 1:
            raise LayoutError("AdamW: offloaded states of models on several GPUs: use one optimizer for each GPU")
        self.offloaded = OffloadedSteps(arenas[0][0], max(nbytes for _, nbytes in arenas)) if arenas else None
        self.arenas.sort(key=lambda arena: -1 if arena.states is None else arena.slots[0].start)  # as the forward runs
        self.slots = [slot for arena in self.arenas for slot in arena.slots]
        self.counts = [_make_counts(each) for each in _grouped(slots, lambda slot: slot.param.device)]
        self._runs: dict[bool, tuple[object, list[_Run]]] = {}  # of the latest step, after what they depend on
        self.stretches: dict[StateSlot, tuple[object, list[Stretch]]] = {}
        """For steps inside a backward, by the first slot of a flat: the stretches, after what they depend on."""
        for arena in self.arenas:
            arena.fill_rows()

    def fits(self, groups: Sequence[Group]) -> bool:
        """Return whether `groups` hold the shards of this layout and no shard has moved."""
        known = self.by_id
        shards = [
            [p for p in group["params"] if id(p) in known or (p.requires_grad and ShardInfo.is_of(p))]
            for group in groups
        ]
        return self._places == [[(id(param), param.data_ptr()) for param in params] for params in shards]

    @torch.no_grad()
    def adopt(self, slots: Iterable[StateSlot], states: dict[Tensor, Any]) -> None:
        """Copy the entries of `slots` in `states`, or zeros, into the arenas. Replace entries by views of the arenas.

        Entries that already consist of these views stay as they are. No function is called for them.
        """
        for slot in slots:
            given, views = states.get(slot.param), slot.state
            if not given or not all(map(is_, map(given.get, views), views.values())):
                slot.adopt(given, states)

    def begin_step(self, groups: Sequence[Group], active: Mapping[StepCounts, Sequence[int]], amp: Amp) -> None:
        """Prepare a step of the rows `active` of each count."""
        for counts, rows in active.items():
            counts.begin_step(groups, rows, amp)
        if self.offloaded is not None:
            self.offloaded.begin_step()

    def in_turn(self, slots: list[StateSlot]) -> list[tuple[AbstractContextManager[None], list[StateSlot]]]:
        """Return groups of slots in the order of their steps, each with a context manager that selects its stream."""
        later = [] if self.offloaded is None else [slot for slot in slots if slot.later]
        if not later:
            return [(nullcontext(), slots)]
        return [(nullcontext(), [slot for slot in slots if not slot.later]), (self._beside(later), later)]

    @contextmanager
    def _beside(self, slots: Sequence[StateSlot]) -> Iterator[None]:
        """Step `slots`, all of which are `later`, inside the block on a stream that the next forward runs beside."""
        assert self.offloaded is not None, "only steps of offloaded states may end later"
        used = [each for slot in slots for each in (slot.param, slot.param.grad, slot.arena.rows) if each is not None]
        try:
            with self.offloaded.beside(
                [*used, *(each for counts in {slot.counts for slot in slots} for each in counts.scalars())]
            ):
                yield
        finally:
            for slot in slots:
                begin_step(slot.param, slot.arena.states.wait_for_step)  # type: ignore[union-attr]

    def active(self, states: dict[Tensor, Any]) -> list[StateSlot]:
        """Move the states of trainable shards with a gradient into the arenas. Return the slots of these shards."""
        slots = [slot for slot in self.slots if slot.param.requires_grad and slot.param.grad is not None]
        check_dense([slot.param for slot in slots])
        self.adopt(slots, states)
        return slots

    def steps(self, slots: list[StateSlot], *, unscale: bool) -> Iterator[tuple[StepCounts, RunSlice, Tensor]]:
        """Yield the elements that one call can step, with their step counts and gradients.

        The caller must step these elements before it requests the next ones. From step to step the runs usually stay
        the same, although gradients are in new memory. So they are found again only if gradients are arranged
        differently.
        """
        grads = [slot.param.grad for slot in slots]  # `active` has selected slots with gradients
        real = [as_real(grad) if grad.is_complex() else grad for grad in grads if grad is not None]
        members = list(zip(slots, real, strict=True))
        together = [
            each.arrangement([slot.row for slot in slots if slot.counts is each])
            for each in dict.fromkeys([slot.counts for slot in slots])
        ]
        arrangement, later = (slots, _arrangement(real), together), bool(slots) and slots[0].later
        known = self._runs.get(later)
        if known is None or arrangement != known[0]:
            places = {id(slot): place for place, (slot, _) in enumerate(members)}
            found = runs(members, _in_one_buffer)
            ends = [_Run(run[0][0], run[-1][0], places[id(run[0][0])], places[id(run[-1][0])]) for run in found]
            self._runs[later] = known = arrangement, ends
        for run in known[1]:
            pieces, states = _pieces(run, members[run.start][1], members[run.end][1], unscale), run.first.arena.states
            if states is None:
                for elements, grad in pieces:
                    yield run.first.counts, elements, grad
            else:
                yield from self._offloaded_pieces(run.first.counts, states, pieces, later=later)
        # The kernels wrote through views, which have separate version counters.
        torch.autograd.graph.increment_version([slot.param for slot in slots])

    def _offloaded_pieces(
        self, counts: StepCounts, states: HostStates, pieces: Iterable[tuple[RunSlice, Tensor]], *, later: bool
    ) -> Iterator[tuple[StepCounts, RunSlice, Tensor]]:
        assert self.offloaded is not None, "an arena is in host memory"
        try:
            for elements, grad in pieces:
                for start, chunk in self.offloaded.chunks(states, elements):
                    yield counts, chunk, grad[start : start + chunk.state.param.numel()]
        finally:  # also after an interrupt, which may have changed weights
            if later:
                states.record_step()


class StateSlot:
    """The place of one shard in its storage, in elements, and the place of the shard's state in the arenas."""

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
        self.later = self.part.states is not None and self.part.states.waits
        """Whether readers of the shard wait for its step, so that the step may end later."""

        real = self.real
        self.start = int(real.storage_offset())
        self.low_start = 0 if self.part.low is None else int(self.part.low.storage_offset())
        self.end = self.start + real.numel()
        self.stop = self.start + round_up(real.numel(), ALIGN)  # the end of the padding

    @property
    def real(self) -> Tensor:
        """The shard as real numbers, outside of autograd."""
        return as_real(self.param.detach())

    def storage(self) -> tuple[int, torch.dtype, torch.device, int]:
        """Return a key of the shard's storage, and of its unit if that has states in host memory.

        Each empty storage has a separate key.
        """
        param = self.param
        return param.untyped_storage().data_ptr() or -1 - self.number, param.dtype, param.device, id(self.part.states)

    def adopt(self, given: dict[str, Any] | None, states: dict[Tensor, Any]) -> None:
        """Copy the entry `given`, or zeros, into the arenas. Make views of the arenas the shard's entry in `states`."""
        check_state(self.param, given)
        if self.arena.states is not None:
            self.arena.states.settle()
        if given:
            self._copy_from(given)
        else:
            for mine in self.state.values():
                mine.zero_()
        states[self.param] = dict(self.state)

    def _copy_from(self, given: dict[str, Any]) -> None:
        step = given["step"]
        if step is not self.state["step"]:
            self.state["step"].copy_(step) if isinstance(step, Tensor) else self.state["step"].fill_(step)
        values = canonical(given)
        mine = self.arena.state(self, self.start, self.end)
        if mine.exact:
            for name in MOMENTS:
                if given[name] is not self.state[name]:
                    self.state[name].copy_(values[name])
        else:
            m, v = (values[name].reshape(-1).to(mine.exp_avg.device, torch.float32) for name in MOMENTS)
            encode(m, v, *mine.codes(), random=None)


class Arena:
    """The moments of all shards in one storage: one buffer per moment, as long as all padded shards together."""

    rows: Tensor
    """The row of each group of 32 elements, [G]. Empty if kernels do not need the rows. `fill_rows` sets `rows`."""

    def __init__(self, slots: list[StateSlot], moments: str) -> None:
        self.slots = sorted(slots, key=lambda slot: (slot.start, slot.end))
        numel = 0
        for slot in self.slots:
            slot.arena, slot.arena_offset = self, numel
            numel += slot.stop - slot.start
        param = slots[0].param
        coded = moments == "int8"
        dtype = param.dtype.to_real() if moments == "fp32" and slots[0].part.low is None else FORMATS[moments]
        self.states, self._device = slots[0].part.states, param.device
        kinds = [
            (numel, dtype),
            (numel, torch.uint8 if coded else dtype),
            (2 * numel // SCALE_BLOCK * coded, torch.uint8),
        ]
        if self.states is None:
            memory = [torch.zeros(length, dtype=kind, device=param.device) for length, kind in kinds]
        else:
            nbytes = [length * kind.itemsize for length, kind in kinds]
            block = self.states.zeros(sum(nbytes), torch.uint8)
            memory = [each.view(kind) for each, (_, kind) in zip(torch.split(block, nbytes), kinds, strict=True)]
        self.avg, self.sq, exponents = memory
        self.exponents = exponents.view(2 * coded, numel // SCALE_BLOCK)
        self._slices: dict[tuple[int, int, int], RunSlice] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of states that a step reads, apart from the weights that are gathered."""
        low = self.slots[0].part.low
        return self.avg.nbytes + self.sq.nbytes + self.exponents.nbytes + (0 if low is None else self.avg.numel())

    def fill_rows(self) -> None:
        """Compute the row of each group. Kernels and stochastic rounding of moments need the rows."""
        if isinstance(self.slots[0].counts, HostCounts) and self.avg.dtype in (torch.float32, torch.float64):
            self.rows = torch.empty(0, dtype=torch.int16)
            return
        rows = torch.zeros(self.avg.numel() // SCALE_BLOCK, dtype=torch.int64)
        for slot in self.slots:
            stop = slot.arena_offset + slot.stop - slot.start
            rows[slot.arena_offset // SCALE_BLOCK : stop // SCALE_BLOCK] = slot.row
        narrow = len(self.slots[0].counts.steps) <= torch.iinfo(torch.int16).max
        self.rows = rows.to(self._device, torch.int16 if narrow else torch.int32)

    def entry(self, slot: StateSlot) -> dict[str, Tensor]:
        """Return the optimizer state of one shard: moments in the shard's shape, and their exponents."""
        avg, sq, *exponents = self.state(slot, slot.start, slot.end).codes()
        if slot.param.is_complex():
            avg, sq = (moment.view(slot.param.dtype) for moment in (avg, sq))
        entry = {name: moment.view(slot.param.shape) for name, moment in zip(MOMENTS, (avg, sq), strict=True)}
        entry |= {name: each for name, each in zip(EXPONENTS, exponents, strict=True) if each is not None}
        return entry if self.states is None else {name: late(each, self.states.settle) for name, each in entry.items()}

    def slice_of(self, first: StateSlot, start: int, stop: int) -> RunSlice:
        """Return elements `[start, stop)` of the storage, in a run that begins with `first`. Results are cached."""
        if len(self._slices) > 4 * len(self.slots):
            self._slices.clear()  # bounds the cache if the set of shards with gradients keeps changing
        key = first.row, start, stop
        if key not in self._slices:
            begin = first.arena_offset + start - first.start
            rows = self.rows[begin // SCALE_BLOCK : -(-(begin + stop - start) // SCALE_BLOCK)]
            self._slices[key] = RunSlice(self.state(first, start, stop), rows, begin, first.row)
        return self._slices[key]

    def state(self, first: StateSlot, start: int, stop: int) -> State:
        """Return the flat tensors of elements `[start, stop)` in a contiguous run that begins with `first`."""
        begin = first.arena_offset + start - first.start
        end = begin + stop - start
        here, groups = slice(begin, end), slice(begin // SCALE_BLOCK, -(-end // SCALE_BLOCK))
        low = first.part.low
        if low is not None:
            low = _flat(low, first.low_start + start - first.start, first.low_start + stop - first.start)
        exponents = (each[groups] for each in self.exponents) if len(self.exponents) else (None, None)
        return State(_flat(first.real, start, stop), self.avg[here], self.sq[here], low, *exponents)


def _grouped(slots: Iterable[StateSlot], key: Callable[[StateSlot], Hashable]) -> list[list[StateSlot]]:
    """Group slots by a key. Groups are in the order of their first slots."""
    groups: dict[Hashable, list[StateSlot]] = {}
    for slot in slots:
        groups.setdefault(key(slot), []).append(slot)
    return list(groups.values())


def _make_counts(slots: Sequence[StateSlot]) -> StepCounts:
    """Return the step counts of the slots on one device. Assign a row of the counts to each slot."""
    device = slots[0].param.device
    constants = [(slot.group, slot.number, slot.arena_offset - slot.part.offset) for slot in slots]
    fused = use_triton(slots[0].param)
    counts: StepCounts = DeviceCounts(constants, device) if fused else HostCounts(constants, device)
    for row, slot in enumerate(slots):
        slot.counts, slot.row = counts, row
        slot.state = {"step": counts.steps[row], **slot.arena.entry(slot)}
    return counts


# ---- runs -----------------------------------------------------------------------------------------------------------

Place = TypeVar("Place")


def runs(
    members: Iterable[tuple[StateSlot, Place]], goes_on: Callable[[StateSlot, Place, StateSlot, Place], bool]
) -> Iterator[list[tuple[StateSlot, Place]]]:
    """Group slots, in memory order, into runs that one call can step. Slots without elements are skipped.

    Each slot comes with the place of its gradient. `goes_on(last, last_place, slot, place)` returns whether the
    gradients of two slots are as far apart in memory as the slots.
    """
    run: list[tuple[StateSlot, Place]] = []
    for slot, place in members:
        if slot.start == slot.end:
            continue
        if run and not (_follows(slot, run[-1][0]) and goes_on(*run[-1], slot, place)):
            yield run
            run = []
        run.append((slot, place))
    if run:
        yield run


def _follows(slot: StateSlot, last: StateSlot) -> bool:
    """Return whether one call can step both slots. `slot` comes after the slot `last` in memory."""
    distance = slot.start - last.start
    return (
        slot.arena is last.arena
        and slot.arena_offset - last.arena_offset == distance
        and slot.low_start - last.low_start == (distance if slot.part.low is not None else 0)
        and slot.counts.together(last.row, slot.row, adjacent=slot.start == last.stop)
    )


class Stretch(NamedTuple):
    """Gradients in one buffer that one call can step: the first slot, and their range in the buffer."""

    first: StateSlot
    start: int
    stop: int


class _Run(NamedTuple):
    """A run: its first and its last slot, and the indices of these slots among all slots of the step."""

    first: StateSlot
    last: StateSlot
    start: int
    end: int


def _arrangement(grads: Sequence[Tensor]) -> list[tuple[object, ...]]:
    """Return all facts about gradients on which `_in_one_buffer` depends, up to the addresses of storages.

    Storages are numbered. No function of the library is called per gradient.
    """
    numbers: dict[int, int] = {}
    return [
        (
            numbers.setdefault(grad.untyped_storage()._cdata, len(numbers)),
            grad.storage_offset(),
            grad.dtype,
            grad.is_contiguous(),
            hasattr(grad, PADDED),
        )
        for grad in grads
    ]


def _in_one_buffer(last: StateSlot, last_grad: Tensor, slot: StateSlot, grad: Tensor) -> bool:
    """Return whether two gradients lie in one buffer as far apart as their slots, with only padding between them."""
    return (
        (slot.start == last.end or (is_padded(last_grad) and is_padded(grad)))
        and grad.data_ptr() == last_grad.data_ptr() + (slot.start - last.start) * grad.element_size()
        and grad.untyped_storage().data_ptr() == last_grad.untyped_storage().data_ptr()
        and grad.dtype == last_grad.dtype
        and grad.is_contiguous()
        and last_grad.is_contiguous()
    )


def _pieces(run: _Run, given: Tensor, last_grad: Tensor, unscale: bool) -> Iterator[tuple[RunSlice, Tensor]]:
    """Yield the pieces of a run, each with its gradient. The caller must step a piece before it requests the next.

    The gradients of the run's first and last slot are `given` and `last_grad`.

    If the gradient is padded, the run is one piece. Otherwise the elements after the last multiple of 32 are a separate
    piece, with a padded copy of their gradient.
    """
    first, last = run.first, run.last
    grad = given.contiguous()
    start, end, stop = first.start, last.end, last.stop
    begin = int(grad.storage_offset())
    padded = stop == end or (is_padded(last_grad) and last_grad.is_contiguous())
    body = stop if padded else start + (end - start) // ALIGN * ALIGN
    if body > start:
        yield first.arena.slice_of(first, start, body), _flat(grad, begin, begin + body - start)
    if body < stop:
        ours = _flat(grad, begin + body - start, begin + end - start)
        copy = ours.new_zeros(stop - body)
        copy[: end - body] = ours
        yield first.arena.slice_of(first, body, stop), copy
        ours.copy_(copy[: end - body])  # the step may have divided the gradient by a scale
    if unscale and grad is not given:
        given.copy_(grad)


def _flat(tensor: Tensor, start: int, stop: int) -> Tensor:
    """View elements `[start, stop)` of the tensor's storage, outside of autograd."""
    # `.detach()`, and not `.data`: a view of a shard's `.data` would refuse `shard.data = ...` of the program.
    return torch.as_strided(tensor.detach(), (stop - start,), (1,), start)
