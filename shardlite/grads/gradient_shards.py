"""Gradient shards: what a backward leaves in the `.grad` of the shards.

A parameter that no rank used keeps its `.grad`. All ranks know whether any gradient is not finite, and the norm of what
was just reduced. For that each rank contributes one flag per parameter, and one all-reduce sums them. The host reads
the sums, and so waits, only for parameters that this rank has not used: the others have at least one user.

In: finished reductions. Out: gradients, a flag for skipped steps, squares for clipping.
"""

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shardlite.comm import Context
from shardlite.errors import PhaseError
from shardlite.grads.flags import SentNumbers, any_bad, warn_of
from shardlite.grads.norm import ReducedNorm, Squares
from shardlite.grads.reduce import Reduction
from shardlite.params import Unit


class GradientShards:
    """The gradient shards of one wrapped model."""

    _nonfinite: Tensor | None = None
    _judged: Sequence["weakref.ref[Tensor]"] = ()
    """The gradients that `_nonfinite` describes."""

    _reduced_norm: ReducedNorm | None = None

    def __init__(self, units: Sequence[Unit], context: Context, *, by_blocks: bool, diagnose: bool) -> None:
        """With `by_blocks`, keep the norms of blocks; with `diagnose`, name gradients that are not finite."""
        self._shards = [shard for unit in units for flat in unit.flats for shard in flat.shards]
        self._context = context
        self._sent = SentNumbers(context.device)
        self._by_blocks = by_blocks
        self._diagnose = diagnose

    def store(self, reductions: Sequence[Reduction]) -> None:
        """Store means in the `.grad` of shards whose parameters any rank used.

        Statistics of new means are known. A pass over memory checks sums with accumulated gradients, and gradients that
        this backward has not changed.

        Raises:
            CommError: a peer failed, is late or runs another operation.
        """
        parts = [part for reduction in reductions for part in reduction.parts()]
        if not parts:
            return
        reduced = {id(shard) for shard, _, _ in parts}
        before = self._graded()
        sums = [grad for shard, grad in before if id(shard) not in reduced]
        for shard, grad, used in parts:
            if shard.grad is not None:
                sums.append(shard.grad.add_(grad) if used else shard.grad + grad)
            elif used:
                shard.grad = grad
        means = [mean for reduction in reductions for mean in reduction.means]
        bad = torch.stack([mean.total for mean in means])[:, 1]
        flags = [*bad.unbind(), any_bad(sums, self._context.device).double()]
        users, self._nonfinite = self._exchange([used for _, _, used in parts], flags)
        for (shard, grad, used), count in zip(parts, users, strict=True):
            if count and not used:
                shard.grad = grad if shard.grad is None else shard.grad.add_(grad)
        graded = self._graded()
        squares = {mean.flat: Squares(mean.total[0], mean.stats[:, 0] if self._by_blocks else None) for mean in means}
        self._reduced_norm = None if before else ReducedNorm(squares, graded)
        self._judged = [weakref.ref(grad) for _, grad in graded]
        if self._diagnose and self._nonfinite.item():
            self._name_bad(reductions)

    def after_steps(self, reductions: Sequence[Reduction]) -> Tensor:
        """Forget earlier results, because shards were stepped. Return [], above 0 if any rank found a NaN or infinity.

        Raises:
            CommError: a peer failed, is late or runs another operation.
        """
        bad = [step.bad for reduction in reductions for step in reduction.steps]
        self._reduced_norm, self._judged = None, []
        return self._exchange([], bad)[1]

    def reduced_norm(self) -> ReducedNorm | None:
        """Return the gradients of the last backward and their squares, or `None` if some accumulated before it."""
        return self._reduced_norm

    def nonfinite(self) -> Tensor | None:
        """Return [], 1 if a gradient of the last backward has a NaN or an infinity on any rank, else 0.

        `None` if none of these gradients exists any more.
        """
        now = {id(grad) for _, grad in self._graded()}
        return self._nonfinite if any(id(each()) in now for each in self._judged) else None

    def _graded(self) -> list[tuple[nn.Parameter, Tensor]]:
        return [(shard, shard.grad) for shard in self._shards if shard.grad is not None]

    def _exchange(self, used: Sequence[int], bad: Sequence[Tensor]) -> tuple[Sequence[int], Tensor]:
        """Exchange flags of all ranks.

        Args:
            used: 1 for each parameter that this rank used, else 0.
            bad: for each mean of this rank [], above 0 if it has a NaN or an infinity, else 0.

        Returns:
            A number above 0 for each parameter that any rank used; and [], 1 if anything is bad on any rank, else 0.

        Raises:
            PhaseError: this rank has not used a parameter while a CUDA graph is captured, when the host cannot wait.
        """
        if not all(used) and self._context.streams.captures():
            raise PhaseError(
                f"{list(used).count(0)} parameters got no gradient on rank {self._context.rank} while a CUDA graph is "
                "captured, and the host cannot read whether other ranks used them: freeze them with "
                "requires_grad_(False), or use them in every step"
            )
        flags = torch.cat([self._sent(used), torch.stack(list(bad)).sum(0, keepdim=True, dtype=torch.int32)])
        self._context.all_reduce_numbers(flags, self._context.operation("gradient flags", "gradient flags"))
        anything = (flags[-1] > 0).to(torch.float32)
        return (used if all(used) else flags[:-1].tolist()), anything

    def _name_bad(self, reductions: Sequence[Reduction]) -> None:
        """Warn of the first gradient of each rank that is not finite."""
        context = self._context
        flats = [mean.flat for each in reductions for mean in each.means]
        names = [flat.layout.slots[index].name for flat in flats for index in flat.trainable_slots]
        is_first = [i == each.first_bad for each in reductions for i in range(len(each.used))]
        found = torch.zeros(context.world_size, dtype=torch.int32, device=context.device)
        found[context.rank] = is_first.index(True) + 1 if any(is_first) else 0
        context.all_reduce_numbers(found, context.operation("whose gradients are not finite", "gradient flags"))
        warn_of([(rank, names[index - 1]) for rank, index in enumerate(found.tolist()) if index])
