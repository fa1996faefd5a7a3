"""Gather the full weights of a flat (a flat parameter) from the shards of all ranks.

    plain       shard [S] -> cast into its place in the full weights [W*S] -> all-gather
    quantized   shard [S] -> encoded into its row of a payload [W*R] -> all-gather -> decoded into full weights [W*S]

    row   | S codes | S/32 scales | padding |     R bytes, a multiple of 16

Each block of 32 elements lies within one parameter and one shard, so the codes of a weight do not depend on `W`. A rank
decodes its own codes too, so all ranks compute with the same values. The shard itself stays exact.

A shard that already lies in the memory of the full weights is not copied. A single rank gathers nothing.

Legend: `W` ranks, `S` elements per shard, a multiple of 32, `R` bytes per row.
"""

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import NamedTuple

import torch
from shardlite_kernels import cast
from shardlite_kernels.quantize import dequantize, quantize
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

from shardlite.comm import Context, Moment, Operation, ProgramStreams, StreamQueue, Work, all_gather
from shardlite.params import ALIGN, Flat, Unit, as_they_are

TAKE_PART = "take part"
"""The purpose under which `traffic()` counts gathers that only other ranks need."""


def own_as_gathered(flat: Flat) -> Tensor:
    """Return this rank's part of the full weights as a gather would write it, [S]."""
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
    """Return views of the codes [W, S] and scales [W, S/32] in a payload."""
    shard = flat.layout.shard_numel
    rows = payload.view(flat.layout.world_size, flat.layout.codes_nbytes)
    return rows[:, :shard].view(torch.int8), rows[:, shard : shard + shard // ALIGN]


_CHECKPOINT_MODES = (_CachingTorchDispatchMode, _CachedTorchDispatchMode)


class Gather(NamedTuple):
    """One gather of a unit, which runs on a queue. The gather fills the unit's memory, or temporary memory."""

    context: Context
    unit: Unit
    fulls: deque[Tensor]
    """The unit's memory, one tensor [W*S] per flat. Empty if only other ranks need the gather."""

    purpose: str
    during: str
    """Kind of the pass, for error messages."""

    by_hosts: bool
    """Whether messages go through host memory, because other gathers may be in flight."""

    def execute(self) -> None:
        """Gather flat by flat. Skip flats that every rank keeps in full."""
        context, unit = self.context, self.unit
        if self.purpose == TAKE_PART:
            context.trace.emit((TAKE_PART, unit.name))
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
                dequantize(full, *_columns(flat, sent))
            del full, sent  # no view of the unit's memory may outlive the gather

    def _name(self, flat: int) -> Operation:
        """Name the gather of one flat. Omit the step if the gather is negotiated: ranks have compared steps."""
        what = f"{'negotiated ' * self.by_hosts}all-gather of unit {self.unit.name!r}, flat {flat}"
        return self.context.operation(what, self.purpose, self.unit.name, at_any_step=self.by_hosts, during=self.during)

    def _own_part(self, flat: Flat, full: Tensor | None) -> Tensor:
        """Return the buffer that the gather fills. This rank's part is already filled."""
        if flat.quantized:
            assert flat.rank is not None, "a rank that keeps all weights gathers none"
            payload = self.context.empty(flat.layout.world_size * flat.layout.codes_nbytes, torch.uint8)
            codes, scales = _columns(flat, payload)
            quantize(codes[flat.rank], scales[flat.rank], flat.local)
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
    """Fill `full` through host memory. Messages have tags, because other gathers may be in flight."""
    hosts, _ = context.hosts
    if not full.is_cuda:
        all_gather(full, hosts, operation=operation)
        return
    staged = full.cpu()
    context.ledger.track("staging", staged)
    all_gather(staged, hosts, operation=operation)
    full.copy_(staged)


class GatherQueue:
    """Runs gathers one after the other on a separate queue, overlapping the computation.

    With `by_hosts` the queue has its own thread, and messages go through host memory.
    """

    def __init__(self, context: Context, *, by_hosts: bool = False) -> None:
        self._context = context
        self._by_hosts = by_hosts
        self._last: Work | None = None  # the latest work, until `drain` waits for it
        self._queue: StreamQueue | None = None  # created on first use: some models never gather

    def gather(self, unit: Unit, *before: Callable[[], None], during: str = "") -> None:
        """Start a gather of the unit's current weights into the unit's memory. Call the functions `before` first."""
        self._context.trace.emit(("gather", unit.name))
        gather = Gather(self._context, unit, deque(unit.fulls()), "gather", during, self._by_hosts)
        unit.begin_gather(self.submit(*before, gather.execute))

    def take_part(self, unit: Unit, *, during: str) -> Gather:
        """Return a gather that only other ranks need."""
        return Gather(self._context, unit, deque(), TAKE_PART, during, self._by_hosts)

    def submit(self, *steps: Callable[[], None], behind: Moment | None = None) -> Work:
        """Call the functions `steps` in order, after all functions that were submitted earlier.

        The operations of `steps` are stream-ordered after the program's computation until the moment `behind`. If
        `behind` is `None`, this moment is now.
        """
        progress = self._context.progress
        progress.asked += 1
        self._last = (self._queue or self._made()).submit(*steps, progress.served, behind=behind)
        return self._last

    def moment(self) -> Moment | None:
        """Return the current moment of the program's computation."""
        return self._made().moment()

    def drain(self) -> None:
        """Wait for all functions that were submitted."""
        if self._last is not None:
            self._last.wait()
            self._last = None

    def abandon_capture(self) -> None:
        """Forget the gathers of a capture that has failed."""
        self._last = None

    def _made(self) -> StreamQueue:
        if self._queue is None:
            self._queue = self._context.queue("negotiation" if self._by_hosts else "gather", blocking=self._by_hosts)
        return self._queue

    def wait(self, unit: Unit) -> None:
        """Wait for the gather of a unit, which must be in flight."""
        assert unit.work is not None
        self._context.trace.emit(("wait", unit.name))
        if not unit.work.succeeded:
            with self._context.traffic.waiting("gather", unit.name):
                unit.work.wait(self._context.progress.publish)
        unit.landed()


def isolated(streams: ProgramStreams | None = None) -> AbstractContextManager[object]:
    """Return a context that isolates the library's tensor operations from modes that the program has entered.

    - Operations do not unshard placeholders.
    - Inference mode is off, because tensors from this mode cannot be saved for a backward.
    - Selective checkpointing does not record operations, because recorded operations would be replayed.
    - With `streams`, operations run on the home stream.
    """
    modes = _get_current_dispatch_mode_stack() if torch._C._len_torch_dispatch_stack() else None
    other = streams.other() if streams is not None and streams.on_gpu else None
    if modes is None and other is None and not torch.is_inference_mode_enabled():
        return as_they_are()  # the most frequent case by far, which must be cheap
    stack = ExitStack()
    if streams is not None and other is not None:
        stack.enter_context(streams.across(other))
    stack.enter_context(as_they_are())
    stack.enter_context(torch.inference_mode(False))
    if modes is not None and any(isinstance(mode, _CHECKPOINT_MODES) for mode in modes):
        stack.enter_context(_disable_current_modes())
    return stack


# ---- from full weights to shards ------------------------------------------------------------------------------------


def take_over_all(unit: Unit) -> None:
    """Copy changed full weights of a unit that is in use to the unit's shards. Mark the full weights as up to date.

    The program has written the same values on every rank, so each rank copies its own part.
    """
    with torch.no_grad():
        for flat, full in zip(unit.flats, unit.fulls(), strict=True):
            if differs(flat, full):
                take_over(flat, full)
    unit.validate()


def differs(flat: Flat, full: Tensor) -> bool:
    """Return whether this rank's part of the full weights differs from a gather's result. The host waits for a GPU."""
    return not flat.in_place and not bool(_unchanged(flat, full).all())


def take_over(flat: Flat, full: Tensor) -> None:
    """Write changed elements to the shard. Unchanged elements keep the shard's values, of possibly higher precision."""
    own = flat.own_part(full)
    flat.write(torch.where(_unchanged(flat, full), flat.weights(), own.to(flat.master)))


def _unchanged(flat: Flat, full: Tensor) -> Tensor:
    """Return a mask [S]: `True` for each element of this rank's part of `full` that is unchanged since the gather."""
    own, gathered = flat.own_part(full), own_as_gathered(flat)
    return (own == gathered) | ((own != own) & (gathered != gathered))  # NaN differs from itself


_AS_IS: AbstractContextManager[object] = nullcontext()


def outside_transforms() -> AbstractContextManager[object]:
    """Return a context in which no transform of `torch.func` (`jvp`, `vmap`) applies to the library's operations.

    Inside a transform, each new tensor and each view is a wrapper, which ends with the transform. The process crashes
    if such a view becomes the memory of a parameter.
    """
    return _AS_IS if torch._C._functorch.peek_interpreter_stack() is None else torch._C._DisableFuncTorch()
