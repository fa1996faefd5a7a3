"""Collectives by loans: messages to add are read in the memory of their sender, so they need no staging memory."""

from collections import deque
from collections.abc import Iterator

import torch
from shardlite_kernels import hop
from torch import Tensor

from shardlite.comm import schedule
from shardlite.comm.chunking import Cut
from shardlite.comm.operation import Operation
from shardlite.comm.schedule import IN_RING_ORDER
from shardlite.comm.transport.base import Inbox, Parcels, Transport
from shardlite.comm.transport.messages import Loan, PendingGroup

BLOCK = 1 << 17
"""Number of elements added at a time in a sum of several lent messages, so that the sum stays in the cache.
`BLOCK` is a multiple of the length of every block of statistics.
"""

SHORT = 32 << 10
"""Maximum bytes of a buffer that is all-reduced in one round."""


class LendingTransport(Transport):
    """A transport whose messages can be read in the sender's memory."""

    def borrow(self, numel: int, dtype: torch.dtype, peer: int, tag: int) -> Loan:
        """Expect the next message with `tag` from rank `peer`, [numel], to be read in the sender's memory."""
        raise NotImplementedError

    def staging_numel(self, cut: Cut, itemsize: int) -> int:
        """Return the number of elements of the staging buffer: a block if a rank adds several messages at a time."""
        del itemsize
        plan = schedule.reduce_scatter(self.algorithm, self.world_size, node=self.node)
        adds_several = any(len(arrival.sources) > 1 for arrival in plan.program(self.rank).arrivals)
        return min(BLOCK, cut.longest) if adds_several else 0

    def stages_in_out(self) -> bool:
        """Return `False`: nothing but sums of several messages is staged."""
        return False

    def adds_at_once(self, full: Tensor) -> bool:
        """Return whether `full` [n] is short, and its sum has the same bits in the order of the ring.

        One round instead of two saves time, because the time of short messages is mostly latency.
        """
        in_any_order = self.algorithm in IN_RING_ORDER or not full.dtype.is_floating_point
        return in_any_order and 0 < full.nbytes <= SHORT

    def all_reduce(self, full: Tensor, cut: Cut, divisor: int, operation: Operation) -> None:
        """Read the buffers of all other ranks, and add each segment of `full` [n] in the order of the ring."""
        rank, world_size, tag = self.rank, self.world_size, operation.tag(full, cut.offsets, "whole")
        others = [(rank + i) % world_size for i in range(1, world_size)]
        loans = {peer: self.borrow(full.numel(), full.dtype, peer, tag) for peer in others}
        outgoing = []
        for peer in others:
            operation.count_sent(full)
            outgoing.append(self.isend(full, peer, tag))
        summands = {rank: full, **{peer: loan.look() for peer, loan in loans.items()}}
        total = torch.empty_like(full)
        # A sum of two numbers does not depend on their order.
        for k, (start, stop) in enumerate([(0, full.numel())] if world_size == 2 else cut.bounds):
            if start < stop:
                first, *rest = (summands[(k + i) % world_size][start:stop] for i in range(1, world_size + 1))
                for i, part in enumerate(rest, start=2):
                    hop(total[start:stop], first, part, divisor if i == world_size else 1)
                    first = total[start:stop]
        for loan in loans.values():
            loan.give_back()
        PendingGroup(outgoing).wait()
        full.copy_(total)  # after all peers have read `full`

    def _inbox(self, expected: Parcels, staging: Tensor, cut: Cut, tag: int) -> Inbox:
        return _Loans(self, expected, staging[: min(BLOCK, cut.longest)], tag)


class _Loans:
    """Inbox of lent messages. Several messages are added block by block."""

    def __init__(self, transport: LendingTransport, expected: Parcels, staging: Tensor, tag: int) -> None:
        self._loans = deque(transport.borrow(like.numel(), like.dtype, source, tag) for like, source in expected)
        self._staging = staging

    def sums(self, sources: int, start: int, own: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Add one chunk from each of `sources` ranks block by block, and yield `(start, sum, own)` for each block."""
        loans = [self._loans.popleft() for _ in range(sources)]
        lent = [loan.look() for loan in loans]
        if sources == 1:
            yield start, lent[0], own
        else:
            for first in range(0, own.numel(), len(self._staging)):
                block = slice(first, first + len(self._staging))
                mine = own[block]
                total = self._staging[: len(mine)]
                hop(total, lent[0][block], lent[1][block], 1)
                for each in lent[2:]:
                    hop(total, total, each[block], 1)
                yield start + first, total, mine
        for loan in loans:
            loan.give_back()
