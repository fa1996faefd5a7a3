"""The state of one backward on a GPU.

A unit's gradients are copied together on the stream of reductions, which owns the bucket's memory and reuses it in
stream order. Before the gradients of the next unit arrive, the program's stream waits for the copies, and so for the
previous reduction, on all ranks. `docs/how-it-works.md` explains why the waits of streams do not deadlock. If ranks
used different units in a forward, the host waits instead of the stream.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import NamedTuple

from torch import Tensor

from shardlite.comm import Moment, Work
from shardlite.comm.streams import submit_in_turn
from shardlite.grads.backward_run import BackwardRun, Begin, IsComplete, Mode
from shardlite.grads.reduce import Reduction, Stepping
from shardlite.grads.reducer import Reducer
from shardlite.params import Unit


class _Copies(NamedTuple):
    """Gradients that are being copied to a bucket, and must stay alive until the copies have ended."""

    gradients: Sequence[Tensor]
    work: Work
    reduction: int
    """Index of the previous reduction, after which the copies are queued."""


class StreamRun(BackwardRun):
    """A backward whose gradients are copied to buckets on the stream of reductions."""

    _on_stream = True

    def __init__(self, reducer: Reducer, mode: Mode, begin: Begin, is_complete: IsComplete) -> None:
        super().__init__(reducer, mode, begin, is_complete)
        self.copying: deque[_Copies] = deque()
        self._in_step: Callable[[], bool] = lambda: False
        self._began: Moment | None = None
        # Moment after the latest gradient of each unit. A unit without a moment is reduced after all work so far.
        self._moments: dict[Unit, Moment | None] = {}

    def on_first_gradient(self, stepping: Stepping | None, in_step: Callable[[], bool]) -> None:
        """Record the first gradient of the backward."""
        super().on_first_gradient(stepping, in_step)
        self._began = self._queue.operations.moment()
        if not self._context.transport.blocking:  # with a blocking transport, a wait of the stream would block the host
            self._in_step = in_step

    def abandon_capture(self) -> None:
        """Forget the reductions and copies of a capture that has failed."""
        super().abandon_capture()
        self.copying.clear()

    def enter(self, unit: Unit) -> None:
        """Record the moment after the latest gradient of the previous unit.

        If the other gradients of the previous unit never arrive, the previous unit is reduced at the end of the
        backward, but stream-ordered after this moment only. Without the moment, ranks that wait for the reduction would
        wait for the rest of the backward.
        """
        last = self._last
        if last is not None and last is not unit:
            self._last = None
            if last not in self.reduced:
                self._moments[last] = self._queue.operations.moment()

    def _await_turn(self, unit: Unit) -> None:
        self._moments[unit], self._last = self._queue.operations.moment(), None

    def _turn_to(self, unit: Unit) -> None:
        self.enter(unit)
        self.free_copied()
        self._last = unit
        self._moments.pop(unit, None)

    def free_copied(self) -> None:
        """Free gradients that were copied to buckets, stream-ordered after the copies."""
        while self.copying and self._wait(self.copying[0].work, self.copying[0].reduction):
            self.copying.popleft()
        self._context.progress.filled(beyond=bool(self.copying))

    def _wait(self, work: Work, reduction: int) -> bool:
        if not self._in_step():
            return super()._wait(work, reduction)
        work.wait()
        return True

    def _start(self, unit: Unit, *, late: bool = False, died: bool = False) -> None:
        bucket, queue = self._buckets[unit], self._queue
        behind = None
        if late:
            behind = self._moments.get(unit) if self.arrivals[unit] else self._began
        bucket.begin_reduction()
        self._context.trace.emit(("reduce", unit.name))  # before other threads may add what follows
        first_bad = bucket.first_bad() if self._reducer.diagnose else None
        # If only the queue uses the memory, the memory belongs to the queue's stream. Then the bucket can be released
        # when the reduction is queued, and the next bucket can use the same memory.
        is_queues = not bucket.full and not queue.keeps_bucket(bucket, self.stepping)
        if not bucket.full:
            with queue.operations.stream(behind) if is_queues or behind is not None else nullcontext():
                bucket.allocate(self._context.reducing[0] if is_queues else None)
        copy_in, gradients = bucket.copy_in()
        if behind is None:
            reduction = queue.prepare(bucket, self._terms, first_bad, died=died)
        else:
            with queue.operations.stream(behind):
                reduction = queue.prepare(bucket, self._terms, first_bad, died=died)
        reduce = partial(queue.reduce_unit, unit.name, reduction.inputs)
        copied, reduction.work = submit_in_turn(queue.operations, copy_in, reduce, behind=behind)
        self.copying.append(_Copies(gradients, copied, len(self.started) - 1))
        if behind is not None:
            self._hand_over(reduction)
        if is_queues:
            bucket.release()
        self._record(reduction)

    def _hand_over(self, reduction: Reduction) -> None:
        """Let the program's stream use the results, whose memory belongs to the queue's stream."""
        for tensor in chain(*(mean[1:] for mean in reduction.means), (step.bad for step in reduction.steps)):
            self._context.streams.record_stream(tensor)
