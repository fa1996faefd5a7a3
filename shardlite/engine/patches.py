"""The list of everything that ShardLite patches in PyTorch, and the functions that it puts there.

`install_patches()` applies the list at the first `ShardLite(...)`. What belongs to no wrapped model is not
affected. A program may have imported a function by name before, so a patch replaces a method of a class, or what a
function runs inside, never the name of a function. `docs/patches.md` lists the patches for users.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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

from shardlite.engine.conversions import refuse_if_wrapped
from shardlite.engine.local_shards import ShardRange
from shardlite.engine.optimizer_hooks import (
    WHOLE_MATRICES,
    OptimizerBridge,
    after_step,
    before_step,
    model_of_gradients,
    models_of,
    models_with,
    params_of,
)
from shardlite.engine.watch import SeenShard
from shardlite.errors import LayoutError
from shardlite.params import Shard, ShardTensor

# ---- states of optimizers -------------------------------------------------------------------------------------------
#
# The state of an optimizer is that of one rank's shards: moments have the shapes of shards. PyTorch matches them to
# parameters by position and compares no shapes, so the state of another rank would be loaded in silence.

KEY = "shardlite"
"""Entry of a `state_dict()`, next to `state` and `param_groups`, that says which shards the state is of."""

NUMBERS = {"step", "mu_product", "eta", "mu"}
"""What PyTorch's optimizers keep once per parameter, not once per element."""

_RESUME = (
    "Nothing was changed. States belong to shards: each rank must load the state that it saved, with as many ranks, at "
    "the same stage and with the same units. To continue with others, load the weights (`load_full_state_dict`) and "
    "start with a new optimizer"
)


def _state_dict(original: Callable[[Optimizer], dict[str, Any]]) -> Callable[[Optimizer], dict[str, Any]]:
    @wraps(original)
    def state_dict(optimizer: Optimizer) -> dict[str, Any]:
        """Return the state as ever, with a `ShardTensor` for each tensor like a shard, and which shards it is of."""
        saved = original(optimizer)
        models = models_with(params_of(optimizer))
        if not models:
            return saved
        makers = {shard: make for model in models for shard, make in model.shards.shard_tensors(model.context).items()}
        return {**_as_shards(optimizer, saved, makers), KEY: _describe(optimizer, models)}

    return state_dict


def _load_state_dict(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def load_state_dict(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
        """Load a state as ever, if it is of the shards of this rank, on every rank."""
        models = models_with(params_of(optimizer))
        if models:
            name = f"load_state_dict of {type(optimizer).__name__}"
            own = _describe(optimizer, models)
            state_dict, why = _as_local(state_dict, own)
            wrong = _misfit(optimizer, state_dict, own) or why or _misshapen(optimizer, state_dict)
            steps = models[0].context.all_gather_int(-1 if wrong else _latest_step(state_dict), name)
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

    return load_state_dict


def _describe(optimizer: Optimizer, models: Sequence[OptimizerBridge]) -> dict[str, Any]:
    """Return the rank of a state, and for each parameter its name and its part of the whole parameter."""
    parts: dict[Tensor, ShardRange] = {shard: part for model in models for shard, part in model.shards.parts().items()}
    params = enumerate(params_of(optimizer))
    return {"of": models[0].place, "parts": [parts.get(p) or (str(i), 0, p.numel(), p.numel()) for i, p in params]}


def _positions(state_dict: Mapping[str, Any]) -> list[Any]:
    """Return the keys of a state in the order of the optimizer's parameters."""
    return [index for group in state_dict["param_groups"] for index in group["params"]]


def _as_shards(
    optimizer: Optimizer, state_dict: Mapping[str, Any], makers: Mapping[Tensor, Callable[..., ShardTensor]]
) -> dict[str, Any]:
    """Return a state with a `ShardTensor` for each tensor that is like its parameter, a shard."""
    positions = _positions(state_dict)
    # Optimizers may make states in the order of memory, which differs by rank; gathers need one order.
    state = {index: state_dict["state"][index] for index in positions if index in state_dict["state"]}
    state |= state_dict["state"]
    for param, index in zip(params_of(optimizer), positions, strict=True):
        if param in makers and state.get(index):
            state[index] = _entry(optimizer, param, state[index], makers[param])
    return {**state_dict, "state": state}


def _entry(optimizer: Optimizer, param: Tensor, entry: Mapping[str, Any], make: Callable[..., Any]) -> dict[str, Any]:
    decode_each = getattr(optimizer, "decoders", None)
    if decode_each is not None and (decoders := decode_each(entry)):
        facts = {"numel": param.numel(), "dtype": torch.float32, "device": param.device}
        moments = {key: make(decode, sources=codes, **facts) for key, (decode, codes) in decoders.items()}
        return {"step": entry["step"], **moments}
    return {
        key: make(value) if key not in NUMBERS and _is_like(value, param) else value for key, value in entry.items()
    }


def _is_like(value: object, param: Tensor) -> bool:
    """Return whether a value of a state has one element for each element of its parameter."""
    return isinstance(value, Tensor) and value.numel() == param.numel() and value.ndim == param.ndim


def _as_local(state_dict: Mapping[str, Any], own: Mapping[str, Any]) -> tuple[Mapping[str, Any], str | None]:
    """Return a state with this rank's elements for each `ShardTensor`, and why one does not fit its parameter, if so.

    If all fit, the description in the state is replaced by `own`: DCP gives all ranks the first rank's.
    """
    positions = _positions(state_dict)
    state, found = dict(state_dict["state"]), False
    for index, (name, start, stop, _) in zip(positions, own["parts"], strict=False):
        for key, given in state.get(index, {}).items():
            value = getattr(given, "value", given)
            if not isinstance(value, ShardTensor):
                continue
            if (value.start, value.stop) != (start, stop):
                return state_dict, (
                    f"{key!r} of {name!r} is elements {value.start} to {value.stop}, here it must be {start} to {stop}"
                )
            local = value.to_local().detach()
            state[index] = {**state[index], key: local if value is given else replace(given, value=local)}
            found = True
    fits = found and len(positions) == len(own["parts"])
    return {**state_dict, "state": state, **({KEY: own} if fits else {})}, None


def _misfit(optimizer: Optimizer, state_dict: Mapping[str, Any], own: Mapping[str, Any]) -> str | None:
    """Return why the parameters of an optimizer, described as `own`, cannot have a state."""
    given = state_dict.get(KEY)
    if given is None:
        return _misfit_of_unmarked(optimizer, state_dict, own)
    for (name, *ours), (theirs_name, *theirs) in zip(own["parts"], given["parts"], strict=False):
        if ours != theirs:
            return (
                f"the state is of {given['of']}, this is {own['of']}: there the state of {theirs_name!r} is that of "
                f"elements {_range(theirs)}, here it must be that of elements {_range(ours)} of {name!r}"
            )
    if len(own["parts"]) != len(given["parts"]):
        return f"the state is of {len(given['parts'])} parameters, this optimizer has {len(own['parts'])}"
    return None


def _misfit_of_unmarked(optimizer: Optimizer, state_dict: Mapping[str, Any], own: Mapping[str, Any]) -> str | None:
    """Return which tensor of a state that does not say what it is of is that of a whole parameter."""
    parts = dict(zip(_positions(state_dict), own["parts"], strict=False))
    for param, index, key, value in _tensors(optimizer, state_dict):
        name, start, stop, numel = parts[index]
        if value.numel() == numel != stop - start and value.ndim == param.ndim:
            return (
                f"the state is of an unsharded model, this is {own['of']}: {key!r} of {name!r} has shape "
                f"{list(value.shape)}, and its shard here {list(param.shape)}"
            )
    return None


def _misshapen(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> str | None:
    """Return which tensor of a state has another shape than the optimizer has or makes.

    PyTorch's optimizers make numbers, and tensors like the parameter. Of others only what they already hold is known.
    """
    if hasattr(optimizer, "decoders"):
        return None  # it compares them itself, in all its formats
    known = type(optimizer).__module__.startswith("torch.optim") and type(optimizer).__name__ not in WHOLE_MATRICES
    for param, index, key, value in _tensors(optimizer, state_dict):
        expected = optimizer.state.get(param, {}).get(key, param if known else None)
        if isinstance(expected, Tensor) and value.numel() > 1 and value.shape != expected.shape:
            return f"{key!r} of parameter {index} has shape {list(value.shape)}, here it has {list(expected.shape)}"
    return None


def _tensors(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> Iterator[tuple[Tensor, Any, str, Tensor]]:
    """Yield the tensors of a state: the parameter, its key, and the name and the value of the tensor."""
    for param, index in zip(params_of(optimizer), _positions(state_dict), strict=False):
        for key, given in state_dict["state"].get(index, {}).items():
            value = getattr(given, "value", given)  # our AdamW keeps values from conversion in records
            if isinstance(value, Tensor):
                yield param, index, key, value


def _latest_step(state_dict: Mapping[str, Any]) -> int:
    """Return the highest step count in a state, 0 if there is none."""
    steps = [entry["step"] for entry in state_dict["state"].values() if isinstance(entry, Mapping) and "step" in entry]
    return max((int(getattr(step, "value", step)) for step in steps), default=0)


def _range(part: Sequence[int]) -> str:
    start, stop, numel = part
    return f"{start} to {stop} of {numel}"


# ---- gradient scalers and norms -------------------------------------------------------------------------------------

_Tensors = Tensor | Iterable[Tensor]


def _unscale(original: Callable[..., dict[torch.device, Tensor]]) -> Callable[..., dict[torch.device, Tensor]]:
    @wraps(original)
    def unscale(scaler: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> dict[torch.device, Tensor]:
        """Divide the gradients as ever. An infinity on any rank is reported on all."""
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
            if held - {id(shard) for shard in model.shards}:  # ignored parameters, whose gradients differ by rank
                for here in found.values():
                    here.copy_(model.context.on_any_rank(here))
        return found

    return unscale


def _total_norm(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(original)
    def total_norm(
        tensors: _Tensors, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> Tensor:
        """Return the norm over all ranks, if `tensors` are gradients of shards."""
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

    return total_norm


def _clip(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def clip(parameters: _Tensors, max_norm: float, total_norm: Tensor, foreach: bool | None = None) -> None:
        """Scale gradients. Those of shards are not read if the factor is 1.

        Raises:
            LayoutError: `parameters` are those inside a wrapped model, which have no gradients.
        """
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        for model in models_with(params):
            unsharded = model.shards.first_unsharded(params)
            if unsharded is not None:
                raise LayoutError(
                    f"clip_grad_norm_ was given the unsharded parameter {unsharded!r}, which has no "
                    "gradient: give it parameters() of the ShardLite model, not those of a module around or in it"
                )
            model.in_backward.refuse("clip_grad_norm_")
        model_with, shards = model_of_gradients([param.grad for param in params if param.grad is not None])
        if model_with is None:
            original(params, max_norm, total_norm, foreach)
        else:
            model_with.clipper.clip(shards, float(max_norm), total_norm)

    return clip


# ---- the list -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Patch:
    """One change in PyTorch."""

    target: str
    """What is changed."""

    rests_on: str
    """The private API of PyTorch that the change needs, or `none`."""

    why: str
    """What would happen without it."""

    apply: Callable[[], None]
    """Make the change."""


PATCHES: list[Patch] = []
"""Everything that ShardLite changes in PyTorch."""


def _patch(target: str, rests_on: str) -> Callable[[Callable[[], None]], None]:
    """Add the function below to the list. Its docstring says what would happen without it."""
    return lambda apply: PATCHES.append(Patch(target, rests_on, " ".join((apply.__doc__ or "").split()), apply))


@_patch("steps of all optimizers (global pre-hook and post-hook)", "none")
def _() -> None:
    """A step of unsharded parameters would train nothing, and a model would not know that its weights have changed."""
    # A compiled step must not be traced into the hooks, which look at parameters whose values are elsewhere.
    register_optimizer_step_pre_hook(torch._disable_dynamo(before_step))
    register_optimizer_step_post_hook(torch._disable_dynamo(after_step))


@_patch("`torch.optim.Optimizer.state_dict`", "none")
def _() -> None:
    """A state of shards would not say which shards it is of, and DCP would save it as whole tensors."""
    _replace_method(Optimizer, "state_dict", _state_dict)


@_patch("`torch.optim.Optimizer.load_state_dict`", "none")
def _() -> None:
    """The state of another rank would be loaded: PyTorch compares no shapes."""
    _replace_method(Optimizer, "load_state_dict", _load_state_dict)


@_patch(
    "classes of parameters that foreach and fused optimizers accept", "`torch.optim.optimizer._foreach_supported_types`"
)
def _() -> None:
    """PyTorch's optimizers would step shards one by one, because they choose `foreach` and `fused` by exact classes."""
    kinds: list[type] = getattr(import_module("torch.optim.optimizer"), "_foreach_supported_types", [])
    kinds.extend((Shard, SeenShard))


@_patch("`torch.amp.GradScaler`", "`GradScaler._unscale_grads_`")
def _() -> None:
    """Each rank would decide by itself whether to leave out a step."""
    _replace_method(GradScaler, "_unscale_grads_", _unscale)


@_patch("`torch.nn.utils.get_total_norm`, `clip_grad_norm_`", "`clip_grad._get_total_norm`, `clip_grad._no_grad`")
def _() -> None:
    """The norm of this rank's shards would be taken for the norm over all ranks."""
    _replace_inside(clip_grad._get_total_norm, _total_norm)


@_patch(
    "`torch.nn.utils.clip_grads_with_norm_`, `clip_grad_norm_`",
    "`clip_grad._clip_grads_with_norm_`, `clip_grad._no_grad`",
)
def _() -> None:
    """Clipping parameters that have no gradients would have no effect, in silence."""
    _replace_inside(clip_grad._clip_grads_with_norm_, _clip)


@_patch("`torch.nn.Module.to` and other conversions", "`torch.nn.Module._apply`")
def _() -> None:
    """Parameters of a wrapped model would get other memory, and the shards would not follow."""
    _replace_method(nn.Module, "_apply", refuse_if_wrapped)


@_patch("`torch.distributed.checkpoint.state_dict`, when it is imported", "private functions of the module")
def _() -> None:
    """Its functions would save placeholders, and gather and cut only DTensors."""
    name = "torch.distributed.checkpoint.state_dict"
    if name in sys.modules:
        _patch_state_dicts()
    else:
        sys.meta_path.insert(0, _AfterImport(name, _patch_state_dicts))


def _patch_state_dicts() -> object:
    """Do nothing unless `set_state_dict_patch` has replaced this function."""


def set_state_dict_patch(install: Callable[[], object]) -> None:
    """Set the function that patches `torch.distributed.checkpoint.state_dict`. It is in a room above this one."""
    global _patch_state_dicts
    _patch_state_dicts = install


def _replace_method(owner: type, name: str, change: Callable[[Any], Any]) -> None:
    """Replace a method of a class, for existing objects too."""
    setattr(owner, name, change(getattr(owner, name)))


def _replace_inside(function: Any, change: Callable[[Any], Any]) -> None:
    """Replace what a function runs under `torch.no_grad()`, for programs that have imported it by name too.

    PyTorch's `_no_grad` keeps it in a closure variable, `func`.
    """
    cell = (function.__closure__ or ())[function.__code__.co_freevars.index("func")]
    cell.cell_contents = change(cell.cell_contents)


class _AfterImport:
    """Finds one module as the other finders do, and calls `then` when it has been executed."""

    def __init__(self, name: str, then: Callable[[], object]) -> None:
        self._name, self._then = name, then

    def find_spec(self, fullname: str, path: object, target: ModuleType | None = None, /) -> ModuleSpec | None:
        """Return the module's spec, with a loader that calls `then`; `None` for any other module."""
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec: Any = find_spec(fullname)
        if spec is not None:
            sys.meta_path.insert(0, self)  # until it is executed: if it raises, the program may import it again
            spec.loader.exec_module = partial(self._execute, spec.loader.exec_module)
        return spec  # type: ignore[no-any-return]

    def _execute(self, execute: Callable[[ModuleType], None], module: ModuleType) -> None:
        execute(module)
        sys.meta_path.remove(self)
        self._then()


_lock = Lock()
_installed = False


def install_patches() -> None:
    """Apply all patches, once."""
    global _installed
    with _lock:
        for patch in () if _installed else PATCHES:
            patch.apply()
        _installed = True
