"""One backward from its first event to its end: gradients come in, units are reduced, holds are ended.

Autograd tells nobody that a backward starts. So whatever happens first in one (a handle is asked for its weight, a
unit is recomputed, a gradient comes) opens it and asks the engine to call back at the end. Backwards nest: reentrant
checkpointing runs one inside a node of another. The outer one sees the first event, since the recomputed forward runs
in it, and so the end of the outermost one is what closes.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from shardlite.bucket import Bucket
from shardlite.handles import Calls
from shardlite.reduce import Reducer
from shardlite.unit import Unit


def in_backward() -> bool:
    """Whether this code runs inside a backward."""
    return bool(torch._C._current_graph_task_id() != -1)


class Backward:
    """Follows the backwards of one wrapped model, one outermost backward at a time."""

    def __init__(self, reducer: Reducer, calls: Calls | None) -> None:
        self._reducer = reducer
        self._calls = calls
        self._task: int | None = None
        self._sync = True
        self._got_gradients = False
        self._recorded: set[Unit] = set()
        self._hidden: set[Unit] = set()
        self._outstanding: Counter[Unit] = Counter()
        self._recomputed: Counter[Unit] = Counter()
        if calls is not None:
            calls.on_use = self.open

    def open(self) -> None:
        """Begin, if this is the first event of a backward. To be called at every event, inside a backward."""
        if self._task is None:
            self._task = torch._C._current_graph_task_id()
            torch.autograd.Variable._execution_engine.queue_callback(self._close)
            if self._calls is not None:
                self._calls.gatherer.begin_backward(final=self._sync)

    def take_gradient(self, unit: Unit, flat: int, slot: int, param: Tensor) -> None:
        """Take the gradient that autograd has just put into `param.grad`."""
        grad, param.grad = param.grad, None
        assert grad is not None
        self.open()
        self._got_gradients = True
        bucket = self._reducer.add(unit, flat, slot, grad.detach())  # with `create_graph` it has a history
        if self._sync and self._is_complete(bucket):
            self._reducer.complete(unit)

    def expect_gradients(self, unit: Unit, *, recorded: bool) -> None:
        """Note a forward of a unit. One that autograd has not recorded is run again by reentrant checkpointing."""
        if recorded:
            self._recorded.add(unit)
        else:
            self._hidden.add(unit)
            self._outstanding[unit] += 1

    def recomputed(self, unit: Unit) -> None:
        """Note that a forward of a unit is run again, in the backward."""
        if self._outstanding[unit]:
            self._outstanding[unit] -= 1
            self._recomputed[unit] += 1

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients only accumulate."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def died(self) -> bool:
        """Whether the last backward ended in an exception: the engine never called back."""
        return self._task is not None and not in_backward()

    def repair(self) -> None:
        """Clean up after a backward that died."""
        if self.died():
            self._reducer.abandon()
            self._end()

    def _is_complete(self, bucket: Bucket) -> bool:
        """Whether no more gradients of a unit are to be expected in this backward.

        Autograd adds up the gradients of all recorded forwards and delivers each parameter's once. A hidden forward
        brings its own after its recomputation. Where that cannot be told apart (a unit that was called in both ways, or
        a forward whose loss was never used), the unit is reduced at the end of the backward.
        """
        if bucket.unit not in self._hidden:
            return bucket.complete(rounds=1)
        if bucket.unit in self._recorded or self._outstanding[bucket.unit]:
            return False
        return bucket.complete(rounds=self._recomputed[bucket.unit])

    def _close(self) -> None:
        """End the outermost backward. Without any gradient (`torch.autograd.grad`) there is nothing to reduce.

        If the reductions fail, this backward has died like any other.
        """
        if self._got_gradients and self._sync:
            self._reducer.flush()
        else:
            self._reducer.start_over()
        self._end()

    def _end(self) -> None:
        final = self._got_gradients and self._sync
        self._task, self._got_gradients = None, False
        self._recomputed.clear()
        if self._calls is not None:
            self._calls.end_backward()
            self._calls.gatherer.end_backward(final=final)
