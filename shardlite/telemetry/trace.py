"""What happened in which order, in the words of the documentation: for tests and for curious readers."""

from collections import deque


class Trace:
    """The latest events of one wrapped model, oldest first.

    The words are: `gather` (an all-gather starts), `wait` (the computation needs it), `release` (nobody uses the
    weights any more), `evict` (its buffer is taken away), `reduce` (a reduce-scatter starts), `step`.
    """

    def __init__(self, keep: int = 4096) -> None:
        self._events: deque[str] = deque(maxlen=keep)

    def emit(self, event: str, unit: str = "") -> None:
        """Note that `event` happened to `unit`."""
        self._events.append(f"{event} {unit}".rstrip())

    def take(self) -> list[str]:
        """Return the events since the last call, and forget them."""
        events = list(self._events)
        self._events.clear()
        return events
