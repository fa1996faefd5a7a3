"""A unit: parameters that are gathered together, and the state of their full weights.

The unit checks and records each transition of its state. Other packages decide when a transition happens.

Legend: `W` ranks, `S` elements per shard; a full buffer has `W*S` elements.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate
from operator import attrgetter
from typing import TypeVar

import torch
from torch import Tensor, nn

from shardlite.comm import FINISHED, Work
from shardlite.errors import LayoutError, PhaseError
from shardlite.params.flat import Flat
from shardlite.params.full_buffer import Buffer
from shardlite.params.layout import round_up, shared, views
from shardlite.params.parameters import Sharded, as_they_are, become

ROOT = "(root)"
"""Name of the root unit, which holds the parameters of no other unit."""

_FLAT_ALIGN = 256
"""Alignment in bytes of each flat (flat parameter) in a buffer. This alignment allows vectorized memory accesses."""

_version_of = attrgetter("_version")  # `map` with this function makes no Python call per tensor
_local_version_of = attrgetter("memory._version")


class Weights(Enum):
    """State of a unit's full weights."""

    SHARDED = "sharded"  # only this rank's shard is valid; the module's parameters are placeholders
    GATHERING = "gathering"  # all-gather in flight: the full weights must not be read
    FULL = "full"  # the full weights are in use. The parameters are views of the full weights. If only handles in a
    # graph use the full weights, the parameters may still be placeholders
    IDLE = "idle"  # the full weights are valid and not in use. At stage 3 the parameters are placeholders, and the
    # buffer may be evicted. At stages 1 and 2 the parameters stay views of the full weights, whose memory is permanent


class Gradients(Enum):
    """State of a unit's gradient bucket."""

    EMPTY = "empty"  # no gradient has arrived since the latest reduction
    FILLING = "filling"  # the bucket holds this rank's own gradients, of one or more backwards
    REDUCING = "reducing"  # a reduce-scatter is in flight: bucket and gradient shard must not be touched


_State = TypeVar("_State", bound=Enum)

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


def check_move(unit: str, now: Enum, to: _State) -> _State:
    """Return `to`. Raise `PhaseError` if the transition of `unit` from `now` to `to` is not legal."""
    if (now, to) not in _LEGAL:
        legal = ", ".join(str(end.value) for start, end in _LEGAL if start is now)
        raise PhaseError(f"unit {unit!r}: cannot go from {now.value} to {to.value}; allowed: {legal}")
    return to


@dataclass(eq=False)
class Unit:
    """Parameters that are gathered together, and the state of their full weights. Only methods change the state.

    begin_gather -> landed -> use -> end_use -> hide (stage 3) -> evict
                                             -> rest (stages 1, 2) -> expire
    """

    index: int
    name: str
    flats: Sequence[Flat]
    is_root: bool = False
    """Whether this is the root unit, whose gradients are both the first and the last to arrive in a backward."""

    keep_unsharded: bool = False
    """Whether no other unit may take the buffer. True for the root, which is used throughout a pass, and for units that
    stay gathered until their backward."""

    replicated: bool = False
    """Whether every rank keeps and steps all weights. The module's parameters are then always readable."""

    phase: Weights = field(init=False, default=Weights.SHARDED)
    users: int = field(init=False, default=0)
    """Number of uses of the full weights that have not ended."""

    buffer: Buffer | None = field(init=False, default=None)
    """Buffer of the full weights at stage 3."""

    overwritten: set[Flat] = field(init=False, default_factory=set)
    """Flats that the running backward has stepped, and whose earlier weights are in no buffer."""

    escapes: list[weakref.ref[torch.UntypedStorage]] = field(init=False, default_factory=list)
    """Buffers of this unit that tensors outside the library still view."""

    nbytes: int = field(init=False)
    """Bytes of a buffer for the full weights."""

    needs_gather: bool = field(init=False)
    """Whether full weights are made from shards by a gather, a cast or a copy."""

    copied: bool = field(init=False)
    """Whether some full weights do not share the memory of the shards."""

    _stepped: set[Flat] = field(init=False, default_factory=set)
    """Flats that the running backward has stepped. Only a buffer that was gathered earlier has their old weights."""

    _touched: bool = field(init=False, default=False)
    """Whether the program has read `.data` of a full weight. Writes through `.data` do not change the version."""

    gathered_version: int = field(init=False, default=-1)
    """Version of the shards from which the full weights were gathered."""

    work: Work | None = field(init=False, default=None)
    """The gather in flight."""

    bound: bool = field(init=False, default=False)
    """Whether the module's parameters are views of the full weights."""

    _invalid: bool = field(init=False, default=False)
    """Whether the full weights may have been written to since the latest gather."""

    _latest: Work | None = field(init=False, default=None)
    """The latest gather, in flight or complete."""

    _streams: set[torch.cuda.Stream] = field(init=False, default_factory=set)
    """Streams other than the home stream that read the full weights of the latest gather."""

    def __post_init__(self) -> None:
        self._params = tuple(param for flat in self.flats for param in flat.params)
        self.needs_gather = any(not (flat.in_place and flat.rank is None) for flat in self.flats)
        self.copied = any(not flat.in_place for flat in self.flats)
        lengths = (round_up(flat.full_nbytes, _FLAT_ALIGN) for flat in self.flats)
        *self._starts, self.nbytes = accumulate(lengths, initial=0)
        self._ranges = [
            (start, start + flat.full_nbytes, flat.compute)
            for flat, start in zip(self.flats, self._starts, strict=True)
        ]
        self._places = [
            (flat.compute, flat.places(start)) for flat, start in zip(self.flats, self._starts, strict=True)
        ]
        # Equal blocks have equal keys, so a buffer has one set of views for all of them.
        self._places_key = shared((*self._ranges, *(flat.layout.places_key for flat in self.flats)))
        self._ranges_key = shared(tuple(self._ranges))
        self._addresses: list[int] = []  # addresses of the parameters that `check_memory` has found correct

    # ---- transitions ------------------------------------------------------------------------------------------------

    def take_buffer(self, buffer: Buffer) -> None:
        """Use `buffer` for the full weights of the next gather."""
        self.buffer, self.overwritten = buffer, set(self._stepped)

    def begin_gather(self, work: Work) -> None:
        """Record that `work` gathers the current shards."""
        self.phase = check_move(self.name, self.phase, Weights.GATHERING)
        self.gathered_version = sum(map(_local_version_of, self.flats))
        self.bound, self._invalid, self._streams = False, False, set()
        self.work = self._latest = work

    def landed(self) -> None:
        """Record that the gather in flight is complete."""
        self.work = None
        self.phase = check_move(self.name, self.phase, Weights.FULL)

    def abandon_capture(self) -> None:
        """Require a gather at the next use, because the capture of a CUDA graph has failed, so no gather of it runs."""
        self.work, self._latest, self._invalid = self.work and FINISHED, None, True

    def use(self) -> None:
        """Begin a use of the full weights. Uses may nest."""
        if self.phase is Weights.IDLE:
            self.phase = check_move(self.name, self.phase, Weights.FULL)
        self.users += 1

    def end_use(self) -> bool:
        """End a use. Return whether no other use is left."""
        self.users -= 1
        return self.users == 0

    def bind(self) -> None:
        """Turn the module's parameters into views of the full weights."""
        self.bound = True
        if self.buffer is not None:
            become(Sharded, zip(self._params, self.buffer.views(self._places_key, self._cut_params), strict=True))
            return
        for flat, full in zip(self.flats, self.fulls(), strict=True):
            become(Sharded, flat.views(full))

    def rest(self) -> None:
        """Make the unit idle. The parameters stay views of the full weights."""
        self.phase = check_move(self.name, self.phase, Weights.IDLE)

    def hide(self) -> None:
        """Make the unit idle, and turn the parameters into placeholders. The buffer keeps the full weights."""
        assert self.buffer is not None
        was_bound = self.bound
        if was_bound:
            self._unbind()
        if self.buffer.escaped():
            self.escapes.append(weakref.ref(self.buffer.bytes.untyped_storage()))
        if was_bound:
            self._outdate_hidden()
        self.phase = check_move(self.name, self.phase, Weights.IDLE)

    def evict(self) -> Buffer:
        """Drop the full weights and return their buffer."""
        assert self.buffer is not None
        buffer, self.buffer = self.buffer, None
        if self.phase is not Weights.SHARDED:  # the phase is SHARDED if an exception prevented the gather
            self.phase = check_move(self.name, self.phase, Weights.SHARDED)
        return buffer

    def expire(self) -> None:
        """Turn the parameters into placeholders, because the shards have changed."""
        self._unbind()
        torch.autograd.graph.increment_version(self._params)  # or a backward would read NaN from saved parameters
        self.phase = check_move(self.name, self.phase, Weights.SHARDED)

    def share(self, stream: torch.cuda.Stream) -> None:
        """Let a stream other than the home stream read the full weights, stream-ordered after their gather."""
        if self._latest is not None:
            self._latest.wait()
            self._streams.add(stream)

    def take_streams(self) -> set[torch.cuda.Stream]:
        """Return the other streams that have read the full weights, and clear the record."""
        streams, self._streams = self._streams, set()
        return streams

    def invalidate(self) -> None:
        """Require a gather at the next use, because the full weights may have been written to."""
        self._invalid = True

    def validate(self) -> None:
        """Mark the full weights as gathered from the current shards, because the same values were written to both."""
        self.gathered_version, self._invalid = self.version(), False

    def touch(self) -> None:
        """Record that `.data` of a full weight was returned to the program."""
        self._touched = True

    def was_touched(self) -> bool:
        """Return whether `touch` was called since the previous call of `was_touched`."""
        touched, self._touched = self._touched, False
        return touched

    def begin_backward(self) -> None:
        """Clear the records of the previous backward's steps."""
        self._stepped.clear()
        self.overwritten.clear()

    def mark_stepped(self, flat: Flat) -> None:
        """Record that the running backward steps a flat."""
        self._stepped.add(flat)

    def reclaimed(self, buffer: Buffer) -> None:
        """Record that tensors outside the library have stopped viewing `buffer`."""
        self.escapes = [each for each in self.escapes if each() is not buffer.bytes.untyped_storage()]

    def _unbind(self) -> None:
        self.bound = False
        for flat in self.flats:
            flat.unbind()

    def _outdate_hidden(self) -> None:
        """Increment versions, so that autograd's in-place check refuses parameters that were saved without our hooks.

        Versions are not incremented while a view of the parameters is alive. Otherwise autograd would consider the view
        modified, and silently derive its gradient from the strides of the placeholder. The view itself is valid,
        because it keeps its buffer alive.
        """
        self.escapes = [each for each in self.escapes if each() is not None]
        if not self.escapes:
            torch.autograd.graph.increment_version(self._params)

    # ---- queries ----------------------------------------------------------------------------------------------------

    @property
    def is_fresh(self) -> bool:
        """Whether the full weights are valid or in flight, at the current version of the shards."""
        is_there = self.replicated or self.phase is not Weights.SHARDED
        return is_there and self.gathered_version == sum(map(_local_version_of, self.flats)) and not self._invalid

    @property
    def trainable(self) -> list[Flat]:
        """Flats that currently have gradients."""
        return [flat for flat in self.flats if flat.trainable_slots]

    def params(self) -> Sequence[nn.Parameter]:
        """Return the module's own parameters."""
        return self._params

    def writes(self) -> int:
        """Return the sum of the full parameters' version counters, which grows with every write that PyTorch counts."""
        with as_they_are():
            return sum(map(_version_of, self._params))

    def version(self) -> int:
        """Return the sum of the shards' version counters, which grows with every change of this rank's shards."""
        return sum(map(_local_version_of, self.flats))

    def fulls(self) -> list[Tensor]:
        """Return the memory of the full weights, one tensor [W*S] per flat."""
        if self.buffer is not None:
            return self.buffer.views(self._ranges_key, self._cut_fulls)
        fulls = [flat.full for flat in self.flats if flat.full is not None]
        assert len(fulls) == len(self.flats), "a unit in use has memory for its full weights"
        return fulls

    def _cut_fulls(self, memory: Tensor) -> list[Tensor]:
        """Return a view of `memory` [nbytes] for each flat, [W*S]."""
        return [memory[start:stop].view(dtype) for start, stop, dtype in self._ranges]

    def _cut_params(self, memory: Tensor) -> list[Tensor]:
        """Return a view of `memory` [nbytes] for each parameter."""
        return [view for dtype, places in self._places for view in views(memory.view(dtype), places)]

    def escaped(self) -> bool:
        """Return whether tensors other than the module's parameters view the full weights. The unit must be in use."""
        assert self.buffer is not None, "a unit in use has a buffer"
        return self.buffer.escaped(len(self._params) if self.bound else 0)

    def check_not_overwritten(self, offset: int) -> None:
        """Check that the full weights at byte `offset` of the buffer were gathered before the backward stepped them.

        Raises:
            RuntimeError: the weights were gathered after the step. The message begins like PyTorch's own.
        """
        for flat, start in zip(self.flats, self._starts, strict=True):
            if flat in self.overwritten and start <= offset < start + flat.full_nbytes:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"AdamW(in_backward=True) has stepped weights of unit {self.name!r} when their gradients were "
                    "complete, but this backward needs them once more, for a use without a gradient such as "
                    "`weight.detach()`. Use AdamW without in_backward"
                )

    def check_memory(self) -> None:
        """Check that the memory of the module's parameters was not replaced.

        Raises:
            LayoutError: the memory of a parameter was replaced.
        """
        with as_they_are():
            addresses = list(map(Tensor.data_ptr, self._params))
        if addresses != self._addresses:
            self._check_addresses(addresses)
            self._addresses = addresses

    def _check_addresses(self, addresses: Sequence[int]) -> None:
        left = iter(addresses)
        for flat, start in zip(self.flats, self._starts, strict=True):
            placeholder = None if flat.placeholder is None else flat.placeholder.data_ptr()
            full = None if flat.full is None else flat.full.data_ptr()
            lent = None if self.buffer is None else self.buffer.bytes.data_ptr() + start
            for slot, address in zip(flat.layout.slots, left, strict=False):
                home = address - slot.start * flat.compute.itemsize
                if address != placeholder and home not in (full, lent) and slot.numel:
                    raise LayoutError(
                        f"the memory of parameter {slot.name!r} was replaced (`.data = ...`, `.half()`, `.to(...)`), "
                        "so it is no longer sharded. Write to parameters inside `gathered()`, and convert the model "
                        "before wrapping it"
                    )
