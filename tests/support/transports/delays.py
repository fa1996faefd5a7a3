"""A transport whose messages start late, at random: what happens to be right only by timing then fails."""

import time
from collections.abc import Callable, Sequence
from random import Random

import torch
from torch import Tensor

from shardlite.comm.transport.base import Transport
from shardlite.comm.transport.messages import Loan, Message, Pending
from tests.support.transports.delegating import Delegating


class Delayed(Delegating):
    """`transport`, with a pause of `shortest` to `longest` seconds before each send and each receive.

    The pauses of a rank follow from `seed` and the rank, so a failure can be repeated. `sleep` makes them.
    """

    def __init__(
        self,
        transport: Transport,
        seed: int,
        *,
        longest: float,
        shortest: float = 0.0,
        sleep: Callable[[float], None] | None = None,
    ) -> None:
        super().__init__(transport)
        self._sleep = sleep or time.sleep
        self._random = Random(f"{seed} {transport.rank}")
        self._shortest = shortest
        self._longest = longest

    def isend(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        self._pause()
        return self._transport.isend(tensor, peer, tag)

    def irecv(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        self._pause()
        return self._transport.irecv(tensor, peer, tag)

    def borrow(self, numel: int, dtype: torch.dtype, peer: int, tag: int) -> Loan:
        self._pause()
        return self._transport.borrow(numel, dtype, peer, tag)

    def exchange(self, messages: Sequence[Message], tag: int) -> Pending:
        self._pause()
        return self._transport.exchange(messages, tag)

    def _pause(self) -> None:
        self._sleep(self._random.uniform(self._shortest, self._longest))
