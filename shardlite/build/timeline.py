"""Predict the memory of a step: full weights, gradient buckets, gradients and the program's own tensors.

In: a `Budget`, and the events of one forward and backward (`Event`). Out: a `Course`: the peak of memory by purpose,
and the operations in their order, with the computation between them. Nothing is allocated and no clock is read.

When a reduction ends depends on the timing of a run. The caller chooses between two bounds. By default each ends when
something must wait for it, so a run holds no more. With `prompt` each ends before the next gradient, so a run holds no
less.

Full weights follow the policy of the library itself. Buckets follow the rules of `grads/`, for ranks that have agreed
on an order. A program's events may be recorded by a trace. `plain_events` are those of a chain of units without
activations.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from shardlite.build.budget import HELD, Budget
from shardlite.params import BUCKETS
from shardlite.weights import BufferPolicy, GatherOrder, Space, UnitSize

ACTIVATIONS = "activations"
"""The program's own tensors, gradients on their way included."""

_STEPS = 3
"""Steps until orders are recorded and the buffers that a GPU keeps are at rest, see `docs/memory.md`."""


class Kind(Enum):
    """What happens in a program."""

    ENTER = "enter"  # full weights of a unit are used from here on
    LEAVE = "leave"  # this use ends
    GRADIENT = "gradient"  # autograd delivers one gradient
    BACKWARD = "backward"  # the backward begins
    END = "end"  # it is over: what is left is reduced, then the optimizer steps


class Event(NamedTuple):
    """One event, with the memory of the program's own tensors and its work since the event before."""

    kind: Kind
    unit: int = -1
    nbytes: int = 0
    """Of the gradient, as autograd made it."""

    most: int = 0
    """Peak since the event before, in bytes."""

    now: int = 0
    """Bytes at this event, without the gradient."""

    flops: float = 0.0
    """Floating-point operations since the event before."""


class Action(NamedTuple):
    """One operation, or computation, in the order in which the host starts them."""

    name: str
    """`compute`, `gather`, `need` (waits for the gather), `reduce`, `land` (waits for the reduction) or `step`."""

    unit: int = -1
    flops: float = 0.0


@dataclass
class Course:
    """Memory and operations of one step."""

    peak: dict[str, int] = field(default_factory=dict)
    """Bytes by purpose at the peak of all purposes together."""

    most: dict[str, int] = field(default_factory=dict)
    """Peak of each purpose by itself."""

    actions: list[Action] = field(default_factory=list)

    @property
    def total(self) -> int:
        """Peak of all purposes together."""
        return sum(self.peak.values())


def course_of(budget: Budget, events: Sequence[Event], *, prompt: bool = False) -> Course:
    """Replay the events of a step, and return its course once buffers are at rest.

    With `prompt`, each reduction ends before the next gradient, else when something must wait for it.
    """
    timeline = _Timeline(budget, events, prompt)
    for _ in range(_STEPS):
        timeline.run()
    return timeline.course


def plain_events(budget: Budget) -> Iterator[Event]:
    """Yield the events of a chain of units: forward in order of registration, backward in reverse, the root around."""
    roots = [i for i, unit in enumerate(budget.units) if unit.is_root]
    chain = [i for i, unit in enumerate(budget.units) if not unit.is_root]
    yield from (Event(Kind.ENTER, i) for i in roots)
    for i in chain:
        yield from (Event(Kind.ENTER, i), Event(Kind.LEAVE, i))
    yield from (Event(Kind.LEAVE, i) for i in roots)
    yield Event(Kind.BACKWARD)
    for i in [*reversed(chain), *roots]:
        yield from (Event(Kind.ENTER, i), Event(Kind.LEAVE, i))
        yield from (Event(Kind.GRADIENT, i) for _ in range(budget.units[i].params))
    yield Event(Kind.END)


class _Weights:
    """Which units have full weights at stage 3."""

    def __init__(self, budget: Budget) -> None:
        recipe, order = budget.recipe, GatherOrder()
        sizes = [UnitSize(unit.full, unit.is_root, unit.keep_unsharded) for unit in budget.units]
        self._policy = BufferPolicy(sizes, order, Space, prefetch=recipe.options.prefetch, keeps=recipe.on_gpu)
        self._order = order
        self._saves_memory = recipe.saves_memory
        self._users = [0] * len(sizes)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, spare ones included."""
        return sum(buffer.nbytes for buffer in (*self._policy.buffers.values(), *self._policy.spare()))

    def begin(self, *, backward: bool) -> None:
        """Begin a pass. What was gathered ahead and never used is idle from here on."""
        self._policy.begin_pass()
        self._order.begin("backward" if backward else "forward", final=backward)
        for unit in [each for each in self._policy.buffers if each not in self._policy.idle]:
            if self._users[unit] == 0:
                self._evict_all(self._policy.end_use(unit))
        if backward and self._saves_memory:
            self._evict_all(self._policy.stop_prefetching())

    def enter(self, unit: int) -> list[int]:
        """Use a unit; return what is gathered for that and ahead."""
        gathered = []
        if self._users[unit] == 0:
            if unit not in self._policy.buffers:
                gathered.append(self._gather(unit))
            self._policy.begin_use(unit)
            gathered += map(self._gather, self._policy.next_gathers(self._policy.buffers.__contains__, lambda _: True))
        self._users[unit] += 1
        return gathered

    def leave(self, unit: int) -> None:
        """End a use."""
        self._users[unit] -= 1
        if self._users[unit] == 0:
            self._evict_all(self._policy.end_use(unit))

    def end_backward(self) -> None:
        """Evict all units: the weights change."""
        self._order.end_path()
        self._evict_all(list(self._policy.buffers))

    def _gather(self, unit: int) -> int:
        if (victim := self._policy.victim_for(unit)) is not None:
            self._evict_all([victim])
        self._policy.take(unit)
        return unit

    def _evict_all(self, units: Iterable[int]) -> None:
        for unit in units:
            self._policy.give_back(unit, self._policy.evict(unit))


class _Grads:
    """Which buckets and gradients there are."""

    def __init__(self, budget: Budget, order: Sequence[int], prompt: bool) -> None:
        recipe = budget.recipe
        self._prompt = prompt
        self._units, self._order = budget.units, order
        self._on_gpu = recipe.on_gpu
        self._saves_memory = recipe.saves_memory
        self._steps = recipe.in_backward
        self._beside_root = max((i for i, unit in enumerate(order, 1) if not self._units[unit].is_root), default=0)
        self.gradients = 0
        self.begin()

    def begin(self) -> None:
        """Begin a backward."""
        self.full: dict[int, int] = {}
        self.early = dict.fromkeys(range(len(self._units)), 0)
        self._copied, self._last = 0, -1
        self._arrived = dict.fromkeys(range(len(self._units)), 0)
        self._ready: set[int] = set()
        self._started, self._landed = 0, 0

    @property
    def nbytes(self) -> int:
        """Bytes of buckets, and of gradients that wait for one or are copied to one."""
        return sum(self.full.values()) + sum(self.early.values()) + self._copied

    def arrive(self, unit: int, nbytes: int) -> Iterator[Action]:
        """Take one gradient. Yields actions between which bytes change."""
        if self.is_early(unit):
            self.early[unit] += nbytes
            yield Action("keep", unit)  # a moment with the gradient and all buckets
            yield from self._free_what_is_copied(unit)
        elif unit not in self.full:
            self._land_what_is_done()
            yield from self._fill(unit)
        self._arrived[unit] += 1
        if self._arrived[unit] == self._units[unit].params:
            self._ready.add(unit)
            self._land_what_is_done()
            while self._started < len(self._order) and (turn := self._order[self._started]) in self._ready:
                yield from self._reduce(turn)

    def is_early(self, unit: int) -> bool:
        """Whether a unit's gradients wait for its bucket."""
        return self._on_gpu or self._units[unit].is_root

    def flush(self) -> Iterator[Action]:
        """Reduce what is left, and wait for all."""
        while self._started < len(self._order):
            yield from self._reduce(self._order[self._started])
        while self._landed < self._started:
            yield self._land()
        self._copied = 0

    def _reduce(self, unit: int) -> Iterator[Action]:
        if unit not in self.full:
            yield from self._fill(unit)
        flats = self._units[unit].flats
        self.gradients += sum(flat.mean for flat in flats)
        self._started += 1
        yield Action("reduce", unit)
        if self._on_gpu:  # a bucket that is no gradient serves the next unit, on the stream of reductions
            self._release(unit)

    def _fill(self, unit: int) -> Iterator[Action]:
        root = self._units[unit].is_root
        waits_for_all = self._started >= self._beside_root if root else self._saves_memory
        while not self._on_gpu and self._landed < self._started and (waits_for_all or self._is_full(root)):
            yield self._land()
        self.full[unit] = sum(flat.bucket for flat in self._units[unit].flats)
        yield Action("fill", unit)  # a moment with the bucket and early gradients both
        self._copied += self.early[unit] * self._on_gpu
        self.early[unit] = 0

    def _is_full(self, root: bool) -> bool:
        return not root and sum(not self._units[unit].is_root for unit in self.full) >= BUCKETS

    def _free_what_is_copied(self, unit: int) -> Iterator[Action]:
        """Wait, on a stream, for the copies of the last unit, and so for the reductions before it."""
        if self._on_gpu and unit != self._last:
            self._last, self._copied = unit, 0
            while self._landed < self._started - 1:
                yield self._land()

    def _land_what_is_done(self) -> None:
        while self._prompt and not self._on_gpu and self._landed < self._started:
            self._land()

    def _land(self) -> Action:
        """End the first reduction."""
        unit = self._order[self._landed]
        self._landed += 1
        if not self._on_gpu:
            self._release(unit)
        return Action("land", unit)

    def _release(self, unit: int) -> None:
        """Free a bucket, or make it a gradient."""
        del self.full[unit]
        for flat in self._units[unit].flats:
            if flat.mean == 0 and not self._steps:
                self.gradients += flat.bucket
            if self._steps:
                self.gradients -= flat.mean


class _Timeline:
    """Replays events and accounts for their memory."""

    def __init__(self, budget: Budget, events: Sequence[Event], prompt: bool) -> None:
        self._budget, self._events = budget, events
        self._weights = None if budget.permanent else _Weights(budget)
        self._grads = _Grads(budget, _order(budget, events), prompt)
        self._own_gradients = 0
        self.course = Course()

    def run(self) -> None:
        """Replay one step."""
        self.course = Course()
        self._own_gradients = self._grads.gradients = 0
        self._grads.begin()
        if self._weights is not None:
            self._weights.begin(backward=False)
        else:
            self._note_all_gathers()
        for event in self._events:
            self._note(event.most)
            if event.flops:
                self.course.actions.append(Action("compute", flops=event.flops))
            self._apply(event)
            self._note(event.now)

    def _apply(self, event: Event) -> None:
        if event.kind is Kind.ENTER:
            self._enter(event.unit)
        elif event.kind is Kind.LEAVE and self._weights is not None:
            self._weights.leave(event.unit)
        elif event.kind is Kind.GRADIENT:
            self._take_gradient(event)
        elif event.kind is Kind.BACKWARD and self._weights is not None:
            self._weights.begin(backward=True)
        elif event.kind is Kind.END:
            self._end(event)

    def _enter(self, unit: int) -> None:
        if self._weights is not None:
            self.course.actions += [Action("gather", each) for each in self._weights.enter(unit)]
        self.course.actions.append(Action("need", unit))

    def _note_all_gathers(self) -> None:
        gathered = [i for i, unit in enumerate(self._budget.units) if unit.gathers]
        self.course.actions += [Action("gather", unit) for unit in gathered]

    def _take_gradient(self, event: Event) -> None:
        if self._budget.single_rank:
            if not self._budget.recipe.in_backward:  # else it is stepped by and dropped at once
                self._own_gradients += event.nbytes
            self._note(event.now + event.nbytes * self._budget.recipe.in_backward)
            return
        early = self._grads.is_early(event.unit)
        for action in self._grads.arrive(event.unit, event.nbytes):
            self._record(action, event.now + (0 if early else event.nbytes))
            early &= action.name != "fill"  # autograd keeps its gradient until the hook returns

    def _end(self, event: Event) -> None:
        if not self._budget.single_rank:
            for action in self._grads.flush():
                self._record(action, event.now)
        if self._weights is not None:
            self._weights.end_backward()
        self._note(event.now + self._budget.temporaries)
        self.course.actions.append(Action("step"))

    def _record(self, action: Action, now: int) -> None:
        self._note(now)
        if action.name not in ("fill", "keep"):
            self.course.actions.append(action)

    def _note(self, activations: int) -> None:
        """Update the peaks."""
        now = self._held_now()
        now[ACTIVATIONS] = activations
        course = self.course
        for purpose, nbytes in now.items():
            course.most[purpose] = max(course.most.get(purpose, 0), nbytes)
        if sum(now.values()) > course.total:
            course.peak = now

    def _held_now(self) -> dict[str, int]:
        held = {purpose: self._budget.held[purpose] for purpose in HELD}
        held["gather buffers"] = 0 if self._weights is None else self._weights.nbytes
        held["gradient buckets"] = self._grads.nbytes
        held["gradients"] = self._grads.gradients + self._own_gradients
        return held


def _order(budget: Budget, events: Sequence[Event]) -> list[int]:
    """Return the units with gradients, in the order in which these are complete; the others follow."""
    left = {i: unit.params for i, unit in enumerate(budget.units) if unit.params}
    order = []
    for event in events:
        if event.kind is Kind.GRADIENT:
            left[event.unit] -= 1
            if left[event.unit] == 0:
                order.append(event.unit)
    return [*order, *(unit for unit in left if unit not in order)]
