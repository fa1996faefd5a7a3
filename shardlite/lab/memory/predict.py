"""Predict the peak tensor bytes of a step by arithmetic. The entry `tensor_bytes` of a row is the measured peak.

ShardLite's rules are those of `shardlite plan`. The rules of PyTorch's systems were read in the source of PyTorch 2.13,
and are replayed on the events of the step that `shardlite plan` traces. On a CPU, every collective has ended when its
call returns.

| system | held from step to step | held in a step |
|---|---|---|
| plain | weights, moments | all gradients |
| DDP | weights, buckets, moments | one gradient until it is in its bucket |
| ZeRO-1 | weights, buckets, the moments of some whole parameters | as DDP |
| FSDP1 | shards, moments | full units; at a unit's end its gradients and a flat copy of them |
| FSDP2 | shards, moments | full units and gathered copies; at a unit's end its gradients and a flat copy of them |

FSDP1 and FSDP2 gather one unit ahead in the backward. They keep the root's weights from the root's forward to the end
of the step. They also keep the gradient shards of finished units.

Legend: `W` ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from shardlite.lab.compared.systems import System
from shardlite.plan import Event, Kind, Planner, Setting, Source, UnitBudget


class Predictor:
    """Predicts the memory of one model in any system."""

    def __init__(self, source: Source, *, progress: Callable[[str], None]) -> None:
        """Create the model with fake tensors, and call `progress` with a line about each slow part.

        Raises:
            SourceError: the model cannot be created with fake tensors.
        """
        self._planner = Planner(source, progress=progress)
        self._rules: dict[str, Callable[[int], int]] = {
            "activations": lambda _: self._alone(),
            "activations, bf16": lambda _: self._alone(torch.bfloat16),
            "plain": lambda _: self._weights() + self._bytes(2 * self._planner.trainable) + plain_peak(self._events()),
            "ddp": lambda _: self._replicated(self._planner.trainable),
            "zero": lambda ranks: self._replicated(largest_part(self._planner.trained_numels, ranks)),
            "fsdp1": lambda ranks: self._sharded(ranks, _Fsdp1),
            "fsdp2": lambda ranks: self._sharded(ranks, _Fsdp2),
        }

    def bounds(self, name: str, system: System, ranks: int) -> tuple[int, int] | None:
        """Return the least and the greatest possible peak of a rank in bytes, or `None` for a system without rules.

        The bounds differ only for ShardLite, whose peak depends on when reductions end. DeepSpeed has no rules.

        Raises:
            SourceError: the model cannot be traced with fake tensors.
        """
        if system.setting is not None:
            plan = self._planner.plan(replace(system.setting, world_size=ranks))
            return plan.at_least, plan.peak
        rule = self._rules.get(name)
        return None if rule is None else (rule(ranks),) * 2

    def _events(self, dtype: torch.dtype | None = None) -> Sequence[Event]:
        return self._planner.events(dtype, False)

    def _weights(self, dtype: torch.dtype | None = None) -> int:
        """Return the bytes of all weights and buffers of the module."""
        weights = self._planner.weight_nbytes if dtype is None else self._planner.numel * dtype.itemsize
        return weights + self._planner.plan(Setting(on_gpu=False)).budget.held["buffers"]

    def _bytes(self, numel: int) -> int:
        """Return the bytes of `numel` elements of weights, gradients or moments."""
        return numel * self._planner.weight_nbytes // self._planner.numel

    def _alone(self, dtype: torch.dtype | None = None) -> int:
        """Return the peak of a plain model that holds one gradient at a time."""
        return self._weights(dtype) + activation_peak(self._events(dtype))

    def _replicated(self, stepped: int) -> int:
        """Return the peak of DDP on a rank that holds the moments of `stepped` elements."""
        return self._alone() + self._bytes(self._planner.trainable + 2 * stepped)

    def _sharded(self, ranks: int, replay: type["_Replay"]) -> int:
        plan = self._planner.plan(Setting(world_size=ranks, on_gpu=False))  # used for its buffers, units and events
        shards = self._bytes(self._planner.numel + 2 * self._planner.trainable) // ranks
        return shards + plan.budget.held["buffers"] + replay(plan.budget.units, ranks).peak(plan.events)


def activation_peak(events: Sequence[Event]) -> int:
    """Return the peak of a program's tensors if it holds one gradient at a time."""
    return max(max(event.most, event.now + event.nbytes) for event in events)


def plain_peak(events: Sequence[Event]) -> int:
    """Return the peak of a program's tensors if it holds all gradients."""
    peak = gradients = 0
    for event in events:
        peak = max(peak, event.most + gradients)
        gradients += event.nbytes
        peak = max(peak, event.now + gradients)
    return peak


def largest_part(numels: Sequence[int], ranks: int) -> int:
    """Return the number of elements that rank 0 updates.

    Each parameter, the largest first, goes to the rank with the fewest elements so far.
    """
    parts = [0] * ranks
    for numel in sorted(numels, reverse=True):
        parts[parts.index(min(parts))] += numel
    return parts[0]


class _Replay:
    """Replays a step of a fully sharded system. `_gather` and `_reduce` yield each time the held bytes have changed."""

    def __init__(self, units: Sequence[UnitBudget], ranks: int) -> None:
        self._units, self._ranks = units, ranks
        self._users = [0] * len(units)
        self._missing = [unit.params for unit in units]
        self._full: set[int] = set()
        self._gathered: dict[int, int] = {}
        self._arrived: dict[int, int] = {}
        self._flat = self._sums = 0
        self._order: list[int] = []
        self._backward = False

    def peak(self, events: Sequence[Event]) -> int:
        """Return the peak of all bytes except shards and moments. The program's own tensors are included."""
        peak = 0
        for event in events:
            peak = max(peak, self._held() + event.most)
            for _ in self._apply(event):
                peak = max(peak, self._held() + event.now)
        return peak

    def _held(self) -> int:
        full = sum(self._units[unit].full for unit in self._full)
        return full + sum(self._gathered.values()) + sum(self._arrived.values()) + self._flat + self._sums

    def _apply(self, event: Event) -> Iterator[None]:
        unit = event.unit
        if event.kind is Kind.BACKWARD:
            self._backward = True
        elif event.kind is Kind.ENTER:
            self._users[unit] += 1
            if unit not in self._full:
                yield from self._gather(unit)
        elif event.kind is Kind.LEAVE:
            self._users[unit] -= 1
            self._leave(unit)
        elif event.kind is Kind.GRADIENT:
            self._arrived[unit] = self._arrived.get(unit, 0) + event.nbytes
            self._missing[unit] -= 1
            if self._missing[unit] == 0 and not self._units[unit].is_root:
                yield from self._reduce(unit)
        elif event.kind is Kind.END:
            for left in list(self._arrived):
                yield from self._reduce(left)
        yield

    def _leave(self, unit: int) -> None:
        """After a unit's forward, free its full weights. In the backward, free only units without gradients.

        This method does not free the root's weights.
        """
        if self._users[unit] > 0 or self._units[unit].is_root:
            return
        if not self._backward:
            self._order.append(unit)
        if not self._backward or not self._units[unit].params:
            self._full.discard(unit)

    def _next(self, unit: int) -> int | None:
        """Return the unit to gather during the backward of `unit`, or `None`.

        This is the unit before `unit` in the forward, unless the weights of that unit are already full (not sharded).
        """
        place = self._order.index(unit) if unit in self._order else 0
        upcoming = self._order[place - 1] if place > 0 else None
        return None if upcoming in self._full else upcoming

    def _gather(self, unit: int) -> Iterator[None]:
        raise NotImplementedError

    def _reduce(self, unit: int) -> Iterator[None]:
        raise NotImplementedError


class _Fsdp1(_Replay):
    """FSDP1 gathers a unit into the memory in which the unit is used. A single rank shards and gathers nothing."""

    def _gather(self, unit: int) -> Iterator[None]:
        if self._ranks > 1:
            self._full.add(unit)
            if self._backward and (upcoming := self._next(unit)) is not None:
                self._full.add(upcoming)
        yield

    def _reduce(self, unit: int) -> Iterator[None]:
        """Concatenate the gradients, as the backward of the flat parameter's views does, and reduce them."""
        self._flat = self._units[unit].full
        yield
        del self._arrived[unit]
        self._full.discard(unit)
        self._sums += self._units[unit].full // self._ranks
        yield
        self._flat = 0


class _Fsdp2(_Replay):
    """FSDP2 gathers a unit into a buffer, then copies the buffer. A single rank copies its shards."""

    def _gather(self, unit: int) -> Iterator[None]:
        nbytes = self._units[unit].full if self._ranks > 1 else 0
        earlier = [] if self._backward else list(self._gathered)
        self._gathered[unit] = nbytes
        yield
        for each in earlier:  # a forward keeps a gathered buffer until the next unit is copied
            self._gathered.pop(each)
        self._full.add(unit)
        yield
        if self._backward:
            self._gathered.pop(unit)
            if (upcoming := self._next(unit)) is not None:
                self._gathered[upcoming] = self._units[upcoming].full if self._ranks > 1 else 0

    def _reduce(self, unit: int) -> Iterator[None]:
        """Copy the gradients into one buffer and reduce them. The next unit's buffer replaces this buffer."""
        self._full.discard(unit)
        self._flat = self._units[unit].full
        yield
        del self._arrived[unit]
        self._sums += self._units[unit].full // self._ranks
        yield
