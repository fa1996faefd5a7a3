"""Joining: ranks that have different numbers of batches finish together.

Every step takes all ranks: each has a part of the weights to gather and to step. So a rank that has run out of batches
goes on with its last one, and its gradients do not count: they are zero, and the mean is that of the others.

    rank 0   batch 0   batch 1   batch 2     means over 2, 2 and 1 ranks
    rank 1   batch 0   batch 1  (batch 1)
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import Protocol, TypeVar

import torch

from shardlite.agree import lend
from shardlite.shared import Shared
from shardlite.transport import Groups

Batch = TypeVar("Batch")

_NOTHING = object()


class Weighed(Protocol):
    """Whose gradients may count or not: the reducers of the models that are trained in a loop."""

    def weigh(self, *, counts: bool, ranks: int) -> None:
        """Let this rank's gradients count from now on, or not, and the means be those of so many `ranks`."""


class Join:
    """The loops of one wrapped model over batches of which ranks have different numbers."""

    def __init__(self, shared: Shared, groups: Groups) -> None:
        self._shared = shared
        self._groups = groups
        self._rounds = count()
        self.joined = False
        """Whether this rank has run out, and only keeps the others company."""

    def over(
        self, batches: Iterable[Batch], reducers: Sequence[Weighed], mends: Sequence[Callable[[], None]]
    ) -> Iterator[Batch]:
        """Yield this rank's batches, then its last one until no rank has any more.

        What an exception in the last step has left unfinished the `mends` of the models end first.

        Raises:
            LayoutError: this rank has none at all, and cannot be lent one; on every rank.
        """
        ranks = self._shared.world_size
        own, last = iter(batches), _NOTHING
        try:
            while True:
                batch = next(own, _NOTHING)
                self.joined = batch is _NOTHING
                last = last if self.joined else batch
                for mend in mends:
                    mend()
                active, without = self._count(not self.joined, last is _NOTHING)
                if active == 0:
                    return
                if without:
                    lent = lend(self._groups, None if self.joined else batch)
                    last = lent if last is _NOTHING else last
                for reducer in reducers:
                    reducer.weigh(counts=not self.joined, ranks=active)
                yield last  # type: ignore[misc]
        finally:
            self.joined = False
            for reducer in reducers:
                reducer.weigh(counts=True, ranks=ranks)

    def _count(self, active: bool, without: bool) -> tuple[int, int]:
        """Return how many ranks have a batch, and how many have never had any."""
        numbers = torch.tensor([active, without], dtype=torch.int32)
        # Ranks meet here whatever steps they have taken: what follows tells.
        self._shared.count_up(numbers, "join", self._shared.operation("who has a batch", next(self._rounds)))
        have, have_not = numbers.tolist()
        return have, have_not
