"""Transports around transports: one that delegates, and one that counts what is sent through it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardlite.comm.traffic import Tally
from shardlite.comm.transport.base import Transport
from shardlite.comm.transport.batches import BatchTransport
from shardlite.comm.transport.loans import LendingTransport
from shardlite.comm.transport.messages import Loan, Message, Pending


class Delegating(Transport):
    """A transport that delegates messages to another one. Its collectives are those of the other one's kind."""

    _transport: Any

    def __new__(cls, transport: Transport, *_: Any, **__: Any) -> "Delegating":
        """Make a transport that lends, or only takes batches, if `transport` does."""
        kinds = [each for each in (BatchTransport, LendingTransport) if isinstance(transport, each)]
        if kinds and not issubclass(cls, (BatchTransport, *kinds)):
            cls = type(cls.__name__, (cls, *kinds), {})
        return super().__new__(cls)

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        for name in ("rank", "world_size", "blocking", "algorithm", "node", "holder"):
            setattr(self, name, getattr(transport, name))

    def empty(self, nbytes: int, device: torch.device) -> Tensor:
        """Return uninitialized memory [nbytes] of the wrapped transport."""
        return self._transport.empty(nbytes, device)

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


class Counted(Delegating):
    """`transport` with all messages sent through it added to `tally`."""

    def __init__(self, transport: Transport, tally: Tally) -> None:
        super().__init__(transport)
        self._tally = tally

    def isend(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """Count `tensor` and start sending it."""
        self._tally.count(tensor)
        return self._transport.isend(tensor, peer, tag)

    def exchange(self, messages: Sequence[Message], tag: int) -> Pending:
        """Count the outgoing messages, and start all `messages`."""
        for message in messages:
            if message.outgoing:
                self._tally.count(message.tensor)
        return self._transport.exchange(messages, tag)
