"""Hand shards to optimizers: the only place that replaces parameters by shards, cuts states, and judges optimizers.

An optimizer that was built before wrapping, and is not ShardLite's, holds the module's own parameters. These parameters
have no gradients, so the optimizer would silently train nothing. The first step of such an optimizer raises, unless the
optimizer was handed shards. The first step on shards also raises if the optimizer is not elementwise, which `probe.py`
finds out.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakSet

from torch import Tensor
from torch.optim import Optimizer, SparseAdam

from shardlite.comm import problem_in
from shardlite.engine import OptimizerBridge, params_of
from shardlite.engine.steps import forget_models
from shardlite.errors import LayoutError, ShardWarning
from shardlite.optim import AdamW, canonical, release
from shardlite.optimizers.states import WholeStateOptimizer, map_state, numbers_of
from shardlite.params import OffloadedFlat

_given: WeakSet[Optimizer] = WeakSet()
"""Optimizers that were handed shards, so a group without parameters is no mistake."""


def hand_over(
    optimizer: Any, model: OptimizerBridge, agree: Callable[[Exception | None, list[str]], None] | None = None
) -> None:
    """In an optimizer, replace a model's own parameters by their shards, and cut their states.

    The groups remain the same objects, in the same order, so schedulers keep working. A second call has no effect.

    Args:
        optimizer: the optimizer, or a wrapper with the optimizer as its attribute `optimizer`.
        model: the model of the shards.
        agree: `agree(problem, facts)` raises on every rank if any rank has a problem, or if facts differ. If `None`,
            only the first step judges the optimizer.

    Raises:
        LayoutError: a state can be neither cut nor kept. The optimizer is unchanged.
        TypeError: `agree` was given and raised it, because `optimizer` is not an optimizer.
    """
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    name, shards, names, facts = type(optimizer).__name__, model.shards.by_param(), model.shards.names(), list[str]()

    def check() -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"adopt: pass a torch.optim.Optimizer, got {name}")
        params = params_of(optimizer)
        if not any(shards.get(param, param) in names for param in params):
            raise LayoutError(
                f"adopt: {name} holds no parameter of this ShardLite model: pass an optimizer that was built from the "
                "module's parameters before wrapping"
            )
        judge(model, optimizer, shards)
        for index, param in enumerate(params):
            if param in shards:
                state = optimizer.state.get(param, {})
                shapes = sorted((key, str(getattr(value, "shape", ""))) for key, value in state.items())
                facts.append(f"{name}, parameter {index}, {names[shards[param]]}: {shapes}")

    if agree is not None:
        agree(problem_in(check), facts)
        _given.add(optimizer)
    _replace(optimizer, shards, model.part)


def judge(model: OptimizerBridge, optimizer: Optimizer, shards: Mapping[Tensor, Tensor] | None = None) -> None:
    """Raise if an optimizer cannot step a model as it would step an unsharded one. Warn if this is not known.

    Trial steps find this out. The error is the same on all ranks, because their optimizers have the same options.

    Args:
        model: a model that the optimizer holds parameters of.
        optimizer: the optimizer.
        shards: the shards that parameters are about to be replaced by.
    """
    name, params = type(optimizer).__name__, [(shards or {}).get(param, param) for param in params_of(optimizer)]
    unsharded = model.shards.first_unsharded(params)
    if unsharded is not None:
        raise LayoutError(
            f"{name} holds the unsharded parameter {unsharded!r}, which gets no gradient: build it from `parameters()` "
            "of the ShardLite model, after wrapping, and not from a module in or around this model (`model.module`, "
            "`torch.compile(model)`, `nn.DataParallel(model)`), or call `model.adopt(optimizer)`"
        )
    if not isinstance(optimizer, AdamW) and any(isinstance(flat, OffloadedFlat) for flat in model.shards.flats):
        raise LayoutError(
            f"{name} would keep its states on the GPU, but the model was wrapped with offload: use shardlite.AdamW, or "
            "wrap without offload"
        )
    if not isinstance(optimizer, AdamW | WholeStateOptimizer):
        if model.shards.are_split:
            raise LayoutError(
                f'{name} would step only the upper half of split weights (master="split24"): use shardlite.AdamW, or a '
                "master in fp32"
            )
        if model.shards.are_parts_of(params):
            _judge_class(optimizer)
    empty = next((index for index, group in enumerate(optimizer.param_groups) if not group["params"]), None)
    if empty is not None and shards is None and optimizer not in _given:
        warnings.warn(
            f"group {empty} of {name} has no parameters. Do not choose parameters by identity (`id(p)`, `p in ...`), "
            "because `parameters()` of the ShardLite model are shards, which are other objects: choose by name in "
            "`named_parameters()`, by `p.ndim`, or by attributes of `p`",
            ShardWarning,
            stacklevel=2,
        )


def _judge_class(optimizer: Optimizer) -> None:
    """Raise if the class of an optimizer is not elementwise. Warn if this is not known."""
    from shardlite.optimizers.probe import RAISES, probe_shards, probe_whole  # late: `AdamW` needs no probe

    if isinstance(optimizer, SparseAdam):
        raise LayoutError(
            "SparseAdam cannot step shards, because it steps whole rows: wrap the model with replicate=[embedding], so "
            "that every rank steps the whole table, or use shardlite.AdamW, which needs no sparse gradients"
        )
    name, verdict = type(optimizer).__name__, probe_shards(optimizer)
    instead = f"shardlite.WholeParameters(model.parameters(), {name}, ...)"
    if verdict.same is None:
        warnings.warn(
            f"{name} was not checked, because {verdict.why}. If it is not elementwise, as with a norm of each "
            f"parameter, its steps of shards differ from steps of whole parameters, which {instead} makes",
            ShardWarning,
            stacklevel=2,
        )
    elif not verdict.same:
        whole = probe_whole(optimizer)
        remedy = f"Build {instead}, which steps whole parameters, or use stage=0"
        if whole.why.startswith(RAISES):
            remedy = "It may require a closure, other gradients, or parameters that belong together. Use stage=0"
        elif whole.same is False:
            remedy = (
                f"Neither can shardlite.WholeParameters, because {whole.why}. Use stage=0, where each rank has all "
                "whole parameters. If only a global norm is the reason, turn it off and call clip_grad_norm_() of the "
                "model"
            )
        raise LayoutError(f"{name} cannot step shards, because {verdict.why}. {remedy}")


def judge_whole(models: Sequence[OptimizerBridge], optimizer: Optimizer) -> list[str]:
    """Raise if the class of an optimizer does not step each parameter by itself, as `WholeParameters` requires.

    Return what the program should know.
    """
    from shardlite.optimizers.probe import RAISES, probe_whole

    name, verdict, advice = type(optimizer).__name__, probe_whole(optimizer), list[str]()
    if verdict.same is False:
        fails = "cannot be tried" if verdict.why.startswith(RAISES) else "does not step each parameter by itself"
        remedy = f"Use stage=0 and {name} itself, because every rank then has all parameters"
        if not any(model.shards.are_parts for model in models):
            remedy = f"Every rank has all parameters, so build {name} itself from parameters() of the model"
        raise LayoutError(f"WholeParameters: {name} {fails}: {verdict.why}. {remedy}")
    if verdict.draws and any(model.context.replicas is not None for model in models):
        raise LayoutError(
            f"WholeParameters: {name} draws random numbers, so the weights of replicas would differ: use a group "
            "without replicas"
        )
    if own := optimizer.state_dict().keys() - {"state", "param_groups"}:
        lacking = ", ".join(sorted(own))
        advice.append(f"state_dict() and checkpoints lack {lacking}, which {name} keeps besides its states and groups")
    if verdict.draws or verdict.same is None:
        why = "it draws random numbers, which an unsharded model would draw in another order"
        why = why if verdict.draws else verdict.why
        advice.append(f"steps of {name} may differ from those of an unsharded model: {why}")
    return advice


def _replace(optimizer: Optimizer, shards: Mapping[Tensor, Tensor], part: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Replace the parameters in `shards`, and replace their states by the parts of their shards.

    The model may have moved since the optimizer was built, so parts move to the devices of their shards. Numbers move
    as in `Optimizer.load_state_dict`.
    """
    name, is_ours, states = type(optimizer).__name__, isinstance(optimizer, AdamW), dict[Tensor, Any]()
    held = [param for param in params_of(optimizer) if param in shards]
    numbers = numbers_of((param, optimizer.state[param]) for param in held if param in optimizer.state)

    def cut(group: Mapping[str, Any], param: Tensor, key: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        shard = shards[param]
        if value.shape == param.shape and key not in numbers:
            # A shard may be wider than its parameter, and that of `AdamW` may be split. A copy frees the full state.
            dtype = shard.dtype if value.dtype == param.dtype and not is_ours else value.dtype
            return part(param, value).to(shard.device, dtype, copy=True)
        if value.numel() == 1:
            return value.to(shard.device) if group.get("capturable") or group.get("fused") else value
        raise LayoutError(
            f"{name}: state {key!r} of shape {tuple(value.shape)} cannot be cut to the shard of a parameter of shape "
            f"{tuple(param.shape)}: use shardlite.WholeParameters, or stage=0"
        )

    for group in optimizer.param_groups:
        for param in filter(shards.__contains__, group["params"]):
            if state := optimizer.state.get(param):
                states[shards[param]] = map_state(canonical(state) if is_ours else state, partial(cut, group, param))
    for group in optimizer.param_groups:
        group["params"][:] = [shards.get(param, param) for param in group["params"]]
    for param in held:
        optimizer.state.pop(param, None)
    optimizer.state.update(states)
    if held:
        _given.add(optimizer)
        forget_models(optimizer)
        if isinstance(optimizer, AdamW):
            release(optimizer, held)
