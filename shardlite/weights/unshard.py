"""Unshard and reshard units (stage 3).

    unshard -> [gather] -> FULL, used -> reshard -> IDLE -> unshard again: nothing to do
                                                 -> evicted: the buffer serves another unit

Buffers are a cache. An idle unit keeps its buffer until another unit needs it, and a model of any depth runs through
`1 + prefetch` of them, besides the root's; more where more units are in use at once. On a GPU these are always the
same, and a unit gets the one that it had before, unless that costs another gather: its weights keep their addresses.
Each rank decides for itself what it needs to gather and what it keeps; `PassCoordinator` has all ranks gather the same
units in one order.

Legend: `W` ranks, `S` elements per shard; a full buffer has `W*S` elements per flat.
"""

import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter

from torch import Tensor

from shardlite.comm import SPARE, Context
from shardlite.config import poison_evicted_buffers
from shardlite.errors import EscapedViewWarning
from shardlite.params import Buffer, BufferPool, Unit, Weights
from shardlite.weights.all_gather import is_fresh, isolated
from shardlite.weights.coordination import PassCoordinator
from shardlite.weights.gather_order import UseOrder

_PURPOSE = "gather buffers"

_is_kept_unsharded = attrgetter("keep_unsharded")


class Gatherer:
    """Gathers the units of one wrapped model, and knows which buffer belongs to which unit."""

    def __init__(self, units: Sequence[Unit], context: Context, *, prefetch: int) -> None:
        self.order = UseOrder()
        self.owners: dict[int, Unit] = {}
        """The unit whose full weights a buffer holds, by the buffer's storage key."""

        self._coordinator = PassCoordinator(units, context)
        self._backwards = 0
        self._units = units
        self._trim = context.trim
        self._streams = context.streams
        self._trace = context.trace
        self._prefetch = prefetch
        self._ahead = prefetch  # in the pass in progress
        self._poison = poison_evicted_buffers()
        self._idle: dict[Unit, None] = {}  # least recently used first
        self._pools = _pools_of(units, context, prefetch)
        self._warned = False

    def unshard(self, unit: Unit, *, binds: bool = True) -> None:
        """Make the unit's full weights readable until `reshard`. Calls nest. Within a pass.

        Unless it `binds`, the module's parameters may stay placeholders, until code reads one (`bind`).

        Raises:
            CommError: a peer failed, is late, or does something else.
        """
        if unit.users == 0:
            with isolated(self._streams):
                if not is_fresh(unit):
                    self._take_buffer(unit)
                    self._coordinator.gather(unit)
                self._idle.pop(unit, None)
                self._coordinator.need(unit)
                self.order.need(unit.index)
                self._prefetch_next()
                self._land(unit)
                if binds:
                    unit.bind()
        elif binds:
            self.bind(unit)
        self.follow(unit)
        unit.users += 1

    def bind(self, unit: Unit) -> None:
        """Turn the module's parameters into views of full weights that are in use, if they are not."""
        if not unit.bound:
            with isolated(self._streams):
                unit.bind()

    def follow(self, unit: Unit) -> None:
        """Let the current stream use a unit, behind its gather: another stream may have waited for that."""
        if self._streams.on_gpu and (other := self._streams.other()) is not None and unit.gathered is not None:
            unit.gathered.wait()
            unit.others.add(other)

    def reshard(self, unit: Unit) -> None:
        """End one use. After the last one the unit is idle and may be evicted."""
        unit.users -= 1
        if unit.users == 0:
            self._trace.emit("reshard", unit.name)
            with isolated(self._streams):
                while unit.others:
                    self._streams.wait_for(unit.others.pop())
                self._let_idle(unit)
                self._keep_idle(unit)

    def begin_pass(self, kind: str) -> None:
        """Start a forward pass; those of one kind are expected to need the same units."""
        self._backwards = 0
        self._begin(kind)

    def begin_backward(self, *, final: bool) -> None:
        """Start the pass of a backward; a `final` one is followed by a step, after which all weights are stale.

        Several in a row (a graph that is retained) are of different kinds.
        """
        self._backwards += 1
        kind = f"backward {self._backwards}{' before a step' if final else ''}"
        self._begin(kind, backwards=True, final=final)

    def _begin(self, kind: str, *, backwards: bool = False, final: bool = False) -> None:
        if all(unit.users for unit in self._units):
            return  # inside `gathered()`: nothing is to be gathered, and ranks may run as many passes as they like
        self._ahead = self._prefetch
        self._coordinator.begin(kind, backwards=backwards)
        self.finish_prefetched()
        self.order.begin(kind, final=final)

    def end_pass(self) -> None:
        """End the pass in progress, if there is one: this rank needs no more weights in it."""
        self._coordinator.end()

    def inside_pass(self, kind: str) -> AbstractContextManager[None]:
        """Unshard in the pass in progress or, if there is none, in a new one."""
        return self._coordinator.inside(kind)

    def confirm_ends(self) -> None:
        """Note that operations on the current stream are from now on behind the end of every pass, on all ranks."""
        self._coordinator.confirm_ends()

    def in_step(self) -> bool:
        """Return whether all ranks have needed the same units since the last step."""
        return self._coordinator.in_step()

    def settle(self) -> None:
        """Wait until no other rank needs this rank's part of the weights of now."""
        self._coordinator.settle()

    def after_backward(self, *, final: bool) -> None:
        """Drop what is of no more use. After a final one no rank keeps anything, whatever each has needed in it."""
        self.order.end()
        if final:
            self._coordinator.strayed = False
            for unit in list(self._idle):
                self._evict(unit)

    def forget(self, units: Sequence[Unit]) -> None:
        """Gather each unit again at its next use, because its full weights may have been written to."""
        for unit in units:
            unit.needs_regather = True

    def expire(self) -> None:
        """No-op. Outdated weights are detected by version at the next unshard."""

    def spare(self) -> Iterator[Tensor]:
        """Yield memory that is kept for later gathers."""
        for pool in set(self._pools.values()):
            yield from pool.spare()

    def stop_prefetching(self) -> None:
        """Gather nothing ahead in the rest of the pass in progress, and keep one idle unit at most."""
        self._ahead = 0
        while self._held() > 1 and (idle := [unit for unit in self._idle if not unit.keep_unsharded]):
            self._evict(idle[0])
        self._trim(keep=0)

    def finish_prefetched(self) -> None:
        """Finish what was gathered ahead and never needed, so that it counts as idle."""
        for unit in self._units:
            if unit.phase is Weights.GATHERING:
                with isolated():
                    self._land(unit)
                    self._let_idle(unit)
                    self._keep_idle(unit)

    def _prefetch_next(self) -> None:
        """Start the gathers that the recorded order expects next, as far as buffers allow without pushing out users."""
        upcoming = [self._units[index] for index in self.order.upcoming(self._ahead)]
        for unit in upcoming:  # those that are there already are to be evicted last
            if unit in self._idle:
                del self._idle[unit]
                self._idle[unit] = None
        for unit in upcoming:
            if is_fresh(unit):
                continue
            if not self._coordinator.comes_next(unit):
                break  # the other ranks gather something else first, or nothing yet
            room = unit.buffer is not None or self._held() <= self._ahead or self._victim(unit) not in [None, *upcoming]
            if unit.users == 0 and room:
                self._take_buffer(unit)
                self._coordinator.gather(unit)

    def _take_buffer(self, unit: Unit) -> None:
        """Give a unit that has to be gathered a buffer."""
        if unit.phase is Weights.GATHERING:  # gathered ahead, then the weights were changed
            self._land(unit)
            self._let_idle(unit)
        buffer = self._buffer_for(unit)
        self.owners[buffer.key] = unit
        unit.buffer, unit.overwritten = buffer, set(unit.stepped)

    def _land(self, unit: Unit) -> None:
        """Wait for the weights."""
        self._coordinator.wait(unit)
        unit.move(Weights.FULL)

    def _let_idle(self, unit: Unit) -> None:
        """Turn the parameters into placeholders; keep the buffer."""
        assert unit.buffer is not None
        was_bound = unit.bound
        if was_bound:
            unit.unbind()
        if unit.buffer.escaped():
            unit.escapes.append(weakref.ref(unit.buffer.bytes.untyped_storage()))
        if was_bound:
            self._outdate(unit)
        unit.move(Weights.IDLE)

    def _keep_idle(self, unit: Unit) -> None:
        """Keep an idle unit's weights for the next use, if there is room, and a next use before they change."""
        assert unit.buffer is not None
        if self._pools[unit].is_surplus(unit.buffer):
            self._evict(unit)
            return
        self._idle[unit] = None
        self._drop_if_done(unit)
        if self._held() > 1 + self._ahead and (victim := self._victim(unit)):
            self._evict(victim)

    def _drop_if_done(self, unit: Unit) -> None:
        """Free an idle unit's buffer early if this backward is expected to have no more use for it."""
        if self.order.is_last_use(unit.index) and (unit.keep_unsharded or not self._buffers_are_awaited()):
            self._evict(unit)
            self._trim(keep=SPARE)  # gradients grow from here to the end of the backward, where a step peaks

    def _buffers_are_awaited(self) -> bool:
        """Whether the pass will need units that have no buffer yet, and so can use an idle one's."""
        return any(self._units[index].buffer is None for index in self.order.rest())

    def _held(self) -> int:
        return len(self.owners) - list(map(_is_kept_unsharded, self.owners.values())).count(True)

    def _victim(self, unit: Unit) -> Unit | None:
        """Choose the idle unit to evict: one whose buffer can be used as it is, if possible.

        Best is the buffer that `unit` had last, unless it holds what will be used next.
        """
        candidates = [idle for idle in self._idle if not idle.keep_unsharded]
        if len(candidates) < 2:
            return candidates[0] if candidates else None
        pool = self._pools[unit]
        alike = [idle for idle in candidates if idle.buffer is not None and pool.fits(idle.buffer, unit.nbytes)]
        if (last := pool.last(unit)) is not None:
            soon = self.order.upcoming(self._ahead)
            alike.sort(key=lambda idle: idle.buffer is not last or idle is unit or idle.index in soon)
        return next(iter(alike or candidates), None)

    def _buffer_for(self, unit: Unit) -> Buffer:
        """Find memory: the unit's own stale buffer, an idle unit's, or, while all are in use, new memory."""
        victim = unit if unit.buffer is not None else None
        if victim is None and not unit.keep_unsharded and self._held() >= 1 + self._ahead:
            victim = self._victim(unit)
        buffer = self._evict(victim) if victim else None
        if buffer is None or not self._pools[unit].fits(buffer, unit.nbytes):
            del buffer  # before, not after, there is another one
            buffer = self._pools[unit].take(unit, unit.nbytes)
        return buffer

    def _evict(self, unit: Unit) -> Buffer | None:
        """Take an idle unit's buffer away. Return it if no other tensor views it, and no pool keeps it."""
        assert unit.buffer is not None
        buffer, unit.buffer = unit.buffer, None
        self._idle.pop(unit, None)
        unit.move(Weights.SHARDED)
        self._trace.emit("evict", unit.name)
        del self.owners[buffer.key]
        if buffer.escaped():
            self._warn(unit)
            return None
        if self._poison:
            buffer.poison()
        if not self._pools[unit].give_back(buffer):
            return buffer
        unit.escapes = [each for each in unit.escapes if each() is not buffer.bytes.untyped_storage()]
        return None

    @staticmethod
    def _outdate(unit: Unit) -> None:
        """Increment versions, so that autograd's in-place check refuses parameters that were saved around our hooks.

        Not while a view of them lives: autograd would take the view for modified, and derive its gradient anew from the
        strides of the placeholder, in silence. The view itself is right, for it has kept its buffer.
        """
        unit.escapes = [each for each in unit.escapes if each() is not None]
        if not unit.escapes:
            unit.outdate()

    def _warn(self, unit: Unit) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"unit {unit.name!r}: a view of its gathered weights outlived their use, so the buffer was given up "
                "instead of reused. Something keeps a weight, or a view of one, outside autograd's saved tensors "
                "(`ctx.save_for_backward` is fine, an attribute is not). Results are right as long as that view is "
                "only read; it costs memory, and it does not follow later steps. Reported once.",
                EscapedViewWarning,
                stacklevel=2,
            )


def _pools_of(units: Sequence[Unit], context: Context, prefetch: int) -> dict[Unit, BufferPool]:
    """Return where each unit has its buffer from.

    The root has a pool of its own. None keeps buffers for other units that stay gathered until their backward, nor for
    a model of one unit: these would be the full weights of the model.
    """
    shared = BufferPool(context, _PURPOSE, most=1 + prefetch, carrier=context.transport)
    root = BufferPool(context, _PURPOSE, most=1, carrier=context.transport)
    none = BufferPool(context, _PURPOSE, most=0)
    return {unit: root if unit.is_root else none if unit.keep_unsharded else shared for unit in units}
