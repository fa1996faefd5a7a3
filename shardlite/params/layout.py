"""Where each parameter lies in a flat buffer, and which part of it is this rank's. Integers and names only.

A unit's parameters of one kind (dtype, trainable or not) lie one after the other in a full buffer of `W*S` elements,
which is cut into `W` shards, equal in length for weights. Cuts fall where they fall, also inside a parameter:

    W=2   full    | embed............ norm. |. head.......... pad |
          shard   |-------- rank 0 ---------|-------- rank 1 ------|

Legend: `W` ranks, `r` this rank, `S` elements per shard.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import prod

import torch

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

    def only(self, kept: Collection[int], dtype: torch.dtype) -> "Layout":
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
