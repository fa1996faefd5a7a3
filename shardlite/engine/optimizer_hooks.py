"""Optimizer steps on wrapped models: the components of a model that a step uses, and the hooks of all optimizers.

An optimizer that was built before wrapping, and is not ShardLite's, holds the module's own parameters. These parameters
have no gradients, so the optimizer would silently train nothing. The first step of such an optimizer raises. So does
the first step on shards of an optimizer that is not elementwise (`optim/probe.py`). A wrapped model is notified of each
step that changes the model, and can skip the step.
"""

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

from torch import Tensor, nn
from torch.optim import Optimizer, SparseAdam
from torch.utils._pytree import tree_flatten_with_path, tree_leaves, tree_map_with_path
from torch.utils.weak import WeakTensorKeyDictionary

from shardlite.comm import Context, Ranks
from shardlite.engine.backward import Backward
from shardlite.engine.local_shards import Shards
from shardlite.engine.module_hooks import ModuleHooks
from shardlite.errors import LayoutError, PhaseError, ShardWarning
from shardlite.grads import Clipper, Scale, Skips, Step, StepOptions, Stepping, options_of
from shardlite.optim import (
    RAISES,
    AdamW,
    InBackwardSteps,
    Verdict,
    WholeStateOptimizer,
    adopt,
    probe_shards,
    probe_whole,
    steps_in_backward,
)
from shardlite.params import Flat
from shardlite.weights import Gathering

_NUMBERS = {"step", "mu_product", "eta", "mu"}
"""Names of the values that PyTorch's optimizers keep once per parameter, not once per element."""

# ---- one wrapped model ----------------------------------------------------------------------------------------------


class InBackwardOptimizer:
    """Steps the optimizer of one wrapped model inside the backward, if the optimizer was built with `in_backward`."""

    def __init__(self, shards: Shards, gatherer: Gathering) -> None:
        self._shards = shards
        self._gatherer = gatherer
        self.followers: WeakSet[Any] = WeakSet()
        """Objects that average weights. Their method `before_change()` is called before the trained weights change."""

    def announce_change(self) -> None:
        """Notify followers before the trained weights change. A follower raises if its averages are in the model."""
        for each in self.followers:
            each.before_change()

    def mark_stepped(self) -> None:
        """Record that all shards have changed."""
        self._shards.mark_changed(list(self._shards))
        self._gatherer.expire()

    def steps(self) -> InBackwardSteps | None:
        """Return the steps of the optimizer that steps inside the backward, if there is one.

        Raises:
            LayoutError: several optimizers step inside the backward, or the optimizer lacks parameters of the model.
        """
        return steps_in_backward(self._shards.names)

    def prepare_backward(self, *, steps: bool) -> Stepping | None:
        """Prepare for the first gradient of a backward.

        Return the optimizer's steps, or `None` if no optimizer steps inside this backward.

        Args:
            steps: whether the optimizer may step in this backward.

        Raises:
            PhaseError: an optimizer has stepped in an earlier backward without a call of `step()` since, or a shard
                already has a gradient.
        """
        now = self.steps()
        if now is None:
            return None
        now.ready()
        if not steps:
            return None
        self.announce_change()
        self._shards.check()
        for shard, name in self._shards.names().items():
            if shard.grad is not None:
                raise PhaseError(
                    f"AdamW(in_backward=True) would ignore the gradient that the shard of {name!r} already has: call "
                    "zero_grad() before the backward, and accumulate in no_sync()"
                )
        return Stepping(partial(self._prepare, now), partial(self._end, now))

    def _prepare(self, steps: InBackwardSteps, flat: Flat) -> Step:
        """Prepare the step of one flat."""
        places = zip(flat.trainable_slots, flat.gradient_starts, strict=True)
        step = steps.prepare([(flat.shards[row], start) for row, start in places])
        return Step(step.activate, step, step.fused, step.bad)

    def _end(self, steps: InBackwardSteps, bad: Tensor) -> None:
        """Record that all shards were stepped. `bad` [] is above 0 if a gradient on any rank is not finite."""
        steps.alarm.note(bad)
        self.mark_stepped()

    def check(self) -> None:
        """Check the steps that were taken inside backwards. The host waits for a GPU.

        Raises:
            NonFiniteError: a step has written NaNs into the weights.
        """
        if (steps := self.steps()) is not None:
            steps.alarm.wait()

    def refuse(self, what: str) -> None:
        """Refuse the call `what` if an optimizer steps inside the backward, because the call would have no effect.

        Raises:
            PhaseError: an optimizer steps inside the backward.
        """
        if self.steps() is not None:
            raise PhaseError(
                f"{what}: AdamW(in_backward=True) has already stepped with each gradient and dropped it: use AdamW "
                "without in_backward, or bound updates with AdamW(max_update=...)"
            )


@dataclass(frozen=True, eq=False, kw_only=True)
class OptimizerBridge:
    """Components of one wrapped model that optimizers use."""

    model: Callable[[], Any]
    """The wrapped model, or `None` once it is deleted."""

    shards: Shards
    skips: Skips
    scale: Scale
    clipper: Clipper
    context: Context
    ranks: Ranks
    in_backward: InBackwardOptimizer
    backward: Backward
    hooks: ModuleHooks
    gatherer: Gathering
    step_options: StepOptions
    place: str
    """Description of this rank, the number of ranks and the stage, for messages."""

    optimizers: WeakSet[Optimizer] = field(default_factory=WeakSet)
    """Optimizers that have stepped the model."""

    def before_step(self, optimizer: Optimizer) -> None:
        """Check that a step is valid, and prepare to skip it if gradients are not finite.

        Raises:
            PhaseError: gradients are incomplete, or a step inside the backward has already used the gradients.
        """
        self.optimizers.add(optimizer)
        self.hooks.check_thread()
        self.hooks.reset()
        graded = any(shard.grad is not None for shard in self.shards)
        self.backward.check_step(graded=graded, inside=self.in_backward.steps() is not None)
        if not getattr(optimizer, "in_backward", False):
            self.in_backward.refuse(f"a step of {type(optimizer).__name__}")
        self.scale.before_step()
        self.in_backward.announce_change()
        self.gatherer.settle()
        hooked = bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)
        self.shards.before_step(hooked=hooked)
        self.step_options.note(options_of(optimizer))
        self.skips.before_step(optimizer)

    def after_step(self, stepped: Sequence[Tensor]) -> None:
        """Record that a step has changed the shards in `stepped`."""
        self.context.version.number += 1
        self.skips.after_step()
        self.forget_counts()
        self.clipper.gradients_written()  # fused optimizers divide gradients by the scale of a gradient scaler
        self.shards.after_step(stepped)
        self.gatherer.expire()
        if self.context.ledger.awaits_step:
            self.context.ledger.awaits_step = False
            self.track_memory()

    def track_memory(self) -> None:
        """Track the gradients and the states of optimizers, which PyTorch allocates.

        Call this only in the thread that trains: while a thread drops a gradient, PyTorch gives other threads a pointer
        to freed memory if they read `.grad`.
        """
        for shard in self.shards:
            if shard.grad is not None:
                self.context.ledger.track("gradients", shard.grad)  # of a single rank; others are tracked already
        for tensor in optimizer_tensors(self):
            self.context.ledger.track("optimizer state", tensor)

    def check_reduced(self, what: str, *, local: bool = False) -> None:
        """Refuse the call `what` if gradients are accumulated and not reduced. `local`: whether `.grad` has them.

        Raises:
            PhaseError: gradients are accumulated and not reduced.
        """
        if local or self.backward.holds_unreduced:
            raise PhaseError(
                f"{what}: gradients are accumulated and not reduced yet: call it after the last backward before a "
                "step, outside of no_sync() and parts() (with Accelerate: `if accelerator.sync_gradients`)"
            )

    def forget_counts(self) -> None:
        """Forget the counts of gradients that a step has used, or that `zero_grad()` has dropped."""
        self.scale.forget(accumulates=self.backward.holds_unreduced)

    def mark_changed(self) -> None:
        """Record that all shards were changed on every rank, but not by a step."""
        self.context.version.number += 1  # ranks compare this number to detect a rank that has changed no shards
        self.in_backward.mark_stepped()


# ---- all wrapped models ---------------------------------------------------------------------------------------------

# PyTorch's hooks are global to the process, and so are these tables. They are safe when ranks are threads of one
# process: each entry belongs to a tensor or an optimizer of one rank. An entry is found by identity, and is read or
# written by a single dictionary operation.

_models: "WeakValueDictionary[int, OptimizerBridge]" = WeakValueDictionary()
"""The model of each shard and of each sharded parameter, by the id of the tensor. A model keeps its parameters alive,
so their ids are not reused while the entries exist."""

_adopted: WeakSet[Optimizer] = WeakSet()
"""Optimizers that were built from unsharded parameters, so a group without parameters is no mistake."""

_known: "WeakKeyDictionary[Optimizer, int]" = WeakKeyDictionary()
"""For each optimizer, the number of its parameters at the latest lookup of its models."""

_dense: Any = WeakTensorKeyDictionary()
"""The dense gradients of parameters that SparseAdam is stepping."""

_unwrapped: Any = WeakTensorKeyDictionary()
"""The shards of models that were unwrapped."""


def register_model(model: OptimizerBridge) -> None:
    """Call `model` before and after each step of an optimizer that holds any shard of `model`."""
    for param in model.shards.all_params():
        _models[id(param)] = model
    _known.clear()  # an optimizer may hold parameters that have just been sharded


def model_with_param(param: object) -> OptimizerBridge | None:
    """Return the model that `param`, a shard or one of the module's own parameters, belongs to. `None` if none does."""
    return _models.get(id(param))


def unregister_model(model: OptimizerBridge) -> None:
    """Undo `register_model` for a model that was unwrapped. Later steps of the model's shards raise."""
    for shard in model.shards.by_param().values():
        _unwrapped[shard] = True
    for param in model.shards.all_params():
        _models.pop(id(param), None)
    for optimizer in list(_known):
        vars(optimizer).pop("_shardlite_models", None)
    _known.clear()


def optimizer_tensors(model: OptimizerBridge) -> Iterator[Tensor]:
    """Yield the state tensors of the optimizers that have stepped a model, and the `tables()` of an `AdamW`."""
    for optimizer in model.optimizers:
        tables = optimizer.tables() if isinstance(optimizer, AdamW) else []
        leaves = tree_leaves([*optimizer.state.values(), *tables])
        yield from (leaf for leaf in leaves if isinstance(leaf, Tensor))


def numbers_among(values: Iterable[tuple[str, int, int]]) -> set[str]:
    """Return the names of the values that an optimizer keeps once per parameter, not once per element.

    The state of a parameter with one element does not tell, but the states of larger parameters do.

    Args:
        values: for each value of a state its name, the number of elements of its parameter, and its number of elements.
    """
    return _NUMBERS | {name for name, of_param, of_value in values if of_param != 1 and of_value == 1}


def numbers_of(states: Iterable[tuple[Tensor, Mapping[str, Any]]]) -> set[str]:
    """Return `numbers_among` the values of an optimizer, given parameters and their states."""
    return numbers_among(
        (name_of_value(path), param.numel(), value.numel())
        for param, entry in states
        for path, value in tree_flatten_with_path(dict(entry))[0]
        if isinstance(value, Tensor)
    )


def name_of_value(path: Sequence[Any]) -> str:
    """Return the name of a value in a state: keys and indices, joined by dots."""
    return ".".join(str(getattr(step, "key", getattr(step, "idx", ""))) for step in path)


def map_state(entry: Mapping[str, Any], change: Callable[[str, Any], Any]) -> dict[str, Any]:
    """Return the state of a parameter with `change(name, value)` for each value, also for values inside lists."""
    changed: dict[str, Any] = tree_map_with_path(lambda path, value: change(name_of_value(path), value), dict(entry))
    return changed


def give_shards(optimizer: Optimizer, model: OptimizerBridge, part: Callable[[Tensor, Tensor], Tensor]) -> None:
    """In an optimizer, replace the module's own parameters by their shards, and cut their states.

    Args:
        optimizer: the optimizer. Its groups remain the same objects.
        model: the model of the shards.
        part: `part(param, tensor)` returns the shard's part of a state of `param`, in the shard's shape.

    Raises:
        LayoutError: a state can be neither cut nor kept. The optimizer is unchanged.
    """
    shards = model.shards.by_param()
    if isinstance(optimizer, AdamW):
        adopt(shards, part)
    else:
        held: list[Tensor] = []
        states: dict[Tensor, Any] = {}
        numbers = numbers_of(optimizer.state.items())
        for group in optimizer.param_groups:
            for param in (each for each in group["params"] if each in shards):
                held.append(param)
                if param in optimizer.state:
                    cut = partial(_cut, type(optimizer).__name__, group, param, shards[param], part, numbers)
                    states[shards[param]] = map_state(optimizer.state[param], cut)
        for group in optimizer.param_groups:
            group["params"][:] = [shards.get(param, param) for param in group["params"]]
        for param in held:
            optimizer.state.pop(param, None)
        optimizer.state.update(states)
    _adopted.add(optimizer)
    _known.pop(optimizer, None)


def check_adoptable(optimizer: Optimizer, model: OptimizerBridge) -> list[str]:
    """Return a line for each unsharded parameter of a model: its index, its name, and the shapes of its state.

    Raises:
        LayoutError: the optimizer holds no parameter of the model, or cannot step its shards.
    """
    shards, names = model.shards.by_param(), model.shards.names()
    held = [shards.get(param, param) for param in params_of(optimizer)]
    if not any(shard in names for shard in held):
        raise LayoutError(
            f"adopt: {type(optimizer).__name__} holds no parameter of this ShardLite model: pass an optimizer that was "
            "built from the module's parameters before wrapping"
        )
    _check(optimizer, model, [shard for shard in held if shard in names])
    return [
        f"{type(optimizer).__name__}, parameter {index}, {names[shards[param]]}: "
        f"{_shapes(optimizer.state.get(param, {}))}"
        for index, param in enumerate(params_of(optimizer))
        if param in shards
    ]


def _shapes(state: Mapping[str, Any]) -> list[tuple[str, str]]:
    return sorted((key, str(getattr(value, "shape", ""))) for key, value in state.items())


def _cut(
    owner: str,
    group: dict[str, Any],
    param: Tensor,
    shard: Tensor,
    part: Callable[[Tensor, Tensor], Tensor],
    numbers: Collection[str],
    key: str,
    value: Any,
) -> Any:
    """Return the part of a state of a whole parameter that belongs to its shard, on the shard's device.

    The model may have moved since the optimizer was built. Numbers move as in `Optimizer.load_state_dict`.
    """
    if not isinstance(value, Tensor):
        return value
    if value.shape == param.shape and key not in numbers:
        dtype = shard.dtype if value.dtype == param.dtype else value.dtype  # a shard may be wider than its parameter
        return part(param, value).to(shard.device, dtype, copy=True)  # a copy, so that the whole state can be freed
    if value.numel() == 1:
        return value.to(shard.device) if group.get("capturable") or group.get("fused") else value
    raise LayoutError(
        f"{owner}: state {key!r} of shape {tuple(value.shape)} cannot be cut to the shard of a parameter of shape "
        f"{tuple(param.shape)}: use shardlite.WholeParameters, or stage=0"
    )


def params_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of an optimizer in the order of a saved state."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def models_with(params: Iterable[Tensor]) -> list[OptimizerBridge]:
    """Return the wrapped models whose shards, or sharded parameters, are among `params`."""
    return list(dict.fromkeys([model for param in params if (model := _models.get(id(param))) is not None]))


def models_of(optimizer: Optimizer) -> list[OptimizerBridge]:
    """Return the wrapped models that an optimizer steps. The list is cached until parameters or models change.

    Raises:
        LayoutError, PhaseError: the optimizer cannot step one of the models.
    """
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    if _known.get(optimizer) != count:
        vars(optimizer)["_shardlite_models"] = _find(optimizer)  # this keeps the models alive
        _known[optimizer] = count
    models: list[OptimizerBridge] = vars(optimizer)["_shardlite_models"]
    return models


def model_of_gradients(grads: Sequence[Tensor]) -> tuple[OptimizerBridge | None, set[nn.Parameter]]:
    """Return the wrapped model whose shards have the gradients `grads`, or `None`, and these shards.

    Raises:
        LayoutError: the gradients belong to several models, or only some of them belong to a wrapped model.
    """
    wanted = {id(grad) for grad in grads}  # a gradient does not refer to its parameter, so search all shards
    living = (model for each in _models.valuerefs() if (model := each()) is not None)
    for model in dict.fromkeys(living):  # `fromkeys` makes a snapshot: other threads may add models
        shards = {shard for shard in model.shards if shard.grad is not None and id(shard.grad) in wanted}
        if len(shards) == len(wanted) and shards:
            return model, shards
        if shards:
            raise LayoutError(
                "the gradient norm of a wrapped model is computed over all ranks, but "
                f"{len(wanted) - len(shards)} of {len(wanted)} gradients do not belong to the model: clip each model "
                "separately; `clip_grad_norm_` of the wrapped model leaves out its ignored parameters"
            )
    return None, set()


# ---- steps ----------------------------------------------------------------------------------------------------------


def before_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Prepare a step. If the step has a closure, prepare the step after the closure. `args[0]` is `optimizer`.

    Returns:
        New arguments for the step, or `None` to keep the given arguments.
    """
    models = models_of(optimizer)
    closure = kwargs.get("closure", next(iter(args[1:]), None))
    if models and callable(closure):

        def with_preparation() -> Any:
            loss = closure()
            before_step(optimizer, (optimizer,), {})
            return loss

        return (optimizer, *args[2:]), {**kwargs, "closure": with_preparation}
    for model in models:
        model.before_step(optimizer)
    if models and isinstance(optimizer, AdamW) and optimizer.max_norm is not None:
        optimizer.norm = _norm_for(optimizer, models)
    if isinstance(optimizer, SparseAdam):
        _make_sparse(optimizer)
    return None


def after_step(optimizer: Optimizer, *_: Any) -> None:
    """Record which parameters a step has changed."""
    for param in params_of(optimizer) if isinstance(optimizer, SparseAdam) else ():
        param.grad = _dense.pop(param, param.grad)
    stepped = [param for param in params_of(optimizer) if param.grad is not None]
    for model in models_of(optimizer):
        model.after_step(stepped)


def _make_sparse(optimizer: Optimizer) -> None:
    """Give wrapped models' gradients the rows that any rank has used. Gradients are dense after their reduction."""
    for param in params_of(optimizer):
        if param.grad is not None and not param.grad.is_sparse and id(param) in _models:
            _dense[param] = param.grad
            param.grad = param.grad.to_sparse(1)


def _norm_for(optimizer: Optimizer, models: Sequence[OptimizerBridge]) -> Tensor:
    """Return the global norm [] for an optimizer that clips inside its step."""
    shards, held = set(models[0].shards), set(params_of(optimizer))
    if len(models) > 1 or held - shards:
        raise LayoutError(
            f"{type(optimizer).__name__}(max_norm=...) clips by the norm of one wrapped model, but holds parameters "
            "outside of this model: call clip_grad_norm_ of each model instead"
        )
    return models[0].clipper.norm(2.0, None if held == shards else shards & held)


def _find(optimizer: Optimizer) -> list[OptimizerBridge]:
    """Return the wrapped models whose parameters an optimizer holds. Raise if the optimizer cannot step a model."""
    params = params_of(optimizer)
    if any(param in _unwrapped for param in params):
        raise PhaseError(
            f"{type(optimizer).__name__} holds shards of a ShardLite model that was unwrapped: build it from "
            "`parameters()` of the module that unwrap() returned"
        )
    models = models_with(params)
    for model in models:
        _check(optimizer, model, params)
    empty = [index for index, group in enumerate(optimizer.param_groups) if not group["params"]]
    if models and empty and optimizer not in _adopted:
        warnings.warn(
            f"group {empty[0]} of {type(optimizer).__name__} has no parameters. Do not choose parameters by identity "
            "(`id(p)`, `p in ...`), because `parameters()` of the ShardLite model are shards, which are other objects: "
            "choose by name in `named_parameters()`, by `p.ndim`, or by attributes of `p`",
            ShardWarning,
            stacklevel=2,
        )
    return models


def _check(optimizer: Optimizer, model: OptimizerBridge, params: Iterable[Tensor]) -> None:
    """Raise if an optimizer cannot step `params`, some of which belong to a wrapped model."""
    unsharded = model.shards.first_unsharded(params)
    if unsharded is not None:
        raise LayoutError(
            f"{type(optimizer).__name__} holds the unsharded parameter {unsharded!r}, which gets no gradient: build it "
            "from `parameters()` of the ShardLite model, after wrapping, and not from a module in or around this model "
            "(`model.module`, `torch.compile(model)`, `nn.DataParallel(model)`), or call `model.adopt(optimizer)`"
        )
    if isinstance(optimizer, AdamW | WholeStateOptimizer):
        return
    if model.shards.are_split:
        raise LayoutError(
            f"{type(optimizer).__name__} would step only the upper half of split weights "
            '(master="split24"): use shardlite.AdamW, or a master in fp32'
        )
    if not model.shards.are_parts_of(params):
        return
    if isinstance(optimizer, SparseAdam):
        raise LayoutError(
            "SparseAdam cannot step shards, because it steps whole rows: wrap the model with replicate=[embedding], so "
            "that every rank steps the whole table, or use shardlite.AdamW, which needs no sparse gradients"
        )
    _check_elementwise(optimizer)


def _check_elementwise(optimizer: Optimizer) -> None:
    """Raise if an optimizer does not step shards as it would step whole parameters. Warn if this is not known.

    Trial steps find this out. The error is the same on all ranks, because their optimizers have the same options.
    """
    name, verdict = type(optimizer).__name__, probe_shards(optimizer)
    if verdict.same is False:
        raise LayoutError(f"{name} cannot step shards, because {verdict.why}. {_remedy(name, probe_whole(optimizer))}")
    if verdict.same is None:
        warnings.warn(
            f"{name} was not checked, because {verdict.why}. If it is not elementwise, as with a norm of each "
            "parameter, its steps of shards differ from steps of whole parameters, which "
            f"{_whole_parameters(name)} makes",
            ShardWarning,
            stacklevel=2,
        )


def _remedy(name: str, whole: Verdict) -> str:
    """Return how an optimizer that cannot step shards can step whole parameters."""
    if whole.why.startswith(RAISES):
        return "It may require a closure, other gradients, or parameters that belong together. Use stage=0"
    if whole.same is False:
        return (
            f"Neither can shardlite.WholeParameters, because {whole.why}. Use stage=0, where each rank has all whole "
            "parameters. If only a global norm is the reason, turn it off and call clip_grad_norm_() of the model"
        )
    return f"Build {_whole_parameters(name)}, which steps whole parameters, or use stage=0"


def _whole_parameters(name: str) -> str:
    return f"shardlite.WholeParameters(model.parameters(), {name}, ...)"
