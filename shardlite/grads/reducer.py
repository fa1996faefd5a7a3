"""Reduce gradients: a unit's are copied to its bucket and from there reduced into this rank's shard.

    gradient -> bucket [W*S] -> reduce-scatter -> gradient shard [S], of which the shards' `.grad` are views

With replicas (hybrid sharding) the shard is then reduced over them. At stage 0 all ranks gather it in the end. So every
stage makes the same additions in the same order.

With order="tree" the gradients of a rank's parts are added up in its buckets first (`part_sums.py`), and the last
part's backward reduces the sums.

Units are reduced in one fixed order, so that every rank reduces every unit once per backward, whatever branches its
forward took: a gradient that did not come counts as zero. In the end the ranks exchange gradient flags: a parameter
that no rank used keeps its `.grad`, and all ranks know of gradients that are not finite.

Legend: `W` ranks, `S` elements per shard.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from shardlite.comm import Context
from shardlite.errors import LayoutError, PhaseError
from shardlite.grads.bucket import PURPOSE, Bucket, make_buckets
from shardlite.grads.gradient_shards import GradientShards
from shardlite.grads.order import ReductionOrder, Reductions
from shardlite.grads.reduce_scatter import Averager, Stepper
from shardlite.params import Flat, Gradients, Unit


class Reducer:
    """Reduces the gradients of one wrapped model; `diagnose` names those that are not finite."""

    _latest: tuple[nn.Parameter, Tensor] | None = None
    """The gradient that has just come, if hooks of the program are to see it: its bucket may be on its way already."""

    def __init__(
        self,
        units: Sequence[Unit],
        context: Context,
        stepper: Stepper,
        *,
        stage: int,
        diagnose: bool,
        parts: int | None,
    ) -> None:
        """`parts` of a global batch are added in a tree; `None`: a rank's gradients are one summand."""
        self.units = units
        """The units whose gradients this reduces."""

        self._own_parts = None if parts is None else parts // context.world_size
        # On one rank the last two sums are kept apart. They are added with the division, as those of two ranks are, and
        # nothing is rounded between.
        kept_apart = (self._own_parts or 1) // (2 if context.world_size == 1 else 1)
        self._divisor = parts or context.world_size
        self._context = context
        self._stepper = stepper
        self._averager = Averager(context, stepper, stage=stage, diagnose=diagnose, by_parts=parts is not None)
        self._on_stream = self._averager.on_stream
        self._last: Bucket | None = None  # that a gradient came to, on a stream
        self._buckets = make_buckets(units, context, kept_apart)
        self._beside_root = [bucket for unit, bucket in self._buckets.items() if not unit.is_root]
        self._order = ReductionOrder(units, context)
        self.results = GradientShards(units, context, by_blocks=parts is not None, diagnose=diagnose)
        """What the last backward has left."""

        self._counts = True
        self._backwards = 0
        self._reductions = Reductions(context, self._order, self._beside_root)

    @property
    def accumulates(self) -> bool:
        """Whether there are gradients that are not reduced yet."""
        return any(bucket.accumulates for bucket in self._buckets.values())

    def kept(self) -> Iterator[Tensor]:
        """Yield the memory that later backwards use, of gradients that are not reduced yet."""
        for bucket in self._buckets.values():
            yield from (*bucket.full, *bucket.early.values())
            for full in bucket.earlier.summands():
                yield from full

    def follow_requires_grad(self) -> bool:
        """Have buckets for those parameters that require gradients now; return whether that changed anything.

        Raises:
            PhaseError: gradients are accumulated and not reduced yet.
            LayoutError: a parameter was unfrozen that is kept in a dtype too narrow to train.
        """
        if all(flat.rows_now() == flat.rows for unit in self._buckets for flat in unit.flats):
            return False
        _check_precision(flat for unit in self._buckets for flat in unit.flats)
        for unit, bucket in self._buckets.items():
            if bucket.accumulates:
                raise PhaseError(
                    f"requires_grad was changed while gradients of unit {unit.name!r} are accumulated and not yet "
                    "reduced: change it after a step, or call zero_grad() of the model before"
                )
        for bucket in self._buckets.values():
            bucket.follow_requires_grad()
        self._order.follow_requires_grad()
        self._reductions = Reductions(self._context, self._order, self._beside_root)
        return True

    def begin(self, *, steps: bool, reduces: bool, in_step: Callable[[], bool]) -> None:
        """Note the first gradient of a backward, which `reduces` or only accumulates; a step follows it if `steps`.

        `in_step` says whether all ranks have needed the same units since the last step.

        Raises:
            PhaseError: gradients that would be accumulated are not, because an earlier backward has stepped.
        """
        stepping = self._stepper.begin(steps=steps)
        now = Reductions(self._context, self._order, self._beside_root, stepping=stepping, reduces=reduces)
        now.began = self._averager.moment()
        if self._on_stream and not self._context.transport.blocking:  # else a wait of the stream is one of the host
            now.in_step = in_step
        self._reductions = now

    def enter(self, unit: Unit) -> None:
        """Record where the gradients of the unit before end, in case the rest of them never comes.

        It is reduced at the end of the backward then, but behind this moment: ranks that wait for its reduction must
        not wait for all that this backward does meanwhile.
        """
        last = self._last
        if last is not None and last.unit is not unit:
            self._last = None
            if not last.reduced:
                last.moment = self._averager.moment()

    def check_recomputation(self, unit: Unit) -> None:
        """Raise if a forward that is run again would see weights that were stepped since the first time.

        Raises:
            PhaseError: it would.
        """
        if self._reductions.stepping and self._buckets[unit].reduced:
            raise PhaseError(
                f"unit {unit.name!r} is recomputed after AdamW(in_backward=True) has stepped it in this backward, "
                "because its gradients were complete: use AdamW without it, or no checkpointing there"
            )

    def add(self, unit: Unit, param: nn.Parameter, grad: Tensor, *, is_watched: bool) -> Bucket:
        """Put the gradient of one parameter into its bucket, and return that. Hooks of the program see it if watched.

        Raises:
            PhaseError: the unit was already reduced in this backward.
        """
        self._latest = (param, grad) if is_watched else None
        bucket = self._buckets[unit]
        if bucket.reduced:
            raise PhaseError(
                f"unit {unit.name!r}: a gradient came after the unit had been reduced in this backward. "
                "A reentrant backward reached the unit outside the wrapped model's forward; use "
                "`checkpoint(..., use_reentrant=False)`"
            )
        if self._on_stream:
            self._begin_unit(bucket)
        waits = self._reductions.reduces and (unit.is_root or self._on_stream)
        if not bucket.full and bucket.needs_memory(param, waits=waits):
            self._reductions.land_what_is_done()
            self._reductions.fill(bucket)
        bucket.add(param, grad if self._counts else None, is_watched=is_watched)
        if not bucket.full and (early := bucket.early.get(id(param))) is not None:
            self._context.ledger.track(PURPOSE, early)
        return bucket

    def _begin_unit(self, bucket: Bucket) -> None:
        """Note a gradient of a bucket, which may be the first one after those of others."""
        self.enter(bucket.unit)
        if bucket is not self._last:
            self._reductions.free_what_is_copied()
        self._last, bucket.moment = bucket, None

    def set_participation(self, *, counts: bool, ranks: int) -> None:
        """Include this rank's gradients in means, or not, and divide sums by `ranks`."""
        self._counts = counts
        for bucket in self._buckets.values():
            if bucket.phase is Gradients.FILLING:  # what was accumulated was to be divided by another number
                bucket.multiply(ranks / self._divisor)
        self._divisor = ranks

    def complete(self, unit: Unit) -> None:
        """Note that a unit's gradients are all there, and start every reduction whose turn has come."""
        if self._order.observed is not None:
            self._order.observe(unit)
        now = self._reductions
        now.ready.add(unit)
        now.land_what_is_done()
        while (turn := now.next_unit()) is not None and turn in now.ready:
            self._reduce(turn)
        if self._on_stream and not (bucket := self._buckets[unit]).reduced:
            bucket.moment = self._averager.moment()
        now.tell_started()

    def keep_part(self, unit: Unit) -> None:
        """Note that a unit's gradients of a part are all there, and add them to those of earlier parts."""
        bucket = self._buckets[unit]
        self._prepare(bucket)
        bucket.keep_part()

    def end_part(self) -> None:
        """Add up what is left of a part, after its backward."""
        for unit in self._order.units:
            if not self._buckets[unit].reduced:
                self.keep_part(unit)
        self.start_over()

    def flush(self) -> None:
        """Reduce what is left, wait for all reductions, and hand the gradients to the shards.

        Raises:
            CommError: a peer failed, is late or does another operation.
        """
        while (turn := self._reductions.next_unit()) is not None:
            self._reduce(turn, late=True)
        self._reductions.tell_started()
        self._reductions.land(len(self._reductions.started))
        if self._reductions.stepping:
            self._stepper.end(self.results.take_none(self._reductions.started))
        else:
            self.results.take(self._reductions.started)
        self._order.agree()
        saves_memory = self.saves_memory()
        self.start_over()
        self._context.trim()
        if saves_memory:
            self._context.trim(keep=0)  # what other ranks still read, too, as soon as they have

    def start_over(self) -> None:
        """Be ready for the next backward."""
        self._latest = self._last = None
        for bucket in self._buckets.values():
            bucket.start_over()
        self._reductions = Reductions(self._context, self._order, self._beside_root)
        self._backwards += 1
        self._context.progress.begin(self._backwards)

    def abandon(self, *, reducing: bool) -> None:
        """Forget a backward that died: its gradients, and what was accumulated before it in the same buckets.

        If it was `reducing`, other ranks may have started more reductions than this one: all make all of them.
        """
        while reducing and (turn := self._reductions.next_unit()) is not None:
            self._reduce(turn, late=True, died=True)
        self._reductions.land(len(self._reductions.started))
        if reducing and self._reductions.stepping:  # units that all ranks had reduced before are stepped
            self._stepper.end(self.results.take_none(self._reductions.started))
        self.discard()
        self.start_over()

    def discard(self) -> None:
        """Forget what was accumulated and not yet reduced."""
        for bucket in self._buckets.values():
            if bucket.accumulates:
                bucket.clear()

    def waiting(self, unit: Unit, param: nn.Parameter) -> Tensor | None:
        """Return the gradient of one of the module's parameters that was accumulated and not yet reduced."""
        accumulated = self._buckets[unit].gradient(param)
        if accumulated is None and self._latest is not None and self._latest[0] is param:
            return self._latest[1]
        return accumulated

    def drop(self, unit: Unit, param: nn.Parameter) -> None:
        """Forget that gradient."""
        self._buckets[unit].drop(param)

    def saves_memory(self) -> bool:
        """Whether little memory is worth more than reductions beside the backward, or pages that are kept for later."""
        return self._reductions.saves_memory

    def _reduce(self, unit: Unit, *, late: bool = False, died: bool = False) -> None:
        """Send a unit's bucket round; `late` at the end of a backward."""
        bucket, now = self._buckets[unit], self._reductions
        behind = None
        if late and self._on_stream:
            behind = bucket.moment if bucket.arrivals else now.began
        if not self._on_stream:
            self._prepare(bucket)
        if self._own_parts is not None:
            self._add_earlier_parts(bucket, self._own_parts, died=died)
        bucket.begin_reduction()
        self._context.trace.emit("reduce", unit.name)
        reduction, copies = self._averager.start(bucket, self._divisor, stepping=now.stepping, died=died, behind=behind)
        now.add(reduction, copies)

    def _prepare(self, bucket: Bucket) -> None:
        """Fill a bucket as far as no gradient has."""
        if not bucket.full:
            self._reductions.fill(bucket)  # maybe with nothing: the other ranks count on our zeros
        bucket.zero_the_rest()

    def _add_earlier_parts(self, bucket: Bucket, expected: int, *, died: bool) -> None:
        parts = bucket.add_earlier_parts()
        if parts != expected and not died:
            raise PhaseError(
                f"unit {bucket.unit.name!r} has gradients of {parts} parts, and this rank has {expected}: inside a "
                "loop over parts() they were dropped, by zero_grad() of the model or after a backward that failed. Run "
                "the loop again, from its first part"
            )


def _check_precision(flats: Iterable[Flat]) -> None:
    for flat in flats:
        unfrozen = [row for row in flat.rows_now() if not flat.layout.trainable]
        if unfrozen and flat.local.dtype.itemsize < torch.float32.itemsize:
            raise LayoutError(
                f"parameter {flat.layout.slots[unfrozen[0]].name!r} was frozen when it was wrapped, and so is kept in "
                f"{flat.local.dtype} only, too narrow for the steps of an optimizer. Wrap it with requires_grad set, "
                "and freeze it afterwards"
            )
