"""A transport over `torch.distributed` point-to-point messages (gloo, CPU tensors)."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from shardlite.errors import CommError, LayoutError
from shardlite.transport.base import Completed, Pending


class GroupTransport:
    """Messages over `group` (`None`: the default group), each to be done within `timeout` of being waited for.

    Gloo closes the connection of two ranks for good once a wait between them has timed out: after a `CommError` the
    process group is lost and the run must end.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout: timedelta) -> None:
        if dist.get_rank(group) < 0:
            raise LayoutError("this process is not a member of the process group that it was given")
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self._group = group
        self._timeout = timeout

    def isend(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """Start sending `tensor` to rank `peer` of the group."""
        message = _Message(_as_bytes(tensor), f"rank {self.rank} sending to rank {peer}", tag, self._timeout)
        if tensor.numel() == 0:
            return Completed()
        with message.explained():
            return _InFlight(dist.isend(message.payload, group=self._group, group_dst=peer, tag=tag), message)

    def irecv(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """Start receiving the next message with `tag` from rank `peer` of the group into `tensor`."""
        message = _Message(_as_bytes(tensor), f"rank {self.rank} receiving from rank {peer}", tag, self._timeout)
        if tensor.numel() == 0:
            return Completed()
        with message.explained():
            return _InFlight(dist.irecv(message.payload, group=self._group, group_src=peer, tag=tag), message)


@dataclass(frozen=True)
class _Message:
    """A payload with the words that an error needs: who does what with whom, under which tag, within what time."""

    payload: Tensor
    route: str
    tag: int
    timeout: timedelta

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turn whatever the backend raises into a `CommError` that names the message."""
        try:
            yield
        except RuntimeError as error:
            raise CommError(
                f"{self.route} failed: {self.payload.nbytes} bytes, tag {self.tag}, "
                f"timeout {self.timeout.total_seconds():g} s. The peer died, is late or does another operation. "
                f"The backend says: {error}"
            ) from error


@dataclass(frozen=True)
class _InFlight:
    """A message that the backend is working on; holds the payload, because gloo keeps only its address."""

    work: dist.Work | None
    message: _Message

    def wait(self) -> None:
        assert self.work is not None, "the constructor has checked that this process is in the group"
        with self.message.explained():
            if not self.work.wait(self.message.timeout):
                raise RuntimeError("the operation was aborted")


def _as_bytes(tensor: Tensor) -> Tensor:
    """View `tensor` as bytes: point-to-point messages need no arithmetic, so every dtype can travel."""
    assert tensor.dim() == 1, f"a message is 1-D, got {tuple(tensor.shape)}"
    assert tensor.is_contiguous(), "a message is contiguous"
    if tensor.device.type != "cpu":
        # Gloo would hand the device address to a socket: "Bad address" at best, a crash at worst.
        raise LayoutError(f"GroupTransport sends CPU tensors, got one on {tensor.device}")
    return tensor.detach().view(torch.uint8)
