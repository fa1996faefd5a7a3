"""Let ranks with different numbers of batches finish together.

Every step needs all ranks, because each rank gathers and steps a part of the weights. So a rank that has run out of
batches repeats its last batch with zero gradients. The mean is taken over the ranks that still have a batch.

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
    """Runs loops of one wrapped model in which ranks may have different numbers of batches."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.joined = False
        """Whether this rank has run out of batches and only takes part in the other ranks' steps."""

    def over(
        self, batches: Iterable[Batch], reducers: Sequence[Reducer], recover: Sequence[Callable[[], None]]
    ) -> Iterator[Batch]:
        """Yield this rank's batches. Then repeat the last batch until every rank has run out of batches.

        Args:
            batches: the batches of this rank.
            reducers: the reducers of all models that are trained in the loop.
            recover: functions that clean up after an exception in the previous step. They are called before each batch.

        Raises:
            LayoutError: a rank has no batch at all. Raised on every rank.
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
            LayoutError: some ranks have a batch, and another rank never had a batch. Raised on every rank.
        """
        context = self._context
        numbers = torch.tensor([not self.joined, has_none], dtype=torch.int32)
        # The operation's name has no step number, because the name must be equal on ranks that are at different steps.
        context.all_reduce_host(numbers, context.operation("who has a batch", "join"))
        active, without = numbers.tolist()
        if active and without:
            flags = context.all_gather_int(has_none, "who has no batch")
            names = ", ".join(f"rank {rank}" for rank, flag in enumerate(flags) if flag)
            raise LayoutError(
                f"join(): {names} of {context.world_size} ranks got no batch to repeat in the other ranks' steps: give "
                "each rank at least one batch, as with `DataLoader(dataset, sampler=DistributedSampler(dataset))`"
            )
        return int(active)
