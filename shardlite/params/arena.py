"""Arenas: this rank's shards of all units, in one contiguous buffer per (dtype, trainable).

A step over the whole model is then a walk over few long buffers, a checkpoint a sequential write, and the optimizer
lays its state out in the same way.

Legend: `W` ranks, `S` elements per shard of one unit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from shardlite.comm import lazy_zeros
from shardlite.params.layout import ARENA_ALIGN, round_up

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
