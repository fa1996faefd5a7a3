"""Optimizers of the demo: ShardLite's AdamW, PyTorch's on shards, and other classes on whole parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardlite import AdamW, WholeParameters
from shardlite.cli import imported
from shardlite.lab.train.settings import OPTIMIZERS, Settings

_BETAS = (0.9, 0.99)
_DECAY = 0.1

# Updates as large as those of AdamW, so that the learning rates of both are of the same order.
_MUON: dict[str, Any] = {"momentum": 0.95, "weight_decay": _DECAY, "adjust_lr_fn": "match_rms_adamw"}


def make_optimizer(model: nn.Module, settings: Settings) -> Optimizer:
    """Return the optimizer of a run. AdamW and Muon apply weight decay to matrices. Others have their defaults."""
    name, lr = settings.optimizer, settings.lr
    if name == "muon":
        return _step_whole(model, torch.optim.Muon, settings, settings.adamw_lr or lr, **_MUON)
    if name not in OPTIMIZERS:
        return _step_whole(model, optimizer_class(name), settings, settings.adamw_lr)
    if name not in ("adamw", "torch.AdamW"):
        made: Optimizer = getattr(torch.optim, name.removeprefix("torch."))(model.parameters(), lr=lr)
        return made
    matrices = {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": _DECAY}
    vectors = {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0}
    if name == "torch.AdamW":
        return torch.optim.AdamW([matrices, vectors], lr=lr, betas=_BETAS)
    options: dict[str, Any] = {"state": settings.state, "in_backward": settings.in_backward}
    return AdamW([matrices, vectors], lr=lr, betas=_BETAS, **options)


def optimizer_class(path: str) -> type[Optimizer]:
    """Return the class with an import path.

    Raises:
        ValueError: the class cannot be imported, or is not an optimizer.
    """
    module, _, name = path.rpartition(".")
    try:
        found = imported(module, name)
    except Exception as wrong:  # the import runs code that may raise anything
        raise ValueError(
            f"optimizer {path} is neither a name ({', '.join(OPTIMIZERS)}) nor the import path of a class such as "
            f"torch.optim.Adafactor: {type(wrong).__name__}: {wrong}"
        ) from wrong
    if not (isinstance(found, type) and issubclass(found, Optimizer)):
        raise ValueError(f"optimizer {path} must be a subclass of torch.optim.Optimizer, got {found!r}")
    return found


def _step_whole(
    model: nn.Module, kind: type[Optimizer], settings: Settings, adamw_lr: float | None, **options: Any
) -> Optimizer:
    """Return an optimizer that steps all parameters whole or, if AdamW has a rate, the matrices of the blocks."""
    named = list(model.named_parameters())
    if adamw_lr is None:
        return WholeParameters(named, kind, lr=settings.lr, **options)
    matrices = {"params": [each for each in named if each[1].ndim >= 2]}
    vectors = {"params": [each for each in named if each[1].ndim < 2], "elementwise": {"weight_decay": 0.0}}
    adamw = {"lr": adamw_lr, "betas": _BETAS, "weight_decay": _DECAY, "state": settings.state}
    return WholeParameters([matrices, vectors], kind, elementwise=adamw, lr=settings.lr, **options)
