"""Count the bytes that a rank sends to other ranks in an optimizer's step.

ShardLite counts its messages itself (`ShardLite.traffic`). Collectives of a process group are counted by their
arguments when PyTorch dispatches them. Reductions are assumed to be rings. Other collectives are assumed to send each
byte once to each rank that needs it.

Legend: `W` ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardlite import ShardLite
from shardlite.lab.compared.trainer import Trainer

_LOCAL = ("wait_tensor", "_wrap_tensor_autograd")
"""Operators of the same namespaces that send no tensors."""


def sent_in_update(trainer: Trainer, rank: int, ranks: int) -> int:
    """Update the parameters, and return the bytes that this rank has sent."""
    before = _traffic(trainer)
    with torch.compiler.set_stance("force_eager"), Sent(rank, ranks) as sent:
        trainer.update()
    return round(sent.nbytes) + _traffic(trainer) - before


def _traffic(trainer: Trainer) -> int:
    """Return the bytes that ShardLite has sent so far."""
    if not isinstance(trainer.model, ShardLite):
        return 0
    units = trainer.model.traffic().values()
    return sum(sent.nbytes for purposes in units for sent in purposes.values())


class Sent(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes that this rank sends through process groups while the mode is on."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes = 0.0
        self._rank, self._ranks = rank, ranks

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count a collective, and run it. A DTensor's operator is divided into operators on local tensors first."""
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        namespace, _, name = func.name().partition("::")
        if namespace in ("c10d", "_c10d_functional") and name not in _LOCAL:
            self.nbytes += self._sent(name, args)
        return func(*args, **(kwargs or {}))

    def _sent(self, name: str, args: Sequence[Any]) -> float:
        """Return the bytes that a call sends. `gather_` and `scatter_` take outputs, inputs, group and root.

        Raises:
            KeyError: The collective is unknown.
        """
        others = self._ranks - 1
        if name in ("gather_", "scatter_"):
            is_root = args[3] == self._rank
            return _nbytes(args[1]) * (not is_root) if name == "gather_" else _nbytes(args[0]) * others * is_root
        share: dict[str, Callable[[], float]] = {
            "alltoall_": lambda: _nbytes(args[1]) * others / self._ranks,
            "all_to_all_single": lambda: _nbytes(args[0]) * others / self._ranks,
            "all_gather_into_tensor": lambda: _nbytes(args[0]) * others,
            "all_reduce": lambda: _nbytes(args[0]) * 2 * others / self._ranks,
            "reduce_scatter_tensor": lambda: _nbytes(args[0]) * others / self._ranks,
        }
        return share[name]()


def _nbytes(tensors: Any) -> int:
    return sum(each.nbytes for each in tree_leaves(tensors) if isinstance(each, Tensor))
