"""Layouts: the place of each parameter in a flat buffer, the cuts between shards, and the arenas that hold shards.

A unit's parameters of one kind (dtype, trainable or not) lie one after the other in a full buffer of `W*S` elements.
The buffer is cut into `W` shards, which have equal lengths for weights. A cut may fall inside a parameter:

    W=2   full    | embed............ norm. |. head.......... pad |
          shard   |-------- rank 0 ---------|-------- rank 1 ------|

An arena is one contiguous buffer per (dtype, trainable) with this rank's shards of all units. So an optimizer's
step over the whole model reads few long buffers, and a checkpoint is a sequential write. The optimizer state uses the
same layout.

In: names, shapes, dtypes and the world size. Out: `Layout`s and memory. This file does not use modules, units or
transports.

Legend: `W` ranks, `S` elements per shard of one unit.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod
from operator import mul
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from shardlite.comm.transport.shared_memory.heap import lazy_zeros
from shardlite.params.host_states import HostStates

ALIGN = 32
"""Alignment of parameters and shards, in elements.

The vector loops of the optimizer's step round a tail of up to 16 elements differently, and low-bit formats keep one
scale per 32 elements. If all cuts are multiples of 32, neither tails nor scales depend on the places of the cuts, so no
result depends on `W`.

Weights in bf16 therefore start at multiples of 64 bytes. On an H200, matrix products of 2,048 to 8,192 rows took the
same time within 2 % when the weight started 0, 64, 128 or 192 bytes after a multiple of 256 bytes.
"""

ARENA_ALIGN = 1024
"""The length of an arena is a multiple of this number of elements, the block size of the kernels."""


_CODES_ALIGN = 16
"""Alignment of each rank's 8-bit codes, in bytes. This alignment allows vectorized memory accesses."""


def round_up(numel: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `numel`."""
    return -(-numel // multiple) * multiple


Place: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], int]
"""Place of a tensor in a buffer: shape, strides and first element."""


def views(memory: Tensor, places: Iterable[Place]) -> list[Tensor]:
    """Return views of a buffer, one per place."""
    offset = memory.storage_offset()
    return [memory.as_strided(shape, stride, offset + start) for shape, stride, start in places]


class _Key:
    """An object that stands for facts, and that a weak dictionary may hold."""


_keys: WeakValueDictionary[Hashable, _Key] = WeakValueDictionary()


def shared(facts: Hashable) -> object:
    """Return an object that stands for `facts`: the same for equal facts. Unlike `facts`, it is hashed at once."""
    return _keys.setdefault(facts, _Key())


def as_real(tensor: Tensor) -> Tensor:
    """Return `tensor` or, if it is complex, its real and imaginary parts, with a dimension of 2 at the end."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


@dataclass(frozen=True)
class Slot:
    """The place of one parameter in a full buffer: elements `[start, stop)`."""

    name: str
    shape: tuple[int, ...]
    start: int

    @cached_property
    def numel(self) -> int:
        """Number of elements of the full parameter, without padding."""
        return prod(self.shape)

    @cached_property
    def stop(self) -> int:
        """Index after the last element."""
        return self.start + self.numel

    @cached_property
    def stride(self) -> tuple[int, ...]:
        """Strides of the full parameter in a full buffer, in elements."""
        behind = accumulate(reversed(self.shape[1:]), mul, initial=1)
        return tuple(reversed([*behind])) if self.shape else ()

    def within(self, start: int, stop: int) -> tuple[int, int]:
        """Return the range of this parameter's elements that lie in `[start, stop)`, relative to `start`.

        The range may be empty.
        """
        first = min(max(self.start, start), stop)
        return first - start, max(min(self.stop, stop), first) - start

    def cut(self, cuts: Sequence[int]) -> list[int]:
        """Return the cuts between ranks as indices of elements of this parameter."""
        return [min(max(cut - self.start, 0), self.numel) for cut in cuts]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The slots of one unit's parameters of one kind in a full buffer, and the cuts between shards."""

    dtype: torch.dtype
    """Dtype of the elements."""

    trainable: bool
    """Whether the parameters required gradients when they were wrapped."""

    slots: tuple[Slot, ...]
    """One slot per parameter in registration order, with ascending starts."""

    cuts: tuple[int, ...]
    """`W + 1` offsets in elements, multiples of `grain`. Shard `k` is `[cuts[k], cuts[k + 1])`."""

    grain: int = ALIGN
    """Number of elements in a block that no cut divides. If this number is above `ALIGN`, the statistics of a
    block do not depend on `W`."""

    @property
    def world_size(self) -> int:
        """Number of ranks, `W`."""
        return len(self.cuts) - 1

    @property
    def full_numel(self) -> int:
        """Number of elements of the full buffer: `W*S` if all shards are equal."""
        return self.cuts[-1]

    @cached_property
    def _places(self) -> list[Place]:
        return [(slot.shape, slot.stride, slot.start) for slot in self.slots]

    @cached_property
    def places_key(self) -> object:
        """Key that layouts with equal places share, whatever the names of their parameters."""
        return shared((self.dtype, self.cuts, tuple(self._places)))

    def views(self, full: Tensor) -> list[Tensor]:
        """Return a view of a full buffer for each slot, in the parameter's shape."""
        return views(full, self._places)

    @cached_property
    def real(self) -> Layout:
        """Layout of the same memory as real numbers. A complex parameter is two of them, as in PyTorch's optimizers."""
        if not self.dtype.is_complex:
            return self
        slots = tuple(Slot(slot.name, (*slot.shape, 2), 2 * slot.start) for slot in self.slots)
        cuts = tuple(2 * cut for cut in self.cuts)
        return replace(self, dtype=self.dtype.to_real(), slots=slots, cuts=cuts)

    @cached_property
    def shard_numel(self) -> int:
        """Number of elements of the longest shard, `S`."""
        return max(stop - start for start, stop in pairwise(self.cuts))

    @cached_property
    def uneven_cuts(self) -> tuple[int, ...] | None:
        """The argument `cuts` of collectives. `None` if all shards are equal, which avoids hashing `W` numbers."""
        return None if self.full_numel == self.world_size * self.shard_numel else self.cuts

    @property
    def codes_nbytes(self) -> int:
        """Bytes that one rank sends in a quantized gather, `R`: codes, scales, and padding to `_CODES_ALIGN`."""
        return round_up(self.shard_numel + self.shard_numel // ALIGN, _CODES_ALIGN)

    def shard_range(self, rank: int) -> tuple[int, int]:
        """Return the range `[start, stop)` of the full buffer that `rank` owns."""
        return self.cuts[rank], self.cuts[rank + 1]

    @cached_property
    def padding(self) -> tuple[tuple[int, int], ...]:
        """The ranges `[start, stop)` of the full buffer that belong to no parameter."""
        return tuple(self.gaps(range(len(self.slots))))

    def gaps(self, kept: Collection[int]) -> Iterator[tuple[int, int]]:
        """Yield the ranges of the full buffer that lie outside of the slots whose indices are in `kept`."""
        end = 0
        for i, slot in enumerate(self.slots):
            if i in kept:
                if slot.start > end:
                    yield end, slot.start
                end = slot.stop
        if end < self.full_numel:
            yield end, self.full_numel

    def only(self, kept: Collection[int], dtype: torch.dtype) -> Layout:
        """Return a compact layout of the slots whose indices are in `kept`. Every element stays on its rank.

            full    | embed..... norm. |. head...... pad |
            only    | embed...|head...... |                  `norm` has no gradient

        If `kept` contains all slots, the padding stays too, so that shards stay equal in length. If `grain` is above
        `ALIGN`, all slots in `kept` stay in place, and the other slots become gaps.
        """
        if len(kept) == len(self.slots) or self.grain > ALIGN:
            return replace(self, dtype=dtype, slots=tuple(self.slots[i] for i in sorted(kept)))
        slots, cuts, end = [], [0] * len(self.cuts), 0
        for i in sorted(kept):
            slot, length = self.slots[i], round_up(self.slots[i].numel, ALIGN)
            slots.append(replace(slot, start=end))
            end += length
            for k, cut in enumerate(self.cuts):
                cuts[k] += min(max(cut - slot.start, 0), length)
        return replace(self, dtype=dtype, slots=tuple(slots), cuts=tuple(cuts))


def lay_out(
    parameters: Iterable[tuple[str, Sequence[int]]],
    *,
    dtype: torch.dtype,
    trainable: bool,
    world_size: int,
    grain: int = ALIGN,
    matrix_align: int = ALIGN,
) -> Layout:
    """Lay out tensors one after the other, and cut the buffer for `world_size` ranks at multiples of `grain`.

    The start of each tensor is a multiple of `ALIGN`. For tensors with two or more dimensions, the start is a multiple
    of `matrix_align`.
    """
    slots, end = [], 0
    for name, shape in parameters:
        slots.append(Slot(name, tuple(shape), round_up(end, matrix_align) if len(shape) > 1 else end))
        end = round_up(slots[-1].stop, ALIGN)
    shard_numel = round_up(-(-end // world_size), grain)
    cuts = tuple(rank * shard_numel for rank in range(world_size + 1))
    return Layout(dtype=dtype, trainable=trainable, slots=tuple(slots), cuts=cuts, grain=grain)


def allocate_arenas(
    kinds: Sequence[tuple[torch.dtype, bool]], lengths: Sequence[int], device: torch.device
) -> list[Tensor]:
    """Allocate one arena per distinct kind `(dtype, trainable)`. Return one zeroed view of an arena per length.

    On a CPU, this function writes nothing to an arena, so pages are allocated only when weights are copied into them.
    """
    parts: list[Tensor] = [torch.empty(0)] * len(kinds)
    for dtype, trainable in dict.fromkeys(kinds):
        members = [i for i, kind in enumerate(kinds) if kind == (dtype, trainable)]
        numel = round_up(sum(lengths[i] for i in members), ARENA_ALIGN)
        if device.type == "cpu":
            arena = lazy_zeros(numel * dtype.itemsize).view(dtype)
        else:
            arena = torch.zeros(numel, dtype=dtype, device=device)
        starts = accumulate((lengths[i] for i in members), initial=0)
        for i, start in zip(members, starts, strict=False):
            parts[i] = arena[start : start + lengths[i]]
    return parts


PADDED = "shardlite_padded"
"""Name of the attribute that marks gradients as padded."""


def mark_padded(grads: list[Tensor]) -> list[Tensor]:
    """Mark gradients as padded: in memory, zeros follow each gradient up to a multiple of 32 elements.

    Without the mark, an optimizer must assume that the memory after a gradient belongs to another tensor.
    """
    for grad in grads:
        setattr(grad, PADDED, True)
    return grads


def is_padded(grad: Tensor) -> bool:
    """Return whether `mark_padded` was called on `grad`."""
    return hasattr(grad, PADDED)


class ShardInfo(NamedTuple):
    """Facts that an optimizer needs about a shard besides its values. Ordinary parameters have no such record."""

    offset: int = 0
    """Number of elements of the full parameter that precede the shard."""

    low: Tensor | None = None
    """Lower part of split weights, as long as the shard, which is the upper part. `None` if weights are not split."""

    states: HostStates | None = None
    """Host memory for the states of the shard's unit, or `None` if the states stay on the device."""

    @staticmethod
    def of(param: Tensor) -> ShardInfo:
        """Return the record of `param`. If `param` has no record, return that of a full parameter."""
        info: ShardInfo = _infos.get(param, ShardInfo())
        return info

    @staticmethod
    def is_of(param: Tensor) -> bool:
        """Return whether `param` is a shard of a wrapped model."""
        return param in _infos

    @staticmethod
    def forget(param: Tensor) -> None:
        """Drop the record of `param`, if there is one. Called when the parameter's model is unwrapped."""
        _infos.pop(param, None)

    def mark(self, param: Tensor) -> None:
        """Record `param` as a shard."""
        _infos[param] = self


_infos: Any = WeakTensorKeyDictionary()  # attributes instead would be copied and pickled with parameters
