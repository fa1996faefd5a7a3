"""What this rank has sent, by unit and purpose: every message of a wrapped model, counted where it is sent."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardlite.transport import Counted, Tally, Transport

NO_UNIT = "(no unit)"
"""For what concerns the whole model: the census at the end of a backward, norms, values that are spread."""


@dataclass(frozen=True)
class Sent:
    """What was sent for one purpose."""

    calls: int
    """Collective operations."""

    messages: int
    nbytes: int


@dataclass
class _Entry:
    calls: int = 0
    tally: Tally = field(default_factory=Tally)


class Traffic:
    """Counts for one wrapped model."""

    def __init__(self) -> None:
        self._entries: dict[str, dict[str, _Entry]] = {}

    def counted(self, transport: Transport, purpose: str, unit: str = NO_UNIT) -> Transport:
        """Count one call, and return `transport` with its messages counted as well."""
        entry = self._entries.setdefault(unit, {}).setdefault(purpose, _Entry())
        entry.calls += 1
        return Counted(transport, entry.tally)

    def by_unit(self) -> Mapping[str, Mapping[str, Sent]]:
        """Return all counts so far."""
        return {
            unit: {purpose: Sent(each.calls, each.tally.messages, each.tally.nbytes) for purpose, each in mine.items()}
            for unit, mine in self._entries.items()
        }
