"""A transport over `torch.distributed` point-to-point messages (gloo, CPU tensors)."""

from dataclasses import dataclass
from datetime import timedelta

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
        everyone = dist.group.WORLD
        assert everyone is not None, "the rank was asked for above"
        self._group = everyone if group is None else group
        self._timeout = timeout

    def isend(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """Start sending `tensor` to rank `peer` of the group."""
        return self._start(_Message(tensor, self._timeout, tag, (self.rank, "sending to", peer)))

    def irecv(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """Start receiving the next message with `tag` from rank `peer` of the group into `tensor`."""
        return self._start(_Message(tensor, self._timeout, tag, (self.rank, "receiving from", peer)))

    def _start(self, message: "_Message") -> Pending:
        """Hand a message to the backend, by the group's own methods: `dist.isend` costs twice as much Python."""
        tensor, (_, doing, peer) = message.tensor, message.route
        _check(tensor)
        if tensor.numel() == 0:
            return Completed()
        start = self._group.send if doing == "sending to" else self._group.recv
        try:
            return _InFlight(start([tensor], peer, message.tag), message)
        except RuntimeError as error:
            raise message.failed(error) from error


@dataclass(frozen=True)
class _Message:
    """A tensor with what an error has to say: who does what with whom, under which tag, within what time."""

    tensor: Tensor
    timeout: timedelta
    tag: int
    route: tuple[int, str, int]

    def failed(self, error: RuntimeError) -> CommError:
        """Return what the backend has raised in our words."""
        rank, doing, peer = self.route
        return CommError(
            f"rank {rank} {doing} rank {peer} failed: {self.tensor.nbytes} bytes, tag {self.tag}, "
            f"timeout {self.timeout.total_seconds():g} s. The peer died, is late or does another operation. "
            f"The backend says: {error}"
        )


@dataclass(frozen=True)
class _InFlight:
    """A message that the backend is working on; holds the tensor, because gloo keeps only its address."""

    work: dist.Work
    message: _Message

    def wait(self) -> None:
        try:
            if not self.work.wait(self.message.timeout):
                raise RuntimeError("the operation was aborted")
        except RuntimeError as error:
            raise self.message.failed(error) from error


def _check(tensor: Tensor) -> None:
    assert tensor.dim() == 1, f"a message is 1-D, got {tuple(tensor.shape)}"
    assert tensor.is_contiguous(), "a message is contiguous"
    if tensor.device.type != "cpu":
        # Gloo would hand the device address to a socket: "Bad address" at best, a crash at worst.
        raise LayoutError(f"GroupTransport sends CPU tensors, got one on {tensor.device}")
