"""The largest magnitude in tensors: whether they are finite, and their maximum norm. No host synchronisation."""

from collections.abc import Sequence

import torch
from torch import Tensor

from shardlite.params import as_they_are


def largest(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the largest magnitude in each tensor, [], NaN where there is one. None of them may be empty."""
    with as_they_are():  # tensors may be parts of others, and that is known here
        if tensors and tensors[0].is_cuda:
            return list(torch._foreach_norm(list(tensors), float("inf")))
        # On a CPU that one is slow in torch 2.13.
        return [torch.maximum(low.abs(), high.abs()) for low, high in map(torch.aminmax, tensors)]


def any_bad(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return whether there is a NaN or an infinity in any of the tensors, [], int32."""
    found = largest([tensor for tensor in tensors if tensor.numel()])
    if not found:
        return torch.zeros((), dtype=torch.int32, device=device)
    alike = len({each.dtype for each in found}) == 1
    return (~torch.stack(found if alike else [each.double() for each in found]).isfinite()).any().to(torch.int32)
