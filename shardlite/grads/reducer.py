"""Reduce gradients: copy a unit's gradients to its bucket, and reduce the bucket into this rank's shard.

    gradient -> bucket [W*S] -> reduce-scatter -> gradient shard [S]; the `.grad` of each shard is a view of it

With replicas (hybrid sharding) the shard is then reduced over the replicas. At stage 0 all ranks all-gather the shards.
So every stage makes the same additions in the same order. With order="tree", a global batch is divided into parts. A
rank sums the gradients of its parts in its buckets, and the backward of its last part reduces the sums.

Units are reduced in one fixed order. Every rank reduces every unit once per backward, even if its forward skipped the
unit; a missing gradient counts as zero. At the end the ranks exchange gradient flags. The flags tell all ranks which
parameters no rank has used; these parameters keep their `.grad`. The flags also tell whether any gradient has a NaN or
infinity.

This file has the state that outlives a backward. `backward_run.py` has the state of one backward.

Legend: `W` ranks, `S` elements per shard.
"""

from collections.abc import Iterator, Sequence
from operator import attrgetter

import torch
from shardlite_kernels import send
from torch import Tensor

from shardlite.comm import Context, broadcast
from shardlite.errors import LayoutError, PhaseError
from shardlite.grads.bucket import Bucket, Spares
from shardlite.grads.policy import before_root
from shardlite.grads.reduce import ReduceQueue
from shardlite.grads.results import GradientShards
from shardlite.grads.scale import SharedScale
from shardlite.params import Unit, requires_grad_of

_accumulates = attrgetter("accumulates")


class ReductionOrder:
    """The order in which units are reduced. It is equal on all ranks, even if their forwards took different branches.

    The initial order is the reverse of the registration order, with replicated parameters at the end. In the first
    backward, each rank records the order in which the gradients of units become complete. At the end of this backward,
    all ranks adopt rank 0's order.
    """

    def __init__(self, units: Sequence[Unit], context: Context) -> None:
        self._all = units
        self._context = context
        self._order = sorted(units, key=lambda unit: (unit.replicated, -unit.index))
        self.follow_requires_grad()

    def follow_requires_grad(self) -> None:
        """Leave out units without gradients, and observe the next backward."""
        self.observed: list[Unit] | None = []
        """Units in the order of completion. `None` once the ranks have agreed on an order."""

        self._update()

    def observe(self, unit: Unit) -> None:
        """Record that the gradients of a unit are complete. The ranks must not have agreed on an order yet."""
        assert self.observed is not None
        if unit not in self.observed:
            self.observed.append(unit)

    def agree(self) -> None:
        """After the first backward, adopt rank 0's order of completion on all ranks.

        Raises:
            CommError: a peer failed, timed out or called a different operation.
        """
        if self.observed is None:
            return
        seen = [*self.observed, *(unit for unit in self._order if unit not in self.observed)]
        order = send([self._all.index(unit) for unit in seen], torch.int64, self._context.device)
        operation = self._context.operation("the order of reductions", "order of reductions")
        for transport in self._context.transports:
            broadcast(order, transport, operation=operation)
        self._order = [self._all[i] for i in order.tolist()]
        self.observed = None
        self._update()

    def _update(self) -> None:
        self.units = [unit for unit in self._order if unit.trainable]
        """Units that have gradients, in the order of their reductions."""

        self.before_root = before_root([unit.is_root for unit in self.units])
        """Number of reductions after which only the root is left to reduce."""


class Reducer:
    """Buckets, the order of reductions and the gradient shards of one wrapped model."""

    def __init__(
        self, units: Sequence[Unit], context: Context, *, stage: int, diagnose: bool, parts: int | None
    ) -> None:
        """Create empty buckets.

        Args:
            units: units whose gradients are reduced.
            context: the ranks.
            stage: stage of ZeRO.
            diagnose: whether to report the names of gradients that are not finite.
            parts: number of parts of a global batch, whose gradients are summed in a tree. `None`: one gradient per
                rank is summed.
        """
        self.units = units
        self.context = context
        self.diagnose = diagnose
        self._own_parts = None if parts is None else parts // context.world_size
        self.adds_parts = parts is not None
        """Whether gradients of the parts of a global batch are added in a tree."""

        # With one rank, the sums of the two halves of the parts stay separate. The reduction adds and divides these
        # sums in one operation without rounding in between, as two ranks do with their sums.
        most_parts = (self._own_parts or 1) // (2 if context.world_size == 1 else 1)
        self.divisor = parts or context.world_size
        """The number by which sums are divided, unless items are counted."""

        self.scale = SharedScale(context.device, context.rank, context.world_size)
        """Decides whether sums are divided by `divisor`, by counts, or not at all."""

        self.counts = True
        """Whether this rank's gradients count in means."""

        self.queue = ReduceQueue(context, stage)
        self.on_stream = self.queue.operations.on_stream and parts is None
        """Whether gradients are copied to buckets on the stream of reductions."""

        self.spares = Spares()
        """Memory of buckets between two units of one backward."""

        self._params = [param for unit in units for param in unit.params()]
        self._required: list[bool] = []  # `requires_grad` of all parameters, to which buckets are adapted
        self.buckets = {unit: Bucket(unit, context, most_parts, self.spares) for unit in units}
        self.order = ReductionOrder(units, context)
        self.results = GradientShards(units, context, self.scale, by_blocks=parts is not None, diagnose=diagnose)
        """Results of the latest backward."""

    @property
    def accumulates(self) -> bool:
        """Whether there are gradients that are not reduced yet."""
        return any(map(_accumulates, self.buckets.values()))

    def kept(self) -> Iterator[Tensor]:
        """Yield the memory of gradients that are not reduced yet and that later backwards need."""
        for bucket in self.buckets.values():
            yield from (*bucket.full, *bucket.early.values(), *bucket.kept)
            for each in bucket.sums:
                yield from each.full

    def follow_requires_grad(self, *, frozen: bool = True) -> bool:
        """Adapt buckets to the parameters that now require gradients. Return whether anything changed.

        If `frozen` is `False`, nothing changes unless a parameter was unfrozen.

        Raises:
            PhaseError: gradients are accumulated and not reduced yet.
            LayoutError: an unfrozen parameter is stored in a dtype that is too narrow to train.
        """
        if requires_grad_of(self._params) == self._required:
            return False
        flats = [flat for unit in self.buckets for flat in unit.flats]
        if all(flat.trainable_now() == flat.trainable_slots for flat in flats):
            self._required = requires_grad_of(self._params)
            return False
        if not frozen and all(set(flat.trainable_now()) <= set(flat.trainable_slots) for flat in flats):
            return False
        for flat in flats:
            unfrozen = [index for index in flat.trainable_now() if not flat.layout.trainable]
            if unfrozen and flat.local.dtype.itemsize < torch.float32.itemsize:
                raise LayoutError(
                    f"parameter {flat.layout.slots[unfrozen[0]].name!r} was frozen when it was wrapped, so it is "
                    f"stored in {flat.local.dtype} only, which is too narrow for an optimizer's steps. Wrap the model "
                    "while the parameter requires gradients, and freeze it afterwards"
                )
        for unit, bucket in self.buckets.items():
            if bucket.accumulates:
                raise PhaseError(
                    f"requires_grad was changed while accumulated gradients of unit {unit.name!r} are not yet reduced: "
                    "change it after a step, or call zero_grad() of the model first"
                )
        for bucket in self.buckets.values():
            bucket.follow_requires_grad()
        self.order.follow_requires_grad()
        self._required = requires_grad_of(self._params)
        return True

    def set_participation(self, *, counts: bool, ranks: int) -> None:
        """Set whether this rank's gradients count in means, and the number of ranks by which sums are divided."""
        self.counts = counts
        for bucket in self.buckets.values():
            if bucket.accumulates and self.scale.by_ranks:  # the new divisor must not change accumulated gradients
                bucket.multiply(ranks / self.divisor)
        self.divisor = ranks

    def add_earlier_parts(self, bucket: Bucket, *, check: bool) -> None:
        """Add the gradients of earlier parts to a bucket. `adds_parts` must be true.

        Raises:
            PhaseError: `check` is set, and gradients of some parts are missing.
        """
        parts = bucket.add_earlier_parts()
        if parts != self._own_parts and check:
            raise PhaseError(
                f"unit {bucket.unit.name!r} has gradients of {parts} parts, but this rank has {self._own_parts} parts: "
                "inside the loop over parts() gradients were dropped by zero_grad() of the model or by a backward that "
                "failed. Run the whole loop again"
            )

    def end_backward(self) -> None:
        """Prepare for the next backward."""
        for unit in self.units:
            unit.begin_backward()
        self.context.progress.begin_backward()

    def discard(self) -> None:
        """Drop accumulated gradients that are not reduced yet."""
        self.scale.reset()
        for bucket in self.buckets.values():
            if bucket.accumulates:
                bucket.clear()
