"""Step counts of shards and the scalars of a step, on the CPU (`HostCounts`) and on a device (`DeviceCounts`).

A shard without a gradient keeps its count, and a step that is skipped because of infinities is not counted. On the CPU,
the host reads the counts. On a device, the counts are updated in stream order without synchronization, so the host does
not know their values.

Legend: `R` rows, one per shard on the device; `S` elements that one call steps; `G` groups of 32 of these elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, NamedTuple, TypeAlias

import torch
from shardlite_kernels import SCALE_BLOCK, Hyper, State, Table, send
from shardlite_kernels.adamw import adamw, add_rows_adamw, reduce_adamw
from shardlite_kernels.adamw_cpu import CpuStep, adamw_cpu, add_rows_adamw_cpu, reduce_adamw_cpu
from shardlite_kernels.noise import keys
from shardlite_kernels.scalars import adamw_scalars, hyper_table
from torch import Tensor

from shardlite.comm import Rows

Group: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Amp:
    """The inputs that a step gets from a gradient scaler and from clipping."""

    found_inf: Tensor | None = None
    """A flag [] or [1]. The step has no effect unless the flag is zero."""

    grad_scale: Tensor | None = None
    """The scale of the gradients. A step first divides the gradients by the scale, in place."""

    factor: Tensor | None = None
    """The clipping factor []. A step then multiplies the gradients by the factor, without changing them in memory."""


class RunSlice(NamedTuple):
    """Elements that one kernel call steps."""

    state: State
    rows: Tensor
    """The row of each group of 32 elements, [G]."""

    arena_offset: int
    """Index of the first element in the arena (the buffer of moments)."""

    row: int
    """Row of the shard that has the first element."""

    def part(self, start: int, stop: int) -> RunSlice:
        """Return elements `[start, stop)`. `start` must be a multiple of 32."""
        rows = self.rows[start // SCALE_BLOCK : -(-stop // SCALE_BLOCK)]
        return RunSlice(self.state.part(start, stop), rows, self.arena_offset + start, self.row)


class _Counts:
    """Step counts of the shards on one device.

    Each shard is given as three integers: the index of its parameter group, the index of its parameter in the
    optimizer, and an index in the moments' arena. The full parameter would start at this index if the arena
    held the full parameter.
    """

    def __init__(self, shards: Sequence[tuple[int, int, int]], device: torch.device) -> None:
        self._groups, *constants = zip(*shards, strict=True)
        self._constants = [send(each, torch.int64, device) for each in constants]
        self.steps = torch.zeros(len(shards), dtype=torch.float32, device=device)
        """Number of steps taken, [R]."""

    def _keys(self) -> Tensor:
        return keys(self.steps + 1, *self._constants)


class HostCounts(_Counts):
    """Step counts of shards in CPU memory."""

    def together(self, last: int, row: int, *, adjacent: bool) -> bool:
        """Return whether two shards are `adjacent` and have the same group and count, so one call can step both."""
        return adjacent and self._groups[last] == self._groups[row] and self._done[last] == self._done[row]

    def arrangement(self, rows: Sequence[int]) -> list[int]:
        """Return a number for each of `rows`: -1 if the row is not stepped, else equal numbers for equal counts."""
        numbers: dict[float, int] = {}
        active, done = self._active, self._done
        return [numbers.setdefault(done[row], len(numbers)) if row in active else -1 for row in rows]

    def begin_step(self, groups: Sequence[Group], active: Sequence[int], amp: Amp) -> None:
        """Prepare a step of the rows in `active`. Read all values on the host."""
        self._done: list[float] = self.steps.tolist()
        self._active = set(active)
        self._hypers = [_hyper(group) for group in groups]
        self._steps: dict[tuple[float, int], CpuStep] = {}  # the arguments of this step, by count and group
        self._scale = None if amp.grad_scale is None else float(amp.grad_scale)
        self._factor = 1.0 if amp.factor is None else float(amp.factor)
        self._skip = amp.found_inf is not None and float(amp.found_inf) != 0
        self._table = Table(torch.empty(0, dtype=torch.int16), self._keys(), torch.empty(0))

    def outdated(self, groups: Sequence[Group]) -> bool:
        """Return whether hyper-parameters have changed since `begin_step`."""
        return self._hypers != [_hyper(group) for group in groups]

    def activate(self, rows: Sequence[int], users: Tensor) -> None:
        """Add a row of `rows` to the step if the row's entry in `users` is above 0. `users` has one entry per row."""
        self._active |= {row for row, count in zip(rows, users.tolist(), strict=True) if count > 0}

    def update(self, elements: RunSlice, grad: Tensor, bad: Tensor | None = None) -> None:
        """Update `elements` with a gradient [S], by PyTorch's operator.

        Set `bad` [], int32, to 1 if the gradient is not finite.
        """
        if not self._skip:
            adamw_cpu(elements.state, grad, self._step(elements), bad=bad)

    def reduce(self, elements: RunSlice, received: Tensor, own: Tensor, divisor: int, bad: Tensor) -> None:
        """Update `elements` with the gradient `(received + own) / divisor`, [S] each. Set `bad` as in `update`."""
        reduce_adamw_cpu(elements.state, received, own, self._step(elements), divisor=divisor, bad=bad)

    def add_rows(self, elements: RunSlice, rows: Rows, divisor: int, bad: Tensor) -> None:
        """Update `elements` with the sum of `rows` [W, S] divided by `divisor`. Set `bad` as in `update`.

        The kernel `add_rows` defines the order of the sum.
        """
        add_rows_adamw_cpu(elements.state, step=self._step(elements), divisor=divisor, bad=bad, **rows._asdict())

    def end_step(self) -> None:
        """Count the step."""
        if not self._skip:
            if len(self._active) == len(self.steps):
                self.steps += 1
            else:
                self.steps[list(self._active)] += 1

    def scalars(self) -> list[Tensor]:
        """Return the tensors of this step that its updates read. Steps of a CPU need this on a simulated GPU only."""
        return [self._table.keys]

    def _step(self, elements: RunSlice) -> CpuStep:
        key = done, group = self._done[elements.row], self._groups[elements.row]
        step = self._steps.get(key)
        if step is None:
            step = CpuStep(number=done + 1, hyper=self._hypers[group], grad_scale=self._scale, factor=self._factor)
            self._steps[key] = step
        if not elements.rows.numel():  # the moments are exact and need no table
            return step
        return replace(step, table=self._table._replace(rows=elements.rows, first=elements.arena_offset))

    def table_of(self, elements: RunSlice) -> Table | None:
        """Return `None`, because PyTorch's operator needs no table."""
        return None


class DeviceCounts(_Counts):
    """Step counts of shards that kernels step. Counts and scalars stay on the device.

    Host values are sent only when they have changed, with `send`, which does not synchronize. A single number is an
    argument of a fill kernel. So each step makes the same launches with the same arguments, and can be captured in a
    CUDA graph after the first step.
    """

    def __init__(self, shards: Sequence[tuple[int, int, int]], device: torch.device) -> None:
        super().__init__(shards, device)
        self._group_of = send(self._groups, torch.int64, device)
        self._sent: list[Hyper] = []
        self._wanted: set[int] | None = None
        self._row_numbers: dict[tuple[int, ...], Tensor] = {}

    def together(self, last: int, row: int, *, adjacent: bool) -> bool:
        """Return `True`: the kernel looks up the row of every 32 elements, and skips rows that are not stepped."""
        return True

    def arrangement(self, rows: Sequence[int]) -> list[int]:
        """Return zeros: a kernel call may cover any rows."""
        return [0] * len(rows)

    def begin_step(self, groups: Sequence[Group], active: Sequence[int], amp: Amp) -> None:
        """Prepare a step of the rows in `active`. Compute the scalars of all rows."""
        device = self.steps.device
        wanted = set(active)
        if wanted != self._wanted:
            weights = [float(row in wanted) for row in range(len(self.steps))]
            self._wanted, self._weights = wanted, send(weights, torch.float32, device)
        self._unscale = amp.grad_scale is not None
        found_inf = None if amp.found_inf is None else _on(device, amp.found_inf)
        self._scalars = adamw_scalars(
            self.steps + 1,
            self._hyper_table(groups).index_select(0, self._group_of),
            active=self._weights if found_inf is None else self._weights * (found_inf == 0),
            grad_scale=None if amp.grad_scale is None else _on(device, amp.grad_scale),
            factor=None if amp.factor is None else _on(device, amp.factor),
        )
        self._active = self._scalars[:, -1]  # a view [R], which is 1 for rows that are stepped
        self._keys_now = self._keys()

    def outdated(self, groups: Sequence[Group]) -> bool:
        """Return whether hyper-parameters have changed since `begin_step`. Learning rates on a device are ignored."""
        return self._sent != [_hyper(group, self.steps.device) for group in groups]

    def activate(self, rows: Sequence[int], users: Tensor) -> None:
        """Add a row of `rows` to the step if the row's entry in `users` is above 0. `users` has one entry per row."""
        key = tuple(rows)
        if key not in self._row_numbers:
            self._row_numbers[key] = send(rows, torch.int64, self.steps.device)
        self._active.index_copy_(0, self._row_numbers[key], (users > 0).to(torch.float32))

    def update(self, elements: RunSlice, grad: Tensor, bad: Tensor | None = None) -> None:
        """Step with the kernel, as `HostCounts` does with PyTorch's operator."""
        adamw(elements.state, grad, self.table_of(elements), unscale=self._unscale, bad=bad)

    def reduce(self, elements: RunSlice, received: Tensor, own: Tensor, divisor: int, bad: Tensor) -> None:
        """Step with the kernel, as `HostCounts` does with PyTorch's operator."""
        reduce_adamw(elements.state, received, own, self.table_of(elements), divisor=divisor, bad=bad)

    def add_rows(self, elements: RunSlice, rows: Rows, divisor: int, bad: Tensor) -> None:
        """Step with the kernel, as `HostCounts` does with PyTorch's operator."""
        add_rows_adamw(elements.state, table=self.table_of(elements), divisor=divisor, bad=bad, **rows._asdict())

    def end_step(self) -> None:
        """Count the step in the rows that were stepped."""
        self.steps += self._active

    def table_of(self, elements: RunSlice) -> Table:
        """Return the table from which a kernel reads the scalars of this step for `elements`."""
        return Table(elements.rows, self._keys_now, self._scalars, elements.arena_offset)

    def scalars(self) -> list[Tensor]:
        """Return the tensors of this step that its updates read."""
        return [self._scalars, self._keys_now]

    def _hyper_table(self, groups: Sequence[Group]) -> Tensor:
        """Return the hyper-parameters, one row [6] per parameter group. Copy learning rates that are on the device."""
        device = self.steps.device
        hypers = [_hyper(group, device) for group in groups]
        if hypers != self._sent:
            self._hypers, self._sent = hyper_table(hypers, device), hypers
        for row, group in enumerate(groups):
            if _is_here(group["lr"], device):
                self._hypers[row, 0].copy_(group["lr"].detach().reshape(()), non_blocking=True)
        return self._hypers


StepCounts: TypeAlias = HostCounts | DeviceCounts


def _hyper(group: Group, device: torch.device | None = None) -> Hyper:
    """Return a group's hyper-parameters as numbers on the host. A learning rate on `device` is reported as 0."""
    lr = 0.0 if device is not None and _is_here(group["lr"], device) else float(group["lr"])
    beta1, beta2 = group["betas"]
    max_update = group.get("max_update")
    limit = inf if max_update is None else float(max_update)
    return Hyper(lr, float(beta1), float(beta2), float(group["eps"]), float(group["weight_decay"]), limit)


def _is_here(value: Any, device: torch.device) -> bool:
    """Return whether `value` is a tensor on `device`, or another tensor that the host cannot read without waiting."""
    return isinstance(value, Tensor) and (value.device == device or value.device.type != "cpu")


def _on(device: torch.device, value: Any) -> Tensor:
    """Return `value` (a number or a one-element tensor) as an fp32 scalar [] on `device`, without synchronization."""
    if _is_here(value, device):
        return value.detach().reshape(()).to(device, torch.float32, non_blocking=True)  # type: ignore[no-any-return]
    return torch.full((), float(value), dtype=torch.float32, device=device)
