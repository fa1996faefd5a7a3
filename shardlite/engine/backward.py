"""Follow each backward from its first event to its end: gradients arrive, units are reduced and resharded.

Autograd has no hook for the start of a backward. So its first event (a handle is asked for its weight, a unit is
recomputed, a gradient arrives) opens a `BackwardRun` and asks autograd to call back at the end. Backwards nest:
reentrant checkpointing runs one inside a node of another. The outermost one sees the first event, because the
recomputed forward runs in it, and its end closes the run.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from shardlite.comm import ProgramStreams
from shardlite.engine.part_loop import PartLoop
from shardlite.errors import PhaseError
from shardlite.grads import BackwardRun, Mode, Reducer, Stepping, open_run
from shardlite.params import Unit, take_grad
from shardlite.weights import Calls, Gatherer, Gathering


def in_backward() -> bool:
    """Return whether this code runs inside a backward."""
    return bool(torch._C._current_graph_task_id() != -1)


class Backward:
    """Follows the backwards of one wrapped model, one outermost backward at a time."""

    def __init__(
        self,
        reducer: Reducer,
        gatherer: Gathering,
        units: Sequence[Unit],
        streams: ProgramStreams,
        begin_steps: Callable[..., Stepping | None],
        parts: PartLoop | None = None,
    ) -> None:
        """Follow no backward yet.

        Args:
            reducer: reduces gradients.
            gatherer: unshards weights.
            units: all units of the model.
            streams: the streams on which the program computes.
            begin_steps: called at the first gradient of a backward, with `steps`: whether a step may follow. Returns
                what steps inside the backward, if anything does.
            parts: if given, gradients may arrive inside its loops only.
        """
        self._parts = parts
        self._reducer = reducer
        self._gatherer = gatherer
        self._units = units
        self._streams = streams
        self._begin_steps = begin_steps
        self.calls = Calls(gatherer, units, on_use=self.enter) if isinstance(gatherer, Gatherer) else None
        """Where handles of weights are saved for a backward; `None` if weights are always in memory."""

        self._run: BackwardRun | None = None
        self._mode = Mode.STEP
        self._saves_memory = False  # in the last backward before a step
        self._caught: set[nn.Parameter] = set()
        self._recorded: set[Unit] = set()
        self._hidden: set[Unit] = set()
        self._outstanding: Counter[Unit] = Counter()

    def open(self) -> BackwardRun:
        """Return the running backward. Call this at each of its events: the first one opens it."""
        if self._run is None:
            self._run = open_run(self._reducer, self._mode)
            torch.autograd.Variable._execution_engine.queue_callback(self._close)
            self._gatherer.begin_backward(final=self._mode is Mode.STEP)
            if self._saves_memory and self._mode is Mode.STEP:
                self._gatherer.stop_prefetching()
        return self._run

    def enter(self, unit: Unit) -> None:
        """Record that a backward continues with a unit, before that is unsharded."""
        self.open().enter(unit)

    def use(self, unit: Unit) -> None:
        """Unshard a unit for a hook that reads its weights, until the backward ends or handles release it."""
        self.enter(unit)
        if unit.users:  # these are handles; other users would have made its parameters readable
            assert self.calls is not None
            self.calls.gatherer.bind(unit)
            return
        self._gatherer.unshard(unit)
        self.open().unsharded.append(unit)

    def begin_pass(self, *, evaluating: bool) -> None:
        """Prepare for a forward: `requires_grad` of parameters may have changed since the last one.

        A forward without gradients may be the first half of reentrant checkpointing. An evaluation may also run while
        gradients are accumulated. Then freezing everything during it must have no effect.
        """
        self.repair()
        if (stream := self._streams.move_home()) is not None:
            for memory in self._kept():
                memory.record_stream(stream)
        if not (evaluating and self._reducer.accumulates):
            self.follow_requires_grad()

    def _kept(self) -> Iterator[Tensor]:
        """Yield the memory that later passes use: cached weights, accumulated gradients, spare buffers."""
        for unit in self._units:
            if unit.buffer is not None:
                yield unit.buffer.bytes
        yield from self._gatherer.spare()
        yield from self._reducer.kept()

    def follow_requires_grad(self) -> None:
        """Expect gradients of the parameters that require them now."""
        if self._reducer.follow_requires_grad():
            self.catch_gradients()

    def catch_gradients(self) -> None:
        """Register a hook on each parameter that requires a gradient, to receive it.

        Hooks hold weak references only: the garbage collector does not traverse the hooks of a tensor.
        """
        me = weakref.ref(self)
        for unit in self._reducer.units:
            for param in unit.params():
                if param.requires_grad and param not in self._caught:
                    take_grad(param)
                    hook = partial(_deliver, me, weakref.ref(unit))
                    param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                    self._caught.add(param)

    def add_gradient(self, unit: Unit, param: nn.Parameter, grad: Tensor, *, has_user_hooks: bool) -> None:
        """Store a gradient that autograd has computed, and start reductions whose turn has come.

        `has_user_hooks`: hooks of the program see the gradient.
        """
        run = self.open()
        if not run.has_gradients:
            self._begin_gradients(run)
        grad = grad.detach() if grad.requires_grad else grad  # it has a history
        may_be_last = run.add_gradient(unit, param, grad, has_user_hooks=has_user_hooks)
        if may_be_last and run.mode is not Mode.LOCAL and self._is_complete(run, unit):
            (run.keep_part if run.mode is Mode.PART else run.complete)(unit)

    def _begin_gradients(self, run: BackwardRun) -> None:
        """Prepare for the first gradient of a backward."""
        if self._parts is not None:
            self._parts.begin_backward()
        is_final = run.mode is Mode.STEP
        run.on_first_gradient(self._begin_steps(steps=is_final), self._gatherer.in_step)
        if is_final:
            self._saves_memory = run.saves_memory

    def gradient(self, unit: Unit, param: nn.Parameter) -> Tensor | None:
        """Return the gradient of a parameter of the module that is accumulated and not reduced yet, or `None`."""
        accumulated = self._reducer.buckets[unit].gradient(param)
        latest = self._run.latest if self._run is not None else None
        if accumulated is None and latest is not None and latest[0] is param:
            return latest[1]
        return accumulated

    def drop_gradient(self, unit: Unit, param: nn.Parameter) -> None:
        """Drop that gradient."""
        self._reducer.buckets[unit].drop(param)

    def expect_gradients(self, unit: Unit, *, recorded: bool) -> None:
        """Record a forward of a unit. Reentrant checkpointing recomputes those that autograd has not `recorded`."""
        if recorded:
            self._recorded.add(unit)
        else:
            self._hidden.add(unit)
            self._outstanding[unit] += 1

    def recomputed(self, unit: Unit) -> None:
        """Record that a forward of a unit is recomputed in the backward.

        Raises:
            PhaseError: its weights have changed.
        """
        run = self.open()
        run.check_recomputation(unit)
        if self._outstanding[unit]:
            self._outstanding[unit] -= 1
            run.recomputed[unit] += 1

    def forget_forwards(self) -> None:
        """Expect no gradients of earlier forwards, because a step has changed their weights."""
        self._recorded.clear()
        self._hidden.clear()
        self._outstanding.clear()

    @contextmanager
    def accumulating(self, mode: Mode) -> Iterator[None]:
        """Set the mode of backwards inside the block."""
        before, self._mode = self._mode, mode
        try:
            yield
        finally:
            self._mode = before

    def accumulates(self) -> bool:
        """Return whether a later backward has to reduce gradients of those that run now, or adds to them."""
        return self._mode is not Mode.STEP

    def died(self) -> bool:
        """Return whether the last backward ended in an exception, so that autograd never called back."""
        return self._run is not None and not in_backward()

    def check_step(self, *, graded: bool, inside: bool) -> None:
        """Raise if a step must not follow now, and expect no more gradients of forwards before it.

        Args:
            graded: whether any shard has a gradient.
            inside: whether the optimizer has stepped inside the backward.

        Raises:
            PhaseError: the last backward died, or gradients are only accumulated.
        """
        if self._run is not None and self.died() and inside and not self._run.has_gradients:
            self.repair()  # it was refused, because step() was missing after the one before it
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
        if self._run is not None and not in_backward():
            self._gatherer.end_pass()
            self._run.abandon()
            self._end(self._run)

    def _is_complete(self, run: BackwardRun, unit: Unit) -> bool:
        """Return whether all gradients that a unit gets in this backward have arrived.

        Autograd sums the gradients of all recorded forwards and delivers each parameter's once. A hidden forward
        delivers its own after its recomputation. If these cannot be told apart (a unit that was called in both ways, or
        a forward whose loss was never used), the unit is reduced at the end of the backward.
        """
        if unit not in self._hidden:
            return run.has_all(unit, rounds=1)
        if unit in self._recorded or self._outstanding[unit]:
            return False
        return run.has_all(unit, rounds=run.recomputed[unit])

    def _close(self) -> None:
        """End the outermost backward. Without any gradient (`torch.autograd.grad`) there is nothing to reduce.

        If the reductions fail, this backward has died like any other.
        """
        run = self._run
        assert run is not None, "autograd calls back once per backward"
        with self._streams.at_home():
            self._gatherer.end_pass()  # peers may still need weights before they can reduce
            if run.has_gradients and run.mode is Mode.PART:
                run.end_part()
            elif run.has_gradients and run.mode.reduces:
                run.finalize()
                self._gatherer.confirm_ends()  # gradient flags came from every rank after the end of its pass
            if run.has_gradients and self._parts is not None:
                self._parts.end_backward()
            self._end(run)

    def _end(self, run: BackwardRun) -> None:
        self._run = None
        self._reducer.end_backward()
        while run.unsharded:
            self._gatherer.reshard(run.unsharded.pop())
        if self.calls is not None:
            self.calls.end_backward()
        self._gatherer.after_backward(final=run.has_gradients and run.mode is Mode.STEP)


def _deliver(backward: "weakref.ref[Backward]", unit: "weakref.ref[Unit]", param: nn.Parameter) -> None:
    """Take the gradient that autograd has just put into `param.grad`, on any stream."""
    there, home = backward(), unit()
    if there is None or home is None:
        return
    grad, has_user_hooks = take_grad(param)
    assert grad is not None
    streams = there._streams
    if not streams.on_gpu or (other := streams.other()) is None:
        there.add_gradient(home, param, grad, has_user_hooks=has_user_hooks)
        return
    streams.record_stream(grad)
    with streams.across(other):
        there.add_gradient(home, param, grad, has_user_hooks=has_user_hooks)
