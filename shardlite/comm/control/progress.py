"""Progress of ranks in a backward. Ranks that diverge publish their progress, so that they do not deadlock.

To bound memory, a backward waits for the reduction of an earlier unit (sharded submodule) before it fills one more
bucket (buffer of a unit's gradients). A rank that has taken a different branch may start this reduction later, and may
first need a gather that the waiting rank has not joined yet. So a rank publishes its progress when it leaves the order
of the units or has to wait for a gather. A rank that waits for a reduction reads the published progress:

    rank 0   has started reductions 3, 4 and 5, waits for 4 ............. reads that rank 1 needs rank 0: fills a bucket
    rank 1   skipped unit 4, has started 3, waits for gather 17, which rank 0 has not joined: publishes this

If all ranks follow the same order, nothing that they publish ends a wait, since a rank that is ahead has started more
reductions.

If ranks wait for each other, at least one rank detects the deadlock. Proof: let `j` be the earliest reduction that any
rank waits for. Some rank `a` has not started `j`. Rank `a` waits for no reduction up to `j`, so rank `a` waits for a
gather. Some rank `b` has not joined this gather. So `b` waits for reduction `j` or a later reduction. Rank `b` reads
that `a` has not started this reduction, and that `a` waits for the gather.
"""

import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, replace
from threading import Lock

import torch

from shardlite.comm.control.failure_reports import StoreReports

_ANY = -1
"""Key of the board's entry that holds the number of the latest backward in which a rank has published something."""


@dataclass
class _Standing:
    """The progress of a rank."""

    backward: int = 0
    reductions: int = 0
    """Number of reductions started in this backward."""

    buckets: int = 0
    """Number of buckets filled in this backward or, on a GPU, number of units that this backward has begun."""

    gathers: int = 0
    """Number of gathers and negotiation rounds that the rank has ever joined. All ranks join the same sequence."""

    out_of_turn: int = 0
    """1 if the rank has all gradients of a unit, but lacks gradients of a unit with an earlier reduction; else 0."""


class Progress:
    """Publishes the progress of this rank, and reads the progress of other ranks."""

    def __init__(
        self, board: StoreReports, rank: int, world_size: int, gathering: Collection[int], *, ahead: bool, limit: float
    ) -> None:
        """Create the progress of `rank`.

        Args:
            board: reports of the progress of all ranks.
            rank: this rank.
            world_size: number of ranks.
            gathering: the ranks that gather together with this rank.
            ahead: whether the host runs ahead of operations (CUDA streams).
            limit: maximum seconds of a wait. Another rank may wait for something outside this library, and a longer
                wait would reach the timeout and end the run.
        """
        self._board = board
        self._rank = rank
        self._others = [other for other in range(world_size) if other != rank]
        self._gathering = gathering
        self._ahead = ahead
        self._limit = limit
        self._mine = _Standing()
        self._publishes = False
        self._left = 0
        self.asked = 0
        """Number of requests for gathers."""

        self._served = 0
        self._lock = Lock()  # gathers are joined on other threads

    def begin_backward(self) -> None:
        """Start the next backward."""
        with self._lock:
            self._publishes = False
            self._mine = _Standing(self._mine.backward + 1, gathers=self._mine.gathers)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Count nothing in the block, which a CUDA graph captures. A rank may capture more often than others."""
        before = replace(self._mine), self.asked, self._served
        try:
            yield
        finally:
            self._mine, self.asked, self._served = before

    def publish(self) -> None:
        """Publish this rank's progress from now to the end of the backward. Has no effect outside a backward."""
        if torch._C._current_graph_task_id() != -1:
            self._publishes = True
            self._put()

    def publish_at_end(self) -> None:
        """Publish the progress at the end of a backward, before the host waits, if some reductions have not started."""
        if self._left:
            self._publishes = True
            self._put()

    def started(self, reductions: int, *, left: int, out_of_turn: bool) -> None:
        """Record how many reductions were started in this backward, and how many are left to start."""
        self._left = left
        news = out_of_turn and not self._mine.out_of_turn
        self._mine.reductions, self._mine.out_of_turn = reductions, int(out_of_turn)
        self._publish_news(news)

    def filled(self, *, beyond: bool) -> None:
        """Record a filled bucket. `beyond`: whether the bucket exceeds the limit with no reduction in flight."""
        self._mine.buckets += 1
        self._publish_news(beyond)

    def joins(self) -> None:
        """Record that this rank joins a gather."""
        with self._lock:
            self._mine.gathers += 1
        self._publish_news(news=False)

    def served(self) -> None:
        """Record that a request for gathers is complete."""
        with self._lock:
            self._served += 1

    def ends_wait(self, reduction: int, since: float) -> bool:
        """Return whether this rank must end its wait for `reduction`, which began at `since` (`time.monotonic()`)."""
        return self.is_awaited(reduction) or time.monotonic() - since > self._limit

    def is_awaited(self, reduction: int) -> bool:
        """Return whether a rank that has not started `reduction` of this backward may wait for this rank."""
        mine = self._mine
        with suppress(RuntimeError):  # the process that kept the store may have ended
            if not self._others or self._board.read(_ANY) != str(mine.backward):
                return False
            idle = self.asked == self._served
            for other in self._others:
                theirs = _Standing(*map(int, self._board.read(other).split()))
                if theirs.backward != mine.backward:
                    continue
                lacks = theirs.reductions <= reduction
                if lacks and (theirs.buckets > mine.buckets or theirs.out_of_turn):
                    return True
                # If the host runs ahead, operations that the other rank has started may be queued behind the gather.
                if idle and other in self._gathering and theirs.gathers > mine.gathers and (lacks or self._ahead):
                    return True
        return False

    def _publish_news(self, news: bool) -> None:
        if self._publishes:
            self._put()
        elif news:
            self.publish()

    def _put(self) -> None:
        with self._lock:
            if self._publishes:
                self._board.put(self._rank, " ".join(map(str, astuple(self._mine))))
                self._board.put(_ANY, str(self._mine.backward))
