"""What the bridges of Transformers and of Accelerate do to an `Accelerator`, and how they read its files."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DynamoBackend, is_compiled_module
from accelerate.utils.other import compile_regions_fsdp2
from torch import Tensor, nn
from torch.optim import Optimizer

from shardlite.checkpoint import load_optimizer_state
from shardlite.errors import LayoutError
from shardlite.integrations._wrapping import adopt, holds, read_on_first, replaced
from shardlite.model import ModelState, ShardLite


def wrap(
    accelerator: Any,
    model: nn.Module,
    prepare_model: Callable[[nn.Module, bool, bool], Any],
    options: Mapping[str, Any],
) -> ShardLite:
    """Wrap a model as `Accelerator.prepare_model` wraps it with `DistributedDataParallel`, and register it. Collective.

    Args:
        accelerator: the accelerator, which says how to mix precision, how to compile, and whose buffers are used.
        model: a module, a `ShardLite` model that the program has wrapped, or what `torch.compile` makes of one of them.
            It is then compiled in place.
        prepare_model: the method of the accelerator.
        options: keywords of `ShardLite`, except `device`.
    """
    plugin = accelerator.state.dynamo_plugin
    compiles, backend = plugin.to_kwargs(), plugin.backend
    given, model = model, uncompiled(model)
    with replaced(plugin, backend=DynamoBackend.NO):  # it would compile the unsharded model
        prepare_model(model, False, True)  # mixed precision only
    accelerator._models.pop()
    vars(model).pop("_is_accelerate_prepared")
    if isinstance(model, ShardLite):
        wrapped = model
    else:
        ddp = accelerator.ddp_handler
        buffers = "own" if ddp is not None and not ddp.broadcast_buffers else "rank0"
        wrapped = ShardLite(model, **{"buffers": buffers, "device": accelerator.device, **options})
    if given is not model:
        compile_as(given, wrapped)
    elif backend != DynamoBackend.NO:
        compile_in_place = compile_regions_fsdp2 if plugin.use_regional_compilation else nn.Module.compile
        compile_in_place(wrapped.module, **compiles)
    ModelState(wrapped).full.gathers_states = True  # as `save_pretrained()` on all ranks expects
    vars(wrapped)["_is_accelerate_prepared"] = True
    accelerator._models.append(wrapped)
    return wrapped


def uncompiled(model: Any) -> Any:
    """Return the module that `torch.compile` has compiled, and any other module unchanged."""
    return model._orig_mod if is_compiled_module(model) else model


def compile_as(compiled: Any, model: ShardLite) -> None:
    """Compile a model in place with the options of `compiled`, if `torch.compile` has made it."""
    if is_compiled_module(compiled):
        model.module._compiled_call_impl = compiled.dynamo_ctx(model.module._call_impl)


def sharded(models: Iterable[Any]) -> list[ShardLite]:
    """Return the models that are wrapped."""
    return [model for model in models if isinstance(model, ShardLite)]


def wrapper_of(accelerator: Any, model: nn.Module) -> ShardLite | None:
    """Return the model of an accelerator that `model` is, or is the module of."""
    return next((each for each in sharded(accelerator._models) if model is each or model is each.module), None)


def whole_weights(accelerator: Any, model: ShardLite) -> dict[str, Any]:
    """Return the whole weights on the ranks that write files, and an empty dict on others. Collective."""
    every_node = accelerator.project_configuration.save_on_each_node
    return model.full_state_dict(rank=None if every_node else 0)


def place(accelerator: Any, optimizer: Optimizer, device_placement: bool | None) -> bool | None:
    """Give shards to an optimizer that was built before. Return whether accelerate may move its state."""
    for model in sharded(accelerator._models):
        adopt(model, optimizer)
        if holds(optimizer, model):
            device_placement = False  # shards are on their device already
    return device_placement


# ---- files of runs without sharding ---------------------------------------------------------------------------------


def read_weights(folder: Path, names: Sequence[str] = ("model.safetensors", "pytorch_model.bin")) -> dict[str, Tensor]:
    """Return the weights that are in a folder, in a file with one of `names`, or in several files with an index.

    Raises:
        LayoutError: there is no such file.
    """
    for name in names:
        index = folder / f"{name}.index.json"
        if (folder / name).exists():
            return dict(read_file(folder / name))
        if index.exists():
            files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            return {key: value for file in files for key, value in read_file(folder / file).items()}
    raise LayoutError(f"{folder} has no weights: none of {', '.join(names)}")


def read_file(file: Path) -> Any:
    """Return what a file has, on the CPU."""
    if file.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(file)
    return torch.load(file, map_location="cpu", weights_only=True)


def load_whole_optimizer(model: ShardLite, optimizer: Optimizer, file: Path) -> None:
    """Load the whole state of an optimizer, which a run without sharding has saved. Collective."""
    load_optimizer_state(model, optimizer, read_on_first(model, f"load {file}", lambda: read_file(file)))
