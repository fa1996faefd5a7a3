"""Average one flat's gradients over the ranks, and store the mean or update the weights with the mean.

    stage 0     bucket [W*S]: this rank's segment is reduced in place, then all-gathered, so each rank has the mean
    stage 1     bucket [W*S]: this rank's segment is reduced in place, and the bucket's memory stays allocated
    stages 2, 3 a new shard [S]; the bucket is free after the reduction (with one rank the bucket is the shard)

Replicated flats are reduced as at stage 0.

With replicas (hybrid sharding) each segment is summed over the ranks that share a model, then over the replicas of the
segment. The sum is divided once, at the end, by the number of all ranks. If the dtypes of the sum and the weights
differ, the last addition casts its result.

Gradients that are accumulated in shards, and not divided yet, are kept as sums over the ranks that share a model. The
reduction that ends the accumulation adds its own sum to the kept sum, before it adds replicas and divides.

If items are counted (`scale.py`), the sums are divided when the total of the counts has arrived. After the backward,
means become the `.grad` of shards (`results.py`).

The last addition also computes the statistics of this rank's part, which norms and skipped steps need. The following
functions make additions. The last function that is called for a flat divides and computes statistics:

    _add_halves     one rank, order="tree": its two sums
    _add_alone      one rank, whose bucket is the mean already: only statistics
    _add_ranks      along a ring, or as the transport adds; the kernel of a last hop divides
    _add_kept       the sum that earlier backwards of an accumulation have kept
    _add_replicas   over the replicas of a shard; statistics take a separate pass

Legend: `W` ranks that share a model, `S` elements per shard, `P` rows of statistics. A flat (flat parameter) is the
parameters of one kind in a unit.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from shardlite_kernels import hop, new_stats, stats, stats_block
from shardlite_kernels.stats import stats_total
from torch import Tensor, nn

from shardlite.comm import Context, Operation, Rows, Work, all_gather, all_reduce, cut_up
from shardlite.comm.collectives import reduce_scatter, ring_step
from shardlite.comm.transport.base import FusedStep, StoreMean
from shardlite.grads.bucket import Bucket
from shardlite.grads.flags import SentNumbers
from shardlite.grads.policy import mean_stays
from shardlite.grads.scale import SHARE_NUMEL, Share, divide, divisor_of
from shardlite.params import Flat, Unit


class Mean(NamedTuple):
    """Memory for the mean of one flat's gradients."""

    flat: Flat
    full: Tensor
    """This rank's part of the mean: its shard [S], or the full mean [W*S] at stage 0."""

    own: Tensor
    """The part of `full` that this rank sums, [S]."""

    stats: Tensor
    """Statistics of `own`, one row per block, [P, 2]."""

    total: Tensor
    """Statistics of `own` as a whole, [2] in fp64: sum of squares, and number of blocks with a NaN or infinity."""


class Step(NamedTuple):
    """An optimizer's step of one flat inside the backward. It updates the flat with the mean of its gradients."""

    activate: Callable[[Tensor], None]
    """Function that selects the parameters to step: those for which its argument has a number above 0."""

    update: Callable[[int, Tensor | Rows | None, Tensor | None, int], None]
    """Function that steps elements from `start` on. Its arguments are `start`, `received`, `own` and `divisor`, as in
    `shardlite.comm.LastHop`."""

    fused: Callable[[int], FusedStep | None]
    """Function that returns the arguments of a kernel that steps all elements in one call. It returns `None` if a step
    takes several calls."""

    bad: Tensor
    """An int32 tensor [], which is not 0 if a mean had a NaN or infinity."""


class Stepping(NamedTuple):
    """An optimizer that steps inside the backward."""

    prepare: Callable[[Flat], Step]
    """Function that prepares the step of a flat."""

    end: Callable[[Tensor], None]
    """Function that records a change of the shards. Its argument, a tensor [], is above 0 if any rank found a NaN or
    infinity."""


class Terms(NamedTuple):
    """What all reductions of one backward have in common."""

    divisor: int
    """Divisor of the sums: the number of ranks, or of parts, whose gradients count. 1: sums are not divided by it."""

    share: Share
    """What this rank tells other ranks about the divisor."""

    stepping: Stepping | None
    """Optimizer that updates weights with the means. `None`: means are stored."""

    keeps: bool
    """Whether sums are kept, and neither added to replicas nor divided."""


class FlatReduction(NamedTuple):
    """The reduction of one flat. Its mean is stored in `mean` or, if there is a `step`, used for the step only."""

    flat: Flat
    full: Tensor
    """This rank's gradients [W*S], which are overwritten."""

    unit: str
    terms: Terms
    operation: Operation
    half: Tensor | None
    """With one rank, the sum over the first half of the parts, if there are two halves. Otherwise `None`."""

    earlier: Tensor | None
    """The kept sum of earlier backwards, [S]."""

    mean: Mean | None
    step: Step | None
    used: Sequence[int]
    """For a step, one number per parameter: 1 if this rank used the parameter, else 0. The number is `-W` or less if no
    rank may step the parameter."""

    def last_hop(self, start: int, received: Tensor | Rows, own: Tensor | None) -> None:
        """Run the step inside the last addition of a reduction."""
        assert self.step is not None, "without a step, the reduction writes the mean itself"
        self.step.update(start, received, own, self.terms.divisor)


@dataclass(eq=False)
class Reduction:
    """The reduction of one unit, with the memory for its results."""

    bucket: Bucket
    first_bad: int | None
    """Index in `used` of this rank's first gradient that is not finite. `None` without `diagnose`."""

    earlier: Sequence[Tensor]
    """The kept sums that the reduction adds. On a GPU their memory must not be freed before the program's stream has
    waited for the reduction."""

    used: list[int] = field(default_factory=list)
    """1 for each parameter that this rank used, else 0."""

    means: list[Mean] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    """Steps that use the means. If there are any, `means` is empty."""

    inputs: deque[FlatReduction] = field(default_factory=deque)
    """Flats that are not reduced yet. A flat is removed when its reduction runs, so that the bucket can be freed."""

    work: Work = field(init=False)

    def keep(self) -> None:
        """Keep the sums in the bucket, for the reduction that ends the accumulation."""
        self.bucket.keep_sums([mean.own for mean in self.means], self.used)

    def parts(self) -> Iterable[tuple[nn.Parameter, Tensor, int]]:
        """For each shard, return a triple: shard, view of its mean, and 1 if this rank used the parameter, else 0."""
        shards = [mean.flat.shards[index] for mean in self.means for index in mean.flat.trainable_slots]
        views = [view for mean in self.means for view in mean.flat.gradient_views(mean.full)]
        return zip(shards, views, self.used, strict=True)


class ReduceQueue:
    """Averages the gradients of one wrapped model, unit by unit, overlapping the computation."""

    def __init__(self, context: Context, stage: int) -> None:
        self._context = context
        self._mean_stays = mean_stays(stage, context.transport.world_size)
        self.operations = context.queue("reduce")
        """The queue that runs reductions and copies to buckets, one after the other."""

        self._staging = torch.empty(0, dtype=torch.uint8, device=context.device)
        self._sent = SentNumbers(context.device)

    def keeps_bucket(self, bucket: Bucket, stepping: Stepping | None) -> bool:
        """Return whether the bucket's memory becomes the gradient."""
        return stepping is None and (self._mean_stays or bucket.unit.replicated)

    def prepare(self, bucket: Bucket, terms: Terms, first_bad: int | None, *, died: bool) -> Reduction:
        """Return the reduction of a bucket, with memory for its results. The caller must submit it.

        Args:
            bucket: bucket to reduce. When the reduction runs, it must have a gradient or zeros for each parameter.
            terms: what all reductions of this backward have in common.
            first_bad: index of this rank's first gradient that is not finite, if known.
            died: whether the backward ended with an exception, so that no rank may use the sum for a step.
        """
        earlier = bucket.take_sums() if bucket.kept else ()
        given = Reduction(bucket, first_bad, earlier)
        for i, (flat, full) in enumerate(zip(bucket.flats, bucket.full, strict=True)):
            used = bucket.flags(flat) if len(bucket.used) < bucket.expected else [1] * len(flat.trainable_slots)
            mean = step = None
            if terms.stepping is None:
                mean = self._place(flat, full, keeps=terms.keeps)
                given.means.append(mean)
            else:
                self._before_step(bucket.unit, flat)
                step = terms.stepping.prepare(flat)
                given.steps.append(step)
            half = bucket.sums[0].full[i] if bucket.sums else None
            kept = earlier[i] if earlier else None
            users = [-self._context.world_size] * len(used) if died else used
            given.used += used
            unit = bucket.unit.name
            operation = self._context.operation(f"reduce-scatter of unit {unit!r}, flat {i}", "reduce", unit)
            given.inputs.append(FlatReduction(flat, full, unit, terms, operation, half, kept, mean, step, users))
        return given

    def reduce_unit(self, unit: str, inputs: deque[FlatReduction]) -> None:
        """Reduce a unit flat by flat. Runs on the queue."""
        with self._context.traffic.running("reduce", unit):
            while inputs:
                given = inputs.popleft()
                if given.mean is not None:
                    self._average(given, given.mean)
                elif given.step is not None:
                    self._step(given, given.step)
                del given  # frees the bucket of a flat before the next flat is reduced

    def _before_step(self, unit: Unit, flat: Flat) -> None:
        """Wait until the weights of a flat may change, and mark them as changed.

        A prefetch may still send the weights to other ranks, so this method waits until the prefetch has ended. Nodes
        of the running backward must not use the weights after the step. If full weights have permanent memory, autograd
        refuses such a use, because the version of the weights has changed. Otherwise the handles of saved weights
        refuse the use.
        """
        if unit.work is not None:
            unit.work.wait(self._context.progress.publish)
        if flat.full is None:
            unit.mark_stepped(flat)
        else:
            torch.autograd.graph.increment_version([flat.params[index] for index in flat.trainable_slots])

    def _place(self, flat: Flat, full: Tensor, *, keeps: bool = False) -> Mean:
        """Return memory for a mean, or for a sum that is kept. The memory stays allocated while it has views."""
        layout, dtype, rank = flat.gradients, flat.master.to_real(), self._context.transport.rank
        start, stop = layout.cuts[rank], layout.cuts[rank + 1]
        stays = full.dtype == dtype and not keeps and (self._mean_stays or flat.rank is None)
        if flat.rank is None and not keeps:
            memory = full if stays else full.new_empty(layout.full_numel, dtype=dtype)
            own = memory[start:stop]
        else:
            memory = own = full[start:stop] if stays else full.new_empty(stop - start, dtype=dtype)
        self._context.ledger.track("gradients", memory)
        return Mean(flat, memory, own, new_stats(own), full.new_empty(2, dtype=torch.float64))

    def _average(self, given: FlatReduction, mean: Mean) -> None:
        """Add all summands of one flat's gradients, and write the result to `mean`. The last addition divides it."""
        shard, replicas = self._context.reducing
        flat, keeps, divisor = given.flat, given.terms.keeps, given.terms.divisor
        add: Addition = self._add_ranks
        if given.half is not None:
            add = _add_halves
        elif shard.world_size == 1 and mean.own.data_ptr() == given.full.data_ptr():
            add = _add_alone
        if given.earlier is not None:
            add(given, mean.own, 1, None)
            add = _add_kept
        if replicas is not None and not keeps:
            add(given, mean.own, 1, None)
            add = self._add_replicas
        add(given, mean.own, 1 if keeps else divisor, mean.stats)
        if flat.rank is None and not keeps:
            cut = cut_up(len(mean.full), mean.full.dtype, shard, flat.gradients.uneven_cuts)
            all_gather(mean.full, shard, cut=cut, operation=given.operation)
        stats_total(mean.stats, out=mean.total)

    def _add_ranks(self, given: FlatReduction, own: Tensor, divisor: int, rows: Tensor | None) -> None:
        """Sum this rank's segment over the ranks that share a model."""
        full, shard = given.full, self._context.reducing[0]
        cut = cut_up(len(full), full.dtype, shard, given.flat.gradients.uneven_cuts, grain=stats_block(full))
        last = StoreMean(own, divisor, rows)
        reduce_scatter(full, shard, cut=cut, last=last, staging=self._scratch, operation=given.operation)

    def _add_replicas(self, given: FlatReduction, own: Tensor, divisor: int, rows: Tensor | None) -> None:
        """Sum this rank's segment over the replicas, in place."""
        replicas = self._context.reducing[1]
        assert replicas is not None, "there are replicas"
        operation = given.operation._replace(tally=self._context.traffic.tally("reduce over replicas", given.unit))
        all_reduce(own, replicas, divisor=divisor, staging=self._scratch, operation=operation)
        assert rows is not None, "no sum follows that of replicas"
        stats(own, rows)

    def _step(self, given: FlatReduction, step: Step) -> None:
        """Average one flat's gradients, and step it with the mean.

        The step is fused with the last addition of a ring. If an all-gather, another sum or a division by counts
        follows that addition, the step runs after these.
        """
        users, total = self._count_users(given)
        step.activate(users)
        if self._step_in_last_hop(given, step):
            return
        mean = self._place(given.flat, given.full)
        self._average(given, mean)
        if total is not None:
            divide(mean.full, divisor_of(total))
        step.update(0, None, mean.full, 1)

    def _step_in_last_hop(self, given: FlatReduction, step: Step) -> bool:
        """Reduce the gradients and step in the last addition, if this addition completes the mean.

        Return whether the gradients were reduced and the step was made.

        If a kernel runs the whole ring, the kernel steps only if one call can step the whole shard. Each rank decides
        this for its own shard.
        """
        shard, replicas = self._context.reducing
        flat, full = given.flat, given.full
        goes_on = replicas or given.earlier is not None or given.terms.share.counted
        if goes_on or flat.rank is None or shard.world_size == 1:
            return False
        cut = cut_up(len(full), full.dtype, shard, flat.gradients.uneven_cuts, grain=stats_block(full))
        if not shard.rings(full, cut):
            last, staging = given.last_hop, self._scratch
            reduce_scatter(full, shard, cut=cut, last=last, staging=staging, operation=given.operation)
        elif (fused := step.fused(cut.longest)) is not None:
            ring_step(full, shard, fused, divisor=given.terms.divisor, operation=given.operation)
        else:
            return False
        return True

    def _count_users(self, given: FlatReduction) -> tuple[Tensor, Tensor | None]:
        """Return the number of ranks that used each parameter, [number of parameters], and the total of counts, [].

        A fused step needs these numbers before the mean is complete. If ranks disagree about the divisor, all users are
        0, so that no rank steps. Without counts the total is `None`.
        """
        share = given.terms.share
        users = share.message(given.used, self._sent).clone()
        for transport in self._context.reducing:
            if transport is not None:
                operation = given.operation._replace(tally=self._context.traffic.tally("used", given.unit))
                all_reduce(users, transport, operation=operation)
        users, sums = users[:-SHARE_NUMEL], users[-SHARE_NUMEL:]
        users = users * ~share.disagree(sums, self._context.world_size, self._sent)
        return users, share.total(sums) if share.counted else None

    def _scratch(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return memory that successive operations share. The memory belongs to the stream of the queue."""
        if numel * dtype.itemsize > self._staging.numel():
            self._staging = self._context.reducing[0].empty_persistent(numel * dtype.itemsize, self._context.device)
            self._context.ledger.track("staging", self._staging)
        return self._staging.view(dtype)


Addition = Callable[[FlatReduction, Tensor, int, Tensor | None], None]
"""Function that adds summands to this rank's segment of a sum, [S], and divides the sum.

Its arguments are the reduction, the segment, the divisor, and memory for statistics of the result or `None`.
"""


def _add_halves(given: FlatReduction, own: Tensor, divisor: int, rows: Tensor | None) -> None:
    assert given.half is not None, "there are two halves"
    hop(own, given.half, given.full, divisor, rows)


def _add_alone(_: FlatReduction, own: Tensor, __: int, rows: Tensor | None) -> None:
    if rows is not None:
        stats(own, rows)


def _add_kept(given: FlatReduction, own: Tensor, divisor: int, rows: Tensor | None) -> None:
    assert given.earlier is not None, "there is a kept sum"
    hop(own, given.earlier, own, divisor, rows)
