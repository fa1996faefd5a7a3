"""Layouts: the place of each parameter in a flat buffer, the cuts between shards, and the arenas that hold shards.

A unit's parameters of one kind (dtype, trainable or not) lie one after the other in a full buffer of `W*S` elements,
which is cut into `W` shards, equal in length for weights. A cut may fall inside a parameter:

    W=2   full    | embed............ norm. |. head.......... pad |
          shard   |-------- rank 0 ---------|-------- rank 1 ------|

An arena is one contiguous buffer per (dtype, trainable) with this rank's shards of all units. A step over the whole
model then reads few long buffers, a checkpoint is a sequential write, and optimizer state uses the same layout.

In: names, shapes, dtypes and the world size. Out: `Layout`s and memory. Knows nothing of modules, units or transports.

Legend: `W` ranks, `r` this rank, `S` elements per shard of one unit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod
from operator import mul
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from shardlite.comm import lazy_zeros

ALIGN = 32
"""In elements: every parameter and every shard starts at a multiple of it.

Vector loops of the optimizer step round a tail of up to 16 elements differently, and low-bit formats keep one scale per
32 elements. With cuts at multiples of 32 neither depends on the position of a cut, so no result depends on `W`.

Weights in bf16 therefore start at multiples of 64 bytes. On an H200 the time of matrix products of 2,048 to 8,192 rows
differed by less than 2 % with the weight 0, 64, 128 or 192 bytes after a multiple of 256.
"""

ARENA_ALIGN = 1024
"""In elements: the length of an arena is a multiple of it, the block size of the kernels."""


_CODES_ALIGN = 16
"""Bytes: each rank's codes start at a multiple of it, so that every access can be a wide one."""


def round_up(numel: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `numel`."""
    return -(-numel // multiple) * multiple


Place: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], int]
"""Where a tensor lies in a buffer: its shape, its strides and its first element."""


def views(memory: Tensor, places: Iterable[Place]) -> list[Tensor]:
    """View the `places` of a buffer."""
    offset = memory.storage_offset()
    return [memory.as_strided(shape, stride, offset + start) for shape, stride, start in places]


@dataclass(frozen=True)
class Slot:
    """The place of one parameter in a full buffer: elements `[start, stop)`."""

    name: str
    shape: tuple[int, ...]
    start: int

    @cached_property
    def numel(self) -> int:
        """Number of elements of the whole parameter, without padding."""
        return prod(self.shape)

    @cached_property
    def stop(self) -> int:
        """One past the last element."""
        return self.start + self.numel

    @cached_property
    def stride(self) -> tuple[int, ...]:
        """The strides of the whole parameter in a full buffer, in elements."""
        behind = accumulate(reversed(self.shape[1:]), mul, initial=1)
        return tuple(reversed([*behind])) if self.shape else ()

    def view(self, full: Tensor) -> Tensor:
        """View this parameter's place in a full buffer, in the parameter's shape."""
        return full.as_strided(self.shape, self.stride, full.storage_offset() + self.start)

    @property
    def place(self) -> Place:
        """The place, for `views`."""
        return self.shape, self.stride, self.start

    def within(self, start: int, stop: int) -> tuple[int, int]:
        """Return the part of this parameter that lies in `[start, stop)`, relative to `start`. It may be empty."""
        first = min(max(self.start, start), stop)
        return first - start, max(min(self.stop, stop), first) - start


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The slots of one unit's parameters of one kind in a full buffer, and the cuts between shards."""

    dtype: torch.dtype
    """Dtype of the elements."""

    trainable: bool
    """Whether the parameters required gradients when they were wrapped."""

    slots: tuple[Slot, ...]
    """In registration order, with ascending starts."""

    cuts: tuple[int, ...]
    """`W + 1` offsets in elements, multiples of `grain`: shard `k` is `[cuts[k], cuts[k + 1])`."""

    grain: int = ALIGN
    """Block size in elements that no cut divides. If it is above `ALIGN`, statistics of blocks do not depend on `W`."""

    @property
    def world_size(self) -> int:
        """The number of ranks, `W`."""
        return len(self.cuts) - 1

    @property
    def full_numel(self) -> int:
        """Number of elements of the full buffer: `W*S` if all shards are equal."""
        return self.cuts[-1]

    @cached_property
    def _places(self) -> list[Place]:
        return [slot.place for slot in self.slots]

    def views(self, full: Tensor) -> list[Tensor]:
        """View the place of each slot in a full buffer, in the parameter's shape."""
        return views(full, self._places)

    @cached_property
    def shard_numel(self) -> int:
        """Number of elements of the longest shard, `S`."""
        return max(stop - start for start, stop in pairwise(self.cuts))

    @cached_property
    def uneven_cuts(self) -> tuple[int, ...] | None:
        """The cuts as collectives take them: `None` if all shards are equal, so that calls hash no `W` numbers."""
        return None if self.full_numel == self.world_size * self.shard_numel else self.cuts

    @property
    def codes_nbytes(self) -> int:
        """Bytes that one rank sends in a quantized gather, `R`: codes, their scales, and padding to `_CODES_ALIGN`."""
        return round_up(self.shard_numel + self.shard_numel // ALIGN, _CODES_ALIGN)

    def shard_range(self, rank: int) -> tuple[int, int]:
        """Return the range `(start, stop)` of the full buffer that `rank` owns."""
        return self.cuts[rank], self.cuts[rank + 1]

    @cached_property
    def padding(self) -> tuple[tuple[int, int], ...]:
        """The ranges `[start, stop)` of the full buffer that belong to no parameter."""
        return tuple(self.gaps(range(len(self.slots))))

    def gaps(self, kept: Collection[int]) -> Iterator[tuple[int, int]]:
        """Yield the ranges of the full buffer that belong to none of the slots with indices `kept`."""
        end = 0
        for i, slot in enumerate(self.slots):
            if i in kept:
                if slot.start > end:
                    yield end, slot.start
                end = slot.stop
        if end < self.full_numel:
            yield end, self.full_numel

    def only(self, kept: Collection[int], dtype: torch.dtype) -> Layout:
        """Return a compact layout of the slots with indices `kept`. Every element stays on its rank.

            full    | embed..... norm. |. head...... pad |
            only    | embed...|head...... |                  `norm` has no gradient

        With all slots the layout is unchanged, padding included, so that shards stay equal in length. With a `grain`
        all places stay as they are, and those of other slots become gaps.
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

    def describe(self) -> list[str]:
        """Return one line per parameter. Ranks compare these lines to check that they wrapped the same model."""
        kind = f"{self.dtype}, {'trainable' if self.trainable else 'frozen'}"
        return [f"{slot.name} {list(slot.shape)} ({kind})" for slot in self.slots]


def lay_out(
    parameters: Iterable[tuple[str, Sequence[int]]],
    *,
    dtype: torch.dtype,
    trainable: bool,
    world_size: int,
    grain: int = ALIGN,
    matrix_align: int = ALIGN,
) -> Layout:
    """Place named shapes one after the other, each at a multiple of `ALIGN`, and of `matrix_align` from two dims on.

    Cut the buffer for `world_size` ranks, at multiples of `grain`.
    """
    slots, end = [], 0
    for name, shape in parameters:
        slots.append(Slot(name, tuple(shape), round_up(end, matrix_align) if len(shape) > 1 else end))
        end = round_up(slots[-1].stop, ALIGN)
    shard_numel = round_up(-(-end // world_size), grain)
    cuts = tuple(rank * shard_numel for rank in range(world_size + 1))
    return Layout(dtype=dtype, trainable=trainable, slots=tuple(slots), cuts=cuts, grain=grain)


Zeros: TypeAlias = Callable[[int, torch.dtype], Tensor]
"""Allocate zeroed memory: `(numel, dtype) -> Tensor`."""


def zeros_on(device: torch.device) -> Zeros:
    """Return the allocator of zeroed memory on `device`. On a CPU, pages are allocated on the first write."""
    if device.type != "cpu":
        return lambda numel, dtype: torch.zeros(numel, dtype=dtype, device=device)
    return lambda numel, dtype: lazy_zeros(numel * dtype.itemsize).view(dtype)


def allocate_arenas(kinds: Sequence[tuple[torch.dtype, bool]], lengths: Sequence[int], zeros: Zeros) -> list[Tensor]:
    """Allocate one arena per kind `(dtype, trainable)` and return one zeroed view of each length.

    Nothing is written to the arena: on a CPU, pages are allocated when the weights are copied into it.
    """
    parts: list[Tensor] = [torch.empty(0)] * len(kinds)
    for kind in dict.fromkeys(kinds):
        members = [i for i, each in enumerate(kinds) if each == kind]
        arena = zeros(round_up(sum(lengths[i] for i in members), ARENA_ALIGN), kind[0])
        start = 0
        for i in members:
            parts[i] = arena[start : start + lengths[i]]
            start += lengths[i]
    return parts


def mark_padded(grads: list[Tensor]) -> list[Tensor]:
    """Mark gradients whose padding to a multiple of 32 elements is zero and belongs to them.

    A tensor alone does not show this: the memory behind it may belong to another tensor of the same storage.
    """
    for grad in grads:
        grad.shardlite_padded = True  # type: ignore[attr-defined]
    return grads


def is_padded(grad: Tensor) -> bool:
    """Return whether `mark_padded` was called on `grad`."""
    return getattr(grad, "shardlite_padded", False)


def merge_adjacent(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Merge pairs of 1-D tensors, [n] each, whose first and whose second tensors are adjacent in memory."""
    runs: list[list[tuple[Tensor, Tensor]]] = []
    for pair in sorted(pairs, key=lambda pair: pair[0].data_ptr()):
        if runs and all(_follows(*sides) for sides in zip(runs[-1][-1], pair, strict=True)):
            runs[-1].append(pair)
        else:
            runs.append([pair])
    return [(_as_one([first for first, _ in run]), _as_one([second for _, second in run])) for run in runs]


def _follows(part: Tensor, following: Tensor) -> bool:
    """Return whether `following` starts where `part` ends in the same storage."""
    same = part.untyped_storage().data_ptr() == following.untyped_storage().data_ptr()
    return same and part.storage_offset() + part.numel() == following.storage_offset()


def _as_one(parts: Sequence[Tensor]) -> Tensor:
    return torch.as_strided(parts[0], (sum(part.numel() for part in parts),), (1,), parts[0].storage_offset())


class ShardInfo(NamedTuple):
    """What an optimizer needs to know about a shard except its values. Ordinary parameters have no such record."""

    offset: int
    """Number of elements of the whole parameter that precede the shard."""

    low: Tensor | None
    """The lower part of split weights, of the shard's length. The shard itself is then the upper part."""

    @staticmethod
    def of(param: Tensor) -> ShardInfo:
        """Return the record of `param`, or that of a whole parameter."""
        info: ShardInfo = _infos.get(param, _WHOLE)
        return info

    @staticmethod
    def is_of(param: Tensor) -> bool:
        """Return whether `param` has a record, so is a shard of a wrapped model."""
        return param in _infos

    @staticmethod
    def forget(param: Tensor) -> None:
        """Drop the record of `param`, if it has one: its model is unwrapped."""
        _infos.pop(param, None)

    def mark(self, param: Tensor) -> None:
        """Record `param` as a shard."""
        _infos[param] = self


_WHOLE = ShardInfo(0, None)
_infos: Any = WeakTensorKeyDictionary()  # not an attribute, which copies and files of parameters would have
