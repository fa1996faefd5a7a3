"""A transport over NCCL (CUDA tensors): the messages of a step go in one batch."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shardlite.comm.transport.base import Completed, Message, Pending, Plain
from shardlite.comm.transport.c10d_work import InFlight, Posted, joined


class NcclTransport(Plain):
    """Messages over `group` (`None`: the default group), whose backend for the tensors' device is NCCL.

    It promises less than other transports. NCCL knows no tags: it pairs messages by their order alone. So all ranks
    must start their exchanges in one order, from one thread at a time; operations that run at the same time need a
    process group each.

    A wait puts the current stream behind the messages and returns. A peer that is late or dead is therefore noticed by
    the process group's watchdog, after the timeout of the group, and by default that ends the process; a `CommError`
    comes only from what fails at once.
    """

    batched = True
    blocking = False

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = joined(group)
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)

    def isend(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """Start sending `tensor` to rank `peer` of the group: a batch of one."""
        return self.exchange([Message(tensor, peer, outgoing=True)], tag)

    def irecv(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """Start receiving from rank `peer` of the group into `tensor`: a batch of one."""
        return self.exchange([Message(tensor, peer, outgoing=False)], tag)

    def exchange(self, messages: Sequence[Message], tag: int) -> Pending:
        """Start all `messages` in one batch.

        The first exchange over a group creates its communicator, unless an eagerly initialised group has one: the call
        then returns once every rank of the group has come to an exchange of its own.
        """
        batch = [self._operation(message, tag) for message in messages if message.tensor.numel()]
        if not batch:
            return Completed()
        posted = Posted(self.rank, messages, tag)
        try:
            return InFlight(dist.batch_isend_irecv(batch), posted)
        except RuntimeError as error:
            raise posted.refused(error) from error

    def _operation(self, message: Message, tag: int) -> dist.P2POp:
        """Describe a message to PyTorch, as bytes: NCCL has no 16-bit integers."""
        start = dist.isend if message.outgoing else dist.irecv
        content = message.tensor.detach().view(torch.uint8)
        return dist.P2POp(start, content, group=self._group, tag=tag, group_peer=message.peer)
