"""The global norm of sharded gradients, without a host synchronisation.

The norm is made of one partial per rank, combined in the order of ranks. Where gradients are not sharded every rank
computes the partials of all, from the same pieces: so all stages get the same bits.

Legend: `W` ranks that share a model.
"""

from collections.abc import Collection, Iterator, Sequence
from math import inf

import torch
from torch import Tensor

from shardlite.errors import LayoutError
from shardlite.magnitude import largest
from shardlite.ring import Operation, all_gather
from shardlite.shared import Shared
from shardlite.unit import Flat

_EPSILON = 1e-6
"""As in `torch.nn.utils.clip_grad_norm_`."""


def clip_gradients(shards: Sequence[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scale gradients by `min(1, max_norm / (norm + 1e-6))`, as `torch.nn.utils.clip_grad_norm_` does."""
    factor = torch.clamp(max_norm / (norm + _EPSILON), max=1.0)
    grads = [shard.grad for shard in shards if shard.grad is not None]
    for dtype in {grad.dtype for grad in grads}:
        torch._foreach_mul_([grad for grad in grads if grad.dtype == dtype], factor.to(dtype))


def total_norm(
    flats: Sequence[Flat],
    shared: Shared,
    norm_type: float,
    operation: Operation,
    only: Collection[Tensor] | None = None,
) -> Tensor:
    """Return the norm of the gradients of all ranks, [], or of those of the shards in `only`.

    Raises:
        LayoutError: there is no such norm.
    """
    if not norm_type > 0:
        raise LayoutError(f"the norm of gradients has a positive exponent or is inf, got {norm_type!r}")
    transport = shared.transport
    sharded = any(flat.rank is not None for flat in flats)
    doubles = any(flat.local.dtype == torch.float64 for flat in flats)
    partials = torch.zeros(
        transport.world_size, dtype=torch.float64 if doubles else torch.float32, device=shared.device
    )
    for rank in [transport.rank] if sharded else range(transport.world_size):
        pieces = [piece for flat in flats for piece in _pieces(flat, rank, only)]
        if pieces:
            norms = [norm.to(partials.dtype) for norm in _norms(pieces, norm_type)]
            partials[rank] = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if sharded:
        all_gather(partials, shared.traffic.counted(transport, "norm"), operation=operation)
    total: Tensor = torch.linalg.vector_norm(partials, norm_type)
    return total


def _norms(pieces: Sequence[Tensor], norm_type: float) -> Sequence[Tensor]:
    return largest(pieces) if norm_type == inf else torch._foreach_norm(list(pieces), norm_type)


def _pieces(flat: Flat, rank: int, only: Collection[Tensor] | None) -> Iterator[Tensor]:
    """Yield what of the gradients lies in a rank's part of the full buffer, as 1-D tensors that are not empty."""
    start, stop = flat.layout.shard_range(rank)
    for slot, shard in zip(flat.layout.slots, flat.shards, strict=True):
        if shard.grad is not None and (only is None or shard in only):
            grad = shard.grad.view(-1)
            first, last = slot.within(start, stop)
            if flat.rank is None:
                grad = grad[start + first - slot.start : start + last - slot.start]
            if last > first:
                yield grad
