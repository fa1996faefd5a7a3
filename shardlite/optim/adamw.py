"""AdamW for the shards of wrapped models: each contiguous run of shards is stepped by one kernel call.

`layout.py` places moments in memory (in buffers called arenas) and finds the runs. `counts.py` counts steps and
computes the scalars of a step. With the option `in_backward`, `in_backward.py` steps each shard as soon as its gradient
is ready. `unsharded.py` steps parameters that are not shards. This file does not know units, ranks or communication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any
from weakref import WeakValueDictionary

import torch
from shardlite_kernels import FORMATS, Hyper
from torch import Tensor
from torch.optim import Optimizer

from shardlite.errors import LayoutError, check_number, check_params
from shardlite.optim.counts import Amp, Group, StepCounts
from shardlite.optim.entries import canonical, check_state, convert, unconverted
from shardlite.optim.in_backward import Alarm, InBackwardSteps
from shardlite.optim.layout import OptimizerLayout
from shardlite.optim.unsharded import check_unsharded, state_of_unsharded, step_unsharded
from shardlite.params import OFFLOADED, ShardInfo, as_they_are

_living: WeakValueDictionary[int, AdamW] = WeakValueDictionary()
"""All `AdamW` objects of the process, by id. Ranks that are threads of the process share the table. A rank finds its
optimizer by the optimizer's parameters.
"""

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

# Options of torch.optim.AdamW that change the result, each with the only supported value.
_FIXED_OPTIONS = {"amsgrad": False, "maximize": False, "differentiable": False, "decoupled_weight_decay": True}
# Options of torch.optim.AdamW that do not change the result.
_FREE_OPTIONS = ("foreach", "fused", "capturable")


class AdamW(Optimizer):
    """AdamW (Loshchilov and Hutter 2019), bit-equal to `torch.optim.AdamW(fused=True)` on the same flat tensors.

    Parameter groups, schedulers and a tensor as `lr` work as in PyTorch. The state has PyTorch's names and shapes, so a
    `state_dict` can be exchanged with `torch.optim.AdamW` in both directions. Parameters that are frozen or have
    no gradient are not stepped, and their step counts do not change.

    Parameters of wrapped models are stepped by ShardLite's kernels. Other parameters (ignored parameters, parameters of
    models that are not wrapped) are stepped by PyTorch's fused kernel, with moments in the parameter's dtype.

    Like PyTorch's fused optimizers, `AdamW` supports `torch.amp.GradScaler`, which sets two attributes for a step. If
    the tensor `found_inf` is not zero, the step has no effect. If the tensor `grad_scale` is not `None`, gradients are
    first divided by this tensor. A step never synchronizes with a GPU.

    Args:
        params: parameters or parameter groups; for a wrapped model, the result of its `parameters()`.
        lr: learning rate, a number or a tensor with one element.
        betas: decay rates of the first and the second moment.
        eps: term added to the root of the second moment.
        weight_decay: decoupled weight decay, multiplied by the learning rate.
        state: format of the moments of shards: `"fp32"` (the parameter's dtype) takes 8 bytes per element, `"bf16"` 4,
            `"int8"` 2.06. Arithmetic is fp32. `shardlite_kernels.moments` describes the rounding. A `state_dict` holds
            fp32 moments for every format, and every format can load it.
        in_backward: step each shard during the backward, as soon as its gradient is ready. One kernel does the last
            addition of a reduction and the step, and no gradient is kept. See `docs/precision.md` for the restrictions.
            Call `step()` after each backward as usual: this call closes the step.
        max_norm: clip gradients to this global norm inside the step, in registers. Gradients are not modified. If the
            reduction computes the norm (see `ShardLite.clip_grad_norm_`), clipping needs no pass over the gradients.
            `grad_norm` is the norm of the latest step. Not allowed with `in_backward`.
        max_update: clamp the magnitude of each element's update to this value before multiplying by the learning rate.
            (Updates are about 1 in steady training.) Unlike clipping by a norm, this needs no pass over gradients.
            Supported for shards only. `None`: no clamping.

    Raises:
        ValueError: a hyper-parameter is out of range, or a parameter's dtype is not a floating dtype or is not
            supported with `state`.

    Example:
        >>> model = ShardLite(model)
        >>> optimizer = AdamW(model.parameters(), lr=1e-4, max_norm=1.0)
        >>> model(x).sum().backward()
        >>> optimizer.step()
    """

    _step_supports_amp_scaling = True
    _layout: OptimizerLayout | None = None  # built on first use, and rebuilt after shards have moved
    in_backward = False
    """Whether steps are taken in the backward."""

    max_norm: float | None = None
    """Norm to which a step clips gradients."""

    grad_norm: Tensor | None = None
    """Global norm [] of the gradients of the latest step, before clipping. `None` without `max_norm`."""

    _moments = "fp32"
    _norm: Tensor | None = None  # see `clip_next_step`

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        state: str = "fp32",
        in_backward: bool = False,
        max_norm: float | None = None,
        max_update: float | None = None,
    ) -> None:
        if state not in FORMATS:
            raise ValueError(f"AdamW: state must be one of {', '.join(FORMATS)}, got {state!r}")
        if max_norm is not None and (in_backward or not check_number("AdamW: max_norm", max_norm) > 0):
            raise ValueError(
                f"AdamW: max_norm must be above 0 and cannot be combined with in_backward, got {max_norm}: the norm of "
                "all gradients is known only after the backward. Use max_update to bound steps in the backward"
            )
        self._moments = state
        self.max_norm = max_norm
        self.in_backward = in_backward
        self._backward_steps = InBackwardSteps(self, create_states)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "max_update": max_update}
        if not isinstance(params, Iterable):
            raise TypeError(f"AdamW: params must be parameters() of the ShardLite model, or groups, got {params!r}")
        super().__init__(params, defaults)
        _living[id(self)] = self

    def add_param_group(self, param_group: Group) -> None:
        """Add a parameter group.

        Args:
            param_group: `params`, and hyper-parameters. The constructor's values replace missing hyper-parameters.

        Raises:
            TypeError: a hyper-parameter is not a number, or `params` is missing. Nothing was added.
            ValueError: a hyper-parameter is out of range, or a parameter's dtype is not supported. Nothing was added.
        """
        check_params("AdamW", param_group)
        super().add_param_group(param_group)
        try:
            _check_group(self.param_groups[-1], self._moments)
        except (TypeError, ValueError):
            del self.param_groups[-1]
            raise
        if self.in_backward:
            self._backward_steps.catch(self.param_groups[-1]["params"])

    def state_dict(self) -> dict[str, Any]:
        """Return the state in the format of PyTorch's AdamW, with moments in fp32.

        The conversion is exact. Converted moments are copies in host memory, because copies may not fit on the GPU.

        Returns:
            `state` and `param_groups`, as for `torch.optim.AdamW`.

        Raises:
            NonFiniteError: a step in a backward has written NaNs into the weights.
        """
        self._backward_steps.alarm.wait()
        saved: dict[str, Any] = super().state_dict()
        saved["state"] = {key: canonical(entry, torch.device("cpu")) for key, entry in saved["state"].items()}
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class or of PyTorch's AdamW. Convert the state to this optimizer's format.

        Args:
            state_dict: the result of `state_dict()` of an optimizer with as many parameters in each group.

        Raises:
            ValueError: the groups or the shapes of moments differ from those of this optimizer.
        """
        super().load_state_dict(unconverted(state_dict))
        self._backward_steps.alarm = Alarm()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copying and pickling."""
        state: dict[str, Any] = super().__getstate__()
        return {**state, "_moments": self._moments, "in_backward": self.in_backward, "max_norm": self.max_norm}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a loaded or unpickled state, and copy the states of shards into the arenas."""
        convert(state)
        check_loaded(state)
        super().__setstate__(state)
        for group in self.param_groups:
            for option in (*_FIXED_OPTIONS, *_FREE_OPTIONS):
                group.pop(option, None)
            group.setdefault("max_update", None)
        if "in_backward" in state:  # this object is a copy, or was unpickled
            self._backward_steps = InBackwardSteps(self, create_states)
            if self.in_backward:
                self._backward_steps.catch(self._params())
        load_entries(self, [(p, entry) for p, entry in self.state.items() if isinstance(p, Tensor) and entry])
        _living[id(self)] = self

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step every parameter that has a gradient.

        Args:
            closure: recomputes the loss and returns it.

        Returns:
            The result of `closure`, or `None` without a closure.

        Raises:
            ValueError: a gradient is sparse, or `max_update` is set for a parameter that is not a shard. In this case,
                no parameter has been stepped.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.in_backward:
            self._backward_steps.close(self)
            return loss
        layout = self._current_layout()
        unsharded = [(group, params) for group in self.param_groups if (params := self._unsharded(group, layout))]
        for group, params in unsharded:
            check_unsharded(group, params, self.state)
        slots = layout.active(self.state)
        # A gradient scaler sets these attributes for the step and deletes them afterwards.
        grad_scale = getattr(self, "grad_scale", None)
        amp = Amp(getattr(self, "found_inf", None), grad_scale, self._clip_factor(grad_scale, bool(slots or unsharded)))
        active: dict[StepCounts, list[int]] = {}
        for slot in slots:
            active.setdefault(slot.counts, []).append(slot.row)
        layout.begin_step(self.param_groups, active, amp)
        for stream, some in layout.in_turn(slots):
            with stream:
                for counts, elements, grad in layout.steps(some, unscale=amp.grad_scale is not None):
                    counts.update(elements, grad)
        for counts in active:
            counts.end_step()
        for group, params in unsharded:
            step_unsharded(group, params, self.state, amp)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients.

        Args:
            set_to_none: whether to set gradients to `None` instead of zero.
        """
        with as_they_are() if set_to_none else nullcontext():  # dropping a gradient need not wait for its step
            super().zero_grad(set_to_none)

    def _unsharded(self, group: Group, layout: OptimizerLayout) -> list[Tensor]:
        """Return the trainable parameters of a group that have a gradient and are not shards."""
        return [p for p in group["params"] if id(p) not in layout.by_id and p.grad is not None and p.requires_grad]

    def _clip_factor(self, grad_scale: Tensor | None, has_gradients: bool) -> Tensor | None:
        """Return the factor [] for gradients, `min(1, max_norm / (norm + 1e-6))`, or `None` without clipping."""
        norm, self._norm = self._norm, None
        if self.max_norm is None or not has_gradients:
            return None
        if norm is None:  # the gradients are summed in the order of `param_groups`, as in PyTorch
            grads = [param.grad for param in self._params() if param.requires_grad and param.grad is not None]
            norm = torch.nn.utils.get_total_norm(grads)
        self.grad_norm = norm if grad_scale is None else norm / grad_scale.to(norm.device)
        return torch.clamp(self.max_norm / (self.grad_norm + 1e-6), max=1.0)

    # ---- layout -------------------------------------------------------------------------------------------------

    def _params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _current_layout(self) -> OptimizerLayout:
        if self._layout is None or not self._layout.fits(self.param_groups):
            for group in self.param_groups:
                _check_params(group, self._moments)
            self._layout = OptimizerLayout(self.param_groups, self.state, self._moments)
            self._layout.adopt([slot for slot in self._layout.slots if self.state.get(slot.param)], self.state)
        return self._layout


# ---- all optimizers of the process ----------------------------------------------------------------------------------


def steps_in_backward(
    names: Callable[[], Mapping[Tensor, str]],
    first_unsharded: Callable[[Iterable[Tensor]], str | None] = lambda _: None,
) -> InBackwardSteps | None:
    """Return the steps of the optimizer that steps shards of a model inside the backward, or `None`.

    `names` returns the name of each shard of the model, and `first_unsharded(params)` that of the first of the module's
    own parameters.

    Raises:
        LayoutError: several such optimizers hold shards of the model, or the optimizer lacks a trainable shard, or
            holds the module's own parameters, which its hooks would step without the other ranks.
    """
    candidates = [optimizer for optimizer in living() if optimizer.in_backward]
    for optimizer in candidates:
        if (name := first_unsharded(optimizer._backward_steps.handles)) is not None:
            raise LayoutError(
                f"AdamW(in_backward=True) holds the unsharded parameter {name!r}: build it from parameters() of the "
                "ShardLite model, or call model.adopt(optimizer)"
            )
    shards = names() if candidates else {}
    found = [optimizer for optimizer in candidates if any(param in shards for param in optimizer._params())]
    if not found:
        return None
    held = set(found[0]._params())
    missing = [name for shard, name in shards.items() if shard.requires_grad and shard not in held]
    if len(found) > 1 or missing:
        what = f"it lacks {missing[0]!r}" if missing else f"there are {len(found)}"
        raise LayoutError(
            "one AdamW(in_backward=True) must hold all trainable parameters of a wrapped model, because no gradients "
            f"remain after the backward: {what}. Use param groups of one optimizer"
        )
    return found[0]._backward_steps


def living() -> list[AdamW]:
    """Return a list, not an iterator, of all optimizers that exist: other threads may create optimizers meanwhile."""
    return [optimizer for each in _living.valuerefs() if (optimizer := each()) is not None]


# ---- what other rooms do with an optimizer --------------------------------------------------------------------------


def clip_next_step(optimizer: AdamW, norm: Tensor) -> None:
    """Let the next step clip by this gradient norm []. Otherwise the step computes the norm."""
    optimizer._norm = norm


def memory_of(optimizer: AdamW) -> dict[str, list[Tensor]]:
    """Return memory by purpose, apart from states on the device.

    For each group of 32 elements, a table has the row of its count and scalars.
    """
    layout = optimizer._layout
    if layout is None:
        return {}
    memory = {"optimizer state": [arena.rows for arena in layout.arenas]}
    if layout.offloaded is not None:
        offloaded = [arena for arena in layout.arenas if arena.states is not None]
        memory[OFFLOADED] = [each for arena in offloaded for each in (arena.avg, arena.sq, arena.exponents)]
        memory["offload buffers"] = [layout.offloaded.memory]
    return memory


def release(optimizer: AdamW, params: Iterable[Tensor]) -> None:
    """Remove the hooks from parameters that shards have replaced in the groups."""
    optimizer._layout = None
    for param in params:
        optimizer._backward_steps.release(param)


def create_states(optimizer: AdamW) -> OptimizerLayout:
    """Create the missing states of all trainable parameters. Return the layout of the shards' states."""
    layout = optimizer._current_layout()
    layout.adopt(layout.slots, optimizer.state)
    for param in optimizer._params():
        if param.requires_grad and id(param) not in layout.by_id and not optimizer.state.get(param):
            optimizer.state[param] = state_of_unsharded(param, {})
    return layout


def load_entries(optimizer: AdamW, entries: Iterable[tuple[Tensor, dict[str, Any]]]) -> None:
    """Load states of parameters in the format of `state_dict()`: `step`, and moments in the parameter's shape.

    Each entry is copied before the next entry is requested, so a generator may create the entries one by one.
    """
    layout = optimizer._current_layout()
    for param, entry in entries:
        check_state(param, entry)
        optimizer.state[param] = entry
        if id(param) in layout.by_id:
            layout.adopt([layout.by_id[id(param)]], optimizer.state)
        else:
            optimizer.state[param] = state_of_unsharded(param, entry, copy=True)


# ---- checks ---------------------------------------------------------------------------------------------------------


def _check_group(group: Group, moments: str) -> None:
    """Check a parameter group of an optimizer with moments in the format `moments`.

    Raises:
        TypeError: a hyper-parameter is not a number.
        ValueError: a hyper-parameter is out of range, or a parameter is invalid.
    """
    betas = group["betas"]
    for name in ("lr", "eps", "weight_decay"):
        if not check_number(f"AdamW: {name}", group[name]) >= 0:
            raise ValueError(f"AdamW: {name} must be at least 0, got {group[name]}")
    pair = [check_number("AdamW: betas", beta) for beta in betas] if isinstance(betas, Iterable) else []
    if len(pair) != 2 or not all(0 <= beta < 1 for beta in pair):
        raise ValueError(f"AdamW: betas must be two numbers from 0 to below 1, got {betas}")
    Hyper(0.0, betas[0], betas[1], 0.0, 0.0).check()
    if group["max_update"] is not None and not check_number("AdamW: max_update", group["max_update"]) > 0:
        raise ValueError(f"AdamW: max_update must be above 0, or None, got {group['max_update']}")
    _check_params(group, moments)


def _check_params(group: Group, moments: str) -> None:
    """Check that the parameters of a group can be stepped.

    Raises:
        ValueError: a parameter has an unsupported dtype.
    """
    for index, param in enumerate(group["params"]):
        if not param.requires_grad:
            continue
        which = f"parameter {group.get('param_names', range(index + 1))[index]} of the group"
        if param.dtype.to_real() not in _DTYPES:
            raise ValueError(f"AdamW: {which} must be of a floating dtype, got {param.dtype}")
        is_narrow = param.dtype != torch.float32 and ShardInfo.of(param).low is None
        if moments != "fp32" and is_narrow and ShardInfo.is_of(param):
            raise ValueError(f"AdamW: state={moments!r} requires fp32 or split weights, but {which} is {param.dtype}")


def check_loaded(state: dict[str, Any]) -> None:
    """Check a loaded state before anything is changed.

    Raises:
        ValueError: the state was saved with an unsupported option, or an entry does not fit its parameter.
    """
    for group in state["param_groups"]:
        for option, value in _FIXED_OPTIONS.items():
            if group.get(option, value) != value:
                raise ValueError(
                    f"AdamW: the state was saved with {option}={group[option]}, but only {value} is supported"
                )
    for param, entry in state["state"].items():
        if isinstance(param, Tensor):
            check_state(param, entry)
