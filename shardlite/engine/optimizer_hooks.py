"""What steps of optimizers do to wrapped models: the records of a model that steps use, and hooks of all steps.

An optimizer that was built before wrapping, and is not ours, holds the module's own parameters, which have no
gradients: it would train nothing, in silence. So its first step is an error. Wrapped models are notified of the steps
that change them, and may have to leave one out.
"""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from shardlite.comm import Context
from shardlite.engine.backward import Backward
from shardlite.engine.local_shards import Shards
from shardlite.engine.module_hooks import ModuleHooks
from shardlite.errors import LayoutError, PhaseError, ShardWarning
from shardlite.grads import Clipper, Skips, Step, Stepping
from shardlite.optim import InBackwardSteps, steps_in_backward
from shardlite.params import Flat
from shardlite.weights import Gathering

WHOLE_MATRICES = {"Muon", "Adafactor", "LBFGS"}
"""Optimizers of PyTorch that are not elementwise."""


# ---- one wrapped model ----------------------------------------------------------------------------------------------


class InBackwardOptimizer:
    """Steps the optimizer of one wrapped model inside the backward, if it was built with `in_backward`."""

    def __init__(self, shards: Shards, gatherer: Gathering) -> None:
        self._shards = shards
        self._gatherer = gatherer
        self.followers: WeakSet[Any] = WeakSet()
        """Averages of the weights. Their `before_change()` is called before the trained weights change."""

    def announce_change(self) -> None:
        """Call followers before the trained weights change. They raise if the model holds other weights now."""
        for each in self.followers:
            each.before_change()

    def mark_stepped(self) -> None:
        """Record that shards were stepped in a backward. The step is counted when it is closed."""
        self._shards.mark_changed(list(self._shards))
        self._gatherer.expire()

    def steps(self) -> InBackwardSteps | None:
        """Return the steps of the optimizer that steps inside the backward, if there is one.

        Raises:
            LayoutError: there are several, or it lacks parameters.
        """
        return steps_in_backward(self._shards.names)

    def prepare_backward(self, *, steps: bool) -> Stepping | None:
        """Prepare for the first gradient of a backward. Return what steps in it, if anything; `steps` if it may.

        Raises:
            PhaseError: an earlier backward has stepped, and its step is not closed.
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
                    f"AdamW(in_backward=True) steps with the gradients of a backward, but the shard of {name!r} has "
                    "a gradient already, which it would ignore: call zero_grad() first, and accumulate in no_sync()"
                )
        return Stepping(partial(self._prepare, now), partial(self._end, now))

    def _prepare(self, steps: InBackwardSteps, flat: Flat) -> Step:
        """Prepare the step of one flat."""
        own = flat.own_range(flat.gradients)
        starts = [slot.within(*own)[0] for slot in flat.gradients.slots]
        step = steps.prepare(
            [(flat.shards[row], start) for row, start in zip(flat.trainable_slots, starts, strict=True)]
        )
        return Step(step.activate, step, step.fused, step.bad)

    def _end(self, steps: InBackwardSteps, bad: Tensor) -> None:
        """Record that shards have changed. `bad` [] is above 0 if any rank has found a NaN or an infinity."""
        steps.alarm.note(bad)
        self.mark_stepped()

    def check(self) -> None:
        """Raise if steps in a backward have left NaNs. The host waits for a GPU.

        Raises:
            NonFiniteError: they have.
        """
        if (steps := self.steps()) is not None:
            steps.alarm.wait()

    def refuse(self, what: str) -> None:
        """Raise if an optimizer steps inside the backward, where `what` has no effect.

        Raises:
            PhaseError: one does.
        """
        if self.steps() is not None:
            raise PhaseError(
                f"{what}: AdamW(in_backward=True) has stepped with each gradient as soon as it was ready, and keeps "
                "none. Use AdamW without in_backward, or bound updates by AdamW(max_update=...)"
            )


@dataclass(frozen=True, eq=False, kw_only=True)
class OptimizerBridge:
    """The parts of one wrapped model that optimizers use."""

    shards: Shards
    skips: Skips
    clipper: Clipper
    context: Context
    in_backward: InBackwardOptimizer
    backward: Backward
    hooks: ModuleHooks
    gatherer: Gathering
    place: str
    """This rank, the number of ranks and the stage, in words."""

    optimizers: WeakSet[Optimizer] = field(default_factory=WeakSet)
    """Optimizers that have stepped the model."""

    def before_step(self, optimizer: Optimizer) -> None:
        """Check that a step is valid, and make it change nothing if gradients are not finite.

        Raises:
            PhaseError: gradients are incomplete, or were used by a step inside the backward.
        """
        self.optimizers.add(optimizer)
        self.hooks.reset()
        graded = any(shard.grad is not None for shard in self.shards)
        self.backward.check_step(graded=graded, inside=self.in_backward.steps() is not None)
        if not getattr(optimizer, "in_backward", False):
            self.in_backward.refuse(f"a step of {type(optimizer).__name__}")
        self.in_backward.announce_change()
        self.gatherer.settle()
        self.shards.check()
        self.skips.before_step(optimizer)

    def after_step(self, stepped: Sequence[Tensor]) -> None:
        """Record which parameters a step has changed."""
        self.context.version.number += 1
        self.skips.after_step()
        self.clipper.gradients_written()  # fused optimizers divide them by the scale of a gradient scaler
        self.shards.after_step(stepped)
        self.gatherer.expire()

    def mark_changed(self) -> None:
        """Record that all shards were changed by other means than a step, on every rank."""
        self.context.version.number += 1  # a rank that did not do the same differs in it, and is detected
        self.in_backward.mark_stepped()


# ---- all wrapped models ---------------------------------------------------------------------------------------------

# PyTorch's hooks are one per process, and so are these tables. They are safe where ranks are threads of a process: each
# entry belongs to tensors or an optimizer of one rank, is found by their identity, and is read or written by one
# operation of a dictionary.

_models: "WeakValueDictionary[int, OptimizerBridge]" = WeakValueDictionary()
"""The model of each shard, and of each parameter that was sharded, by its id. A model keeps its parameters alive, so an
id is that of another object only once the entry is gone."""

_known: "WeakKeyDictionary[Optimizer, int]" = WeakKeyDictionary()
"""For each optimizer the number of its parameters when its models were looked up last."""

_unwrapped: Any = WeakTensorKeyDictionary()
"""The shards of models that were unwrapped."""


def register_model(model: OptimizerBridge) -> None:
    """Call `model` before and after steps of all optimizers that hold any of its shards."""
    for param in model.shards.all_params():
        _models[id(param)] = model
    _known.clear()  # an optimizer may hold parameters that were sharded just now


def unregister_model(model: OptimizerBridge) -> None:
    """Undo `register_model` for a model that is unwrapped: further steps of its shards raise."""
    for shard in model.shards.by_param().values():
        _unwrapped[shard] = True
    for param in model.shards.all_params():
        _models.pop(id(param), None)
    for optimizer in list(_known):
        vars(optimizer).pop("_shardlite_models", None)
    _known.clear()


def optimizer_tensors(model: OptimizerBridge) -> Iterator[Tensor]:
    """Yield the states of the optimizers that have stepped a model and, if they have any, their `tables()`."""
    for optimizer in model.optimizers:
        tables = getattr(optimizer, "tables", list)
        leaves = tree_leaves([*optimizer.state.values(), *tables()])
        yield from (leaf for leaf in leaves if isinstance(leaf, Tensor))


def give_shards(optimizer: Optimizer, model: OptimizerBridge) -> None:
    """Replace the module's own parameters in an optimizer by their shards.

    Raises:
        LayoutError: it has already stepped the module's own parameters.
    """
    shards = model.shards.by_param()
    for group in optimizer.param_groups:
        if any(param in shards and param in optimizer.state for param in group["params"]):
            raise LayoutError(
                f"{type(optimizer).__name__} was built from unsharded parameters and has states for them: build it "
                "from `parameters()` of the ShardLite model"
            )
        group["params"][:] = [shards.get(param, param) for param in group["params"]]
    _known.pop(optimizer, None)


def params_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of an optimizer, in the order in which its states are saved."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def models_with(params: Iterable[Tensor]) -> list[OptimizerBridge]:
    """Return the wrapped models whose shards, or sharded parameters, are among `params`."""
    return list(dict.fromkeys(model for param in params if (model := _models.get(id(param))) is not None))


def models_of(optimizer: Optimizer) -> list[OptimizerBridge]:
    """Return the wrapped models that an optimizer steps, looked up again when its parameters or the models change.

    Raises:
        LayoutError, PhaseError: the optimizer cannot step one of them.
    """
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    if _known.get(optimizer) != count:
        vars(optimizer)["_shardlite_models"] = _find(optimizer)  # they live as long as the optimizer
        _known[optimizer] = count
    models: list[OptimizerBridge] = vars(optimizer)["_shardlite_models"]
    return models


def model_of_gradients(grads: Sequence[Tensor]) -> tuple[OptimizerBridge | None, set[nn.Parameter]]:
    """Return the model whose gradients these are, if any, and the shards that they belong to.

    Raises:
        LayoutError: they are of several models, or only some are of a wrapped one.
    """
    wanted = {id(grad) for grad in grads}  # a gradient does not know its parameter: look at those of all models
    living = (model for each in _models.valuerefs() if (model := each()) is not None)
    for model in dict.fromkeys(living):  # taken at once: other threads may add to the table meanwhile
        shards = {shard for shard in model.shards if shard.grad is not None and id(shard.grad) in wanted}
        if len(shards) == len(wanted) and shards:
            return model, shards
        if shards:
            raise LayoutError(
                "the norm of the gradients of a wrapped model is computed over all ranks, and cannot be combined with "
                f"others: {len(wanted) - len(shards)} of {len(wanted)} gradients are not of the model. Clip each model "
                "separately; `clip_grad_norm_` of the wrapped model leaves out its ignored parameters"
            )
    return None, set()


# ---- steps ----------------------------------------------------------------------------------------------------------


def before_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Prepare a step: at once or, if it has a closure, after the closure. `args[0]` is `optimizer`.

    Returns:
        The arguments to call the step with, or `None` for those that were given.
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
    if models and getattr(optimizer, "clips_by_norm", False):
        optimizer.norm = _norm_for(optimizer, models)  # type: ignore[attr-defined]
    return None


def after_step(optimizer: Optimizer, *_: Any) -> None:
    """Record what a step has changed."""
    stepped = [param for param in params_of(optimizer) if param.grad is not None]
    for model in models_of(optimizer):
        model.after_step(stepped)


def _norm_for(optimizer: Optimizer, models: Sequence[OptimizerBridge]) -> Tensor:
    """Return the global norm [] for an optimizer that clips by itself."""
    shards = set(models[0].shards)
    held = set(params_of(optimizer))
    if len(models) > 1 or held - shards:
        raise LayoutError(
            f"{type(optimizer).__name__}(max_norm=...) clips by the norm of one wrapped model, but holds parameters of "
            f"{'several' if len(models) > 1 else 'it and others'}: call clip_grad_norm_ of each model instead"
        )
    return models[0].clipper.norm(2.0, None if held == shards else shards & held)


def _find(optimizer: Optimizer) -> list[OptimizerBridge]:
    """Return the wrapped models that an optimizer holds parameters of. Raise if it cannot step them."""
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
    if models and empty:
        warnings.warn(
            f"group {empty[0]} of {type(optimizer).__name__} has no parameters. If it was chosen by identity (`id(p)`, "
            "`p in ...`) of the module's own parameters: `parameters()` of the ShardLite model has others, shards, and "
            "`named_parameters()` has them under the same names. Choose by name, by `p.ndim`, or by attributes of `p`",
            ShardWarning,
            stacklevel=2,
        )
    return models


def _check(optimizer: Optimizer, model: OptimizerBridge, params: Iterable[Tensor]) -> None:
    """Raise if an optimizer cannot step `params`, some of which are of a wrapped model."""
    unsharded = model.shards.first_unsharded(params)
    if unsharded is not None:
        raise LayoutError(
            f"{type(optimizer).__name__} holds the unsharded parameter {unsharded!r}, which gets no gradient: it was "
            "built before the model was wrapped, or from a module in or around the ShardLite model "
            "(`nn.DataParallel(model)`, `torch.compile(model)`, `model.module`). Build it from `model.parameters()` of "
            "the ShardLite model"
        )
    if model.shards.are_split and not getattr(optimizer, "steps_split_weights", False):
        raise LayoutError(
            f"{type(optimizer).__name__} would step only the upper part of split weights "
            '(master="split24"): use shardlite.AdamW, or a master in fp32'
        )
    kinds = {kind.__name__ for kind in type(optimizer).__mro__}
    if model.shards.by_param() and "SparseAdam" in kinds:
        raise LayoutError(
            "SparseAdam requires sparse gradients, but gradients of shards are dense, means over all ranks: use AdamW, "
            "or exclude the embedding from sharding by `ignore=[...]`"
        )
    if model.shards.are_parts and kinds & WHOLE_MATRICES:
        raise LayoutError(
            f"{type(optimizer).__name__} computes with whole parameters, or with all of them together, and would "
            "give other results on shards: use an elementwise optimizer (SGD, AdamW, ...), or stage 0"
        )
