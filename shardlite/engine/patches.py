"""The list of everything that ShardLite patches in PyTorch, and the replacements.

`install_patches()` applies the list at the first `ShardLite(...)`. Objects that are not part of a wrapped model behave
as before. A program may already have imported a function of PyTorch by name, so a patch never rebinds the name of a
function. A patch replaces a method of a class, or an inner function that the imported function calls.
`docs/patches.md` lists the patches for users.

Each replacement is called with the original function and with the arguments of the call.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
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

from shardlite.engine.backward import in_backward
from shardlite.engine.conversions import refuse_if_wrapped
from shardlite.engine.steps import (
    after_step,
    before_step,
    model_of_gradients,
    model_with_param,
    models_of,
    models_with,
    params_of,
)
from shardlite.engine.watch import SeenShard
from shardlite.errors import LayoutError
from shardlite.grads import nested_backward
from shardlite.params import Shard
from shardlite.weights import check_transform, set_hooks_aside


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
        model.check_reduced("a gradient scaler")
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


# ---- backwards ------------------------------------------------------------------------------------------------------


def _run_nested(original: _Original, *args: Any, **kwargs: Any) -> Any:
    """Run a backward inside another."""
    with nested_backward():
        return original(*args, **kwargs)


def _run_backward(original: _Original, outputs: Any, *args: Any, accumulate_grad: bool, **kwargs: Any) -> Any:
    """Run a backward that may be limited to some inputs, `args[3]`. Shards stand for the module's own parameters.

    Raises:
        LayoutError: the gradients of shards are to be returned (`torch.autograd.grad`), or a transform of `torch.func`
            needs weights that are freed.
    """
    check_transform(outputs)
    original = partial(_run_nested, original) if in_backward() else original
    before, (inputs, *after) = args[:3], args[3:]
    ours = {id(each): model for each in inputs if (model := model_with_param(each)) is not None}
    if not ours:
        return original(outputs, *args, accumulate_grad=accumulate_grad, **kwargs)
    own = [model.shards.parameter_of(each) for each in inputs if (model := ours.get(id(each))) is not None]
    own = [param for param in own if param is not None and param.requires_grad]
    if own and not accumulate_grad:
        raise LayoutError(
            "torch.autograd.grad with respect to a shard: shards are not in autograd's graph. Use the module's own "
            "parameters (`model.module.parameters()`), which get this rank's gradients of full parameters"
        )
    # Shards stay among the inputs, because a penalty may be computed from them. Hooks inside the backward may use
    # placeholders, also if PyTorch has disabled this, because some of the inputs are placeholders.
    with torch._C._EnableTorchFunction():
        return original(outputs, *before, (*inputs, *own), *after, accumulate_grad=accumulate_grad, **kwargs)


def _disable_hooks(original: _Original, *args: Any, **kwargs: Any) -> Iterator[None]:
    """Disable saved-tensor hooks, as `torch.func.grad` does. Inside `gathered()`, set the library's hooks aside."""
    with set_hooks_aside():
        yield from original(*args, **kwargs)


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
"""Everything that ShardLite changes in PyTorch. Rooms above add their patches when they are imported."""


def patch(target: str, rests_on: str) -> Callable[[Callable[[], None]], None]:
    """Return a decorator that adds a function to `PATCHES`. The function's docstring is `why`."""
    return lambda apply: PATCHES.append(Patch(target, rests_on, " ".join((apply.__doc__ or "").split()), apply))


@patch("steps of all optimizers (global pre-hook and post-hook)", "none")
def _() -> None:
    """A step of unsharded parameters would train nothing, and a model would not know that its weights have changed."""
    # The compiler must not trace a step into the hooks, because the hooks read placeholders.
    register_optimizer_step_pre_hook(torch._disable_dynamo(before_step))
    register_optimizer_step_post_hook(torch._disable_dynamo(after_step))


@patch("`torch.optim.Optimizer.zero_grad`", "none")
def _() -> None:
    """A model would not know that gradients which `count_items` has divided were dropped."""
    replace_method(Optimizer, "zero_grad", torch._disable_dynamo(_zero_grad))


@patch("classes that foreach and fused optimizers accept", "`torch.optim.optimizer._foreach_supported_types`")
def _() -> None:
    """PyTorch's optimizers would step shards one by one, because they choose `foreach` and `fused` by exact classes."""
    kinds: list[type] = getattr(import_module("torch.optim.optimizer"), "_foreach_supported_types", [])
    kinds.extend((Shard, SeenShard))


@patch("`torch.amp.GradScaler`", "`GradScaler._unscale_grads_`")
def _() -> None:
    """Each rank would decide alone whether to skip a step."""
    replace_method(GradScaler, "_unscale_grads_", _unscale)


@patch("`torch.nn.utils.get_total_norm`, `clip_grad_norm_`", "`clip_grad._get_total_norm`, `clip_grad._no_grad`")
def _() -> None:
    """Gradients would be clipped by the norm of this rank's shards instead of the norm over all ranks."""
    _replace_inside(clip_grad._get_total_norm, _total_norm)


@patch("`torch.nn.utils.clip_grads_with_norm_`", "`clip_grad._clip_grads_with_norm_`, `clip_grad._no_grad`")
def _() -> None:
    """If the caller passed parameters that have no gradients, clipping would silently have no effect."""
    _replace_inside(clip_grad._clip_grads_with_norm_, _clip)


@patch("`torch.nn.utils.clip_grad_value_`", "`clip_grad._no_grad`")
def _() -> None:
    """Gradients that are accumulated and not reduced would not be clipped."""
    _replace_inside(clip_grad.clip_grad_value_, _clip_values)


@patch("`torch.autograd.backward`, `torch.autograd.grad`, `Tensor.backward`", "`torch.autograd._engine_run_backward`")
def _() -> None:
    """A backward limited to shards (`inputs=model.parameters()`) would compute no gradients, and a nested backward
    would count as a new one.
    """
    module: Any = torch.autograd
    module._engine_run_backward = partial(_run_backward, module._engine_run_backward)


@patch("`torch.func.grad`, `vjp`, `jacrev`, `hessian`", "closure of `torch.autograd.graph.disable_saved_tensors_hooks`")
def _() -> None:
    """These functions would not work inside `gathered()`, which makes saved-tensor hooks the innermost ones."""
    _replace_inside(torch.autograd.graph.disable_saved_tensors_hooks, _disable_hooks)


@patch("`torch.nn.Module.to` and other conversions", "`torch.nn.Module._apply`")
def _() -> None:
    """The parameters of a wrapped model would move to new memory, but its shards would not."""
    replace_method(nn.Module, "_apply", refuse_if_wrapped)


@patch("`torch.distributed.checkpoint.state_dict`, when it is imported", "private functions of the module")
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


def replace_method(owner: type, name: str, replacement: Callable[..., Any]) -> None:
    """Replace a method of a class. Existing objects of the class get the replacement too."""
    original = getattr(owner, name)

    @wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    setattr(owner, name, method)


def _replace_inside(function: Any, replacement: Callable[..., Any]) -> None:
    """Replace the function inside `function`, a wrapper that PyTorch's `_no_grad` or `contextmanager` has made.

    A program that has imported `function` by name gets the replacement too. The wrapper keeps the inner function in a
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
