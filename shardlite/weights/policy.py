"""Policy of the buffers for full weights: which units are gathered ahead, and whose buffer serves the next gather.

    acquire -> [gather, compute] -> idle -> evict -> acquire again: by the unit that had the buffer last, if possible

A model of any depth needs `1 + prefetch` buffers and one for the root, and more while more units are in use at once.

On a GPU a pool keeps these buffers for the life of the model. A unit then finds its weights at the same addresses in
every step, which a CUDA graph needs, and a steady step allocates no buffer. On a CPU no buffer is kept, because the
transport reuses the pages.

Units are numbers here. `unshard.py` follows the policy with memory, `build/timeline.py` with buffers on the meta
device, to predict what a model will need.
"""

import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

from shardlite.params import Buffer
from shardlite.weights.gather_order import GatherOrder

_nbytes_of = attrgetter("nbytes")


class BufferPool:
    """Buffers of which up to `most` are kept. Further ones are freed when they are given back.

    A pool orders no streams: who gives a buffer back has put the home stream behind all streams that use it, and who
    takes one writes to it behind the home stream.
    """

    def __init__(self, make: Callable[[int, bool], Buffer], most: int) -> None:
        """`make(nbytes, kept)` allocates a buffer."""
        self._make = make
        self._most = most
        self._free: list[Buffer] = []
        self._kept: weakref.WeakSet[Buffer] = weakref.WeakSet()  # the free ones, and those in use that will be
        self._last: dict[Hashable, weakref.ref[Buffer]] = {}

    def acquire(self, owner: Hashable, nbytes: int) -> Buffer:
        """Return a buffer of at least `nbytes`.

        It is the one that `owner` had last, else the smallest free one that is large enough, else a new one, for which
        the smallest free one is given up if no more may be kept.
        """
        buffer = self._find(owner, nbytes) or self._allocate(nbytes)
        if buffer.kept:
            self._last[owner] = weakref.ref(buffer)
        return buffer

    def give_back(self, buffer: Buffer) -> None:
        """Make a buffer that is kept free for the next `acquire`."""
        if buffer.kept:
            self._free.append(buffer)

    def last(self, owner: Hashable) -> Buffer | None:
        """Return the kept buffer that `owner` had last."""
        last = self._last.get(owner)
        return None if last is None else last()

    def fits(self, buffer: Buffer, nbytes: int) -> bool:
        """Return whether a buffer can serve for `nbytes`. One that is not kept must have exactly that size."""
        return buffer.nbytes >= nbytes if buffer.kept else buffer.nbytes == nbytes

    def is_surplus(self, buffer: Buffer) -> bool:
        """Return whether a buffer is one more than those that are kept."""
        return self._most > 0 and not buffer.kept

    def spare(self) -> Sequence[Buffer]:
        """Return the free buffers."""
        return self._free

    def _find(self, owner: Hashable, nbytes: int) -> Buffer | None:
        fitting = [buffer for buffer in self._free if buffer.nbytes >= nbytes]
        if not fitting:
            return None
        last = self.last(owner)
        found = last if last in fitting else min(fitting, key=_nbytes_of)
        self._free.remove(found)
        return found

    def _allocate(self, nbytes: int) -> Buffer:
        if self._free and len(self._kept) >= self._most:
            self._free.remove(min(self._free, key=_nbytes_of))  # before, not after, there is another one
        keeps = len(self._kept) < self._most
        buffer = self._make(nbytes, keeps)
        if keeps:
            self._kept.add(buffer)
        return buffer


class UnitSize(NamedTuple):
    """A unit, as the policy sees it."""

    nbytes: int
    """Bytes of a buffer for its full weights."""

    is_root: bool
    keep_unsharded: bool


class BufferPolicy:
    """Decides which units are gathered ahead and which are evicted, by the order in which units are used."""

    def __init__(
        self,
        units: Sequence[UnitSize],
        order: GatherOrder,
        make: Callable[[int, bool], Buffer],
        *,
        prefetch: int,
        keeps: bool,
    ) -> None:
        """`keeps` says whether buffers are kept from step to step."""
        self.buffers: dict[int, Buffer] = {}
        """The buffer of each unit that has one."""

        self.idle: dict[int, None] = {}
        """Units whose buffers may be evicted, least recently used first."""

        self._units = units
        self._limited = [not unit.keep_unsharded for unit in units]  # whether its buffer counts against `prefetch`
        self._order = order
        self._prefetch = prefetch
        self._ahead = prefetch  # in the pass in progress
        # The root has a pool of its own. No buffers are kept for other units that stay gathered until their backward,
        # nor for a model of one unit: they would be the full weights of the model.
        shared, root = BufferPool(make, keeps * (1 + prefetch)), BufferPool(make, int(keeps))
        none = BufferPool(make, 0)
        self._pools = [root if unit.is_root else none if unit.keep_unsharded else shared for unit in units]

    def begin_pass(self) -> None:
        """Allow prefetching again."""
        self._ahead = self._prefetch

    def stop_prefetching(self) -> Iterator[int]:
        """Gather nothing ahead in the rest of this pass. Yield the units to evict, so that one idle unit is left."""
        self._ahead = 0
        while self._held() > 1 and (idle := self._evictable()):
            yield idle[0]

    def acquire(self, unit: int, freed: Buffer | None = None) -> Buffer:
        """Give a unit a buffer: the one that was `freed` for it, if it fits, else one of its pool."""
        pool, nbytes = self._pools[unit], self._units[unit].nbytes
        if freed is None or not pool.fits(freed, nbytes):
            del freed  # before, not after, there is another one
            freed = pool.acquire(unit, nbytes)
        self.buffers[unit] = freed
        return freed

    def begin_use(self, unit: int) -> None:
        """Record that a unit is used from now on."""
        self.idle.pop(unit, None)
        self._order.use(unit)

    def end_use(self, unit: int, *, is_done: bool) -> Iterator[int]:
        """Record that a unit is idle. Yield the units to evict, this one too if it `is_done` in this backward."""
        self.idle[unit] = None
        if self._pools[unit].is_surplus(self.buffers[unit]):
            yield unit
            return
        if is_done:
            yield unit
        if self._held() > 1 + self._ahead and (victim := self._victim(unit)) is not None:
            yield victim

    def is_done(self, unit: int) -> bool:
        """Return whether this backward will use neither a unit nor its buffer again."""
        if not self._order.is_last_use(unit):
            return False
        # An idle buffer serves units that the pass will need and that have none yet.
        return self._units[unit].keep_unsharded or all(each in self.buffers for each in self._order.expected())

    def victim_for(self, unit: int) -> int | None:
        """Return the unit to evict before `unit` takes a buffer: itself if it has a stale one, or an idle unit."""
        if unit in self.buffers:
            return unit
        if self._units[unit].keep_unsharded or self._held() <= self._ahead:
            return None
        return self._victim(unit)

    def next_gathers(self, is_ready: Callable[[int], bool], may_start: Callable[[int], bool]) -> Iterator[int]:
        """Yield the units to gather ahead now: those that are expected next, while buffers last without evicting them.

        Args:
            is_ready: whether a unit has full weights, or is being gathered.
            may_start: whether all ranks gather a unit next. The first one for which this is false ends the search.
        """
        upcoming = self._order.upcoming(self._ahead)
        for unit in upcoming:  # those that are there already are evicted last
            if unit in self.idle:
                del self.idle[unit]
                self.idle[unit] = None
        for unit in upcoming:
            if is_ready(unit):
                continue
            if not may_start(unit):
                return
            if unit in self.buffers or self._held() <= self._ahead or self._victim(unit) not in [None, *upcoming]:
                yield unit

    def evict(self, unit: int) -> Buffer:
        """Take a unit's buffer away and return it."""
        self.idle.pop(unit, None)
        return self.buffers.pop(unit)

    def give_back(self, unit: int, buffer: Buffer) -> None:
        """Return a buffer of a unit to its pool, which may keep it."""
        self._pools[unit].give_back(buffer)

    def spare(self) -> Iterator[Buffer]:
        """Yield the buffers that are kept and free."""
        for pool in set(self._pools):
            yield from pool.spare()

    def _held(self) -> int:
        return sum(map(self._limited.__getitem__, self.buffers))

    def _evictable(self) -> list[int]:
        return list(filter(self._limited.__getitem__, self.idle))

    def _victim(self, unit: int) -> int | None:
        """Return the idle unit to evict: one whose buffer fits, if possible.

        The buffer that `unit` had last is preferred, unless it holds what is used next.
        """
        candidates = self._evictable()
        if len(candidates) < 2:
            return candidates[0] if candidates else None
        pool, nbytes = self._pools[unit], self._units[unit].nbytes
        fitting = [idle for idle in candidates if pool.fits(self.buffers[idle], nbytes)]
        if (last := pool.last(unit)) is not None:
            soon = self._order.upcoming(self._ahead)
            fitting.sort(key=lambda idle: self.buffers[idle] is not last or idle == unit or idle in soon)
        return (fitting or candidates)[0]
