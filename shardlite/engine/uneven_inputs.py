"""Let ranks with different numbers of batches finish together.

Every step takes all ranks: each gathers and steps a part of the weights. So a rank that has run out of batches repeats
its last one, and its gradients do not count: they are zero, and the mean is over the others.

    rank 0   batch 0   batch 1   batch 2     means over 2, 2 and 1 ranks
    rank 1   batch 0   batch 1  (batch 1)
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch

from shardlite.comm import Context
from shardlite.errors import LayoutError
from shardlite.grads import Reducer

Batch = TypeVar("Batch")

_NOTHING = object()


class Join:
    """Loops of one wrapped model over batches that ranks have different numbers of."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.joined = False
        """Whether this rank has run out of batches and only takes part in the steps of the others."""

    def over(
        self, batches: Iterable[Batch], reducers: Sequence[Reducer], recover: Sequence[Callable[[], None]]
    ) -> Iterator[Batch]:
        """Yield this rank's batches, then repeat the last one until no rank has any more.

        Args:
            batches: this rank's.
            reducers: those of the models that are trained in the loop.
            recover: called before each batch, to clean up after an exception in the last step.

        Raises:
            LayoutError: a rank has no batch at all; on every rank.
        """
        ranks = self._context.world_size
        own, last = iter(batches), _NOTHING
        try:
            while True:
                batch = next(own, _NOTHING)
                self.joined = batch is _NOTHING
                last = last if self.joined else batch
                for each in recover:
                    each()
                active = self._count_active(last is _NOTHING)
                if active == 0:
                    return
                for reducer in reducers:
                    reducer.set_participation(counts=not self.joined, ranks=active)
                yield last  # type: ignore[misc]
        finally:
            self.joined = False
            for reducer in reducers:
                reducer.set_participation(counts=True, ranks=ranks)

    def _count_active(self, has_none: bool) -> int:
        """Return the number of ranks that have a batch now.

        Raises:
            LayoutError: some have, and another has never had one; on every rank.
        """
        context = self._context
        numbers = torch.tensor([not self.joined, has_none], dtype=torch.int32)
        # The name has no step number: ranks at different steps still meet here.
        context.all_reduce_host(numbers, context.operation("who has a batch", "join"))
        active, without = numbers.tolist()
        if active and without:
            flags = context.all_gather_int(has_none, "who has no batch")
            names = ", ".join(f"rank {rank}" for rank, flag in enumerate(flags) if flag)
            raise LayoutError(
                f"join(): {names} of {context.world_size} ranks got no batch, so there is nothing to compute in the "
                "steps of the other ranks. Give each rank at least one batch, for example with "
                "`DataLoader(dataset, sampler=DistributedSampler(dataset))`"
            )
        return int(active)
