"""What this rank has sent, by unit and purpose."""

from collections.abc import Mapping

from shardlite.transport import Tally


class Traffic:
    """Counts of what the units of one wrapped model have sent."""

    def __init__(self) -> None:
        self._tallies: dict[str, dict[str, Tally]] = {}

    def of(self, unit: str, purpose: str) -> Tally:
        """Return the count of a unit's messages for `purpose`."""
        return self._tallies.setdefault(unit, {}).setdefault(purpose, Tally())

    def by_unit(self) -> Mapping[str, Mapping[str, Tally]]:
        """Return all counts."""
        return self._tallies
