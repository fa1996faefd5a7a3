"""A unit: the parameters that are gathered together. It owns its state; others decide when it changes.

Legend: `W` ranks, `S` elements per shard; a full buffer has `W*S` elements.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate
from operator import attrgetter

import torch
from torch import Tensor, nn

from shardlite.comm import Work
from shardlite.errors import LayoutError, PhaseError
from shardlite.params.flat import Flat
from shardlite.params.full_buffer import Buffer
from shardlite.params.layout import round_up
from shardlite.params.parameters import as_they_are, to_full

ROOT = "(root)"
"""Name of the root unit, which holds the parameters of no other unit."""

_FLAT_ALIGN = 256
"""Bytes: flats start at multiples of it in a buffer, so that every access can be a wide one."""

_version_of = attrgetter("_version")  # `map` reads it of many tensors without a call in Python
_local_version_of = attrgetter("local._version")


class Weights(Enum):
    """State of a unit's full weights."""

    SHARDED = "sharded"  # only this rank's shard is valid; the module's parameters are placeholders
    GATHERING = "gathering"  # all-gather in flight: the full weights must not be read
    FULL = "full"  # the full weights are in use. The parameters are views of them, or still placeholders if only
    # handles in a graph use them
    IDLE = "idle"  # the full weights are valid and not in use. Stage 3: parameters are placeholders, the buffer may be
    # evicted. Stages 1, 2: parameters stay views of the full weights, which have permanent memory


class Gradients(Enum):
    """State of a unit's gradient bucket."""

    EMPTY = "empty"  # nothing since the last reduction
    FILLING = "filling"  # this rank's own gradients, of one or more backwards
    REDUCING = "reducing"  # reduce-scatter in flight: bucket and gradient shard must not be touched


_LEGAL: tuple[tuple[Enum, Enum], ...] = (  # a tuple, because a dictionary lookup by an `Enum` calls Python code
    (Weights.SHARDED, Weights.GATHERING),
    (Weights.GATHERING, Weights.FULL),
    (Weights.FULL, Weights.IDLE),
    (Weights.IDLE, Weights.FULL),
    (Weights.IDLE, Weights.SHARDED),
    (Gradients.EMPTY, Gradients.FILLING),
    (Gradients.FILLING, Gradients.REDUCING),
    (Gradients.FILLING, Gradients.EMPTY),
    (Gradients.REDUCING, Gradients.EMPTY),
)


def check_move(unit: str, now: Enum, to: Enum) -> None:
    """Raise `PhaseError` unless the transition of `unit` from `now` to `to` is legal."""
    if (now, to) not in _LEGAL:
        legal = ", ".join(str(end.value) for start, end in _LEGAL if start is now)
        raise PhaseError(f"unit {unit!r}: cannot go from {now.value} to {to.value}; allowed: {legal}")


@dataclass(eq=False)
class Unit:
    """Parameters that are gathered together, and the state of their full weights. Only its methods change it.

    begin_gather -> landed -> use -> end_use -> hide (stage 3) -> evict
                                             -> rest (stages 1, 2) -> expire
    """

    index: int
    name: str
    flats: Sequence[Flat]
    is_root: bool = False
    """Whether this is the root unit, whose gradients come first and last."""

    keep_unsharded: bool = False
    """Whether no other unit may take its buffer: the root, which is used all through a pass, and units that stay
    gathered until their backward."""

    phase: Weights = field(init=False, default=Weights.SHARDED)
    users: int = field(init=False, default=0)
    """Number of uses of the full weights that have not ended."""

    buffer: Buffer | None = field(init=False, default=None)
    """Buffer of the full weights at stage 3."""

    overwritten: set[Flat] = field(init=False, default_factory=set)
    """Flats that were stepped in the running backward and whose old weights no buffer holds any more."""

    escapes: list[weakref.ref[torch.UntypedStorage]] = field(init=False, default_factory=list)
    """Buffers of this unit that tensors outside the library still view."""

    nbytes: int = field(init=False)
    """Bytes of a buffer for the full weights."""

    needs_gather: bool = field(init=False)
    """Whether full weights must be made from shards: by a gather, a cast or a copy."""

    copied: bool = field(init=False)
    """Whether some full weights are other memory than the shards."""

    _stepped: set[Flat] = field(init=False, default_factory=set)
    """Flats that were stepped in the running backward: only a buffer still has their old weights."""

    _touched: bool = field(init=False, default=False)
    """Whether `.data` of a full weight was handed out, so that a write may not be counted."""

    gathered_version: int = field(init=False, default=-1)
    """Version of the shards that the full weights were gathered from."""

    work: Work | None = field(init=False, default=None)
    """The gather in flight."""

    bound: bool = field(init=False, default=False)
    """Whether the module's parameters are views of the full weights."""

    _invalid: bool = field(init=False, default=False)
    """Whether the full weights may have been written to since the latest gather."""

    _latest: Work | None = field(init=False, default=None)
    """The latest gather, which may be over."""

    _streams: set[torch.cuda.Stream] = field(init=False, default_factory=set)
    """Streams other than the home stream that read what the latest gather has made."""

    def __post_init__(self) -> None:
        self._params = tuple(param for flat in self.flats for param in flat.params)
        self.needs_gather = any(not (flat.in_place and flat.rank is None) for flat in self.flats)
        self.copied = any(not flat.in_place for flat in self.flats)
        lengths = (round_up(flat.full_nbytes, _FLAT_ALIGN) for flat in self.flats)
        *self._starts, self.nbytes = accumulate(lengths, initial=0)

    # ---- transitions ------------------------------------------------------------------------------------------------

    def take_buffer(self, buffer: Buffer) -> None:
        """Use `buffer` for the full weights of the next gather."""
        self.buffer, self.overwritten = buffer, set(self._stepped)

    def begin_gather(self, work: Work) -> None:
        """Record that `work` gathers the current shards."""
        self._move(Weights.GATHERING)
        self.gathered_version, self.bound, self._invalid, self._streams = self.version(), False, False, set()
        self.work = self._latest = work

    def landed(self) -> None:
        """Record that the gather in flight was waited for."""
        self.work = None
        self._move(Weights.FULL)

    def use(self) -> None:
        """Begin a use of the full weights. Uses nest."""
        if self.phase is Weights.IDLE:
            self._move(Weights.FULL)
        self.users += 1

    def end_use(self) -> bool:
        """End a use. Return whether it was the last one."""
        self.users -= 1
        return self.users == 0

    def bind(self) -> None:
        """Turn the module's parameters into views of the full weights."""
        self.bound = True
        fulls = self.fulls()

        def cut(_: Tensor) -> list[Tensor]:
            return [view for flat, full in zip(self.flats, fulls, strict=True) for view in flat.layout.views(full)]

        if self.buffer is not None:
            to_full(zip(self._params, self.buffer.views(self.index, cut), strict=True))
            return
        for flat, full in zip(self.flats, fulls, strict=True):
            to_full(flat.views(full))

    def rest(self) -> None:
        """Become idle. The parameters stay views of the full weights."""
        self._move(Weights.IDLE)

    def hide(self) -> None:
        """Become idle and turn the parameters into placeholders. The buffer keeps the full weights."""
        assert self.buffer is not None
        was_bound = self.bound
        if was_bound:
            self._unbind()
        if self.buffer.escaped():
            self.escapes.append(weakref.ref(self.buffer.bytes.untyped_storage()))
        if was_bound:
            self._outdate_hidden()
        self._move(Weights.IDLE)

    def evict(self) -> Buffer:
        """Give up the full weights. Return their buffer."""
        assert self.buffer is not None
        buffer, self.buffer = self.buffer, None
        if self.phase is not Weights.SHARDED:  # else its gather could not be queued
            self._move(Weights.SHARDED)
        return buffer

    def expire(self) -> None:
        """Turn the parameters into placeholders, because the shards have changed."""
        self._unbind()
        torch.autograd.graph.increment_version(self._params)  # what autograd has saved would read as NaN
        self._move(Weights.SHARDED)

    def share(self, stream: torch.cuda.Stream) -> None:
        """Let another stream than the home stream read the full weights, behind their gather."""
        if self._latest is not None:
            self._latest.wait()
            self._streams.add(stream)

    def take_streams(self) -> set[torch.cuda.Stream]:
        """Return the other streams that have read the full weights, and forget them."""
        streams, self._streams = self._streams, set()
        return streams

    def invalidate(self) -> None:
        """Gather anew at the next use, because the full weights may have been written to."""
        self._invalid = True

    def validate(self) -> None:
        """Count the full weights as gathered from the current shards: both were written alike."""
        self.gathered_version = self.version()

    def touch(self) -> None:
        """Record that `.data` of a full weight was handed out."""
        self._touched = True

    def was_touched(self) -> bool:
        """Return whether `touch` was called since the last call of this method."""
        touched, self._touched = self._touched, False
        return touched

    def begin_backward(self) -> None:
        """Forget the steps of the backward before."""
        self._stepped.clear()
        self.overwritten.clear()

    def mark_stepped(self, flat: Flat) -> None:
        """Record that the running backward steps a flat."""
        self._stepped.add(flat)

    def reclaimed(self, buffer: Buffer) -> None:
        """Record that no tensor outside the library views `buffer` any more."""
        self.escapes = [each for each in self.escapes if each() is not buffer.bytes.untyped_storage()]

    def _move(self, to: Weights) -> None:
        check_move(self.name, self.phase, to)
        self.phase = to

    def _unbind(self) -> None:
        self.bound = False
        for flat in self.flats:
            flat.unbind()

    def _outdate_hidden(self) -> None:
        """Increment versions, so that autograd's in-place check refuses parameters that were saved around our hooks.

        Not while a view of them lives: autograd would take the view for modified and derive its gradient from the
        strides of the placeholder, without an error. The view itself is right, because it keeps its buffer.
        """
        self.escapes = [each for each in self.escapes if each() is not None]
        if not self.escapes:
            torch.autograd.graph.increment_version(self._params)

    # ---- what it holds ----------------------------------------------------------------------------------------------

    @property
    def is_fresh(self) -> bool:
        """Whether the full weights are there, or being gathered, at the current version."""
        return self.phase is not Weights.SHARDED and self.gathered_version == self.version() and not self._invalid

    @property
    def trainable(self) -> list[Flat]:
        """The flats that have gradients now."""
        return [flat for flat in self.flats if flat.trainable_slots]

    def params(self) -> Sequence[nn.Parameter]:
        """Return the module's own parameters."""
        return self._params

    def writes(self) -> int:
        """Return a number that grows with every counted write into the full parameters."""
        with as_they_are():
            return sum(map(_version_of, self._params))

    def version(self) -> int:
        """Return a number that grows with every change of this rank's shards."""
        return sum(map(_local_version_of, self.flats))

    def fulls(self) -> list[Tensor]:
        """Return the memory of the full weights, one tensor [W*S] per flat."""
        if self.buffer is not None:
            return self.buffer.views(self, self._cut_fulls)
        fulls = [flat.full for flat in self.flats if flat.full is not None]
        assert len(fulls) == len(self.flats), "a unit in use has memory for its full weights"
        return fulls

    def _cut_fulls(self, memory: Tensor) -> list[Tensor]:
        """View bytes [nbytes] as one full tensor [W*S] per flat."""
        return [
            memory[start : start + flat.full_nbytes].view(flat.compute)
            for flat, start in zip(self.flats, self._starts, strict=True)
        ]

    def escaped(self) -> bool:
        """Return whether other tensors than the module's parameters view the full weights of a unit in use."""
        assert self.buffer is not None, "a unit in use has a buffer"
        return self.buffer.escaped(len(self._params) if self.bound else 0)

    def check_not_overwritten(self, offset: int) -> None:
        """Check that the full weights at this byte of the buffer are those from before the backward's own steps.

        Raises:
            RuntimeError: they are not, in the words of PyTorch's own error.
        """
        for flat, start in zip(self.flats, self._starts, strict=True):
            if flat in self.overwritten and start <= offset < start + flat.full_nbytes:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"AdamW(in_backward=True) has stepped weights of unit {self.name!r} whose gradients were complete, "
                    "and this backward uses them once more (a use that brings no gradient, as of `weight.detach()`). "
                    "Use AdamW without in_backward"
                )

    def check_memory(self) -> None:
        """Check that the module's parameters still have the memory that they were given.

        Raises:
            LayoutError: a parameter was given other memory.
        """
        with as_they_are():
            addresses = [[param.data_ptr() for param in flat.params] for flat in self.flats]
        for flat, start, own in zip(self.flats, self._starts, addresses, strict=True):
            placeholder = None if flat.placeholder is None else flat.placeholder.data_ptr()
            full = None if flat.full is None else flat.full.data_ptr()
            lent = None if self.buffer is None else self.buffer.bytes.data_ptr() + start
            for slot, address in zip(flat.layout.slots, own, strict=True):
                home = address - slot.start * flat.compute.itemsize
                if address != placeholder and home not in (full, lent) and slot.numel:
                    raise LayoutError(
                        f"parameter {slot.name!r} was given other memory (`.data = ...`, `.half()`, `.to(...)`), so it "
                        "is no longer the sharded one. Write into it inside `gathered()`, and convert before wrapping"
                    )
