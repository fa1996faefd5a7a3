"""Step in the backward: each parameter as soon as its gradient is ready, or in the last hop of its reduction.

    open: the first gradient of a backward is ready -> hyper-parameters of the step are read
    steps, in any order and on any thread
    close: `step()` of the optimizer -> the step is counted, and the next backward may open another one

Between the first gradient and `step()` nothing can be undone: some weights are stepped, and others are not. Does not
know units or communication.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from weakref import WeakMethod

import torch
from shardlite_kernels import State, Table, is_here
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from shardlite.errors import NonFiniteError, PhaseError
from shardlite.optim.counts import Group, StepCounts
from shardlite.optim.layout import StateSlot, follows, slice_of
from shardlite.telemetry import LaggedNumbers

LATER = 4
"""Steps after which all ranks raise for a gradient that was not finite on a GPU: their hosts have read it by then."""


class InBackwardSteps:
    """The in-backward steps of one optimizer."""

    def __init__(self, begin: WeakMethod[Callable[[], list[StepCounts]]]) -> None:
        self._begin = begin  # weak, like all references from hooks: a deleted optimizer must not step
        self._counts: list[StepCounts] = []  # those of the open step
        self._handles: dict[Tensor, RemovableHandle] = {}
        self._done: set[Tensor] = set()
        self._alarm = _Alarm()
        self._paused: Counter[Tensor] = Counter()  # number of active pauses of each

    @property
    def is_open(self) -> bool:
        """Whether a step is open."""
        return bool(self._counts)

    def catch(self, param: Tensor, step: WeakMethod[Callable[[Tensor], None]]) -> None:
        """Call `step(param)` when autograd has accumulated the gradient of `param`, unless paused."""

        def take(param: Tensor) -> None:
            if (now := step()) is None or self._paused[param]:
                return
            if param in self._done:
                param.grad = None  # of a backward that is refused below
            self.ready_for(param)
            now(param)

        if param not in self._handles:
            self._handles[param] = param.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]

    def pause(self, params: Collection[Tensor]) -> None:
        """Do not step `params` until `resume`."""
        self._paused.update(params)

    def resume(self, params: Collection[Tensor]) -> None:
        """Undo one `pause` of `params` only: another thread may have paused others."""
        self._paused.subtract(params)
        for param in params:
            if self._paused[param] == 0:
                del self._paused[param]

    def release(self, param: Tensor) -> None:
        """Remove the hook of `param`."""
        handle = self._handles.pop(param, None)
        if handle is not None:
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

    def ready_for(self, param: Tensor) -> None:
        """Check that `param` was not stepped in a step that is still open.

        Raises:
            PhaseError: it was.
        """
        if param in self._done:
            self.ready()

    def prepare(self, members: Sequence[tuple[StateSlot, int]]) -> InBackwardStep:
        """Return the in-backward step of `members`: slots with the offsets of their gradients in a buffer."""
        self.open([slot.param for slot, _ in members])
        return InBackwardStep(members)

    def open(self, params: Sequence[Tensor]) -> None:
        """Open a step if none is open, and record that `params` are stepped.

        Raises:
            PhaseError: one of them was stepped in a step that is still open.
        """
        for param in params:
            self.ready_for(param)
        if not self._counts:
            begin = self._begin()
            assert begin is not None, "the optimizer has called"
            self._counts = begin()
        self._done.update(params)

    def note(self, bad: Tensor) -> None:
        """Record whether a gradient of the step contained a NaN or an infinity: `bad` [] is above 0 if so."""
        self._alarm.note(bad)

    def forget(self) -> None:
        """Clear the alarm after other weights were loaded."""
        self._alarm = _Alarm()

    def check(self) -> None:
        """Raise if a gradient contained a NaN or an infinity in any step. The host waits for a GPU.

        Raises:
            NonFiniteError: one did.
        """
        self._alarm.wait()

    def close(self, groups: Sequence[Group]) -> None:
        """Count the step; `groups` are the optimizer's current parameter groups.

        Raises:
            NonFiniteError: a gradient contained a NaN or an infinity; on a GPU it is raised `LATER` steps later.
            PhaseError: hyper-parameters changed since the backward, too late for this step.
        """
        outdated = any(counts.outdated(groups) for counts in self._counts)
        for counts in self._counts:
            counts.end()
        self._counts = []
        self._done.clear()
        self._alarm.look()
        if outdated:
            raise PhaseError(
                "hyper-parameters were changed between the backward and step(), but AdamW(in_backward=True) has "
                "stepped in the backward with the former ones: change them before the backward, or after step()"
            )


class InBackwardStep:
    """The step of parameters whose gradients lie in one buffer. Call it with the summands of a part of the buffer."""

    def __init__(self, members: Sequence[tuple[StateSlot, int]]) -> None:
        self._members = [(slot, start) for slot, start in members if slot.start < slot.end]
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
                stretch = slice_of(slot, slot.start + low - begin, slot.start + high - begin)
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
        stretch = slice_of(slot, slot.start, slot.start + numel)
        table = slot.counts.table_of(stretch)
        return None if table is None else (stretch.state, table, self.bad)

    def _stretches(self) -> Iterator[tuple[StateSlot, int, int]]:
        """Yield the contiguous runs that one call can step: the first slot, and where its gradients start and end."""
        first = last = None
        begin = 0
        for slot, start in self._members:
            if not slot.counts.is_active(slot.row):
                continue
            joins = first is not None and last is not None and follows(slot, last)
            if first is None or last is None or not joins or start - begin != slot.start - first.start:
                if first is not None and last is not None:
                    yield first, begin, begin + last.stop - first.start
                first, begin = slot, start
            last = slot
        if first is not None and last is not None:
            yield first, begin, begin + last.stop - first.start


class _Alarm:
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
