"""A transport for CUDA tensors over gloo, which cannot send them: each message is copied through host memory."""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from shardlite.comm.transport.base import OneByOne, Pending
from shardlite.comm.transport.gloo import GroupTransport
from shardlite.telemetry import Ledger


class StagedTransport(OneByOne):
    """Messages over `group` as of a `GroupTransport`, of tensors on any device.

    Copies run on the current stream of the tensor's device: a send sees what was put on it before, and what is put on
    it after `wait` sees what was received. Host memory is pinned for CUDA tensors, so that copies run at full speed.
    """

    blocking = True

    def __init__(self, group: dist.ProcessGroup | None, timeout: timedelta) -> None:
        self._host = GroupTransport(group, timeout)
        self.holder = self._books = Ledger()
        self.rank = self._host.rank
        self.world_size = self._host.world_size

    def isend(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """Copy `tensor` to the host, wait for that copy, and start sending it to rank `peer` of the group."""
        staged = self._on_host(tensor)
        staged.copy_(tensor.detach(), non_blocking=True)
        _wait_for_copy(tensor.device)
        return self._host.isend(staged, peer, tag)

    def irecv(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """Start receiving the next message with `tag` from rank `peer` of the group, for `tensor`."""
        staged = self._on_host(tensor)
        return _Arriving(self._host.irecv(staged, peer, tag), staged, tensor)

    def _on_host(self, tensor: Tensor) -> Tensor:
        staged = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, requires_grad=False)
        self._books.track("pinned memory", staged)
        return staged


@dataclass(frozen=True)
class _Arriving:
    """A message that arrives in host memory and belongs on a device."""

    pending: Pending
    staged: Tensor
    tensor: Tensor

    def wait(self) -> None:
        """Wait for the message, and start its copy to the device.

        The copy may still run when `staged` is dropped. That is safe: PyTorch notes a copy from pinned memory with the
        memory, and its allocator hands the memory out again only after the copy is done.
        """
        self.pending.wait()
        self.tensor.detach().copy_(self.staged, non_blocking=True)


def _wait_for_copy(device: torch.device) -> None:
    """Block until what the current stream of `device` holds so far is done. On the CPU a copy is done at once."""
    if device.type == "cuda":
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # blocking: wait asleep
        copied.record(torch.cuda.current_stream(device))
        copied.synchronize()
