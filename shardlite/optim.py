"""AdamW for parameters that lie in flat arenas: neighbours are stepped together, each run of them by one kernel call.

A parameter of `ShardLite` is a view into a flat buffer, the arena. It starts at a multiple of 32 elements, and the
zeros up to the next multiple belong to it, in the arena and in the gradient buffer alike. The moments have arenas too:

    parameters  [ p0 p0 p0 0 | p1 p1 0 0 | p2 p2 p2 p2 | p3 ... ]     padded to 32, drawn as 4
    gradient         yes          yes          None       yes
    runs        [       first run        ]             [ second ]     one kernel call each

A run is updated element by element, so bits would not depend on how an arena is cut into runs but for one thing:
PyTorch's CPU code rounds the last `n % 16` elements of a tensor in another way than the rest. Hence runs end at
multiples of 32 wherever the arena reaches so far. A parameter with a storage of its own is a run of its own.

Nothing here knows about units, ranks or communication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from shardlite_kernels import adamw
from torch import Tensor
from torch.optim import Optimizer

from shardlite.layout import ALIGN, round_up

_MOMENTS = ("exp_avg", "exp_avg_sq")
_STATE = ("step", *_MOMENTS)
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# Options of torch.optim.AdamW: those that change the result, with the one value that is supported, and the others.
_FIXED_OPTIONS = {"amsgrad": False, "maximize": False, "differentiable": False, "decoupled_weight_decay": True}
_FREE_OPTIONS = ("foreach", "fused", "capturable")

Group: TypeAlias = dict[str, Any]


class AdamW(Optimizer):
    """AdamW (Loshchilov and Hutter 2019): the bits of `torch.optim.AdamW(fused=True)` on the same flat tensors.

    Parameter groups, schedulers and a tensor as `lr` work as in PyTorch (a tensor on a GPU is waited for). States have
    PyTorch's names and shapes, so a `state_dict` can be exchanged with `torch.optim.AdamW` in both directions. A
    parameter without a gradient is left alone and keeps its own step count.

    Raises:
        ValueError: a hyper-parameter is out of range, or a parameter is not contiguous, overlaps another one, or has
            no floating dtype.
    """

    _plan: _Plan | None = None  # made when first needed, and anew when parameters have moved

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def add_param_group(self, param_group: Group) -> None:
        """Add a group; hyper-parameters that it does not name are those given to the constructor."""
        super().add_param_group(param_group)
        try:
            _check_group(self.param_groups[-1])
        except ValueError:
            del self.param_groups[-1]
            raise

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over a loaded or unpickled state; its values are copied into the arenas at once."""
        _check_loaded(state)
        super().__setstate__(state)
        for group in self.param_groups:
            for option in (*_FIXED_OPTIONS, *_FREE_OPTIONS):
                group.pop(option, None)
        self._current_plan().adopt(self.state)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; `closure` computes the loss anew and returns it.

        Raises:
            ValueError: a gradient is sparse; no parameter has been updated then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        plan = self._current_plan()
        stepped = [_active(slots, self.state) for slots in plan.groups]
        counts = plan.counts()
        for group, slots in zip(self.param_groups, stepped, strict=True):
            _step_group(group, _runs(slots, counts))
        plan.count(stepped)
        # The kernels wrote through views that have version counters of their own.
        torch.autograd.graph.increment_version([slot.param for slots in stepped for slot in slots])
        return loss

    def _current_plan(self) -> _Plan:
        if self._plan is None or not self._plan.fits(self.param_groups):
            self._plan = _Plan(self.param_groups)
            self._plan.adopt(self.state)
        return self._plan


class _Slot:
    """Where one parameter lies in its storage, in elements, and its state in the arenas."""

    __slots__ = ("address", "arena", "end", "param", "row", "start", "state", "stop")

    arena: _Arena
    state: dict[str, Tensor]

    def __init__(self, param: Tensor, row: int) -> None:
        self.param = param
        self.address = param.data_ptr()
        self.row = row  # of the step counts
        self.start = int(param.storage_offset())
        self.end = self.stop = self.start + param.numel()  # `stop` may grow to include padding

    def adopt(self, states: dict[Tensor, Any]) -> None:
        """Copy the entry of `states` for this parameter (or zeros) into the arenas, and make it refer to them."""
        given = states.get(self.param)
        _check_state(self.param, given)
        for name, mine in self.state.items():
            value = given[name] if given else 0.0
            if value is not mine:
                mine.copy_(value) if isinstance(value, Tensor) else mine.fill_(value)
        states[self.param] = dict(self.state)

    def holds(self, state: dict[str, Any] | None) -> bool:
        """Whether `state` refers to the arenas, so was neither replaced from outside nor never made."""
        mine = self.state
        return bool(state) and all(state.get(name) is mine[name] for name in _STATE)  # type: ignore[union-attr]

    def include_padding(self, next_start: int) -> None:
        """Move `stop` to the next multiple of 32, if what lies up to there is in the storage and is nobody's: zero."""
        stop = min(round_up(self.end, ALIGN), next_start, _storage_numel(self.param))
        if self.start % ALIGN == 0 and stop > self.end and not _flat(self.param, self.end, stop).any():
            self.stop = stop


class _Arena:
    """The moments of the parameters in one storage: one buffer each, from the first parameter to the last one's end."""

    def __init__(self, slots: list[_Slot]) -> None:
        self._slots = slots
        self.start = slots[0].start
        param, numel = slots[0].param, round_up(slots[-1].stop - self.start, ALIGN)
        self._moments = [torch.zeros(numel, dtype=param.dtype, device=param.device) for _ in _MOMENTS]
        self._runs: dict[tuple[int, int], tuple[Tensor, ...]] = {}

    def moments(self, slot: _Slot) -> dict[str, Tensor]:
        """The moments of one parameter, in its shape."""
        here = slice(slot.start - self.start, slot.end - self.start)
        return {name: moment[here].view(slot.param.shape) for name, moment in zip(_MOMENTS, self._moments, strict=True)}

    def run(self, start: int, stop: int) -> tuple[Tensor, ...]:
        """The parameters and the two moments of a run, flat."""
        if len(self._runs) > 4 * len(self._slots):
            self._runs.clear()  # which parameters have gradients changes all the time: do not collect every combination
        if (start, stop) not in self._runs:
            here = slice(start - self.start, stop - self.start)
            self._runs[start, stop] = _flat(self._slots[0].param, start, stop), *(m[here] for m in self._moments)
        return self._runs[start, stop]


class _Plan:
    """What stays the same from step to step: where parameters lie, in which order, and where their states are."""

    def __init__(self, groups: list[Group]) -> None:
        params = [param for group in groups for param in _trained(group)]
        self._slots = [_Slot(param, row) for row, param in enumerate(params)]
        self._steps = torch.zeros(len(params), dtype=torch.float32)
        for neighbours in _by_storage(self._slots):
            _settle_borders(neighbours)
            arena = _Arena(neighbours)
            for slot in neighbours:
                slot.arena = arena
                slot.state = {"step": self._steps[slot.row], **arena.moments(slot)}
        rows = iter(self._slots)
        members = [[next(rows) for _ in _trained(group)] for group in groups]
        self.groups = [sorted(slots, key=lambda slot: (id(slot.arena), slot.start, slot.end)) for slots in members]

    def fits(self, groups: list[Group]) -> bool:
        """Whether `groups` have the parameters that this plan was made for, and none of them has moved."""
        params = [param for group in groups for param in _trained(group)]
        if [len(_trained(group)) for group in groups] != [len(slots) for slots in self.groups]:
            return False
        pairs = zip(self._slots, params, strict=True)
        return all(slot.param is param and slot.address == param.data_ptr() for slot, param in pairs)

    @torch.no_grad()
    def adopt(self, states: dict[Tensor, Any]) -> None:
        """Move all `states` that exist into the arenas."""
        for slot in self._slots:
            if states.get(slot.param) and not slot.holds(states[slot.param]):
                slot.adopt(states)

    def counts(self) -> list[float]:
        """Steps done so far, by row."""
        counts: list[float] = self._steps.tolist()
        return counts

    def count(self, stepped: list[list[_Slot]]) -> None:
        """Add one to the step counts of `stepped`."""
        rows = [slot.row for slots in stepped for slot in slots]
        if len(rows) == len(self._slots):
            self._steps += 1
        elif rows:
            self._steps[rows] += 1


class _Run:
    """Parameters that follow each other without a gap, with gradients that do so too, after equally many steps."""

    def __init__(self, slot: _Slot, grad: Tensor, count: float) -> None:
        self.count = count
        self._first = self._last = slot
        self._grad = grad.contiguous()
        self._address, self._itemsize = self._grad.data_ptr(), self._grad.element_size()
        # Elements from the start of the first gradient to the end of its storage: what lies there is one buffer.
        self._offset = int(self._grad.storage_offset())
        self._reach = _storage_numel(self._grad) - self._offset

    def extend(self, slot: _Slot, grad: Tensor, count: float) -> bool:
        """Take `slot` in if it belongs here."""
        first, last = self._first, self._last
        fits = (
            slot.start == last.stop
            and slot.arena is last.arena
            and count == self.count
            and grad.data_ptr() == self._address + (slot.start - first.start) * self._itemsize
            and slot.end - first.start <= self._reach
            and grad.dtype == self._grad.dtype
            and grad.is_contiguous()
        )
        if fits:
            self._last = slot
        return fits

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Parameters, gradients and both moments, flat."""
        start, stop = self._first.start, self._last.stop
        if stop - start > self._reach:
            stop = self._last.end  # the gradient has no padding
        param, exp_avg, exp_avg_sq = self._first.arena.run(start, stop)
        grad = _flat(self._grad, self._offset, self._offset + stop - start)
        return param, grad, exp_avg, exp_avg_sq


def _active(slots: list[_Slot], states: dict[Tensor, Any]) -> list[_Slot]:
    """Those of `slots` that have a gradient. Their states are in the arenas then."""
    active = [slot for slot in slots if slot.param.grad is not None]
    for slot in active:
        if slot.param.grad.layout is not torch.strided:  # type: ignore[union-attr]
            raise ValueError(f"AdamW: gradients must be dense, got a {slot.param.grad.layout} gradient")  # type: ignore[union-attr]
        if not slot.holds(states.get(slot.param)):
            slot.adopt(states)
    return active


def _runs(slots: list[_Slot], counts: list[float]) -> Iterator[_Run]:
    """Cut `slots`, which are in the order of memory, into runs. Empty parameters have nothing to step."""
    run = None
    for slot in slots:
        grad = slot.param.grad
        if grad is None or slot.start == slot.end:
            continue
        if run is None or not run.extend(slot, grad, counts[slot.row]):
            if run is not None:
                yield run
            run = _Run(slot, grad, counts[slot.row])
    if run is not None:
        yield run


def _step_group(group: Group, runs: Iterator[_Run]) -> None:
    lr = float(group["lr"])
    betas, eps, weight_decay = group["betas"], group["eps"], group["weight_decay"]
    for run in runs:
        adamw(*run.tensors(), step=run.count + 1, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


def _by_storage(slots: list[_Slot]) -> list[list[_Slot]]:
    """The slots of each storage in the order of memory. Storages without memory (no elements) are not one storage."""
    storages: dict[Any, list[_Slot]] = {}
    for slot in slots:
        param = slot.param
        key = (param.untyped_storage().data_ptr() or -1 - slot.row, param.dtype, param.device)
        storages.setdefault(key, []).append(slot)
    return [sorted(slots, key=lambda slot: (slot.start, slot.end)) for slots in storages.values()]


def _settle_borders(neighbours: list[_Slot]) -> None:
    """Let each of the parameters of a storage, in the order of memory, have its padding."""
    for slot, following in pairwise(neighbours):
        if following.start < slot.end:
            raise ValueError(
                f"AdamW: the parameters of shapes {tuple(slot.param.shape)} and {tuple(following.param.shape)} "
                "share memory; give the optimizer one of them"
            )
        slot.include_padding(following.start)
    neighbours[-1].include_padding(round_up(neighbours[-1].end, ALIGN))


def _trained(group: Group) -> list[Tensor]:
    """The parameters of a group that can have gradients; frozen ones have no state."""
    return [param for param in group["params"] if param.requires_grad]


def _check_group(group: Group) -> None:
    lr, betas, eps, weight_decay = (group[name] for name in ("lr", "betas", "eps", "weight_decay"))
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"AdamW: lr must have one element, got shape {tuple(lr.shape)}")
    for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
        if not value >= 0:
            raise ValueError(f"AdamW: {name} must be at least 0, got {value}")
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"AdamW: betas must be two numbers from 0 to below 1, got {betas}")
    for index, param in enumerate(group["params"]):
        if param.requires_grad and not (param.is_contiguous() and param.dtype in _DTYPES):
            raise ValueError(
                f"AdamW: parameter {group.get('param_names', range(index + 1))[index]} of the group must be contiguous "
                f"and of a floating dtype, got {param.dtype}, shape {tuple(param.shape)}, strides {param.stride()}"
            )


def _check_loaded(state: dict[str, Any]) -> None:
    """Refuse what this optimizer would not continue as it was saved, before anything is changed."""
    for group in state["param_groups"]:
        for option, value in _FIXED_OPTIONS.items():
            if group.get(option, value) != value:
                raise ValueError(f"AdamW: the state was saved with {option}={group[option]}, only {value} is supported")
    for param, entry in state["state"].items():
        if isinstance(param, Tensor):
            _check_state(param, entry)


def _check_state(param: Tensor, state: dict[str, Any] | None) -> None:
    """An empty state is right: it is that of a parameter before its first step."""
    if not state:
        return
    if set(state) != set(_STATE):
        raise ValueError(f"AdamW: the state of a parameter must be {', '.join(_STATE)}, got {', '.join(state)}")
    for name in _MOMENTS:
        if state[name].shape != param.shape:
            raise ValueError(f"AdamW: {name} has shape {tuple(state[name].shape)}, its parameter {tuple(param.shape)}")


def _flat(tensor: Tensor, start: int, stop: int) -> Tensor:
    """Elements [start, stop) of the tensor's storage, outside of autograd."""
    return torch.as_strided(tensor.data, (stop - start,), (1,), start)


def _storage_numel(tensor: Tensor) -> int:
    return int(tensor.untyped_storage().nbytes()) // tensor.element_size()
