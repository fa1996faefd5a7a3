"""Where each parameter lies in a flat buffer, which part of it is this rank's, and the arenas that hold these parts.

A unit's parameters of one kind (dtype, trainable or not) lie one after the other in a full buffer of `W*S` elements,
which is cut into `W` shards, equal in length for weights. Cuts fall where they fall, also inside a parameter:

    W=2   full    | embed............ norm. |. head.......... pad |
          shard   |-------- rank 0 ---------|-------- rank 1 ------|

An arena is one contiguous buffer per (dtype, trainable) with this rank's shards of all units. A step over the whole
model then walks over few long buffers, a checkpoint is a sequential write, and the optimizer lays its state out in the
same way.

Legend: `W` ranks, `r` this rank, `S` elements per shard of one unit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from shardlite.comm import lazy_zeros

ALIGN = 32
"""Elements: every parameter and every shard starts at a multiple of it.

Vector loops of the optimizer step treat a tail of up to 16 elements with another rounding, and low-bit formats keep one
scale per 32. With cuts at multiples of 32 neither depends on where the cut is, so no result depends on `W`.
"""

ARENA_ALIGN = 1024
"""Elements: the length of an arena is a multiple of it, the block of our kernels."""


def round_up(numel: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `numel`."""
    return -(-numel // multiple) * multiple


@dataclass(frozen=True)
class Slot:
    """The place of one parameter in a full buffer: elements `[start, stop)`."""

    name: str
    shape: tuple[int, ...]
    start: int

    @cached_property
    def numel(self) -> int:
        """Elements of the whole parameter, without padding."""
        return prod(self.shape)

    @cached_property
    def stop(self) -> int:
        """One past the last element."""
        return self.start + self.numel

    def within(self, start: int, stop: int) -> tuple[int, int]:
        """Return the part of this parameter that lies in `[start, stop)`, relative to `start`; it may be empty."""
        first = min(max(self.start, start), stop)
        return first - start, max(min(self.stop, stop), first) - start


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the parameters of one kind in one unit share a full buffer, and where it is cut into shards."""

    dtype: torch.dtype
    """Of the elements."""

    trainable: bool
    """Whether the parameters had gradients when they were wrapped."""

    slots: tuple[Slot, ...]
    """In the order of registration, at ascending starts."""

    cuts: tuple[int, ...]
    """`W + 1` elements: shard `k` is `[cuts[k], cuts[k + 1])`. Multiples of `ALIGN`."""

    @property
    def world_size(self) -> int:
        """`W`."""
        return len(self.cuts) - 1

    @property
    def full_numel(self) -> int:
        """Elements of the full buffer: `W*S` where all shards are equal."""
        return self.cuts[-1]

    @cached_property
    def shard_numel(self) -> int:
        """`S`, the elements of the longest shard."""
        return max(stop - start for start, stop in pairwise(self.cuts))

    def shard_range(self, rank: int) -> tuple[int, int]:
        """Return which elements of the full buffer are `rank`'s."""
        return self.cuts[rank], self.cuts[rank + 1]

    def only(self, kept: Collection[int], dtype: torch.dtype) -> Layout:
        """Return the layout of the slots with these indices moved together, with the same elements on each rank.

            full  | embed..... norm. |. head...... pad |
            only  | embed...|head...... |                  `norm` has no gradient

        With all slots it is this one, padding included, so that shards stay equal in length.
        """
        if len(kept) == len(self.slots):
            return replace(self, dtype=dtype)
        slots, cuts, end = [], [0] * len(self.cuts), 0
        for i in sorted(kept):
            slot, length = self.slots[i], round_up(self.slots[i].numel, ALIGN)
            slots.append(replace(slot, start=end))
            end += length
            for k, cut in enumerate(self.cuts):
                cuts[k] += min(max(cut - slot.start, 0), length)
        return replace(self, dtype=dtype, slots=tuple(slots), cuts=tuple(cuts))

    def describe(self) -> list[str]:
        """Return one line per parameter, by which ranks compare what they have wrapped."""
        kind = f"{self.dtype}, {'trainable' if self.trainable else 'frozen'}"
        return [f"{slot.name} {list(slot.shape)} ({kind})" for slot in self.slots]


def lay_out(
    parameters: Iterable[tuple[str, Sequence[int]]], *, dtype: torch.dtype, trainable: bool, world_size: int
) -> Layout:
    """Lay out named shapes one after the other, each at a multiple of `ALIGN`, and cut the whole in `world_size`."""
    slots, end = [], 0
    for name, shape in parameters:
        slots.append(Slot(name, tuple(shape), end))
        end = round_up(slots[-1].stop, ALIGN)
    shard_numel = round_up(-(-end // world_size), ALIGN)
    cuts = tuple(rank * shard_numel for rank in range(world_size + 1))
    return Layout(dtype=dtype, trainable=trainable, slots=tuple(slots), cuts=cuts)


Empty: TypeAlias = Callable[[int, torch.dtype], Tensor]
"""Makes memory: so many elements of a dtype, uninitialised."""


Zeros: TypeAlias = Callable[[int, torch.dtype], Tensor]
"""The same, zeroed. On a CPU it takes pages only as it is written to."""


def zeros_on(device: torch.device) -> Zeros:
    """Return what makes zeroed memory on a device."""
    if device.type != "cpu":
        return lambda numel, dtype: torch.zeros(numel, dtype=dtype, device=device)
    return lambda numel, dtype: lazy_zeros(numel * dtype.itemsize).view(dtype)


def carve(kinds: Sequence[tuple[torch.dtype, bool]], lengths: Sequence[int], zeros: Zeros) -> list[Tensor]:
    """Make one arena for each kind, (dtype, trainable), and return the parts of these lengths, zeroed.

    Nothing is written to them, so that an arena takes memory as the weights move in.
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


def mark_padded(grad: Tensor) -> Tensor:
    """Say of a gradient that lies like its parameter that what pads it to a multiple of 32 elements is zero, and ours.

    Nothing about a tensor tells: what lies behind it in its storage may as well belong to somebody else.
    """
    grad.shardlite_padded = True  # type: ignore[attr-defined]
    return grad


def is_padded(grad: Tensor) -> bool:
    """Whether that was said."""
    return getattr(grad, "shardlite_padded", False)


def joined(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Return the memory of these pairs, [n] each, as few pairs: those that follow each other on both sides are one."""
    runs: list[list[tuple[Tensor, Tensor]]] = []
    for pair in sorted(pairs, key=lambda pair: pair[0].data_ptr()):
        if runs and all(_follows(*sides) for sides in zip(runs[-1][-1], pair, strict=True)):
            runs[-1].append(pair)
        else:
            runs.append([pair])
    return [(_as_one([first for first, _ in run]), _as_one([second for _, second in run])) for run in runs]


def _follows(part: Tensor, following: Tensor) -> bool:
    """Whether one part of an arena ends where the other starts."""
    same = part.untyped_storage().data_ptr() == following.untyped_storage().data_ptr()
    return same and part.storage_offset() + part.numel() == following.storage_offset()


def _as_one(parts: Sequence[Tensor]) -> Tensor:
    return torch.as_strided(parts[0], (sum(part.numel() for part in parts),), (1,), parts[0].storage_offset())


class ShardInfo(NamedTuple):
    """What an optimizer has to know of a shard beside its values. Other parameters have none."""

    offset: int
    """Elements of the whole parameter that lie before the shard."""

    low: Tensor | None
    """The lower part of its weights, of the same length, where they are split; the shard is the upper part then."""

    @staticmethod
    def of(param: Tensor) -> ShardInfo:
        """Return that of a parameter."""
        part: ShardInfo = getattr(param, "shardlite_part", _WHOLE)
        return part

    @staticmethod
    def is_of(param: Tensor) -> bool:
        """Whether a parameter has one, and so is a shard."""
        return ShardInfo.of(param) is not _WHOLE

    def mark(self, param: Tensor) -> None:
        """Let this be that of a parameter."""
        param.shardlite_part = self  # type: ignore[attr-defined]


_WHOLE = ShardInfo(0, None)
