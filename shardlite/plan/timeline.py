"""Predict the memory of a step: full weights, gradient buckets, gradients and the program's own tensors.

In: a `Budget`, and the events of one forward and backward (`Event`). Out: a `StepTimeline`: the peak of memory by
purpose, and the operations in their order, with the computation between them. Nothing is allocated and no clock is
read.

The moment at which a reduction ends depends on the timing of a run, so the caller chooses between two bounds. By
default each reduction ends when something must wait for it, which gives an upper bound of the memory. If `prompt` is
set, each reduction ends before the next gradient, which gives a lower bound.

Full weights follow the library's own `BufferPolicy`. Buckets follow `grads/policy.py`, for ranks that have agreed on an
order. The events come from a trace of a program, or from `plain_events`, which yields the events of a chain of
units without activations.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from shardlite.grads.policy import before_root, must_land_first, waits_for_unit
from shardlite.plan.budget import HELD, Budget
from shardlite.plan.replay import Weights

ACTIVATIONS = "activations"
"""The name of the purpose that counts the program's own tensors, and gradients that autograd still holds."""

_STEPS = 3
"""Number of steps after which all orders are recorded and the set of buffers that a GPU keeps no longer changes; see
`docs/memory.md`."""


class Kind(Enum):
    """Kinds of events in a program."""

    ENTER = "enter"  # a use of a unit's full weights begins
    LEAVE = "leave"  # a use of a unit's full weights ends
    GRADIENT = "gradient"  # autograd delivers one gradient
    BACKWARD = "backward"  # the backward begins
    END = "end"  # the backward ends; the remaining units are reduced, and the optimizer steps


class Event(NamedTuple):
    """One event, with the memory of the program's own tensors and its work since the previous event."""

    kind: Kind
    unit: int = -1
    nbytes: int = 0
    """Bytes of the gradient, as autograd created it."""

    most: int = 0
    """Peak of the program's own tensors since the previous event, in bytes."""

    now: int = 0
    """Bytes of the program's own tensors at this event, without the gradient."""

    flops: float = 0.0
    """Floating-point operations since the previous event."""


class Action(NamedTuple):
    """One operation or computation that the host starts."""

    name: str
    """`compute`, `gather`, `need` (wait for the gather), `reduce`, `land` (wait for the reduction) or `step`."""

    unit: int = -1
    flops: float = 0.0


@dataclass
class StepTimeline:
    """Memory and operations of one step."""

    peak: dict[str, int] = field(default_factory=dict)
    """Bytes of each purpose at the moment when the sum of all purposes is largest."""

    most: dict[str, int] = field(default_factory=dict)
    """Peak of each purpose by itself."""

    actions: list[Action] = field(default_factory=list)
    """Operations and computations in the order in which the host starts them."""

    @property
    def total(self) -> int:
        """Peak of the sum of all purposes."""
        return sum(self.peak.values())


def timeline_of(
    budget: Budget,
    events: Sequence[Event],
    *,
    prompt: bool = False,
    accumulate: int = 1,
    sharded: bool = False,
) -> StepTimeline:
    """Replay several steps, and return the timeline of the final step.

    Args:
        budget: the bytes of the rank.
        events: the events of the forward and backward of one micro-batch.
        prompt: whether each reduction ends before the next gradient. By default each reduction ends when something must
            wait for it.
        accumulate: number of micro-batches in a step.
        sharded: whether every micro-batch reduces its gradients, as in `no_sync(sharded=True)`.
    """
    timeline = _Timeline(budget, events, prompt)
    return [timeline.simulate(accumulate, sharded=sharded) for _ in range(_STEPS)][-1]


def plain_events(budget: Budget) -> Iterator[Event]:
    """Yield the events of a chain of units. The forward runs them in order of registration, the backward in reverse.

    The root is in use during the whole forward, and comes last in the backward.
    """
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


class _Grads:
    """The buckets and gradients of a backward. This class calls `record` after each change of their bytes."""

    def __init__(
        self,
        budget: Budget,
        order: Sequence[int],
        prompt: bool,
        record: Callable[[Action | None], None],
        *,
        reduces: bool = True,
        earlier: "_Grads | None" = None,
    ) -> None:
        """Initialize before the first gradient.

        Args:
            budget: the bytes of the rank.
            order: the units in the order of their reductions.
            prompt: whether each reduction ends before the next gradient.
            record: function that is called with each operation, and with `None` after other changes.
            reduces: whether gradients are reduced. Otherwise they stay in their buckets.
            earlier: the backward of the previous micro-batch of this step.
        """
        recipe = budget.recipe
        self._prompt = prompt
        self._units, self._order, self._record = budget.units, order, record
        self._on_gpu = recipe.on_gpu
        self._saves_memory = recipe.saves_memory
        self._steps = recipe.in_backward
        self._before_root = before_root([self._units[unit].is_root for unit in order])
        self._reduces = reduces
        self.full: dict[int, int] = {} if earlier is None else earlier.full
        self._accumulated = [*self.full]  # units whose buckets have the sums of earlier micro-batches
        self.early = dict.fromkeys(range(len(self._units)), 0)
        self.gradients: int = 0 if earlier is None else earlier.gradients
        self._added = self.gradients
        self.arriving = 0  # bytes of the gradient that autograd still holds
        self._copied, self._last = 0, -1
        self._left = [unit.params for unit in self._units]
        self._started, self._landed = 0, 0

    @property
    def nbytes(self) -> int:
        """Bytes of buckets, and of gradients that wait for their bucket or are being copied to their bucket."""
        return sum(self.full.values()) + sum(self.early.values()) + self._copied

    def arrive(self, unit: int, nbytes: int) -> None:
        """Store one gradient."""
        waits = self._reduces and unit not in self._accumulated
        if waits and waits_for_unit(self._units[unit].is_root, self._on_gpu):
            self.early[unit] += nbytes
            self._record(None)
            self._free_copied(unit)
        else:
            self.arriving = nbytes
            if unit not in self.full:
                self._land_finished()
                self._fill(unit, nbytes)
        self._left[unit] -= 1
        if self._left[unit] == 0 and self._reduces:
            self._land_finished()
            while self._started < len(self._order) and self._left[self._order[self._started]] <= 0:
                self._reduce(nbytes)
        self.arriving = 0

    def flush(self) -> None:
        """Reduce the remaining units, wait for all reductions, and add their means to earlier gradients."""
        while self._reduces and self._started < len(self._order):
            self._reduce(0)
        while self._landed < self._started:
            self._land()
        for unit in [*self.full] if self._reduces else ():
            self._release(unit)
        self._copied = 0
        self.gradients -= self._added

    def _reduce(self, nbytes: int) -> None:
        unit = self._order[self._started]
        if unit not in self.full:
            self._fill(unit, nbytes)
        self.gradients += sum(flat.mean for flat in self._units[unit].flats)
        self._started += 1
        self._record(Action("reduce", unit))
        if self._on_gpu and unit not in self._accumulated:  # the stream of reductions uses the memory for the next unit
            self._release(unit)

    def _fill(self, unit: int, nbytes: int) -> None:
        is_root, is_root_left = self._units[unit].is_root, self._started >= self._before_root
        while not self._on_gpu and self._landed < self._started:
            filled = sum(not self._units[each].is_root for each in self.full)
            if not must_land_first(filled, is_root, is_root_left, self._saves_memory):
                break
            self._land()
        self.full[unit] = sum(flat.bucket for flat in self._units[unit].flats)
        self._record(None)  # at this moment, both the bucket and the early gradients are held
        self._copied += self.early[unit] * self._on_gpu
        self.early[unit] = 0
        self.arriving = nbytes  # autograd holds the arriving gradient until the gradient's hook returns

    def _free_copied(self, unit: int) -> None:
        """Let the stream wait for the copies of the previous unit, and so for the reductions before these copies."""
        if self._on_gpu and unit != self._last:
            self._last, self._copied = unit, 0
            while self._landed < self._started - 1:
                self._land()

    def _land_finished(self) -> None:
        while self._prompt and not self._on_gpu and self._landed < self._started:
            self._land(recorded=False)

    def _land(self, *, recorded: bool = True) -> None:
        """End the earliest reduction."""
        unit = self._order[self._landed]
        self._landed += 1
        if not self._on_gpu:
            self._release(unit)
        if recorded:
            self._record(Action("land", unit))

    def _release(self, unit: int) -> None:
        """Free a bucket, or keep its memory as the gradient."""
        del self.full[unit]
        for flat in self._units[unit].flats:
            if flat.mean == 0 and not self._steps:
                self.gradients += flat.bucket
            if self._steps:
                self.gradients -= flat.mean


class _Timeline:
    """Replays the events of a step and accounts for its memory."""

    def __init__(self, budget: Budget, events: Sequence[Event], prompt: bool) -> None:
        self._budget, self._events, self._prompt = budget, events, prompt
        self._weights = None if budget.permanent else Weights(budget)
        self._order = _order(budget, events)

    def simulate(self, accumulate: int, *, sharded: bool) -> StepTimeline:
        """Replay one step of `accumulate` micro-batches.

        All micro-batches but the first and the last are equal, so only the second is replayed.
        Gradients of offloaded units are held until the next forward uses the units.
        """
        self._timeline = StepTimeline()
        self._most = self._peak = [0] * 4
        actions, earlier = self._timeline.actions, None
        self._waiting = {} if self._prompt else self._budget.waiting
        if self._weights is None:
            self._gather(i for i, unit in enumerate(self._budget.units) if unit.gathers)
        for each in range(replayed := min(accumulate, 3)):
            self._final = each == replayed - 1
            self._first = each == 0
            begun = len(actions)
            self._grads = _Grads(
                self._budget,
                self._order,
                self._prompt,
                self._record,
                reduces=sharded or self._final,
                earlier=earlier,
            )
            self._replay()
            if not (self._first or self._final):
                actions += actions[begun:] * (accumulate - replayed)
            earlier = self._grads
        self._timeline.peak, self._timeline.most = self._by_purpose(self._peak), self._by_purpose(self._most)
        return self._timeline

    def _replay(self) -> None:
        """Replay one micro-batch."""
        if self._weights is not None:
            self._gather(self._weights.begin_pass(backward=False))
        for event in self._events:
            self._own = event.most
            self._record(Action("compute", flops=event.flops) if event.flops else None)
            self._own = event.now
            self._apply(event)
            self._record(None)

    def _apply(self, event: Event) -> None:
        weights, grads = self._weights, self._grads
        if event.kind in (Kind.ENTER, Kind.LEAVE) and not self._budget.units[event.unit].gathers:
            weights = None  # a replicated unit has no buffer
        if event.kind is Kind.BACKWARD:
            self._waiting.clear()
        if event.kind is Kind.ENTER:
            self._waiting.pop(event.unit, None)
            self._gather(weights.enter(event.unit) if weights is not None else ())
            self._timeline.actions.append(Action("need", event.unit))
        elif event.kind is Kind.LEAVE and weights is not None:
            weights.leave(event.unit)
        elif event.kind is Kind.BACKWARD and weights is not None:
            self._gather(weights.begin_pass(backward=True, final=self._final))
        elif event.kind is Kind.GRADIENT and not self._budget.single_rank:
            grads.arrive(event.unit, event.nbytes)
        elif event.kind is Kind.GRADIENT and self._first and not self._budget.recipe.in_backward:
            grads.gradients += event.nbytes
        elif event.kind is Kind.GRADIENT:  # the optimizer, or the sum over micro-batches, uses the gradient immediately
            self._own += event.nbytes
        elif event.kind is Kind.END:
            if not self._budget.single_rank:
                grads.flush()
            if weights is not None:
                weights.end_backward(final=self._final)
            if self._final:
                self._own += self._budget.temporaries
                self._record(Action("step"))

    def _gather(self, units: Iterable[int]) -> None:
        self._timeline.actions += [Action("gather", unit) for unit in units]

    def _record(self, action: Action | None) -> None:
        """Append an action if there is one, and update the peaks."""
        if action is not None:
            self._timeline.actions.append(action)
        now = [
            0 if self._weights is None else self._weights.nbytes,
            self._grads.nbytes,
            self._grads.gradients + sum(self._waiting.values()),
            self._own + self._grads.arriving,
        ]
        self._most = [*map(max, self._most, now)]
        if sum(now) > sum(self._peak):
            self._peak = now

    def _by_purpose(self, changing: Iterable[int]) -> dict[str, int]:
        held = {purpose: self._budget.held[purpose] for purpose in HELD}
        return held | dict(zip(("gather buffers", "gradient buckets", "gradients", ACTIVATIONS), changing, strict=True))


def _order(budget: Budget, events: Sequence[Event]) -> list[int]:
    """Return the trainable units in the order in which their gradients become complete. Incomplete units come last."""
    left = {i: unit.params for i, unit in enumerate(budget.units) if unit.params}
    order = []
    for event in events:
        if event.kind is Kind.GRADIENT:
            left[event.unit] -= 1
            if left[event.unit] == 0:
                order.append(event.unit)
    return [*order, *(unit for unit in left if unit not in order)]
