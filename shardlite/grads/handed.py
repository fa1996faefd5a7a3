"""What the last reduction handed to the shards, and what its statistics say of it, as long as nobody has changed it.

A norm would else have to read all gradients again. Nobody tells us of a change, but PyTorch counts writes: gradients
that are the same tensors, at the same version, have the same values. (It does not count what is written through
`.data`, by NumPy or by collectives of `torch.distributed`.)
"""

import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from shardlite.params import ALIGN, Flat, round_up


class Handed:
    """The gradients of one reduction of a whole model, and the sums of their squares."""

    def __init__(self, squares: Mapping[Flat, Tensor], shards: Iterable[nn.Parameter]) -> None:
        """Take note of the gradients that `shards` have now.

        Args:
            squares: for each flat the sum of squares of this rank's part of its gradients, [] in fp64. Parameters that
                no rank has used count as zeros.
            shards: all that the reduction has given a gradient.
        """
        self._squares = squares
        grads = [(shard, shard.grad) for shard in shards if shard.grad is not None]
        self._marks = {shard: (weakref.ref(grad), grad._version) for shard, grad in grads}
        self._written = False

    def forget(self) -> None:
        """Take note of a write that PyTorch does not count."""
        self._written = True

    def are_all(self, shards: Collection[nn.Parameter]) -> bool:
        """Whether the gradients of `shards` are all that were handed over, and no others, whatever is in them now."""
        marks = self._marks
        same = all(shard in marks and marks[shard][0]() is shard.grad for shard in shards)
        return same and len(shards) == len(marks)

    def describes(self, shards: Collection[nn.Parameter]) -> bool:
        """Whether `squares` are those of the gradients of `shards` as they are now."""
        if self._written or not self.are_all(shards):
            return False
        return all(grad is not None and grad._version == was for grad, was in self._now())

    def squares(self, flats: Iterable[Flat]) -> Tensor:
        """Add up the squares in this rank's parts of all these flats, in their order: [] in fp64."""
        return torch.stack([self._squares[flat] for flat in flats if flat in self._squares]).sum()

    def runs(self) -> Iterable[Tensor]:
        """Yield the memory of the gradients, if they are all there still: one [n] for each flat, with its padding."""
        for flat in self._squares:
            grads = [shard.grad for shard in flat.shards if shard in self._marks and shard.grad is not None]
            if parts := [grad for grad in grads if grad.numel()]:
                yield _span(parts)

    def _now(self) -> Iterable[tuple[Tensor | None, int]]:
        return ((grad(), version) for grad, version in self._marks.values())


def _span(parts: Sequence[Tensor]) -> Tensor:
    """Return everything from the first to the last of these parts of a gradient shard, which are in ascending order.

    What is between them is padding, or belongs to parameters that no rank has used: zeros that nobody reads.
    """
    start = parts[0].storage_offset()
    stop = parts[-1].storage_offset() + round_up(parts[-1].numel(), ALIGN)
    return torch.as_strided(parts[0], (stop - start,), (1,), start)
