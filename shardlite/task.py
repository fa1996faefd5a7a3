"""What is trained: a model and its batches, with the same random numbers however often they are made.

Legend: `W` ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from shardlite.partition import UnitPolicy

Batch: TypeAlias = tuple[Any, ...]
"""The arguments of a model."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained, the same in every system."""

    make_model: Callable[[], nn.Module]
    make_batch: Callable[[int, int], Batch]
    """From step and rank to the arguments of the model, which returns the mean loss over them."""

    steps: int
    lr: float
    weight_decay: float
    units: UnitPolicy
    seed: int
    group: dist.ProcessGroup | None

    @property
    def rank(self) -> int:
        """Of this process in the group."""
        return dist.get_rank(self.group)

    @property
    def world_size(self) -> int:
        """`W`."""
        return dist.get_world_size(self.group)

    def model(self) -> nn.Module:
        """Make the model, from the same random numbers each time."""
        torch.manual_seed(self.seed)
        return self.make_model()

    def batch(self, step: int, rank: int) -> Batch:
        """Make a rank's batch. Random numbers that are drawn afterwards are the same each time, too."""
        torch.manual_seed(self.seed + 1 + step * self.world_size + rank)
        return self.make_batch(step, rank)


def joined_batch(batches: Sequence[Batch]) -> Batch | None:
    """Join like tensors along their first dimension; `None` if something is neither that nor the same on all ranks."""
    flattened = [tree_flatten(batch) for batch in batches]
    leaves = [_joined(column) for column in zip(*(leaves for leaves, _ in flattened), strict=False)]
    structures = [structure for _, structure in flattened]
    if any(leaf is None for leaf in leaves) or any(each != structures[0] for each in structures):
        return None
    whole: Batch = tree_unflatten(leaves, structures[0])
    return whole


def doubled(batch: Batch) -> Batch:
    """Return the batch with all floating-point tensors in fp64."""

    def double(leaf: Any) -> Any:
        return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    converted: Batch = tree_map(double, batch)
    return converted


def _joined(column: Sequence[Any]) -> Any:
    """Join one argument of all ranks, or return `None`."""
    first = column[0]
    if all(isinstance(each, Tensor) for each in column):
        alike = all(each.dim() > 0 and each.shape == first.shape for each in column)
        return torch.cat(list(column)) if alike else None
    same = all(type(each) is type(first) and not isinstance(each, Tensor) and each == first for each in column)
    return first if same else None
