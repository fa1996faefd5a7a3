"""The operators of PyTorch that handle each element by itself, so that they are right for shards."""

from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

SELECTIONS = {"slice", "select", "narrow"}
"""Operators by which functions combine elements of different positions, such as `diff`."""

_NOT_TAGGED = (
    "copy_ zero_ fill_ cat stack masked_fill masked_fill_ where isin index index_put_ masked_select _to_copy "
    "lift_fresh empty_like zeros_like ones_like full_like new_empty new_zeros new_ones new_full new_empty_strided "
    "empty empty_strided full ones zeros arange scalar_tensor set_ resize_ record_stream is_pinned _pin_memory "
    "_amp_foreach_non_finite_check_and_unscale_"
)
"""Operators that PyTorch does not call pointwise, but that are right for shards too: copies, new tensors and masks."""

CONDITIONS = {"any", "all", "equal", "allclose", "_local_scalar_dense"}
"""Operators for conditions that programs assert. Their results are not watched."""


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the names of the operators that a call uses and that are not elementwise."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Record the operator, and call it."""
        if not _is_elementwise(func):
            self.names.add(func.overloadpacket.__name__)
        result = func(*args, **(kwargs or {}))
        if func._schema.is_mutable and func.overloadpacket.__name__.startswith("_foreach_"):
            torch.autograd.graph.increment_version(args[0])  # PyTorch does not increment these versions in a mode
        return result


@cache
def _is_elementwise(operator: Any) -> bool:
    """Return whether an operator handles each element by itself, or returns a view."""
    name, returns = str(operator.overloadpacket.__name__), operator._schema.returns
    if operator._schema.is_mutable and operator.namespace not in ("aten", "prims"):
        return True  # steps of other libraries' optimizers
    if (torch.Tag.pointwise in operator.tags and name not in CONDITIONS) or name in _NOT_TAGGED.split():
        return True
    if name not in SELECTIONS and any(each.alias_info is not None and not each.alias_info.is_write for each in returns):
        return True
    one = name.removeprefix("_foreach_")  # operators of lists have no tags
    if one == name:
        return name.startswith(("_fused_", "_amp_")) and name.endswith("_")  # steps of optimizers and scalers
    packet = getattr(torch.ops.aten, one.removesuffix("_"), None)
    overloads = packet.overloads() if packet is not None and one != "max" else []
    return one in _NOT_TAGGED.split() or any(torch.Tag.pointwise in getattr(packet, each).tags for each in overloads)
