"""Messages between two ranks: what is sent, what is in flight, and what is read in the sender's memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from shardlite.errors import LayoutError


@dataclass(frozen=True)
class Message:
    """A tensor that is sent to rank `peer` if `outgoing`, and received from rank `peer` otherwise."""

    tensor: Tensor
    peer: int
    outgoing: bool

    @property
    def route(self) -> str:
        """Return the direction and the peer, for error messages."""
        return f"{'sending to' if self.outgoing else 'receiving from'} rank {self.peer}"


class Pending(Protocol):
    """Messages in flight, with references to the tensors. The caller must not use the tensors before `wait` returns."""

    def wait(self) -> None:
        """Wait until sent tensors may be reused and received tensors may be read.

        If the transport is `blocking`, the host waits. Otherwise only the device's current stream waits: the call
        returns immediately, and operations enqueued on the stream afterwards may use the tensors.

        Raises:
            CommError: the peer failed, sent a different message, or did not respond within the transport's timeout.
        """


class Loan(Protocol):
    """A message that is read in the sender's memory."""

    def look(self) -> Tensor:
        """Wait for the message and return its tensor.

        The caller must not write the tensor, and must not read the tensor after `give_back`.

        Raises:
            CommError: as `Pending.wait`.
        """

    def give_back(self) -> None:
        """Allow the sender to overwrite the message.

        Raises:
            CommError: the sender had failed, so the data that was read may be wrong.
        """


class Completed:
    """A `Pending` with nothing to wait for."""

    def wait(self) -> None:
        """Return immediately."""


@dataclass(frozen=True)
class PendingGroup:
    """Several messages as one `Pending`."""

    parts: Sequence[Pending]

    def wait(self) -> None:
        """Wait for all messages."""
        for part in self.parts:
            part.wait()


def check_on_host(who: str, tensor: Tensor) -> None:
    """Check that `tensor` is in host memory, which the transport named `who` reads and writes.

    Raises:
        LayoutError: the tensor is on a different device.
    """
    assert tensor.dim() == 1, f"a message is 1-D, got {tuple(tensor.shape)}"
    assert tensor.is_contiguous(), "a message is contiguous"
    if tensor.device.type != "cpu":  # a device address would raise an error at best, and crash at worst
        raise LayoutError(f"{who} sends CPU tensors, got one on {tensor.device}")
