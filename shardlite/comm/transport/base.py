"""The interface of a transport: rank, send, receive, wait. Knows nothing of process groups."""

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
    """A tensor sent to rank `peer` if `outgoing`, else received from it."""

    tensor: Tensor
    peer: int
    outgoing: bool

    @property
    def route(self) -> str:
        """Direction and peer, for error messages."""
        return f"{'sending to' if self.outgoing else 'receiving from'} rank {self.peer}"


class Pending(Protocol):
    """Messages in flight. Keeps their tensors alive; the caller must not touch them until `wait` has returned."""

    def wait(self) -> None:
        """Wait until the tensor may be reused (sent) or read (received).

        If the transport is `blocking`, the host waits. Otherwise the device's current stream does: operations enqueued
        on it afterwards may use the tensor, and the call returns at once.

        Raises:
            CommError: the peer failed, sent something else, or stayed silent for longer than the transport's timeout.
        """


class Loan(Protocol):
    """A message that is read in the sender's memory."""

    def look(self) -> Tensor:
        """Wait for the message, and return it. It must not be written, nor read after `give_back`.

        Raises:
            CommError: as `Pending.wait`.
        """

    def give_back(self) -> None:
        """Allow the sender to overwrite the message.

        Raises:
            CommError: the sender gave up before, so that the data read may be wrong.
        """


class Holder(Protocol):
    """Reports memory by purpose."""

    def held(self) -> dict[str, Held]:
        """Return bytes by purpose."""


class Transport:
    """Messages between ranks, the base class of all transports.

    Messages from one rank to another with the same tag arrive in the order sent; different tags are independent.
    Tensors are contiguous and 1-D, of any dtype; sender and receiver agree on numel and dtype. Several threads may use
    one transport at once if their tags differ. A transport that guarantees less documents it.
    """

    rank: int
    """This rank, from 0."""

    world_size: int
    """Number of ranks."""

    batched = False
    """Whether messages that depend on each other must go in one `exchange`.

    `isend` and `irecv` then wait for their peer in the order of the calls, and two ranks that call them in opposite
    order deadlock.
    """

    blocking = True
    """Whether waits block the host, so that a caller with other work needs a thread for them."""

    lends = False
    """Whether messages can be read in the sender's memory, by `borrow`."""

    algorithm: Algorithm = "ring"
    """The schedule of collectives: that of `algorithm="auto"`, unless `connect` sets the one that a route names."""

    node = 1
    """Number of ranks per node for the hierarchical schedule; otherwise 1."""

    holder: Holder | None = None
    """Reports the memory of messages, without that of callers. Transports may share one."""

    def empty(self, nbytes: int, device: torch.device) -> Tensor:
        """Return uninitialised memory [nbytes] from which sending costs least."""
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def empty_persistent(self, nbytes: int, device: torch.device) -> Tensor:
        """Return uninitialised memory [nbytes] for a buffer on a GPU that is kept, and sent or received many times."""
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def trim(self, *, keep: int | None = None) -> None:
        """Free memory that was not used since the last call, or all free memory except `keep` bytes.

        A no-op where the memory belongs to PyTorch's allocators.
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
        """Expect the next `numel` elements with `tag` from rank `peer`, to be read in the sender's memory."""
        raise NotImplementedError(f"{type(self).__name__} does not lend")

    def exchange(self, messages: Sequence[Message], tag: int) -> Pending:
        """Start all `messages`. None waits for another; those of one route keep their order.

        Receives start first, so that early messages have a destination.
        """
        arriving = [self.irecv(each.tensor, each.peer, tag) for each in messages if not each.outgoing]
        departing = [self.isend(each.tensor, each.peer, tag) for each in messages if each.outgoing]
        return _PendingGroup([*arriving, *departing])


class BatchedTransport(Transport):
    """A transport whose messages are exchanges on the device's current stream. Subclasses have `exchange`."""

    batched = True
    blocking = False

    def isend(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """Start sending `tensor` to rank `peer`: an exchange of one message."""
        return self.exchange([Message(tensor, peer, outgoing=True)], tag)

    def irecv(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """Start receiving from rank `peer` into `tensor`: an exchange of one message."""
        return self.exchange([Message(tensor, peer, outgoing=False)], tag)


class Completed:
    """A `Pending` with nothing to wait for."""

    def wait(self) -> None:
        """Return at once."""


def check_on_host(who: str, tensor: Tensor) -> None:
    """Check that transport `who`, which reads host memory, can send a tensor or receive into it.

    Raises:
        LayoutError: the tensor is on a device.
    """
    assert tensor.dim() == 1, f"a message is 1-D, got {tuple(tensor.shape)}"
    assert tensor.is_contiguous(), "a message is contiguous"
    if tensor.device.type != "cpu":  # its address would be "bad" at best, and a crash at worst
        raise LayoutError(f"{who} sends CPU tensors, got one on {tensor.device}")


@dataclass(frozen=True)
class _PendingGroup:
    """Several messages as one `Pending`."""

    parts: Sequence[Pending]

    def wait(self) -> None:
        for part in self.parts:
            part.wait()
