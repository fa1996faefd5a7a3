"""Checks of `AdamW`'s hyper-parameters, parameters and loaded states."""

from __future__ import annotations

from typing import Any

import torch
from shardlite_kernels import Hyper
from torch import Tensor

from shardlite.optim.arena_slots import check_state
from shardlite.optim.step_counts import Group
from shardlite.params import ShardInfo

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# Options of torch.optim.AdamW: those that change the result, with the supported value, and those that do not.
_FIXED_OPTIONS = {"amsgrad": False, "maximize": False, "differentiable": False, "decoupled_weight_decay": True}
_FREE_OPTIONS = ("foreach", "fused", "capturable")
FOREIGN_OPTIONS = (*_FIXED_OPTIONS, *_FREE_OPTIONS)
"""Options of groups saved by PyTorch that this optimizer does not have."""


def check_group(group: Group, moments: str) -> None:
    """Check a parameter group for an optimizer with this format of moments.

    Raises:
        ValueError: a hyper-parameter is out of range, or a parameter is invalid.
    """
    lr, betas, eps, weight_decay = (group[name] for name in ("lr", "betas", "eps", "weight_decay"))
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"AdamW: lr must have one element, got shape {tuple(lr.shape)}")
    for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
        if not value >= 0:
            raise ValueError(f"AdamW: {name} must be at least 0, got {value}")
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"AdamW: betas must be two numbers from 0 to below 1, got {betas}")
    Hyper(0.0, betas[0], betas[1], 0.0, 0.0).check()
    if group["max_update"] is not None and not group["max_update"] > 0:
        raise ValueError(f"AdamW: max_update must be above 0, or None, got {group['max_update']}")
    check_params(group, moments)


def check_params(group: Group, moments: str) -> None:
    """Check that the parameters of a group can be stepped.

    Raises:
        ValueError: one is a placeholder, not contiguous, or of an unsupported dtype.
    """
    for index, param in enumerate(group["params"]):
        if param.requires_grad and param.numel() > 1 and not any(param.stride()):
            raise ValueError(
                f"AdamW: parameter {group.get('param_names', range(index + 1))[index]} of the group is a placeholder "
                "in a wrapped model: build the optimizer from parameters() of the ShardLite model itself"
            )
        is_split = ShardInfo.of(param).low is not None
        if param.requires_grad and moments != "fp32" and param.dtype != torch.float32 and not is_split:
            raise ValueError(
                f"AdamW: state={moments!r} goes with weights in fp32, or split ones, but parameter "
                f"{group.get('param_names', range(index + 1))[index]} of the group is {param.dtype}"
            )
        if param.requires_grad and not (param.is_contiguous() and param.dtype in _DTYPES):
            raise ValueError(
                f"AdamW: parameter {group.get('param_names', range(index + 1))[index]} of the group must be contiguous "
                f"and of a floating dtype, got {param.dtype}, shape {tuple(param.shape)}, strides {param.stride()}"
            )


def check_loaded(state: dict[str, Any]) -> None:
    """Check a loaded state before anything is changed.

    Raises:
        ValueError: it was saved with an unsupported option, or an entry does not fit its parameter.
    """
    for group in state["param_groups"]:
        for option, value in _FIXED_OPTIONS.items():
            if group.get(option, value) != value:
                raise ValueError(f"AdamW: the state was saved with {option}={group[option]}, only {value} is supported")
    for param, entry in state["state"].items():
        if isinstance(param, Tensor):
            check_state(param, entry)
