"""The list of everything that ShardLite patches in PyTorch, and the replacements.

`install_patches()` applies the list at the first `ShardLite(...)`. Objects that are not part of a wrapped model behave
as before. A program may already have imported a function of PyTorch by name, so a patch never rebinds the name of a
function. A patch replaces a method of a class, or an inner function that the imported function calls.
`docs/patches.md` lists the patches for users.

Each replacement is called with the original function and with the arguments of the call.
"""

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from threading import Lock
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_flatten_with_path

from shardlite.engine.conversions import refuse_if_wrapped
from shardlite.engine.local_shards import ShardRange
from shardlite.engine.optimizer_hooks import (
    OptimizerBridge,
    after_step,
    before_step,
    map_state,
    model_of_gradients,
    models_of,
    models_with,
    name_of_value,
    numbers_of,
    params_of,
)
from shardlite.engine.watch import SeenShard
from shardlite.errors import LayoutError
from shardlite.optim import AdamW, WholeStateOptimizer, probe_shards
from shardlite.params import Shard, ShardTensor

# ---- states of optimizers -------------------------------------------------------------------------------------------
#
# An optimizer's state belongs to one rank's shards: moments have the shapes of shards. PyTorch matches states to
# parameters by position and does not compare shapes, so it would silently load another rank's state.

KEY = "shardlite"
"""Third key of a `state_dict()`, besides `state` and `param_groups`. Its value describes the shards of the state."""

_RESUME = (
    "Nothing was changed. Each rank must load the state that it saved, with the same ranks, stage and units. To change "
    "these, load the weights (`load_full_state_dict`) and start with a new optimizer"
)


def _state_dict(original: Callable[[Optimizer], dict[str, Any]], optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's state, with a description of the shards.

    In the result, a `ShardTensor` replaces each tensor that has one element for each element of a shard.
    """
    saved = original(optimizer)
    models = models_with(params_of(optimizer))
    if not models:
        return saved
    makers = {shard: make for model in models for shard, make in model.shards.shard_tensors(model.context).items()}
    return {**_as_shards(optimizer, saved, makers), KEY: _describe(optimizer, models)}


def _load_state_dict(original: Callable[..., None], optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Load a state. Raise an error if the state of any rank does not belong to the shards of that rank."""
    models = models_with(params_of(optimizer))
    if models:
        name = f"load_state_dict of {type(optimizer).__name__}"
        own = _describe(optimizer, models)
        state_dict, why = _as_local(state_dict, own)
        wrong = _misfit(optimizer, state_dict, own) or why or _misshapen(optimizer, state_dict)
        # Ranks that own different parameters have different step counts.
        latest = 0 if isinstance(optimizer, WholeStateOptimizer) else _latest_step(state_dict)
        steps = models[0].context.all_gather_int(-1 if wrong else latest, name)
        if wrong:
            raise LayoutError(f"{name}: {wrong}. {_RESUME}")
        if min(steps) < 0:
            raise LayoutError(f"{name}: the state given to rank {steps.index(-1)} does not fit. {_RESUME}")
        if min(steps) < max(steps):
            raise LayoutError(
                f"{name}: the states given to the ranks are of different steps, {steps} by rank: give each rank "
                "its own state of the same checkpoint"
            )
    original(optimizer, state_dict)


def _describe(optimizer: Optimizer, models: Sequence[OptimizerBridge]) -> dict[str, Any]:
    """Return a description of this rank and, for each parameter, the name and the range of this rank's shard."""
    parts: dict[Tensor, ShardRange] = {shard: part for model in models for shard, part in model.shards.parts().items()}
    params = enumerate(params_of(optimizer))
    described = {"of": models[0].place, "parts": [parts.get(p) or (str(i), 0, p.numel(), p.numel()) for i, p in params]}
    return {**described, "owned": optimizer.owned()} if isinstance(optimizer, WholeStateOptimizer) else described


def _positions(state_dict: Mapping[str, Any]) -> list[Any]:
    """Return the keys of a state in the order of the optimizer's parameters."""
    return [index for group in state_dict["param_groups"] for index in group["params"]]


def _as_shards(
    optimizer: Optimizer, state_dict: Mapping[str, Any], makers: Mapping[Tensor, Callable[..., ShardTensor]]
) -> dict[str, Any]:
    """Return a state in which a `ShardTensor` replaces each tensor that has one element for each element of a shard."""
    positions = _positions(state_dict)
    # Optimizers may create states in memory order, which differs between ranks. Gathers need one order on all ranks.
    state = {index: state_dict["state"][index] for index in positions if index in state_dict["state"]}
    state |= state_dict["state"]
    pairs = list(zip(params_of(optimizer), positions, strict=True))
    numbers = numbers_of((param, state.get(index, {})) for param, index in pairs)
    for param, index in pairs:
        if (
            param in makers
            and state.get(index)
            and not (isinstance(optimizer, WholeStateOptimizer) and optimizer.holds_whole(param))
        ):
            state[index] = _entry(optimizer, param, state[index], makers[param], numbers)
    return {**state_dict, "state": state}


def _entry(
    optimizer: Optimizer,
    param: Tensor,
    entry: Mapping[str, Any],
    make: Callable[..., Any],
    numbers: Collection[str],
) -> dict[str, Any]:
    """Return the state of one shard, with results of `make` in place of the elementwise tensors.

    `numbers` are the names of values that are not elementwise, although they may have as many elements as the shard.
    """
    if isinstance(optimizer, AdamW | WholeStateOptimizer) and (decoders := AdamW.decoders(entry)):
        facts = {"numel": param.numel(), "dtype": torch.float32, "device": param.device}
        moments = {key: make(decode, sources=codes, **facts) for key, (decode, codes) in decoders.items()}
        return {"step": entry["step"], **moments}

    def part(name: str, value: Any) -> Any:
        is_like = isinstance(value, Tensor) and value.numel() == param.numel() and value.ndim == param.ndim
        return make(value) if is_like and name not in numbers else value

    return map_state(entry, part)


def _as_local(state_dict: Mapping[str, Any], own: Mapping[str, Any]) -> tuple[Mapping[str, Any], str | None]:
    """Return a state in which this rank's elements replace each `ShardTensor`, and an error text.

    The error text is `None` if every `ShardTensor` fits this rank. In this case `own` replaces the description in the
    state, because DCP gives rank 0's description to all ranks.
    """
    positions = _positions(state_dict)
    state, found, wrong = dict(state_dict["state"]), False, list[str]()

    def local(part: ShardRange, key: str, given: Any) -> Any:
        nonlocal found
        (name, start, stop, _), value = part, getattr(given, "value", given)
        if not isinstance(value, ShardTensor):
            return given
        found = True
        if (value.start, value.stop) != (start, stop):
            wrong.append(
                f"{key!r} of {name!r} is elements {value.start} to {value.stop}, here it must be {start} to {stop}"
            )
        own_part = value.to_local().detach()
        return own_part if value is given else replace(given, value=own_part)

    for index, part in zip(positions, own["parts"], strict=False):
        if index in state:
            state[index] = map_state(state[index], partial(local, part))
    if wrong:
        return state_dict, wrong[0]
    fits = found and len(positions) == len(own["parts"])
    return {**state_dict, "state": state, **({KEY: own} if fits else {})}, None


def _misfit(optimizer: Optimizer, state_dict: Mapping[str, Any], own: Mapping[str, Any]) -> str | None:
    """Return an error text if a state does not fit the optimizer whose shards `own` describes, else `None`."""
    given = state_dict.get(KEY)
    if given is None:
        return _misfit_of_unmarked(optimizer, state_dict, own)
    for (name, *ours), (theirs_name, *theirs) in zip(own["parts"], given["parts"], strict=False):
        if ours != theirs:
            here, there = ("{} to {} of {}".format(*part) for part in (ours, theirs))
            return (
                f"the state is of {given['of']}, this is {own['of']}: there {theirs_name!r} has the state of "
                f"elements {there}, here {name!r} needs the state of elements {here}"
            )
    if given.get("owned") != own.get("owned"):
        return f"the state is of {given['of']}, where other parameters are stepped whole, or have other owners"
    if len(own["parts"]) != len(given["parts"]):
        return f"the state is of {len(given['parts'])} parameters, this optimizer has {len(own['parts'])}"
    return None


def _misfit_of_unmarked(optimizer: Optimizer, state_dict: Mapping[str, Any], own: Mapping[str, Any]) -> str | None:
    """Return an error text if a state without a description has a tensor of a whole parameter's shape, else `None`."""
    parts = dict(zip(_positions(state_dict), own["parts"], strict=False))
    for param, index, key, value in _tensors(optimizer, state_dict):
        name, start, stop, numel = parts[index]
        if isinstance(optimizer, WholeStateOptimizer) and optimizer.holds_whole(param):
            continue
        # One element may also be a number, which each rank keeps.
        if value.numel() == numel != stop - start and numel > 1 and value.ndim == param.ndim:
            return (
                f"the state is of an unsharded model, this is {own['of']}: {key!r} of {name!r} has shape "
                f"{list(value.shape)}, and its shard here {list(param.shape)}"
            )
    return None


def _misshapen(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> str | None:
    """Return an error text if a tensor of a state does not have the shape that `optimizer` requires, else `None`.

    PyTorch's elementwise optimizers keep numbers, and tensors in the parameter's shape. For any other optimizer, the
    only known shapes are those of the tensors that the optimizer already holds.
    """
    if isinstance(optimizer, AdamW):
        return None  # `AdamW` itself compares the shapes of all its formats
    known = type(optimizer).__module__.startswith("torch.optim") and probe_shards(optimizer).same
    for param, index, key, value in _tensors(optimizer, state_dict):
        expected = optimizer.state.get(param, {}).get(key, param if known else None)
        if isinstance(expected, Tensor) and value.numel() > 1 and value.shape != expected.shape:
            return f"{key!r} of parameter {index} has shape {list(value.shape)}, here it has {list(expected.shape)}"
    return None


def _tensors(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> Iterator[tuple[Tensor, Any, str, Tensor]]:
    """For each tensor of a state, yield the parameter, the parameter's key, the tensor's name, and the tensor."""
    for param, index in zip(params_of(optimizer), _positions(state_dict), strict=False):
        for path, given in tree_flatten_with_path(dict(state_dict["state"].get(index, {})))[0]:
            value = getattr(given, "value", given)  # `AdamW` wraps values so that PyTorch does not convert them
            if isinstance(value, Tensor):
                yield param, index, name_of_value(path), value


def _latest_step(state_dict: Mapping[str, Any]) -> int:
    """Return the highest step count in a state, or 0 if the state has no step counts."""
    steps = [entry["step"] for entry in state_dict["state"].values() if isinstance(entry, Mapping) and "step" in entry]
    return max((int(getattr(step, "value", step)) for step in steps), default=0)


def _zero_grad(original: Callable[..., None], optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
    """Drop gradients, and the counts of their items."""
    original(optimizer, *args, **kwargs)
    for model in models_with(params_of(optimizer)):
        model.forget_counts()


# ---- gradient scalers and norms -------------------------------------------------------------------------------------

_Tensors = Tensor | Iterable[Tensor]
_Original = Callable[..., Any]


def _unscale(original: _Original, scaler: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
    """Divide the gradients by the scale. If any rank finds an infinity, all ranks report an infinity."""
    models = models_of(optimizer)
    for model in models:
        model.in_backward.refuse("a gradient scaler")
    found = original(scaler, optimizer, *args, **kwargs)
    held = set(map(id, params_of(optimizer)))
    for model in models:
        model.clipper.gradients_written()
        flag = model.skips.flag()
        if flag is not None:
            here = found.setdefault(flag.device, torch.zeros_like(flag))
            torch.maximum(here, flag, out=here)
        if held - {id(shard) for shard in model.shards}:  # for ignored parameters, whose gradients differ by rank
            for here in found.values():
                here.copy_(model.context.on_any_rank(here))
    return found


def _total_norm(
    original: _Original,
    tensors: _Tensors,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: Any = None,
) -> Any:
    """Return the norm over all ranks if `tensors` are gradients of shards, else PyTorch's norm."""
    grads = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    model, shards = model_of_gradients(grads)
    if model is None:
        return original(grads, norm_type, error_if_nonfinite, foreach)
    norm = model.clipper.norm(float(norm_type), shards)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"The total norm of order {norm_type} of the gradients of all ranks is {norm.item()}, so it cannot be "
            "clipped. Pass `error_if_nonfinite=False` to scale by it anyway"
        )
    return norm


def _clip(
    original: _Original, parameters: _Tensors, max_norm: float, total_norm: Tensor, foreach: bool | None = None
) -> None:
    """Scale gradients to a norm of at most `max_norm`. If the factor is 1, the gradients of shards are not read.

    Raises:
        LayoutError: `parameters` are unsharded parameters of a wrapped model, which have no gradients.
    """
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    for model in models_with(params):
        unsharded = model.shards.first_unsharded(params)
        if unsharded is not None and all(param.grad is None for param in params):
            raise LayoutError(
                f"clip_grad_norm_ was given the unsharded parameter {unsharded!r}, which has no "
                "gradient: pass parameters() of the ShardLite model, not those of a module around or in it"
            )
        model.in_backward.refuse("clip_grad_norm_")
        model.check_reduced("clip_grad_norm_")
    model_with, shards = model_of_gradients([param.grad for param in params if param.grad is not None])
    if model_with is None:
        original(params, max_norm, total_norm, foreach)
    else:
        model_with.clipper.clip(shards, float(max_norm), total_norm)


def _clip_values(original: _Original, parameters: _Tensors, *args: Any, **kwargs: Any) -> None:
    """Clip each gradient's elements. Do nothing if no shard has a gradient.

    Raises:
        PhaseError: gradients of a wrapped model are accumulated and not reduced.
    """
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    models = models_with(params)
    for model in models:
        model.check_reduced("clip_grad_value_")
    if not models or any(param.grad is not None for param in params):
        original(params, *args, **kwargs)


# ---- the list -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Patch:
    """One change in PyTorch."""

    target: str
    """The changed function or class."""

    rests_on: str
    """The private API of PyTorch that the change needs, or `none`."""

    why: str
    """What would happen without the change."""

    apply: Callable[[], None]
    """The function that makes the change."""


PATCHES: list[Patch] = []
"""Everything that ShardLite changes in PyTorch."""


def _patch(target: str, rests_on: str) -> Callable[[Callable[[], None]], None]:
    """Return a decorator that adds a function to `PATCHES`. The function's docstring is `why`."""
    return lambda apply: PATCHES.append(Patch(target, rests_on, " ".join((apply.__doc__ or "").split()), apply))


@_patch("steps of all optimizers (global pre-hook and post-hook)", "none")
def _() -> None:
    """A step of unsharded parameters would train nothing, and a model would not know that its weights have changed."""
    # The compiler must not trace a step into the hooks, because the hooks read placeholders.
    register_optimizer_step_pre_hook(torch._disable_dynamo(before_step))
    register_optimizer_step_post_hook(torch._disable_dynamo(after_step))


@_patch("`torch.optim.Optimizer.state_dict`", "none")
def _() -> None:
    """A state would not record the shards that it belongs to, and DCP would save its tensors as if they were whole."""
    _replace_method(Optimizer, "state_dict", _state_dict)


@_patch("`torch.optim.Optimizer.load_state_dict`", "none")
def _() -> None:
    """An optimizer would load another rank's state, because PyTorch does not compare shapes."""
    _replace_method(Optimizer, "load_state_dict", _load_state_dict)


@_patch("`torch.optim.Optimizer.zero_grad`", "none")
def _() -> None:
    """A model would not know that gradients which `count_items` has divided were dropped."""
    _replace_method(Optimizer, "zero_grad", torch._disable_dynamo(_zero_grad))


@_patch("classes that foreach and fused optimizers accept", "`torch.optim.optimizer._foreach_supported_types`")
def _() -> None:
    """PyTorch's optimizers would step shards one by one, because they choose `foreach` and `fused` by exact classes."""
    kinds: list[type] = getattr(import_module("torch.optim.optimizer"), "_foreach_supported_types", [])
    kinds.extend((Shard, SeenShard))


@_patch("`torch.amp.GradScaler`", "`GradScaler._unscale_grads_`")
def _() -> None:
    """Each rank would decide alone whether to skip a step."""
    _replace_method(GradScaler, "_unscale_grads_", _unscale)


@_patch("`torch.nn.utils.get_total_norm`, `clip_grad_norm_`", "`clip_grad._get_total_norm`, `clip_grad._no_grad`")
def _() -> None:
    """Gradients would be clipped by the norm of this rank's shards instead of the norm over all ranks."""
    _replace_inside(clip_grad._get_total_norm, _total_norm)


@_patch("`torch.nn.utils.clip_grads_with_norm_`", "`clip_grad._clip_grads_with_norm_`, `clip_grad._no_grad`")
def _() -> None:
    """If the caller passed parameters that have no gradients, clipping would silently have no effect."""
    _replace_inside(clip_grad._clip_grads_with_norm_, _clip)


@_patch("`torch.nn.utils.clip_grad_value_`", "`clip_grad._no_grad`")
def _() -> None:
    """Gradients that are accumulated and not reduced would not be clipped."""
    _replace_inside(clip_grad.clip_grad_value_, _clip_values)


@_patch("`torch.nn.Module.to` and other conversions", "`torch.nn.Module._apply`")
def _() -> None:
    """The parameters of a wrapped model would move to new memory, but its shards would not."""
    _replace_method(nn.Module, "_apply", refuse_if_wrapped)


@_patch("`torch.distributed.checkpoint.state_dict`, when it is imported", "private functions of the module")
def _() -> None:
    """The functions of this module would save placeholders, because they gather and shard only DTensors."""
    name = "torch.distributed.checkpoint.state_dict"
    if name in sys.modules:
        _patch_state_dicts()
    else:
        sys.meta_path.insert(0, _AfterImport(name, _patch_state_dicts))


def _patch_state_dicts() -> None:
    """Apply the patches of `shardlite/checkpoint/`, which is imported by name, because it builds on this package.

    The package may be in the middle of its own import. So this function imports the module of the patches.
    """
    import_module("shardlite.checkpoint.state_dict_patches").install()


def _replace_method(owner: type, name: str, replacement: Callable[..., Any]) -> None:
    """Replace a method of a class. Existing objects of the class get the replacement too."""
    original = getattr(owner, name)

    @wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    setattr(owner, name, method)


def _replace_inside(function: Any, replacement: Callable[..., Any]) -> None:
    """Replace the function inside `function`, a wrapper that PyTorch's `_no_grad` has made.

    A program that has imported `function` by name gets the replacement too. `_no_grad` keeps the inner function in a
    closure variable, `func`.
    """
    cell = (function.__closure__ or ())[function.__code__.co_freevars.index("func")]
    cell.cell_contents = partial(replacement, cell.cell_contents)


class _AfterImport:
    """Import finder for one module. It calls the function `then` after the module has been executed."""

    def __init__(self, name: str, then: Callable[[], object]) -> None:
        self._name, self._then = name, then

    def find_spec(self, fullname: str, path: object, target: ModuleType | None = None, /) -> ModuleSpec | None:
        """Return the module's spec, with a loader that calls `then`. Return `None` for any other module."""
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec: Any = find_spec(fullname)
        if spec is not None:
            sys.meta_path.insert(0, self)  # this finder stays until the module has been executed without an error
            spec.loader.exec_module = partial(self._execute, spec.loader.exec_module)
        return spec  # type: ignore[no-any-return]

    def _execute(self, execute: Callable[[ModuleType], None], module: ModuleType) -> None:
        execute(module)
        self._then()
        sys.meta_path.remove(self)


_lock = Lock()
_not_applied = iter(PATCHES)


def install_patches() -> None:
    """Apply all patches. Later calls do nothing."""
    with _lock:
        for patch in _not_applied:
            patch.apply()
