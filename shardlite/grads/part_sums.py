"""Sums of a unit's gradients over the parts of a global batch, made as a binary counter counts.

    part   kept before        addition               kept after
    0                                                [0]
    1      [0]                0 + 1                  [0+1]
    2      [0+1]                                     [0+1] [2]
    3      [0+1] [2]          2 + 3, then with 0+1   [(0+1)+(2+3)]

So consecutive parts, a power of two of them, are added as a balanced binary tree: one that is also a branch of the tree
over all parts, wherever a rank begins. Of `n` parts there are at most `log2(n)` sums between backwards.

In: full buffers, one per flat. Out: the same, with earlier parts added. Starts no communication.

Legend: `W` ranks, `S` elements per shard.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from shardlite_kernels import hop
from torch import Tensor


@dataclass(frozen=True)
class _Sum:
    """The gradients of some consecutive parts, added up: one full buffer [W*S] per flat."""

    parts: int
    full: Sequence[Tensor]


@dataclass(eq=False)
class PartSums:
    """What a unit's earlier parts have brought, and not been reduced."""

    most: int
    """Sums of so many parts are not added to any more."""

    used: set[int] = field(default_factory=set)
    """The ids of the parameters that an earlier part has used."""

    _sums: list[_Sum] = field(default_factory=list)
    """In the order of parts, so in falling order of size."""

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._sums)

    @property
    def parts(self) -> int:
        """Number of parts that are summed here."""
        return sum(each.parts for each in self._sums)

    def add_to(self, full: Sequence[Tensor]) -> int:
        """Add to the gradients of the next part, in place, the sums that count as many parts, one after the other.

        Return how many parts are in `full` then.
        """
        parts = 1
        while self._sums and self._sums[-1].parts == parts < self.most:
            _add(full, self._sums.pop().full)
            parts *= 2
        return parts

    def keep(self, full: Sequence[Tensor], used: set[int]) -> None:
        """Add to the gradients of the next part, in place, and keep the sum until later ones come."""
        self._sums.append(_Sum(self.add_to(full), full))
        self.used |= used

    def summands(self) -> Iterator[Sequence[Tensor]]:
        """Yield the sums, in the order of their parts: one full buffer per flat."""
        return (each.full for each in self._sums)

    def clear(self) -> None:
        """Forget all parts."""
        self._sums.clear()
        self.used.clear()


def _add(full: Sequence[Tensor], earlier: Sequence[Tensor]) -> None:
    """Add earlier gradients to later ones, in place."""
    for own, before in zip(full, earlier, strict=True):
        hop(own, before, own)
