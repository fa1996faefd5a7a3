"""Follow each backward from its first event to its end: gradients arrive, units are reduced and resharded.

Autograd has no hook for the start of a backward. So the first event of a backward opens a `BackwardRun` and registers a
callback for its end. An event is the use of a saved weight, the recomputation of a unit, or the arrival of a gradient.
Backwards nest, because reentrant checkpointing runs a backward inside a node of another backward. The first event
always belongs to the outermost backward, in which the forward is recomputed. The end of the outermost backward closes
the run.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import get_ident

import torch
from torch import Tensor, nn

from shardlite.comm import ProgramStreams
from shardlite.engine.part_loop import PartLoop
from shardlite.errors import PhaseError
from shardlite.full import WeightStream
from shardlite.grads import Mode, Reducer, Stepping
from shardlite.grads.backward_run import BackwardRun, HostRun
from shardlite.grads.stream_run import StreamRun
from shardlite.params import Unit
from shardlite.params.parameters import register_first, take_grad
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
        stream: WeightStream,
        parts: PartLoop | None = None,
    ) -> None:
        """Initialize. No backward is running.

        Args:
            reducer: reduces gradients.
            gatherer: unshards weights.
            units: all units of the model.
            streams: the streams on which the program computes.
            begin_steps: function that is called at the first gradient of a backward. The function's argument `steps`
                says whether an optimizer may step inside this backward. The function returns the steps of that
                optimizer, or `None`.
            stream: the iterations over full weights. No pass and no step may begin inside one.
            parts: runs the loops over parts. If `parts` is not `None`, gradients may arrive only in these loops.
        """
        self._parts = parts
        self._reducer = reducer
        self._gatherer = gatherer
        self.units = units
        self._streams = streams
        self._begin_steps = begin_steps
        self.stream = stream
        self.calls = Calls(gatherer, units, on_use=self.enter) if isinstance(gatherer, Gatherer) else None
        """Handles of weights that autograd saves for a backward. `None` if full weights are always in memory."""

        self.thread: int | None = None
        """The thread that runs the outermost backward. `None` if no backward is running."""

        self._run: BackwardRun | None = None
        self._mode = Mode.STEP
        self._saves_memory = False  # the value of `saves_memory` in the latest backward before a step
        self._caught: set[nn.Parameter] = set()
        self._recorded: set[Unit] = set()
        self._hidden: set[Unit] = set()
        self._outstanding: Counter[Unit] = Counter()

    def open(self) -> BackwardRun:
        """Return the run of the current backward. Call this at each event: the first call opens the run."""
        if self._run is None:
            self.stream.check_closed()
            kind = StreamRun if self._reducer.on_stream else HostRun
            self._run = kind(self._reducer, self._mode, self._begin_gradients, self._is_complete)
            self.thread = get_ident()
            torch.autograd.Variable._execution_engine.queue_callback(self._close)
            self._gatherer.begin_backward(final=self._mode is Mode.STEP)
            if self._saves_memory and self._mode is Mode.STEP:
                self._gatherer.stop_prefetching()
        return self._run

    def enter(self, unit: Unit) -> None:
        """Record that a backward reaches a unit. Call this before the unit is unsharded."""
        self.open().enter(unit)

    def use(self, unit: Unit) -> None:
        """Unshard a unit for a hook that reads a weight, until the backward ends or the unit's handles are freed."""
        self.enter(unit)
        if unit.users:  # the users are handles, because other users would have made the parameters readable
            assert self.calls is not None
            self.calls.gatherer.bind(unit)
            return
        self._gatherer.unshard(unit)
        self.open().unsharded.append(unit)

    def begin_pass(self, *, evaluating: bool) -> None:
        """Prepare for a forward. `requires_grad` of parameters may have changed since the previous forward.

        A forward without gradients may be the first half of reentrant checkpointing, or an evaluation. A program may
        freeze all parameters during an evaluation between two accumulating backwards, or between a forward and its
        backward (PEFT's `disable_adapter()`, for a reference model). The freeze must have no effect on the backward.
        """
        self.prepare()
        if not (evaluating and self._reducer.accumulates):
            self.follow_requires_grad(frozen=not evaluating)

    def prepare(self) -> None:
        """Clean up after an exception, and let the current stream use what the former home stream has left."""
        self.stream.check_closed()
        self.repair()
        if (stream := self._streams.move_home()) is not None:
            for memory in self._kept():
                memory.record_stream(stream)

    def _kept(self) -> Iterator[Tensor]:
        """Yield the memory that later passes use: cached weights, accumulated gradients, and spare buffers."""
        for unit in self.units:
            if unit.buffer is not None:
                yield unit.buffer.bytes
        yield from self._gatherer.spare()
        yield from self._reducer.kept()

    def follow_requires_grad(self, *, frozen: bool = True) -> None:
        """Expect gradients of the parameters that currently require them.

        If `frozen` is `False` and no parameter was unfrozen, gradients of frozen parameters are still expected.
        """
        if self._reducer.follow_requires_grad(frozen=frozen):
            self.catch_gradients()

    def catch_gradients(self) -> None:
        """Register a hook that receives the gradient on each parameter that requires a gradient.

        The hook runs before those of the program, which find the gradient in the bucket. One hook per unit would not
        suffice: each gradient may be on a stream of its own and, on a CPU, is freed as soon as it is copied to the
        bucket. The hooks hold only weak references, because the garbage collector does not traverse a tensor's hooks.
        """
        me = weakref.ref(self)
        for unit in self._reducer.units:
            for param in unit.params():
                if param.requires_grad and param not in self._caught:
                    take_grad(param)
                    register_first(param, partial(_deliver, me, weakref.ref(unit)))
                    self._caught.add(param)

    def _begin_gradients(self, run: BackwardRun) -> None:
        """Prepare for the first gradient of a backward."""
        if self._parts is not None:
            self._parts.begin_backward()
        is_final = run.mode is Mode.STEP
        run.on_first_gradient(self._begin_steps(steps=is_final), self._gatherer.passes.in_step)
        if is_final:
            self._saves_memory = run.saves_memory

    def gradient(self, unit: Unit, param: nn.Parameter) -> Tensor | None:
        """Return the accumulated gradient of one of the module's own parameters, or `None` if there is none.

        A gradient no longer counts as accumulated after its reduction.
        """
        return self._reducer.buckets[unit].gradient(param)

    def drop_gradient(self, unit: Unit, param: nn.Parameter) -> None:
        """Drop the accumulated gradient of a parameter."""
        self._reducer.buckets[unit].drop(param)

    def expect_gradients(self, unit: Unit, *, recorded: bool) -> None:
        """Record a forward of a unit.

        If autograd has not `recorded` the forward, reentrant checkpointing runs the forward again in the backward.
        """
        if recorded:
            self._recorded.add(unit)
        else:
            self._hidden.add(unit)
            self._outstanding[unit] += 1

    def recomputed(self, unit: Unit) -> None:
        """Record that a forward of a unit is recomputed in the backward.

        Raises:
            PhaseError: the unit's weights have changed since the forward.
        """
        run = self.open()
        run.check_recomputation(unit)
        if self._outstanding[unit]:
            self._outstanding[unit] -= 1
            run.recomputed[unit] += 1
        elif unit not in self._recorded:
            run.anew.add(unit)

    def forget_forwards(self) -> None:
        """Forget earlier forwards, because a step has changed the weights that they used."""
        self._recorded.clear()
        self._hidden.clear()
        self._outstanding.clear()

    @contextmanager
    def accumulating(self, mode: Mode) -> Iterator[None]:
        """Set the mode of all backwards inside the block."""
        before, self._mode = self._mode, mode
        try:
            yield
        finally:
            self._mode = before

    def accumulates(self) -> bool:
        """Return whether backwards currently keep gradients, which a later backward adds to or reduces."""
        return self._mode is not Mode.STEP

    @property
    def holds_unreduced(self) -> bool:
        """Whether there are gradients that are not reduced yet."""
        return self._reducer.accumulates

    def died(self) -> bool:
        """Return whether the latest backward ended in an exception. Autograd runs no callback after an exception."""
        return self._run is not None and not in_backward()

    def check_step(self, *, graded: bool, inside: bool) -> None:
        """Check that a step is allowed now. Then forget the forwards before the step.

        Args:
            graded: whether any shard has a gradient.
            inside: whether an optimizer steps the model inside the backward.

        Raises:
            PhaseError: the latest backward ended in an exception, or gradients are accumulated and not reduced.
        """
        self.stream.check_closed()
        if self._run is not None and self.died() and inside and not self._run.has_gradients:
            self.repair()  # the backward was refused, because step() had not been called after the previous backward
        if self.died() and inside:
            raise PhaseError(
                "the last backward ended in an exception, and AdamW(in_backward=True) has stepped only some of the "
                "weights: continue from a checkpoint, or keep these weights and call zero_grad() and step()"
            )
        if self.died():
            raise PhaseError(
                "the last backward ended in an exception, so its gradients are incomplete: call zero_grad() and run "
                "forward and backward again before the step"
            )
        if not graded and self._reducer.accumulates:
            raise PhaseError(
                "the gradients were accumulated but not reduced, so the shards have none: run the last backward before "
                "a step outside of no_sync(), and finish a loop over parts(), or drop the gradients with zero_grad() "
                "of the model"
            )
        self.forget_forwards()

    def abandon_capture(self) -> None:
        """Forget a backward whose capture has failed. Afterwards, `repair` starts none of its reductions."""
        if self._run is not None:
            self._run.abandon_capture()

    def repair(self) -> None:
        """Clean up after a backward that ended in an exception."""
        if self._run is not None and not in_backward():
            self._gatherer.passes.end_pass()
            self._run.abandon()
            self._end(self._run)

    def _is_complete(self, run: BackwardRun, unit: Unit, rounds: int) -> bool:
        """Return whether all gradients that a unit gets in this backward have arrived: `rounds` of each parameter.

        Autograd sums the gradients of all recorded forwards and delivers the sum once per parameter. A hidden forward,
        which autograd has not recorded, delivers its gradients after its recomputation. If a unit ran in both kinds of
        forward, or the outputs of a forward did not contribute to the loss, the number of deliveries is unknown. The
        unit is then reduced at the end of the backward. So are replicated parameters, because modules may use them
        without a forward that the model sees.
        """
        if unit.replicated or unit in run.anew:
            return False
        if unit not in self._hidden:
            return rounds == 1
        if unit in self._recorded or self._outstanding[unit]:
            return False
        return rounds == run.recomputed[unit]

    def _close(self) -> None:
        """End the outermost backward. A backward without gradients (`torch.autograd.grad`) has nothing to reduce.

        If a reduction fails, `died` returns `True`, as after any backward that ended in an exception.
        """
        run = self._run
        assert run is not None, "autograd calls back once per backward"
        with self._streams.at_home():
            self._gatherer.passes.end_pass()  # first, because peers may still need weights before they can reduce
            if run.has_gradients and run.mode is Mode.PART:
                run.end_part()
            elif run.has_gradients and run.mode.reduces:
                run.finalize()
                self._gatherer.passes.confirm_ends()  # each rank has sent its gradient flags after the end of its pass
            if run.has_gradients and self._parts is not None:
                self._parts.end_backward()
            self._end(run)

    def _end(self, run: BackwardRun) -> None:
        self._run = self.thread = None
        self._reducer.end_backward()
        while run.unsharded:
            self._gatherer.reshard(run.unsharded.pop())
        if self.calls is not None:
            self.calls.end_backward()
        self._gatherer.after_backward(final=run.has_gradients and run.mode is Mode.STEP)


def _deliver(backward: "weakref.ref[Backward]", unit: "weakref.ref[Unit]", param: nn.Parameter) -> None:
    """Take the gradient that autograd has just stored in `param.grad`. The current stream may be any stream."""
    there, home = backward(), unit()
    if there is None or home is None:
        return
    grad, has_user_hooks = take_grad(param)
    assert grad is not None
    streams = there._streams
    if not streams.on_gpu or (other := streams.other()) is None:
        (there._run or there.open()).add_gradient(home, param, grad, has_user_hooks=has_user_hooks)
        return
    streams.record_stream(grad)
    with streams.across(other):
        there.open().add_gradient(home, param, grad, has_user_hooks=has_user_hooks)
