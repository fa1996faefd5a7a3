"""Averaging one flat's gradients over the ranks: where the mean will be, and how it gets there.

    stage 0     bucket [W*S]: own segment reduced in place, then gathered by all: every rank has the whole mean
    stage 1     bucket [W*S]: own segment reduced in place, with no memory but the bucket's, which stays
    stages 2, 3 a new shard [S]; the bucket is free when the reduction is over (on one rank it is the shard itself)

With replicas (hybrid sharding) each segment is added up within the ranks that share a model, then over the replicas of
that segment. The division by the number of all ranks comes last, once. Where the sum has another dtype than the weights
it is cast by its last addition.

The last addition also takes the statistics of the own part, from which norms and the skipping of steps follow. Where it
is no sum over the ranks that share a model (one rank alone, replicas) a pass takes them afterwards.

Legend: `W` ranks that share a model, `S` elements per shard, `P` rows of statistics.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias

import torch
from shardlite_kernels import hop, new_stats, send, stats, stats_block, stats_total
from torch import Tensor

from shardlite.comm import (
    Context,
    FusedStep,
    Operation,
    all_gather,
    all_reduce,
    reduce_scatter,
    ring_step,
    rings_in_kernel,
    stages_in_out,
    staging_numel,
)
from shardlite.grads.norm import Squares
from shardlite.params import Flat, storage_key

Summands: TypeAlias = tuple[Tensor, Tensor | None]
"""This rank's gradients [W*S]. On one rank, the second is the sum of the first half of the parts, if there are two."""


class Mean(NamedTuple):
    """Memory for the mean of one flat's gradients."""

    flat: Flat
    whole: Tensor
    """This rank's part of the mean: its shard [S], or all of it [W*S] at stage 0."""

    own: Tensor
    """The part of `whole` that this rank adds up, [S]."""

    stats: Tensor
    """The statistics of `own`, block by block, [P, 2]."""

    total: Tensor
    """Statistics of all of `own`, [2] in fp64: the sum of squares, and how many blocks have a NaN or an infinity."""

    def squares(self, total: Tensor, *, by_blocks: bool) -> Squares:
        """Return the sums of squares: of all of `own` (`total`) and, with `by_blocks`, of each of its blocks."""
        return Squares(total, self.stats[:, 0] if by_blocks else None)


class ShardStep(Protocol):
    """The step that an optimizer takes by the mean of one flat's gradients, as soon as that is there."""

    bad: Tensor
    """[], int32, not 0 once a mean had a NaN or an infinity."""

    def activate(self, users: Tensor) -> None:
        """Step those parameters that have users: a number for each slot that has gradients, [rows]."""

    def __call__(
        self, start: int, received: Tensor | None, own: Tensor | None, divisor: int = 1, first: int | None = 0
    ) -> None:
        """Step by elements `[start, start + n)` of the mean: `(received + own) / divisor`, [n] each, or just `own`.

        Without `own`, `received` has a row of each rank, [W, n], to be added from row `first` on, or as a balanced
        tree if that is `None`.
        """

    def fused(self, numel: int) -> FusedStep | None:
        """Return what one kernel steps by all `numel` elements of the mean, or `None` if that takes several calls."""


class Averager:
    """Averages the gradients of one wrapped model at one stage."""

    def __init__(self, context: Context, *, stage: int, divisor: int) -> None:
        self._context = context
        self._stage = stage
        self.divisor = divisor
        """Number of ranks, or parts, whose gradients count: the divisor of their sum."""
        self._staging = torch.empty(0, dtype=torch.uint8, device=context.device)

    def place(self, flat: Flat, full: Tensor) -> Mean:
        """Find memory for the mean of `full`. It lives as long as a `.grad` views it."""
        layout, dtype = flat.gradients, flat.master
        start, stop = layout.shard_range(self._context.transport.rank)
        if self._stage == 0:
            whole = full if full.dtype == dtype else full.new_empty(layout.full_numel, dtype=dtype)
            own = whole[start:stop]
        elif (self._stage == 1 or layout.world_size == 1) and full.dtype == dtype:
            whole = own = full[start:stop]
        else:
            whole = own = full.new_empty(stop - start, dtype=dtype)
        self._context.ledger.track("gradients", whole)
        return Mean(flat, whole, own, new_stats(own), full.new_empty(2, dtype=torch.float64))

    def average(self, grads: Summands, mean: Mean, divisor: int, unit: str, operation: Operation) -> None:
        """Reduce this rank's gradients into `mean`, and overwrite them. On the queue."""
        full, half = grads
        context, cuts = self._context, mean.flat.gradients.uneven_cuts
        shard, replicas = context.reducing
        in_place = half is None and shard.world_size == 1 and mean.own.data_ptr() == full.data_ptr()
        if half is not None:
            hop(mean.own, half, full, divisor, mean.stats)
        elif not in_place:
            reduce_scatter(
                full,
                shard,
                out=mean.own,
                divisor=1 if replicas else divisor,
                stats=None if replicas else mean.stats,
                staging=self._staging_for(full, mean),
                operation=operation,
                cuts=cuts,
            )
        if replicas:
            numel = staging_numel(mean.own.numel(), replicas, mean.own.dtype)
            room = self._room(numel, mean.own.dtype)
            across = operation._replace(tally=context.traffic.tally("reduce over replicas", unit))
            all_reduce(mean.own, replicas, divisor=divisor, staging=room, operation=across)
        if in_place or replicas:
            stats(mean.own, mean.stats)
        if self._stage == 0:
            all_gather(mean.whole, shard, operation=operation, cuts=cuts)
        stats_total(mean.stats, out=mean.total)

    def step_by(
        self,
        grads: Summands,
        flat: Flat,
        step: ShardStep,
        used: Sequence[int],
        divisor: int,
        unit: str,
        operation: Operation,
    ) -> None:
        """Reduce this rank's gradients, and step by their mean instead of keeping it. On the queue.

        Where the mean is the last addition of a ring, that and the step are one. Where it is gathered or added up once
        more (stage 0, replicas) the step follows. `used` is 1 for each parameter that this rank has used, else 0, and
        `-W` or less for those that no rank is to step.
        """
        context, full = self._context, grads[0]
        shard, replicas = context.reducing
        step.activate(self._users(used, full.device, unit, operation))
        if self._stage == 0 or replicas or shard.world_size == 1:
            mean = self.place(flat, full)
            self.average(grads, mean, divisor, unit, operation)
            step(0, None, mean.whole)
            return
        if rings_in_kernel(full, shard, flat.gradients.uneven_cuts):
            self._step_in_ring(full, flat, step, divisor, operation)
            return

        def last(start: int, received: Tensor, own: Tensor | None, first: int | None = 0) -> None:
            step(start, received, own, divisor, first)

        staging, cuts = self._staging_of(flat, full), flat.gradients.uneven_cuts
        reduce_scatter(full, shard, last=last, staging=staging, operation=operation, cuts=cuts)

    def _step_in_ring(self, full: Tensor, flat: Flat, step: ShardStep, divisor: int, operation: Operation) -> None:
        """Step in the kernel that walks the ring, or behind it. Each rank does what its own shard allows."""
        shard, _ = self._context.reducing
        numel = full.numel() // shard.world_size
        fused = step.fused(numel)
        if fused is not None:
            ring_step(full, shard, fused, divisor=divisor, operation=operation)
            return
        own = full.new_empty(numel, dtype=flat.master)
        self._context.ledger.track("staging", own)
        reduce_scatter(full, shard, out=own, divisor=divisor, operation=operation)
        step(0, None, own)

    def _users(self, used: Sequence[int], device: torch.device, unit: str, operation: Operation) -> Tensor:
        """Return how many ranks have used each parameter, [rows]. Steps need to know before their means are whole."""
        users = send(used, torch.int32, device)
        for transport in self._context.reducing:
            if transport is not None:
                used_by = operation._replace(tally=self._context.traffic.tally("used", unit))
                all_reduce(users, transport, operation=used_by)
        return users

    def _staging_for(self, full: Tensor, mean: Mean) -> Tensor | None:
        """Return where partial sums arrive, if that cannot be the shard itself."""
        layout = mean.flat.gradients
        if layout.world_size == 1:
            return None
        if rings_in_kernel(full, self._context.reducing[0], layout.uneven_cuts):
            return None
        in_out = stages_in_out(self._context.reducing[0]) and mean.own.dtype == full.dtype
        if in_out and layout.uneven_cuts is None and storage_key(mean.own) != storage_key(full):
            return None
        return self._staging_of(mean.flat, full)

    def _staging_of(self, flat: Flat, full: Tensor) -> Tensor:
        """Return memory where partial sums can arrive."""
        layout = flat.gradients
        transport, _ = self._context.reducing
        cuts, grain = layout.uneven_cuts, stats_block(full)
        numel = staging_numel(layout.full_numel, transport, full.dtype, cuts=cuts, grain=grain)
        return self._room(numel, full.dtype)

    def _room(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return memory that serves one operation after the other. Called on the queue, whose stream owns it."""
        if numel * dtype.itemsize > self._staging.numel():
            self._staging = torch.empty(numel * dtype.itemsize, dtype=torch.uint8, device=self._context.device)
            self._context.ledger.track("staging", self._staging)
        return self._staging.view(dtype)
