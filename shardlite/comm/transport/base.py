"""What a collective may ask of a transport: who am I, send, receive, wait. Knows no process group."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shardlite.comm.cost_model import Link
from shardlite.comm.shm.heap import lazy_zeros
from shardlite.config import Algorithm
from shardlite.telemetry import Held


@dataclass(frozen=True)
class Message:
    """A tensor on its way to rank `peer`, if `outgoing`, or from it."""

    tensor: Tensor
    peer: int
    outgoing: bool

    @property
    def route(self) -> str:
        """The way of the message, in the words of an error."""
        return f"{'sending to' if self.outgoing else 'receiving from'} rank {self.peer}"


class Pending(Protocol):
    """Messages in flight. It keeps their tensors alive; the caller keeps them untouched until `wait` has returned."""

    def wait(self) -> None:
        """Wait until the tensor may be reused (sent) or read (received).

        If the transport is `blocking`, the host waits. Otherwise the device's current stream does: what is put on that
        stream afterwards may use the tensor, and the call returns at once.

        Raises:
            CommError: the peer failed, sent something else, or stayed silent for longer than the transport's timeout.
        """


class Loan(Protocol):
    """A message that is read where it lies."""

    def look(self) -> Tensor:
        """Wait for it, and return it: to be read, not written, until `give_back`.

        Raises:
            CommError: as `Pending.wait`.
        """

    def give_back(self) -> None:
        """Let the sender write there again.

        Raises:
            CommError: the sender had given up before, so that what was read may be wrong.
        """


class Holder(Protocol):
    """What knows some memory by its purpose."""

    def held(self) -> dict[str, Held]:
        """Return bytes by purpose."""


class Transport(Protocol):
    """Messages between ranks.

    Messages from one rank to another with the same tag arrive in the order sent; those with different tags do not meet.
    Tensors are contiguous and 1-D, of any dtype; sender and receiver agree on numel and dtype. Several threads may use
    one transport at once if their tags differ. A transport that promises less says so.
    """

    @property
    def rank(self) -> int:
        """This rank, from 0."""

    @property
    def world_size(self) -> int:
        """How many ranks there are."""

    @property
    def batched(self) -> bool:
        """Whether messages that depend on each other must go in one `exchange`.

        `isend` and `irecv` then wait for their peer in the order in which they were called, and two ranks that call
        them in crossed order wait for each other for good.
        """

    @property
    def blocking(self) -> bool:
        """Whether waits block the host, so that a caller who has other work needs a thread for them."""

    @property
    def lends(self) -> bool:
        """Whether what arrives can be read where it lies, by `borrow`."""

    algorithm: Algorithm
    """The schedule that collectives take."""

    link: Link | None
    """What messages cost, if that is known: by it `ring` chooses how long they are. The same on all ranks."""

    node: int
    """How many ranks there are per node, for the hierarchical schedule; otherwise 1."""

    def empty(self, nbytes: int, device: torch.device) -> Tensor:
        """Return memory [nbytes], uninitialised, from which sending costs least."""

    def zeros(self, nbytes: int, device: torch.device) -> Tensor:
        """Return such memory, zeroed. On the CPU it takes pages only as it is written to."""

    def trim(self, *, keep: int | None = None) -> None:
        """Give memory back to the system that nobody has used since the last call; or all but `keep` free bytes."""

    @property
    def holder(self) -> Holder | None:
        """What knows the memory that messages take beside that of callers; transports may have one in common."""

    def is_gone(self, peer: int) -> bool:
        """Whether it is known that the process of rank `peer` has ended."""

    def isend(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """Start sending `tensor` to rank `peer`."""

    def irecv(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """Start receiving the next message with `tag` from rank `peer` into `tensor`."""

    def borrow(self, numel: int, dtype: torch.dtype, peer: int, tag: int) -> Loan:
        """Expect the next message with `tag` from rank `peer`, `numel` elements, to be read where it lies."""

    def exchange(self, messages: Sequence[Message], tag: int) -> Pending:
        """Start all `messages`, none of which waits for another; those of one route keep their order."""


class Completed:
    """A `Pending` with nothing to wait for."""

    def wait(self) -> None:
        """Return at once."""


class Plain:
    """What most transports have in common: what arrives is written to where it is expected, and any memory is as good.

    `connect` sets the algorithm and the link.
    """

    lends = False
    algorithm: Algorithm = "ring"
    link: Link | None = None
    node: int = 1
    holder: Holder | None = None

    def empty(self, nbytes: int, device: torch.device) -> Tensor:
        """Return memory [nbytes] on a device."""
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def zeros(self, nbytes: int, device: torch.device) -> Tensor:
        """Return memory [nbytes] on a device, zeroed."""
        return lazy_zeros(nbytes) if device.type == "cpu" else torch.zeros(nbytes, dtype=torch.uint8, device=device)

    def trim(self, *, keep: int | None = None) -> None:
        """Nothing: memory is that of PyTorch's allocators."""

    def is_gone(self, peer: int) -> bool:
        """Not be known."""
        return False

    def borrow(self, numel: int, dtype: torch.dtype, peer: int, tag: int) -> Loan:
        """Not be called: see `lends`."""
        raise AssertionError(f"{type(self).__name__} does not lend")


class OneByOne(Plain):
    """The `exchange` of a transport whose sends and receives do not wait for each other."""

    batched = False

    def exchange(self: Transport, messages: Sequence[Message], tag: int) -> Pending:
        """Start `messages` one by one, receives first: what arrives early then has a place to go."""
        arriving = [self.irecv(each.tensor, each.peer, tag) for each in messages if not each.outgoing]
        departing = [self.isend(each.tensor, each.peer, tag) for each in messages if each.outgoing]
        return _Together([*arriving, *departing])


@dataclass(frozen=True)
class _Together:
    """Several messages as one."""

    parts: Sequence[Pending]

    def wait(self) -> None:
        for part in self.parts:
            part.wait()


class Around:
    """A transport around another one, of which it is like in all that it does not change."""

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
        """Return memory [nbytes] of the other one."""
        return self._transport.empty(nbytes, device)

    def zeros(self, nbytes: int, device: torch.device) -> Tensor:
        """Return memory [nbytes] of the other one, zeroed."""
        return self._transport.zeros(nbytes, device)

    def trim(self, *, keep: int | None = None) -> None:
        """Give back memory of the other one."""
        self._transport.trim(keep=keep)

    def is_gone(self, peer: int) -> bool:
        """Whether the other one knows it."""
        return self._transport.is_gone(peer)

    def isend(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """Start sending through the other one."""
        return self._transport.isend(tensor, peer, tag)

    def irecv(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """Start receiving through the other one."""
        return self._transport.irecv(tensor, peer, tag)

    def borrow(self, numel: int, dtype: torch.dtype, peer: int, tag: int) -> Loan:
        """Expect a message of the other one."""
        return self._transport.borrow(numel, dtype, peer, tag)

    def exchange(self, messages: Sequence[Message], tag: int) -> Pending:
        """Start messages through the other one."""
        return self._transport.exchange(messages, tag)
