"""A parameter that is stepped whole: the elements that each rank keeps, and the rank that owns the parameter.

Legend: `W` ranks, `n` elements of the whole parameter, `k` elements that this rank keeps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from shardlite_kernels import joined
from torch import Tensor, nn

from shardlite.comm import Context
from shardlite.engine import OptimizerBridge
from shardlite.optimizers.assignment import Owned, ranges_of
from shardlite.params import Flat

Copies: TypeAlias = list[tuple[Tensor, Tensor]]
"""Copies within this rank: target and source."""

Parcel: TypeAlias = tuple[list[tuple[Tensor, int]], list[tuple[Tensor, int]]]
"""The tensors that this rank sends, and those that it receives, each with the other rank."""


@dataclass(eq=False, kw_only=True)
class Member(Owned):
    """One parameter of a wrapped model."""

    shard: nn.Parameter
    flat: Flat
    index: int
    """Index of the parameter in its flat (flat parameter)."""

    context: Context
    group: int = 0
    """Index of the parameter group."""

    @property
    def rank(self) -> int:
        """This rank."""
        return self.context.transport.rank

    @property
    def is_mine(self) -> bool:
        """Whether this rank is the owner."""
        return self.owner == self.rank

    def gradient(self) -> Tensor:
        """Return this rank's elements of the gradient, [k]."""
        grad = self.shard.grad
        assert grad is not None, "only parameters with a gradient are stepped"
        return grad.detach().reshape(-1)

    def weight(self) -> Tensor:
        """Return this rank's elements of the weight, [k]: a view of the shard, or an fp32 copy of split weights."""
        own = self.shard.detach().view(-1)
        if self.flat.low is None:
            return own
        start, stop = self.flat.layout.slots[self.index].within(*self.flat.own_range(self.flat.layout))
        return joined(own, self.flat.lower(slice(start, stop)))

    def write(self, weight: Tensor) -> None:
        """Overwrite this rank's elements of the weight, unless `weight` [k] is a view of the shard."""
        if self.flat.low is not None:
            self.flat.write_param(self.index, weight)
        elif weight.data_ptr() != self.shard.data_ptr():
            self.shard.detach().view(-1).copy_(weight)

    def to_owner(self, pieces: Sequence[Tensor], wholes: Sequence[Tensor]) -> tuple[Parcel, Copies]:
        """Return the messages and copies that assemble `wholes` [n] from `pieces` [k]. Only the owner has `wholes`."""
        if not self.is_mine:
            return ([(piece, self.owner) for piece in pieces if piece.numel()], []), []
        others, own = self._cut(pieces, wholes)
        return ([], others), own

    def from_owner(self, piece: Tensor, whole: Tensor | None) -> tuple[Parcel, Copies]:
        """Return the messages and copies that distribute `whole` [n] to `piece` [k]. Only the owner has `whole`."""
        if whole is None:
            return ([], [(piece, self.owner)] if piece.numel() else []), []
        others, own = self._cut([piece], [whole])
        return (others, []), [(piece, part) for part, piece in own]

    def _cut(self, pieces: Sequence[Tensor], wholes: Sequence[Tensor]) -> tuple[list[tuple[Tensor, int]], Copies]:
        """Cut `wholes` [n] into the parts of other ranks, and this rank's parts with the `pieces` [k]."""
        spans = [(rank, slice(*span)) for rank, span in enumerate(self.ranges) if span[0] < span[1]]
        others = [(whole[span], rank) for rank, span in spans if rank != self.owner for whole in wholes]
        own = slice(*self.ranges[self.owner])
        return others, [(whole[own], piece) for whole, piece in zip(wholes, pieces, strict=True)]


def members_of(model: OptimizerBridge) -> list[Member]:
    """Return the members of a wrapped model, in the order of its units."""
    context, found = model.context, []
    for place, each in enumerate(model.shards.entries):
        slot, flat = each.slot, each.flat
        ranges = ranges_of(flat.layout, each.index, whole=flat.rank is None)
        found.append(
            Member(
                shard=each.shard,
                name=slot.name,
                unit=each.unit.name,
                shape=slot.shape,
                ranges=ranges,
                flat=flat,
                index=each.index,
                place=place,
                context=context,
            )
        )
    return found


def placeholder(param: Tensor, member: Member | None) -> nn.Parameter:
    """Return a parameter like the member of the shard `param`, or like `param`, with the memory of one element."""
    dtype, shape = (param.dtype, param.shape) if member is None else (member.flat.master, tuple(member.shape))
    return nn.Parameter(torch.full((), torch.nan, dtype=dtype, device=param.device).expand(shape))
