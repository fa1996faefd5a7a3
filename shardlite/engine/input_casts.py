"""Casting what goes into a model and what comes out."""

from collections.abc import MutableMapping
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


def cast_floats(container: Any, dtype: torch.dtype) -> Any:
    """Return `container` with its floating-point tensors in `dtype`, wherever they are in it.

    They are looked for in what PyTorch knows as a tree (lists, tuples, dicts, named tuples, what was registered) and in
    dataclasses and mappings of other classes. All of these are copied, all else is left as it is.
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
    """Cast a mapping of a class of its own. One that is a dataclass as well has its values as fields too."""
    converted = _cast_fields(mapping, dtype) if is_dataclass(mapping) else copy(mapping)
    for key, value in mapping.items():
        converted[key] = cast_floats(value, dtype)
    return converted


def _cast_fields(instance: Any, dtype: torch.dtype) -> Any:
    """Cast a dataclass, without its constructor: that may want or do anything."""
    kind: Any = type(instance)
    converted = kind.__new__(kind)
    for name, value in getattr(instance, "__dict__", {}).items():
        object.__setattr__(converted, name, value)
    for field in fields(instance):
        object.__setattr__(converted, field.name, cast_floats(getattr(instance, field.name), dtype))
    return converted
