"""Train with Hugging Face's Accelerate: `install()` lets `Accelerator.prepare` wrap models with `ShardLite`.

    from shardlite.integrations.accelerate import install

    install(stage=3)             # on every rank, before the model is prepared; the rest of the program is unchanged
    accelerator = Accelerator()
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

A checkpoint of `save_state` is a folder as Accelerate writes it, in which the weights and the optimizer's state are in
a folder `shardlite_<i>` for model `i` instead of `model.safetensors` and `optimizer.bin`.

Tried with accelerate 1.15.0.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import shardlite
from shardlite import CommError, LayoutError, ShardLite
from shardlite.extend import agree, models_of, patch, reducing
from shardlite.extend import install as install_patches
from shardlite.integrations._adapters import savable
from shardlite.integrations._wrapping import (
    Original,
    adopt,
    bare,
    check_options,
    check_processes,
    load_full_state,
    model_of,
    params_of,
    read_on_first,
    replaced,
    required,
)

with required(__name__, "accelerate >= 1.15", "accelerate"):
    from accelerate import Accelerator
    from accelerate.local_sgd import LocalSGD
    from accelerate.utils import load
    from safetensors.torch import load_model

    from shardlite.integrations._accelerator import (
        compile_as,
        read_weights,
        sharded,
        uncompiled,
        wrap,
        wrapper_of,
    )

_options: dict[str, object] = {}
"""Keywords of `ShardLite` for the models that are prepared next; empty if `install` was not called."""


def install(stage: int = 3, **options: Any) -> None:
    """Let `accelerate.Accelerator.prepare` wrap models with `ShardLite` instead of `DistributedDataParallel`.

    Call it on every rank, before the first model is prepared. A program that prepares no model, or that has no process
    group, is not changed. A second call replaces the options; models that are already prepared keep theirs.

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
    install_patches("accelerate")


def uninstall() -> None:
    """Let `prepare` wrap models with `DistributedDataParallel` again. Models that are already prepared stay wrapped."""
    _options.clear()


# ---- preparation ----------------------------------------------------------------------------------------------------


@patch(Accelerator, "prepare_model", package="accelerate")
def _prepare_model(
    original: Original,
    accelerator: Accelerator,
    model: nn.Module,
    device_placement: bool | None = None,
    evaluation_mode: bool = False,
) -> object:
    """`DistributedDataParallel` would wrap the model."""
    if not _options:
        return original(accelerator, model, device_placement, evaluation_mode)
    module = uncompiled(model)
    wrapped = wrapper_of(accelerator, module)
    if wrapped is None and isinstance(module, ShardLite) and "_is_accelerate_prepared" in vars(module):
        wrapped = module  # free_memory() has forgotten it, or another accelerator has prepared it
        accelerator._models.append(wrapped)
    if wrapped is not None:
        compile_as(model, wrapped)
    else:
        grouped = torch.distributed.is_available() and torch.distributed.is_initialized()
        if not evaluation_mode:
            check_processes("install()", accelerator.num_processes, on_cpus="Accelerator(cpu=True)", shards=grouped)
        if evaluation_mode or not grouped or getattr(model, "_is_accelerate_prepared", False):
            return original(accelerator, model, device_placement, evaluation_mode)
        _check(accelerator)
        if not any(param.requires_grad for param in model.parameters()):
            return original(accelerator, model, device_placement, True)  # nothing to average: stays full on each rank
        wrapped = _wrap(original, accelerator, model)
    for optimizer in accelerator._optimizers:
        adopt(wrapped, bare(optimizer))
    return wrapped


def _wrap(original: Original, accelerator: Accelerator, model: nn.Module) -> ShardLite:
    try:
        return wrap(accelerator, model, partial(original, accelerator), _options)
    except CommError as error:
        raise CommError(
            f"{error}. Every rank must call shardlite.integrations.accelerate.install(), with the same options, before "
            "it prepares the model"
        ) from error


def _check(accelerator: Accelerator) -> None:
    """Raise `LayoutError` if the accelerator has an option that `ShardLite` does not support."""
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


@patch(Accelerator, "trigger_sync_in_backward", package="accelerate")
def _trigger_sync_in_backward(original: Original, model: nn.Module) -> AbstractContextManager[None]:
    """Gradients would stay unreduced, because only `DistributedDataParallel` is known."""
    return reducing(model) if isinstance(model, ShardLite) else original(model)


@patch(Accelerator, "join_uneven_inputs", package="accelerate")
def _join_uneven_inputs(
    original: Original, accelerator: Accelerator, joinables: Sequence[object], even_batches: bool | None = None
) -> AbstractContextManager[object]:
    """Ranks with more batches would wait for the other ranks."""
    if not sharded(joinables):
        context: AbstractContextManager[object] = original(accelerator, joinables, even_batches)
        return context
    if accelerator.even_batches if even_batches is None else even_batches:
        return nullcontext(joinables)
    raise LayoutError(
        "join_uneven_inputs(): a ShardLite model needs all ranks in each forward: iterate over "
        "`model.join(loader)` instead, with DataLoaderConfiguration(even_batches=False)"
    )


@patch(LocalSGD, "__enter__", package="accelerate")
def _enter_local_sgd(original: Original, local: LocalSGD) -> object:
    """It would average shards of different parameters."""
    if local.enabled and isinstance(local.model, ShardLite):
        raise LayoutError(
            "LocalSGD: a rank has only shards of the weights, so it cannot step alone: use "
            "Accelerator(gradient_accumulation_steps=...), or train without install()"
        )
    return original(local)


# ---- weights and checkpoints ----------------------------------------------------------------------------------------


@patch(Accelerator, "save_state", package="accelerate")
def _save_state(original: Original, accelerator: Accelerator, *args: object, **kwargs: object) -> object:
    """Rank 0 would save its shards as if they were full."""
    return _Save(accelerator).run(original, *args, **kwargs)


@patch(Accelerator, "load_state", package="accelerate")
def _load_state(
    original: Original,
    accelerator: Accelerator,
    input_dir: str | None = None,
    load_kwargs: dict[str, object] | None = None,
    **options: object,
) -> object:
    """Each rank would load the shards of rank 0."""
    return _Load(accelerator, load_kwargs, options).run(original, input_dir)


class _Save:
    """Save sharded models in `save_state`, and let Accelerate save the other models and their optimizers.

    Accelerate numbers its files without the sharded models:

        models     sharded        plain                sharded        plain
        files      shardlite_0    model.safetensors    shardlite_2    model_1.safetensors
    """

    def __init__(self, accelerator: Accelerator) -> None:
        _check_optimizers("save_state", accelerator)
        self._accelerator = accelerator
        self._optimizers: list[Optimizer] = accelerator._optimizers
        self._get_state_dict = accelerator.get_state_dict
        self._hooked = bool(accelerator._save_model_state_pre_hook)
        self._own: list[dict[str, Tensor]] = []
        self._hooks = ExitStack()

    def run(self, original: Original, *args: object, **kwargs: object) -> object:
        """Call Accelerate's method. It gets weights of sharded models only for hooks of the program."""
        accelerator = self._accelerator
        handle = accelerator.register_save_state_pre_hook(self._save_sharded)  # the last hook: others have run
        plain = [each for each in self._optimizers if not model_of(each)]
        with replaced(accelerator, _optimizers=plain, get_state_dict=self._weights), self._hooks:
            try:
                return original(accelerator, *args, **kwargs)
            finally:
                handle.remove()

    def _weights(self, model: nn.Module, unwrap: bool = True) -> object:
        """Return the weights that hooks get. Until they have run, `state_dict()` of the module has them too."""
        if not isinstance(model, ShardLite):
            return self._get_state_dict(model, unwrap)
        self._own.append(self._get_state_dict(model, unwrap) if self._hooked else {})
        if self._hooked:
            self._hooks.enter_context(savable(model, self._own[-1]))
        return self._own[-1]

    def _save_sharded(self, models: Sequence[nn.Module], weights: list[object], folder: str) -> None:
        """Save sharded models, and leave the weights of other models to accelerate."""
        self._hooks.close()
        if len(weights) == len(models):  # a hook may have put other dicts into the list
            pairs = zip(models, list(weights), strict=True)
            weights[:] = [each for model, each in pairs if not isinstance(model, ShardLite)]
        else:
            weights[:] = [each for each in weights if not any(each is own for own in self._own)]
        for number, model in enumerate(self._accelerator._models):
            if isinstance(model, ShardLite):
                for path, optimizer in _parts(folder, number, model, self._optimizers):
                    shardlite.save(path, model, optimizer, keep=1)


class _Load:
    """Load sharded models in `load_state`, from folders of `_Save` or from files of a run without sharding.

    The number of a file is the position of its model or optimizer in the list of all that are in files. If sharded
    models are among them, Accelerate would number them differently, so this class loads all of the files.
    """

    def __init__(
        self, accelerator: Accelerator, load_kwargs: dict[str, object] | None, options: dict[str, object]
    ) -> None:
        """Prepare a call, given its arguments. `options` are keywords of `load_state_dict`, and `map_location`."""
        _check_optimizers("load_state", accelerator)
        self._accelerator = accelerator
        self._load_kwargs, self._options = load_kwargs or {}, options
        self._models: list[nn.Module] = list(accelerator._models)
        self._optimizers: list[Optimizer] = list(accelerator._optimizers)
        self._saved: set[int] = set()
        """Numbers of the models that are in folders of ShardLite."""

        self._arrived = False
        """Whether this rank has told other ranks which folders it sees."""

    def run(self, original: Original, input_dir: str | None) -> object:
        """Call accelerate's method between the two parts of the load. Hooks of the program run after the first part."""
        accelerator = self._accelerator
        first = accelerator.register_load_state_pre_hook(self._load_sharded)
        accelerator._load_model_state_pre_hook.move_to_end(first.id, last=False)  # before hooks of the program
        last = accelerator.register_load_state_pre_hook(self._load_files)
        with replaced(accelerator, _optimizers=self._optimizers):
            try:
                return original(accelerator, input_dir, self._load_kwargs, **self._options)
            except Exception as error:
                if not self._arrived:
                    self._agree([], error)  # other ranks wait for this rank
                raise
            finally:
                first.remove()
                last.remove()

    def _load_sharded(self, models: Sequence[nn.Module], folder: str) -> None:
        """Load the models that are in folders of ShardLite, and their optimizers."""
        names = sorted(path.name for path in Path(folder).glob("shardlite_[0-9]*"))
        try:
            self._agree([f"{Path(folder).name!r} with {names}"])
        except LayoutError as error:
            raise LayoutError(f"load_state: {error}. All ranks must load the same folder") from error
        self._saved = {int(name.split("_")[1]) for name in names}
        for number in self._saved:
            if number < len(self._models) and not isinstance(self._models[number], ShardLite):
                raise LayoutError(
                    f"load_state: {folder} is a checkpoint of a ShardLite model, and this model is not wrapped: call "
                    "install(), and start the program with torchrun. With one process, also call "
                    "torch.distributed.init_process_group('gloo') before Accelerator()"
                )
        for number, model in enumerate(self._models):
            if number in self._saved and isinstance(model, ShardLite):
                for path, optimizer in _parts(folder, number, model, self._optimizers):
                    shardlite.load(path, model, optimizer)

    def _load_files(self, models: list[nn.Module], folder: str) -> None:
        """Load files if sharded models are in them. `models` are those that no hook has removed."""
        saved = [model for number, model in enumerate(self._models) if number in self._saved]
        models[:] = [each for each in models if not any(each is model for model in saved)]
        optimizers = self._optimizers
        optimizers[:] = [each for each in optimizers if model_of(each) not in saved]
        if sharded(models):
            options = {name: value for name, value in self._options.items() if name != "map_location"}
            for number, model in enumerate(models):
                _load_weights(model, Path(folder), number, options)
            models.clear()
        if any(model_of(each) for each in optimizers):
            for number, optimizer in enumerate(optimizers):
                self._load_optimizer(optimizer, Path(folder) / f"optimizer{_ending(number)}.bin")
            optimizers.clear()

    def _load_optimizer(self, optimizer: Optimizer, file: Path) -> None:
        model, read = model_of(optimizer), partial(load, file, map_location="cpu", **self._load_kwargs)
        load_full_state(optimizer, read() if model is None else read_on_first(model, f"load {file}", read))

    def _agree(self, facts: Sequence[str], problem: Exception | None = None) -> None:
        """Check that all ranks have the same facts, and that no rank has a problem. Collective."""
        self._arrived = True
        for model in sharded(self._models)[:1]:  # all of them have the same ranks
            agree(model, "load_state", facts, problem, subject="files")


def _check_optimizers(caller: str, accelerator: Accelerator) -> None:
    """Raise `LayoutError` if an optimizer has shards of a model that the accelerator does not have."""
    for optimizer in accelerator._optimizers:
        if not set(accelerator._models).issuperset(models_of(params_of(optimizer))):
            raise LayoutError(
                f"{caller}: a prepared {type(bare(optimizer)).__name__} has parameters of a ShardLite model that this "
                "accelerator does not have: pass the model to prepare(), also after free_memory()"
            )


def _parts(
    folder: str, number: int, model: ShardLite, optimizers: Sequence[Optimizer]
) -> Iterator[tuple[Path, Optimizer | None]]:
    """Yield the path of each checkpoint of a model in a folder of `save_state`, and the optimizer in this checkpoint.

    Weights are saved once for each optimizer of the model.
    """
    own = [bare(each) for each in optimizers if model_of(each) is model]
    for order, optimizer in enumerate(own or [None]):
        yield Path(folder) / (f"shardlite_{number}" + (f"_optimizer_{order}" if order else "")), optimizer


def _load_weights(model: nn.Module, folder: Path, number: int, options: dict[str, Any]) -> None:
    """Load weights from a file of accelerate. Collective if the model is sharded."""
    names = [f"model{_ending(number)}.safetensors", f"pytorch_model{_ending(number)}.bin"]
    if isinstance(model, ShardLite):
        weights = read_on_first(model, f"load {folder}", lambda: read_weights(folder, names))
        # `torch.compile` adds a prefix to the names of what it returns.
        own = {name.removeprefix("_orig_mod."): value for name, value in (weights or {}).items()}
        model.load_full_state_dict(own, **options)
    elif (folder / names[0]).exists():
        load_model(model, folder / names[0], **options)
    else:
        model.load_state_dict(load(folder / names[1], map_location="cpu"), **options)


def _ending(number: int) -> str:
    """Return what accelerate appends to the name of a file."""
    return f"_{number}" if number else ""
