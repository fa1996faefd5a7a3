"""Collectives by batches: a step of a schedule is one exchange of all its chunks, so no chunk is forwarded early.

For transports on which a send and a receive that two ranks start in opposite order would deadlock (NCCL).
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from shardlite_kernels import hop
from torch import Tensor

from shardlite.comm import schedule
from shardlite.comm.chunking import Cut, Pieces
from shardlite.comm.operation import Operation
from shardlite.comm.transfers import Schedule, Transfer
from shardlite.comm.transport.base import LastHop, Parcels, Transport, finishers
from shardlite.comm.transport.messages import Message

MOST_DISTANCES = 32
"""Maximum number of distances between ranks in one exchange. A rank sends and receives one message per distance, and
NCCL supports 64 messages in a group.
"""


class BatchTransport(Transport):
    """A transport that only supports `exchange`, and whose exchanges wait for peers in the order of the calls."""

    batched = True
    has_tags = False

    def swap(self, parcels: Sequence[tuple[Parcels, Parcels]], tag: int, operation: Operation) -> None:
        """Send and receive the tensors of each pair in `parcels`, one pair after the other."""
        for departing, arriving in parcels:
            self._swap(departing, arriving, tag, operation)

    def staging_numel(self, cut: Cut, itemsize: int) -> int:
        """Return the number of elements of the staging buffer: all chunks that arrive in a step."""
        del itemsize
        plan = schedule.reduce_scatter(self.algorithm, self.world_size, node=self.node)
        at_once = max((len(step.received) for step in plan.steps_of(self.rank)), default=0)
        return at_once * -(-cut.longest // cut.chunk) * min(cut.chunk, cut.longest)

    def reduce_scatter(self, full: Tensor, cut: Cut, last: LastHop, staging: Tensor, operation: Operation) -> None:
        """In each step, exchange whole pieces and then add them. A step sends the sums of earlier steps."""
        plan = schedule.reduce_scatter(self.algorithm, self.world_size, node=self.node)
        pieces, tag = cut.of(full, plan.parts), operation.tag(full, cut.offsets, self.algorithm)
        additions = list(finishers(plan.program(self.rank), self.rank, last))
        slots = torch.split(staging, max(1, min(cut.chunk, cut.longest)))
        for step, (sent, received) in enumerate(plan.steps_of(self.rank)):
            free = iter(slots)
            messages = {  # by segment, part, chunk and source
                (each.segment, each.part, i, each.source): next(free)[: chunk.numel()]
                for each in received
                for i, (_, chunk) in enumerate(pieces(each.segment, each.part))
            }
            arriving = [(message, source) for (*_, source), message in messages.items()]
            self._swap(_sent(sent, pieces), arriving, tag, operation)
            for arrival, finish in additions:
                if arrival.step == step:
                    segment, part = arrival.segment, arrival.part
                    for i, (start, own) in enumerate(pieces(segment, part)):
                        summands = [messages[segment, part, i, source] for source in arrival.sources]
                        for earlier, later in pairwise(summands):
                            hop(later, earlier, later, 1)
                        finish(start, summands[-1], own)

    def _spread(self, plan: Schedule, pieces: Pieces, tag: int, operation: Operation) -> None:
        for sent, received in plan.steps_of(self.rank):
            arriving = [(chunk, each.source) for each in received for _, chunk in pieces(each.segment, each.part)]
            self._swap(_sent(sent, pieces), arriving, tag, operation)

    def _swap(self, departing: Parcels, arriving: Parcels, tag: int, operation: Operation) -> None:
        """Send and receive chunks, and wait for all of them.

        Chunks for many peers take several exchanges. The distance between the sender and the receiver of a message
        determines the exchange, so both ranks assign the message to the same exchange.
        """
        rank, world_size = self.rank, self.world_size
        batches: list[list[Message]] = [[] for _ in range(0, world_size, MOST_DISTANCES)]
        for chunk, peer in arriving:
            batches[(rank - peer) % world_size // MOST_DISTANCES].append(Message(chunk, peer, outgoing=False))
        for chunk, peer in departing:
            operation.count_sent(chunk)
            batches[(peer - rank) % world_size // MOST_DISTANCES].append(Message(chunk, peer, outgoing=True))
        for messages in filter(None, batches):
            self.exchange(messages, tag).wait()


def _sent(transfers: Sequence[Transfer], pieces: Pieces) -> list[tuple[Tensor, int]]:
    """Return the chunks that a rank sends in a step, given the step's `transfers`. Each chunk has its target rank."""
    return [(chunk, each.target) for each in transfers for _, chunk in pieces(each.segment, each.part)]
