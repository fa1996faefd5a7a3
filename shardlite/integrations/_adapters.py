"""Save and load PEFT adapters of a sharded model."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardlite import LayoutError, ShardLite
from shardlite.extend import ranks_of, stand_ins
from shardlite.integrations._wrapping import replaced

FILES = ("adapter_model.safetensors", "adapter_model.bin")
"""The files in which PEFT saves an adapter."""


def adapter_files(model: ShardLite, folder: Path) -> dict[str, Path]:
    """Return the files of the model's adapters in a folder, by the names of the adapters."""
    found: dict[str, Path] = {}
    for adapter in getattr(model.module, "peft_config", ()):
        place = folder / adapter if adapter != "default" and _is_peft_model(model) else folder
        found.update([(adapter, place / name) for name in reversed(FILES) if (place / name).exists()])
    return found


def names_in_file(model: ShardLite, adapter: str) -> dict[str, str]:
    """Return the names of an adapter's tensors in the model, by their names in PEFT's files. Not collective.

    Raises:
        LayoutError: PEFT saves a tensor that is computed from parameters.
    """
    from peft import get_peft_model_state_dict

    inner: Any = model.module
    config = inner.peft_config[adapter]
    # At inference, PEFT saves the parameter of a prompt encoder. While it trains, PEFT saves what the encoder computes.
    with stand_ins(model) as entries, replaced(config, inference_mode=True):
        named = {name: torch.empty(each.shape, device="meta") for name, each in entries.items()}
        owners = {id(each): name for name, each in [*inner.named_parameters(), *named.items()]}
        saved = get_peft_model_state_dict(inner, state_dict=named, adapter_name=adapter)
    owned = {key: owners.get(id(value)) for key, value in saved.items()}
    computed = [key for key, name in owned.items() if name is None]
    if config.is_prompt_learning and len(list(inner.prompt_encoder[adapter].parameters())) > 1:
        computed.append("prompt_embeddings")
    if computed:
        raise LayoutError(
            f"adapter {adapter!r} ({config.peft_type.value}): PEFT computes {computed} from parameters when it saves, "
            "so its files cannot be loaded into them: load a checkpoint that has shards (save_only_model=False)"
        )
    prefix = "" if _is_peft_model(model) else "base_model.model."  # of adapters that Transformers has added
    return {f"{prefix}{key}": name for key, name in owned.items() if name is not None}


def adapter_weights(model: ShardLite, rank: int | None) -> dict[str, Tensor] | None:
    """Return the full weights of all adapters on `rank`, on every rank if `None`, and an empty dict on others.

    Return `None` if the module is not a model of PEFT, or if PEFT saves frozen weights too. Collective.
    """
    inner: Any = model.module
    if not hasattr(inner, "peft_config") or not _is_peft_model(model):
        return None
    trainable = {name for name, param in inner.named_parameters(remove_duplicate=False) if param.requires_grad}
    try:
        saved = {name for adapter in inner.peft_config for name in names_in_file(model, adapter).values()}
    except LayoutError:
        return None
    if not saved <= trainable:
        return None
    keeps = rank in (None, ranks_of(model).rank)
    return {name: weight.cpu() for name, weight in model.full_parameters(trainable=True) if keeps}


@contextmanager
def savable(model: ShardLite, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Let state dicts of the module and of its parts have full `weights` inside the context. Collective.

    Other parameters are on the meta device. PEFT also runs prompt encoders, which is done here on every rank.
    """
    inner: Any = model.module
    prompts = {name for name, config in getattr(inner, "peft_config", {}).items() if config.is_prompt_learning}
    read = [name for name, _ in inner.named_parameters() if prompts and name.startswith("prompt_encoder.")]
    with torch.no_grad(), model.gathered(*read, writeback=False) if read else nullcontext():
        known = {name: inner.get_prompt_embedding_to_save(name).cpu() for name in prompts}
    computed = {"get_prompt_embedding_to_save": known.__getitem__} if prompts else {}
    with replaced(inner, **computed), stand_ins(model, weights):
        yield


def read_adapter(model: ShardLite, adapter: str, saved: dict[str, Tensor], file: Path) -> dict[str, Tensor]:
    """Return the tensors of an adapter's file by their names in the model. Not collective.

    Raises:
        LayoutError: the tensors of the file are not those of the adapter.
    """
    names = names_in_file(model, adapter)
    if foreign := saved.keys() - names.keys():
        raise LayoutError(f"{file} has tensors that this model lacks: {sorted(foreign)}")
    if lacking := names.keys() - saved.keys():
        raise LayoutError(f"{file} lacks tensors of this model's adapter {adapter!r}: {sorted(lacking)}")
    return {names[key]: value for key, value in saved.items()}


def _is_peft_model(model: ShardLite) -> bool:
    from peft import PeftModel

    return isinstance(model.module, PeftModel)
