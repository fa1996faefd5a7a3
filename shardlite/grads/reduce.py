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

If items are counted (`scale.py`), the total of the counts arrives with the flags. So the sum is divided after its
reduction, in a separate pass over this rank's part.

The last addition also computes the statistics of this rank's part, which norms and skipped steps need. If no such
addition completes the mean (one rank, or replicas), a separate pass computes the statistics.

After the backward, means become the `.grad` of shards. A parameter that no rank used keeps its former `.grad`. To find
such parameters, each rank contributes one flag per parameter, and one all-reduce sums the flags. If this rank has used
all parameters, the host does not read the sums. Otherwise it reads them, and so waits for the device.

Legend: `W` ranks that share a model, `S` elements per shard, `P` rows of statistics. A flat (flat parameter) is the
parameters of one kind in a unit.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

import torch
from shardlite_kernels import hop, new_stats, stats, stats_block, stats_total
from torch import Tensor, nn

from shardlite.comm import (
    Context,
    FusedStep,
    Operation,
    Rows,
    StoreMean,
    Transport,
    Work,
    all_gather,
    all_reduce,
    cut_up,
    reduce_scatter,
    ring_step,
    rings_in_kernel,
    stages_in_out,
    staging_numel,
)
from shardlite.errors import PhaseError
from shardlite.grads.bucket import Bucket
from shardlite.grads.flags import SentNumbers, any_bad, warn_of
from shardlite.grads.norm import ReducedNorm, Squares
from shardlite.grads.options import NUMEL as OPTIONS_NUMEL
from shardlite.grads.options import StepOptions
from shardlite.grads.policy import mean_stays
from shardlite.grads.scale import SHARE_NUMEL, Scale, Share, divide, divisor_of
from shardlite.params import Flat, Unit, storage_key


class Mean(NamedTuple):
    """Memory for the mean of one flat's gradients."""

    flat: Flat
    whole: Tensor
    """This rank's part of the mean: its shard [S], or the whole mean [W*S] at stage 0."""

    own: Tensor
    """The part of `whole` that this rank sums, [S]."""

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
        views = [view for mean in self.means for view in mean.flat.gradient_views(mean.whole)]
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
                self.reduce_flat(inputs.popleft())

    def reduce_flat(self, given: FlatReduction) -> None:
        """Average one flat's gradients, and run the step if there is one.

        A step is fused with the last addition of a ring. If an all-gather, another sum or a division by counts follows
        that addition, the step runs after these.
        """
        total = None
        if given.step is not None:
            users, total = self._count_users(given)
            given.step.activate(users)
            if self._step_in_last_hop(given, given.step):
                return
        mean = given.mean or self._place(given.flat, given.full)
        self._average(given, mean)
        if total is not None:
            divide(mean.whole, divisor_of(total))
        if given.step is not None:
            given.step.update(0, None, mean.whole, 1)

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
        stays = full.dtype == dtype and (self._mean_stays or flat.rank is None)
        if keeps:
            whole = own = full.new_empty(stop - start, dtype=dtype)
        elif flat.rank is None:
            whole = full if stays else full.new_empty(layout.full_numel, dtype=dtype)
            own = whole[start:stop]
        elif stays:
            whole = own = full[start:stop]
        else:
            whole = own = full.new_empty(stop - start, dtype=dtype)
        self._context.ledger.track("gradients", whole)
        return Mean(flat, whole, own, new_stats(own), full.new_empty(2, dtype=torch.float64))

    def _average(self, given: FlatReduction, mean: Mean) -> None:
        """Reduce gradients, add the kept sum of earlier backwards, and write the result to `mean`."""
        full, divisor, earlier, keeps = given.full, given.terms.divisor, given.earlier, given.terms.keeps
        cuts = mean.flat.gradients.uneven_cuts
        shard, replicas = self._context.reducing
        if keeps:
            replicas, divisor = None, 1
        in_place = given.half is None and shard.world_size == 1 and mean.own.data_ptr() == full.data_ptr()
        if given.half is not None:
            hop(mean.own, given.half, full, divisor, mean.stats)
        elif not in_place:
            is_sum = replicas is not None or earlier is not None
            last = StoreMean(mean.own) if is_sum else StoreMean(mean.own, divisor, mean.stats)
            staging = self._staging_for(full, mean)
            cut = cut_up(len(full), full.dtype, shard, cuts, grain=stats_block(full))  # as for the staging memory
            reduce_scatter(full, shard, cut=cut, last=last, staging=staging, operation=given.operation)
        if earlier is not None:
            hop(mean.own, earlier, mean.own, 1 if replicas else divisor, None if replicas else mean.stats)
        if replicas:
            self._reduce_over_replicas(mean.own, replicas, given)
        if (in_place and earlier is None) or replicas:
            stats(mean.own, mean.stats)
        if mean.flat.rank is None and not keeps:
            cut = cut_up(len(mean.whole), mean.whole.dtype, shard, cuts)
            all_gather(mean.whole, shard, cut=cut, operation=given.operation)
        stats_total(mean.stats, out=mean.total)

    def _reduce_over_replicas(self, own: Tensor, replicas: Transport, given: FlatReduction) -> None:
        """Sum this rank's segment [S] over the replicas, in place, and divide it."""
        staging = self._scratch(staging_numel(own.numel(), replicas, own.dtype), own.dtype)
        operation = given.operation._replace(tally=self._context.traffic.tally("reduce over replicas", given.unit))
        all_reduce(own, replicas, divisor=given.terms.divisor, staging=staging, operation=operation)

    def _step_in_last_hop(self, given: FlatReduction, step: Step) -> bool:
        """Reduce the gradients and step in the last addition, if this addition completes the mean.

        Return whether the gradients were reduced and the step was made.

        If a kernel runs the whole ring, the kernel steps only if one call can step the whole shard. Each rank decides
        this for its own shard.
        """
        shard, replicas = self._context.reducing
        flat, full = given.flat, given.full
        cuts = flat.gradients.uneven_cuts
        goes_on = replicas or given.earlier is not None or given.terms.share.counted
        if goes_on or flat.rank is None or shard.world_size == 1:
            return False
        if rings_in_kernel(full, shard, cuts):
            if (fused := step.fused(full.numel() // shard.world_size)) is not None:
                ring_step(full, shard, fused, divisor=given.terms.divisor, operation=given.operation)
            return fused is not None
        staging = self._staging_of(flat, full)
        cut = cut_up(len(full), full.dtype, shard, cuts, grain=stats_block(full))
        reduce_scatter(full, shard, cut=cut, last=given.last_hop, staging=staging, operation=given.operation)
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

    def _staging_for(self, full: Tensor, mean: Mean) -> Tensor | None:
        """Return memory for received partial sums, or `None` if they are received in the shard itself."""
        layout = mean.flat.gradients
        if layout.world_size == 1 or rings_in_kernel(full, self._context.reducing[0], layout.uneven_cuts):
            return None
        in_out = stages_in_out(self._context.reducing[0]) and mean.own.dtype == full.dtype
        if in_out and layout.uneven_cuts is None and storage_key(mean.own) != storage_key(full):
            return None
        return self._staging_of(mean.flat, full)

    def _staging_of(self, flat: Flat, full: Tensor) -> Tensor:
        """Return memory for received partial sums."""
        layout, (transport, _), grain = flat.gradients, self._context.reducing, stats_block(full)
        numel = staging_numel(layout.full_numel, transport, full.dtype, cuts=layout.uneven_cuts, grain=grain)
        return self._scratch(numel, full.dtype)

    def _scratch(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return memory that successive operations share. The memory belongs to the stream of the queue."""
        if numel * dtype.itemsize > self._staging.numel():
            self._staging = self._context.reducing[0].empty_persistent(numel * dtype.itemsize, self._context.device)
            self._context.ledger.track("staging", self._staging)
        return self._staging.view(dtype)


# ---- gradients of shards --------------------------------------------------------------------------------------------


class GradientShards:
    """The gradient shards of one wrapped model."""

    _nonfinite: Tensor | None = None
    _judged: Sequence["weakref.ref[Tensor]"] = ()
    """The gradients to which the flag `_nonfinite` applies."""

    _reduced_norm: ReducedNorm | None = None

    def __init__(
        self, units: Sequence[Unit], context: Context, scale: Scale, *, by_blocks: bool, diagnose: bool
    ) -> None:
        """Initialize without gradients.

        Args:
            units: units whose shards get gradients.
            context: the ranks.
            scale: decides by what gradients are divided.
            by_blocks: whether to keep the sums of squares of blocks.
            diagnose: whether to report the names of gradients that are not finite.
        """
        self._units = units
        self._shards = [shard for unit in units for flat in unit.flats for shard in flat.shards]
        self._context = context
        self._scale = scale
        self._sent = SentNumbers(context.device)
        self.options = StepOptions(context)
        """The options of the latest steps, which travel with the gradient flags."""

        self._by_blocks = by_blocks
        self._diagnose = diagnose

    def store(self, reductions: Sequence[Reduction]) -> None:
        """Store means in the `.grad` of those shards whose parameters were used on any rank.

        The reduction has computed the statistics of new means. Sums with accumulated gradients, and gradients that this
        backward has not changed, have no statistics. A pass over their memory checks them for NaNs and infinities.

        If items are counted, the means are still sums. They are divided and stored when the total has arrived. If no
        step has used the gradients of an earlier reduction, all are divided by the total of both reductions.

        Raises:
            CommError: a peer failed, timed out or called a different operation.
            PhaseError: ranks divide by different numbers, or only some of the backwards were counted. Raised on every
                rank.
        """
        parts = [part for reduction in reductions for part in reduction.parts()]
        if not parts:
            return
        counted = self._scale.counted
        before = self._graded()
        sums = [grad for _, grad in before] if counted else self._add_used(parts, before)
        means = [mean for reduction in reductions for mean in reduction.means]
        totals = torch.stack([mean.total for mean in means])
        bad = torch.cat([totals[:, 1], any_bad(sums, self._context.device).double().reshape(1)])
        users, self._nonfinite, total = self._exchange([used for _, _, used in parts], bad)
        divisor = None if total is None else self._divide(means, [grad for _, grad in before], total)
        if total is None:
            self._scale.check_uncounted(version=self._version(), graded=bool(before))
        for (shard, grad, used), count in zip(parts, users, strict=True):
            if count and (counted or not used):
                shard.grad = grad if shard.grad is None else shard.grad.add_(grad)
        graded = self._graded()
        of_means = zip(means, totals[:, 0].unbind(), strict=True)
        squares = {mean.flat: self._squares(mean, total, divisor) for mean, total in of_means}
        self._reduced_norm = None if before else ReducedNorm(squares, graded)
        self._judged = list(map(weakref.ref, map(itemgetter(1), graded)))
        if self._diagnose and self._nonfinite.item():
            self._name_bad(reductions)

    def _divide(self, means: Sequence[Mean], earlier: Sequence[Tensor], total: Tensor) -> Tensor:
        """Divide the sums of a reduction, and the `earlier` gradients that no step has used. Return the divisor [].

        `total` is the total of the counts of the reduction.
        """
        divisor, again = self._scale.divisors(total, version=self._version(), graded=bool(earlier))
        for mean in means:
            divide(mean.whole, divisor)
        if again is not None:
            for grad in earlier:
                divide(grad, again)
        return divisor

    def _version(self) -> int:
        """Return a number that grows with every change of the weights."""
        return sum(unit.version() for unit in self._units)

    def keep(self, reductions: Sequence[Reduction]) -> None:
        """Keep sums in their buckets, for the reduction that ends the accumulation.

        Raises:
            CommError: a peer failed, timed out or called a different operation.
            PhaseError: ranks divide by different numbers. Raised on every rank that shares the model.
        """
        used = [flag for reduction in reductions for flag in reduction.used]
        # As many numbers as at the end of an accumulation, so that ranks that disagree receive each other's shares.
        flags = torch.cat([self._scale.share().message(used, self._sent), self._sent([0] * (OPTIONS_NUMEL + 1))])
        self._all_reduce_flags(flags, self._context.transports[:1])
        self._check(flags[len(used) : -1 - OPTIONS_NUMEL], self._context.transport.world_size)
        for reduction in reductions:
            reduction.keep()

    def _add_used(
        self, parts: Sequence[tuple[nn.Parameter, Tensor, int]], before: Sequence[tuple[nn.Parameter, Tensor]]
    ) -> list[Tensor]:
        """Store the means that this rank has used, and return all gradients that have no statistics."""
        reduced = {id(shard) for shard, _, _ in parts}
        sums = [grad for shard, grad in before if id(shard) not in reduced]
        for shard, grad, used in parts:
            if shard.grad is not None:
                sums.append(shard.grad.add_(grad) if used else shard.grad + grad)
            elif used:
                shard.grad = grad
        return sums

    def _squares(self, mean: Mean, whole: Tensor, divisor: Tensor | None) -> Squares:
        """Return the sums of squares of a mean, whose sum is `whole`. `divisor` has divided the mean, if any has."""
        blocks = mean.stats[:, 0] if self._by_blocks else None
        if divisor is None:
            return Squares(whole, blocks)
        square = divisor.square()
        return Squares(whole / square, None if blocks is None else blocks / square)

    def after_steps(self, reductions: Sequence[Reduction], *, check: bool = True) -> Tensor:
        """Clear the results after a step. Return a tensor [], which is 1 if any rank found a NaN or infinity, else 0.

        Raises:
            CommError: a peer failed, timed out or called a different operation.
            PhaseError: `check` is set, and ranks divide by different numbers. Raised on every rank.
        """
        bad = [step.bad for reduction in reductions for step in reduction.steps]
        self._reduced_norm, self._judged = None, []
        return self._exchange([], torch.stack(bad), check=check)[1]

    def reduced_norm(self) -> ReducedNorm | None:
        """Return the record of the latest backward's gradients, or `None` if they were added to earlier gradients."""
        return self._reduced_norm

    def nonfinite(self) -> Tensor | None:
        """Return a tensor [], 1 if a gradient of the latest backward has a NaN or infinity on any rank, else 0.

        Return `None` if none of these gradients is still the `.grad` of a shard.
        """
        now = {id(grad) for _, grad in self._graded()}
        return self._nonfinite if any(id(each()) in now for each in self._judged) else None

    def _graded(self) -> list[tuple[nn.Parameter, Tensor]]:
        return [(shard, shard.grad) for shard in self._shards if shard.grad is not None]

    def _all_reduce_flags(self, flags: Tensor, transports: Sequence[Transport]) -> None:
        operation = self._context.operation("gradient flags", "gradient flags")
        for transport in transports:
            all_reduce(flags, transport, operation=operation)

    def _check(self, sums: Tensor, ranks: int) -> Tensor | None:
        """Check that all `ranks` divide by the same number, given the sums [`SHARE_NUMEL`] of their shares.

        Return a boolean tensor [], whether they do not. If it is `sums.any()`, return `None`.
        """
        share = self._scale.share()
        disagree = share.disagree(sums, ranks, self._sent) if any(share.state) else None
        self._scale.check(share, sums, ranks, disagree)
        return disagree

    def _exchange(
        self, used: Sequence[int], bad: Tensor, *, check: bool = True
    ) -> tuple[Sequence[int], Tensor, Tensor | None]:
        """Exchange gradient flags with all ranks.

        Args:
            used: 1 for each parameter that this rank used, else 0.
            bad: a number for each mean of this rank, which is above 0 if the mean has a NaN or infinity, else 0.

        Returns:
            A number per parameter, which is above 0 if any rank used the parameter; a tensor [], which is 1 if any
            mean of any rank has a NaN or infinity, or ranks divide by different numbers, else 0; and, if items are
            counted, their total [] in fp64.

        Raises:
            PhaseError: this rank has not used a parameter, and the host cannot wait for the flags of other ranks,
                because a CUDA graph is captured.
        """
        if not all(used) and self._context.streams.captures():
            raise PhaseError(
                f"{list(used).count(0)} parameters got no gradient on rank {self._context.rank} while a CUDA graph is "
                "captured, when the host cannot read whether other ranks used them: freeze them with "
                "requires_grad_(False), or use them in every step"
            )
        share = self._scale.share()
        number = bad.sum(0, keepdim=True, dtype=torch.int32)
        flags = torch.cat([share.message(used, self._sent), self.options.message(), number])
        self._all_reduce_flags(flags, self._context.transports)
        sums, options = torch.split(flags[len(used) : -1], [SHARE_NUMEL, OPTIONS_NUMEL])
        disagree = self._check(sums, self._context.world_size) if check else None
        if check:
            self.options.received(options)
        anything = flags[len(used) :].any() if disagree is None else (flags[-1] > 0) | disagree
        total = share.total(sums) if share.counted else None
        return (used if all(used) else flags[: len(used)].tolist()), anything.to(torch.float32), total

    def _name_bad(self, reductions: Sequence[Reduction]) -> None:
        """Warn about the first gradient that is not finite, for each rank that has one."""
        context = self._context
        flats = [mean.flat for each in reductions for mean in each.means]
        names = [flat.layout.slots[index].name for flat in flats for index in flat.trainable_slots]
        is_first = [i == each.first_bad for each in reductions for i in range(len(each.used))]
        found = torch.zeros(context.world_size, dtype=torch.int32, device=context.device)
        found[context.rank] = is_first.index(True) + 1 if any(is_first) else 0
        context.all_reduce_numbers(found, context.operation("whose gradients are not finite", "gradient flags"))
        warn_of([(rank, names[index - 1]) for rank, index in enumerate(found.tolist()) if index])
