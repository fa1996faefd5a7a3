"""Reductions of two levels: inside each node first, then across the nodes in shards.

    inside    all-to-all of the `L` ranks of a node: the rank with place `j` receives from each rank of the node the
              `N` segments of all ranks with place `j`; the `L` rows are added in the order `j+1, j+2, ..., j`
    across    all-to-all of the `N` ranks with place `j`: node `m` receives the sums of its segment; the `N` rows are
              added in the order `m+1, m+2, ..., m`, and divided

        N=L=2              buckets           after inside            after across
        node 0   rank 0    [a0 a1 a2 a3]     [b0+a0 . b2+a2 .]       [(d0+c0)+(b0+a0) . . .]
                 rank 1    [b0 b1 b2 b3]     [. a1+b1 . a3+b3]       [. (c1+d1)+(a1+b1) . .]
        node 1   rank 2    [c0 c1 c2 c3]     [d0+c0 . d2+c2 .]       [. . (b2+a2)+(d2+c2) .]
                 rank 3    [d0 d1 d2 d3]     [. c1+d1 . c3+d3]       [. . . (a3+b3)+(c3+d3)]

This is the order of the schedule `hierarchical`, so the results have the bits of that schedule. The bits depend on `L`.

A rank sends `(L-1)/L` of the buffer inside its node, and `(N-1)/(N L)` of the buffer across nodes. Together this is
`(W-1)/W`, as in one exchange among all ranks. But one exchange among all ranks sends `(W-L)/W` of the buffer across
nodes, `L` times as much.

Legend: `n` elements in the full buffer. There are `W = N L` ranks: `N` nodes of `L` ranks. Rank `m L + j` has place `j`
in node `m`.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from shardlite_kernels import add_rows
from torch import Tensor

from shardlite.comm.chunking import Cut
from shardlite.comm.operation import Operation
from shardlite.comm.transport.group_collectives import GroupCollectives, WholeCollectives
from shardlite.errors import CommError


class TwoLevelCollectives(WholeCollectives):
    """Reductions over `inside` (the ranks of this node), then over `across` (the ranks with this place in their nodes).

    Other collectives use `flat`, which connects all ranks: NCCL's gathers detect nodes themselves, and integer sums are
    exact in any order.
    """

    algorithm = "hierarchical"

    def __init__(self, flat: GroupCollectives, inside: GroupCollectives, across: GroupCollectives) -> None:
        self.flat, self.inside, self.across = flat, inside, across
        self.rank, self.world_size, self.node = flat.rank, flat.world_size, inside.world_size
        self.batched, self.blocking = flat.batched, flat.blocking
        self.holder, self.slice_nbytes = flat.holder, flat.slice_nbytes

    def empty_persistent(self, nbytes: int, device: torch.device) -> Tensor:
        """Return staging memory [nbytes], registered with `inside`, because `inside` sends most of the data."""
        return self.inside.empty_persistent(nbytes, device)

    @property
    def first_row(self) -> int | None:
        """Index of the row that is added first: the row of the next node."""
        return self.across.first_row

    @property
    def words(self) -> str:
        """How this transport adds, for the log."""
        return f"sums inside each node of {self.node} first, both in the order of rings"

    def all_gather(self, full: Tensor, cut: Cut, operation: Operation) -> None:
        """Fill `full` [n] in place, given this rank's segment."""
        self.flat.all_gather(full, cut, operation)

    def copy_from(self, source: int, full: Tensor) -> None:
        """Copy `full` [n] of rank `source` to `full` of every other rank, uncounted."""
        self.flat.copy_from(source, full)

    def add_integers(self, numbers: Tensor) -> None:
        """Sum integers [n] over the ranks in place, uncounted."""
        self.flat.add_integers(numbers)

    def nbytes_across(self, cut: Cut, itemsize: int) -> int:
        """Return the bytes that this rank sends to other nodes in a reduction."""
        mine = sum(stop - start for start, stop in cut.bounds[self.inside.rank :: self.node])
        start, stop = cut.bounds[self.rank]
        return (mine - (stop - start)) * itemsize

    def staged_rows(self, cut: Cut, itemsize: int) -> int:
        """Return how many rows of a slice are staged. One half is for rows, the other half for sent data."""
        return 2 * self.world_size

    def exchange_rows(self, full: Tensor, cut: Cut, part: tuple[int, int], staging: Tensor) -> Tensor:
        """Return every node's row for the range `part` of this rank's segment of `full` [n], as [N, .] in `staging`.

        Raises:
            CommError: a peer failed or is late.
        """
        sizes = cut.sizes(part)
        by_place = [sizes[place :: self.node] for place in range(self.node)]
        rows, sent = staging.chunk(2)
        sent = sent[: sum(sizes)]
        _pack(sent, full, cut, part, self.node)
        with self._level("inside its node"):
            given = self.inside.all_to_all(rows, sent, [*map(sum, by_place)])
        mine = by_place[self.inside.rank]
        sums = sent[: sum(mine)]  # reused, because its former content has been sent
        if sums.numel():
            add_rows(sums, given, self.inside.first_row)
        with self._level("across nodes"):
            return self.across.all_to_all(rows, sums, mine)

    @contextmanager
    def _level(self, where: str) -> Iterator[None]:
        """Add this rank's number among all ranks to an error of the block.

        The error itself has only the rank's number within the level.
        """
        try:
            yield
        except CommError as error:
            raise CommError(f"rank {self.rank}, in a reduction {where}: {error}") from error


def _pack(out: Tensor, full: Tensor, cut: Cut, part: tuple[int, int], node: int) -> None:
    """Copy `part` of each rank's segment of `full` [n] to `out` [.], ordered by the rank's place, then by its node."""
    if cut.even:
        parts = full.view(-1, node, cut.longest)[..., slice(*part)].transpose(0, 1)
        out.view(parts.shape).copy_(parts)
        return
    ranges = cut.ranges(part)
    torch.cat([full[start:stop] for place in range(node) for start, stop in ranges[place::node]], out=out)
