"""Compute the global norm of sharded gradients, and clip gradients by it, without host synchronization.

The norm combines one partial norm per rank, in the order of ranks. The last addition of a reduction also computes
statistics. If the gradients have not changed since the reduction, a rank derives its partial norm from the statistics.
Otherwise the rank reads its part of the gradients. The parts of ranks are the same at every stage, so all stages get
the same bits.

With order="tree" the norm combines the norms of blocks of `B` elements, which no cut between shards divides. All ranks
gather the norms of all blocks. For any `W`, they combine the same numbers in the same order.

PyTorch counts writes to a tensor, so the same tensor at the same version has the same values. Writes through `.data`,
by NumPy, and by collectives of `torch.distributed` are not counted.

Legend: `W` ranks that share a model, `S` elements per shard, `B` elements of a block of statistics. A flat (flat
parameter) is the parameters of one kind in a unit.
"""

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from math import inf
from operator import attrgetter
from typing import NamedTuple

import torch
from shardlite_kernels import new_stats, stats, stats_block, use_triton
from shardlite_kernels.scale import scale_all
from torch import Tensor, nn
from torch.nn.functional import pad

from shardlite.comm import Context, all_gather
from shardlite.errors import LayoutError, check_number
from shardlite.grads.flags import largest
from shardlite.params import ALIGN, Flat, as_real, as_they_are, round_up

_version_of = attrgetter("_version")  # `map` with this function makes no Python call per tensor


class Squares(NamedTuple):
    """Sums of squares of this rank's part of a flat's gradients."""

    total: Tensor
    """Sum over the whole part, [] in fp64."""

    blocks: Tensor | None
    """Sum over each block of statistics, [S/B]. `None` unless norms combine blocks."""


class ReducedNorm:
    """The gradients of one reduction of a whole model, and the sums of their squares."""

    def __init__(self, squares: Mapping[Flat, Squares], graded: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
        """Record gradients.

        Args:
            squares: sums of squares of each flat. Gradients of parameters that no rank used count as zeros.
            graded: pairs of a shard and its gradient, for all shards with a gradient from the reduction.
        """
        self._squares = squares
        # Keys are `id`s, because the hash of a tensor is computed in Python.
        shards, grads = zip(*graded, strict=True) if graded else ((), ())
        marks = zip(map(weakref.ref, grads), map(_version_of, grads), strict=True)
        self._marks = dict(zip(map(id, shards), marks, strict=True))
        self._written = False

    def forget(self) -> None:
        """Invalidate the sums after a write that PyTorch does not count."""
        self._written = True

    def are_all(self, shards: Collection[nn.Parameter]) -> bool:
        """Return whether the gradients of `shards` are the recorded tensors, even if their values have changed."""
        marks = self._marks
        same = [(mark := marks.get(id(shard))) is not None and mark[0]() is shard.grad for shard in shards]
        return False not in same and len(same) == len(marks)

    def describes(self, shards: Collection[nn.Parameter]) -> bool:
        """Return whether the recorded sums are the sums of squares of the current gradients of `shards`."""
        if self._written or not self.are_all(shards):
            return False
        marks = self._marks.values()
        return False not in [(now := grad()) is not None and now._version == was for grad, was in marks]

    def squares(self, flats: Iterable[Flat]) -> Tensor:
        """Return the sum of squares of this rank's parts of `flats`, added in the order of `flats`, [] in fp64."""
        return torch.stack([self._squares[flat].total for flat in flats if flat in self._squares]).sum()

    def norm_of_blocks(self, flat: Flat) -> Tensor | None:
        """Return the norm of each block of this rank's part of `flat`, [S/B], or `None` if `flat` has no gradients."""
        if flat not in self._squares:
            return None
        blocks = self._squares[flat].blocks
        assert blocks is not None, "sums of blocks are kept if norms combine them"
        return blocks.double().sqrt()

    def runs(self) -> Iterable[Tensor]:
        """Yield the memory of the gradients with their padding, [n] for each flat. All gradients must exist."""
        for flat in self._squares:
            grads = [as_real(each.grad) for each in flat.shards if id(each) in self._marks and each.grad is not None]
            if parts := [grad for grad in grads if grad.numel()]:
                yield _span(parts)


def _span(parts: Sequence[Tensor]) -> Tensor:
    """Return the memory from the first to the last of some parts of a gradient shard.

    The parts must be in ascending order. The memory between them is zero: it is padding, or belongs to parameters that
    no rank used.
    """
    start = parts[0].storage_offset()
    stop = parts[-1].storage_offset() + round_up(parts[-1].numel(), ALIGN)
    return torch.as_strided(parts[0], (stop - start,), (1,), start)


_vector_norm: Callable[..., Tensor] = torch.linalg.vector_norm
_SCALABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Clipper:
    """Computes the norm of one wrapped model's gradients, and clips gradients by it."""

    def __init__(
        self,
        flats: Sequence[Flat],
        context: Context,
        reduced_norm: Callable[[], ReducedNorm | None],
        note: Callable[[Iterable[tuple[str, float]]], None],
        *,
        by_blocks: bool,
    ) -> None:
        """Initialize without computing a norm.

        Args:
            flats: all flats of the model.
            context: the ranks.
            reduced_norm: function that returns the record of the latest reduction's gradients, or `None`.
            note: function that records options by name, which must be equal on all ranks.
            by_blocks: whether norms combine the norms of blocks, so that norms do not depend on the number of ranks. If
                so, shards consist of whole blocks.
        """
        self._by_blocks = by_blocks
        self._flats = [flat for flat in flats if flat.layout.real.dtype.is_floating_point]
        self._context = context
        self._reduced_norm = reduced_norm
        self._note = note

    def norm(self, norm_type: float, only: Collection[Tensor] | None = None) -> Tensor:
        """Return the norm of the gradients of all ranks, []. Collective.

        If `only` is not `None`, use only the gradients of the shards in `only`.

        Raises:
            LayoutError: the exponent `norm_type` is not positive.
        """
        if not norm_type > 0:
            raise LayoutError(f"norm_type must be a positive number or inf, got {norm_type!r}")
        context, transport = self._context, self._context.inline[0]
        doubles = any(flat.layout.real.dtype == torch.float64 for flat in self._flats)
        dtype = torch.float64 if doubles else torch.float32
        own = self._norms_of_blocks(norm_type, only) if self._by_blocks else self._partial(norm_type, only, dtype)
        everyones = own.new_empty(transport.world_size, len(own))
        everyones[transport.rank] = own
        all_gather(everyones.view(-1), transport, operation=context.operation("the norm of gradients", "norm"))
        if self._by_blocks:
            return _norm_of_all(everyones.view(-1)[self._blocks_in_order], norm_type).to(dtype)
        return _vector_norm(everyones.view(-1), norm_type)

    def _partial(self, norm_type: float, only: Collection[Tensor] | None, dtype: torch.dtype) -> Tensor:
        """Return the norm of this rank's part of the gradients, [1]."""
        if (reduced_norm := self._known(norm_type, only)) is not None:
            return reduced_norm.squares(self._flats).sqrt().to(dtype).view(1)
        rank = self._context.transport.rank
        pieces = [piece for flat in self._flats for _, piece in _pieces(flat, rank, norm_type, only)]
        if not pieces:
            return torch.zeros(1, dtype=dtype, device=self._context.device)
        norms = torch.stack([norm.to(dtype) for norm in _norms(pieces, norm_type)])
        return _vector_norm(norms, norm_type).view(1)

    def _known(self, norm_type: float, only: Collection[Tensor] | None) -> ReducedNorm | None:
        """Return the record of the latest reduction if it describes the current gradients, else `None`."""
        graded = _graded([shard for flat in self._flats for shard in flat.shards if only is None or shard in only])
        reduced_norm = self._reduced_norm()
        known = norm_type == 2 and reduced_norm is not None and reduced_norm.describes(graded)
        return reduced_norm if known else None

    def _norms_of_blocks(self, norm_type: float, only: Collection[Tensor] | None) -> Tensor:
        """Return the norms of all blocks of this rank's part of the gradients, in fp64."""
        reduced_norm = self._known(norm_type, only)
        own = []
        for flat in self._flats:
            norms = reduced_norm.norm_of_blocks(flat) if reduced_norm is not None else None
            rank = self._context.transport.rank
            if reduced_norm is None and (part := _own_part(flat, rank, norm_type, only)) is not None:
                norms = _norm_of_each_block(part, norm_type)
            if norms is None:
                blocks = flat.layout.real.shard_numel // flat.layout.real.grain
                norms = torch.zeros(blocks, dtype=torch.float64, device=self._context.device)
            own.append(norms)
        return torch.cat(own)

    @cached_property
    def _blocks_in_order(self) -> Tensor:
        """The indices that put the gathered blocks of all ranks into the order of flats and of their full buffers.

        Blocks without parameters are left out, because their number depends on the number of ranks.
        """
        counts = [flat.layout.real.shard_numel // flat.layout.real.grain for flat in self._flats]
        places, before = [], 0
        for flat, count in zip(self._flats, counts, strict=True):
            blocks = torch.arange(-(-flat.layout.real.slots[-1].stop // flat.layout.real.grain))
            places.append(blocks // count * sum(counts) + before + blocks % count if count else blocks)
            before += count
        return torch.cat(places).to(self._context.device) if places else torch.zeros(0, dtype=torch.int64)

    def clip(self, shards: Iterable[nn.Parameter], max_norm: float, norm: Tensor) -> None:
        """Scale gradients by `min(1, max_norm / (norm + 1e-6))`, as `torch.nn.utils.clip_grad_norm_` does.

        If the factor is 1, no gradient is read. The kernel checks this on a GPU, and the host on the CPU.
        """
        check_number("clip_grad_norm_: max_norm", max_norm)
        if isinstance(max_norm, float | int):  # a tensor may be on a device, and is not read
            self._note([("max_norm of clip_grad_norm_", float(max_norm))])
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        if not use_triton(factor) and factor == 1:
            return
        graded, reduced_norm = _graded(shards), self._reduced_norm()
        if reduced_norm is not None and reduced_norm.are_all(graded):
            runs = list(reduced_norm.runs())
        else:
            grads = [shard.grad for shard in graded if shard.grad is not None]
            runs = [run for grad in grads if (run := _run_or_scaled(grad, factor)) is not None]
        scale_all(runs, factor)
        torch.autograd.graph.increment_version(runs)  # kernels do not increment versions

    def gradients_written(self) -> None:
        """Invalidate the record of the latest reduction after writes that PyTorch does not count."""
        if (reduced_norm := self._reduced_norm()) is not None:
            reduced_norm.forget()


def _graded(shards: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return [shard for shard in shards if shard.grad is not None]


def _run_or_scaled(grad: Tensor, factor: Tensor) -> Tensor | None:
    """Return the memory of a gradient, [n]. If `scale` does not support it, scale the gradient and return `None`."""
    if grad.layout is torch.strided and grad.is_contiguous() and grad.dtype in _SCALABLE:
        return grad.view(-1)
    grad.mul_(factor.to(grad.dtype))
    return None


def _norms(pieces: Sequence[Tensor], norm_type: float) -> Sequence[Tensor]:
    if norm_type == inf:
        return largest(pieces)
    with as_they_are():  # otherwise the library would warn about computations on shards, which are intended here
        return torch._foreach_norm(list(pieces), norm_type)


def _own_part(flat: Flat, rank: int, norm_type: float, only: Collection[Tensor] | None) -> Tensor | None:
    """Return a copy [S] of a rank's gradients of `flat`, with zeros in the gaps, or `None` without gradients."""
    own = None
    for first, piece in _pieces(flat, rank, norm_type, only):
        own = piece.new_zeros(flat.layout.real.shard_numel) if own is None else own
        own[first : first + piece.numel()] = piece
    return own


def _norm_of_each_block(part: Tensor, norm_type: float) -> Tensor:
    """Return the norm of each block of statistics of `part` [S], [S/B] in fp64."""
    if norm_type == 2:
        rows = new_stats(part)
        stats(part, rows)
        return rows[:, 0].double().sqrt()
    return _vector_norm(part.view(-1, stats_block(part)), norm_type, dim=1).double()


_TOGETHER = 1024
"""Number of norms that are combined in one row. PyTorch would split longer rows among threads, and the bits of the sum
would depend on the number of threads."""


def _norm_of_all(norms: Tensor, norm_type: float) -> Tensor:
    """Combine the norms of all blocks, [] in fp64."""
    rows = pad(norms, (0, -len(norms) % _TOGETHER)).view(-1, _TOGETHER)
    return _vector_norm(_vector_norm(rows, norm_type, dim=1), norm_type)


def _pieces(flat: Flat, rank: int, norm_type: float, only: Collection[Tensor] | None) -> Iterator[tuple[int, Tensor]]:
    """For each gradient in a rank's part of the full buffer, yield its start and its values (1-D, not empty).

    For norm 2, a complex number counts as its two parts. For other norms, it counts as its absolute value and a zero.
    """
    start, stop = flat.layout.real.shard_range(rank)
    for slot, shard in zip(flat.layout.real.slots, flat.shards, strict=True):
        if shard.grad is not None and (only is None or shard in only):
            complex_norm = shard.grad.is_complex() and norm_type != 2
            grad = as_real(shard.grad.abs().to(shard.grad.dtype) if complex_norm else shard.grad).reshape(-1)
            first, last = slot.within(start, stop)
            if flat.rank is None:
                grad = grad[start + first - slot.start : start + last - slot.start]
            if last > first:
                yield first, grad
