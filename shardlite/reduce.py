"""Reducing: a unit's gradients are copied to its bucket, and from there go round the ring into this rank's shard.

    gradient -> bucket [W*S] -> reduce-scatter -> gradient shard [S], of which the shards' `.grad` are views

Units are reduced in one fixed order, so that every rank reduces every unit once per backward, whatever branches its
forward took: what did not come counts as zero. In the end the ranks count who used each parameter, and one that no rank
used keeps its `.grad` as it was.

Legend: `W` ranks, `S` elements per shard.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from shardlite.bucket import Bucket
from shardlite.errors import PhaseError
from shardlite.lane import Flight, Lane
from shardlite.layout import Layout
from shardlite.phase import Gradients
from shardlite.ring import Operation, all_reduce, broadcast, reduce_scatter, staging_numel
from shardlite.unit import Shared, Unit

PATIENCE = 1.0
"""Seconds that a backward waits for an earlier reduction before it takes another bucket.

Waiting bounds the memory. It must not be unconditional: a peer that took another branch may start that reduction only
at the end of its own backward, and to get there it may need our next gather.
"""


@dataclass(frozen=True)
class _Reduction:
    """A reduction on its way, and where its results will be."""

    bucket: Bucket
    flight: Flight
    means: Sequence[Tensor]
    """[S] for each trainable flat; [W*S], the bucket's own memory, where gradients are not sharded."""

    used: Sequence[int]
    """1 for each parameter that this rank has used, else 0."""

    def hand_over(self, users: Iterator[int]) -> None:
        """Give each shard that had any user its gradient: a view of the mean, or that added to what is there."""
        for flat, mean in zip(self.bucket.unit.trainable, self.means, strict=True):
            for shard, grad in zip(flat.shards, flat.shard_views(mean), strict=True):
                if next(users) == 0:
                    continue
                if shard.grad is None:
                    shard.grad = grad
                else:
                    shard.grad.add_(grad)


@dataclass
class _Round:
    """The reductions of one backward."""

    ready: set[Unit] = field(default_factory=set)
    """Units whose gradients are all there."""

    started: list[_Reduction] = field(default_factory=list)
    """In the fixed order, so their number tells whose turn it is."""

    landed: int = 0
    """How many of them are over, and their buckets free."""

    patient: bool = True
    """Whether it is worth waiting for a reduction before taking another bucket."""


class Reducer:
    """Reduces the gradients of one wrapped model; `sharded` tells whether a rank keeps its shard of them or all."""

    def __init__(self, units: Sequence[Unit], shared: Shared, *, sharded: bool) -> None:
        self._lane = Lane("reduce")
        self._label = shared.label
        self._transport = shared.transport
        self._trace = shared.trace
        self._ledger = shared.ledger
        self._sharded = sharded
        self._buckets = {unit: Bucket(unit) for unit in units if unit.trainable}
        self._order = list(reversed(self._buckets))  # a guess, until the first backward has shown how gradients come
        self._observed: list[Unit] | None = []
        self._backwards = 0
        self._round = _Round()
        self._staging = self._make_staging()

    def add(self, unit: Unit, flat: int, slot: int, grad: Tensor) -> Bucket:
        """Take in the gradient of one parameter, and return the bucket that it went to.

        Raises:
            PhaseError: the unit was already reduced in this backward.
        """
        bucket = self._buckets[unit]
        if any(reduction.bucket is bucket for reduction in self._round.started):
            name = unit.trainable[flat].layout.slots[slot].name
            raise PhaseError(
                f"unit {unit.name!r}: a gradient of {name!r} came after the unit had been reduced in this backward. "
                "A reentrant backward reached the unit outside the wrapped model's forward; use "
                "`checkpoint(..., use_reentrant=False)`"
            )
        if bucket.phase is Gradients.EMPTY:
            self._fill(bucket)
        bucket.add(flat, slot, grad)
        self._land_what_is_done()
        return bucket

    def complete(self, unit: Unit) -> None:
        """Note that a unit's gradients are all there, and start every reduction whose turn has come."""
        if self._observed is not None and unit not in self._observed:
            self._observed.append(unit)
        self._round.ready.add(unit)
        while (turn := self._next_unit()) in self._round.ready:
            assert turn is not None
            self._reduce(turn)

    def flush(self) -> None:
        """Reduce what is left, wait for all reductions, and hand the gradients to the shards.

        Raises:
            CommError: a peer failed, is late or does another operation.
        """
        while (turn := self._next_unit()) is not None:
            self._reduce(turn)
        self._land(len(self._round.started))
        users = iter(self._count_users())
        for reduction in self._round.started:
            reduction.hand_over(users)
        self._agree_on_order()
        self.start_over()

    def start_over(self) -> None:
        """Be ready for the next backward."""
        for bucket in self._buckets.values():
            bucket.arrivals = 0
        self._round = _Round()
        self._backwards += 1

    def abandon(self) -> None:
        """Forget a backward that died: its gradients, and what was accumulated before it in the same buckets."""
        self._land(len(self._round.started))
        self.discard()
        self.start_over()

    def discard(self) -> None:
        """Forget what was accumulated and not yet reduced."""
        for bucket in self._buckets.values():
            if bucket.phase is Gradients.FILLING:
                bucket.clear()

    def _next_unit(self) -> Unit | None:
        """Return the unit that is to be reduced next in this backward."""
        place = len(self._round.started)
        return self._order[place] if place < len(self._order) else None

    def _reduce(self, unit: Unit) -> None:
        """Send a unit's bucket round."""
        bucket = self._buckets[unit]
        if bucket.phase is Gradients.EMPTY:
            self._fill(bucket)  # with nothing: the other ranks count on our zeros
        bucket.zero_the_rest()
        bucket.move(Gradients.REDUCING)
        self._trace.emit("reduce", unit.name)
        self._round.started.append(self._launch(bucket))

    def _launch(self, bucket: Bucket) -> _Reduction:
        unit = bucket.unit
        used = bucket.flags()
        means = [self._mean_buffer(full, flat.layout) for full, flat in zip(bucket.full, unit.trainable, strict=True)]
        jobs = deque(
            self._job(full, mean, f"reduce-scatter of unit {unit.name!r} {self._label}, flat {i}")
            for i, (full, mean) in enumerate(zip(bucket.full, means, strict=True))
        )

        def go_round() -> None:
            while jobs:  # emptied, so that the bucket is free once the flight is over
                jobs.popleft()()

        return _Reduction(bucket, self._lane.submit(go_round), means, used)

    def _job(self, full: Tensor, mean: Tensor, label: str) -> Callable[[], object]:
        """Return what the lane has to do for one flat: the mean over the ranks, sharded or not."""
        operation = Operation(label, self._backwards)
        transport, divisor = self._transport, self._transport.world_size
        if self._sharded:
            return partial(reduce_scatter, full, transport, out=mean, divisor=divisor, operation=operation)
        staging = self._staging.view(full.dtype)
        return partial(all_reduce, full, transport, divisor=divisor, staging=staging, operation=operation)

    def _mean_buffer(self, full: Tensor, layout: Layout) -> Tensor:
        """Return where a flat's reduced gradient will be. It lives as long as a `.grad` views it."""
        mean = full.new_empty(layout.shard_numel) if self._sharded else full
        self._ledger.track("gradients", mean)
        return mean

    def _fill(self, bucket: Bucket) -> None:
        """Give a bucket its memory, once at most one other is on its way."""
        now = self._round
        while now.patient and len(now.started) - now.landed > 1:
            now.patient = now.started[now.landed].flight.wait_up_to(PATIENCE)
            self._land_what_is_done()
        bucket.full = [torch.empty(flat.layout.full_numel, dtype=flat.layout.dtype) for flat in bucket.unit.trainable]
        for full in bucket.full:
            self._ledger.track("gradient buckets", full)
        bucket.move(Gradients.FILLING)

    def _land_what_is_done(self) -> None:
        """Free the buckets whose reductions are over."""
        now = self._round
        while now.landed < len(now.started) and now.started[now.landed].flight.done():
            self._land(now.landed + 1)

    def _land(self, count: int) -> None:
        """Wait until the first `count` reductions are over, and free their buckets."""
        for reduction in self._round.started[self._round.landed : count]:
            reduction.flight.wait()
            reduction.bucket.clear()
            self._round.landed += 1

    def _count_users(self) -> list[int]:
        """Return how many ranks used each parameter, in the order of reductions."""
        used = torch.tensor([flag for reduction in self._round.started for flag in reduction.used], dtype=torch.int32)
        operation = Operation(f"who used which parameter {self._label}", self._backwards)
        all_reduce(used, self._transport, operation=operation)
        counts: list[int] = used.tolist()
        return counts

    def _agree_on_order(self) -> None:
        """After the first backward, take the order in which rank 0's units were complete as everybody's order."""
        if self._observed is None:
            return
        units = list(self._buckets)
        seen = [*self._observed, *(unit for unit in self._order if unit not in self._observed)]
        order = torch.tensor([units.index(unit) for unit in seen], dtype=torch.int64)
        broadcast(order, self._transport, operation=Operation(f"the order of reductions {self._label}"))
        self._order = [units[i] for i in order.tolist()]
        self._observed = None

    def _make_staging(self) -> Tensor:
        """Allocate, once, where partial sums arrive; a reduce-scatter stages them in the gradient shard itself."""
        world_size = self._transport.world_size
        layouts = [flat.layout for unit in self._buckets for flat in unit.trainable]
        needed = [staging_numel(each.full_numel, world_size, each.dtype) * each.dtype.itemsize for each in layouts]
        staging = torch.empty(0 if self._sharded or world_size == 1 else max(needed), dtype=torch.uint8)
        self._ledger.track("staging", staging)
        return staging
