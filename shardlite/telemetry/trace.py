"""Ordered events of one wrapped model, for tests and debugging."""

from collections import deque


class Trace:
    """The latest events of one wrapped model, oldest first.

    The events are: `gather` (an all-gather starts), `wait` (the computation waits for a gather), `reshard` (the last
    use of a unit's weights ends), `evict` (a unit's buffer is given to another unit), `reduce` (a reduce-scatter
    starts), `step` (an optimizer steps).
    """

    def __init__(self, keep: int = 4096) -> None:
        self.events: deque[tuple[str, str]] = deque(maxlen=keep)
        """Events with the names of their units."""

        self.emit = self.events.append
        """Append an event: a pair of its name and the name of its unit, or "". This is no Python call."""

    def take(self) -> list[str]:
        """Return the events since the previous call, and clear them."""
        events = [f"{event} {unit}".rstrip() for event, unit in self.events]
        self.events.clear()
        return events
