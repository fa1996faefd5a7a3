"""A model and the batch of a rank, of which a step is predicted."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from shardlite.wrapping import partition_module


class SourceError(ValueError):
    """The model does not exist, or it cannot be created or called with fake tensors."""


@dataclass(frozen=True)
class Source:
    """A model and the batch of a rank."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[], Any]
    """Function that returns the arguments of the model: a tuple, or a mapping of keywords."""

    words: str
    """Description of the batch, for tables."""

    device = torch.device("cpu")

    def model(self) -> nn.Module:
        """Create the model."""
        return self.make()

    def units(self, model: nn.Module) -> list[nn.Module]:
        """Return the units that ShardLite finds in a model: inner modules first, without the root."""
        return [*reversed(units_of(model).values())]

    def parameters(self) -> int:
        """Return the number of elements in all parameters."""
        try:
            with torch.device("meta"):
                model = self.make()
        except (NotImplementedError, RuntimeError):  # the constructor reads values of meta tensors, which have none
            model = self.make()
        return sum(param.numel() for param in model.parameters())

    def rows(self) -> int:
        """Return the number of rows of the batch: the first dimension of its first tensor.

        Raises:
            SourceError: the batch has no tensor with a dimension.
        """
        found = next((leaf for leaf in tree_leaves(self.batch()) if isinstance(leaf, Tensor) and leaf.ndim), None)
        if found is None or len(found) == 0:
            raise SourceError(f"the batch of {self.name} has no rows: its first tensor must have them as dimension 0")
        return len(found)

    def loss(self, module: nn.Module, dtype: torch.dtype | None, rows: int | None = None) -> Callable[[], Tensor]:
        """Return a function that calls `module` and returns the loss []. Floating-point inputs are cast to `dtype`.

        The function holds the batch, as a program holds its batch until the next step. The batch has the given number
        of rows: each tensor with as many rows as the first tensor of `batch()` is replaced by one of that many `rows`.
        """
        given = self.batch()
        if rows is not None:
            given = tree_map(partial(_with_rows, most=self.rows(), rows=rows), given)
        if dtype is not None:
            given = tree_map(lambda leaf: leaf.to(dtype) if _is_float(leaf) else leaf, given)

        def call() -> Tensor:
            outputs = module(**given) if isinstance(given, Mapping) else module(*given)
            return _loss_of(outputs, self.name)

        return call


def units_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules whose weights ShardLite gathers together, by name: outer modules first, without the root."""
    plans = partition_module(model, None)
    return {plan.name: plan.module for plan in plans if plan.params and plan.module is not model}


def _with_rows(leaf: Any, most: int, rows: int) -> Any:
    """Return `rows` rows like those of a tensor of `most` rows. Other values are returned as they are."""
    is_rows = isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) == most
    return leaf.new_zeros(rows, *leaf.shape[1:]) if is_rows else leaf


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _loss_of(outputs: Any, name: str) -> Tensor:
    """Return the loss: the output itself, the `loss` of the output, or the sum of its floating-point tensors."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    floats = [leaf for leaf in tree_leaves(outputs) if _is_float(leaf)]
    if not floats:
        raise SourceError(
            f"--model {name} returned neither a loss nor a floating-point tensor, so there is no backward"
        )
    return floats[0] if floats[0].ndim == 0 else sum((leaf.float().sum() for leaf in floats), torch.zeros(()))
