"""Unshard and reshard units (stage 3).

    unshard -> [gather] -> FULL, used -> reshard -> IDLE -> unshard again, without a gather
                                                 -> evicted, so that another unit may use the buffer

Buffers are a cache: an idle unit keeps its buffer until another unit needs it. `policy.py` decides which unit is
evicted and which units are gathered ahead. `negotiation.py` makes all ranks gather the same units in the same order.

Legend: `W` ranks, `S` elements per shard; a full buffer has `W*S` elements per flat.
"""

import warnings
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from shardlite.comm import SPARE, Context
from shardlite.config import poison_evicted_buffers
from shardlite.errors import EscapedViewWarning
from shardlite.params import Buffer, Unit, Weights
from shardlite.weights.all_gather import isolated
from shardlite.weights.negotiation import Passes
from shardlite.weights.policy import NO_ROOM, BufferPolicy, UnitSize
from shardlite.weights.replicated import ReplicatedWeights


class Gatherer:
    """Unshards and reshards the units of one wrapped model."""

    def __init__(self, units: Sequence[Unit], context: Context, *, prefetch: int) -> None:
        sharded = [unit for unit in units if not unit.replicated]  # the first units, so that indices stay the same
        self._units = sharded
        self.passes = Passes(sharded, context)
        self._replicated = ReplicatedWeights(units)
        self.owners: dict[int, Unit] = {}
        """The unit that each buffer belongs to, by the buffer's storage key."""

        self._policy = BufferPolicy(
            [UnitSize(unit.nbytes, unit.is_root, unit.keep_unsharded) for unit in sharded],
            self.passes.order,
            partial(_allocate, context),
            prefetch=prefetch,
            keeps=context.streams.on_gpu,
        )
        self._backwards = 0
        self._streams = context.streams
        self._single_rank = context.transport.world_size == 1
        self._trim = context.trim
        self._emit = context.trace.emit
        self._poison = poison_evicted_buffers()
        self.has_dropped = False
        """Whether a buffer was dropped, because the program has kept a view of it."""

    def unshard(self, unit: Unit, *, binds: bool = True) -> None:
        """Make a unit's full weights readable until `reshard`. Calls may nest, and must be made within a pass.

        If `binds` is false, the module's parameters may stay placeholders until a later call of `bind`.

        Raises:
            CommError: a peer failed, timed out or called a different operation.
        """
        if unit.users == 0:
            with isolated(self._streams):
                if not unit.is_fresh:
                    self._gather(unit, self._policy.victim_for(unit.index))
                self._prefetch(self._policy.begin_use(unit.index))
                if unit.phase is Weights.GATHERING:
                    self.passes.wait(unit)
                if binds:
                    unit.bind()
        elif binds:
            self.bind(unit)
        self.follow(unit)
        unit.use()

    def bind(self, unit: Unit) -> None:
        """Turn this unit's placeholders into views of the full weights. The unit must be in use."""
        if not unit.bound:
            with isolated(self._streams):
                unit.bind()

    def follow(self, unit: Unit) -> None:
        """Let the current stream use a unit. A stream other than the home stream first waits for the unit's gather."""
        if self._streams.on_gpu and (other := self._streams.other()) is not None:
            unit.share(other)

    def reshard(self, unit: Unit) -> None:
        """End one use of a unit. After the last use, the unit is idle and may be evicted."""
        if unit.end_use():
            self._emit(("reshard", unit.name))
            with isolated(self._streams):
                for stream in unit.take_streams():
                    self._streams.wait_for(stream)
                self._make_idle(unit)

    def begin_forward(self, kind: str) -> None:
        """Start a forward pass. Passes of one kind are expected to need the same units."""
        self._replicated.refresh()
        self._backwards = 0
        self._begin(kind)

    def begin_backward(self, *, final: bool) -> None:
        """Start the pass of a backward. If the backward is `final`, a step follows it and makes all weights stale.

        If backwards follow each other without a forward in between (`retain_graph=True`), each is a pass of another
        kind.
        """
        self._backwards += 1
        self._begin(f"backward {self._backwards}{' before a step' if final else ''}", backwards=True, final=final)

    def _begin(self, kind: str, *, backwards: bool = False, final: bool = False) -> None:
        if all(unit.users for unit in self._units):
            return  # inside `gathered()` nothing is gathered, so ranks may run different numbers of passes
        self._policy.begin_pass()
        self.passes.begin_pass(kind, backwards=backwards, final=final, repeats=True)
        self.finish_prefetched()

    def after_backward(self, *, final: bool) -> None:
        """End a backward. If it is `final`, drop all idle weights, because a step makes them stale on all ranks."""
        self.passes.order.end_path()
        if final:
            self.passes.diverged = False
            self._evict_idle()

    def forget(self, units: Sequence[Unit]) -> None:
        """Require a gather of each unit at its next use, because its full weights may have been written to."""
        for unit in units:
            unit.invalidate()
        self._replicated.refresh()

    def expire(self) -> None:
        """Update replicated weights after a change of shards. Other units compare versions at their next use."""
        self._replicated.refresh()

    def settle(self) -> None:
        """Wait until every rank has ended all passes, and take over writes to replicated weights.

        Raises:
            CommError: a pass did not end on all ranks.
        """
        self.passes.settle()
        self._replicated.refresh()

    def spare(self) -> Iterator[Tensor]:
        """Yield the memory that is kept for later gathers."""
        for buffer in self._policy.spare():
            yield buffer.bytes

    def stop_prefetching(self) -> None:
        """Stop prefetching for the rest of this pass, and keep at most one idle unit."""
        for index in self._policy.stop_prefetching():
            self._evict(self._units[index])
        self._trim(keep=0)

    def finish_prefetched(self) -> None:
        """Wait for prefetched gathers of units that no module has used, and mark these units as idle."""
        for unit in self._units:
            if unit.phase is Weights.GATHERING:
                with isolated():
                    self.passes.wait(unit)
                    self._make_idle(unit)

    def prepare_capture(self) -> None:
        """Drop all idle weights, so that a captured step gathers into memory of the pool or of the graph."""
        self.finish_prefetched()
        self._evict_idle()

    def abandon_capture(self) -> None:
        """Forget what a capture that has failed would have gathered."""
        self.passes.abandon_capture()
        for unit in self._units:
            unit.abandon_capture()

    def _prefetch(self, upcoming: Sequence[int]) -> None:
        """Start the gathers of `upcoming` units that all ranks gather next, as long as buffers are available."""
        self._is_refused = False
        for index in upcoming:
            unit = self._units[index]
            if unit.users or unit.is_fresh:
                continue
            if not self._single_rank and self.passes.order.next_gather() != index:
                return
            if (victim := self._policy.victim_for(index, upcoming)) != NO_ROOM:
                self._gather(unit, victim)

    def _gather(self, unit: Unit, victim: int | None) -> None:
        """Start the gather of a unit into a buffer, if possible the buffer of the unit `victim`, which is evicted."""
        if unit.phase is Weights.GATHERING:  # the weights have changed since the prefetch
            self.passes.wait(unit)
            unit.hide()
        # No variable holds the evicted buffer, which is freed before a buffer of another size is allocated.
        buffer = self._policy.acquire(unit.index, None if victim is None else self._evict(self._units[victim]))
        self.owners[buffer.key] = unit
        unit.take_buffer(buffer)
        self.passes.gather(unit)

    def _make_idle(self, unit: Unit) -> None:
        """Make a unit idle. Evict units if the policy allows no more buffers, or if weights will not be used again."""
        unit.hide()
        is_done = self._policy.is_done(unit.index)
        for index in self._policy.end_use(unit.index, is_done=is_done):
            self._evict(self._units[index])
        if is_done:
            self._trim(keep=SPARE)  # gradients grow until the end of the backward, where the memory of a step peaks

    def _evict(self, unit: Unit) -> Buffer | None:
        """Evict an idle unit. Return its buffer, or `None` if another tensor views the buffer or a pool keeps it."""
        self._policy.evict(unit.index)
        buffer = unit.evict()
        self._emit(("evict", unit.name))
        del self.owners[buffer.key]
        if buffer.escaped():
            self._warn(unit)
            return None
        if self._poison:
            buffer.poison()
        if not buffer.kept:
            return buffer
        self._policy.give_back(unit.index, buffer)
        unit.reclaimed(buffer)
        return None

    def _evict_idle(self) -> None:
        for index in list(self._policy.idle):
            self._evict(self._units[index])

    def _warn(self, unit: Unit) -> None:
        if not self.has_dropped:
            self.has_dropped = True
            warnings.warn(
                f"unit {unit.name!r}: a view of the gathered weights outlived their use, so the buffer cannot be "
                "reused. The program keeps a weight, or a view of a weight, outside of autograd's saved tensors "
                "(`ctx.save_for_backward` is fine, an attribute is not). Results are correct if the view is only "
                "read, but it costs memory and its values become stale after a step. This is reported once.",
                EscapedViewWarning,
                stacklevel=2,
            )


def _allocate(context: Context, nbytes: int, kept: bool) -> Buffer:
    """Return a new buffer. If `kept` is true, the memory comes from the transport, which sends from this memory."""
    memory = context.transport.empty_persistent(nbytes, context.device) if kept else context.empty(nbytes, torch.uint8)
    context.ledger.track("gather buffers", memory)
    return Buffer(memory, kept=kept)
