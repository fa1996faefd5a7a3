"""Average one flat's gradients over the ranks: where the mean is stored, or the step that it makes.

    stage 0     bucket [W*S]: own segment reduced in place, then all-gathered: every rank has the whole mean
    stage 1     bucket [W*S]: own segment reduced in place; the bucket's memory stays
    stages 2, 3 a new shard [S]; the bucket is free after the reduction (on one rank it is the shard itself)

With replicas (hybrid sharding) each segment is summed within the ranks that share a model, then over the replicas of
that segment. The sum is divided once, at the end, by the number of all ranks. If the sum has another dtype than the
weights, its last addition casts it.

The last addition also computes the statistics of the own part, which norms and skipped steps need. A separate pass
computes them if it is no sum over the ranks that share a model (one rank alone, replicas).

Legend: `W` ranks that share a model, `S` elements per shard, `P` rows of statistics.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import torch
from shardlite_kernels import hop, new_stats, stats, stats_block, stats_total
from torch import Tensor, nn

from shardlite.comm import (
    Context,
    FusedStep,
    Operation,
    Transport,
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
    """The part of `whole` that this rank sums, [S]."""

    stats: Tensor
    """The statistics of `own`, block by block, [P, 2]."""

    total: Tensor
    """Statistics of all of `own`, [2] in fp64: the sum of squares, and the number of blocks with a NaN or infinity."""


class Step(NamedTuple):
    """The step of one flat inside the backward: what an optimizer does with the mean of its gradients."""

    activate: Callable[[Tensor], None]
    """Select the parameters to step: those whose entry in a tensor [number of parameters] is above 0."""

    update: Callable[[int, Tensor | None, Tensor | None, int, int | None], None]
    """Step by elements from `start` on. Arguments: start, received, own, divisor, first (`shardlite.comm.LastHop`)."""

    fused: Callable[[int], FusedStep | None]
    """Return what one kernel steps by all elements of the mean, or `None` if that takes several calls."""

    bad: Tensor
    """[], int32, not 0 if a mean had a NaN or an infinity."""


class Stepping(NamedTuple):
    """The optimizer that steps in a backward."""

    prepare: Callable[[Flat], Step]
    """Prepare the step of a flat."""

    end: Callable[[Tensor], None]
    """Record that shards have changed. The argument [] is above 0 if any rank found a NaN or an infinity."""


@dataclass(frozen=True, eq=False)
class FlatReduction:
    """The reduction of one flat. Its mean is stored in `mean` or, with `step`, stepped by and dropped."""

    flat: Flat
    full: Tensor
    """This rank's gradients [W*S], which are overwritten."""

    unit: str
    divisor: int
    operation: Operation
    half: Tensor | None
    """On one rank, the sum of the first half of the parts, if there are two halves."""

    mean: Mean | None = None
    step: Step | None = None
    used: Sequence[int] = ()
    """For a step: 1 for each parameter that this rank used, else 0; `-W` or less for those that no rank may step."""

    def last_hop(self, start: int, received: Tensor, own: Tensor | None, first: int | None = 0) -> None:
        """Step by the last addition of a reduction."""
        assert self.step is not None, "means are written by the reduction itself"
        self.step.update(start, received, own, self.divisor, first)


@dataclass(eq=False)
class Reduction:
    """The reduction of one unit, and where its results will be."""

    bucket: Bucket
    used: Sequence[int]
    """1 for each parameter that this rank used, else 0."""

    first_bad: int | None
    """The index in `used` of this rank's first own gradient that is not finite; with `diagnose` only."""

    means: Sequence[Mean]
    steps: Sequence[Step]
    """The steps that are taken instead of storing means."""

    inputs: deque[FlatReduction]
    """The flats that are not reduced yet. It is emptied, so that the bucket can be freed."""

    work: Work = field(init=False)

    def parts(self) -> Iterable[tuple[nn.Parameter, Tensor, int]]:
        """Return each shard with its part of the mean, a view, and whether this rank used its parameter."""
        shards = [mean.flat.shards[index] for mean in self.means for index in mean.flat.trainable_slots]
        views = [view for mean in self.means for view in mean.flat.gradient_views(mean.whole)]
        return zip(shards, views, self.used, strict=True)


class ReduceQueue:
    """Averages the gradients of one wrapped model at one stage, unit by unit, concurrently with the computation."""

    def __init__(self, context: Context, stage: int) -> None:
        self._context = context
        self._stage = stage
        self.operations = context.queue("reduce")
        """Runs reductions and copies to buckets in order."""

        self._staging = torch.empty(0, dtype=torch.uint8, device=context.device)
        self._sent = SentNumbers(context.device)

    def keeps_bucket(self, stepping: Stepping | None) -> bool:
        """Return whether the bucket's memory becomes the gradient."""
        return stepping is None and (self._stage < 2 or self._context.transport.world_size == 1)

    def prepare(
        self, bucket: Bucket, divisor: int, stepping: Stepping | None, first_bad: int | None, *, died: bool
    ) -> Reduction:
        """Return the reduction of a bucket, with memory for its results. It still has to be submitted.

        Args:
            bucket: holds a gradient, or zeros, of each parameter, at the latest when the reduction runs.
            divisor: divides the sum: the number of ranks, or parts, whose gradients count.
            stepping: steps by means; `None` stores them.
            first_bad: the index of this rank's first gradient that is not finite, if known.
            died: whether the backward ended in an exception, so that no rank may step by the sum.
        """
        flags = [bucket.flags(flat) for flat in bucket.flats]
        never = -self._context.world_size
        used = [[never] * len(each) for each in flags] if died else flags
        inputs = deque(self._prepare_flat(bucket, i, divisor, stepping, used[i]) for i in range(len(bucket.flats)))
        means = [each.mean for each in inputs if each.mean is not None]
        steps = [each.step for each in inputs if each.step is not None]
        return Reduction(bucket, [*chain.from_iterable(flags)], first_bad, means, steps, inputs)

    def _prepare_flat(
        self, bucket: Bucket, i: int, divisor: int, stepping: Stepping | None, used: Sequence[int]
    ) -> FlatReduction:
        unit, flat, full = bucket.unit, bucket.flats[i], bucket.full[i]
        operation = self._context.operation(f"reduce-scatter of unit {unit.name!r}, flat {i}", "reduce", unit.name)
        half = next((each[i] for each in bucket.earlier.summands()), None)
        shared = flat, full, unit.name, divisor, operation, half
        if stepping is None:
            return FlatReduction(*shared, mean=self._place(flat, full))
        self._before_step(unit, flat)
        return FlatReduction(*shared, step=stepping.prepare(flat), used=used)

    def run(self, unit: str, inputs: deque[FlatReduction]) -> None:
        """Reduce a unit flat by flat. Runs on the queue."""
        with self._context.traffic.running("reduce", unit):
            while inputs:
                self.reduce_flat(inputs.popleft())

    def reduce_flat(self, given: FlatReduction) -> None:
        """Average one flat's gradients.

        A step is fused with the last addition of a ring. If the mean is all-gathered or added once more (stage 0,
        replicas) the step follows.
        """
        if given.step is not None:
            given.step.activate(self._count_users(given))
            if self._step_in_last_hop(given, given.step):
                return
        mean = given.mean or self._place(given.flat, given.full)
        self._average(given, mean)
        if given.step is not None:
            given.step.update(0, None, mean.whole, 1, 0)

    def _before_step(self, unit: Unit, flat: Flat) -> None:
        """Wait until the weights of a flat may change, and mark them as changed.

        A gather that was started ahead may still send them to other ranks. Nodes of this backward must not use them
        again: if full weights always have memory, their version tells autograd, otherwise handles check when the
        weights would be gathered again.
        """
        if unit.work is not None:
            unit.work.wait(self._context.progress.publish)
        if flat.full is None:
            unit.mark_stepped(flat)
        else:
            torch.autograd.graph.increment_version([flat.params[index] for index in flat.trainable_slots])

    def _place(self, flat: Flat, full: Tensor) -> Mean:
        """Return memory for a mean. It lives as long as a `.grad` views it."""
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

    def _average(self, given: FlatReduction, mean: Mean) -> None:
        """Reduce gradients into `mean`."""
        full = given.full
        cuts = mean.flat.gradients.uneven_cuts
        shard, replicas = self._context.reducing
        in_place = given.half is None and shard.world_size == 1 and mean.own.data_ptr() == full.data_ptr()
        if given.half is not None:
            hop(mean.own, given.half, full, given.divisor, mean.stats)
        elif not in_place:
            reduce_scatter(
                full,
                shard,
                cuts=cuts,
                out=mean.own,
                divisor=1 if replicas else given.divisor,
                stats=None if replicas else mean.stats,
                staging=self._staging_for(full, mean),
                operation=given.operation,
            )
        if replicas:
            self._reduce_over_replicas(mean.own, replicas, given)
        if in_place or replicas:
            stats(mean.own, mean.stats)
        if self._stage == 0:
            all_gather(mean.whole, shard, operation=given.operation, cuts=cuts)
        stats_total(mean.stats, out=mean.total)

    def _reduce_over_replicas(self, own: Tensor, replicas: Transport, given: FlatReduction) -> None:
        """Sum this rank's segment [S] over the replicas, in place, and divide it."""
        staging = self._scratch(staging_numel(own.numel(), replicas, own.dtype), own.dtype)
        operation = given.operation._replace(tally=self._context.traffic.tally("reduce over replicas", given.unit))
        all_reduce(own, replicas, divisor=given.divisor, staging=staging, operation=operation)

    def _step_in_last_hop(self, given: FlatReduction, step: Step) -> bool:
        """Step while the gradients are reduced, if the last addition yields the mean. Return whether it was done.

        A kernel that walks the ring steps only if one call can. Each rank does what its own shard allows.
        """
        shard, replicas = self._context.reducing
        flat, full = given.flat, given.full
        cuts = flat.gradients.uneven_cuts
        if self._stage == 0 or replicas or shard.world_size == 1:
            return False
        if rings_in_kernel(full, shard, cuts):
            if (fused := step.fused(full.numel() // shard.world_size)) is not None:
                ring_step(full, shard, fused, divisor=given.divisor, operation=given.operation)
            return fused is not None
        staging = self._staging_of(flat, full)
        reduce_scatter(full, shard, cuts=cuts, last=given.last_hop, staging=staging, operation=given.operation)
        return True

    def _count_users(self, given: FlatReduction) -> Tensor:
        """Return the number of ranks that used each parameter, [rows]: steps begin before their means are complete."""
        users = self._sent(given.used).clone()
        for transport in self._context.reducing:
            if transport is not None:
                operation = given.operation._replace(tally=self._context.traffic.tally("used", given.unit))
                all_reduce(users, transport, operation=operation)
        return users

    def _staging_for(self, full: Tensor, mean: Mean) -> Tensor | None:
        """Return where partial sums arrive, or `None` if they arrive in the shard itself."""
        layout = mean.flat.gradients
        if layout.world_size == 1 or rings_in_kernel(full, self._context.reducing[0], layout.uneven_cuts):
            return None
        in_out = stages_in_out(self._context.reducing[0]) and mean.own.dtype == full.dtype
        if in_out and layout.uneven_cuts is None and storage_key(mean.own) != storage_key(full):
            return None
        return self._staging_of(mean.flat, full)

    def _staging_of(self, flat: Flat, full: Tensor) -> Tensor:
        """Return memory where partial sums arrive."""
        layout, transport = flat.gradients, self._context.reducing[0]
        cuts, grain = layout.uneven_cuts, stats_block(full)
        return self._scratch(
            staging_numel(layout.full_numel, transport, full.dtype, cuts=cuts, grain=grain), full.dtype
        )

    def _scratch(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return memory that successive operations share. Its stream is the queue's."""
        if numel * dtype.itemsize > self._staging.numel():
            self._staging = self._context.reducing[0].empty_persistent(numel * dtype.itemsize, self._context.device)
            self._context.ledger.track("staging", self._staging)
        return self._staging.view(dtype)
