"""Events of one wrapped model in order, in the words of the documentation, for tests and for debugging."""

from collections import deque


class Trace:
    """The latest events of one wrapped model, oldest first.

    The events are: `gather` (an all-gather starts), `wait` (the computation waits for it), `reshard` (the weights have
    no users any more), `evict` (its buffer is given to another unit), `reduce` (a reduce-scatter starts), `step`.
    """

    def __init__(self, keep: int = 4096) -> None:
        self._events: deque[tuple[str, str]] = deque(maxlen=keep)

    def emit(self, event: str, unit: str = "") -> None:
        """Append `event` of `unit`."""
        self._events.append((event, unit))

    def take(self) -> list[str]:
        """Return and clear the events since the last call."""
        events = [f"{event} {unit}".rstrip() for event, unit in self._events]
        self._events.clear()
        return events
