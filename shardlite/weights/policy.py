"""Policy of the buffers for full weights: which units are gathered ahead, and which buffer the next gather fills.

    acquire -> [gather, compute] -> idle -> evict -> acquire again, if possible by the unit that used the buffer before

A model of any depth needs `1 + prefetch` buffers, and one more buffer for the root unit. It needs more buffers only
while more units are in use at the same time.

On a GPU a pool keeps these buffers for the life of the model. A unit then has its weights at the same addresses in
every step, which a CUDA graph requires, and a steady step allocates no buffer. On a CPU no buffer is kept, because the
transport reuses the pages.

Units are numbers in this file. `unshard.py` applies the policy to real memory, and `plan/timeline.py` to buffers on
the meta device, to predict the memory of a model.
"""

import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple

from shardlite.params import Buffer
from shardlite.weights.gather_order import GatherOrder

NO_ROOM = -1
"""A unit must not be gathered ahead, because all buffers are in use or will soon be."""


class BufferPool:
    """A pool that keeps up to `most` buffers. Buffers beyond this number are freed when they are returned.

    A pool synchronizes no streams. Before a buffer is returned, the home stream must wait for all streams that use the
    buffer. After a buffer is acquired, writes to it must be stream-ordered after the home stream.
    """

    def __init__(self, make: Callable[[int, bool], Buffer], most: int) -> None:
        """Create an empty pool that keeps up to `most` buffers. `make(nbytes, kept)` allocates a buffer."""
        self._make = make
        self._most = most
        self._free: list[Buffer] = []
        self._kept: weakref.WeakSet[Buffer] = weakref.WeakSet()  # kept buffers: free ones, and those in use
        self._last: dict[Hashable, weakref.ref[Buffer]] = {}

    def acquire(self, owner: Hashable, nbytes: int) -> Buffer:
        """Return a buffer of at least `nbytes`.

        The choice is the buffer that `owner` used last, else the smallest free buffer that is large enough, else a new
        buffer. If the pool is full, a new buffer replaces the smallest free buffer.
        """
        buffer = self._find(owner, nbytes) or self._allocate(nbytes)
        if buffer.kept:
            self._last[owner] = weakref.ref(buffer)
        return buffer

    def give_back(self, buffer: Buffer) -> None:
        """Return a buffer to the pool. If the pool keeps the buffer, the next `acquire` may reuse it."""
        if buffer.kept:
            self._free.append(buffer)

    def last(self, owner: Hashable) -> Buffer | None:
        """Return the kept buffer that `owner` used last, or `None` if the buffer is gone."""
        last = self._last.get(owner)
        return None if last is None else last()

    def fits(self, buffer: Buffer, nbytes: int) -> bool:
        """Return whether a gather of `nbytes` can use a buffer. Sizes must be equal if the buffer is not kept."""
        return buffer.nbytes >= nbytes if buffer.kept else buffer.nbytes == nbytes

    def is_surplus(self, buffer: Buffer) -> bool:
        """Return whether a buffer is in addition to the buffers that the pool keeps."""
        return self._most > 0 and not buffer.kept

    def spare(self) -> Sequence[Buffer]:
        """Return the free buffers."""
        return self._free

    def _find(self, owner: Hashable, nbytes: int) -> Buffer | None:
        fitting = [buffer for buffer in self._free if buffer.nbytes >= nbytes]
        if not fitting:
            return None
        last = self.last(owner)
        found = last if last in fitting else min(fitting, key=lambda buffer: buffer.nbytes)
        self._free.remove(found)
        return found

    def _allocate(self, nbytes: int) -> Buffer:
        if self._free and len(self._kept) >= self._most:
            self._free.remove(
                min(self._free, key=lambda buffer: buffer.nbytes)
            )  # this frees the buffer before the new buffer is allocated
        keeps = len(self._kept) < self._most
        buffer = self._make(nbytes, keeps)
        if keeps:
            self._kept.add(buffer)
        return buffer


class UnitSize(NamedTuple):
    """Properties of a unit that the policy needs."""

    nbytes: int
    """Bytes of a buffer for its full weights."""

    is_root: bool
    keep_unsharded: bool


class BufferPolicy:
    """Decides which units are gathered ahead and which are evicted, from the order in which units are used."""

    def __init__(
        self,
        units: Sequence[UnitSize],
        order: GatherOrder,
        make: Callable[[int, bool], Buffer],
        *,
        prefetch: int,
        keeps: bool,
    ) -> None:
        """Create empty pools.

        Args:
            units: all units.
            order: the gather order, which records the path of this rank.
            make: function `make(nbytes, kept)` that allocates a buffer.
            prefetch: number of units to gather ahead.
            keeps: whether buffers are kept from step to step.
        """
        self.buffers: dict[int, Buffer] = {}
        """The buffer of each unit that has one."""

        self.idle: dict[int, None] = {}
        """Units whose buffers may be evicted, least recently used first."""

        self._units = units
        self._held = 0  # number of buffers that count against `prefetch`
        self._limited = [not unit.keep_unsharded for unit in units]  # whether buffers count against `prefetch`
        self._order = order
        self._prefetch = prefetch
        self._ahead = prefetch  # number of units to gather ahead in the current pass
        # The root has a separate pool. No buffers are kept for other units that stay gathered until their backward,
        # nor for a model of one unit: these buffers would hold the full weights of the whole model.
        shared, root = BufferPool(make, keeps * (1 + prefetch)), BufferPool(make, int(keeps))
        none = BufferPool(make, 0)
        self._pools = [root if unit.is_root else none if unit.keep_unsharded else shared for unit in units]

    def begin_pass(self) -> None:
        """Start a pass: allow prefetching again."""
        self._ahead = self._prefetch

    def stop_prefetching(self) -> Iterator[int]:
        """Stop prefetching for the rest of this pass. Yield the units to evict until one buffer remains."""
        self._ahead = 0
        while self._held > 1 and (idle := self._evictable()):
            yield idle[0]

    def acquire(self, unit: int, freed: Buffer | None = None) -> Buffer:
        """Return a buffer for a unit: the buffer `freed` if it fits, else a buffer of the unit's pool."""
        pool, nbytes = self._pools[unit], self._units[unit].nbytes
        if freed is None or (freed.nbytes != nbytes and not pool.fits(freed, nbytes)):
            del freed  # before another buffer is allocated
            freed = pool.acquire(unit, nbytes)
        self.buffers[unit] = freed
        self._held += self._limited[unit]
        return freed

    def begin_use(self, unit: int) -> list[int]:
        """Record that a use of a unit begins. Return the units to gather ahead: the next units in the path."""
        self.idle.pop(unit, None)
        upcoming = self._order.use(unit, self._ahead)
        for each in upcoming:  # idle units that are used soon are evicted last
            if each in self.idle:
                del self.idle[each]
                self.idle[each] = None
        return upcoming

    def upcoming(self) -> list[int]:
        """Return the units to gather ahead now."""
        return self._order.upcoming(self._ahead)

    def end_use(self, unit: int, *, is_done: bool) -> Iterator[int]:
        """Record that a unit is idle. Yield the units to evict, among them the unit itself if it `is_done`.

        A unit `is_done` if this backward will use neither the unit nor its buffer again.
        """
        self.idle[unit] = None
        if self._pools[unit].is_surplus(self.buffers[unit]):
            yield unit
            return
        if is_done:
            yield unit
        if self._held > 1 + self._ahead and (victim := self._victim(unit, self._evictable())) is not None:
            yield victim

    def is_done(self, unit: int) -> bool:
        """Return whether this backward will use neither a unit nor its buffer again."""
        left = self._order.left()
        if left is None or unit in left:
            return False
        # A unit that this backward still needs, and that has no buffer, may take an idle buffer.
        return self._units[unit].keep_unsharded or all(map(self.buffers.__contains__, left))

    def victim_for(self, unit: int, upcoming: Sequence[int] | None = None) -> int | None:
        """Return the unit to evict before `unit` takes a buffer, or `None`. If `unit` has a buffer, return `unit`.

        If `unit` is gathered ahead, as one of the `upcoming` units, return `NO_ROOM` if every buffer is in use or
        belongs to an upcoming unit.
        """
        if unit in self.buffers:
            return unit
        if self._held <= self._ahead:
            return None
        idle = list(filter(self._limited.__getitem__, self.idle))
        victim = idle[0] if len(idle) == 1 else self._victim(unit, idle)  # one, in most cases
        if upcoming is not None and (victim is None or victim in upcoming):
            return NO_ROOM
        return None if self._units[unit].keep_unsharded else victim

    def evict(self, unit: int) -> Buffer:
        """Remove a unit's buffer and return it."""
        self.idle.pop(unit, None)
        self._held -= self._limited[unit]
        return self.buffers.pop(unit)

    def give_back(self, unit: int, buffer: Buffer) -> None:
        """Return a unit's buffer to its pool, which may keep it."""
        self._pools[unit].give_back(buffer)

    def spare(self) -> Iterator[Buffer]:
        """Yield the free buffers of all pools."""
        for pool in set(self._pools):
            yield from pool.spare()

    def _evictable(self) -> list[int]:
        return list(filter(self._limited.__getitem__, self.idle))

    def _victim(self, unit: int, idle: Sequence[int]) -> int | None:
        """Return the unit in `idle` to evict for `unit`, if possible a unit whose buffer fits.

        Prefer the buffer that `unit` used last, unless this buffer belongs to another unit that is used soon.
        """
        if len(idle) < 2:
            return idle[0] if idle else None
        pool, nbytes = self._pools[unit], self._units[unit].nbytes
        fitting = [each for each in idle if pool.fits(self.buffers[each], nbytes)]
        if (last := pool.last(unit)) is not None:
            soon = self.upcoming()
            fitting.sort(key=lambda each: self.buffers[each] is not last or each == unit or each in soon)
        return (fitting or idle)[0]
