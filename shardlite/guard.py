"""Watching every optimizer's step, through PyTorch's global hooks.

An optimizer that was built before wrapping holds the module's own parameters, which have no gradients: it would train
nothing, in silence. So its first step is an error. And wrapped models hear of the steps that change them.
"""

from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardlite.errors import LayoutError
from shardlite.shards import Shards

WHOLE_MATRICES = {"Muon", "Adafactor", "LBFGS"}
"""Optimizers of PyTorch that are not elementwise."""

_models: "WeakSet[Shards]" = WeakSet()
_generation = 0  # how many models there have been: what was looked up before the latest is looked up again
_stepping: "WeakKeyDictionary[Optimizer, tuple[int, int, list[ref[Shards]]]]" = WeakKeyDictionary()


def watch(shards: Shards) -> None:
    """Let a model's shards hear of the steps of all optimizers that hold any of them."""
    global _generation
    _models.add(shards)
    _generation += 1


def _before(optimizer: Optimizer, *_: Any) -> None:
    for model in _models_of(optimizer):
        model.before_step()


def _after(optimizer: Optimizer, *_: Any) -> None:
    stepped = [param for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
    for model in _models_of(optimizer):
        model.after_step(stepped)


def _models_of(optimizer: Optimizer) -> list[Shards]:
    """Return the wrapped models that an optimizer steps, looked up again when its parameters or the models change."""
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    known = _stepping.get(optimizer)
    if known is None or known[:2] != (count, _generation):
        known = (count, _generation, [ref(model) for model in _find(optimizer)])
        _stepping[optimizer] = known
    return [model for each in known[2] if (model := each()) is not None]


def _find(optimizer: Optimizer) -> Iterable[Shards]:
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for model in list(_models):
        unsharded = model.names_of_unsharded()
        for wrong in held & unsharded.keys():
            raise LayoutError(
                f"{type(optimizer).__name__} holds the unsharded parameter {unsharded[wrong]!r}, which gets no "
                "gradient: it was built before the model was wrapped. Build it from `model.parameters()` of the "
                "ShardLite model"
            )
        if held & {id(shard) for shard in model}:
            if model.are_parts and type(optimizer).__name__ in WHOLE_MATRICES:
                raise LayoutError(
                    f"{type(optimizer).__name__} computes with whole parameters or all of them together, and would "
                    "train something else on shards: use an elementwise optimizer (SGD, AdamW, ...), or stage 0"
                )
            yield model


register_optimizer_step_pre_hook(_before)
register_optimizer_step_post_hook(_after)
