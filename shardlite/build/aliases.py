"""Parameters that share memory: identical ones are tied, and any other overlap is an error.

Sharding gives each parameter new memory, which would separate overlapping tensors silently.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardlite.errors import LayoutError
from shardlite.params import storage_key


@dataclass(frozen=True)
class _Extent:
    """The range of a tensor in its storage, in bytes."""

    name: str
    tensor: Tensor
    start: int
    stop: int

    @staticmethod
    def of(name: str, tensor: Tensor) -> "_Extent":
        last: int = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        start = int(tensor.storage_offset()) * tensor.element_size()
        return _Extent(name, tensor, start, start + (last + 1) * tensor.element_size())

    def overlaps(self, other: "_Extent") -> bool:
        return self.start < other.stop and other.start < self.stop

    def is_like(self, other: "_Extent") -> bool:
        return self.tensor.dtype == other.tensor.dtype and self.tensor.is_set_to(other.tensor)


def tie(module: nn.Module, ignored: Collection[Tensor]) -> None:
    """Tie parameters that are the same memory, for example after `decoder.weight.data = embedding.weight.data`.

    Raises:
        LayoutError: a parameter shares memory with something else: a part of another parameter, a buffer, or a tensor
            attribute of a module.
    """
    others: dict[int, list[_Extent]] = defaultdict(list)
    for name, tensor in _others(module):
        others[storage_key(tensor)].append(_Extent.of(name, tensor))
    seen: dict[int, list[_Extent]] = defaultdict(list)
    twins: dict[Tensor, nn.Parameter] = {}
    for name, param in module.named_parameters():
        if param in ignored or not _has_memory(param):
            continue
        own = _Extent.of(name, param)
        for other in (*seen[storage_key(param)], *others[storage_key(param)]):
            if own.overlaps(other):
                if not isinstance(other.tensor, nn.Parameter) or not own.is_like(other):
                    raise LayoutError(
                        f"parameter {name!r} and {other.name!r} share memory, but are not the same: they would part "
                        "when the parameter is sharded. Give one of them memory of its own (`.clone()`), or tie them "
                        "as one parameter before wrapping"
                    )
                twins[param] = other.tensor
                break
        else:
            seen[storage_key(param)].append(own)
    for each in module.modules() if twins else ():
        for attribute, own_param in each._parameters.items():
            if own_param in twins:
                each._parameters[attribute] = twins[own_param]


def _others(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield buffers, and tensors among the attributes of modules, which are not parameters.

    An attribute `name` beside a parameter `name_orig` is skipped: each forward recomputes it (`spectral_norm`).
    """
    for path, each in module.named_modules():
        attributes = [(name, value) for name, value in each.__dict__.items() if f"{name}_orig" not in each._parameters]
        for name, value in (*each._buffers.items(), *attributes):
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and _has_memory(value):
                yield f"{path}.{name}".lstrip("."), value


def _has_memory(tensor: Tensor) -> bool:
    """Return whether a tensor has a storage that another tensor may view."""
    return tensor.layout is torch.strided and not tensor.is_meta and tensor.numel() > 0
