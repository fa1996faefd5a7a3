"""Reduce gradients: a unit's are copied to its bucket and from there reduced into this rank's shard.

    gradient -> bucket [W*S] -> reduce-scatter -> gradient shard [S], of which the shards' `.grad` are views

With replicas (hybrid sharding) the shard is then reduced over them. At stage 0 all ranks gather it in the end. So every
stage makes the same additions in the same order.

With order="tree" the gradients of a rank's parts are added up in its buckets first (`part_sums.py`), and the last
part's backward reduces the sums.

Units are reduced in one fixed order, so that every rank reduces every unit once per backward, whatever branches its
forward took: a gradient that did not come counts as zero. In the end the ranks exchange gradient flags: a parameter
that no rank used keeps its `.grad`, and all ranks know of gradients that are not finite.

Legend: `W` ranks, `S` elements per shard.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from operator import attrgetter
from time import monotonic
from typing import Protocol

import torch
from shardlite_kernels import send
from torch import Tensor, nn

from shardlite.comm import SPARE, Context, Traffic, Work, broadcast
from shardlite.errors import LayoutError, PhaseError
from shardlite.grads.bucket import Bucket
from shardlite.grads.flags import GradientFlags, any_bad, warn_of
from shardlite.grads.norm import ReducedNorm
from shardlite.grads.reduce_scatter import Averager, Mean, ShardStep
from shardlite.params import BUCKETS, BufferPool, Flat, Gradients, Unit

_PURPOSE = "gradient buckets"

_phase_of = attrgetter("phase")  # by `map` it is read of all buckets without a call in Python each


class Stepper(Protocol):
    """Steps shards by their gradients while these are reduced. The engine has one."""

    def begin(self, *, steps: bool) -> bool:
        """Note the first gradient of a backward, and return whether means are stepped by. `steps` if it may.

        Raises:
            PhaseError: an earlier backward has stepped, and its step is not closed.
        """

    def step(self, flat: Flat) -> ShardStep:
        """Prepare the step of one flat."""

    def end(self, bad: Tensor) -> None:
        """Note that shards have changed; `bad`, [], is above 0 if any rank has found a NaN or an infinity."""


@dataclass
class _Reduction:
    """The reduction of one unit: what the queue runs, and where its results will be."""

    bucket: Bucket
    traffic: Traffic
    used: Sequence[int]
    """1 for each parameter that this rank has used, else 0."""

    jobs: deque[Callable[[], None]] = field(default_factory=deque)
    means: list[Mean] = field(default_factory=list)
    steps: list[ShardStep] = field(default_factory=list)
    """Those that are taken instead of keeping means."""

    work: Work | None = None

    def run(self) -> None:
        """Reduce flat by flat. On the queue."""
        with self.traffic.running("reduce", self.bucket.unit.name):
            while self.jobs:  # emptied, so that the bucket is free when the work is done
                self.jobs.popleft()()

    def submitted(self) -> Work:
        assert self.work is not None
        return self.work

    def parts(self) -> Iterable[tuple[nn.Parameter, Tensor, int]]:
        """Yield each shard with its part of the mean, a view, and whether this rank has used its parameter."""
        shards = [mean.flat.shards[row] for mean in self.means for row in mean.flat.rows]
        views = [view for mean in self.means for view in mean.flat.gradient_views(mean.whole)]
        return zip(shards, views, self.used, strict=True)


@dataclass
class _Round:
    """The reductions of one backward."""

    order: Sequence[Unit]
    """Which units are to be reduced."""

    ready: set[Unit] = field(default_factory=set)
    """Units whose gradients are all there, and whose turn has not come."""

    started: list[_Reduction] = field(default_factory=list)
    """In the fixed order, so that their number is the index of the next unit."""

    landed: int = 0
    """How many of them are over, and their buckets free."""

    first_bad: int | None = None
    """The index of this rank's first own gradient that is not finite, among all flags; with `diagnose` only."""

    stepping: bool = False
    """Whether means are stepped by, and not kept."""

    reduces: bool = True
    """Whether gradients are reduced, and not only accumulated."""

    died: bool = False
    """Whether the backward ended in an exception, so that what is reduced now is not all."""

    def is_root_left(self) -> bool:
        """Whether the units whose reductions have not started are roots, if there are any."""
        return len(self.started) >= self._beside_root

    @cached_property
    def _beside_root(self) -> int:
        """How many reductions start before only roots are left."""
        return max((place for place, unit in enumerate(self.order, 1) if not unit.is_root), default=0)


class Reducer:
    """Reduces the gradients of one wrapped model; `diagnose` names those that are not finite."""

    _latest: tuple[nn.Parameter, Tensor] | None = None
    """The gradient that has just come, if hooks of the program are to see it: its bucket may be on its way already."""

    _nonfinite: Tensor | None = None
    _judged: Sequence["weakref.ref[Tensor]"] = ()
    """The gradients that `_nonfinite` is about."""

    _reduced_norm: ReducedNorm | None = None

    def __init__(
        self,
        units: Sequence[Unit],
        context: Context,
        stepper: Stepper,
        *,
        stage: int,
        diagnose: bool,
        parts: int | None = None,
    ) -> None:
        """`parts` of a global batch are added in a tree; `None`: a rank's gradients are one summand."""
        self._own_parts = None if parts is None else parts // context.world_size
        self._context = context
        self._stepper = stepper
        self._queue = context.queue("reduce")
        self._averager = Averager(context, stage=stage, divisor=parts or context.world_size)
        self._gradient_flags = GradientFlags(context)
        self._diagnose = diagnose
        self._pools = _pools(units, context)
        self._buckets = {unit: Bucket(unit, pools) for unit, pools in self._pools.items()}
        self._beside_root = [bucket for unit, bucket in self._buckets.items() if not unit.is_root]
        self._order = list(reversed(units))  # a guess, until the first backward has shown how gradients come
        self._observed: list[Unit] | None = []
        self._counts = True
        self._backwards = 0
        self._round = _Round(self._now_in_order())

    @property
    def units(self) -> Iterable[Unit]:
        """The units whose gradients this reduces."""
        return self._buckets

    @property
    def accumulates(self) -> bool:
        """Whether there are gradients that are not reduced yet."""
        return any(bucket.accumulates for bucket in self._buckets.values())

    def kept(self) -> Iterator[Tensor]:
        """Yield the memory that later backwards use: of gradients that are not reduced yet, and of spare buckets."""
        for bucket in self._buckets.values():
            yield from (*bucket.full, *bucket.early.values())
            for full in bucket.earlier.summands():
                yield from full
        for pool in {pool for pools in self._pools.values() for pool in pools}:
            yield from pool.spare()

    def follow_requires_grad(self) -> bool:
        """Have buckets for those parameters that require gradients now; return whether that changed anything.

        Raises:
            PhaseError: gradients are accumulated and not reduced yet.
            LayoutError: a parameter was unfrozen that is kept in a dtype too narrow to train.
        """
        if all(flat.rows_now() == flat.rows for unit in self._buckets for flat in unit.flats):
            return False
        _check_precision(flat for unit in self._buckets for flat in unit.flats)
        for unit, bucket in self._buckets.items():
            if bucket.accumulates:
                raise PhaseError(
                    f"requires_grad was changed while gradients of unit {unit.name!r} are accumulated and not yet "
                    "reduced: change it after a step, or call zero_grad() of the model before"
                )
        for bucket in self._buckets.values():
            bucket.follow_requires_grad()
        self._observed = []
        self._round = _Round(self._now_in_order())
        return True

    def begin(self, *, steps: bool, reduces: bool) -> None:
        """Note the first gradient of a backward, which `reduces` or only accumulates; a step follows it if `steps`.

        Raises:
            PhaseError: gradients that would be accumulated are not, because an earlier backward has stepped.
        """
        self._round.reduces = reduces
        self._round.stepping = self._stepper.begin(steps=steps)

    def check_recomputation(self, unit: Unit) -> None:
        """Raise if a forward that is run again would see weights that were stepped since the first time.

        Raises:
            PhaseError: it would.
        """
        if self._round.stepping and self._buckets[unit].reduced:
            raise PhaseError(
                f"unit {unit.name!r} is recomputed after AdamW(in_backward=True) has stepped it in this backward, "
                "because its gradients were complete: use AdamW without it, or no checkpointing there"
            )

    def add(self, unit: Unit, param: nn.Parameter, grad: Tensor, *, is_watched: bool) -> Bucket:
        """Put the gradient of one parameter into its bucket, and return that. Hooks of the program see it if watched.

        Raises:
            PhaseError: the unit was already reduced in this backward.
        """
        self._latest = (param, grad) if is_watched else None
        bucket = self._buckets[unit]
        if bucket.reduced:
            raise PhaseError(
                f"unit {unit.name!r}: a gradient came after the unit had been reduced in this backward. "
                "A reentrant backward reached the unit outside the wrapped model's forward; use "
                "`checkpoint(..., use_reentrant=False)`"
            )
        if not bucket.full and bucket.needs_memory(param, waits=self._round.reduces):
            self._land_what_is_done()
            self._fill(bucket)
        bucket.add(param, grad if self._counts else None, is_watched=is_watched)
        if not bucket.full and (early := bucket.early_gradient(param)) is not None:
            self._context.ledger.track(_PURPOSE, early)
        return bucket

    def set_participation(self, *, counts: bool, ranks: int) -> None:
        """Include this rank's gradients in means, or not, and divide sums by `ranks`."""
        self._counts = counts
        for bucket in self._buckets.values():
            if bucket.phase is Gradients.FILLING:  # what was accumulated was to be divided by another number
                bucket.multiply(ranks / self._averager.divisor)
        self._averager.divisor = ranks

    def complete(self, unit: Unit) -> None:
        """Note that a unit's gradients are all there, and start every reduction whose turn has come."""
        if self._observed is not None and unit not in self._observed:
            self._observed.append(unit)
        self._round.ready.add(unit)
        self._land_what_is_done()
        while (turn := self._next_unit()) in self._round.ready:
            assert turn is not None
            self._round.ready.remove(turn)
            self._reduce(turn)
        self._tell_started(out_of_turn=bool(self._round.ready))

    def keep_part(self, unit: Unit) -> None:
        """Note that a unit's gradients of a part are all there, and add them to those of earlier parts."""
        bucket = self._buckets[unit]
        if not bucket.full:
            self._fill(bucket)  # maybe with nothing: zeros are added, too
        bucket.zero_the_rest()
        bucket.keep_part(self._apart())
        bucket.reduced = True

    def end_part(self) -> None:
        """Add up what is left of a part, after its backward."""
        for unit in self._round.order:
            if not self._buckets[unit].reduced:
                self.keep_part(unit)
        self.start_over()

    def _apart(self) -> int:
        """Return the number of parts whose sums are kept apart. On one rank those are the two of the last addition.

        It is then made with the division, and not rounded between, as with more ranks.
        """
        assert self._own_parts is not None, "a model without parts adds none"
        return self._own_parts // 2 if self._context.world_size == 1 else self._own_parts

    def flush(self) -> None:
        """Reduce what is left, wait for all reductions, and hand the gradients to the shards.

        Raises:
            CommError: a peer failed, is late or does another operation.
        """
        while (turn := self._next_unit()) is not None:
            self._reduce(turn)
        self._tell_started(out_of_turn=False)
        self._land(len(self._round.started))
        self._hand_over()
        self._agree_on_order()
        saves_memory = self.saves_memory()
        self.start_over()
        self._context.trim()
        if saves_memory:
            self._context.trim(keep=0)  # what other ranks still read, too, as soon as they have

    def start_over(self) -> None:
        """Be ready for the next backward."""
        self._latest = None
        for bucket in self._buckets.values():
            bucket.arrivals, bucket.reduced = 0, False
            bucket.unit.stepped.clear()
            bucket.unit.overwritten.clear()
        self._round = _Round(self._now_in_order())
        self._backwards += 1
        self._context.progress.begin(self._backwards)

    def abandon(self, *, reducing: bool) -> None:
        """Forget a backward that died: its gradients, and what was accumulated before it in the same buckets.

        If it was `reducing`, other ranks may have started more reductions than this one: all make all of them.
        """
        self._round.died = True
        while reducing and (turn := self._next_unit()) is not None:
            self._reduce(turn)
        self._land(len(self._round.started))
        if reducing and self._round.stepping:
            self._end_steps()  # of those units that all ranks had reduced before
        self.discard()
        self.start_over()

    def discard(self) -> None:
        """Forget what was accumulated and not yet reduced."""
        for bucket in self._buckets.values():
            if bucket.accumulates:
                bucket.clear()

    def waiting(self, unit: Unit, param: nn.Parameter) -> Tensor | None:
        """Return the gradient of one of the module's parameters that was accumulated and not yet reduced."""
        accumulated = self._buckets[unit].gradient(param) if unit in self._buckets else None
        if accumulated is None and self._latest is not None and self._latest[0] is param:
            return self._latest[1]
        return accumulated

    def drop(self, unit: Unit, param: nn.Parameter) -> None:
        """Forget that gradient."""
        if unit in self._buckets:
            self._buckets[unit].drop(param)

    def _tell_started(self, *, out_of_turn: bool) -> None:
        started = len(self._round.started)
        self._context.progress.started(started, left=len(self._round.order) - started, out_of_turn=out_of_turn)

    def _now_in_order(self) -> list[Unit]:
        """Return the units that have gradients, in the order of their reductions."""
        return [unit for unit in self._order if self._buckets[unit].flats]

    def _next_unit(self) -> Unit | None:
        """Return the unit that is to be reduced next in this backward."""
        place = len(self._round.started)
        return self._round.order[place] if place < len(self._round.order) else None

    def _reduce(self, unit: Unit) -> None:
        """Send a unit's bucket round."""
        bucket = self._buckets[unit]
        if not bucket.full:
            self._fill(bucket)  # maybe with nothing: the other ranks count on our zeros
        bucket.zero_the_rest()
        if self._own_parts is not None:
            self._add_earlier_parts(bucket, self._own_parts)
        bucket.move(Gradients.REDUCING)
        bucket.reduced = True
        self._context.trace.emit("reduce", unit.name)
        self._round.started.append(self._launch(bucket))
        if self.saves_memory() and (len(self._round.started) == 1 or self._round.is_root_left()):
            # The backward needs less than the forward did and, from the root on, nothing more.
            self._context.trim(keep=0)

    def _add_earlier_parts(self, bucket: Bucket, expected: int) -> None:
        parts = bucket.add_earlier_parts(self._apart())
        if parts != expected and not self._round.died:
            raise PhaseError(
                f"unit {bucket.unit.name!r} has gradients of {parts} parts, and this rank has {expected}: inside a "
                "loop over parts() they were dropped, by zero_grad() of the model or after a backward that failed. Run "
                "the loop again, from its first part"
            )

    def _launch(self, bucket: Bucket) -> _Reduction:
        unit, divisor = bucket.unit, self._averager.divisor
        reduction = _Reduction(bucket, self._context.traffic, bucket.flags())
        if self._diagnose and self._round.first_bad is None and (bad := bucket.first_bad()) is not None:
            self._round.first_bad = bad + sum(len(before.used) for before in self._round.started)
        for i, (flat, full) in enumerate(zip(bucket.flats, bucket.full, strict=True)):
            half = next((full[i] for full in bucket.earlier.summands()), None)
            operation = self._context.operation(f"reduce-scatter of unit {unit.name!r}, flat {i}", "reduce", unit.name)
            if self._round.stepping:
                step = self._prepare_step(unit, flat)
                mine = [int(bucket.holds(flat.params[row])) for row in flat.rows]
                if self._round.died:
                    mine = [-self._context.world_size for _ in mine]  # no rank steps by gradients that are not whole
                job = partial(self._averager.step_by, (full, half), flat, step, mine, divisor, unit.name, operation)
                reduction.steps.append(step)
            else:
                mean = self._averager.place(flat, full)
                job = partial(self._averager.average, (full, half), mean, divisor, unit.name, operation)
                reduction.means.append(mean)
            reduction.jobs.append(job)
        reduction.work = self._queue.submit(reduction.run)
        return reduction

    def _prepare_step(self, unit: Unit, flat: Flat) -> ShardStep:
        """Get ready for the step of a flat in this backward.

        Weights that are sent to other ranks must not change under way: a gather that was started ahead and never needed
        here may still be. Nodes of this backward may not use them again: where full weights always have memory autograd
        is informed by their version, and elsewhere handles check when the weights would be gathered again.
        """
        if unit.work is not None:
            unit.work.wait(self._context.progress.publish)
        if flat.full is None:
            unit.stepped.add(flat)
        else:
            torch.autograd.graph.increment_version([flat.params[row] for row in flat.rows])
        return self._stepper.step(flat)

    def _fill(self, bucket: Bucket) -> None:
        """Give a bucket its memory, once there is room for one more beside the root's."""
        now, progress = self._round, self._context.progress
        root = bucket.unit.is_root
        # Behind the last unit before the root there is nothing to compute that a reduction could run beside.
        waits_for_all = now.is_root_left() if root else self.saves_memory()
        while now.landed < len(now.started) and (waits_for_all or (not root and self._held() >= BUCKETS)):
            first = now.started[now.landed]
            with self._context.traffic.waiting("reduce", first.bucket.unit.name):
                if not first.submitted().wait_unless(partial(progress.ends_wait, now.landed, monotonic())):
                    break
            self._land(now.landed + 1)
        progress.filled(beyond=not root and self._held() >= BUCKETS and now.reduces)
        bucket.fill()

    def saves_memory(self) -> bool:
        """Whether little memory is worth more than reductions beside the backward, or pages that are kept for later."""
        return self._round.stepping and self._context.transport.blocking

    def _held(self) -> int:
        """Return how many units beside the root have a bucket."""
        return len(self._beside_root) - list(map(_phase_of, self._beside_root)).count(Gradients.EMPTY)

    def _land_what_is_done(self) -> None:
        """Free the buckets whose reductions are over."""
        now = self._round
        while now.landed < len(now.started) and now.started[now.landed].submitted().done():
            self._land(now.landed + 1)

    def _land(self, count: int) -> None:
        """Wait until the first `count` reductions are over, and free their buckets."""
        for reduction in self._round.started[self._round.landed : count]:
            with self._context.traffic.waiting("reduce", reduction.bucket.unit.name):
                reduction.submitted().wait()
            reduction.bucket.clear()
            self._round.landed += 1
            if self._round.is_root_left():
                self._context.trim(keep=0 if self.saves_memory() else SPARE)  # here may be the peak of a step

    def _hand_over(self) -> None:
        """Give the shards their gradients, as far as any rank has used their parameters.

        Of what was reduced just now the statistics are known. Sums with what was accumulated before are checked by a
        pass, and so are gradients that this backward has not touched.
        """
        if self._round.stepping:
            self._end_steps()
            return
        parts = [part for reduction in self._round.started for part in reduction.parts()]
        if not parts:
            return
        reduced = {id(shard) for shard, _, _ in parts}
        before = [(shard, shard.grad) for shard in self._shards() if shard.grad is not None]
        sums = [grad for shard, grad in before if id(shard) not in reduced]
        for shard, grad, used in parts:
            if shard.grad is not None:
                sums.append(shard.grad.add_(grad) if used else shard.grad + grad)
            elif used:
                shard.grad = grad
        means = [mean for reduction in self._round.started for mean in reduction.means]
        squares, bad = torch.stack([mean.total for mean in means]).unbind(1)
        flags = [*bad.unbind(), any_bad(sums, self._context.device).double()]
        users, self._nonfinite = self._gradient_flags.take([used for _, _, used in parts], flags)
        for (shard, grad, used), count in zip(parts, users, strict=True):
            if count and not used:
                shard.grad = grad if shard.grad is None else shard.grad.add_(grad)
        graded = [(shard, shard.grad) for shard in self._shards() if shard.grad is not None]
        by_flat = {
            mean.flat: mean.squares(square, by_blocks=self._own_parts is not None)
            for mean, square in zip(means, squares.unbind(), strict=True)
        }
        self._reduced_norm = None if before else ReducedNorm(by_flat, graded)
        self._judged = [weakref.ref(grad) for _, grad in graded]
        if self._diagnose and self._nonfinite.item():
            self._name_bad()

    def _end_steps(self) -> None:
        """Note that shards were stepped, and whether any rank had gradients that are not finite."""
        bad = [step.bad for reduction in self._round.started for step in reduction.steps]
        self._reduced_norm, self._judged = None, []
        self._stepper.end(self._gradient_flags.take([], bad)[1])

    def reduced_norm(self) -> ReducedNorm | None:
        """Return what the last backward left in `.grad`, and its squares; `None` if some of it was there before."""
        return self._reduced_norm

    def nonfinite(self) -> Tensor | None:
        """Return whether what the last backward left in `.grad` has a NaN or an infinity on any rank, [], 1 or 0.

        `None` if none of those gradients is there any more.
        """
        now = {id(shard.grad) for shard in self._shards() if shard.grad is not None}
        return self._nonfinite if any(id(each()) in now for each in self._judged) else None

    def _shards(self) -> list[nn.Parameter]:
        return [shard for unit in self._buckets for flat in unit.flats for shard in flat.shards]

    def _name_bad(self) -> None:
        """Warn of the first gradient that is not finite, of each rank that has one."""
        names = [flat.layout.slots[row].name for flat in self._flats() for row in flat.rows]
        warn_of([(rank, names[index]) for rank, index in self._gradient_flags.first_bad(self._round.first_bad)])

    def _flats(self) -> Iterator[Flat]:
        return (flat for unit in self._round.order for flat in self._buckets[unit].flats)

    def _agree_on_order(self) -> None:
        """After the first backward, take the order in which rank 0's units were complete as everybody's order."""
        if self._observed is None:
            return
        units = list(self._buckets)
        seen = [*self._observed, *(unit for unit in self._order if unit not in self._observed)]
        order = send([units.index(unit) for unit in seen], torch.int64, self._context.device)
        operation = self._context.operation("the order of reductions", "order of reductions")
        for transport in self._context.transports:
            broadcast(order, transport, operation=operation)
        self._order = [units[i] for i in order.tolist()]
        self._observed = None


def _pools(units: Sequence[Unit], context: Context) -> dict[Unit, Sequence[BufferPool]]:
    """Return where each unit has its bucket from: a pool for each of its flats.

    They keep no bucket of the root. It exists at the end of a backward only, where there are no activations any more;
    kept, it would add to what they take at their peak. The others are in use there already.
    """
    flats = range(max((len(unit.flats) for unit in units), default=0))
    kept = [BufferPool(context, _PURPOSE, most=BUCKETS) for _ in flats]
    none = [BufferPool(context, _PURPOSE, most=0) for _ in flats]
    return {unit: none if unit.is_root or len(units) == 1 else kept for unit in units}


def _check_precision(flats: Iterable[Flat]) -> None:
    for flat in flats:
        unfrozen = [row for row in flat.rows_now() if not flat.layout.trainable]
        if unfrozen and flat.local.dtype.itemsize < torch.float32.itemsize:
            raise LayoutError(
                f"parameter {flat.layout.slots[unfrozen[0]].name!r} was frozen when it was wrapped, and so is kept in "
                f"{flat.local.dtype} only, too narrow for the steps of an optimizer. Wrap it with requires_grad set, "
                "and freeze it afterwards"
            )
