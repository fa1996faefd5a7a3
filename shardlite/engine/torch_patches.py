"""Hooks and replacements in PyTorch's own tools: optimizer steps, gradient scalers, norms and state dicts.

- An optimizer that was built before wrapping, and is not ours, holds the module's own parameters, which have no
  gradients: it would train nothing, in silence. So its first step is an error.
- Wrapped models are notified of the steps that change them, and may have to leave one out.
- `torch.nn.utils.clip_grad_norm_` would take the norm of this rank's shards for that of all, and `GradScaler` would
  decide on each rank by itself whether to step. Both look up a function when they are called: that one is replaced.
- `state_dict()` of an optimizer is of the shards of one rank, and `load_state_dict()` would take those of any other.
  (`get_total_norm` is that function itself: a program that imported it by name before ShardLite has the old one.)
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from importlib import import_module
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary, ref

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from shardlite.engine import state_dicts
from shardlite.engine.optimizer_bridge import OptimizerBridge
from shardlite.engine.state_dicts import WHOLE_MATRICES, params_of
from shardlite.engine.watch import SeenShard
from shardlite.errors import LayoutError, PhaseError, ShardWarning
from shardlite.params import Shard

# PyTorch's hooks are one per process, and so are these tables. They are safe where ranks are threads of a process: each
# entry belongs to tensors or an optimizer of one rank, is found by their identity, and is read or written by one
# operation of a dictionary.

_models: "WeakValueDictionary[int, OptimizerBridge]" = WeakValueDictionary()
"""The model of each shard, and of each parameter that was sharded, by its id. A model keeps its parameters alive, so an
id is that of another object only once the entry is gone."""

_known: "WeakKeyDictionary[Optimizer, int]" = WeakKeyDictionary()
"""For each optimizer the number of its parameters when its models were looked up last."""


_given_unsharded: "WeakSet[Optimizer]" = WeakSet()
"""Optimizers that were given parameters of modules that were wrapped already."""

_spent: Any = WeakTensorKeyDictionary()
"""The shards of models that were unwrapped."""


def watch(model: OptimizerBridge) -> None:
    """Call the bridge of a model before and after steps of all optimizers that hold any of its shards."""
    for param in model.shards.all_params():
        _models[id(param)] = model
    _known.clear()  # an optimizer may hold parameters that were sharded just now


def retire(model: OptimizerBridge) -> None:
    """Make further steps of the shards of a model that was unwrapped an error: they would train nothing."""
    for shard in model.shards.by_param().values():
        _spent[shard] = True
    for param in model.shards.all_params():
        _models.pop(id(param), None)
    for optimizer in list(_known):
        vars(optimizer).pop("_shardlite_models", None)
    _known.clear()


def state_of_optimizers(model: OptimizerBridge) -> Iterator[Tensor]:
    """Yield what the optimizers that have stepped a model hold: their states and, if they have any, `tables()`."""
    for optimizer in model.optimizers:
        tables = getattr(optimizer, "tables", list)
        leaves = tree_leaves([*optimizer.state.values(), *tables()])
        yield from (leaf for leaf in leaves if isinstance(leaf, Tensor))


def give_shards(optimizer: Optimizer, model: OptimizerBridge) -> None:
    """Replace the module's own parameters in an optimizer by their shards.

    Raises:
        LayoutError: it has stepped the former already.
    """
    shards = model.shards.by_param()
    for group in optimizer.param_groups:
        if any(param in shards and param in optimizer.state for param in group["params"]):
            raise LayoutError(
                f"{type(optimizer).__name__} was built from unsharded parameters and has states for them: build it "
                "from `parameters()` of the ShardLite model"
            )
        group["params"][:] = [shards.get(param, param) for param in group["params"]]
    _known.pop(optimizer, None)


# ---- steps ----------------------------------------------------------------------------------------------------------


_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def _before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments | None:
    """Prepare a step: at once, or where it computes the gradients itself as soon as it has. `args[0]` is `optimizer`.

    Returns:
        What the step is to be called with instead, if that is something else.
    """
    models = _models_of(optimizer)
    closure = kwargs.get("closure", next(iter(args[1:]), None))
    if not models or not callable(closure):
        _prepare(optimizer, models)
        return None

    def watched() -> Any:
        loss = closure()
        _prepare(optimizer, models)
        return loss

    return (optimizer, *args[2:]), {**kwargs, "closure": watched}


def _prepare(optimizer: Optimizer, models: Iterable[OptimizerBridge]) -> None:
    models = list(models)
    for model in models:
        model.before_step(optimizer)
    if models and getattr(optimizer, "clips_by_norm", False):
        optimizer.norm = _norm_for(optimizer, models)  # type: ignore[attr-defined]


def _norm_for(optimizer: Optimizer, models: Sequence[OptimizerBridge]) -> Tensor:
    """Return the global norm that an optimizer clips by itself, []."""
    shards = set(models[0].shards)
    held = set(params_of(optimizer))
    if len(models) > 1 or held - shards:
        raise LayoutError(
            f"{type(optimizer).__name__}(max_norm=...) clips by the norm of one wrapped model, but holds parameters of "
            f"{'several' if len(models) > 1 else 'it and others'}: call clip_grad_norm_ of each model instead"
        )
    return models[0].clipper.norm(2.0, None if held == shards else shards & held)


def _after(optimizer: Optimizer, *_: Any) -> None:
    stepped = [param for param in params_of(optimizer) if param.grad is not None]
    for model in _models_of(optimizer):
        model.after_step(stepped)


def _models_of(optimizer: Optimizer) -> list[OptimizerBridge]:
    """Return the wrapped models that an optimizer steps, looked up again when its parameters or the models change."""
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    if _known.get(optimizer) != count:
        vars(optimizer)["_shardlite_models"] = _find(optimizer)  # they live as long as the optimizer
        _known[optimizer] = count
    models: list[OptimizerBridge] = vars(optimizer)["_shardlite_models"]
    return models


def _find(optimizer: Optimizer) -> list[OptimizerBridge]:
    """Return the wrapped models that an optimizer holds parameters of. Raises if it cannot step them."""
    params = params_of(optimizer)
    if any(param in _spent for param in params):
        raise PhaseError(
            f"{type(optimizer).__name__} holds shards of a ShardLite model that was unwrapped: build it from "
            "`parameters()` of the module that unwrap() returned"
        )
    models = _models_with(params)
    for model in models:
        _check(optimizer, model, params)
    empty = [index for index, group in enumerate(optimizer.param_groups) if not group["params"]]
    if models and empty:
        warnings.warn(
            f"group {empty[0]} of {type(optimizer).__name__} has no parameters. If it was chosen by identity (`id(p)`, "
            "`p in ...`) of the module's own parameters: `parameters()` of the ShardLite model has others, shards, and "
            "`named_parameters()` has them under the same names. Choose by name, by `p.ndim`, or by attributes of `p`",
            ShardWarning,
            stacklevel=2,
        )
    return models


def _alive(models: Iterable[ref[OptimizerBridge]]) -> list[OptimizerBridge]:
    """Return those that live, each once."""
    return list(dict.fromkeys(model for each in models if (model := each()) is not None))


def _models_with(params: Iterable[Tensor]) -> list[OptimizerBridge]:
    """Return the wrapped models whose shards, or sharded parameters, are among `params`."""
    return list(dict.fromkeys(model for param in params if (model := _models.get(id(param))) is not None))


def _check(optimizer: Optimizer, model: OptimizerBridge, params: Iterable[Tensor]) -> None:
    """Raise if an optimizer cannot step `params`, some of which are of a wrapped model."""
    unsharded = model.shards.first_unsharded(params)
    if unsharded is not None:
        why = (
            "its parameters are those of a module in or around the ShardLite model (`nn.DataParallel(model)`, "
            "`torch.compile(model)`, `model.module`)"
            if optimizer in _given_unsharded
            else "it was built before the model was wrapped"
        )
        raise LayoutError(
            f"{type(optimizer).__name__} holds the unsharded parameter {unsharded!r}, which gets no gradient: {why}. "
            "Build it from `model.parameters()` of the ShardLite model"
        )
    if model.shards.are_split and not getattr(optimizer, "steps_split_weights", False):
        raise LayoutError(
            f"{type(optimizer).__name__} would step the upper part of weights that are split "
            '(master="split24") and know nothing of the rest: use shardlite.AdamW, or a master in fp32'
        )
    kinds = {kind.__name__ for kind in type(optimizer).__mro__}
    if model.shards.by_param() and "SparseAdam" in kinds:
        raise LayoutError(
            "SparseAdam steps by sparse gradients, but those of shards are dense, means over all ranks: use AdamW, or "
            "keep the embedding out of the model's sharding by `ignore=[...]`"
        )
    if model.shards.are_parts and kinds & WHOLE_MATRICES:
        raise LayoutError(
            f"{type(optimizer).__name__} computes with whole parameters or all of them together, and would "
            "train something else on shards: use an elementwise optimizer (SGD, AdamW, ...), or stage 0"
        )


def _add_param_group(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def add_param_group(optimizer: Optimizer, param_group: dict[str, Any]) -> None:
        """Add the group as ever, and note whether its parameters had been wrapped by then."""
        original(optimizer, param_group)
        params = optimizer.param_groups[-1]["params"]
        if any(model.shards.first_unsharded(params) for model in _models_with(params)):
            _given_unsharded.add(optimizer)

    return add_param_group


# ---- states of optimizers -------------------------------------------------------------------------------------------


def _state_dict(original: Callable[[Optimizer], dict[str, Any]]) -> Callable[[Optimizer], dict[str, Any]]:
    @wraps(original)
    def state_dict(optimizer: Optimizer) -> dict[str, Any]:
        """Return the state as ever, and which shards it is of."""
        saved = original(optimizer)
        models = _models_with(params_of(optimizer))
        if not models:
            return saved
        makers = {shard: make for model in models for shard, make in model.shards.shard_tensors(model.context).items()}
        return {**state_dicts.as_shards(optimizer, saved, makers), state_dicts.KEY: _describe(optimizer, models)}

    return state_dict


def _load_state_dict(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def load_state_dict(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
        """Take over a state as ever, if it is of the shards of this rank, on every rank."""
        models = _models_with(params_of(optimizer))
        if models:
            name = f"load_state_dict of {type(optimizer).__name__}"
            own = _describe(optimizer, models)
            state_dict, why = state_dicts.as_local(state_dict, own)
            wrong = (
                state_dicts.misfit(optimizer, state_dict, own) or why or state_dicts.misshapen(optimizer, state_dict)
            )
            told = models[0].context.all_gather_int(-1 if wrong else state_dicts.latest_step(state_dict), name)
            if wrong:
                raise LayoutError(f"{name}: {wrong}. {_RESUME}")
            if min(told) < 0:
                raise LayoutError(f"{name}: the state that rank {told.index(-1)} was given is not of it. {_RESUME}")
            if min(told) < max(told):
                raise LayoutError(
                    f"{name}: the states that ranks were given are of different steps, {told} by rank: give each rank "
                    "its own of the same checkpoint"
                )
        original(optimizer, state_dict)

    return load_state_dict


_RESUME = (
    "Nothing was changed. States are of shards: each rank saves its own and loads it again, with as many ranks, at "
    "the same stage and with the same units. To go on with others, load the weights (`load_full_state_dict`) and begin "
    "with a new optimizer"
)


def _describe(optimizer: Optimizer, models: Sequence[OptimizerBridge]) -> dict[str, Any]:
    parts = {shard: part for model in models for shard, part in model.shards.parts().items()}
    return state_dicts.describe(optimizer, parts, models[0].place)


# ---- gradient scalers -----------------------------------------------------------------------------------------------


def _unscale(original: Callable[..., dict[torch.device, Tensor]]) -> Callable[..., dict[torch.device, Tensor]]:
    @wraps(original)
    def unscale(scaler: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> dict[torch.device, Tensor]:
        """Divide the gradients as ever; what any rank has found, all have."""
        for model in _models_of(optimizer):
            model.in_backward.refuse("a gradient scaler")
        found = original(scaler, optimizer, *args, **kwargs)
        held = set(map(id, params_of(optimizer)))
        for model in _models_of(optimizer):
            model.clipper.gradients_written()
            flag = model.skips.flag()
            if flag is not None:
                here = found.setdefault(flag.device, torch.zeros_like(flag))
                torch.maximum(here, flag, out=here)
            if held - {id(shard) for shard in model.shards}:  # ignored parameters, which each rank judges by itself
                for here in found.values():
                    here.copy_(model.context.on_any_rank(here))
        return found

    return unscale


# ---- norms ----------------------------------------------------------------------------------------------------------

_Tensors = Tensor | Iterable[Tensor]


def _total_norm(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(original)
    def total_norm(
        tensors: _Tensors, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> Tensor:
        """Return the norm over all ranks, if `tensors` are gradients of shards."""
        grads = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        model, shards = _owner(grads)
        if model is None:
            return original(grads, norm_type, error_if_nonfinite, foreach)
        norm = model.clipper.norm(float(norm_type), shards)
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(
                f"The total norm of order {norm_type} of the gradients of all ranks is {norm.item()}, so it cannot be "
                "clipped. Pass `error_if_nonfinite=False` to scale by it anyway"
            )
        return norm

    return total_norm


def _clip(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def clip(parameters: _Tensors, max_norm: float, total_norm: Tensor, foreach: bool | None = None) -> None:
        """Scale gradients, unless `parameters` are those inside a wrapped model, which have none.

        Those of shards are not even read where the factor is 1.
        """
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        for model in _models_with(params):
            unsharded = model.shards.first_unsharded(params)
            if unsharded is not None:
                raise LayoutError(
                    f"clip_grad_norm_ was given the unsharded parameter {unsharded!r}, which has no "
                    "gradient: give it parameters() of the ShardLite model, not those of a module around or in it"
                )
            model.in_backward.refuse("clip_grad_norm_")
        owner, shards = _owner([param.grad for param in params if param.grad is not None])
        if owner is None:
            original(params, max_norm, total_norm, foreach)
        else:
            owner.clipper.clip(shards, float(max_norm), total_norm)

    return clip


def _owner(grads: Sequence[Tensor]) -> tuple[OptimizerBridge | None, set[nn.Parameter]]:
    """Return the model whose gradients these are, if any, and the shards that they belong to.

    Raises:
        LayoutError: they are of several models, or only some are of a wrapped one.
    """
    wanted = {id(grad) for grad in grads}  # a gradient does not know its parameter: look at those of all models
    for model in _alive(_models.valuerefs()):  # taken at once: other threads may add to the table meanwhile
        shards = {shard for shard in model.shards if shard.grad is not None and id(shard.grad) in wanted}
        if len(shards) == len(wanted) and shards:
            return model, shards
        if shards:
            raise LayoutError(
                "the norm of gradients of a wrapped model is one over all ranks, and cannot be taken together with "
                f"others: {len(wanted) - len(shards)} of {len(wanted)} gradients are of something else. Clip each "
                "model by itself; `clip_grad_norm_` of the wrapped model leaves out its ignored parameters"
            )
    return None, set()


# PyTorch's optimizers choose `foreach` and `fused` by the exact class of parameters.
_kinds: list[type] = getattr(import_module("torch.optim.optimizer"), "_foreach_supported_types", [])
_kinds.extend(kind for kind in (Shard, SeenShard) if kind not in _kinds)
# A compiled step must not be traced into what looks at parameters whose values are elsewhere.
register_optimizer_step_pre_hook(torch._disable_dynamo(_before))
register_optimizer_step_post_hook(torch._disable_dynamo(_after))
setattr(Optimizer, "state_dict", _state_dict(Optimizer.state_dict))  # noqa: B010 (mypy refuses assignment)
setattr(Optimizer, "load_state_dict", _load_state_dict(Optimizer.load_state_dict))  # noqa: B010
setattr(Optimizer, "add_param_group", _add_param_group(Optimizer.add_param_group))  # noqa: B010
setattr(GradScaler, "_unscale_grads_", _unscale(GradScaler._unscale_grads_))  # noqa: B010 (mypy refuses assignment)
setattr(clip_grad, "_get_total_norm", _total_norm(clip_grad._get_total_norm))  # noqa: B010
setattr(clip_grad, "_clip_grads_with_norm_", _clip(clip_grad._clip_grads_with_norm_))  # noqa: B010
setattr(nn.utils, "get_total_norm", clip_grad._get_total_norm)  # noqa: B010
