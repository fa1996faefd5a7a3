"""One backward from its first event to its end: gradients come in, units are reduced, holds are ended.

Autograd tells nobody that a backward starts. So whatever happens first in one (a handle is asked for its weight, a
unit is recomputed, a gradient comes) opens it and asks the engine to call back at the end. Backwards nest: reentrant
checkpointing runs one inside a node of another. The outer one sees the first event, since the recomputed forward runs
in it, and so the end of the outermost one is what closes.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from shardlite.gather import Gatherer
from shardlite.handles import Promises
from shardlite.reduce import Reducer
from shardlite.unit import Unit


def in_backward() -> bool:
    """Whether this code runs inside a backward."""
    return bool(torch._C._current_graph_task_id() != -1)


class Backward:
    """Follows the backwards of one wrapped model, one outermost backward at a time."""

    def __init__(self, reducer: Reducer, gatherer: Gatherer | None, promises: Promises | None) -> None:
        self._reducer = reducer
        self._gatherer = gatherer
        self._promises = promises
        self._task: int | None = None
        self._sync = True
        self._got_gradients = False
        self._recorded: set[Unit] = set()
        self._hidden: dict[Unit, int] = {}

    def event(self) -> None:
        """Open the backward if this is its first event. To be called at every event, inside a backward."""
        if self._task is None:
            self._task = torch._C._current_graph_task_id()
            torch.autograd.Variable._execution_engine.queue_callback(self._close)
            if self._gatherer is not None:
                self._gatherer.begin_backward(final=self._sync)

    def gradient(self, unit: Unit, flat: int, slot: int, param: Tensor) -> None:
        """Take the gradient that autograd has just put into `param.grad`."""
        grad, param.grad = param.grad, None
        assert grad is not None
        self.event()
        self._got_gradients = True
        bucket = self._reducer.add(unit, flat, slot, grad)
        if self._sync and bucket.complete(self._rounds(unit)):
            self._reducer.complete(unit)

    def forward(self, unit: Unit, *, recorded: bool) -> None:
        """Note a forward of a unit, from which gradients are to be expected.

        One that autograd has not recorded is run again in the backward by reentrant checkpointing, and that brings
        gradients of its own.
        """
        if recorded:
            self._recorded.add(unit)
        else:
            self._hidden[unit] = self._hidden.get(unit, 0) + 1

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

    def _rounds(self, unit: Unit) -> int:
        """Return how often each parameter's gradient comes: once for all recorded forwards, once for each hidden one.

        Where that is too many (a forward whose loss was never used), the unit is reduced at the end of the backward.
        """
        return max(1, (unit in self._recorded) + self._hidden.get(unit, 0))

    def _close(self) -> None:
        """End the outermost backward. Without any gradient (`torch.autograd.grad`) there is nothing to reduce."""
        try:
            if self._got_gradients and self._sync:
                self._reducer.flush()
            else:
                self._reducer.start_over()
        finally:
            self._end()

    def _end(self) -> None:
        self._task, self._got_gradients = None, False
        self._recorded.clear()
        self._hidden.clear()
        if self._promises is not None:
            self._promises.end_backward()
        if self._gatherer is not None:
            self._gatherer.order.end()
