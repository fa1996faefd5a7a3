"""Unshard and reshard units (stage 3).

    unshard -> [gather] -> FULL, used -> reshard -> IDLE -> unshard again: nothing to do
                                                 -> evicted: the buffer serves another unit

Buffers are a cache: an idle unit keeps its buffer until another unit needs it. `policy.py` decides which unit that is,
and what is gathered ahead. `negotiation.py` makes all ranks gather the same units in one order.

Legend: `W` ranks, `S` elements per shard; a full buffer has `W*S` elements per flat.
"""

import warnings
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from shardlite.comm import SPARE, Context
from shardlite.config import poison_evicted_buffers
from shardlite.errors import CommError, EscapedViewWarning
from shardlite.params import Buffer, Unit, Weights
from shardlite.weights.all_gather import isolated
from shardlite.weights.negotiation import Passes
from shardlite.weights.policy import BufferPolicy, UnitSize


class Gatherer(Passes):
    """Gathers the units of one wrapped model, and knows which buffer belongs to which unit."""

    def __init__(self, units: Sequence[Unit], context: Context, *, prefetch: int) -> None:
        super().__init__(units, context)
        self.owners: dict[int, Unit] = {}
        """The unit whose full weights a buffer holds, by the buffer's storage key."""

        self._policy = BufferPolicy(
            [UnitSize(unit.nbytes, unit.is_root, unit.keep_unsharded) for unit in units],
            self.order,
            partial(_allocate, context),
            prefetch=prefetch,
            keeps=context.streams.on_gpu,
        )
        self._backwards = 0
        self._ledger = context.ledger
        self._trim = context.trim
        self._trace = context.trace
        self._poison = poison_evicted_buffers()
        self._warned = False

    def unshard(self, unit: Unit, *, binds: bool = True) -> None:
        """Make the unit's full weights readable until `reshard`. Calls nest. Call it within a pass.

        Unless it `binds`, the module's parameters may stay placeholders, until code reads one (`bind`).

        Raises:
            CommError: a peer failed, timed out or does something else.
        """
        if unit.users == 0:
            with isolated(self._streams):
                if not unit.is_fresh:
                    self._take_buffer(unit)
                    queue, before, kind = self.turn(unit)
                    queue.gather(unit, *before, during=kind)
                self._policy.begin_use(unit.index)
                self._prefetch_next()
                if unit.phase is Weights.GATHERING:
                    self._land(unit)
                if binds:
                    unit.bind()
        elif binds:
            self.bind(unit)
        self.follow(unit)
        unit.use()

    def bind(self, unit: Unit) -> None:
        """Turn the module's parameters into views of full weights that are in use, if they are not."""
        if not unit.bound:
            with isolated(self._streams):
                unit.bind()

    def follow(self, unit: Unit) -> None:
        """Let the current stream use a unit, behind its gather: another stream may have waited for that."""
        if self._streams.on_gpu and (other := self._streams.other()) is not None:
            unit.share(other)

    def reshard(self, unit: Unit) -> None:
        """End one use. After the last one the unit is idle and may be evicted."""
        if unit.end_use():
            self._trace.emit("reshard", unit.name)
            with isolated(self._streams):
                for stream in unit.take_streams():
                    self._streams.wait_for(stream)
                self._make_idle(unit)

    def begin_forward(self, kind: str) -> None:
        """Start a forward pass; those of one kind are expected to need the same units."""
        self._backwards = 0
        self._begin(kind)

    def begin_backward(self, *, final: bool) -> None:
        """Start the pass of a backward. A `final` one is followed by a step, after which all weights are stale.

        Several in a row (a graph that is retained) are of different kinds.
        """
        self._backwards += 1
        self._begin(f"backward {self._backwards}{' before a step' if final else ''}", backwards=True, final=final)

    def _begin(self, kind: str, *, backwards: bool = False, final: bool = False) -> None:
        if all(unit.users for unit in self._units):
            return  # inside `gathered()`: nothing is to be gathered, and ranks may run as many passes as they like
        self._policy.begin_pass()
        self.begin_pass(kind, backwards=backwards, final=final, repeats=True)
        self.finish_prefetched()

    def after_backward(self, *, final: bool) -> None:
        """Expect nothing more of a backward. After a `final` one drop all idle weights: they are stale on all ranks."""
        self.order.end_path()
        if final:
            self.diverged = False
            for index in list(self._policy.idle):
                self._evict(self._units[index])

    def forget(self, units: Sequence[Unit]) -> None:
        """Gather each unit again at its next use, because its full weights may have been written to."""
        for unit in units:
            unit.invalidate()

    def expire(self) -> None:
        """Record that shards have changed: units notice by their versions."""

    def spare(self) -> Iterator[Tensor]:
        """Yield memory that is kept for later gathers."""
        for buffer in self._policy.spare():
            yield buffer.bytes

    def stop_prefetching(self) -> None:
        """Gather nothing ahead in the rest of this pass, and keep at most one idle unit."""
        for index in self._policy.stop_prefetching():
            self._evict(self._units[index])
        self._trim(keep=0)

    def finish_prefetched(self) -> None:
        """Finish what was gathered ahead and never needed, so that it counts as idle."""
        for unit in self._units:
            if unit.phase is Weights.GATHERING:
                with isolated():
                    self._land(unit)
                    self._make_idle(unit)

    def _prefetch_next(self) -> None:
        """Start the gathers that are expected next."""
        for index in self._policy.next_gathers(self._is_ready, self.comes_next):
            unit = self._units[index]
            self._take_buffer(unit)
            queue, before, kind = self.turn(unit)
            queue.gather(unit, *before, during=kind)

    def _is_ready(self, index: int) -> bool:
        unit = self._units[index]
        return unit.is_fresh or unit.users > 0

    def _land(self, unit: Unit) -> None:
        """Wait for the weights."""
        try:
            self._queue.wait(unit)
        except CommError:
            self._stop_serving()
            self._reports.raise_verdict()
            raise

    def _take_buffer(self, unit: Unit) -> None:
        """Give a unit that has to be gathered a buffer."""
        if unit.phase is Weights.GATHERING:  # gathered ahead, then the weights were changed
            self._land(unit)
            unit.hide()
        victim = self._policy.victim_for(unit.index)
        freed = None if victim is None else self._evict(self._units[victim])
        buffer = self._policy.acquire(unit.index, freed)
        self._ledger.track("gather buffers", buffer.bytes)  # again: its user may have counted it for something else
        self.owners[buffer.key] = unit
        unit.take_buffer(buffer)

    def _make_idle(self, unit: Unit) -> None:
        """Keep an idle unit's weights for the next use, if there is memory, and a next use before they change."""
        unit.hide()
        is_done = self._policy.is_done(unit.index)
        for index in self._policy.end_use(unit.index, is_done=is_done):
            self._evict(self._units[index])
        if is_done:
            self._trim(keep=SPARE)  # gradients grow from here to the end of the backward, where a step peaks

    def _evict(self, unit: Unit) -> Buffer | None:
        """Take an idle unit's buffer away. Return it if no other tensor views it, and no pool keeps it."""
        self._policy.evict(unit.index)
        buffer = unit.evict()
        self._trace.emit("evict", unit.name)
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


def _allocate(context: Context, nbytes: int, kept: bool) -> Buffer:
    """Return a new buffer. One that is kept is memory of the transport that sends it."""
    if kept:
        return Buffer(context.transport.empty_persistent(nbytes, context.device), kept=True)
    return Buffer(context.empty(nbytes, torch.uint8))
