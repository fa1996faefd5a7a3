"""The order in which units are reduced, one for all ranks whatever branches their forwards took, and a way through it.

The order begins as a guess, the reverse of the model's. The first backward shows in which order gradients are complete,
and at its end all ranks take what rank 0 has seen.

Each backward goes once through the order. A reduction starts when its turn has come, and lands when it is over and its
bucket is free. On a CPU, before more buckets are filled than there may be, the earliest reductions are waited for.

On a GPU a bucket's memory belongs to the stream of reductions and is reused in stream order. What is bounded are the
gradients that are copied to it: before those of the next unit come, the program's stream waits for the copies, and so
for the reduction of the unit before, on all ranks. `docs/how-it-works.md` says why ranks that part do not deadlock;
where they have parted in a forward the host waits, as on a CPU.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from time import monotonic

import torch
from shardlite_kernels import send

from shardlite.comm import SPARE, Context, Moment, Work, broadcast
from shardlite.grads.bucket import Bucket
from shardlite.grads.reduce_scatter import Copies, Reduction
from shardlite.params import BUCKETS, Gradients, Unit

_phase_of = attrgetter("phase")  # by `map` it is read of all buckets without a call in Python each


class ReductionOrder:
    """The order of reductions of one wrapped model, equal on every rank."""

    def __init__(self, units: Sequence[Unit], context: Context) -> None:
        self._all = units
        self._context = context
        self._order = list(reversed(units))
        self.follow_requires_grad()

    def follow_requires_grad(self) -> None:
        """Leave out units that have no gradients now, and observe the next backward."""
        self.observed: list[Unit] | None = []
        """Units in the order in which their gradients were complete; `None` once the ranks have agreed."""

        self._update()

    def observe(self, unit: Unit) -> None:
        """Note that the gradients of a unit are complete, unless the ranks have agreed."""
        if self.observed is not None and unit not in self.observed:
            self.observed.append(unit)

    def agree(self) -> None:
        """After the first backward, take the order in which rank 0's units were complete as everybody's order.

        Raises:
            CommError: a peer failed, is late or does another operation.
        """
        if self.observed is None:
            return
        seen = [*self.observed, *(unit for unit in self._order if unit not in self.observed)]
        order = send([self._all.index(unit) for unit in seen], torch.int64, self._context.device)
        operation = self._context.operation("the order of reductions", "order of reductions")
        for transport in self._context.transports:
            broadcast(order, transport, operation=operation)
        self._order = [self._all[i] for i in order.tolist()]
        self.observed = None
        self._update()

    def _update(self) -> None:
        self.units = [unit for unit in self._order if unit.trainable]
        """The units that have gradients, in the order of their reductions."""

        self.before_root = max((place for place, unit in enumerate(self.units, 1) if not unit.is_root), default=0)
        """How many of them are reduced until only roots are left."""


@dataclass
class Reductions:
    """The reductions of one backward."""

    context: Context
    order: ReductionOrder
    beside_root: Sequence[Bucket]
    """The buckets of all units but the root."""

    stepping: bool = False
    """Whether means are stepped by, and not kept."""

    reduces: bool = True
    """Whether gradients are reduced, and not only accumulated."""

    in_step: Callable[[], bool] = lambda: False
    """Whether streams may wait for reductions, because all ranks have needed the same units so far."""

    began: Moment | None = None
    """The first gradient of the backward."""

    copying: deque[tuple[Copies, int]] = field(default_factory=deque)
    """Copies to buckets whose gradients are kept, and the reduction that each is behind."""

    ready: set[Unit] = field(default_factory=set)
    """Units whose gradients are all there, and whose turn has not come."""

    started: list[Reduction] = field(default_factory=list)
    """In the fixed order, so that their number is the index of the next unit."""

    landed: int = 0
    """How many of them are over, and their buckets free."""

    @property
    def saves_memory(self) -> bool:
        """Whether little memory is worth more than reductions beside the backward, or pages that are kept for later."""
        return self.stepping and self.context.transport.blocking

    def next_unit(self) -> Unit | None:
        """Return the unit that is to be reduced next."""
        place, units = len(self.started), self.order.units
        return units[place] if place < len(units) else None

    def add(self, reduction: Reduction, copies: Copies | None) -> None:
        """Note that the reduction of the next unit has started, and copies to its bucket."""
        if copies is not None:
            self.copying.append((copies, len(self.started) - 1))
        self.started.append(reduction)
        self.ready.discard(reduction.bucket.unit)
        if self.saves_memory and (len(self.started) == 1 or self._is_root_left()):
            # The backward needs less than the forward did and, from the root on, nothing more.
            self.context.trim(keep=0)

    def tell_started(self) -> None:
        """Tell other ranks, if they have to know, how many reductions have started."""
        started = len(self.started)
        self.context.progress.started(started, left=len(self.order.units) - started, out_of_turn=bool(self.ready))

    def fill(self, bucket: Bucket) -> None:
        """Give a bucket its memory, once there is room for one more beside the root's."""
        progress, root = self.context.progress, bucket.unit.is_root
        # Behind the last unit before the root there is nothing to compute that a reduction could run beside.
        waits_for_all = self._is_root_left() if root else self.saves_memory
        while self.landed < len(self.started) and (waits_for_all or (not root and self._held() >= BUCKETS)):
            first = self.started[self.landed]
            with self.context.traffic.waiting("reduce", first.bucket.unit.name):
                if not self._wait(first.work, self.landed):
                    break
            self.land(self.landed + 1)
        progress.filled(beyond=not root and self._held() >= BUCKETS and self.reduces)
        bucket.fill()

    def land_what_is_done(self) -> None:
        """Free the buckets whose reductions are over."""
        while self.began is None and self.landed < len(self.started) and self.started[self.landed].work.done():
            self.land(self.landed + 1)

    def free_what_is_copied(self) -> None:
        """Free gradients that are copied to buckets, behind the copies, before others take memory."""
        while self.copying and self._wait(self.copying[0][0].work, self.copying[0][1]):
            self.copying.popleft()
        self.context.progress.filled(beyond=bool(self.copying))

    def _wait(self, work: Work, reduction: int) -> bool:
        """Wait for work that is behind a reduction. Return whether it is over: not if another rank needs this one."""
        if not self.in_step():
            return work.wait_unless(partial(self.context.progress.ends_wait, reduction, monotonic()))
        work.wait()
        return True

    def land(self, count: int) -> None:
        """Wait until the first `count` reductions are over, and free their buckets."""
        for reduction in self.started[self.landed : count]:
            with self.context.traffic.waiting("reduce", reduction.bucket.unit.name):
                reduction.work.wait()
            reduction.bucket.clear()
            self.landed += 1
            if self._is_root_left():
                self.context.trim(keep=0 if self.saves_memory else SPARE)  # here may be the peak of a step

    def _held(self) -> int:
        """Return how many units beside the root have a bucket."""
        return len(self.beside_root) - list(map(_phase_of, self.beside_root)).count(Gradients.EMPTY)

    def _is_root_left(self) -> bool:
        """Whether the units whose reductions have not started are roots, if there are any."""
        return len(self.started) >= self.order.before_root
