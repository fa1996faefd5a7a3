"""Step in the backward: each parameter as soon as its gradient is ready, or in the last hop of its reduction.

    open: the first gradient of a backward is ready -> hyper-parameters of the step are read
    steps, in any order and on any thread
    close: `step()` of the optimizer -> the step is counted, and the next backward may open another one

Between the first gradient and `step()` nothing can be undone: some weights are stepped, and others are not. Does not
know units or communication.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from weakref import WeakMethod, ref

import torch
from shardlite_kernels import State, Table, is_here
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from shardlite.errors import NonFiniteError, PhaseError
from shardlite.optim.counts import Amp
from shardlite.optim.layout import OptimizerLayout, StateSlot, check_dense, runs, steps_of
from shardlite.optim.ordinary import check_ordinary, step_ordinary
from shardlite.params import Shard
from shardlite.telemetry import LaggedNumbers

LATER = 4
"""Steps after which all ranks raise for a gradient that was not finite on a GPU: their hosts have read it by then."""

_paused: Counter[Tensor] = Counter()
"""For each parameter that no backward steps now, the number of `accumulating` contexts. Ranks may be threads."""


@contextmanager
def accumulating(params: Iterable[Tensor]) -> Iterator[None]:
    """Keep optimizers from stepping `params` in backwards inside this context."""
    wanted = set(params)
    _paused.update(wanted)
    try:
        yield
    finally:
        _paused.subtract(wanted)
        for param in wanted:
            if not _paused[param]:
                del _paused[param]


class InBackwardSteps:
    """The in-backward steps of one optimizer. `init_state` makes its missing states and returns its layout."""

    def __init__(self, optimizer: Optimizer, init_state: WeakMethod[Callable[[], OptimizerLayout]]) -> None:
        self._optimizer = ref(optimizer)  # weak, because hooks refer to this: a deleted optimizer must not step
        self._init_state = init_state
        self._layout: OptimizerLayout | None = None  # that of the open step
        self._handles: dict[Tensor, RemovableHandle] = {}
        self._done: set[Tensor] = set()
        self.alarm = Alarm()

    def catch(self, params: Iterable[Tensor]) -> None:
        """Step parameters that are no shards as soon as autograd has accumulated their gradients."""
        for param in params:
            if param.requires_grad and not isinstance(param, Shard) and param not in self._handles:
                self._handles[param] = param.register_post_accumulate_grad_hook(self._hook)  # type: ignore[no-untyped-call]

    def release(self, param: Tensor) -> None:
        """Remove the hook of `param`."""
        if (handle := self._handles.pop(param, None)) is not None:
            handle.remove()

    def ready(self) -> None:
        """Check that no step of an earlier backward is open.

        Raises:
            PhaseError: one is.
        """
        if self._done:
            raise PhaseError(
                "AdamW(in_backward=True) has taken a step in an earlier backward: call step() of the optimizer after "
                "each backward. To accumulate over several, run all but the last inside no_sync()"
            )

    def prepare(self, places: Sequence[tuple[Tensor, int]]) -> InBackwardStep:
        """Prepare the in-backward step of shards whose gradients are still to be reduced into one buffer.

        `places` holds each shard with the offset of its gradient in that buffer, in elements.

        Raises:
            PhaseError: one of them was stepped in a step that is still open.
        """
        slots = self._open([param for param, _ in places]).by_id
        return InBackwardStep([(slots[id(param)], start) for param, start in places])

    def close(self, optimizer: Optimizer) -> None:
        """Step parameters that still have a gradient because they were frozen and had no hook. Count the step.

        Raises:
            NonFiniteError: a gradient contained a NaN or an infinity; on a GPU it is raised `LATER` steps later.
            PhaseError: gradients were scaled, a shard has a gradient that does not come from a backward, or
                hyper-parameters changed since the backward, too late for this step.
        """
        if getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None:
            raise PhaseError(
                "AdamW(in_backward=True) has stepped with gradients as the backward computed them, scaled: use an "
                "optimizer without in_backward with a gradient scaler. (bf16 needs no scaler)"
            )
        for param in [param for group in optimizer.param_groups for param in group["params"]]:
            if param.grad is not None and param.requires_grad:
                if isinstance(param, Shard):
                    raise PhaseError(
                        "AdamW(in_backward=True) steps with the gradients of a backward, but the gradient of a shard "
                        "was set otherwise: call zero_grad(), or use an optimizer without in_backward"
                    )
                self._step(optimizer, param)
                self.catch([param])
        counts = [] if self._layout is None else self._layout.counts
        outdated = any(each.outdated(optimizer.param_groups) for each in counts)
        for each in counts:
            each.end_step()
        self._layout = None
        self._done.clear()
        self.alarm.look()
        if outdated:
            raise PhaseError(
                "hyper-parameters were changed between the backward and step(), but AdamW(in_backward=True) has "
                "stepped in the backward with the former ones: change them before the backward, or after step()"
            )

    def _hook(self, param: Tensor) -> None:
        optimizer = self._optimizer()
        if optimizer is None or param in _paused:
            return
        if param in self._done:
            param.grad = None  # of a backward that is refused
            self.ready()
        self._step(optimizer, param)

    def _open(self, params: Sequence[Tensor]) -> OptimizerLayout:
        """Open a step if none is open, record that `params` are stepped, and return the layout of the step.

        Raises:
            PhaseError: one of them was stepped in a step that is still open.
        """
        if any(param in self._done for param in params):
            self.ready()
        if self._layout is None:
            optimizer, layout = self._optimizer(), self._current_layout()
            assert optimizer is not None, "an optimizer lives while its backward runs"
            for counts in layout.counts:
                counts.begin_step(optimizer.param_groups, [], Amp())
            self._layout = layout
        self._done.update(params)
        return self._layout

    def _current_layout(self) -> OptimizerLayout:
        """Return the layout of the open step or, without one, the optimizer's, with states for all parameters."""
        init_state = self._init_state()
        assert init_state is not None, "an optimizer lives while its backward runs"
        return self._layout or init_state()

    @torch.no_grad()
    def _step(self, optimizer: Optimizer, param: Tensor) -> None:
        """Step `param` with its gradient, and drop the gradient."""
        assert param.grad is not None
        check_dense(param.grad)
        slot = self._current_layout().by_id.get(id(param))
        if slot is None:
            group = next(group for group in optimizer.param_groups if any(each is param for each in group["params"]))
            check_ordinary(group, [param], optimizer.state)
            self._open([param])
            self.alarm.note((~param.grad.isfinite().all()).to(torch.int32))
            step_ordinary(group, [param], optimizer.state, Amp())
        else:
            step = self.prepare([(param, 0)])
            step.activate(torch.ones(1, device=param.device))
            slot.adopt(optimizer.state)
            for counts, elements, gradient in steps_of([slot], unscale=False):
                counts.update(elements, gradient, step.bad)
            self.alarm.note(step.bad)
        param.grad = None


class InBackwardStep:
    """The step of parameters whose gradients lie in one buffer. Call it with the summands of a part of the buffer."""

    def __init__(self, members: Sequence[tuple[StateSlot, int]]) -> None:
        self._members = members
        self._rows = [slot.row for slot, _ in members]
        self._counts = members[0][0].counts if members else None
        device = members[0][0].param.device if members else torch.device("cpu")
        self.bad = torch.zeros((), dtype=torch.int32, device=device)
        """[], 1 if a gradient contained a NaN or an infinity."""

    def activate(self, users: Tensor) -> None:
        """Select the parameters to step: those whose entry in `users` [number of parameters] is above 0."""
        if self._counts is not None:
            self._counts.activate(self._rows, users)

    def __call__(
        self, start: int, received: Tensor | None, own: Tensor | None, divisor: int = 1, first: int | None = 0
    ) -> None:
        """Step by elements `[start, start + n)` of the buffer: `(received + own) / divisor`, [n] each, or `own` alone.

        Without `own`, `received` has a row of each rank, [W, n], to be added from row `first` on, or as a balanced
        tree if that is `None`. `start` is a multiple of 32, and so is `n` except at the end of the buffer.
        """
        summand = own if own is not None else received
        assert summand is not None, "there is a gradient"
        for slot, begin, end in self._stretches():
            low, high = max(begin, start), min(end, start + summand.shape[-1])
            if low < high:
                stretch = slot.arena.slice_of(slot, slot.start + low - begin, slot.start + high - begin)
                here = slice(low - start, high - start)
                if received is None:
                    slot.counts.update(stretch, summand[here], self.bad)
                elif own is None:
                    slot.counts.add_rows(stretch, received[:, here], first, divisor, self.bad)
                else:
                    slot.counts.reduce(stretch, received[here], own[here], divisor, self.bad)

    def fused(self, numel: int) -> tuple[State, Table, Tensor] | None:
        """Return what one kernel steps by a buffer [numel]: state, table and `bad`. `None` if that takes several calls.

        That is so where parameters and their padding do not fill the buffer, as at the end of the last rank's.
        """
        stretches = list(self._stretches())
        if len(stretches) != 1 or stretches[0][1:] != (0, numel):
            return None
        slot, _, _ = stretches[0]
        stretch = slot.arena.slice_of(slot, slot.start, slot.start + numel)
        table = slot.counts.table_of(stretch)
        return None if table is None else (stretch.state, table, self.bad)

    def _stretches(self) -> Iterator[tuple[StateSlot, int, int]]:
        """Yield the runs that one call can step: the first slot, and where its gradients start and end."""
        active = ((slot, start) for slot, start in self._members if slot.counts.is_active(slot.row))
        for run in runs(active, lambda last, begin, slot, start: start - begin == slot.start - last.start):
            (first, begin), (last, _) = run[0], run[-1]
            yield first, begin, begin + last.stop - first.start


class Alarm:
    """Raises if a gradient of a step had a NaN or an infinity: at once on a CPU, some steps later on a GPU.

    The host does not wait for a GPU. The flag is equal on all ranks, and the device notes the step in which it was set
    first. So all ranks raise in the same step, unless a host is further ahead of its GPU than `LATER` steps.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._flag: Tensor | None = None
        self._first: Tensor | None = None  # the step in which the flag was set first, on the device, [1], or 0
        self._lagged: LaggedNumbers | None = None  # of `_first`

    def note(self, bad: Tensor) -> None:
        """Set the flag if `bad` [] is above 0."""
        bad = (bad > 0).to(torch.int32)
        self._flag = bad if self._flag is None else torch.maximum(self._flag, bad)

    def look(self) -> None:
        """Clear the flag, and raise if it was set.

        Raises:
            NonFiniteError: it was set.
        """
        flag, self._flag = self._flag, None
        self._steps += 1
        if flag is None:
            return
        if is_here(flag):
            self._raise_if(int(flag))
            return
        seen = None if self._lagged is None else self._lagged.read()
        if seen and seen[0]:
            self._raise_if(self._steps >= seen[0] + LATER)
        self._send(flag)

    def wait(self) -> None:
        """Wait for the GPU, and raise if the flag was set in any step so far: weights are about to be saved.

        Raises:
            NonFiniteError: it was set.
        """
        if self._first is not None:
            self._raise_if(int(self._first))

    def _send(self, flag: Tensor) -> None:
        """Start copying to the host in which step the flag was set first."""
        if self._first is None or self._lagged is None:
            self._first = torch.zeros_like(flag).reshape(1)
            self._lagged = LaggedNumbers(self._first)
        first = torch.where(self._first > 0, self._first, flag * self._steps)
        self._first.copy_(first)  # in place: a graph is replayed
        self._lagged.send()

    def _raise_if(self, bad: bool | int) -> None:
        if bad:
            self._first = self._lagged = None
            raise NonFiniteError(
                "a gradient had a NaN or an infinity in a step that was taken in the backward, so weights and moments "
                "are NaN now: go on from a checkpoint. AdamW without in_backward leaves such steps out"
            )
