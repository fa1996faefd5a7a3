"""Traffic by unit and purpose: bytes sent by this rank, time spent, and time that computation waited for it.

Every operation of a model carries a tally, to which `executor.py` adds each message where it is sent. On a GPU an
interval takes two events, so time counts there from the first question for it.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardlite.telemetry import Clock, labelled


@dataclass
class Tally:
    """Number and bytes of messages sent by one rank. Add from one thread at a time."""

    messages: int = 0
    nbytes: int = 0
    across: int = 0
    """Bytes of these to other nodes, in reductions of two levels over collectives."""

    def count(self, tensor: Tensor) -> None:
        """Count one message."""
        self.messages += 1
        self.nbytes += tensor.nbytes


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
    """Duration of gathers and reductions, from start to end on this rank; 0 for other purposes. On a GPU since the
    first call of `traffic()`.
    """

    exposed: float
    """Seconds that computation waited for them, so that were not overlapped, counted like `seconds`."""

    across: int = 0
    """Bytes of `nbytes` to other nodes, in reductions by `algorithm="hierarchical"` over collectives. 0 for all others,
    which do not know nodes.
    """


@dataclass
class _Entry:
    ran: Clock
    waited: Clock
    calls: int = 0
    tally: Tally = field(default_factory=Tally)


_UNTIMED = nullcontext()


class Traffic:
    """Counts of one wrapped model on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_timed = device.type != "cuda"
        self._entries: dict[str, dict[str, _Entry]] = {}

    def tally(self, purpose: str, unit: str = NO_UNIT) -> Tally:
        """Count one call. Return the tally for its messages."""
        entry = self._entry(purpose, unit)
        entry.calls += 1
        return entry.tally

    def running(self, purpose: str, unit: str) -> AbstractContextManager[object]:
        """Time a block, in which an operation runs, and name it in profiles."""
        return labelled(self._entry(purpose, unit).ran if self._is_timed else _UNTIMED, purpose, unit)

    def waiting(self, purpose: str, unit: str) -> AbstractContextManager[object]:
        """Time a block, in which computation waits for operations, and name it in profiles."""
        clock = self._entry(purpose, unit).waited if self._is_timed else _UNTIMED
        return labelled(clock, f"wait for {purpose}", unit)

    def by_unit(self) -> Mapping[str, Mapping[str, Sent]]:
        """Return all counts so far. On a GPU the host waits for open intervals, and blocks are timed from now on."""
        self._is_timed = True
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
    tally = entry.tally
    return Sent(
        entry.calls, tally.messages, tally.nbytes, entry.ran.seconds(), entry.waited.seconds(), across=tally.across
    )
