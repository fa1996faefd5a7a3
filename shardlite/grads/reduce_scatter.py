"""Averaging one flat's gradients over the ranks: where the mean will be, and how it gets there.

    stage 0     bucket [W*S]: own segment reduced in place, then gathered by all: every rank has the whole mean
    stage 1     bucket [W*S]: own segment reduced in place, with no memory but the bucket's, which stays
    stages 2, 3 a new shard [S]; the bucket is free when the reduction is over (on one rank it is the shard itself)

With replicas (hybrid sharding) each segment is added up within the ranks that share a model, then over the replicas of
that segment. The division by the number of all ranks comes last, once. Where the sum has another dtype than the weights
it is cast by its last addition.

The last addition also takes the statistics of the own part, from which norms and the skipping of steps follow. Where it
is no sum over the ranks that share a model (one rank alone, replicas) a pass takes them afterwards.

Legend: `W` ranks that share a model, `S` elements per shard, `P` rows of statistics.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import NamedTuple, Protocol

import torch
from shardlite_kernels import hop, new_stats, stats, stats_block, stats_total
from torch import Tensor, nn

from shardlite.comm import (
    Context,
    FusedStep,
    Moment,
    Operation,
    Work,
    all_gather,
    all_reduce,
    reduce_scatter,
    ring_step,
    rings_in_kernel,
    stages_in_out,
    staging_numel,
)
from shardlite.grads.bucket import Bucket
from shardlite.grads.flags import SentNumbers
from shardlite.params import Flat, Unit, storage_key


class Mean(NamedTuple):
    """Memory for the mean of one flat's gradients."""

    flat: Flat
    whole: Tensor
    """This rank's part of the mean: its shard [S], or all of it [W*S] at stage 0."""

    own: Tensor
    """The part of `whole` that this rank adds up, [S]."""

    stats: Tensor
    """The statistics of `own`, block by block, [P, 2]."""

    total: Tensor
    """Statistics of all of `own`, [2] in fp64: the sum of squares, and how many blocks have a NaN or an infinity."""


class ShardStep(Protocol):
    """The step that an optimizer takes by the mean of one flat's gradients, as soon as that is there."""

    bad: Tensor
    """[], int32, not 0 once a mean had a NaN or an infinity."""

    def activate(self, users: Tensor) -> None:
        """Step those parameters that have users: a number for each slot that has gradients, [rows]."""

    def __call__(
        self, start: int, received: Tensor | None, own: Tensor | None, divisor: int = 1, first: int | None = 0
    ) -> None:
        """Step by elements `[start, start + n)` of the mean: `(received + own) / divisor`, [n] each, or just `own`.

        Without `own`, `received` has a row of each rank, [W, n], to be added from row `first` on, or as a balanced
        tree if that is `None`.
        """

    def fused(self, numel: int) -> FusedStep | None:
        """Return what one kernel steps by all `numel` elements of the mean, or `None` if that takes several calls."""


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


@dataclass(frozen=True)
class Reduction:
    """The reduction of one unit, and where its results will be."""

    bucket: Bucket
    work: Work
    used: Sequence[int]
    """1 for each parameter that this rank has used, else 0."""

    first_bad: int | None
    """The index in `used` of this rank's first own gradient that is not finite; with `diagnose` only."""

    means: Sequence[Mean]
    steps: Sequence[ShardStep]
    """Those that are taken instead of keeping means."""

    def parts(self) -> Iterable[tuple[nn.Parameter, Tensor, int]]:
        """Yield each shard with its part of the mean, a view, and whether this rank has used its parameter."""
        shards = [mean.flat.shards[row] for mean in self.means for row in mean.flat.rows]
        views = [view for mean in self.means for view in mean.flat.gradient_views(mean.whole)]
        return zip(shards, views, self.used, strict=True)


class Copies(NamedTuple):
    """Gradients that are copied to a bucket on the queue, and are to be kept until that is over."""

    gradients: Sequence[Tensor]
    work: Work


class Summand(NamedTuple):
    """What this rank adds to the sum of one flat's gradients, and how that is made."""

    flat: Flat
    full: Tensor
    """This rank's gradients [W*S], which the sum overwrites."""

    half: Tensor | None
    """On one rank, the sum of the first half of the parts, if there are two."""

    divisor: int
    unit: str
    """The name of the unit."""

    operation: Operation


class Averager:
    """Averages the gradients of one wrapped model at one stage, one unit after the other, beside the computation."""

    def __init__(self, context: Context, stepper: Stepper, *, stage: int, diagnose: bool, by_parts: bool) -> None:
        """With `diagnose`, gradients that are not finite are looked for before they are reduced; `by_parts`, they are
        sums over parts, which are made as gradients come."""
        self._context = context
        self._stepper = stepper
        self._stage = stage
        self._diagnose = diagnose
        self._queue = context.queue("reduce")
        self.on_stream = self._queue.on_stream and not by_parts
        """Whether gradients are copied to buckets on the stream of reductions: on a GPU."""

        self._staging = torch.empty(0, dtype=torch.uint8, device=context.device)
        self._sent = SentNumbers(context.device)

    def moment(self) -> Moment | None:
        """Return this moment of the program's computation."""
        return self._queue.moment()

    def start(
        self, bucket: Bucket, divisor: int, *, stepping: bool, died: bool, behind: Moment | None = None
    ) -> tuple[Reduction, Copies | None]:
        """Start the reduction of a bucket. Return it with the copies to the bucket, if there are any left to make.

        Args:
            bucket: holds a gradient, or zeros, of each parameter.
            divisor: number of ranks, or parts, whose gradients count: the divisor of their sum.
            stepping: whether means are stepped by, and not kept.
            died: whether the backward ended in an exception, so that what is reduced now is not all.
            behind: the moment of the program's computation that the reduction is behind, if that is not now.
        """
        unit = bucket.unit
        flags = list(map(bucket.flags, bucket.flats))
        first_bad = bucket.first_bad() if self._diagnose else None
        is_apart = self.on_stream and not bucket.full and not self._lasts(stepping)
        copies = self._copy_in(bucket, behind, apart=is_apart) if self.on_stream else None
        with nullcontext() if behind is None else self._queue.stream(behind):
            means, steps, jobs = self._plan(bucket, flags, divisor, stepping=stepping, died=died)
        work = self._queue.submit(partial(self._run, unit.name, jobs), behind=behind)
        if behind is not None:
            self._hand_over(means, steps)
        if is_apart:
            bucket.release()
        return Reduction(bucket, work, [*chain.from_iterable(flags)], first_bad, means, steps), copies

    def _lasts(self, stepping: bool) -> bool:
        """Whether the bucket's memory becomes the gradient."""
        return not stepping and (self._stage < 2 or self._context.transport.world_size == 1)

    def _copy_in(self, bucket: Bucket, behind: Moment | None, *, apart: bool) -> Copies:
        """Start copying gradients into a bucket.

        Memory that is used on the queue only, `apart` from the program, is of the queue's stream, so that the bucket
        can be released as soon as the reduction is queued, and the next one is in the same memory.
        """
        if not bucket.full:
            with self._queue.stream() if apart or behind is not None else nullcontext():
                bucket.take_memory(self._context.reducing[0] if apart else None)
        copy_in, gradients = bucket.copy_in()
        return Copies(gradients, self._queue.submit(copy_in, behind=behind))

    def _hand_over(self, means: Sequence[Mean], steps: Sequence[ShardStep]) -> None:
        """Let the program use memory that was allocated for the queue's stream."""
        for tensor in [*chain.from_iterable(mean[1:] for mean in means), *(step.bad for step in steps)]:
            self._context.streams.take(tensor)

    def _plan(
        self, bucket: Bucket, flags: Sequence[Sequence[int]], divisor: int, *, stepping: bool, died: bool
    ) -> tuple[list[Mean], list[ShardStep], deque[Callable[[], None]]]:
        """Return the memory of means, or the steps that are taken instead, and what reduces flat by flat."""
        context, unit = self._context, bucket.unit
        means: list[Mean] = []
        steps: list[ShardStep] = []
        jobs: deque[Callable[[], None]] = deque()
        for i, (flat, full) in enumerate(zip(bucket.flats, bucket.full, strict=True)):
            half = next((full[i] for full in bucket.earlier.summands()), None)
            operation = context.operation(f"reduce-scatter of unit {unit.name!r}, flat {i}", "reduce", unit.name)
            grads = Summand(flat, full, half, divisor, unit.name, operation)
            if stepping:
                steps.append(self._prepare_step(unit, flat))
                # No rank steps by gradients that are not whole.
                used = [-context.world_size] * len(flat.rows) if died else flags[i]
                jobs.append(partial(self._step_by, grads, steps[-1], used))
            else:
                means.append(self._place(grads))
                jobs.append(partial(self._average, grads, means[-1]))
        return means, steps, jobs

    def _run(self, unit: str, jobs: deque[Callable[[], None]]) -> None:
        """Reduce flat by flat. On the queue."""
        with self._context.traffic.running("reduce", unit):
            while jobs:  # emptied, so that the bucket is free when the work is done
                jobs.popleft()()

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

    def _place(self, grads: Summand) -> Mean:
        """Find memory for a mean. It lives as long as a `.grad` views it."""
        flat, full = grads.flat, grads.full
        layout, dtype = flat.gradients, flat.master
        start, stop = layout.shard_range(self._context.transport.rank)
        if self._stage == 0:
            whole = full if full.dtype == dtype else full.new_empty(layout.full_numel, dtype=dtype)
            own = whole[start:stop]
        elif (self._stage == 1 or layout.world_size == 1) and full.dtype == dtype:
            whole = own = full[start:stop]
        else:
            whole = own = full.new_empty(stop - start, dtype=dtype)
        self._context.ledger.track("gradients", whole)
        return Mean(flat, whole, own, new_stats(own), full.new_empty(2, dtype=torch.float64))

    def _average(self, grads: Summand, mean: Mean) -> None:
        """Reduce this rank's gradients into `mean`, and overwrite them. On the queue."""
        flat, full, half, divisor, unit, operation = grads
        context, cuts = self._context, flat.gradients.uneven_cuts
        shard, replicas = context.reducing
        in_place = half is None and shard.world_size == 1 and mean.own.data_ptr() == full.data_ptr()
        if half is not None:
            hop(mean.own, half, full, divisor, mean.stats)
        elif not in_place:
            staging, by = self._staging_for(full, mean), 1 if replicas else divisor
            rows = None if replicas else mean.stats
            reduce_scatter(
                full, shard, out=mean.own, divisor=by, stats=rows, staging=staging, operation=operation, cuts=cuts
            )
        if replicas:
            room = self._room(staging_numel(mean.own.numel(), replicas, mean.own.dtype), mean.own.dtype)
            across = operation._replace(tally=context.traffic.tally("reduce over replicas", unit))
            all_reduce(mean.own, replicas, divisor=divisor, staging=room, operation=across)
        if in_place or replicas:
            stats(mean.own, mean.stats)
        if self._stage == 0:
            all_gather(mean.whole, shard, operation=operation, cuts=cuts)
        stats_total(mean.stats, out=mean.total)

    def _step_by(self, grads: Summand, step: ShardStep, used: Sequence[int]) -> None:
        """Reduce this rank's gradients, and step by their mean instead of keeping it. On the queue.

        Where the mean is the last addition of a ring, that and the step are one. Where it is gathered or added up once
        more (stage 0, replicas) the step follows. `used` is 1 for each parameter that this rank has used, else 0, and
        `-W` or less for those that no rank is to step.
        """
        flat, full, _, divisor, unit, operation = grads
        shard, replicas = self._context.reducing
        step.activate(self._users(used, unit, operation))
        if self._stage == 0 or replicas or shard.world_size == 1:
            mean = self._place(grads)
            self._average(grads, mean)
            step(0, None, mean.whole)
            return
        if rings_in_kernel(full, shard, flat.gradients.uneven_cuts):
            self._step_in_ring(grads, step)
            return

        def last(start: int, received: Tensor, own: Tensor | None, first: int | None = 0) -> None:
            step(start, received, own, divisor, first)

        staging, cuts = self._staging_of(flat, full), flat.gradients.uneven_cuts
        reduce_scatter(full, shard, last=last, staging=staging, operation=operation, cuts=cuts)

    def _step_in_ring(self, grads: Summand, step: ShardStep) -> None:
        """Step in the kernel that walks the ring, or behind it. Each rank does what its own shard allows."""
        flat, full, _, divisor, _, operation = grads
        shard, _ = self._context.reducing
        numel = full.numel() // shard.world_size
        fused = step.fused(numel)
        if fused is not None:
            ring_step(full, shard, fused, divisor=divisor, operation=operation)
            return
        own = full.new_empty(numel, dtype=flat.master)
        self._context.ledger.track("staging", own)
        reduce_scatter(full, shard, out=own, divisor=divisor, operation=operation)
        step(0, None, own)

    def _users(self, used: Sequence[int], unit: str, operation: Operation) -> Tensor:
        """Return how many ranks have used each parameter, [rows]. Steps need to know before their means are whole."""
        users = self._sent(used).clone()
        for transport in self._context.reducing:
            if transport is not None:
                used_by = operation._replace(tally=self._context.traffic.tally("used", unit))
                all_reduce(users, transport, operation=used_by)
        return users

    def _staging_for(self, full: Tensor, mean: Mean) -> Tensor | None:
        """Return where partial sums arrive, if that cannot be the shard itself."""
        layout = mean.flat.gradients
        if layout.world_size == 1 or rings_in_kernel(full, self._context.reducing[0], layout.uneven_cuts):
            return None
        in_out = stages_in_out(self._context.reducing[0]) and mean.own.dtype == full.dtype
        if in_out and layout.uneven_cuts is None and storage_key(mean.own) != storage_key(full):
            return None
        return self._staging_of(mean.flat, full)

    def _staging_of(self, flat: Flat, full: Tensor) -> Tensor:
        """Return memory where partial sums can arrive."""
        layout, transport = flat.gradients, self._context.reducing[0]
        cuts, grain = layout.uneven_cuts, stats_block(full)
        numel = staging_numel(layout.full_numel, transport, full.dtype, cuts=cuts, grain=grain)
        return self._room(numel, full.dtype)

    def _room(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return memory that serves one operation after the other. Called on the queue, whose stream owns it."""
        if numel * dtype.itemsize > self._staging.numel():
            shard, _ = self._context.reducing
            self._staging = shard.empty_persistent(numel * dtype.itemsize, self._context.device)
            self._context.ledger.track("staging", self._staging)
        return self._staging.view(dtype)
