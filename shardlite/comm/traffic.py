"""Traffic by unit and purpose: bytes that this rank sent, durations of operations, and waits of the computation.

A unit is a sharded submodule. Every operation of a model has a tally, to which transports add each sent message. On
a GPU, measuring an interval costs two events, so times are measured only after the first call of `traffic()`.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardlite.telemetry import Clock, labelled


@dataclass
class Tally:
    """Number and bytes of messages sent by one rank, for one unit and purpose. Not thread-safe."""

    messages: int = 0
    nbytes: int = 0
    across: int = 0
    """The part of `nbytes` that was sent to other nodes. Counted only in two-level reductions over collectives."""

    calls: int = 0
    """Number of collective operations."""

    def count(self, tensor: Tensor) -> None:
        """Count one message."""
        self.messages += 1
        self.nbytes += tensor.nbytes


NO_UNIT = "(no unit)"
"""Key for traffic of the whole model, such as gradient flags, norms and broadcast values."""


@dataclass(frozen=True)
class Sent:
    """Traffic for one purpose."""

    calls: int
    """Number of collective operations."""

    messages: int
    nbytes: int

    seconds: float
    """Duration of gathers and reductions, from start to end on this rank. For other purposes, `seconds` is 0. On a GPU,
    durations are measured only after the first call of `traffic()`.
    """

    exposed: float
    """The part of `seconds` that computation spent waiting, because the operations were not overlapped."""

    across: int = 0
    """The part of `nbytes` that was sent to other nodes, in reductions by `algorithm="hierarchical"` over collectives.
    The field is 0 for all other operations, because these do not know which ranks share a node.
    """


@dataclass
class _Entry:
    ran: Clock
    waited: Clock
    tally: Tally = field(default_factory=Tally)


_UNTIMED = nullcontext()


class Traffic:
    """Traffic counts of one wrapped model on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_timed = device.type != "cuda"
        self._entries: dict[str, dict[str, _Entry]] = {}

    def tally(self, purpose: str, unit: str = NO_UNIT) -> Tally:
        """Count one call, and return the tally for its messages."""
        tally = self._entry(purpose, unit).tally
        tally.calls += 1
        return tally

    def running(self, purpose: str, unit: str) -> AbstractContextManager[object]:
        """Return a context manager that times an operation and names it in profiles."""
        return labelled(self._entry(purpose, unit).ran if self._is_timed else _UNTIMED, purpose, unit)

    def waiting(self, purpose: str, unit: str) -> AbstractContextManager[object]:
        """Return a context manager that times a wait of the computation and names it in profiles."""
        clock = self._entry(purpose, unit).waited if self._is_timed else _UNTIMED
        return labelled(clock, f"wait for {purpose}", unit)

    def by_unit(self) -> Mapping[str, Mapping[str, Sent]]:
        """Return all counts so far. On a GPU the host waits for open intervals. The first call starts timing."""
        self._is_timed = True
        return {
            unit: {purpose: _sent(each) for purpose, each in list(mine.items()) if each.tally.calls}
            for unit, mine in list(self._entries.items())
        }

    def _entry(self, purpose: str, unit: str) -> _Entry:
        mine = self._entries.setdefault(unit, {})
        if purpose not in mine:
            mine[purpose] = _Entry(Clock(self._device), Clock(self._device))
        return mine[purpose]


def _sent(entry: _Entry) -> Sent:
    tally = entry.tally
    return Sent(
        tally.calls, tally.messages, tally.nbytes, entry.ran.seconds(), entry.waited.seconds(), across=tally.across
    )
