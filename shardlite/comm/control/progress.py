"""How far ranks are in a backward, which they tell each other where they diverge, so that none waits for good.

A backward waits for a reduction of an earlier unit before it fills one more bucket: that bounds the memory. A rank that
has taken another branch starts that reduction only later, maybe at its end, and to get there it may need the next
gather of the rank that waits. So a rank tells how far it is as soon as it leaves the order or has to wait for a gather,
and a rank that waits for a reduction looks at what others tell:

    rank 0   has started reductions 3, 4 and 5, waits for 4 ............. sees that rank 1 needs it: fills one more
    rank 1   skipped unit 4, has started reduction 3, waits for gather 17, which rank 0 has not joined: tells so

Ranks that follow one order tell nothing, or nothing that ends a wait: who is further has started more reductions. And
where ranks would wait for each other one of them sees it. Take, of all ranks that wait for a reduction, those with the
earliest one, `j`. A rank has not started `j`, and waits for a gather: it waits for no reduction before `j`, nor for `j`
itself. A rank that has not joined this gather waits for a reduction, `j` or a later one, and sees both.
"""

import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import astuple, dataclass
from threading import Lock

import torch

from shardlite.comm.control.failure_reports import ReportBoard

_ANY = -1
"""Where ranks leave the number of the backward that any of them has told something in."""


@dataclass
class _Standing:
    """How far a rank is."""

    backward: int = 0
    reductions: int = 0
    """Started in this backward."""

    buckets: int = 0
    """Filled in this backward."""

    gathers: int = 0
    """Messages' rounds of gathers that it has ever joined: all ranks join the same ones, in one order."""

    out_of_turn: int = 0
    """1 if it has all gradients of a unit, but not those of one whose reduction comes before."""


class Progress:
    """What this rank tells, and what it sees of others."""

    def __init__(
        self, board: ReportBoard, rank: int, world_size: int, gathering: Collection[int], *, ahead: bool, limit: float
    ) -> None:
        """`gathering` are the ranks that gather together with this one.

        `ahead`: the host runs ahead of operations (CUDA streams). `limit`, in seconds, ends a wait in any case: what
        another rank waits for may be none of our operations, and soon the timeout would end the run.
        """
        self._board = board
        self._rank = rank
        self._others = [other for other in range(world_size) if other != rank]
        self._gathering = gathering
        self._ahead = ahead
        self._limit = limit
        self._mine = _Standing()
        self._tells = False
        self._left = 0
        self._asked = self._served = 0
        self._lock = Lock()  # gathers are joined on a thread of their own

    def begin(self, backward: int) -> None:
        """Be at the start of a backward, told by its number from others."""
        with self._lock:
            self._tells = False
            self._mine.backward, self._mine.reductions, self._mine.buckets, self._mine.out_of_turn = backward, 0, 0, 0

    def publish(self) -> None:
        """Let others see how far this rank is, from now to the end of the backward. Elsewhere nobody asks."""
        if torch._C._current_graph_task_id() != -1:
            self._tells = True
            self._put()

    def tell_of_the_end(self) -> None:
        """Do so at the end of a backward whose reductions have not all been started: the host may wait there first."""
        if self._left:
            self._tells = True
            self._put()

    def started(self, reductions: int, *, left: int, out_of_turn: bool) -> None:
        """Note how many reductions were started in this backward, and how many are left."""
        self._left = left
        news = out_of_turn and not self._mine.out_of_turn
        self._mine.reductions, self._mine.out_of_turn = reductions, int(out_of_turn)
        self._tell_more(news)

    def filled(self, *, beyond: bool) -> None:
        """Note a bucket that is filled: `beyond` the limit, with no reduction under way that could be waited for."""
        self._mine.buckets += 1
        self._tell_more(beyond)

    def asks(self) -> None:
        """Note that gathers were asked for, which are served in order."""
        self._asked += 1

    def joins(self) -> None:
        """Note a gather that this rank joins now."""
        self._mine.gathers += 1
        self._tell_more(news=False)

    def served(self) -> None:
        """Note that what was asked for next is over."""
        self._served += 1

    def ends_wait(self, reduction: int, since: float) -> bool:
        """Whether this rank, which waits for a reduction `since` a time of `time.monotonic()`, has to go on."""
        return self.is_awaited(reduction) or time.monotonic() - since > self._limit

    def is_awaited(self, reduction: int) -> bool:
        """Whether a rank that has not started this reduction, by its number in the backward, may wait for this rank."""
        mine = self._mine
        with suppress(RuntimeError):  # the store may be gone with the process that kept it
            if not self._others or self._board.read(_ANY) != str(mine.backward):
                return False
            idle = self._asked == self._served
            for other in self._others:
                told = self._board.read(other)
                theirs = _Standing(*map(int, told.split())) if told else None
                if theirs is None or theirs.backward != mine.backward:
                    continue
                lacks = theirs.reductions <= reduction
                if lacks and (theirs.buckets > mine.buckets or theirs.out_of_turn):
                    return True
                # Where the host runs ahead, what a rank has started may be behind the gather.
                if idle and other in self._gathering and theirs.gathers > mine.gathers and (lacks or self._ahead):
                    return True
        return False

    def _tell_more(self, news: bool) -> None:
        if self._tells:
            self._put()
        elif news:
            self.publish()

    def _put(self) -> None:
        with self._lock, suppress(RuntimeError):
            if self._tells:
                self._board.put(self._rank, " ".join(map(str, astuple(self._mine))))
                self._board.put(_ANY, str(self._mine.backward))
