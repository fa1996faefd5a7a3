"""Averaging one flat's gradients over the ranks: where the mean will be, and how it gets there.

    stage 0     bucket [W*S]: own segment reduced in place, then gathered by all: every rank has the whole mean
    stage 1     bucket [W*S]: own segment reduced in place, with no memory but the bucket's, which stays
    stages 2, 3 a new shard [S]; the bucket is free when the reduction is over (on one rank it is the shard itself)

With replicas (hybrid sharding) each segment is added up within the ranks that share a model, then over the replicas of
that segment. The division by the number of all ranks comes last, once. Where the sum has another dtype than the weights
it is cast by its last addition.

Legend: `W` ranks that share a model, `S` elements per shard.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from shardlite.magnitude import any_bad
from shardlite.ring import Operation, all_gather, all_reduce, reduce_scatter, staging_numel
from shardlite.shared import Shared
from shardlite.unit import Flat, storage_key


@dataclass(frozen=True)
class Mean:
    """Where the mean of one flat's gradients will be."""

    flat: Flat
    whole: Tensor
    """What this rank will have of the mean: its shard [S], or all of it [W*S] at stage 0."""

    own: Tensor
    """The part of `whole` that this rank adds up, [S]."""

    bad: Tensor
    """[], int32: whether `own` has a NaN or an infinity."""


class Averager:
    """Averages the gradients of one wrapped model at one stage."""

    def __init__(self, shared: Shared, *, stage: int) -> None:
        self._shared = shared
        self._stage = stage
        self.divisor = shared.world_size
        """How many ranks' gradients count: by it their sum is divided."""
        self._staging = torch.empty(0, dtype=torch.uint8, device=shared.device)

    def place(self, flat: Flat, full: Tensor) -> Mean:
        """Find memory for the mean of `full`. It lives as long as a `.grad` views it."""
        layout, dtype = flat.gradients, flat.local.dtype
        own = slice(*layout.shard_range(self._shared.transport.rank))
        bad = torch.zeros((), dtype=torch.int32, device=full.device)
        if self._stage == 0:
            whole = full if full.dtype == dtype else full.new_empty(layout.full_numel, dtype=dtype)
            mean = Mean(flat, whole, whole[own], bad)
        elif (self._stage == 1 or layout.world_size == 1) and full.dtype == dtype:
            mean = Mean(flat, full[own], full[own], bad)
        else:
            shard = full.new_empty(own.stop - own.start, dtype=dtype)
            mean = Mean(flat, shard, shard, bad)
        self._shared.ledger.track("gradients", mean.whole)
        return mean

    def job(self, full: Tensor, mean: Mean, unit: str, operation: Operation) -> Callable[[], None]:
        """Return what a lane has to do with the gradients in `full`, which it overwrites."""
        shared, cuts, divisor = self._shared, mean.flat.gradients.cuts, self.divisor
        shard, replicas = shared.reducing
        transport = shared.traffic.counted(shard, "reduce", unit)
        across = replicas and shared.traffic.counted(replicas, "reduce over replicas", unit)
        in_place = shard.world_size == 1 and mean.own.data_ptr() == full.data_ptr()

        def average() -> None:
            if not in_place:
                reduce_scatter(
                    full,
                    transport,
                    out=mean.own,
                    divisor=1 if across else divisor,
                    staging=self._staging_for(full, mean),
                    operation=operation,
                    cuts=cuts,
                )
            if across:
                numel = staging_numel(mean.own.numel(), across.world_size, mean.own.dtype, batched=across.batched)
                room = self._room(numel, mean.own.dtype)
                all_reduce(mean.own, across, divisor=divisor, staging=room, operation=operation)
            if self._stage == 0:
                all_gather(mean.whole, transport, operation=operation, cuts=cuts)
            mean.bad.copy_(any_bad([mean.own], mean.own.device))

        return average

    def _staging_for(self, full: Tensor, mean: Mean) -> Tensor | None:
        """Return where partial sums arrive, if that cannot be the shard itself."""
        layout = mean.flat.gradients
        equal = layout.full_numel == layout.world_size * layout.shard_numel
        apart = storage_key(mean.own) != storage_key(full)
        if layout.world_size == 1 or (apart and equal and mean.own.dtype == full.dtype):
            return None
        batched = self._shared.transport.batched
        numel = staging_numel(layout.full_numel, layout.world_size, full.dtype, cuts=layout.cuts, batched=batched)
        return self._room(numel, full.dtype)

    def _room(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return memory that serves one operation after the other. To be called on the lane, whose stream owns it."""
        if numel * dtype.itemsize > self._staging.numel():
            self._staging = torch.empty(numel * dtype.itemsize, dtype=torch.uint8, device=self._shared.device)
            self._shared.ledger.track("staging", self._staging)
        return self._staging.view(dtype)
