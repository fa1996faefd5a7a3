"""Refuse conversions of wrapped modules (`.to()`, `.half()`, `.cuda()`), and cast inputs and outputs.

PyTorch converts a module with `nn.Module._apply`, which would move the module's parameters to new memory, but would not
move the shards. So a conversion of any module of the model raises before anything is changed, unless the conversion
would have no effect (`.to()` the model's device). A conversion of a module that contains the model raises when it
reaches the model. By then, PyTorch has converted the modules that come before the model.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping
from copy import copy
from dataclasses import fields, is_dataclass
from functools import cache
from itertools import count
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from shardlite.engine.hook_keys import CAST, remove_hooks, set_key
from shardlite.errors import LayoutError
from shardlite.params import as_they_are

_wrapped: "WeakSet[nn.Module]" = WeakSet()
"""Modules with parameters of a wrapped model. (A mark in an attribute would be copied together with the module.)"""


def refuse_conversions(module: nn.Module, ignored: Iterable[nn.Module], params: Collection[Tensor]) -> None:
    """Refuse conversions of `module` and its submodules.

    Modules in `ignored`, and modules whose parameters are all in `params`, may still be converted.
    """
    own = set(module.modules()) - {inner for each in ignored for inner in each.modules()}
    for each in own:
        held = list(each.parameters())
        if not held or any(param not in params for param in held):
            _wrapped.add(each)


def allow_conversions(module: nn.Module) -> None:
    """Undo `refuse_conversions`."""
    _wrapped.difference_update(module.modules())


def refuse_if_wrapped(
    original: Callable[..., nn.Module], module: nn.Module, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any
) -> nn.Module:
    """Convert a module with `original`, which is `nn.Module._apply`, unless the module is wrapped.

    Raises:
        LayoutError: the module is wrapped, and `fn` changes a parameter or a buffer.
    """
    if module not in _wrapped:
        return original(module, fn, *args, **kwargs)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if _changes(tensor, fn):
            raise LayoutError(
                f"{type(module).__name__}: a wrapped model cannot be moved or converted, and this would convert "
                f"{name!r}: call .to(), .half() and the like before wrapping. To compute in a different dtype, wrap "
                "with Precision(compute=...) or use torch.autocast; if a forward converts this module, name it in "
                "Precision(keep=...); for a plain model, call unwrap()"
            )
    return module


_numbers = count(1)


def _changes(tensor: Tensor, convert: Callable[[Tensor], Tensor]) -> bool:
    """Return whether a conversion would change a tensor. As a test, convert a small tensor of its dtype and device.

    A copy with the same values, such as the result of `.to("cpu:0")`, is not a change. The uninitialized memory that
    `to_empty()` returns is a change. Each call fills the small tensor with another value, so that uninitialized memory
    does not contain the same value by chance.
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


def cast_inputs(modules: Mapping[nn.Module, torch.dtype], outside: Collection[nn.Module] = ()) -> None:
    """Let modules cast their floating-point inputs. Modules in `outside` leave autocast while their forward runs."""
    for module, dtype in modules.items():
        leaves = module in outside
        handles = [module.register_forward_pre_hook(_casting(dtype, leaves), with_kwargs=True)]
        if leaves:
            handles.append(module.register_forward_hook(_return_to_autocast, always_call=True))
        set_key(module, CAST, handles)


def take_inputs_as_they_are(modules: Iterable[nn.Module]) -> None:
    """Undo `cast_inputs`."""
    for module in modules:
        remove_hooks(module, CAST)


@cache
def _casting(dtype: torch.dtype, leaves: bool) -> Callable[..., Any]:
    """Return a hook that casts inputs to `dtype`. All modules share it, or equal blocks would be compiled again."""

    unchanged = (dtype, torch.int64)

    def cast(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if leaves:
            _leave_autocast(module)
        if not kwargs and all(type(each) is Tensor and each.dtype in unchanged for each in args):
            return None  # the usual case, without a search in containers
        return cast_floats((args, kwargs), dtype)

    return cast


_LEFT = "_left_autocast"
"""Attribute of a module whose forward runs outside of autocast: the kinds of devices for which autocast was on."""


def _leave_autocast(module: nn.Module) -> None:
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    if kinds:
        setattr(module, _LEFT, kinds)
        for kind in kinds:
            torch.set_autocast_enabled(kind, False)


def _return_to_autocast(module: nn.Module, *_: Any) -> None:
    if hasattr(module, _LEFT):
        for kind in getattr(module, _LEFT):
            torch.set_autocast_enabled(kind, True)
        delattr(module, _LEFT)


def cast_floats(container: Any, dtype: torch.dtype) -> Any:
    """Return `container` with its floating-point tensors converted to `dtype`.

    Containers are PyTorch's pytrees (lists, tuples, dicts, named tuples, registered classes), dataclasses, and mappings
    of other classes. Containers are copied. Other objects are returned unchanged.
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
    """Cast the values of a mapping of any class. If the mapping is also a dataclass, cast its fields as well."""
    converted = _cast_fields(mapping, dtype) if is_dataclass(mapping) else copy(mapping)
    for key, value in mapping.items():
        converted[key] = cast_floats(value, dtype)
    return converted


def _cast_fields(instance: Any, dtype: torch.dtype) -> Any:
    """Cast the fields of a dataclass without calling its constructor, which may require arguments or have effects."""
    kind: Any = type(instance)
    converted = kind.__new__(kind)
    for name, value in getattr(instance, "__dict__", {}).items():
        object.__setattr__(converted, name, value)
    for field in fields(instance):
        object.__setattr__(converted, field.name, cast_floats(getattr(instance, field.name), dtype))
    return converted
