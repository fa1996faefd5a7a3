"""Arenas: this rank's shards of all units, in one contiguous buffer per (dtype, trainable).

A step over the whole model is then a walk over few long buffers, a checkpoint a sequential write, and the optimizer
lays its state out in the same way.

Legend: `W` ranks, `S` elements per shard of one unit.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shardlite.layout import ARENA_ALIGN, Layout, round_up


def carve(layouts: Sequence[Layout], *, sharded: bool, device: torch.device) -> list[Tensor]:
    """Allocate the arenas and return each layout's part of them, zeroed: [S], or [W*S] where nothing is sharded."""
    parts: list[Tensor | None] = [None] * len(layouts)
    for kind in dict.fromkeys((layout.dtype, layout.trainable) for layout in layouts):
        members = [i for i, layout in enumerate(layouts) if (layout.dtype, layout.trainable) == kind]
        lengths = [layouts[i].shard_numel if sharded else layouts[i].full_numel for i in members]
        arena = torch.zeros(round_up(sum(lengths), ARENA_ALIGN), dtype=kind[0], device=device)
        start = 0
        for i, length in zip(members, lengths, strict=True):
            parts[i] = arena[start : start + length]
            start += length
    return [part for part in parts if part is not None]
