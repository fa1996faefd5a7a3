"""Conversions: refuse those of wrapped modules (`.to()`, `.half()`, `.cuda()`), and cast inputs and outputs.

PyTorch converts a module by `nn.Module._apply`, which gives its parameters other memory. The shards would not follow.
So a conversion of any module of the model raises before it changes anything, unless it would change nothing (`.to()`
the model's device). A conversion of a module around the model raises when it reaches the model, after it has converted
the modules before it.
"""

from collections.abc import Callable, Collection, Iterable, MutableMapping
from copy import copy
from dataclasses import fields, is_dataclass
from functools import wraps
from itertools import count
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from shardlite.errors import LayoutError
from shardlite.params import as_they_are

_wrapped: "WeakSet[nn.Module]" = WeakSet()
"""Modules with parameters of a wrapped model. (Not an attribute of them: copies are modules like any other.)"""


def refuse_conversions(module: nn.Module, ignored: Iterable[nn.Module], params: Collection[Tensor]) -> None:
    """Refuse conversions of `module` and the modules in it, except `ignored` ones and those that own only `params`."""
    own = set(module.modules()) - {inner for each in ignored for inner in each.modules()}
    for each in own:
        held = list(each.parameters())
        if not held or any(param not in params for param in held):
            _wrapped.add(each)


def allow_conversions(module: nn.Module) -> None:
    """Undo `refuse_conversions`."""
    _wrapped.difference_update(module.modules())


def refuse_if_wrapped(original: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Return what replaces `nn.Module._apply`."""

    @wraps(original)
    def apply(module: nn.Module, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> nn.Module:
        """Convert a module as ever, unless it is wrapped.

        Raises:
            LayoutError: it is wrapped, and `fn` changes a parameter or a buffer.
        """
        if module not in _wrapped:
            return original(module, fn, *args, **kwargs)
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if _changes(tensor, fn):
                raise LayoutError(
                    f"{type(module).__name__}: a wrapped model cannot be moved or converted, and this would convert "
                    f"{name!r}: call .to(), .half() and the like before wrapping. To compute in another dtype, wrap "
                    "with Precision(compute=...) or use torch.autocast; for a plain model, call unwrap()"
                )
        return module

    return apply


_numbers = count(1)


def _changes(tensor: Tensor, convert: Callable[[Tensor], Tensor]) -> bool:
    """Return whether a conversion would change a tensor, by a trial on a small tensor of the same kind.

    A copy, as `.to("cpu:0")` makes, is no change. Its values, which differ each time, distinguish it from `to_empty()`.
    """
    with as_they_are():
        small = torch.empty((2,) * tensor.ndim, dtype=tensor.dtype, device=tensor.device)
    _bytes(small).fill_(next(_numbers) % 100 + 1)
    converted = convert(small)
    if converted is small:
        return small.is_cpu and small.is_shared()  # type: ignore[no-untyped-call]
    alike = all(getattr(converted, name) == getattr(small, name) for name in ("dtype", "device", "shape", "layout"))
    return not (alike and converted.stride() == small.stride() and _bytes(converted).equal(_bytes(small)))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


# ---- inputs and outputs ----------------------------------------------------------------------------------------------


def cast_floats(container: Any, dtype: torch.dtype) -> Any:
    """Return `container` with its floating-point tensors in `dtype`.

    Containers are PyTorch's trees (lists, tuples, dicts, named tuples, registered classes), dataclasses and mappings of
    other classes. All of these are copied, everything else is unchanged.
    """

    def cast(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(dtype) if leaf.is_floating_point() else leaf
        if isinstance(leaf, MutableMapping):
            return _cast_values(leaf, dtype)
        if is_dataclass(leaf) and not isinstance(leaf, type):
            return _cast_fields(leaf, dtype)
        return leaf

    return tree_map(cast, container)


def _cast_values(mapping: Any, dtype: torch.dtype) -> Any:
    """Cast a mapping of any class. If it is also a dataclass, its values are fields too."""
    converted = _cast_fields(mapping, dtype) if is_dataclass(mapping) else copy(mapping)
    for key, value in mapping.items():
        converted[key] = cast_floats(value, dtype)
    return converted


def _cast_fields(instance: Any, dtype: torch.dtype) -> Any:
    """Cast a dataclass without its constructor, which may require arguments or have effects."""
    kind: Any = type(instance)
    converted = kind.__new__(kind)
    for name, value in getattr(instance, "__dict__", {}).items():
        object.__setattr__(converted, name, value)
    for field in fields(instance):
        object.__setattr__(converted, field.name, cast_floats(getattr(instance, field.name), dtype))
    return converted
