"""The interface of transports that carry whole collectives instead of messages.

A gather is one call. So is a reduction: the transport adds, or it brings the parts of this rank's segment, a row of
each rank, and one kernel adds them in the order of the ring (`shardlite_kernels.add_rows`).

Legend: `W` ranks, `n` elements in the full buffer, `S` elements of the longest segment.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from shardlite_kernels import State, Table
from torch import Tensor

from shardlite.comm.chunking import Cut
from shardlite.comm.transport.base import Transport

FusedStep = tuple[State, Table, Tensor]
"""What a kernel steps by the mean that it computes: weights with moments [S], their table, and a flag [] for NaNs."""


class WholeCollectives(Transport):
    """A transport of whole collectives. Like NCCL it has no tags: all ranks call them in one order."""

    room: int
    """Maximum bytes of the rows of an exchange. A longer reduction goes in slices."""

    @property
    def first_row(self) -> int | None:
        """The row from which to add those of `exchange_rows`; `None`: as a balanced tree."""
        return None if self.algorithm == "halving" else (self.rank + 1) % self.world_size

    def all_gather(self, full: Tensor, cut: Cut) -> None:
        """Fill `full` [n] in place, given this rank's segment.

        Raises:
            CommError: a peer failed or is late.
        """
        raise NotImplementedError

    def broadcast(self, full: Tensor, source: int) -> None:
        """Copy `full` [n] of rank `source` into that of every other rank.

        Raises:
            CommError: a peer failed or is late.
        """
        raise NotImplementedError

    def all_reduce(self, numbers: Tensor) -> None:
        """Sum integers [n] over the ranks in place: exact in any order.

        Raises:
            CommError: a peer failed or is late.
        """
        raise NotImplementedError

    def slices(self, cut: Cut, itemsize: int, grain: int) -> Sequence[tuple[int, int]]:
        """Return the ranges of elements of each segment whose rows fit in `room`: multiples of `grain` but the last."""
        return slices_of(cut.longest, self.world_size, itemsize, grain, self.room)

    def rows_numel(self, cut: Cut, itemsize: int, grain: int) -> int:
        """Return how many elements `rows` needs."""
        slices = self.slices(cut, itemsize, grain)
        return self.world_size * max((stop - start for start, stop in slices), default=0)

    def rows(self, full: Tensor, cut: Cut, room: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield this rank's segment of `full` [n] as every rank has it, slice by slice: its start, and rows [W, .].

        Of two ranks it may be the other's row only, [1, .]. Operations may use the rows that the caller enqueues on the
        current stream before it asks for the next slice. They are in `room` [`rows_numel(...)`].

        Raises:
            CommError: a peer failed or is late.
        """
        for part in self.slices(cut, full.itemsize, cut.grain):
            rows = self.exchange_rows(full, cut, part, room)
            if rows.numel():  # a segment may end before a slice of others begins
                yield part[0], rows

    def exchange_rows(self, full: Tensor, cut: Cut, part: tuple[int, int], room: Tensor) -> Tensor:
        """Return the elements `part` of this rank's segment as every rank has them in `full` [n]: rows [W, .].

        Of two ranks it may be the other's row only, [1, .]. A segment that is shorter than `part` counts as far as it
        goes. The rows are in `room` [`rows_numel(...)`].

        Raises:
            CommError: a peer failed or is late.
        """
        raise NotImplementedError

    def sums(self, cut: Cut) -> bool:
        """Return whether `reduce_scatter` adds up such a buffer, in an order of its own."""
        return False

    def reduce_scatter(self, full: Tensor, room: Tensor) -> Tensor:
        """Return the sum of this rank's segment of `full` [n] over the ranks, a row [1, n/W] in `room`.

        Raises:
            CommError: a peer failed or is late.
        """
        raise NotImplementedError

    def nbytes_across(self, cut: Cut, itemsize: int) -> int:
        """Return the bytes of a reduction that this rank sends to other nodes; 0 if the transport knows no nodes."""
        return 0

    def rings(self, full: Tensor, cut: Cut) -> bool:
        """Return whether `ring_reduce` and `ring_step` take such a buffer. Equal on all ranks."""
        return False

    def ring_reduce(self, out: Tensor, full: Tensor, divisor: int) -> None:
        """Write the mean of this rank's segment of `full` [n], added in the order of the ring, to `out` [n/W].

        Raises:
            CommError: a peer failed or is late.
        """
        raise NotImplementedError

    def ring_step(self, step: FusedStep, full: Tensor, divisor: int) -> None:
        """Step by what `ring_reduce` would write in fp32. Other ranks may call that instead, with an `out` in fp32.

        Raises:
            CommError: a peer failed or is late.
        """
        raise NotImplementedError


SHORTEST = 32
"""Elements of the shortest slice. Longer ones are multiples, so that rows begin at multiples of 32 bytes or more."""


@lru_cache(maxsize=1024)
def slices_of(longest: int, rows: int, itemsize: int, grain: int, room: int) -> Sequence[tuple[int, int]]:
    """Return ranges of elements of segments of up to `longest`, of each of which `rows` rows fit in `room` bytes.

    They are as few as that takes, and all but the last have one length.
    """
    unit = max(grain, SHORTEST)
    most = max(room // (rows * itemsize * unit), 1) * unit
    count = -(-longest // most)
    length = -(-longest // (max(count, 1) * unit)) * unit
    return tuple((start, min(start + length, longest)) for start in range(0, longest, length or 1))


def as_bytes(tensor: Tensor) -> Tensor:
    """Return what is moved: not every backend knows every dtype."""
    return tensor.view(torch.uint8)
