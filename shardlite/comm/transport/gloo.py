"""A transport over `torch.distributed` point-to-point messages (gloo, CPU tensors)."""

from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from shardlite.comm.transport.base import Completed, Message, OneByOne, Pending
from shardlite.comm.transport.c10d_work import InFlight, Posted, joined
from shardlite.errors import LayoutError


class GroupTransport(OneByOne):
    """Messages over `group` (`None`: the default group), each to be done within `timeout` of being waited for.

    Gloo closes the connection of two ranks for good once a wait between them has timed out: after a `CommError` the
    process group is lost and the run must end.
    """

    blocking = True

    def __init__(self, group: dist.ProcessGroup | None, timeout: timedelta) -> None:
        self._group = joined(group)
        self._timeout = timeout
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)

    def isend(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """Start sending `tensor` to rank `peer` of the group."""
        return self._start(Message(tensor, peer, outgoing=True), tag)

    def irecv(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """Start receiving the next message with `tag` from rank `peer` of the group into `tensor`."""
        return self._start(Message(tensor, peer, outgoing=False), tag)

    def _start(self, message: Message, tag: int) -> Pending:
        """Hand a message to the backend, by the group's own methods: `dist.isend` costs twice as much Python."""
        _check(message.tensor)
        if message.tensor.numel() == 0:
            return Completed()
        posted = Posted(self.rank, (message,), tag, self._timeout)
        start = self._group.send if message.outgoing else self._group.recv
        try:
            return InFlight((start([message.tensor], message.peer, tag),), posted, self._hang_up)
        except RuntimeError as error:
            raise posted.refused(error) from error

    def _hang_up(self) -> None:
        """Close all connections, by a wait that times out."""
        with suppress(RuntimeError):
            peer = (self.rank + 1) % self.world_size
            self._group.recv([torch.empty(1)], peer, _NEVER_SENT).wait(timedelta(milliseconds=1))


_NEVER_SENT = 0x7FFFFFFF
"""A tag that no message has, but once in 2^31; at the end of a program that does no harm."""


def _check(tensor: Tensor) -> None:
    assert tensor.dim() == 1, f"a message is 1-D, got {tuple(tensor.shape)}"
    assert tensor.is_contiguous(), "a message is contiguous"
    if tensor.device.type != "cpu":
        # Gloo would hand the device address to a socket: "Bad address" at best, a crash at worst.
        raise LayoutError(f"GroupTransport sends CPU tensors, got one on {tensor.device}")
