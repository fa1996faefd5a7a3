"""Arenas: this rank's shards of all units, in one contiguous buffer per (dtype, trainable).

A step over the whole model is then a walk over few long buffers, a checkpoint a sequential write, and the optimizer
lays its state out in the same way.

Legend: `W` ranks, `S` elements per shard of one unit.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shardlite.layout import ARENA_ALIGN, round_up


def carve(kinds: Sequence[tuple[torch.dtype, bool]], lengths: Sequence[int], device: torch.device) -> list[Tensor]:
    """Allocate one arena for each kind, (dtype, trainable), and return the parts of these lengths, zeroed."""
    parts: list[Tensor] = [torch.empty(0)] * len(kinds)
    for kind in dict.fromkeys(kinds):
        members = [i for i, each in enumerate(kinds) if each == kind]
        arena = torch.zeros(round_up(sum(lengths[i] for i in members), ARENA_ALIGN), dtype=kind[0], device=device)
        start = 0
        for i in members:
            parts[i] = arena[start : start + lengths[i]]
            start += lengths[i]
    return parts
