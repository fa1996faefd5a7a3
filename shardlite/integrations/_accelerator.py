"""Shared by the integrations of Transformers and Accelerate: wrap the models of an `Accelerator`, and read files."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DynamoBackend, extract_model_from_parallel, is_compiled_module
from accelerate.utils.other import compile_regions_fsdp2
from torch import Tensor, nn
from torch.optim import Optimizer

from shardlite import LayoutError, ShardLite
from shardlite.extend import gather_state_dicts, patch, some_of, stand_ins
from shardlite.integrations._adapters import adapter_files, read_adapter
from shardlite.integrations._wrapping import Original, adopt, model_of, replaced
from shardlite.integrations.pretrained import read_converted


def wrap(
    accelerator: Accelerator,
    model: nn.Module,
    prepare_model: Callable[[nn.Module, bool, bool], Any],
    options: Mapping[str, Any],
) -> ShardLite:
    """Wrap a model as `Accelerator.prepare_model` wraps it with `DistributedDataParallel`, and register it. Collective.

    Args:
        accelerator: the accelerator, which says how to mix precision, how to compile, and whose buffers are used.
        model: a module, a `ShardLite` model that the program has wrapped, or the result of `torch.compile` for one of
            them, which is then compiled in place.
        prepare_model: the method of the accelerator.
        options: keywords of `ShardLite`, except `device`.
    """
    plugin = accelerator.state.dynamo_plugin
    compiles, backend = plugin.to_kwargs(), plugin.backend
    given, model = model, uncompiled(model)
    with replaced(plugin, backend=DynamoBackend.NO):  # it would compile the unsharded model
        prepare_model(model, False, True)  # mixed precision only
    accelerator._models.pop()  # `prepare_model` has registered the unsharded model
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
    gather_state_dicts(wrapped)  # as `save_pretrained()` on all ranks expects
    vars(wrapped)["_is_accelerate_prepared"] = True
    accelerator._models.append(wrapped)
    return wrapped


def uncompiled(model: Any) -> Any:
    """Return the module that `torch.compile` has compiled, and any other module unchanged."""
    return model._orig_mod if is_compiled_module(model) else model


def compile_as(compiled: Any, model: ShardLite) -> None:
    """Compile a model in place with the options of `compiled`, if `torch.compile` has made it."""
    if is_compiled_module(compiled):
        model.module._compiled_call_impl = compiled.dynamo_ctx(model.module._call_impl)  # as `nn.Module.compile` does


def sharded(models: Iterable[object]) -> list[ShardLite]:
    """Return the models that are wrapped."""
    return [model for model in models if isinstance(model, ShardLite)]


def wrapper_of(accelerator: Accelerator, model: nn.Module) -> ShardLite | None:
    """Return the accelerator's wrapped model that is `model` or wraps `model`."""
    return next((each for each in sharded(accelerator._models) if model is each or model is each.module), None)


# ---- patches of both bridges ----------------------------------------------------------------------------------------


@patch(Accelerator, "get_state_dict", package="accelerate")
def _get_state_dict(original: Original, accelerator: Accelerator, model: nn.Module, unwrap: bool = True) -> object:
    """The state dict would have shards instead of weights."""
    wrapped = model if isinstance(model, ShardLite) else wrapper_of(accelerator, model)
    if wrapped is None:
        return original(accelerator, model, unwrap)
    every_node = accelerator.project_configuration.save_on_each_node
    return wrapped.full_state_dict(rank=None if every_node else 0)


@patch(Accelerator, "prepare_optimizer", package="accelerate")
def _prepare_optimizer(
    original: Original, accelerator: Accelerator, optimizer: Optimizer, device_placement: bool | None = None
) -> object:
    """An optimizer that was built before `prepare` would hold parameters that have no gradients."""
    if not getattr(optimizer, "_is_accelerate_prepared", False):
        models = sharded(accelerator._models)
        for model in models:
            adopt(model, optimizer)
        if model_of(optimizer) in models:
            device_placement = False  # shards are on their device already
    return original(accelerator, optimizer, device_placement)


@patch(extract_model_from_parallel, package="accelerate")
def _extract_model_from_parallel(original: Original, model: Any, *args: object, **kwargs: object) -> object:
    """A wrapped model would not be unwrapped, because only known classes are."""
    return original(model.module if isinstance(model, ShardLite) else model, *args, **kwargs)


# ---- files of runs without sharding ---------------------------------------------------------------------------------


def read_weights(folder: Path, names: Sequence[str] = ("model.safetensors", "pytorch_model.bin")) -> dict[str, Tensor]:
    """Load the weights in a folder, from a file with one of `names` or from several files with an index.

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
    """Load a file to the CPU."""
    if file.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(file)
    return torch.load(file, map_location="cpu", weights_only=True)


def read_pretrained(folder: Path, model: ShardLite) -> dict[str, Tensor]:
    """Load the tensors that `save_pretrained` has written, under their names in the model.

    Raises:
        LayoutError: names do not match the model.
    """
    from transformers import PreTrainedModel

    files = adapter_files(model, folder)
    if files:
        found = [read_adapter(model, adapter, read_file(file), file) for adapter, file in files.items()]
        return {name: value for each in found for name, value in each.items()}
    saved = read_weights(folder)
    with stand_ins(model) as entries:
        known = entries.keys()
    if saved.keys() - known and isinstance(model.module, PreTrainedModel):  # such as the experts of Mixtral
        saved = read_converted(type(model.module), folder, model.module.config)
    if unknown := sorted(saved.keys() - known):
        raise LayoutError(f"{folder} has weights that this model lacks: {some_of(unknown)}")
    return saved


# ---- checkpoints of Transformers ------------------------------------------------------------------------------------

FOLDER = "shardlite"
"""The folder inside of a checkpoint that has the shards of the weights and of the optimizer's state."""

STATE = "optimizer.pt"
"""The file inside of a checkpoint with the full state of the optimizer. It is empty if the checkpoint has shards."""


def read_state(folder: Path) -> Any:
    """Return the full state of the optimizer in a checkpoint, which is empty if the checkpoint has shards.

    Raises:
        LayoutError: different runs have written the shards and other files of the checkpoint.
    """
    shards, file = folder / FOLDER, folder / STATE
    state = read_file(file) if file.exists() else {"state": {}}
    if shards.exists() and state["state"]:
        raise LayoutError(
            f"{file} and {shards} both have the state of the optimizer, from different runs: delete the older one"
        )
    saved = state.get("weights", {}) if shards.exists() else {}
    now = digests(folder)
    if changed := sorted(name for name, digest in saved.items() if now.get(name, digest) != digest):
        raise LayoutError(
            f"{shards} has other weights than {some_of(changed)} beside it, which was written later: delete {shards} "
            f"and {file} to load the files, or the files to load the shards"
        )
    return state


def digests(folder: Path) -> dict[str, str]:
    """Return a digest of the size and a sample of the bytes of each file with weights in a folder, by its name."""
    found = {}
    for path in {*folder.rglob("*model*.safetensors"), *folder.rglob("*model*.bin")}:
        size = path.stat().st_size
        digest = sha256(str(size).encode())
        with path.open("rb") as file:
            for start in range(0, size, max(size // 256, 2**14)):
                file.seek(start)
                digest.update(file.read(2**14))
        found[str(path.relative_to(folder))] = digest.hexdigest()
    return found
