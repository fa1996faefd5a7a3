"""Gather a flat's full weights from the shards of all ranks.

    plain       shard [S] -> cast into its place in the full weights [W*S] -> all-gather
    quantized   shard [S] -> codes into its row of a payload [W*R] -> all-gather -> full weights [W*S]

    row   | S codes | S/32 scales | padding |     R bytes, a multiple of 16

Blocks of 32 lie within one parameter and within one shard, so the codes of a weight do not depend on `W`. A rank
decodes its own weights too, so all ranks compute with the same values. The shard itself stays exact.

A shard that is a part of the full weights is not copied. A single rank gathers nothing.

Legend: `W` ranks, `S` elements per shard, a multiple of 32, `R` bytes per row.
"""

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass

import torch
from shardlite_kernels import cast, dequantize, quantize
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

from shardlite.comm import Context, Moment, Operation, ProgramStreams, StreamQueue, Work, all_gather
from shardlite.params import ALIGN, Flat, Unit, as_they_are

TAKE_PART = "take part"
"""The purpose of a gather that only other ranks need."""


def pack(flat: Flat, empty: Callable[[int, torch.dtype], Tensor]) -> Tensor:
    """Return a payload [W*R] that `empty` makes, of which this rank's row has the codes of its shard."""
    assert flat.rank is not None, "who has all weights gathers none"
    payload = empty(flat.layout.world_size * flat.layout.codes_nbytes, torch.uint8)
    codes, scales = _columns(flat, payload)
    quantize(codes[flat.rank], scales[flat.rank], flat.local)
    return payload


def unpack(flat: Flat, payload: Tensor, full: Tensor) -> None:
    """Fill the full weights [W*S] with what the codes of all ranks mean."""
    dequantize(full, *_columns(flat, payload))


def own_as_gathered(flat: Flat) -> Tensor:
    """Return what a gather makes of this rank's shard, [S] in the dtype of the full weights."""
    if not flat.quantized:
        return flat.local.to(flat.compute)
    numel = flat.local.numel()
    codes = flat.local.new_empty(numel, dtype=torch.int8)
    scales = flat.local.new_empty(numel // ALIGN, dtype=torch.uint8)
    own = flat.local.new_empty(numel, dtype=flat.compute)
    quantize(codes, scales, flat.local)
    dequantize(own, codes, scales)
    return own


def _columns(flat: Flat, payload: Tensor) -> tuple[Tensor, Tensor]:
    """View the codes [W, S] and scales [W, S/32] in a payload."""
    shard = flat.layout.shard_numel
    rows = payload.view(flat.layout.world_size, flat.layout.codes_nbytes)
    return rows[:, :shard].view(torch.int8), rows[:, shard : shard + shard // ALIGN]


_CHECKPOINT_MODES = (_CachingTorchDispatchMode, _CachedTorchDispatchMode)


@dataclass
class Gather:
    """One gather of a unit, run on a queue: into the unit's memory, or into memory that is dropped."""

    context: Context
    unit: Unit
    fulls: deque[Tensor]
    """The unit's memory, one tensor [W*S] per flat; empty if only other ranks need the gather."""

    purpose: str
    during: str
    """Kind of the pass, for errors."""

    by_hosts: bool
    """Whether messages go through the memory of the hosts, because other gathers may be in flight."""

    def execute(self) -> None:
        """Gather flat by flat. A flat that every rank has is not gathered."""
        context, unit = self.context, self.unit
        if self.purpose == TAKE_PART:
            context.trace.emit(TAKE_PART, unit.name)
        for i, flat in enumerate(unit.flats):
            full = self.fulls.popleft() if self.fulls else None
            sent = self._own_part(flat, full)
            if flat.quantized or (flat.rank is not None and context.transport.world_size > 1):
                operation = self._name(i)
                context.progress.joins()
                with context.traffic.running(self.purpose, unit.name):
                    if self.by_hosts:
                        _all_gather_by_hosts(sent, context, operation)
                    else:
                        all_gather(sent, context.transport, operation=operation)
            if flat.quantized and full is not None:
                unpack(flat, sent, full)
            del full, sent  # or they would view the unit's memory when the work is done

    def _name(self, flat: int) -> Operation:
        """Name the gather of one flat. A negotiated gather is not named by the step: ranks have compared that."""
        what = f"{'negotiated ' * self.by_hosts}all-gather of unit {self.unit.name!r}, flat {flat}"
        return self.context.operation(what, self.purpose, self.unit.name, at_any_step=self.by_hosts, during=self.during)

    def _own_part(self, flat: Flat, full: Tensor | None) -> Tensor:
        """Return the buffer to be gathered, with this rank's part in it."""
        if flat.quantized:
            payload = pack(flat, self.context.empty)
            self.context.ledger.track("staging", payload)
            return payload
        if full is None:
            full = self.context.empty(flat.layout.full_numel, flat.compute)
            self.context.ledger.track("gather buffers", full)
        if not flat.in_place:
            own = flat.own_part(full)
            if own.dtype == flat.local.dtype:
                own.copy_(flat.local)
            else:
                cast(own, flat.local)
        return full


def _all_gather_by_hosts(full: Tensor, context: Context, operation: Operation) -> None:
    """Fill `full` through the memory of the hosts, whose messages have tags: other gathers may be in flight."""
    hosts, _ = context.hosts
    if not full.is_cuda:
        all_gather(full, hosts, operation=operation)
        return
    staged = full.cpu()
    context.ledger.track("staging", staged)
    all_gather(staged, hosts, operation=operation)
    full.copy_(staged)


class GatherQueue:
    """Runs gathers one after the other on their own queue, overlapping the computation.

    With `by_hosts` it has a thread, and messages go through the memory of the hosts.
    """

    def __init__(self, context: Context, *, by_hosts: bool = False) -> None:
        self._context = context
        self._by_hosts = by_hosts
        self._last: Work | None = None  # until it was waited for
        self._queue: StreamQueue | None = None  # made when needed: where weights are never gathered it never is

    def gather(self, unit: Unit, *before: Callable[[], None], during: str = "") -> None:
        """Start a gather of the unit's current weights into its memory, after the steps `before`."""
        self._context.trace.emit("gather", unit.name)
        gather = Gather(self._context, unit, deque(unit.fulls()), "gather", during, self._by_hosts)
        self._context.progress.asks()
        self._last = self._made().submit(*before, gather.execute, self._context.progress.served)
        unit.begin_gather(self._last)

    def take_part(self, unit: Unit, *, during: str) -> Gather:
        """Return a gather that only other ranks need."""
        return Gather(self._context, unit, deque(), TAKE_PART, during, self._by_hosts)

    def submit(self, *steps: Callable[[], None], behind: Moment | None = None) -> Work:
        """Run `steps` in order after all that was submitted before.

        They are behind the program's computation so far, or up to the moment `behind`.
        """
        self._context.progress.asks()
        self._last = self._made().submit(*steps, self._context.progress.served, behind=behind)
        return self._last

    def moment(self) -> Moment | None:
        """Return this moment of the program's computation."""
        return self._made().moment()

    def drain(self) -> None:
        """Wait for all that was submitted."""
        if self._last is not None:
            self._last.wait()
            self._last = None

    def _made(self) -> StreamQueue:
        if self._queue is None:
            self._queue = self._context.queue("negotiation" if self._by_hosts else "gather", blocking=self._by_hosts)
        return self._queue

    def wait(self, unit: Unit) -> None:
        """Wait for the gather of a unit that is in flight."""
        assert unit.work is not None
        self._context.trace.emit("wait", unit.name)
        with self._context.traffic.waiting("gather", unit.name):
            unit.work.wait(self._context.progress.publish)
        unit.landed()


def isolated(streams: ProgramStreams | None = None) -> AbstractContextManager[object]:
    """Isolate the library's own tensor operations from modes that the program has entered.

    - They do not unshard placeholders.
    - `inference_mode` is left, because a tensor that is made in it cannot be saved for a backward.
    - Selective checkpointing does not see them, because it would replay them with the forward.
    - With `streams`, they are on the home stream.
    """
    modes = _get_current_dispatch_mode_stack() if torch._C._len_torch_dispatch_stack() else None
    other = streams.other() if streams is not None and streams.on_gpu else None
    if modes is None and other is None and not torch.is_inference_mode_enabled():
        return as_they_are()  # by far the most frequent case, which must be cheap
    stack = ExitStack()
    if streams is not None and other is not None:
        stack.enter_context(streams.across(other))
    stack.enter_context(as_they_are())
    stack.enter_context(torch.inference_mode(False))
    if modes is not None and any(isinstance(mode, _CHECKPOINT_MODES) for mode in modes):
        stack.enter_context(_disable_current_modes())
    return stack


# ---- the way back ---------------------------------------------------------------------------------------------------


def take_over_all(unit: Unit) -> None:
    """Write the full weights of a unit in use back to its shards, and count them as gathered.

    Every rank writes the same values into full weights, so each rank takes its own part.
    """
    with torch.no_grad():
        for flat, full in zip(unit.flats, unit.fulls(), strict=True):
            if differs(flat, full):
                take_over(flat, full)
    unit.validate()


def differs(flat: Flat, full: Tensor) -> bool:
    """Return whether this rank's part of the full weights is not what a gather makes of its shard. The host waits."""
    return not flat.in_place and not bool(_unchanged(flat, full).all())


def take_over(flat: Flat, full: Tensor) -> None:
    """Write changed elements back to the shard. The others keep all their digits: full weights may have fewer."""
    own = flat.own_part(full)
    flat.write(torch.where(_unchanged(flat, full), flat.weights(), own.to(flat.master)))


def _unchanged(flat: Flat, full: Tensor) -> Tensor:
    """Return which elements of this rank's part of the full weights are as they were gathered, [S], bool."""
    own, gathered = flat.own_part(full), own_as_gathered(flat)
    return (own == gathered) | ((own != own) & (gathered != gathered))  # NaN differs from itself
