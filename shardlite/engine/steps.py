"""Optimizer steps on wrapped models: the components of a model that a step uses, and the hooks of all optimizers.

A wrapped model is notified of each step that changes the model, and can skip the step. Before the first step of an
optimizer, the model checks the optimizer with a function of `shardlite.optimizers`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

from torch import Tensor, nn
from torch.optim import Optimizer, SparseAdam
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from shardlite.comm import Context, Ranks
from shardlite.engine.backward import Backward
from shardlite.engine.local_shards import Shards
from shardlite.engine.module_hooks import ModuleHooks
from shardlite.errors import LayoutError, PhaseError
from shardlite.grads import Clipper, Skips, StepOptions, Stepping
from shardlite.grads.options import options_of
from shardlite.grads.reduce import Step
from shardlite.grads.scale import Scale
from shardlite.optim import AdamW, InBackwardSteps, clip_next_step, memory_of, steps_in_backward
from shardlite.params import Flat, OffloadedFlat, as_they_are
from shardlite.weights import Gathering

# ---- one wrapped model ----------------------------------------------------------------------------------------------


class InBackwardOptimizer:
    """Steps the optimizer of one wrapped model inside the backward, if the optimizer was built with `in_backward`."""

    def __init__(self, shards: Shards, gatherer: Gathering) -> None:
        self._shards = shards
        self._gatherer = gatherer
        self._offloaded = [flat for flat in shards.flats if isinstance(flat, OffloadedFlat)]
        self.followers: WeakSet[Any] = WeakSet()
        """Objects that average weights. Their method `before_change()` is called before the trained weights change."""

    def end_steps(self) -> None:
        """Order the current stream after steps that still run beside it."""
        for flat in self._offloaded:
            flat.end_step()

    def announce_change(self) -> None:
        """Notify followers before the trained weights change. A follower raises if its averages are in the model."""
        self.end_steps()
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
            LayoutError: such an optimizer holds the module's own parameters instead of shards.
            PhaseError: an optimizer has stepped in an earlier backward without a call of `step()` since, or a shard
                already has a gradient.
        """
        self.end_steps()
        now = steps_in_backward(self._shards.names, self._shards.first_unsharded)
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

    part: Callable[[Tensor, Tensor], Tensor]
    """`part(param, tensor)` returns the shard's part of a tensor of `param`'s shape, in the shard's shape."""

    judge: Callable[["OptimizerBridge", Optimizer], None]
    """Raises before the first step of an optimizer that cannot step this model."""

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
        self.in_backward.end_steps()
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
        with as_they_are():
            grads = [grad for shard in self.shards if (grad := shard.grad) is not None]
        self.context.ledger.track("gradients", *grads)  # of a single rank; others are tracked already
        for optimizer in self.optimizers:
            memory = memory_of(optimizer) if isinstance(optimizer, AdamW) else {}
            named = {each.untyped_storage(): purpose for purpose, tensors in memory.items() for each in tensors}
            leaves = [leaf for leaf in tree_leaves([*optimizer.state.values()]) if isinstance(leaf, Tensor)]
            for storage in dict.fromkeys([*named, *(leaf.untyped_storage() for leaf in leaves)]):
                self.context.ledger.track(named.get(storage, "optimizer state"), storage)

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
        params = params_of(optimizer)
        if any(param in _unwrapped for param in params):
            raise PhaseError(
                f"{type(optimizer).__name__} holds shards of a ShardLite model that was unwrapped: build it from "
                "`parameters()` of the module that unwrap() returned"
            )
        models = models_with(params)
        for model in models:
            model.judge(model, optimizer)
        vars(optimizer)["_shardlite_models"] = models  # this keeps the models alive
        _known[optimizer] = count
    known: list[OptimizerBridge] = vars(optimizer)["_shardlite_models"]
    return known


def forget_models(optimizer: Optimizer) -> None:
    """Look up the models of an optimizer again at its next step, because its parameters were replaced."""
    _known.pop(optimizer, None)


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
        clip_next_step(optimizer, _norm_for(optimizer, models))
    if isinstance(optimizer, SparseAdam):
        _make_sparse(optimizer)
    return None


def after_step(optimizer: Optimizer, *_: Any) -> None:
    """Record which parameters a step has changed."""
    for param in params_of(optimizer) if isinstance(optimizer, SparseAdam) else ():
        param.grad = _dense.pop(param, param.grad)
    with as_they_are():  # a step that runs beside the next forward need not end
        stepped = [param for param in params_of(optimizer) if param.grad is not None]
    for model in models_of(optimizer):
        model.after_step(stepped)


def _make_sparse(optimizer: Optimizer) -> None:
    """Make gradients of wrapped models sparse, because their reduction made them dense."""
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
