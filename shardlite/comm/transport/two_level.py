"""Reductions in two levels: inside each node first, then across the nodes in shards.

    inside    all-to-all of the `L` ranks of a node: place `j` gets of each the segments of all ranks with that place in
              their nodes, `N` of them; the `L` rows are added in the order `j+1, j+2, ..., j`
    across    all-to-all of the `N` ranks with place `j`: node `m` gets the sums of its segment; the `N` rows are added
              in the order `m+1, m+2, ..., m`, and divided

        N=L=2              buckets           after inside            after across
        node 0   rank 0    [a0 a1 a2 a3]     [b0+a0 . b2+a2 .]       [(d0+c0)+(b0+a0) . . .]
                 rank 1    [b0 b1 b2 b3]     [. a1+b1 . a3+b3]       [. (c1+d1)+(a1+b1) . .]
        node 1   rank 2    [c0 c1 c2 c3]     [d0+c0 . d2+c2 .]       [. . (b2+a2)+(d2+c2) .]
                 rank 3    [d0 d1 d2 d3]     [. c1+d1 . c3+d3]       [. . . (a3+b3)+(c3+d3)]

This is the order of the schedule `hierarchical`, so the bits are those of its messages. They depend on `L`.

A rank sends `(L-1)/L` of the buffer inside its node, and `(N-1)/N` of `1/L` of it across: together `(W-1)/W`, as in one
exchange among all ranks, which sends `(W-L)/W` across. What leaves the node is `L` times less.

Legend: `W = N L` ranks in `N` nodes of `L`, `n` elements in the full buffer. Rank `m L + j` has place `j` in node `m`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from shardlite_kernels import add_rows
from torch import Tensor

from shardlite.comm.chunking import Cut
from shardlite.comm.transport.group_collectives import GroupCollectives
from shardlite.comm.transport.whole import WholeCollectives
from shardlite.errors import CommError


class TwoLevelCollectives(WholeCollectives):
    """Reductions over `inside`, the ranks of this node, then over `across`, those with this place. The rest is `flat`.

    NCCL's gathers know nodes by themselves, and integers have the same sum in any order.
    """

    algorithm = "hierarchical"

    def __init__(self, flat: GroupCollectives, inside: GroupCollectives, across: GroupCollectives) -> None:
        self.flat, self.inside, self.across = flat, inside, across
        self.rank, self.world_size, self.node = flat.rank, flat.world_size, inside.world_size
        self.batched, self.blocking = flat.batched, flat.blocking
        self.holder, self.room = flat.holder, flat.room

    def empty_persistent(self, nbytes: int, device: torch.device) -> Tensor:
        """Return memory [nbytes] for staging: most of what is sent from it goes to this node."""
        return self.inside.empty_persistent(nbytes, device)

    @property
    def first_row(self) -> int | None:
        """The row from which to add: of the next node."""
        return self.across.first_row

    def all_gather(self, full: Tensor, cut: Cut) -> None:
        """Fill `full` [n] in place, given this rank's segment.

        Raises:
            CommError: a peer failed or is late.
        """
        self.flat.all_gather(full, cut)

    def broadcast(self, full: Tensor, source: int) -> None:
        """Copy `full` [n] of rank `source` into that of every other rank.

        Raises:
            CommError: a peer failed or is late.
        """
        self.flat.broadcast(full, source)

    def all_reduce(self, numbers: Tensor) -> None:
        """Sum integers [n] over the ranks in place: exact in any order.

        Raises:
            CommError: a peer failed or is late.
        """
        self.flat.all_reduce(numbers)

    def nbytes_across(self, cut: Cut, itemsize: int) -> int:
        """Return the bytes of a reduction that this rank sends to other nodes."""
        lane = sum(stop - start for start, stop in cut.bounds[self.inside.rank :: self.node])
        start, stop = cut.bounds[self.rank]
        return (lane - (stop - start)) * itemsize

    def rows_numel(self, cut: Cut, itemsize: int, grain: int) -> int:
        """Return how many elements `exchange_rows` needs: as many for rows as for what it sends."""
        return 2 * super().rows_numel(cut, itemsize, grain)

    def exchange_rows(self, full: Tensor, cut: Cut, part: tuple[int, int], room: Tensor) -> Tensor:
        """Return the elements `part` of this rank's segment as every node has added them: rows [N, .], in `room`.

        Raises:
            CommError: a peer failed or is late.
        """
        lanes = _lanes(cut, part, self.node)
        rows, sent = room.chunk(2)
        sent = sent[: sum(map(sum, lanes))]
        _pack(sent, full, cut, part, self.node)
        with self._level("inside its node"):
            given = _exchange(self.inside, rows, sent, [*map(sum, lanes)])
        mine = lanes[self.inside.rank]
        sums = sent[: sum(mine)]  # what it held has been sent
        if sums.numel():
            add_rows(sums, given, self.inside.first_row)
        with self._level("across nodes"):
            return _exchange(self.across, rows, sums, mine)

    @contextmanager
    def _level(self, where: str) -> Iterator[None]:
        """Add this rank's number to an error, which has that inside the level."""
        try:
            yield
        except CommError as error:
            raise CommError(f"rank {self.rank}, in a reduction {where}: {error}") from error


def _lanes(cut: Cut, part: tuple[int, int], node: int) -> list[list[int]]:
    """Return how many elements each segment has in `part`: by place in the node, then by node."""
    if cut.even:
        return [[min(part[1], cut.longest) - min(part[0], cut.longest)] * (len(cut.bounds) // node)] * node
    sizes = [stop - start for start, stop in cut.ranges(part)]
    return [sizes[place::node] for place in range(node)]


def _pack(out: Tensor, full: Tensor, cut: Cut, part: tuple[int, int], node: int) -> None:
    """Copy `part` of each segment of `full` [n] to `out` [.]: by place in the node, then by node."""
    if cut.even:
        parts = full.view(-1, node, cut.longest)[..., slice(*part)].transpose(0, 1)
        out.view(parts.shape).copy_(parts)
        return
    ranges = cut.ranges(part)
    torch.cat([full[start:stop] for place in range(node) for start, stop in ranges[place::node]], out=out)


def _exchange(transport: GroupCollectives, room: Tensor, sent: Tensor, sizes: Sequence[int]) -> Tensor:
    """Send `sizes` elements of `sent` to each rank, and return what each has sent: rows [ranks, .] in `room`."""
    ranks, own = transport.world_size, sizes[transport.rank]
    rows = room[: ranks * own]
    splits = [own * sent.itemsize] * ranks, [size * sent.itemsize for size in sizes]
    transport._all_to_all(rows, sent, *(splits if len(set(sizes)) > 1 else ()))
    return rows.view(ranks, own)
