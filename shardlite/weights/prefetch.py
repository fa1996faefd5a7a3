"""The order in which units are needed: recorded in one pass, replayed in the next to gather ahead of the need."""


class Order:
    """One recorded sequence of units per kind of pass (a forward in training, a backward, an evaluation, ...).

    Nothing is predicted for the rest of a pass that leaves the recorded path. One such pass is forgotten, so that the
    next one is as it would have been without it; a second one in a row is the new path.
    """

    def __init__(self) -> None:
        self._recorded: dict[str | None, list[int]] = {}
        self._strayed: set[str] = set()  # the kinds whose last pass was another one than recorded
        self._kind: str | None = None
        self._now: list[int] = []
        self._on_path = False
        self._final = False

    def begin(self, kind: str, *, final: bool = False) -> None:
        """Start a pass; what the pass needs is what the next of its kind will be expected to need.

        `final` says that the weights are going to change after it: it is the backward before a step.
        """
        self.end()
        self._kind, self._final = kind, final
        self._on_path = kind in self._recorded

    def end(self) -> None:
        """Finish the pass in progress, if there is one."""
        if self._kind is not None and self._now:
            strays = self._now != self._recorded.get(self._kind, self._now)
            if strays and self._kind not in self._strayed:
                self._strayed.add(self._kind)
            else:
                self._recorded[self._kind] = self._now
                self._strayed.discard(self._kind)
        self._kind, self._now, self._on_path = None, [], False

    def need(self, unit: int) -> None:
        """Note that the pass needs `unit` now."""
        if self._kind is None:
            return
        place = len(self._now)
        self._now.append(unit)
        if self._on_path:
            recorded = self._recorded[self._kind]
            self._on_path = place < len(recorded) and recorded[place] == unit

    def upcoming(self, count: int) -> list[int]:
        """Return the next `count` units that the pass is expected to need: none where it has left the path."""
        if not self._on_path:
            return []
        place = len(self._now)
        return self._recorded[self._kind][place : place + count]

    def rest(self) -> list[int]:
        """Return all units that the pass is expected to need yet."""
        return self.upcoming(len(self._recorded.get(self._kind, ())))

    def is_last_use(self, unit: int) -> bool:
        """Whether weights of `unit` that are here now will not be used again before they change."""
        return self._final and self._on_path and unit not in self.rest()
