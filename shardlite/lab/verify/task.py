"""The training task: a model and its batches, made with the same random numbers each time.

Legend: `W` ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from shardlite.config import Precision
from shardlite.wrapping import UnitPolicy

Batch: TypeAlias = tuple[Any, ...]
"""The positional arguments of a model."""

SAME_LOSS = 2.0**-30
"""Bound on the relative difference of two fp64 losses of the same batch. Losses of different batches differ more."""


@dataclass(frozen=True)
class Task:
    """The training task, equal for every system."""

    make_model: Callable[[], nn.Module]
    make_batch: Callable[[int, int], Batch]
    """Function of step and rank that returns the arguments of the model. The model returns the mean loss of a batch."""

    steps: int
    lr: float
    weight_decay: float
    units: UnitPolicy
    precision: Precision
    """Precision of ShardLite and the replicas. PyTorch's data parallelism and the one process ignore it."""

    seed: int
    group: dist.ProcessGroup | None

    @property
    def rank(self) -> int:
        """Rank of this process in the group."""
        return dist.get_rank(self.group)

    @property
    def world_size(self) -> int:
        """Number of ranks, `W`."""
        return dist.get_world_size(self.group)

    @property
    def parts(self) -> int:
        """Number of parts of a global batch with order="tree"."""
        return 2 * self.world_size

    @property
    def casts(self) -> bool:
        """Whether weights, inputs or outputs are cast. If so, plain PyTorch computes different numbers."""
        return (self.precision.compute, self.precision.output) != (None, None)

    def model(self) -> nn.Module:
        """Make the model, with the same random numbers each time."""
        torch.manual_seed(self.seed)
        return self.make_model()

    def batch(self, step: int, rank: int) -> Batch:
        """Make a rank's batch. The same seed determines random numbers that are drawn afterwards, as in dropout."""
        torch.manual_seed(self.seed + 1 + step * self.world_size + rank)
        return self.make_batch(step, rank)


def mean_loss(task: Task, module: Callable[..., Any], step: int, ranks: Sequence[int]) -> Tensor:
    """Return the mean of the losses of `ranks`, []. Each loss is computed with the random numbers of its rank."""
    return torch.stack([module(*task.batch(step, rank)) for rank in ranks]).sum() / len(ranks)


def joined_batch(batches: Sequence[Batch]) -> Batch | None:
    """Concatenate the tensors of all batches along their first dimension.

    Return `None` if some tensors cannot be concatenated, or if other arguments differ.
    """

    def join(first: Any, *others: Any) -> Any:
        column = [first, *others]
        if all(isinstance(each, Tensor) for each in column):
            if all(each.dim() > 0 and (each.shape, each.dtype) == (first.shape, first.dtype) for each in column):
                return torch.cat(column)
        elif not any(isinstance(each, Tensor) or each != first for each in column):
            return first
        raise ValueError("arguments cannot be joined")

    try:
        whole: Batch = tree_map(join, *batches)
    except ValueError:  # also raised by `tree_map` if the structures of the batches differ
        return None
    return whole


def joins(task: Task, loss: Tensor) -> bool:
    """Return whether, in fp64, the joined batch of the first step has the loss `loss`, the mean over the ranks.

    The losses differ if tensors lack a batch dimension, if ranks average over different numbers of items, or if the
    model draws random numbers.
    """
    batch = joined_batch([task.batch(0, rank) for rank in range(task.world_size)])
    if batch is None:
        return False
    try:
        joined = doubled(task.model())(*batch).detach()
    except Exception:  # the model may raise any error on a batch of a different size
        return False
    return bool((joined - loss).abs() <= SAME_LOSS * loss.abs())


def doubled(module: nn.Module) -> nn.Module:
    """Convert a module, and the floating-point tensors of all its future inputs, to fp64."""

    def double(leaf: Any) -> Any:
        return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    module.register_forward_pre_hook(lambda _, batch: tree_map(double, batch))
    return module.double()
