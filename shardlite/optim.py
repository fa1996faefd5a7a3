"""AdamW for parameters that lie in flat buffers: neighbours are stepped together, each run of them by one kernel call.

`slots` knows where parameters and their moments lie, `counts` how many steps they have made and how the next is done.
Nothing here knows about units, ranks or communication.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardlite.counts import Group, StepCounts, counts_for
from shardlite.slots import Slot, check_state, place, runs

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# Options of torch.optim.AdamW: those that change the result, with the one value that is supported, and the others.
_FIXED_OPTIONS = {"amsgrad": False, "maximize": False, "differentiable": False, "decoupled_weight_decay": True}
_FREE_OPTIONS = ("foreach", "fused", "capturable")

_living: WeakSet[AdamW] = WeakSet()


class AdamW(Optimizer):
    """AdamW (Loshchilov and Hutter 2019): the bits of `torch.optim.AdamW(fused=True)` on the same flat tensors.

    Parameter groups, schedulers and a tensor as `lr` work as in PyTorch. States have PyTorch's names and shapes, so a
    `state_dict` can be exchanged with `torch.optim.AdamW` in both directions. A parameter without a gradient is left
    alone and keeps its own step count, and so is a frozen one until it is trainable again.

    Like PyTorch's fused optimizers it works with `torch.amp.GradScaler`, or whoever else sets these two attributes for
    a step: a tensor `found_inf`, with which nothing changes unless it is zero, and a tensor `grad_scale` (or None), by
    which gradients are divided first. A step on a GPU never waits for it.

    Raises:
        ValueError: a hyper-parameter is out of range, or a parameter is not contiguous, overlaps another one, or has
            no floating dtype.
    """

    _step_supports_amp_scaling = True
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
        _living.add(self)

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
        _living.add(self)

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
        # The scaler deletes them after the step.
        found_inf, grad_scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        counted = _by_counts(stepped)
        for counts in counted:
            counts.begin(self.param_groups, found_inf, grad_scale)
        _update(stepped, unscale=grad_scale is not None)
        for counts, rows in counted.items():
            counts.end(rows)
        # The kernels wrote through views that have version counters of their own.
        torch.autograd.graph.increment_version([slot.param for slots in stepped for slot in slots])
        return loss

    def _exchange(self, shards: Mapping[Tensor, nn.Parameter], part: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Hold `shards[param]` instead of `param` from now on; see `adopt`."""
        params = [param for group in self.param_groups for param in group["params"]]
        held = {param: shards[param] for param in params if shards.get(param, param) is not param}
        states: dict[Tensor, Any] = {}
        for param, shard in held.items():
            if param in self.state:
                states[shard] = _part_of_state(param, self.state[param], part)
                check_state(shard, states[shard])
        for group in self.param_groups:
            group["params"][:] = [held.get(param, param) for param in group["params"]]
        for param in held:
            self.state.pop(param, None)
        self.state.update(states)
        self._plan = None if held else self._plan

    def _current_plan(self) -> _Plan:
        if self._plan is None or not self._plan.fits(self.param_groups):
            for group in self.param_groups:
                _check_params(group)
            self._plan = _Plan(self.param_groups, self.state)
            self._plan.adopt(self.state)
        return self._plan


def adopt(shards: Mapping[Tensor, nn.Parameter], part: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Let every `AdamW` that holds parameters of `shards` hold their shards instead, in the same groups and order.

    Group dictionaries stay the same objects, so schedulers go on. A state that exists is cut: `part(param, tensor)`
    returns what of a tensor like `param` belongs to the shard, in the shape of the shard. Doing it again changes
    nothing.

    Raises:
        ValueError: a part has not the shape of its shard; the optimizer at which this happened is unchanged.
    """
    for optimizer in list(_living):
        optimizer._exchange(shards, part)


class _Plan:
    """What stays the same from step to step: where parameters lie, in which order, and where their states are.

    A parameter that is frozen keeps its place if it has a state.
    """

    def __init__(self, groups: Sequence[Group], states: Mapping[Tensor, Any]) -> None:
        self._members = [
            [Slot(param, index) for param in group["params"] if param.requires_grad or states.get(param)]
            for index, group in enumerate(groups)
        ]
        self._slots = [slot for slots in self._members for slot in slots]
        self._params = {slot.param for slot in self._slots}
        _number(self._slots)
        place(self._slots)
        self.groups = [
            sorted(slots, key=lambda slot: (id(slot.arena), slot.start, slot.end)) for slots in self._members
        ]

    def fits(self, groups: Sequence[Group]) -> bool:
        """Whether `groups` have the parameters that this plan was made for, and none of them has moved."""
        if len(groups) != len(self._members):
            return False
        for group, slots in zip(groups, self._members, strict=True):
            params = [param for param in group["params"] if param.requires_grad or param in self._params]
            if len(params) != len(slots):
                return False
            pairs = zip(slots, params, strict=True)
            if not all(slot.param is param and slot.address == param.data_ptr() for slot, param in pairs):
                return False
        return True

    @torch.no_grad()
    def adopt(self, states: dict[Tensor, Any]) -> None:
        """Move all `states` that exist into the arenas."""
        for slot in self._slots:
            if states.get(slot.param) and not slot.holds(states[slot.param]):
                slot.adopt(states)


def _number(slots: Sequence[Slot]) -> None:
    """Give each slot a row of step counts on the device that steps it."""
    by_device: dict[torch.device, list[Slot]] = {}
    for slot in slots:
        by_device.setdefault(slot.param.device, []).append(slot)
    for device, neighbours in by_device.items():
        counts = counts_for(neighbours[0].param)([slot.group for slot in neighbours], device)
        for row, slot in enumerate(neighbours):
            slot.counts, slot.row = counts, row


def _active(slots: Sequence[Slot], states: dict[Tensor, Any]) -> list[Slot]:
    """Those of `slots` that are trainable and have a gradient. Their states are in the arenas then."""
    active = [slot for slot in slots if slot.param.requires_grad and slot.param.grad is not None]
    for slot in active:
        if slot.param.grad.layout is not torch.strided:  # type: ignore[union-attr]
            raise ValueError(f"AdamW: gradients must be dense, got a {slot.param.grad.layout} gradient")  # type: ignore[union-attr]
        if not slot.holds(states.get(slot.param)):
            slot.adopt(states)
    return active


def _by_counts(stepped: Sequence[Sequence[Slot]]) -> dict[StepCounts, list[int]]:
    """The rows of `stepped` in each of the step counts."""
    rows: dict[StepCounts, list[int]] = {}
    for slots in stepped:
        for slot in slots:
            rows.setdefault(slot.counts, []).append(slot.row)
    return rows


def _update(stepped: Sequence[Sequence[Slot]], unscale: bool) -> None:
    """Step the slots of each group, run by run."""
    addresses = {slot.param.grad.data_ptr() for slots in stepped for slot in slots}  # type: ignore[union-attr]
    for group, slots in enumerate(stepped):
        for run in runs(slots):
            for piece in run.pieces(addresses):
                run.first.counts.update(piece, run.first.row, group)
            if unscale:
                run.give_back()


def _part_of_state(param: Tensor, state: Mapping[str, Any], part: Callable[[Tensor, Tensor], Tensor]) -> dict[str, Any]:
    """Copies, so that the arenas of the whole state can go."""
    return {name: (part(param, value) if name != "step" else value).clone() for name, value in state.items()}


def _check_group(group: Group) -> None:
    lr, betas, eps, weight_decay = (group[name] for name in ("lr", "betas", "eps", "weight_decay"))
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"AdamW: lr must have one element, got shape {tuple(lr.shape)}")
    for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
        if not value >= 0:
            raise ValueError(f"AdamW: {name} must be at least 0, got {value}")
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"AdamW: betas must be two numbers from 0 to below 1, got {betas}")
    _check_params(group)


def _check_params(group: Group) -> None:
    for index, param in enumerate(group["params"]):
        if param.requires_grad and param.numel() > 1 and not any(param.stride()):
            raise ValueError(
                f"AdamW: parameter {group.get('param_names', range(index + 1))[index]} of the group is a placeholder "
                "in a wrapped model: build the optimizer from parameters() of the ShardLite model itself"
            )
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
            check_state(param, entry)
