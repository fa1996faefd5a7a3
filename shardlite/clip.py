"""The global norm of sharded gradients, without a host synchronisation.

The norm is made of one partial per rank, combined in the order of ranks. Where gradients are not sharded every rank
computes the partials of all, from the same pieces: so all stages get the same bits.

Legend: `W` ranks.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shardlite.ring import Operation, all_gather
from shardlite.transport import Transport
from shardlite.unit import Flat

_EPSILON = 1e-6
"""As in `torch.nn.utils.clip_grad_norm_`."""


def clip_grad_norm(
    flats: Sequence[Flat], transport: Transport, max_norm: float, norm_type: float, operation: Operation
) -> Tensor:
    """Scale all gradients so that their norm over all ranks is at most `max_norm`; return what it was, [].

    The factor is that of `torch.nn.utils.clip_grad_norm_`: `min(1, max_norm / (norm + 1e-6))`.
    """
    norm = total_norm(flats, transport, norm_type, operation)
    factor = torch.clamp(max_norm / (norm + _EPSILON), max=1.0)
    grads = [shard.grad for flat in flats for shard in flat.shards if shard.grad is not None]
    for dtype in {grad.dtype for grad in grads}:
        torch._foreach_mul_([grad for grad in grads if grad.dtype == dtype], factor.to(dtype))
    return norm


def total_norm(flats: Sequence[Flat], transport: Transport, norm_type: float, operation: Operation) -> Tensor:
    """Return the norm of all gradients of all ranks, []."""
    sharded = any(flat.sharded_range is not None for flat in flats)
    rows = [transport.rank] if sharded else range(transport.world_size)
    doubles = any(flat.layout.dtype == torch.float64 for flat in flats)
    partials = torch.zeros(transport.world_size, dtype=torch.float64 if doubles else torch.float32)
    for rank in rows:
        pieces = [piece for flat in flats for piece in _pieces(flat, rank)]
        if pieces:
            norms = [norm.to(partials.dtype) for norm in torch._foreach_norm(pieces, norm_type)]
            partials[rank] = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if sharded:
        all_gather(partials, transport, operation=operation)
    total: Tensor = torch.linalg.vector_norm(partials, norm_type)
    return total


def _pieces(flat: Flat, rank: int) -> Iterator[Tensor]:
    """Yield what of the gradients lies in a rank's part of the full buffer, as 1-D tensors that are not empty."""
    start, stop = flat.layout.shard_range(rank)
    for slot, _, shard in flat.slots():
        if shard.grad is not None:
            grad = shard.grad.view(-1)
            first, last = slot.within(start, stop)
            if flat.sharded_range is None:
                grad = grad[start + first - slot.start : start + last - slot.start]
            if last > first:
                yield grad
