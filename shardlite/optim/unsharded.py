"""Step parameters that are not shards, with PyTorch's fused AdamW.

Such parameters are the ignored parameters of wrapped models, and the parameters of models that are not wrapped.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from shardlite.optim.counts import Amp, Group
from shardlite.optim.entries import MOMENTS, canonical, check_dense, check_state
from shardlite.params import as_real


def check_unsharded(group: Group, params: Sequence[Tensor], states: Mapping[Tensor, Any]) -> None:
    """Check that `params`, which are in `group` and are not shards, can be stepped.

    Raises:
        ValueError: a state does not fit, a gradient is sparse, or the group has a `max_update`.
    """
    for param in params:
        check_state(param, states.get(param))
    check_dense(params)
    if group["max_update"] is not None:
        raise ValueError(
            f"AdamW: max_update={group['max_update']} is supported only for parameters of ShardLite models, but the "
            "group has other parameters: put these into a group with max_update=None"
        )


def step_unsharded(group: Group, params: list[Tensor], states: dict[Tensor, Any], amp: Amp) -> None:
    """Step `params`, which have gradients, as `torch.optim.AdamW(fused=True)` does."""
    for param in params:
        states[param] = state_of_unsharded(param, states.get(param) or {})
    grads = [grad for param in params if (grad := param.grad) is not None]
    if amp.factor is not None:
        grads = [grad * amp.factor.to(grad.device) for grad in grads]
    steps, avgs, sqs = ([states[param][name] for param in params] for name in ("step", *MOMENTS))
    tensors, grads, avgs, sqs = ([*map(as_real, each)] for each in (params, grads, avgs, sqs))
    beta1, beta2 = group["betas"]
    adamw(
        *(tensors, grads, avgs, sqs, [], steps),
        fused=True,
        grad_scale=None if amp.grad_scale is None else torch.as_tensor(amp.grad_scale, dtype=torch.float32),
        found_inf=None if amp.found_inf is None else (torch.as_tensor(amp.found_inf) != 0).float(),
        amsgrad=False,
        maximize=False,
        beta1=beta1,
        beta2=beta2,
        **{name: group[name] for name in ("lr", "weight_decay", "eps")},
    )
    torch.autograd.graph.increment_version(params)  # PyTorch's fused optimizers do not do this


def state_of_unsharded(param: Tensor, entry: Mapping[str, Any], *, copy: bool = False) -> dict[str, Any]:
    """Return `entry` in the format of PyTorch's fused kernel, or zeros if `entry` is empty. `param` is not a shard."""
    if not entry:
        return {"step": torch.zeros((), device=param.device), **{name: torch.zeros_like(param) for name in MOMENTS}}
    step = torch.as_tensor(entry["step"]).to(param.device, torch.float32, copy=copy)
    values = canonical(entry) if entry["exp_avg"].dtype != param.dtype else entry
    return {"step": step, **{name: values[name].to(param.device, param.dtype, copy=copy) for name in MOMENTS}}
