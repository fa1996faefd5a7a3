"""The interface of a transport: rank, send, receive, wait. This file does not depend on process groups."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shardlite.config import Algorithm
from shardlite.errors import LayoutError
from shardlite.telemetry import Held


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


class Holder(Protocol):
    """An object that reports how much memory it holds for each purpose."""

    def held(self) -> dict[str, Held]:
        """Return the bytes held for each purpose."""


class Transport:
    """Base class of all transports, which send messages between ranks.

    Messages from one rank to another with the same tag arrive in the order in which they were sent. Messages with
    different tags are independent. Tensors are contiguous and 1-D, of any dtype. Sender and receiver must use the same
    numel and dtype. Several threads may use one transport concurrently if their tags differ. A transport that
    guarantees less documents the difference.
    """

    rank: int
    """This rank, from 0."""

    world_size: int
    """Number of ranks."""

    batched = False
    """Whether the transport only supports `exchange`.

    Exchanges of a batched transport wait for peers in the order of the calls. Two ranks that start a send and a
    receive in opposite order would deadlock, so messages that depend on each other must be in one `exchange`.
    """

    blocking = True
    """Whether waits block the host. If they do, a caller with other work needs a separate thread for the waits."""

    replays = True
    """Whether a CUDA graph can repeat the messages of a transport that does not block."""

    lends = False
    """Whether messages can be read in the sender's memory, with `borrow`."""

    algorithm: Algorithm = "ring"
    """The algorithm of collectives. The value of the class is for `algorithm="auto"`. `connect` sets other values."""

    node = 1
    """Number of ranks per node for the hierarchical algorithm, or 1 for all other algorithms."""

    holder: Holder | None = None
    """Object that reports the memory that the transport holds for messages. Several transports may share a holder."""

    def empty(self, nbytes: int, device: torch.device) -> Tensor:
        """Return uninitialized memory [nbytes] from which tensors can be sent without a copy, where possible."""
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def empty_persistent(self, nbytes: int, device: torch.device) -> Tensor:
        """Return uninitialized memory [nbytes] for a long-lived GPU buffer that is sent or received many times."""
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def trim(self, *, keep: int | None = None) -> None:
        """Release memory unused since the previous call. With `keep`, release all unused memory except `keep` bytes.

        Has no effect if the memory belongs to PyTorch's allocators.
        """

    def is_gone(self, peer: int) -> bool:
        """Return whether the process of rank `peer` is known to have ended."""
        return False

    def isend(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """Start sending `tensor` to rank `peer`."""
        raise NotImplementedError

    def irecv(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """Start receiving the next message with `tag` from rank `peer` into `tensor`."""
        raise NotImplementedError

    def borrow(self, numel: int, dtype: torch.dtype, peer: int, tag: int) -> Loan:
        """Expect the next message with `tag` from rank `peer`, [numel], to be read in the sender's memory."""
        raise NotImplementedError(f"{type(self).__name__} does not lend")

    def exchange(self, messages: Sequence[Message], tag: int) -> Pending:
        """Start all `messages` together. Messages with the same peer and direction keep their order.

        Receives start first, so that messages that arrive early have a destination.
        """
        arriving = [self.irecv(each.tensor, each.peer, tag) for each in messages if not each.outgoing]
        departing = [self.isend(each.tensor, each.peer, tag) for each in messages if each.outgoing]
        return PendingGroup([*arriving, *departing])


class Completed:
    """A `Pending` with nothing to wait for."""

    def wait(self) -> None:
        """Return immediately."""


def check_on_host(who: str, tensor: Tensor) -> None:
    """Check that `tensor` is in host memory, which the transport named `who` reads and writes.

    Raises:
        LayoutError: the tensor is on a different device.
    """
    assert tensor.dim() == 1, f"a message is 1-D, got {tuple(tensor.shape)}"
    assert tensor.is_contiguous(), "a message is contiguous"
    if tensor.device.type != "cpu":  # a device address would raise an error at best, and crash at worst
        raise LayoutError(f"{who} sends CPU tensors, got one on {tensor.device}")


@dataclass(frozen=True)
class PendingGroup:
    """Several messages as one `Pending`."""

    parts: Sequence[Pending]

    def wait(self) -> None:
        """Wait for all messages."""
        for part in self.parts:
            part.wait()
