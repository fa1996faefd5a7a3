"""Hugging Face models that are too large for one host's copies: each rank reads only its own shards from the files.

`from_pretrained` runs the function of this name of Transformers, which finds the files, renames, merges, splits and
ties weights, initializes what the files lack, and reports what does not fit. During this call, only the function that
opens a file is replaced. It returns tensors without memory (`Unread`), which record what Transformers does to them.

    file         model-00001-of-00003.safetensors
    Unread       w1 [I, H] of each expert   ->  cat, stack, to(dtype)  ->  Unread [E, 2I, H]
    meta         nn.Parameter on the meta device, which knows its `Unread`
    ShardLite    each rank reads elements [start, stop) of the `Unread` into its shard
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from shardlite import CheckpointError, LayoutError
from shardlite.extend import GroupLike, agree, read_from
from shardlite.integrations._wrapping import replaced, required

PIECE = 2**22
"""Maximum number of elements that are read at a time, if the elements of a weight follow each other in the file."""

_aten = torch.ops.aten
_SAME_ORDER = {
    *(_aten.alias.default, _aten.detach.default, _aten.clone.default, _aten._to_copy.default),
    *(_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default, _aten.unsqueeze.default),
    *(_aten.squeeze.default, _aten.squeeze.dim),
}
"""Functions whose result has the elements of their first argument, in the same order."""


def from_pretrained(
    model_class: Any, name_or_path: str | os.PathLike[str], *, group: GroupLike = None, **options: Any
) -> Any:
    """Return a model of `model_class.from_pretrained` whose weights are read when the model is wrapped.

    Parameters in the files are on the meta device. `ShardLite(model)` then reads on each rank only the elements that
    this rank keeps, directly into the shards, so no rank ever has the whole model. Transformers initializes other
    parameters and all buffers as usual. If there is a process group, the call is collective.

    Args:
        model_class: class of the model, or one of the `AutoModel` classes.
        name_or_path: folder with `model.safetensors` or `model.safetensors.index.json`, or a name on the Hub.
        group: the ranks that will wrap the model, as for `ShardLite`. Used only to compare files and errors.
        options: further arguments of `model_class.from_pretrained`, such as `dtype`. Weights in another dtype are
            converted to `dtype` while they are read. Not accepted: `device_map`, `state_dict`, `disable_mmap`, and
            options of quantization, tensor parallelism and GGUF.

    Returns:
        What `model_class.from_pretrained` returns: the model or, with `output_loading_info=True`, the model and a
        dictionary of missing, unexpected and mismatched keys.

    Raises:
        CheckpointError: the weights are not in safetensors files, or are quantized.
        ModuleNotFoundError: Transformers is missing.
        LayoutError: another rank raised an error, or its files differ.
        ValueError: an option is not accepted.
        Exception: errors of `model_class.from_pretrained`, for example if a file is missing or a shape is wrong.

    Example:
        >>> model = from_pretrained(AutoModelForCausalLM, "weights", dtype=torch.float32)
        >>> model = ShardLite(model, precision=Precision(compute=torch.bfloat16))
    """
    headers: list[str] = []
    problem, result = None, None
    try:
        result = _from_pretrained(model_class, name_or_path, headers, options)
    except Exception as error:  # other ranks wait for this rank
        problem = error
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        agree(group, "from_pretrained", sorted(headers), problem, subject="files")
    elif problem is not None:
        raise problem
    return result


def _from_pretrained(
    model_class: Any, path: str | os.PathLike[str], headers: list[str], options: dict[str, Any]
) -> Any:
    refused = {name for name in _REFUSED if options.get(name) not in (None, False)}
    if refused:
        raise ValueError(
            f"from_pretrained: {', '.join(sorted(refused))} cannot be used, because each rank reads its part of the "
            "weights when the model is wrapped: pass the device and the dtypes to ShardLite(device=, precision=)"
        )
    with required("from_pretrained", "transformers", "transformers"):
        from transformers import modeling_utils

    def open_lazily(file: str | os.PathLike[str], *_: Any, **__: Any) -> _LazyFile:
        opened = _LazyFile(Path(file))
        headers.append(f"{opened.path.name} {opened.digest}")
        return opened

    with replaced(modeling_utils, safe_open=open_lazily):
        result = model_class.from_pretrained(path, **{"use_safetensors": True, **options})
    model = result[0] if isinstance(result, tuple) else result
    if getattr(model, "hf_quantizer", None) is not None:
        raise CheckpointError(f"{path} has quantized weights, which cannot be sharded: load it with from_pretrained")
    unread = _leave_unread(model)
    model.register_load_state_dict_pre_hook(_make_room)
    if not unread:
        raise CheckpointError(
            f"{path}: this version of Transformers has read no weight from safetensors files by safe_open; this "
            "function was tried with 5.23"
        )
    return result


def read_converted(model_class: Any, folder: Path, config: Any) -> dict[str, Tensor]:
    """Return the weights in a folder under the names that Transformers gives them in a model. Not collective.

    Raises:
        LayoutError: names or shapes do not match the model.
    """
    options = {"config": deepcopy(config), "dtype": torch.float32, "output_loading_info": True}
    with torch.random.fork_rng(devices=[]):
        model, info = _from_pretrained(model_class, folder, [], options)
    for kind in ("unexpected_keys", "mismatched_keys", "error_msgs"):
        if info.get(kind):
            raise LayoutError(f"{folder} does not fit {model_class.__name__}: {kind} {sorted(map(str, info[kind]))}")
    found: dict[Tensor, str] = {}  # one name of tied weights is enough
    for name, value in model.state_dict(keep_vars=True).items():
        if name not in info["missing_keys"]:
            found.setdefault(value, name)
    return {name: getattr(value, "whole", value.detach)() for value, name in found.items()}


_REFUSED = (
    *("device_map", "state_dict", "disable_mmap", "quantization_config", "gguf_file", "distributed_config"),
    *("tp_plan", "tp_size", "device_mesh", "max_memory", "offload_folder"),
)


def _leave_unread(model: nn.Module) -> bool:
    """Put parameters without values in the places of unread ones, and read buffers. Return whether any was unread."""
    made: dict[Tensor, nn.Parameter] = {}  # tied parameters stay one object
    for module in model.modules():
        for name, param in module._parameters.items():
            if isinstance(param, Unread):
                if param not in made:
                    made[param] = _meta_parameter(param)
                module._parameters[name] = made[param]
        for name, buffer in module._buffers.items():
            if isinstance(buffer, Unread):
                module._buffers[name] = buffer.whole()
    return bool(made)


def _meta_parameter(unread: Unread) -> nn.Parameter:
    memory = torch.empty(unread.shape, dtype=unread.dtype, device="meta")
    param = nn.Parameter(memory, requires_grad=unread.requires_grad)
    param.__dict__.update({name: value for name, value in unread.__dict__.items() if name not in ("_read", "ranged")})
    read_from(param, unread)
    param.__dict__["whole"] = unread.whole
    # `deepcopy` asks the object. A copy has the values too, such as that of a module that PEFT trains.
    param.__dict__["__deepcopy__"] = lambda memo: memo.setdefault(id(param), _meta_parameter(unread))
    return param


def _make_room(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    """Before a state dict is loaded, allocate the parameters on the meta device for which it has values.

    PyTorch would ignore these values. PEFT puts an adapter on the device of the weights below it.
    """
    made: dict[Tensor, nn.Parameter] = {}
    for path, owner in module.named_modules():
        for name, param in owner._parameters.items():
            value = state_dict.get(f"{prefix}{path}.{name}" if path else f"{prefix}{name}")
            if param is not None and (param in made or (param.is_meta and value is not None and not value.is_meta)):
                if param not in made:
                    made[param] = nn.Parameter(torch.empty_like(param, device="cpu"), param.requires_grad)
                owner._parameters[name] = made[param]


class _LazyFile:
    """A safetensors file, as `safetensors.safe_open` returns it, whose tensors are `Unread`."""

    def __init__(self, path: Path) -> None:
        import safetensors

        with safetensors.safe_open(path, "pt") as file:  # checks the header and the length of the file
            names = list(file.keys())
            self._dtypes = {name: _dtype(file.get_slice(name)) for name in names}
        self.path = path
        with path.open("rb") as raw:
            length = int.from_bytes(raw.read(8), "little")
            header = raw.read(length)
        self._start, self._entries = 8 + length, json.loads(header)
        self._entries.pop("__metadata__", None)
        self.digest = sha256(header).hexdigest()

    def __enter__(self) -> _LazyFile:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: the file is opened for each read."""

    def metadata(self) -> dict[str, str]:
        """Return the metadata that Transformers expects of its own files."""
        return {"format": "pt"}

    def keys(self) -> list[str]:
        """Return the names of the tensors."""
        return list(self._entries)

    def get_slice(self, name: str) -> Unread:
        """Return a tensor that has not been read."""
        entry, dtype = self._entries[name], self._dtypes[name]
        first = self._start + entry["data_offsets"][0]

        def read(start: int, stop: int) -> Tensor:
            return read_file(self.path, first + start * dtype.itemsize, stop - start, dtype)

        return Unread(torch.empty(entry["shape"], dtype=dtype, device="meta"), read)

    get_tensor = get_slice


def _dtype(view: Any) -> torch.dtype:
    found: torch.dtype = (view[:0] if view.get_shape() else view[()]).dtype
    return found


def read_file(path: Path, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Return `numel` elements that begin at byte `offset` of a file.

    Raises:
        CheckpointError: the file is too short.
    """
    memory = bytearray(numel * dtype.itemsize)
    with path.open("rb") as file:
        file.seek(offset)
        if file.readinto(memory) < len(memory):
            raise CheckpointError(f"{path} is shorter than when it was opened")
    return torch.frombuffer(memory, dtype=dtype) if memory else torch.empty(0, dtype=dtype)


class Unread(Tensor):
    """A tensor whose values are still in files. Operations on it return `Unread`s, which are computed when read."""

    computed = False
    """Whether the tensor has its own memory, which holds the result of a function."""

    ranged: bool
    """Whether a range of elements is read without the other elements."""

    @staticmethod
    def __new__(cls: Any, like: Tensor, read: Callable[[int, int], Tensor], ranged: bool = True) -> Unread:
        """Create a tensor of the shape and dtype of `like`. `read(start, stop)` returns its elements [start, stop)."""
        # It claims to be on the CPU, so that Transformers does not move it.
        made: Unread = Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=torch.device("cpu"))
        made._read, made.ranged = read, ranged
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Return shape and dtype."""
        return f"Unread({list(self.shape)}, {self.dtype})"

    def pieces(self, start: int, stop: int) -> Iterator[Tensor]:
        """Yield elements `[start, stop)` of the flattened tensor, in pieces of `PIECE` elements if it is ranged."""
        length = PIECE if self.ranged else stop - start
        for begin in range(start, stop, length):
            yield self._read(begin, min(begin + length, stop))

    def whole(self) -> Tensor:
        """Read the whole tensor."""
        return self._read(0, self.numel()).view(self.shape)

    _read: Callable[[int, int], Tensor]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Return what `func` returns, without values if it returns tensors.

        Raises:
            CheckpointError: `func` would write to a tensor that has not been read.
        """
        kwargs = kwargs or {}
        sources = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Unread)]
        if func._schema.is_mutable:
            if all(each.computed for each in sources) and func._schema.name.endswith("_"):
                for each in sources:
                    each._read = _overwritten
                return args[0]
            raise CheckpointError(f"{func} would write to weights that have not been read: wrap the model first")
        on_meta = {**kwargs, "device": "meta"} if "device" in kwargs else kwargs
        if not any("Tensor" in str(each.type) for each in func._schema.returns):
            return func(*tree_map_only(Unread, Unread.whole, args), **kwargs)
        shapes = func(*tree_map(_as_meta, args), **tree_map(_as_meta, on_meta))
        if isinstance(shapes, Tensor):
            if func in _SAME_ORDER:
                return _convert(sources[0], shapes)
            if func in (_aten.cat.default, _aten.stack.default):
                return _join(args[0], shapes, (kwargs.get("dim") or 0) if len(args) < 2 else args[1])

        def compute(index: int) -> Callable[[int, int], Tensor]:
            def read(start: int, stop: int) -> Tensor:
                found = func(*tree_map_only(Unread, Unread.whole, args), **tree_map_only(Unread, Unread.whole, kwargs))
                return tree_leaves(found)[index].reshape(-1)[start:stop].clone()  # type: ignore[no-any-return]

            return read

        indices = iter(range(len(tree_leaves(shapes))))
        results = tree_map_only(Tensor, lambda like: Unread(like, compute(next(indices)), ranged=False), shapes)
        for each, returned in zip(tree_leaves(results), func._schema.returns, strict=False):
            each.computed = returned.alias_info is None
        return results


def _overwritten(start: int, stop: int) -> Tensor:
    """Raise. Transformers initializes weights that a module computes from others, and never reads them."""
    raise CheckpointError("the values of this tensor were computed from weights in files, and then overwritten")


def _as_meta(value: Any) -> Any:
    return torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, Tensor) else value


def _convert(source: Unread, like: Tensor) -> Unread:
    """Return `source` with the shape and dtype of `like`."""
    return Unread(like, lambda start, stop: source._read(start, stop).to(like.dtype), source.ranged)


def _join(sources: Sequence[Tensor], like: Tensor, dim: int) -> Unread:
    """Return the concatenation (`torch.cat`, `torch.stack`) of `sources` along `dim`, with the shape of `like`.

    View each tensor as rows, one per index of the dimensions before `dim`. A row of the result consists of the same row
    of each source, one after the other.
    """
    before = prod(like.shape[: dim % like.dim()])
    parts = [each.numel() // before if before else 0 for each in sources]
    row = sum(parts)

    def read(start: int, stop: int) -> Tensor:
        found = []
        for index in range(start // row, -(-stop // row)):
            first = index * row
            for source, part in zip(sources, parts, strict=True):
                begin, end = max(start, first), min(stop, first + part)
                if begin < end:
                    shift = index * part - first
                    found.append(_elements(source, begin + shift, end + shift).to(like.dtype))
                first += part
        return torch.cat(found) if found else torch.empty(0, dtype=like.dtype)

    return Unread(like, read, all(getattr(each, "ranged", True) for each in sources))


def _elements(source: Tensor, start: int, stop: int) -> Tensor:
    return source._read(start, stop) if isinstance(source, Unread) else source.reshape(-1)[start:stop]
