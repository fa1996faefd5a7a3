"""The interface of a transport: rank, send, receive, wait. Knows nothing of process groups."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shardlite.comm.cost_model import LinkCost
from shardlite.comm.shm.heap import lazy_zeros
from shardlite.config import Algorithm
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


class Transport(Protocol):
    """Messages between ranks.

    Messages from one rank to another with the same tag arrive in the order sent; different tags are independent.
    Tensors are contiguous and 1-D, of any dtype; sender and receiver agree on numel and dtype. Several threads may use
    one transport at once if their tags differ. A transport that guarantees less documents it.
    """

    @property
    def rank(self) -> int:
        """This rank, from 0."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    @property
    def batched(self) -> bool:
        """Whether messages that depend on each other must go in one `exchange`.

        `isend` and `irecv` then wait for their peer in the order of the calls, and two ranks that call them in opposite
        order deadlock.
        """

    @property
    def blocking(self) -> bool:
        """Whether waits block the host, so that a caller with other work needs a thread for them."""

    @property
    def lends(self) -> bool:
        """Whether messages can be read in the sender's memory, by `borrow`."""

    algorithm: Algorithm
    """The schedule of collectives."""

    link: LinkCost | None
    """Costs of messages, or `None` if unknown. They determine the length of messages. Equal on all ranks."""

    node: int
    """Number of ranks per node for the hierarchical schedule; otherwise 1."""

    def empty(self, nbytes: int, device: torch.device) -> Tensor:
        """Return uninitialised memory [nbytes] from which sending costs least."""

    def zeros(self, nbytes: int, device: torch.device) -> Tensor:
        """Return zeroed memory [nbytes] from which sending costs least. On the CPU, pages are taken on first write."""

    def trim(self, *, keep: int | None = None) -> None:
        """Free memory that was not used since the last call, or all free memory except `keep` bytes."""

    @property
    def holder(self) -> Holder | None:
        """Reports the memory of messages, without that of callers. Transports may share one."""

    def is_gone(self, peer: int) -> bool:
        """Return whether the process of rank `peer` is known to have ended."""

    def isend(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """Start sending `tensor` to rank `peer`."""

    def irecv(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """Start receiving the next message with `tag` from rank `peer` into `tensor`."""

    def borrow(self, numel: int, dtype: torch.dtype, peer: int, tag: int) -> Loan:
        """Expect the next `numel` elements with `tag` from rank `peer`, to be read in the sender's memory."""

    def exchange(self, messages: Sequence[Message], tag: int) -> Pending:
        """Start all `messages`. None waits for another; those of one route keep their order."""


class Completed:
    """A `Pending` with nothing to wait for."""

    def wait(self) -> None:
        """Return at once."""


class TransportDefaults:
    """Defaults of most transports: messages are received into their tensor, and any memory is equally fast.

    `connect` sets the algorithm and the link.
    """

    lends = False
    algorithm: Algorithm = "ring"
    link: LinkCost | None = None
    node: int = 1
    holder: Holder | None = None

    def empty(self, nbytes: int, device: torch.device) -> Tensor:
        """Return uninitialised memory [nbytes] on `device`."""
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def zeros(self, nbytes: int, device: torch.device) -> Tensor:
        """Return zeroed memory [nbytes] on `device`."""
        return lazy_zeros(nbytes) if device.type == "cpu" else torch.zeros(nbytes, dtype=torch.uint8, device=device)

    def trim(self, *, keep: int | None = None) -> None:
        """No-op: the memory belongs to PyTorch's allocators."""

    def is_gone(self, peer: int) -> bool:
        """Return false: it is not known."""
        return False

    def borrow(self, numel: int, dtype: torch.dtype, peer: int, tag: int) -> Loan:
        """Not supported: see `lends`."""
        raise AssertionError(f"{type(self).__name__} does not lend")


class Unbatched(TransportDefaults):
    """`exchange` for a transport whose sends and receives do not wait for each other."""

    batched = False

    def exchange(self: Transport, messages: Sequence[Message], tag: int) -> Pending:
        """Start `messages` one by one, receives first, so that early messages have a destination."""
        arriving = [self.irecv(each.tensor, each.peer, tag) for each in messages if not each.outgoing]
        departing = [self.isend(each.tensor, each.peer, tag) for each in messages if each.outgoing]
        return _PendingGroup([*arriving, *departing])


@dataclass(frozen=True)
class _PendingGroup:
    """Several messages as one `Pending`."""

    parts: Sequence[Pending]

    def wait(self) -> None:
        for part in self.parts:
            part.wait()


class Delegating:
    """A transport that delegates to another one."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.rank = transport.rank
        self.world_size = transport.world_size
        self.batched = transport.batched
        self.blocking = transport.blocking
        self.lends = transport.lends
        self.algorithm = transport.algorithm
        self.link = transport.link
        self.node = transport.node
        self.holder = transport.holder

    def empty(self, nbytes: int, device: torch.device) -> Tensor:
        """Return uninitialised memory [nbytes] of the wrapped transport."""
        return self._transport.empty(nbytes, device)

    def zeros(self, nbytes: int, device: torch.device) -> Tensor:
        """Return zeroed memory [nbytes] of the wrapped transport."""
        return self._transport.zeros(nbytes, device)

    def trim(self, *, keep: int | None = None) -> None:
        """Free memory of the wrapped transport."""
        self._transport.trim(keep=keep)

    def is_gone(self, peer: int) -> bool:
        """Return whether the wrapped transport knows that rank `peer` has ended."""
        return self._transport.is_gone(peer)

    def isend(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """Start sending through the wrapped transport."""
        return self._transport.isend(tensor, peer, tag)

    def irecv(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """Start receiving through the wrapped transport."""
        return self._transport.irecv(tensor, peer, tag)

    def borrow(self, numel: int, dtype: torch.dtype, peer: int, tag: int) -> Loan:
        """Expect a message of the wrapped transport."""
        return self._transport.borrow(numel, dtype, peer, tag)

    def exchange(self, messages: Sequence[Message], tag: int) -> Pending:
        """Start messages through the wrapped transport."""
        return self._transport.exchange(messages, tag)
