"""Traffic by unit and purpose: bytes sent by this rank, time spent, and time that computation waited for it.

Wraps every transport of a model, so that each message is counted where it is sent.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardlite.comm.transport.base import Delegating, Message, Pending, Transport
from shardlite.telemetry import Clock


@dataclass
class Tally:
    """Number and bytes of messages sent by one rank. Add from one thread at a time."""

    messages: int = 0
    nbytes: int = 0

    def add(self, tensor: Tensor) -> None:
        """Count one message."""
        self.messages += 1
        self.nbytes += tensor.nbytes


class Counted(Delegating):
    """`transport` with all messages sent through it added to `tally`."""

    def __init__(self, transport: Transport, tally: Tally) -> None:
        super().__init__(transport)
        self._tally = tally

    def isend(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """Count `tensor` and start sending it."""
        self._tally.add(tensor)
        return self._transport.isend(tensor, peer, tag)

    def exchange(self, messages: Sequence[Message], tag: int) -> Pending:
        """Count the outgoing messages, and start all `messages`."""
        for message in messages:
            if message.outgoing:
                self._tally.add(message.tensor)
        return self._transport.exchange(messages, tag)


NO_UNIT = "(no unit)"
"""Key for traffic of the whole model: gradient flags, norms, broadcast values."""


@dataclass(frozen=True)
class Sent:
    """Traffic for one purpose."""

    calls: int
    """Number of collective operations."""

    messages: int
    nbytes: int

    seconds: float
    """Duration of gathers and reductions, from start to end on this rank; 0 for other purposes."""

    exposed: float
    """Seconds that computation waited for them, so that were not overlapped."""


@dataclass
class _Entry:
    ran: Clock
    waited: Clock
    calls: int = 0
    tally: Tally = field(default_factory=Tally)


class Traffic:
    """Counts of one wrapped model on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._entries: dict[str, dict[str, _Entry]] = {}

    def counted(self, transport: Transport, purpose: str, unit: str = NO_UNIT) -> Transport:
        """Count one call. Return `transport` with its messages counted."""
        entry = self._entry(purpose, unit)
        entry.calls += 1
        return Counted(transport, entry.tally)

    def running(self, purpose: str, unit: str) -> AbstractContextManager[None]:
        """Add the duration of the block to that of operations."""
        return self._entry(purpose, unit).ran.running()

    def waiting(self, purpose: str, unit: str) -> AbstractContextManager[None]:
        """Add the duration of the block to the time that computation waits."""
        return self._entry(purpose, unit).waited.running()

    def by_unit(self) -> Mapping[str, Mapping[str, Sent]]:
        """Return all counts so far. On a GPU the host waits for open intervals."""
        return {
            unit: {purpose: _sent(each) for purpose, each in list(mine.items()) if each.calls}
            for unit, mine in list(self._entries.items())
        }

    def _entry(self, purpose: str, unit: str) -> _Entry:
        mine = self._entries.setdefault(unit, {})
        if purpose not in mine:
            mine[purpose] = _Entry(Clock(self._device), Clock(self._device))
        return mine[purpose]


def _sent(entry: _Entry) -> Sent:
    return Sent(entry.calls, entry.tally.messages, entry.tally.nbytes, entry.ran.seconds(), entry.waited.seconds())
