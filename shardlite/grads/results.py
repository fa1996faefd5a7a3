"""Store the means of one backward in the `.grad` of shards.

A parameter that no rank used keeps its former `.grad`. To find such parameters, each rank contributes one flag per
parameter, and one all-reduce sums the flags. If this rank has used all parameters, the host does not read the sums.
Otherwise it reads them, and so waits for the device.

If items are counted (`scale.py`), the total of the counts arrives with the flags. So the sums are divided here, in a
separate pass over this rank's part.

Legend: `S` elements per shard.
"""

import weakref
from collections.abc import Sequence
from operator import itemgetter

import torch
from torch import Tensor, nn

from shardlite.comm import Context, Transport, all_reduce
from shardlite.errors import PhaseError
from shardlite.grads.flags import SentNumbers, any_bad, warn_of
from shardlite.grads.norm import ReducedNorm, Squares
from shardlite.grads.options import NUMEL as OPTIONS_NUMEL
from shardlite.grads.options import StepOptions
from shardlite.grads.reduce import Mean, Reduction
from shardlite.grads.scale import SHARE_NUMEL, SharedScale, divide
from shardlite.params import Unit


class GradientShards:
    """The gradient shards of one wrapped model."""

    _nonfinite: Tensor | None = None
    _judged: Sequence["weakref.ref[Tensor]"] = ()
    """The gradients to which the flag `_nonfinite` applies."""

    _reduced_norm: ReducedNorm | None = None

    def __init__(
        self, units: Sequence[Unit], context: Context, scale: SharedScale, *, by_blocks: bool, diagnose: bool
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
            divide(mean.full, divisor)
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

    def _squares(self, mean: Mean, total: Tensor, divisor: Tensor | None) -> Squares:
        """Return the sums of squares of a mean, whose sum is `total`. `divisor` has divided the mean, if any has."""
        blocks = mean.stats[:, 0] if self._by_blocks else None
        if divisor is None:
            return Squares(total, blocks)
        square = divisor.square()
        return Squares(total / square, None if blocks is None else blocks / square)

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

        Return a boolean tensor [] that is true if they do not, or `None` if `sums.any()` has the same value.
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
