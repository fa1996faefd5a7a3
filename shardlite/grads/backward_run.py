"""The state of one backward of a wrapped model, from its first event to its end.

Gradients are copied to buckets, and units are reduced in the order of `ReductionOrder`. A reduction starts when
its unit's gradients are complete and the reductions of all earlier units have started. A reduction has landed when it
is complete and its bucket is free.

A `HostRun` copies each gradient to its bucket when it arrives. If the maximum number of buckets is in use, the host
waits for the earliest reductions before it fills another bucket. `stream_run.py` has the run on a GPU.
"""

from collections import Counter
from collections.abc import Callable
from enum import Enum
from functools import partial
from time import monotonic
from typing import TypeAlias

import torch
from torch import Tensor, nn

from shardlite.comm import FINISHED, SPARE, Work
from shardlite.errors import PhaseError
from shardlite.grads.bucket import Bucket
from shardlite.grads.policy import BUCKETS, must_land_first, waits_for_unit
from shardlite.grads.reduce import Reduction, Stepping, Terms
from shardlite.grads.reducer import Reducer
from shardlite.params import Unit


class Mode(Enum):
    """The way in which a backward processes its gradients."""

    STEP = "step"  # reduce the gradients together with all accumulated gradients; a step follows
    SHARDED = "sharded"  # reduce the gradients and add the means to the gradient shards; another backward follows
    KEPT = "kept"  # reduce in the shard group, and keep the sums undivided; another backward follows
    LOCAL = "local"  # keep the unreduced gradients in the buckets of this rank
    PART = "part"  # keep the gradients of one part of a global batch, whose parts are added in a tree

    @property
    def reduces(self) -> bool:
        """Whether the backward reduces its gradients."""
        return self in (Mode.STEP, Mode.SHARDED, Mode.KEPT)


Begin: TypeAlias = Callable[["BackwardRun"], None]
IsComplete: TypeAlias = Callable[["BackwardRun", Unit, int], bool]


class BackwardRun:
    """One backward. See `HostRun` and `StreamRun`."""

    stepping: Stepping | None = None
    """Optimizer that updates the weights with the means of this backward. `None`: means are stored."""

    has_gradients = False
    held: Unit | None = None
    """Unit whose gradients are complete, but hooks of the program may still change the last of them in the bucket."""

    _on_stream = False
    """Whether buckets are filled on a stream, and not by the host."""

    def __init__(self, reducer: Reducer, mode: Mode, begin: Begin, is_complete: IsComplete) -> None:
        """Initialize without gradients.

        Args:
            reducer: buckets, and the order of reductions.
            mode: what is done with the gradients.
            begin: function that is called at the first gradient. It must call `on_first_gradient`.
            is_complete: function that returns whether all gradients that a unit gets in this backward have arrived. Its
                arguments are this object, the unit, and the number of gradients that each parameter may have.
        """
        self.mode = mode
        self.unsharded: list[Unit] = []
        """Units that stay unsharded until the end of the backward, because hooks of the program have used them."""

        self.recomputed: Counter[Unit] = Counter()
        """Number of forwards of each unit that this backward has recomputed."""

        self.anew: set[Unit] = set()
        """Units whose forward a hook of the program has run inside this backward, as GradCache does. A backward of each
        such forward may follow.
        """

        self.arrivals: Counter[Unit] = Counter()
        """Number of gradients that have arrived, by unit. In a reentrant backward a parameter may have several."""

        self.reduced: set[Unit] = set()
        """Units whose gradients this backward has started to reduce, or has added to the sums over earlier parts."""

        self.started: list[Reduction] = []
        """The reductions that have started, in the fixed order of units. Their number is the index of the next unit."""

        self.landed = 0
        """Number of reductions that are complete and whose buckets are free."""

        self._reducer = reducer
        self._context = reducer.context
        self._buckets = reducer.buckets
        self._queue = reducer.queue
        self._on_gpu = self._context.streams.on_gpu
        self._begin = begin
        self._is_complete = is_complete
        self._reduces = mode.reduces
        self._waits = [waits_for_unit(is_root, self._on_stream) for is_root in (False, True)]
        self._last: Unit | None = None  # the unit that received the latest gradient
        self._ready: set[Unit] = set()  # units whose gradients are complete, but whose reduction has not started

    @property
    def saves_memory(self) -> bool:
        """Whether to save memory rather than overlap computation with reductions and keep freed pages for later."""
        return self.stepping is not None and self._context.transport.blocking

    def on_first_gradient(self, stepping: Stepping | None, in_step: Callable[[], bool]) -> None:
        """Record the first gradient of the backward.

        Args:
            stepping: optimizer that updates weights with the means. `None`: means are stored.
            in_step: function that returns whether all ranks have used the same units since the previous step.
        """
        del in_step
        scale = self._reducer.scale
        scale.begin_backward(counts=self._reducer.counts)
        divisor = self._reducer.divisor if scale.by_ranks else 1
        keeps = self.mode is Mode.KEPT or (self.mode is Mode.SHARDED and scale.counted)
        self._terms = Terms(divisor, scale.share(), stepping, keeps)
        self.stepping = stepping
        self.has_gradients = True

    def enter(self, unit: Unit) -> None:
        """Record that the backward of a unit begins."""

    def add_gradient(self, unit: Unit, param: nn.Parameter, grad: Tensor, *, has_user_hooks: bool) -> None:
        """Store a gradient that autograd has computed, and start the reductions that are next in order.

        Args:
            unit: the parameter's unit.
            param: the module's parameter.
            grad: gradient of `param`.
            has_user_hooks: whether hooks of the program see the gradient, and may change it until the next one arrives.

        Raises:
            PhaseError: the unit was already reduced in this backward.
        """
        if not self.has_gradients:
            self._begin(self)
        if self.held is not None:
            self.complete_held()
        grad = grad.detach() if grad.requires_grad else grad  # after backward(create_graph=True), it has a graph
        if unit in self.reduced:
            raise PhaseError(
                f"unit {unit.name!r}: a gradient arrived after the unit had been reduced in this backward. "
                "A reentrant backward reached the unit outside of the wrapped model's forward: use "
                "`checkpoint(..., use_reentrant=False)`"
            )
        if unit is not self._last:
            self._turn_to(unit)
        bucket = self._buckets[unit]
        # The root's gradients, and all on a GPU, stay in autograd's tensors until the unit's last gradient arrives. If
        # a parameter has several gradients, or gradients are kept unreduced, they are summed in the bucket.
        stays = self._reduces and self._waits[unit.is_root] and id(param) not in bucket.early
        if not bucket.full and not stays:
            self._land_finished()
            self._fill(bucket)
        counted = grad if self._reducer.counts else torch.zeros_like(grad) if has_user_hooks else None
        bucket.add_gradient(param, counted, has_user_hooks=has_user_hooks)
        self.arrivals[unit] += 1
        rounds, rest = divmod(self.arrivals[unit], bucket.expected)
        if not rest and self.mode is not Mode.LOCAL and self._is_complete(self, unit, rounds):
            if has_user_hooks:
                self.held = unit
            else:
                (self.keep_part if self.mode is Mode.PART else self.complete)(unit)

    def complete_held(self) -> None:
        """Reduce the unit that was held until hooks of the program had run."""
        unit, self.held = self.held, None
        if unit is not None:
            (self.keep_part if self.mode is Mode.PART else self.complete)(unit)

    def check_recomputation(self, unit: Unit) -> None:
        """Check that this backward has not stepped `unit`. Called before the forward of `unit` is recomputed.

        Raises:
            PhaseError: the unit was stepped, so its weights differ from those of the first forward.
        """
        if self.stepping is not None and unit in self.reduced:
            raise PhaseError(
                f"unit {unit.name!r} is recomputed in a backward in which AdamW(in_backward=True) has stepped it, "
                "because its gradients were complete: use AdamW without in_backward, or do not checkpoint this unit"
            )

    def complete(self, unit: Unit) -> None:
        """Record that a unit's gradients are complete, and start all reductions that may now start."""
        order = self._reducer.order
        if order.observed is not None:
            order.observe(unit)
        self._ready.add(unit)
        self._land_finished()
        while self._ready and (turn := order.units[len(self.started)]) in self._ready:
            self._start(turn)
        if unit not in self.reduced:
            self._await_turn(unit)
        self._publish()

    def _await_turn(self, unit: Unit) -> None:
        """Record that a unit's gradients are complete, but units with an earlier reduction lack gradients."""

    def keep_part(self, unit: Unit) -> None:
        """Add a unit's gradients of the current part to the sums over earlier parts."""
        bucket = self._buckets[unit]
        self.fill_gaps(bucket)
        bucket.keep_part()
        self.reduced.add(unit)

    def end_part(self) -> None:
        """Add the gradients of the remaining units of a part."""
        for unit in self._reducer.order.units:
            if unit not in self.reduced:
                self.keep_part(unit)

    def fill_gaps(self, bucket: Bucket) -> None:
        """Fill missing gradients with zeros, because peers expect this rank's summand."""
        if not bucket.full:
            self._fill(bucket)
        bucket.zero_the_rest()

    def finalize(self) -> None:
        """Start the remaining reductions, wait for all reductions, and store the gradients or end the steps.

        Raises:
            CommError: a peer failed, timed out or called a different operation.
        """
        self.complete_held()
        while (turn := self._next_unit()) is not None:
            self._start(turn, late=True)
        self._publish()
        self._land(len(self.started))
        if self._terms.keeps:
            self._reducer.results.keep(self.started)
        elif self.stepping is None:
            self._reducer.results.store(self.started)
        else:
            self.stepping.end(self._reducer.results.after_steps(self.started))
        self._reducer.order.agree()
        if self.mode is Mode.STEP:
            self._reducer.scale.reset()
        self.started.clear()  # frees results that are not the `.grad` of a shard
        self._context.trim()
        if self.saves_memory:
            self._context.trim(keep=0)  # memory that peers are still reading is freed when they have read it

    def abandon(self) -> None:
        """Clean up after a backward that raised, and drop its gradients and all accumulated gradients.

        Other ranks may have started reductions that this rank has not started. So this rank starts all remaining
        reductions.
        """
        reducing = self.has_gradients and self.mode.reduces
        while reducing and (turn := self._next_unit()) is not None:
            self._start(turn, late=True, died=True)
        self._land(len(self.started))
        if reducing and self.stepping is not None:  # units that all ranks reduced before the exception are stepped
            self.stepping.end(self._reducer.results.after_steps(self.started, check=False))
        self._reducer.discard()

    def abandon_capture(self) -> None:
        """Forget the reductions of a capture that has failed, which run on no rank."""
        self.has_gradients, self.held = False, None
        for reduction in self.started[self.landed :]:
            reduction.work = FINISHED

    def _next_unit(self) -> Unit | None:
        """Return the unit whose reduction starts next, or `None` if all have started."""
        place, units = len(self.started), self._reducer.order.units
        return units[place] if place < len(units) else None

    def _publish(self) -> None:
        """Publish the number of started reductions if a peer may wait for it."""
        started = len(self.started)
        left = len(self._reducer.order.units) - started
        self._context.progress.started(started, left=left, out_of_turn=bool(self._ready))

    def _turn_to(self, unit: Unit) -> None:
        """Prepare for gradients of a unit other than that of the latest gradient."""
        self._last = unit

    def _start(self, unit: Unit, *, late: bool = False, died: bool = False) -> None:
        """Start the reduction of a unit. `late`: the backward is ending. `died`: the backward has raised."""
        raise NotImplementedError

    def _wait(self, work: Work, reduction: int) -> bool:
        """Wait for `work`, which follows a reduction, unless a peer needs this rank. Return whether it has ended."""
        return work.wait_unless(partial(self._context.progress.ends_wait, reduction, monotonic()))

    def _record(self, reduction: Reduction) -> None:
        """Record that the reduction of the next unit has started."""
        unit = reduction.bucket.unit
        self.started.append(reduction)
        self.reduced.add(unit)
        self._ready.discard(unit)
        if self.saves_memory and (len(self.started) == 1 or self._is_root_left()):
            # The backward needs less memory than the forward. Once only the root is left, memory no longer grows.
            self._context.trim(keep=0)

    def _fill(self, bucket: Bucket) -> None:
        """Allocate the bucket's memory, after waiting until fewer than `BUCKETS` other buckets are in use."""
        progress, root = self._context.progress, bucket.unit.is_root
        while self.landed < len(self.started):
            if not must_land_first(self._reducer.spares.in_use, root, self._is_root_left(), self.saves_memory):
                break
            first = self.started[self.landed]
            with self._context.traffic.waiting("reduce", first.bucket.unit.name):
                if not self._wait(first.work, self.landed):
                    break
            self._land(self.landed + 1)
        progress.filled(beyond=not root and self._reducer.spares.in_use >= BUCKETS and self.mode.reduces)
        bucket.fill()

    def _land(self, count: int) -> None:
        """Wait until the first `count` reductions are complete, and free their buckets."""
        for reduction in self.started[self.landed : count]:
            with self._context.traffic.waiting("reduce", reduction.bucket.unit.name):
                reduction.work.wait()
            reduction.bucket.clear()
            reduction.earlier = ()
            self.landed += 1
            if self.saves_memory or self._is_root_left():
                self._reducer.spares.clear()
            if self._is_root_left():
                self._context.trim(keep=0 if self.saves_memory else SPARE)  # memory may peak now

    def _land_finished(self) -> None:
        """Free the buckets whose reductions are complete. Do nothing on a GPU, because a CUDA graph may be captured."""
        while not self._on_gpu and self.landed < len(self.started) and self.started[self.landed].work.done():
            self._land(self.landed + 1)

    def _is_root_left(self) -> bool:
        """Return whether all units but the root have started their reductions."""
        return len(self.started) >= self._reducer.order.before_root


class HostRun(BackwardRun):
    """A backward whose gradients are copied to buckets as they arrive."""

    def _start(self, unit: Unit, *, late: bool = False, died: bool = False) -> None:
        del late
        bucket, queue = self._buckets[unit], self._queue
        self.fill_gaps(bucket)
        if self._reducer.adds_parts:
            self._reducer.add_earlier_parts(bucket, check=not died)
        bucket.begin_reduction()
        self._context.trace.emit(("reduce", unit.name))  # before other threads may add what follows
        first_bad = bucket.first_bad() if self._reducer.diagnose else None
        reduction = queue.prepare(bucket, self._terms, first_bad, died=died)
        reduction.work = queue.operations.submit(partial(queue.reduce_unit, unit.name, reduction.inputs))
        self._record(reduction)
