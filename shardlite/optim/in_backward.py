"""Step inside the backward: step each parameter when its gradient is ready, or in the last addition of a reduction.

    open     the first gradient of a backward is ready: read the hyper-parameters of the step
    step     parameters are stepped in any order and on any thread
    close    the program calls `step()` of the optimizer: count the step; the next backward may open another step

Between opening and closing, some weights are stepped and others are not, and nothing can be undone. This file does not
know units or communication.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
from shardlite_kernels import State, Table, is_here
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from shardlite.comm import Rows
from shardlite.errors import NonFiniteError, PhaseError
from shardlite.optim.counts import Amp, RunSlice
from shardlite.optim.entries import check_dense
from shardlite.optim.layout import OptimizerLayout, StateSlot, Stretch, runs
from shardlite.optim.unsharded import check_unsharded, step_unsharded
from shardlite.params import Shard
from shardlite.telemetry import LaggedNumbers

LATER = 4
"""Number of steps from a non-finite gradient on a GPU to the error on all ranks. By then, hosts have read the flag."""

_paused: Counter[Tensor] = Counter()
"""For each parameter in an `accumulating` block, the number of such blocks. Ranks that are threads share the table."""


@contextmanager
def accumulating(params: Iterable[Tensor]) -> Iterator[None]:
    """Disable steps of `params` in backwards inside the block."""
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
    """The in-backward steps of one optimizer."""

    def __init__(self, optimizer: Optimizer, create_states: Callable[[Any], OptimizerLayout]) -> None:
        """Initialize without an open step. `create_states(optimizer)` returns the layout with all states."""
        self._optimizer = ref(optimizer)  # weak: hooks hold this object, and a deleted optimizer must not step
        self._create_states = create_states
        self._layout: OptimizerLayout | None = None  # the layout of the open step
        self.handles: dict[Tensor, RemovableHandle] = {}
        self._done: set[Tensor] = set()
        self.alarm = Alarm()

    def catch(self, params: Iterable[Tensor]) -> None:
        """Register hooks on parameters that are not shards. A hook steps its parameter when the gradient is ready."""
        for param in params:
            if param.requires_grad and not isinstance(param, Shard) and param not in self.handles:
                self.handles[param] = param.register_post_accumulate_grad_hook(self._hook)  # type: ignore[no-untyped-call]

    def release(self, param: Tensor) -> None:
        """Remove the hook of `param`."""
        if (handle := self.handles.pop(param, None)) is not None:
            handle.remove()

    def ready(self) -> None:
        """Check that no step of an earlier backward is open.

        Raises:
            PhaseError: a step is open.
        """
        if self._done:
            raise PhaseError(
                "AdamW(in_backward=True) has taken a step in an earlier backward: call step() of the optimizer after "
                "each backward. To accumulate over several backwards, run all but the last inside no_sync()"
            )

    def prepare(self, places: Sequence[tuple[Tensor, int]]) -> InBackwardStep:
        """Prepare the in-backward step of shards whose gradients will be reduced into one buffer.

        `places` holds each shard with the offset of its gradient in that buffer, in elements.

        Raises:
            PhaseError: a shard was already stepped in the open step.
        """
        layout = self._open([param for param, _ in places])
        return InBackwardStep([(layout.by_id[id(param)], start) for param, start in places], layout)

    def forget(self) -> None:
        """Forget the open step, whose capture in a CUDA graph has failed."""
        self._layout = None
        self._done.clear()

    def close(self, optimizer: Optimizer) -> None:
        """Step the parameters that have a gradient but no hook, because they were frozen earlier. Then count the step.

        Raises:
            NonFiniteError: a gradient contained a NaN or an infinity. On a GPU, the error is raised `LATER` steps
                later.
            PhaseError: gradients were scaled, a shard has a gradient that was not computed by a backward, or
                hyper-parameters have changed since the backward.
        """
        if getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None:
            raise PhaseError(
                "AdamW(in_backward=True) has stepped with scaled gradients: with a gradient scaler, use an optimizer "
                "without in_backward. (bf16 needs no scaler)"
            )
        for param in [param for group in optimizer.param_groups for param in group["params"]]:
            if param.grad is not None and param.requires_grad:
                if isinstance(param, Shard):
                    raise PhaseError(
                        "AdamW(in_backward=True) steps with the gradients of a backward, but the program has set the "
                        "gradient of a shard: call zero_grad(), or use an optimizer without in_backward"
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
                "already stepped in the backward: change them before the backward, or after step()"
            )

    def _hook(self, param: Tensor) -> None:
        optimizer = self._optimizer()
        if optimizer is None or param in _paused:
            return
        if param in self._done:
            param.grad = None  # the gradient is from the backward that `ready` refuses
            self.ready()
        self._step(optimizer, param)

    def _open(self, params: Sequence[Tensor]) -> OptimizerLayout:
        """Open a step if none is open. Record that `params` are stepped. Return the layout of the step.

        Raises:
            PhaseError: one of `params` was already stepped in the open step.
        """
        if not self._done.isdisjoint(params):
            self.ready()
        if self._layout is None:
            optimizer = self._optimizer()
            assert optimizer is not None, "an optimizer lives while its backward runs"
            layout = self._create_states(optimizer)
            layout.begin_step(optimizer.param_groups, dict.fromkeys(layout.counts, ()), Amp())
            self._layout = layout
        self._done.update(params)
        return self._layout

    @torch.no_grad()
    def _step(self, optimizer: Optimizer, param: Tensor) -> None:
        """Update `param` with its gradient, and drop the gradient."""
        assert param.grad is not None
        check_dense([param])
        layout = self._layout or self._create_states(optimizer)
        slot = layout.by_id.get(id(param))
        if slot is None:
            group = next(group for group in optimizer.param_groups if any(each is param for each in group["params"]))
            check_unsharded(group, [param], optimizer.state)
            self._open([param])
            self.alarm.note((~param.grad.isfinite().all()).to(torch.int32))
            step_unsharded(group, [param], optimizer.state, Amp())
        else:
            step = self.prepare([(param, 0)])
            step.activate(torch.ones(1, device=param.device))
            layout.adopt([slot], optimizer.state)
            for counts, elements, gradient in layout.steps([slot], unscale=False):
                counts.update(elements, gradient, step.bad)
            self.alarm.note(step.bad)
        param.grad = None


class InBackwardStep:
    """The step of parameters whose gradients are in one buffer.

    A call of this object computes the gradients in a part of the buffer from their summands, and updates parameters
    with these gradients.
    """

    def __init__(self, members: Sequence[tuple[StateSlot, int]], layout: OptimizerLayout) -> None:
        """Prepare the step of `members`: slots, each with the offset of its gradient in the buffer."""
        self._members = members
        self._layout = layout
        self._rows = [slot.row for slot, _ in members]
        self._counts = members[0][0].counts if members else None
        device = members[0][0].param.device if members else torch.device("cpu")
        self.bad = torch.zeros((), dtype=torch.int32, device=device)
        """A flag [], which is 1 if a gradient contained a NaN or an infinity."""

    def activate(self, users: Tensor) -> None:
        """Select the parameters to step: those whose entry in `users` [number of parameters] is above 0."""
        if self._counts is not None:
            self._counts.activate(self._rows, users)

    def __call__(self, start: int, received: Tensor | Rows | None, own: Tensor | None, divisor: int = 1) -> None:
        """Update the parameters with the gradients in elements `[start, start + n)` of the buffer.

        The gradients are `(received + own) / divisor`, [n] each. If `received` is `None`, the gradients are `own`. If
        `received` has rows of all ranks, the gradients are their sum, divided by `divisor`. `start` is a multiple of
        32, and so is `n` except at the end of the buffer.
        """
        summand = received.rows if isinstance(received, Rows) else own
        assert summand is not None, "there is a gradient"
        for slot, begin, end in self._stretches():
            low, high = max(begin, start), min(end, start + summand.shape[-1])
            if low < high:
                stretch = slot.arena.slice_of(slot, slot.start + low - begin, slot.start + high - begin)
                for first, chunk in ((0, stretch),) if slot.arena.states is None else self._chunks(slot, stretch):
                    first += low - start
                    here = slice(first, first + chunk.state.param.numel())
                    if received is None:
                        slot.counts.update(chunk, summand[here], self.bad)
                    elif isinstance(received, Rows):
                        slot.counts.add_rows(chunk, received.part(here), divisor, self.bad)
                    else:
                        slot.counts.reduce(chunk, received[here], summand[here], divisor, self.bad)

    def _chunks(self, slot: StateSlot, stretch: RunSlice) -> Iterable[tuple[int, RunSlice]]:
        """Return the parts of `stretch` that one call steps, each with its first index. The states are offloaded.

        The caller must keep the result in no variable. After an error, a program that holds the error would hold this
        variable too, and the chunk would be copied back when the buffer has another one.
        """
        assert slot.arena.states is not None, "other states are stepped in one call"
        assert self._layout.offloaded is not None, "an arena is in host memory"
        return self._layout.offloaded.chunks(slot.arena.states, stretch)

    def fused(self, numel: int) -> tuple[State, Table, Tensor] | None:
        """Return the state, table and `bad` for one kernel call that steps with all gradients in a buffer [numel].

        Return `None` if the step needs several calls. Several calls are needed if parameters and their padding do not
        fill the buffer, as on the last rank, or if states are kept in host memory.
        """
        stretches = self._stretches()
        if len(stretches) != 1 or stretches[0][1:] != (0, numel):
            return None
        slot = stretches[0].first
        if slot.arena.states is not None:
            return None
        stretch = slot.arena.slice_of(slot, slot.start, slot.start + numel)
        table = slot.counts.table_of(stretch)
        return None if table is None else (stretch.state, table, self.bad)

    def _stretches(self) -> list[Stretch]:
        """Return the parts of the buffer that one call can step. They are found anew only if other rows are stepped."""
        if self._counts is None:
            return []
        arrangement = self._members, self._counts.arrangement(self._rows)
        key = self._members[0][0]
        known = self._layout.stretches.get(key)
        if known is None or known[0] != arrangement:
            active = (member for member, number in zip(*arrangement, strict=True) if number >= 0)
            found = runs(active, lambda last, begin, slot, start: start - begin == slot.start - last.start)
            ends = [(*run[0], run[-1][0].stop) for run in found]
            known = arrangement, [Stretch(first, begin, begin + stop - first.start) for first, begin, stop in ends]
            self._layout.stretches[key] = known
        return known[1]


class Alarm:
    """Raises if a gradient of a step had a NaN or an infinity: immediately on a CPU, some steps later on a GPU.

    The host does not wait for a GPU. The flag is equal on all ranks, and the device records the first step that has set
    the flag. So all ranks raise in the same step, unless a host is more than `LATER` steps ahead of its GPU.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._flag: Tensor | None = None
        self._first: LaggedNumbers | None = None  # on a device, [1]: the first step that set the flag, or 0

    def note(self, bad: Tensor) -> None:
        """Set the flag if `bad` [] is above 0."""
        bad = (bad > 0).to(torch.int32)
        self._flag = bad if self._flag is None else torch.maximum(self._flag, bad)

    def look(self) -> None:
        """End a step: clear the flag. If the flag was set, raise now or, on a GPU, some steps later.

        Raises:
            NonFiniteError: the flag was set.
        """
        flag, self._flag = self._flag, None
        self._steps += 1
        if flag is None:
            return
        if is_here(flag):
            self._raise_if(int(flag))
            return
        if self._first is None:
            self._first = LaggedNumbers(torch.zeros_like(flag).reshape(1))
        elif (seen := self._first.read()) and seen[0]:
            self._raise_if(self._steps >= seen[0] + LATER)
        first = self._first.numbers
        first.copy_(torch.where(first > 0, first, flag * self._steps))  # in place, so that a CUDA graph can be replayed
        self._first.send()

    def wait(self) -> None:
        """Wait for the GPU, and raise if the flag was set in any step so far. Call this before saving weights.

        Raises:
            NonFiniteError: the flag was set.
        """
        if self._first is not None:
            self._raise_if(int(self._first.numbers))

    def _raise_if(self, bad: bool | int) -> None:
        if bad:
            self._first = None
            raise NonFiniteError(
                "a gradient had a NaN or an infinity in a step that was taken in the backward, so weights and moments "
                "are NaN now: continue from a checkpoint. AdamW without in_backward skips such steps"
            )
