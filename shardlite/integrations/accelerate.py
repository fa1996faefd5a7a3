"""Train with Hugging Face's Accelerate: `install()` lets `Accelerator.prepare` wrap models with `ShardLite`.

    from shardlite.integrations.accelerate import install

    install(stage=3)             # on every rank, before the model is prepared; the rest of the program is unchanged
    accelerator = Accelerator()
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

A checkpoint of `save_state` is a folder as Accelerate writes it, in which the weights and the optimizer's state are in
a folder `shardlite_<i>` for model `i` instead of `model.safetensors` and `optimizer.bin`.

Tried with accelerate 1.15.0.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardlite import checkpoint
from shardlite.errors import CommError, LayoutError
from shardlite.grads import Mode
from shardlite.integrations._wrapping import (
    adopt,
    bare,
    check_options,
    check_processes,
    holds,
    read_on_first,
    replaced,
)
from shardlite.model import ModelState, ShardLite

try:
    from accelerate import Accelerator
    from accelerate.local_sgd import LocalSGD

    from shardlite.integrations._accelerator import (
        load_whole_optimizer,
        place,
        read_weights,
        sharded,
        whole_weights,
        wrap,
        wrapper_of,
    )
except ImportError as error:
    raise ModuleNotFoundError(
        "shardlite.integrations.accelerate requires accelerate >= 1.15: pip install 'shardlite[accelerate]'",
        name=error.name,
    ) from error

_Original = Callable[..., Any]

_options: dict[str, Any] = {}
"""Keywords of `ShardLite` for the models that are prepared next."""

_originals: dict[tuple[type, str], Any] = {}
"""The attributes that `install` has replaced; empty if it is not installed."""


def install(stage: int = 3, **options: Any) -> None:
    """Let `accelerate.Accelerator.prepare` wrap models with `ShardLite` instead of `DistributedDataParallel`.

    Call it on every rank, before the first model is prepared. A program that prepares no model, or that has no process
    group, is not changed. A second call replaces the options; models that are already prepared
    keep theirs.

    Args:
        stage: ZeRO stage, as for `ShardLite`.
        options: other keywords of `ShardLite`, except `device`, for all models. `buffers` defaults to the
            `broadcast_buffers` of `DistributedDataParallelKwargs`.

    Raises:
        TypeError: `ShardLite` has no such keyword.
        ValueError: `stage` is not 0, 1, 2 or 3.

    Example:
        >>> install(stage=2, precision=Precision(compute=torch.bfloat16))
        >>> accelerator = Accelerator()
    """
    check_options("install()", {"stage": stage, **options})
    _options.clear()
    _options.update(options, stage=stage)
    _unwrap_models()
    if not _originals:
        for patch in PATCHES:
            _replace(patch)


def uninstall() -> None:
    """Undo `install`. Models that are already prepared stay wrapped. Without `install` before, do nothing."""
    for (owner, name), original in _originals.items():
        setattr(owner, name, original)
    _originals.clear()
    _options.clear()


# ---- preparation ----------------------------------------------------------------------------------------------------


def _prepare_model(
    original: _Original,
    accelerator: Any,
    model: nn.Module,
    device_placement: bool | None = None,
    evaluation_mode: bool = False,
) -> Any:
    """`DistributedDataParallel` would wrap the model."""
    known = wrapper_of(accelerator, model)
    if known is not None:
        return known
    grouped = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not evaluation_mode:
        check_processes("install()", accelerator.num_processes, on_cpus="Accelerator(cpu=True)", shards=grouped)
    if evaluation_mode or not grouped or getattr(model, "_is_accelerate_prepared", False):
        return original(accelerator, model, device_placement, evaluation_mode)
    _check(accelerator)
    if not any(param.requires_grad for param in model.parameters()):
        return original(accelerator, model, device_placement, True)  # nothing to average: it stays whole on each rank
    try:
        wrapped = wrap(accelerator, model, partial(original, accelerator), _options)
    except CommError as error:
        raise CommError(
            f"{error}. Every rank must call shardlite.integrations.accelerate.install(), with the same options, before "
            "it prepares the model"
        ) from error
    for optimizer in accelerator._optimizers:
        adopt(wrapped, bare(optimizer))
    return wrapped


def _prepare_optimizer(
    original: _Original, accelerator: Any, optimizer: Optimizer, device_placement: bool | None = None
) -> Any:
    """An optimizer that was built before `prepare` would hold parameters that have no gradients."""
    if getattr(optimizer, "_is_accelerate_prepared", False):
        return original(accelerator, optimizer, device_placement)
    return original(accelerator, optimizer, place(accelerator, optimizer, device_placement))


def _check(accelerator: Any) -> None:
    """Raise `LayoutError` if the accelerator asks for something that `ShardLite` does not do."""
    kind = accelerator.distributed_type.value
    if kind != "NO" and not kind.startswith("MULTI_"):
        raise LayoutError(f"install(): this Accelerator uses {kind}: remove its plugin, or do not call install()")
    if accelerator.parallelism_config is not None:
        raise LayoutError(
            "install(): this Accelerator has a ParallelismConfig: remove it. For hybrid sharding pass a DeviceMesh to "
            "install(group=...)"
        )
    if accelerator.mixed_precision == "fp8":
        raise LayoutError("install(): mixed_precision='fp8' is not supported: use 'bf16'")
    ddp = accelerator.ddp_handler
    for name in ("comm_hook", "comm_wrapper"):
        hook = getattr(ddp, name, None)
        if hook is not None and hook.value != "no":
            raise LayoutError(
                f"install(): DistributedDataParallelKwargs({name}={hook.value!r}) is not supported: remove it. To send "
                "gradients in 16 bits, use install(precision=Precision(reduce=torch.bfloat16))"
            )


# ---- training -------------------------------------------------------------------------------------------------------


@contextmanager
def _trigger_sync_in_backward(original: _Original, model: nn.Module) -> Iterator[None]:
    """Gradients would stay unreduced, because only `DistributedDataParallel` is known."""
    own = ModelState(model).bridge.backward.accumulating(Mode.STEP) if isinstance(model, ShardLite) else None
    with own or original(model):
        yield


def _join_uneven_inputs(
    original: _Original, accelerator: Any, joinables: Sequence[Any], even_batches: bool | None = None
) -> AbstractContextManager[Any]:
    """Ranks with more batches would wait for the other ranks."""
    if not sharded(joinables):
        context: AbstractContextManager[Any] = original(accelerator, joinables, even_batches)
        return context
    if accelerator.even_batches if even_batches is None else even_batches:
        return nullcontext(joinables)
    raise LayoutError(
        "join_uneven_inputs(): a ShardLite model needs all ranks in each forward: iterate over "
        "`model.join(loader)` instead, with DataLoaderConfiguration(even_batches=False)"
    )


def _enter_local_sgd(original: _Original, local: Any) -> Any:
    """It would average shards of different parameters."""
    if local.enabled and isinstance(local.model, ShardLite):
        raise LayoutError(
            "LocalSGD: a rank has only shards of the weights, so it cannot step alone: use "
            "Accelerator(gradient_accumulation_steps=...), or train without install()"
        )
    return original(local)


# ---- weights and checkpoints ----------------------------------------------------------------------------------------


class _Weights(dict[str, Any]):
    """Weights of a sharded model that `save_state` passes to hooks. They are not written to `model.safetensors`."""


def _get_state_dict(original: _Original, accelerator: Any, model: nn.Module, unwrap: bool = True) -> Any:
    """The state dict would have shards instead of weights. Collective; the weights are on rank 0."""
    wrapped = model if isinstance(model, ShardLite) else wrapper_of(accelerator, model)
    return original(accelerator, model, unwrap) if wrapped is None else whole_weights(accelerator, wrapped)


def _save_state(original: _Original, accelerator: Any, *args: Any, **kwargs: Any) -> Any:
    """Rank 0 would save its shards as if they were whole."""
    optimizers = accelerator._optimizers
    hooked = bool(accelerator._save_model_state_pre_hook)

    def weights_of(model: nn.Module, unwrap: bool = True) -> Any:
        whole = hooked or not isinstance(model, ShardLite)
        weights = Accelerator.get_state_dict(accelerator, model, unwrap) if whole else {}
        return _Weights(weights) if isinstance(model, ShardLite) else weights

    def save(models: Sequence[nn.Module], weights: list[Any], folder: str) -> None:
        weights[:] = [each for each in weights if not isinstance(each, _Weights)]
        for path, model, optimizer in _parts(accelerator._models, optimizers, folder):
            checkpoint.save(path, model, optimizer, keep=1)

    handle = accelerator.register_save_state_pre_hook(save)  # the last hook: those of the program have run
    with replaced(accelerator, _optimizers=_unsharded(accelerator._models, optimizers), get_state_dict=weights_of):
        try:
            return original(accelerator, *args, **kwargs)
        finally:
            handle.remove()


def _load_state(original: _Original, accelerator: Any, *args: Any, **kwargs: Any) -> Any:
    """Each rank would load the shards of rank 0."""
    optimizers = accelerator._optimizers

    def load_first(models: Sequence[nn.Module], folder: str) -> None:
        for number, model in enumerate(accelerator._models):
            if not isinstance(model, ShardLite) and _path(folder, number).exists():
                raise LayoutError(
                    f"load_state: {folder} is a checkpoint of a ShardLite model, and this model is not wrapped: call "
                    "install(), and start the program with torchrun. With one process, also call "
                    "torch.distributed.init_process_group('gloo') before Accelerator()"
                )
        for path, model, optimizer in _parts(accelerator._models, optimizers, folder):
            if path.exists():
                checkpoint.load(path, model, optimizer)
            else:
                _load_whole(accelerator, model, optimizer, optimizers, Path(folder))

    def drop(models: list[nn.Module], folder: str) -> None:
        models[:] = [model for model in models if not isinstance(model, ShardLite)]

    first = accelerator.register_load_state_pre_hook(load_first)
    accelerator._load_model_state_pre_hook.move_to_end(first.id, last=False)  # hooks of the program may overwrite it
    last = accelerator.register_load_state_pre_hook(drop)
    with replaced(accelerator, _optimizers=_unsharded(accelerator._models, optimizers)):
        try:
            return original(accelerator, *args, **kwargs)
        finally:
            first.remove()
            last.remove()


def _parts(
    models: Sequence[Any], optimizers: Sequence[Any], folder: str
) -> Iterator[tuple[Path, ShardLite, Optimizer | None]]:
    """Yield the folder, the model and the optimizer of each checkpoint in a folder of `save_state`.

    Weights are saved once for each optimizer of a model.
    """
    for number, model in enumerate(models):
        if isinstance(model, ShardLite):
            own: list[Optimizer | None] = [bare(each) for each in optimizers if holds(each, model)]
            for place, optimizer in enumerate(own or [None]):
                yield _path(folder, number, place), model, optimizer


def _path(folder: str, model: int, optimizer: int = 0) -> Path:
    return Path(folder) / (f"shardlite_{model}" + (f"_optimizer_{optimizer}" if optimizer else ""))


def _load_whole(
    accelerator: Any, model: ShardLite, optimizer: Optimizer | None, optimizers: Sequence[Any], folder: Path
) -> None:
    """Load the files that `save_state` writes without ShardLite. Collective."""
    number = accelerator._models.index(model)
    ending = f"_{number}" if number else ""
    names = [f"model{ending}.safetensors", f"pytorch_model{ending}.bin"]
    model.load_full_state_dict(read_on_first(model, f"load {folder}", lambda: read_weights(folder, names)))
    if optimizer is not None:
        place = [bare(each) for each in optimizers].index(optimizer)
        load_whole_optimizer(model, optimizer, folder / f"optimizer{f'_{place}' if place else ''}.bin")


# ---- models and optimizers of an accelerator ------------------------------------------------------------------------


def _unsharded(models: Sequence[Any], optimizers: Sequence[Any]) -> list[Any]:
    """Return the optimizers that hold no shard of any model."""
    return [each for each in optimizers if not any(holds(each, model) for model in sharded(models))]


# ---- patches --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Patch:
    """A method of accelerate that `install` replaces."""

    owner: type
    """The class."""

    name: str
    """The name of the method."""

    replacement: Callable[..., Any]
    """The function that is called instead, with the original method first. Its docstring says what would happen."""


PATCHES = [
    Patch(Accelerator, "prepare_model", _prepare_model),
    Patch(Accelerator, "prepare_optimizer", _prepare_optimizer),
    Patch(Accelerator, "trigger_sync_in_backward", _trigger_sync_in_backward),
    Patch(Accelerator, "join_uneven_inputs", _join_uneven_inputs),
    Patch(LocalSGD, "__enter__", _enter_local_sgd),
    Patch(Accelerator, "get_state_dict", _get_state_dict),
    Patch(Accelerator, "save_state", _save_state),
    Patch(Accelerator, "load_state", _load_state),
]
"""Everything that `install` changes in accelerate, besides `extract_model_from_parallel`."""


def _replace(patch: Patch) -> None:
    held = inspect.getattr_static(patch.owner, patch.name)
    original = getattr(patch.owner, patch.name)

    @wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        return patch.replacement(original, *args, **kwargs)

    setattr(patch.owner, patch.name, staticmethod(method) if isinstance(held, staticmethod) else method)
    _originals[patch.owner, patch.name] = held


_ORIGINAL = "_shardlite_original"


def _unwrap_models() -> None:
    """Let `extract_model_from_parallel` return the module of a `ShardLite` model. Later calls do nothing.

    Transformers, TRL and accelerate itself have imported the function by name. Therefore its code is replaced, and the
    name keeps its object. For other models the function is unchanged.
    """
    from accelerate.utils import extract_model_from_parallel as function

    names = function.__globals__
    if _ORIGINAL in names:
        return
    original = FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    names[_ORIGINAL] = original
    names["_shardlite_module_of"] = _module_of
    function.__wrapped__ = original  # `inspect.signature` follows it
    function.__defaults__ = None
    function.__code__ = _replacement.__code__


def _module_of(model: Any) -> Any:
    """Return the module of a `ShardLite` model, and any other model unchanged."""
    return model.module if isinstance(model, ShardLite) else model


def _replacement(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Code of the patched function. Its global names are those of accelerate's module."""
    return _shardlite_original(_shardlite_module_of(model), *args, **kwargs)  # type: ignore[name-defined]  # noqa: F821
