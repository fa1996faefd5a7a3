"""Gather a flat's full weights from the shards of all ranks.

    plain       shard [S] -> cast into its place in the full weights [W*S] -> all-gather
    quantized   shard [S] -> codes into its row of a payload [W*R] -> all-gather -> full weights [W*S]

    row   | S codes | S/32 scales | padding |     R bytes, a multiple of 16

Blocks of 32 lie within one parameter and within one shard, so the codes of a weight do not depend on `W`. A rank reads
its own weights from its own codes as well: all ranks compute with the same values. The shard itself stays exact.

Where the shard is a part of the full weights nothing is copied, and one rank has nothing to gather.

Legend: `W` ranks, `S` elements per shard, a multiple of 32, `R` bytes per row.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Protocol

import torch
from shardlite_kernels import cast, dequantise, quantise
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

from shardlite.comm import Context, StreamQueue, Work, all_gather
from shardlite.params import ALIGN, Empty, Flat, Unit, Weights, round_up

_ROW_ALIGN = 16
"""Bytes: where rows start, so that every access can be a wide one."""


def place_own(flat: Flat, full: Tensor) -> None:
    """Cast this rank's shard into its place in the full weights [W*S], if it is not there already."""
    if flat.in_place:
        return
    own = flat.own_part(full)
    if own.dtype == flat.local.dtype:
        own.copy_(flat.local)
    else:
        cast(own, flat.local)


def pack(flat: Flat, empty: Empty) -> Tensor:
    """Return a wire [W*R] that `empty` makes, of which this rank's row has the codes of its shard."""
    assert flat.rank is not None, "who has all weights gathers none"
    payload = empty(flat.layout.world_size * _row_nbytes(flat), torch.uint8)
    codes, scales = _columns(flat, payload)
    quantise(codes[flat.rank], scales[flat.rank], flat.local)
    return payload


def unpack(flat: Flat, payload: Tensor, full: Tensor) -> None:
    """Fill the full weights [W*S] with what the codes of all ranks mean."""
    dequantise(full, *_columns(flat, payload))


def own_as_gathered(flat: Flat) -> Tensor:
    """Return what a gather makes of this rank's shard, [S] in the dtype of the full weights."""
    if not flat.quantized:
        return flat.local.to(flat.compute)
    numel = flat.local.numel()
    codes = flat.local.new_empty(numel, dtype=torch.int8)
    scales = flat.local.new_empty(numel // ALIGN, dtype=torch.uint8)
    own = flat.local.new_empty(numel, dtype=flat.compute)
    quantise(codes, scales, flat.local)
    dequantise(own, codes, scales)
    return own


def _row_nbytes(flat: Flat) -> int:
    """`R`."""
    shard = flat.layout.shard_numel
    return round_up(shard + shard // ALIGN, _ROW_ALIGN)


def _columns(flat: Flat, payload: Tensor) -> tuple[Tensor, Tensor]:
    """View the codes [W, S] and scales [W, S/32] in a wire."""
    shard = flat.layout.shard_numel
    rows = payload.view(flat.layout.world_size, _row_nbytes(flat))
    return rows[:, :shard].view(torch.int8), rows[:, shard : shard + shard // ALIGN]


_AS_IT_IS = nullcontext()


class Gathering(Protocol):
    """Has full weights ready when they are used: `Gatherer` gathers and evicts them, `ResidentWeights` keeps them."""

    def unshard(self, unit: Unit) -> None:
        """Make the unit's full weights readable until `reshard`; holds count. Within a pass."""

    def reshard(self, unit: Unit) -> None:
        """End one hold."""

    def forget(self, units: Sequence[Unit]) -> None:
        """Let the next hold of each gather anew, because the full weights may have been written to."""

    def expire(self) -> None:
        """Take note that shards have changed."""

    def begin_pass(self, kind: str) -> None:
        """Start a forward pass; those of one kind are expected to need the same units."""

    def begin_backward(self, *, final: bool) -> None:
        """Start the pass of a backward; a `final` one is followed by a step, after which all weights are stale."""

    def stop_prefetching(self) -> None:
        """Gather nothing ahead in the rest of the pass in progress, and keep one idle unit at most."""

    def end_pass(self) -> None:
        """End the pass in progress, if there is one: this rank needs no more weights in it."""

    def inside_pass(self, kind: str) -> AbstractContextManager[None]:
        """Hold units in the pass in progress or, if there is none, in one of its own."""

    def after_backward(self, *, final: bool) -> None:
        """Drop what a backward leaves that is of no more use."""

    def settle(self) -> None:
        """Wait until no other rank needs this rank's part of the weights of now."""


class Filler:
    """Runs all-gathers, one after the other on a lane of their own."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.during = ""
        """The pass in progress, in the words of an error."""

        self._queue: StreamQueue | None = None  # made when needed: where weights never change hands it never is

    def submit(self, gathers: Callable[[], None]) -> Work:
        """Run `gathers` on the lane."""
        self._queue = self._queue or self._context.queue("gather")
        progress = self._context.progress
        progress.asks()

        def serve() -> None:
            try:
                gathers()
            finally:
                progress.served()

        return self._queue.submit(serve)

    def filling(self, unit: Unit) -> Callable[[], None]:
        """Return what the lane has to do so that the unit's memory has its weights of now."""
        jobs = deque(
            partial(self._fill, unit, i, flat, full)
            for i, (flat, full) in enumerate(zip(unit.flats, unit.fulls(), strict=True))
        )

        def go_round() -> None:
            unit.gathers += 1
            while jobs:  # emptied, so that nothing of ours views the memory once the flight is over
                jobs.popleft()()

        self._context.trace.emit("gather", unit.name)
        unit.gathered_version, unit.needs_regather = unit.version(), False
        unit.move(Weights.GATHERING)
        return go_round

    def take_part(self, unit: Unit) -> None:
        """Gather a unit for the sake of other ranks, on the lane: what comes is dropped."""
        unit.gathers += 1
        self._context.trace.emit("take part", unit.name)
        for i, flat in enumerate(unit.flats):
            if flat.quantized:
                self._gather(unit, i, self._packed(flat), "take part")
            else:
                full = self._context.empty(flat.layout.full_numel, flat.compute)
                self._context.ledger.track("gather buffers", full)
                place_own(flat, full)
                self._gather(unit, i, full, "take part")

    def _fill(self, unit: Unit, i: int, flat: Flat, full: Tensor) -> None:
        """Gather one flat [W*S], if it is gathered: every rank may have all of it."""
        if flat.quantized:
            payload = self._packed(flat)
            self._gather(unit, i, payload, "gather")
            unpack(flat, payload, full)
        else:
            place_own(flat, full)
            if flat.rank is not None and self._context.transport.world_size > 1:
                self._gather(unit, i, full, "gather")

    def _packed(self, flat: Flat) -> Tensor:
        """Return the wire of a flat, to be gathered."""
        payload = pack(flat, self._context.empty)
        self._context.ledger.track("staging", payload)
        return payload

    def _gather(self, unit: Unit, i: int, whole: Tensor, purpose: str) -> None:
        """All-gather what stands for a flat."""
        operation = self._context.operation(
            f"all-gather of unit {unit.name!r}, flat {i}", unit.gathers, during=self.during
        )
        transport = self._context.traffic.counted(self._context.transport, purpose, unit.name)
        self._context.progress.joins()
        with self._context.traffic.running(purpose, unit.name):
            all_gather(whole, transport, operation=operation)

    def finish(self, unit: Unit) -> None:
        """Wait for the weights."""
        if unit.work is not None:
            self._context.trace.emit("wait", unit.name)
            with self._context.traffic.waiting("gather", unit.name):
                unit.work.wait(self._context.progress.publish)
            unit.work = None


def is_fresh(unit: Unit) -> bool:
    """Whether the full weights are there, or on their way, and are those of now."""
    return unit.phase is not Weights.SHARDED and unit.gathered_version == unit.version() and not unit.needs_regather


def unseen_by_checkpoints() -> AbstractContextManager[object]:
    """Hide what a gather computes from selective checkpointing, which would replay it as a part of the forward."""
    modes = _get_current_dispatch_mode_stack()
    if any(isinstance(mode, _CachingTorchDispatchMode | _CachedTorchDispatchMode) for mode in modes):
        return _disable_current_modes()
    return _AS_IT_IS


def outside_inference() -> AbstractContextManager[object]:
    """Leave `inference_mode`: what was born in it could never be saved for a backward."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else _AS_IT_IS
