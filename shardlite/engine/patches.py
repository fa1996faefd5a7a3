"""The patches of PyTorch that wrapped models need. `install_patches()` makes them at the first `ShardLite(...)`.

Each replacement is called with the original function and with the arguments of the call.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib import import_module
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
from shardlite.grads.solo import nested_backward
from shardlite.params import Shard
from shardlite.patches import change, install, replace_function, replace_inside
from shardlite.weights.saved_tensors import check_transform, set_hooks_aside


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


@change("steps of all optimizers (global pre-hook and post-hook)")
def _() -> None:
    """A step of unsharded parameters would train nothing, and a model would not know that its weights have changed."""
    # The compiler must not trace a step into the hooks, because the hooks read placeholders.
    register_optimizer_step_pre_hook(torch._disable_dynamo(before_step))
    register_optimizer_step_post_hook(torch._disable_dynamo(after_step))


@change("`torch.optim.Optimizer.zero_grad`")
def _() -> None:
    """A model would not know that gradients which `count_items` has divided were dropped."""
    replace_function(Optimizer, "zero_grad", torch._disable_dynamo(_zero_grad))


@change("classes that foreach and fused optimizers accept", rests_on="`torch.optim.optimizer._foreach_supported_types`")
def _() -> None:
    """PyTorch's optimizers would step shards one by one, because they choose `foreach` and `fused` by exact classes."""
    kinds: list[type] = getattr(import_module("torch.optim.optimizer"), "_foreach_supported_types", [])
    kinds.extend((Shard, SeenShard))


@change("`torch.amp.GradScaler`", rests_on="`GradScaler._unscale_grads_`")
def _() -> None:
    """Each rank would decide alone whether to skip a step."""
    replace_function(GradScaler, "_unscale_grads_", _unscale)


@change(
    "`torch.nn.utils.get_total_norm`, `clip_grad_norm_`", rests_on="`clip_grad._get_total_norm`, `clip_grad._no_grad`"
)
def _() -> None:
    """Gradients would be clipped by the norm of this rank's shards instead of the norm over all ranks."""
    replace_inside(clip_grad._get_total_norm, _total_norm)


@change("`torch.nn.utils.clip_grads_with_norm_`", rests_on="`clip_grad._clip_grads_with_norm_`, `clip_grad._no_grad`")
def _() -> None:
    """If the caller passed parameters that have no gradients, clipping would silently have no effect."""
    replace_inside(clip_grad._clip_grads_with_norm_, _clip)


@change("`torch.nn.utils.clip_grad_value_`", rests_on="`clip_grad._no_grad`")
def _() -> None:
    """Gradients that are accumulated and not reduced would not be clipped."""
    replace_inside(clip_grad.clip_grad_value_, _clip_values)


@change(
    "`torch.autograd.backward`, `torch.autograd.grad`, `Tensor.backward`",
    rests_on="`torch.autograd._engine_run_backward`",
)
def _() -> None:
    """A backward limited to shards (`inputs=model.parameters()`) would compute no gradients, and a nested backward
    would count as a new one.
    """
    module: Any = torch.autograd
    module._engine_run_backward = partial(_run_backward, module._engine_run_backward)


@change(
    "`torch.func.grad`, `vjp`, `jacrev`, `hessian`",
    rests_on="closure of `torch.autograd.graph.disable_saved_tensors_hooks`",
)
def _() -> None:
    """These functions would not work inside `gathered()`, which makes saved-tensor hooks the innermost ones."""
    replace_inside(torch.autograd.graph.disable_saved_tensors_hooks, _disable_hooks)


@change("`torch.nn.Module.to` and other conversions", rests_on="`torch.nn.Module._apply`")
def _() -> None:
    """The parameters of a wrapped model would move to new memory, but its shards would not."""
    replace_function(nn.Module, "_apply", refuse_if_wrapped)


install_patches = partial(install, "torch")
"""Make all changes in PyTorch. Later calls do nothing."""
