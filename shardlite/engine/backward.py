"""One backward from its first event to its end: gradients come in, units are reduced and resharded.

Autograd has no hook for the start of a backward. So the first event in one (a handle is asked for its weight, a unit is
recomputed, a gradient comes) opens it and asks the engine to call back at the end. Backwards nest: reentrant
checkpointing runs one inside a node of another. The outer one sees the first event, since the recomputed forward runs
in it, and so the end of the outermost one is what closes.
"""

import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import partial

import torch
from torch import Tensor, nn

from shardlite.comm import ProgramStreams
from shardlite.engine.part_loop import PartLoop
from shardlite.errors import PhaseError
from shardlite.grads import Bucket, Reducer
from shardlite.params import Unit, take_grad
from shardlite.weights import Calls, Gatherer, Gathering


def in_backward() -> bool:
    """Whether this code runs inside a backward."""
    return bool(torch._C._current_graph_task_id() != -1)


class Mode(Enum):
    """What a backward does with the gradients that it brings."""

    STEP = "step"  # they are reduced, with all that were accumulated before, and a step follows
    SHARDED = "sharded"  # they are reduced and added to the gradient shards; another backward follows
    LOCAL = "local"  # they stay on this rank, whole, in the buckets
    PART = "part"  # the same, each part of a global batch by itself: later parts are added in a tree

    @property
    def reduces(self) -> bool:
        """Whether the backward reduces them."""
        return self is Mode.STEP or self is Mode.SHARDED


class Backward:
    """Follows the backwards of one wrapped model, one outermost backward at a time."""

    def __init__(
        self,
        reducer: Reducer,
        gatherer: Gathering,
        units: Sequence[Unit],
        streams: ProgramStreams,
        parts: PartLoop | None = None,
    ) -> None:
        """With `parts`, gradients may come inside its loops only."""
        self._parts = parts
        self._reducer = reducer
        self._gatherer = gatherer
        self._units = units
        self._streams = streams
        self.calls = Calls(gatherer, units, on_use=self.enter) if isinstance(gatherer, Gatherer) else None
        """Where handles of weights are saved for a backward; `None` where weights are always there."""

        self._task: int | None = None
        self._mode = Mode.STEP
        self._reducing = False
        self._saves_memory = False  # in the last backward before a step
        self._caught: set[nn.Parameter] = set()
        self._got_gradients = False
        self._recorded: set[Unit] = set()
        self._hidden: set[Unit] = set()
        self._outstanding: Counter[Unit] = Counter()
        self._recomputed: Counter[Unit] = Counter()
        self._used: list[Unit] = []

    def open(self) -> None:
        """Begin, if this is the first event of a backward. To be called at every event, inside a backward."""
        if self._task is None:
            self._task = torch._C._current_graph_task_id()
            self._reducing = self._mode.reduces
            torch.autograd.Variable._execution_engine.queue_callback(self._close)
            self._gatherer.begin_backward(final=self._mode is Mode.STEP)
            if self._saves_memory and self._mode is Mode.STEP:
                self._gatherer.stop_prefetching()

    def enter(self, unit: Unit) -> None:
        """Note that a backward goes on to a unit, before that is unsharded."""
        self.open()
        self._reducer.enter(unit)

    def use(self, unit: Unit) -> None:
        """Unshard a unit for a hook that reads its weights, until the backward ends or handles release it."""
        self.enter(unit)
        if unit.users:  # that were handles, for otherwise its parameters would be readable
            assert self.calls is not None
            self.calls.gatherer.bind(unit)
            return
        self._gatherer.unshard(unit)
        self._used.append(unit)

    def begin_pass(self, *, evaluating: bool) -> None:
        """Get ready for a forward: the parameters' `requires_grad` may have changed since the last one.

        One without gradients may still be the first half of reentrant checkpointing. But if it is an evaluation, it may
        well come while gradients are accumulated, and freezing everything for its time must do no harm.
        """
        self.repair()
        if (stream := self._streams.move_home()) is not None:
            for memory in self._kept():
                memory.record_stream(stream)
        if not (evaluating and self._reducer.accumulates):
            self.follow_requires_grad()

    def _kept(self) -> Iterator[Tensor]:
        """Yield the memory that passes leave to later ones: cached weights, accumulated gradients, spare buffers."""
        for unit in self._units:
            if unit.buffer is not None:
                yield unit.buffer.bytes
        yield from self._gatherer.spare()
        yield from self._reducer.kept()

    def follow_requires_grad(self) -> None:
        """Expect gradients of those parameters that require them now."""
        if self._reducer.follow_requires_grad():
            self.catch_gradients()

    def catch_gradients(self) -> None:
        """Have the gradients of all parameters that require them sent here.

        The hooks hold everything weakly: the garbage collector does not traverse the hooks of a tensor.
        """
        me = weakref.ref(self)
        for unit in self._reducer.units:
            for param in unit.params():
                if param.requires_grad and param not in self._caught:
                    take_grad(param)
                    hook = partial(_deliver, me, weakref.ref(unit))
                    param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                    self._caught.add(param)

    def take_gradient(self, unit: Unit, param: nn.Parameter) -> None:
        """Take the gradient that autograd has just put into `param.grad`, on any stream."""
        grad, is_watched = take_grad(param)
        assert grad is not None
        if not self._streams.on_gpu or (other := self._streams.other()) is None:
            self._add_gradient(unit, param, grad, is_watched=is_watched)
            return
        self._streams.take(grad)
        with self._streams.across(other):
            self._add_gradient(unit, param, grad, is_watched=is_watched)

    def _add_gradient(self, unit: Unit, param: nn.Parameter, grad: Tensor, *, is_watched: bool) -> None:
        if self._task is None:
            self.open()
        if not self._got_gradients:
            if self._parts is not None:
                self._parts.begin_backward()
            steps, reduces = self._mode is Mode.STEP, self._mode.reduces
            self._reducer.begin(steps=steps, reduces=reduces, in_step=self._gatherer.in_step)
            if self._mode is Mode.STEP:
                self._saves_memory = self._reducer.saves_memory()
            self._got_gradients = True
        grad = grad.detach() if grad.requires_grad else grad  # it has a history
        bucket = self._reducer.add(unit, param, grad, is_watched=is_watched)
        # Most gradients are not the last one of a round, which is seen without a call.
        if bucket.arrivals % bucket.expected == 0 and self._mode is not Mode.LOCAL and self._is_complete(bucket):
            (self._reducer.keep_part if self._mode is Mode.PART else self._reducer.complete)(unit)

    def expect_gradients(self, unit: Unit, *, recorded: bool) -> None:
        """Note a forward of a unit. One that autograd has not recorded is run again by reentrant checkpointing."""
        if recorded:
            self._recorded.add(unit)
        else:
            self._hidden.add(unit)
            self._outstanding[unit] += 1

    def recomputed(self, unit: Unit) -> None:
        """Note that a forward of a unit is run again, in the backward.

        Raises:
            PhaseError: its weights are others now.
        """
        self._reducer.check_recomputation(unit)
        if self._outstanding[unit]:
            self._outstanding[unit] -= 1
            self._recomputed[unit] += 1

    def forget_forwards(self) -> None:
        """Expect no gradients of earlier forwards: a step has replaced their weights."""
        self._recorded.clear()
        self._hidden.clear()
        self._outstanding.clear()

    @contextmanager
    def accumulating(self, mode: Mode) -> Iterator[None]:
        """Let backwards inside treat gradients as `mode` says."""
        before, self._mode = self._mode, mode
        try:
            yield
        finally:
            self._mode = before

    def accumulates(self) -> bool:
        """Whether backwards leave something to reduce to a later one, or to add up."""
        return self._mode is not Mode.STEP

    def died(self) -> bool:
        """Whether the last backward ended in an exception: the engine never called back."""
        return self._task is not None and not in_backward()

    def check_step(self, *, graded: bool, inside: bool) -> None:
        """Raise if gradients are not what a step needs. Forwards before it are over.

        Args:
            graded: whether any shard has a gradient.
            inside: whether steps are taken inside the backward, and only closed now.

        Raises:
            PhaseError: the last backward has died, or gradients are accumulated only.
        """
        if self.died() and inside and not self._got_gradients:
            self.repair()  # it was refused, because the step of the one before it was to be closed first
        if self.died() and inside:
            raise PhaseError(
                "the last backward ended in an exception, and AdamW(in_backward=True) has stepped some weights in it, "
                "but not all: go on from a checkpoint or, with the weights as they are, after zero_grad() and step()"
            )
        if self.died():
            raise PhaseError(
                "the last backward ended in an exception, so its gradients are incomplete: call zero_grad() and run "
                "forward and backward again before the step"
            )
        if self._reducer.accumulates and not graded:
            raise PhaseError(
                "the gradients were only accumulated and not reduced, so there is nothing to step by: run the last "
                "backward before a step outside of no_sync(), and a loop over parts() to its end, or call zero_grad() "
                "of the model to drop them"
            )
        self.forget_forwards()

    def repair(self) -> None:
        """Clean up after a backward that died."""
        if self.died():
            self._gatherer.end_pass()
            self._reducer.abandon(reducing=self._got_gradients and self._reducing)
            self._end()

    def _is_complete(self, bucket: Bucket) -> bool:
        """Whether all gradients that a unit gets in this backward have come.

        Autograd adds up the gradients of all recorded forwards and delivers each parameter's once. A hidden forward
        brings its own after its recomputation. Where these cannot be distinguished (a unit that was called in both
        ways, or a forward whose loss was never used), the unit is reduced at the end of the backward.
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
        with self._streams.at_home():
            self._gatherer.end_pass()  # others may need weights yet before they can reduce
            if not self._got_gradients or self._mode is Mode.LOCAL:
                self._reducer.start_over()
            elif self._mode is Mode.PART:
                self._reducer.end_part()
            else:
                self._reducer.flush()
                self._gatherer.confirm_ends()  # gradient flags came from every rank behind the end of its pass
            if self._got_gradients and self._parts is not None:
                self._parts.end_backward()
            self._end()

    def _end(self) -> None:
        final = self._got_gradients and self._mode is Mode.STEP
        self._task, self._got_gradients = None, False
        self._recomputed.clear()
        while self._used:
            self._gatherer.reshard(self._used.pop())
        if self.calls is not None:
            self.calls.end_backward()
        self._gatherer.after_backward(final=final)


def _deliver(backward: "weakref.ref[Backward]", unit: "weakref.ref[Unit]", param: nn.Parameter) -> None:
    there, home = backward(), unit()
    if there is not None and home is not None:
        there.take_gradient(home, param)
