"""Reduce gradients: copy a unit's gradients to its bucket, and reduce the bucket into this rank's shard.

    gradient -> bucket [W*S] -> reduce-scatter -> gradient shard [S], of which the shards' `.grad` are views

With replicas (hybrid sharding) the shard is then reduced over them. At stage 0 all ranks all-gather it. So every stage
makes the same additions in the same order. With order="tree" the gradients of a rank's parts are first summed in its
buckets, and the backward of the last part reduces the sums.

Units are reduced in one fixed order: every rank reduces every unit once per backward, whatever branches its forward
took, and a missing gradient counts as zero. At the end the ranks exchange gradient flags: a parameter that no rank used
keeps its `.grad`, and all ranks know whether any gradient is not finite.

This file holds what outlives a backward; `backward_run.py` has one backward.

Legend: `W` ranks, `S` elements per shard.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from shardlite_kernels import send
from torch import Tensor

from shardlite.comm import Context, broadcast
from shardlite.errors import LayoutError, PhaseError
from shardlite.grads.bucket import Bucket, PartSums
from shardlite.grads.reduce import GradientShards, ReduceQueue
from shardlite.params import Flat, Gradients, Unit


class ReductionOrder:
    """The order in which units are reduced, equal on every rank whatever branches their forwards took.

    It starts as the reverse of the model's order. The first backward shows in which order gradients are complete, and
    at its end all ranks adopt what rank 0 has observed.
    """

    def __init__(self, units: Sequence[Unit], context: Context) -> None:
        self._all = units
        self._context = context
        self._order = list(reversed(units))
        self.follow_requires_grad()

    def follow_requires_grad(self) -> None:
        """Leave out units without gradients, and observe the next backward."""
        self._observed: list[Unit] | None = []  # in the order of completion; `None` once the ranks have agreed
        self._update()

    def observe(self, unit: Unit) -> None:
        """Record that the gradients of a unit are complete, unless the ranks have agreed."""
        if self._observed is not None and unit not in self._observed:
            self._observed.append(unit)

    def agree(self) -> None:
        """After the first backward, adopt rank 0's order of completion on all ranks.

        Raises:
            CommError: a peer failed, is late or runs another operation.
        """
        if self._observed is None:
            return
        seen = [*self._observed, *(unit for unit in self._order if unit not in self._observed)]
        order = send([self._all.index(unit) for unit in seen], torch.int64, self._context.device)
        operation = self._context.operation("the order of reductions", "order of reductions")
        for transport in self._context.transports:
            broadcast(order, transport, operation=operation)
        self._order = [self._all[i] for i in order.tolist()]
        self._observed = None
        self._update()

    def _update(self) -> None:
        self.units = [unit for unit in self._order if unit.trainable]
        """The units that have gradients, in the order of their reductions."""

        self.before_root = max((place for place, unit in enumerate(self.units, 1) if not unit.is_root), default=0)
        """How many of them are reduced before only roots are left."""


class Reducer:
    """Buckets, the order of reductions and the gradient shards of one wrapped model."""

    def __init__(
        self, units: Sequence[Unit], context: Context, *, stage: int, diagnose: bool, parts: int | None
    ) -> None:
        """Make empty buckets.

        Args:
            units: the units whose gradients are reduced.
            context: the ranks.
            stage: the stage of ZeRO.
            diagnose: whether to name gradients that are not finite.
            parts: the number of parts of a global batch, summed in a tree; `None` sums one gradient of each rank.
        """
        self.units = units
        self.context = context
        self.diagnose = diagnose
        self._own_parts = None if parts is None else parts // context.world_size
        # On one rank the last two sums stay separate. They are added with the division, like those of two ranks, and
        # nothing is rounded in between.
        most_parts = (self._own_parts or 1) // (2 if context.world_size == 1 else 1)
        self.divisor = parts or context.world_size
        """Divides sums."""

        self.counts = True
        """Whether this rank's gradients count in means."""

        self.queue = ReduceQueue(context, stage)
        self.on_stream = self.queue.operations.on_stream and parts is None
        """Whether gradients are copied to buckets on the stream of reductions."""

        self.buckets = {unit: Bucket(unit, context, PartSums(most_parts)) for unit in units}
        self.buckets_without_root = [bucket for unit, bucket in self.buckets.items() if not unit.is_root]
        self.order = ReductionOrder(units, context)
        self.results = GradientShards(units, context, by_blocks=parts is not None, diagnose=diagnose)
        """What the last backward has left."""

        self._backwards = 0

    @property
    def accumulates(self) -> bool:
        """Whether there are gradients that are not reduced yet."""
        return any(bucket.accumulates for bucket in self.buckets.values())

    def kept(self) -> Iterator[Tensor]:
        """Yield the memory of gradients that are not reduced yet, which later backwards use."""
        for bucket in self.buckets.values():
            yield from (*bucket.full, *bucket.early.values())
            for full in bucket.earlier.summands():
                yield from full

    def follow_requires_grad(self) -> bool:
        """Adapt buckets to the parameters that require gradients now. Return whether anything changed.

        Raises:
            PhaseError: gradients are accumulated and not reduced yet.
            LayoutError: an unfrozen parameter is kept in a dtype too narrow to train.
        """
        if all(flat.trainable_now() == flat.trainable_slots for unit in self.buckets for flat in unit.flats):
            return False
        _check_precision(flat for unit in self.buckets for flat in unit.flats)
        for unit, bucket in self.buckets.items():
            if bucket.accumulates:
                raise PhaseError(
                    f"requires_grad was changed while gradients of unit {unit.name!r} are accumulated and not yet "
                    "reduced: change it after a step, or call zero_grad() of the model before"
                )
        for bucket in self.buckets.values():
            bucket.follow_requires_grad()
        self.order.follow_requires_grad()
        return True

    def set_participation(self, *, counts: bool, ranks: int) -> None:
        """Include this rank's gradients in means, or not, and divide sums by `ranks`."""
        self.counts = counts
        for bucket in self.buckets.values():
            if bucket.phase is Gradients.FILLING:  # accumulated gradients expected another divisor
                bucket.multiply(ranks / self.divisor)
        self.divisor = ranks

    def add_earlier_parts(self, bucket: Bucket, *, check: bool) -> None:
        """Add the gradients of earlier parts to a bucket, if a rank has several.

        Raises:
            PhaseError: some are missing, and `check` is set.
        """
        if self._own_parts is None:
            return
        parts = bucket.add_earlier_parts()
        if parts != self._own_parts and check:
            raise PhaseError(
                f"unit {bucket.unit.name!r} has gradients of {parts} parts, and this rank has {self._own_parts}: "
                "inside a loop over parts() they were dropped, by zero_grad() of the model or after a backward that "
                "failed. Run the loop again, from its first part"
            )

    def end_backward(self) -> None:
        """Prepare for the next backward."""
        for unit in self.units:
            unit.begin_backward()
        self._backwards += 1
        self.context.progress.begin_backward(self._backwards)

    def discard(self) -> None:
        """Drop gradients that are accumulated and not reduced yet."""
        for bucket in self.buckets.values():
            if bucket.accumulates:
                bucket.clear()


def _check_precision(flats: Iterable[Flat]) -> None:
    for flat in flats:
        unfrozen = [index for index in flat.trainable_now() if not flat.layout.trainable]
        if unfrozen and flat.local.dtype.itemsize < torch.float32.itemsize:
            raise LayoutError(
                f"parameter {flat.layout.slots[unfrozen[0]].name!r} was frozen when it was wrapped, and so is kept in "
                f"{flat.local.dtype} only, too narrow for the steps of an optimizer. Wrap it with requires_grad set, "
                "and freeze it afterwards"
            )
