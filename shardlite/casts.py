"""Casting what goes into a model and what comes out."""

from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


def cast_floats(container: Any, dtype: torch.dtype) -> Any:
    """Return `container` with its floating-point tensors in `dtype`, wherever in lists, dicts, dataclasses they are."""

    def cast(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(dtype) if leaf.is_floating_point() else leaf
        if not is_dataclass(leaf) or isinstance(leaf, type):
            return leaf
        converted = copy(leaf)
        for field in fields(leaf):
            object.__setattr__(converted, field.name, cast_floats(getattr(leaf, field.name), dtype))
        return converted

    return tree_map(cast, container)
