"""What PyTorch's systems hold at most in a step: their rules, replayed on the events of a traced step.

In: a `Plan` in which ShardLite has the same model in the same units, and its events. Out: bytes. The rules were read in
PyTorch 2.13; on a CPU every collective is over when its call returns.

| system | held from step to step | in a step |
|---|---|---|
| plain | weights, moments | gradients as they arrive |
| DDP | weights, buckets, moments | one gradient until it is in its bucket |
| ZeRO-1 | weights, buckets, the moments of some whole parameters | the same |
| FSDP1 | shards, moments | full units; at a unit's end its gradients and a flat copy of them |
| FSDP2 | shards, moments | full units and gathered copies; at a unit's end its gradients and a flat copy of them |

Both fully sharded systems gather one unit ahead in the backward, keep the root's weights from its forward to the end,
and hold the gradient shards of finished units.

Legend: `W` ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardlite.build import Event, Kind, UnitBudget


def activation_peak(events: Sequence[Event]) -> int:
    """Return the most bytes of a program's tensors where one gradient at a time is alive."""
    return max(max(event.most, event.now + event.nbytes) for event in events)


def plain_peak(events: Sequence[Event]) -> int:
    """Return the most bytes of a program's tensors and of all gradients."""
    peak = gradients = 0
    for event in events:
        peak = max(peak, event.most + gradients)
        gradients += event.nbytes
        peak = max(peak, event.now + gradients)
    return peak


def largest_part(numels: Sequence[int], ranks: int) -> int:
    """Return the elements that rank 0 steps if the largest parameters are dealt first, each to who has least."""
    parts = [0] * ranks
    for numel in sorted(numels, reverse=True):
        parts[parts.index(min(parts))] += numel
    return parts[0]


def fsdp1_peak(units: Sequence[UnitBudget], events: Sequence[Event], ranks: int) -> int:
    """Return the most bytes beside shards and moments in FSDP1."""
    return _Fsdp1(units, ranks).peak(events)


def fsdp2_peak(units: Sequence[UnitBudget], events: Sequence[Event], ranks: int) -> int:
    """Return the most bytes beside shards and moments in FSDP2."""
    return _Fsdp2(units, ranks).peak(events)


class _Sharded:
    """Replays a step. The systems differ in `_gather` and `_reduce`, which yield whenever bytes are to be compared."""

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
        """Return the most bytes, the program's own tensors included."""
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
        """Free full weights after a forward, except the root's; units without gradients also in the backward."""
        idle = self._users[unit] == 0 and not self._units[unit].is_root
        if idle and not self._backward:
            self._order.append(unit)
            self._full.discard(unit)
        elif idle and not self._units[unit].params:
            self._full.discard(unit)

    def _next(self, unit: int) -> int | None:
        """Return the unit that is gathered while the backward of `unit` runs."""
        place = self._order.index(unit) if unit in self._order else 0
        upcoming = self._order[place - 1] if place > 0 else None
        return None if upcoming in self._full else upcoming

    def _gather(self, unit: int) -> Iterator[None]:
        raise NotImplementedError

    def _reduce(self, unit: int) -> Iterator[None]:
        raise NotImplementedError


class _Fsdp1(_Sharded):
    """A unit is gathered to where it is used. One rank shards nothing, and gathers nothing."""

    def _gather(self, unit: int) -> Iterator[None]:
        if self._ranks > 1:
            self._full.add(unit)
            if self._backward and (upcoming := self._next(unit)) is not None:
                self._full.add(upcoming)
        yield

    def _reduce(self, unit: int) -> Iterator[None]:
        """Concatenate the gradients, as the views of the flat parameter do in the backward, and reduce them."""
        self._flat = self._units[unit].full
        yield
        del self._arrived[unit]
        self._full.discard(unit)
        self._sums += self._units[unit].full // self._ranks
        yield
        self._flat = 0


class _Fsdp2(_Sharded):
    """A unit is gathered to a buffer, then copied. One rank copies its shards."""

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
        """Copy the gradients into one buffer, which is kept until the next unit has its own, and reduce them."""
        self._full.discard(unit)
        self._flat = self._units[unit].full
        yield
        del self._arrived[unit]
        self._sums += self._units[unit].full // self._ranks
        yield
