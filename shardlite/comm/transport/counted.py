"""A transport that counts what goes through it."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from shardlite.comm.transport.base import Around, Message, Pending, Transport


@dataclass
class Tally:
    """What one rank has sent. One thread adds to it at a time."""

    messages: int = 0
    nbytes: int = 0

    def add(self, tensor: Tensor) -> None:
        """Count one message."""
        self.messages += 1
        self.nbytes += tensor.nbytes


class Counted(Around):
    """`transport`, with all that this rank sends through it added to `tally`."""

    def __init__(self, transport: Transport, tally: Tally) -> None:
        super().__init__(transport)
        self._tally = tally

    def isend(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """Count `tensor` and start sending it."""
        self._tally.add(tensor)
        return super().isend(tensor, peer, tag)

    def exchange(self, messages: Sequence[Message], tag: int) -> Pending:
        """Count the outgoing ones of `messages` and start them all."""
        for message in messages:
            if message.outgoing:
                self._tally.add(message.tensor)
        return super().exchange(messages, tag)
