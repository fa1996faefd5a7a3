"""Watching every optimizer's step, through PyTorch's global hooks.

An optimizer that was built before wrapping holds the module's own parameters, which have no gradients: it would train
nothing, in silence. So its first step is an error. And wrapped models hear of the steps that change them.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet, ref

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardlite.errors import LayoutError


class Stepped(Protocol):
    """A wrapped model, as far as optimizers concern it."""

    def names_of_unsharded(self) -> dict[int, str]:
        """Return the names of the module's own parameters, by id."""

    def shard_ids(self) -> set[int]:
        """Return the ids of the parameters that an optimizer should hold."""

    def is_sharded(self) -> bool:
        """Return whether a shard may be less than a whole parameter."""

    def before_step(self) -> None:
        """Raise if a step would use wrong gradients."""

    def after_step(self, stepped: Sequence[Tensor]) -> None:
        """Take note that these shards, and perhaps parameters of other models, have changed."""


WHOLE_MATRICES = {"Muon", "Adafactor", "LBFGS"}
"""Optimizers of PyTorch that are not elementwise."""

_models: "WeakSet[Any]" = WeakSet()
_generation = 0  # how many models there have been: what was looked up before the latest is looked up again
_stepping: "WeakKeyDictionary[Optimizer, tuple[int, int, list[ref[Any]]]]" = WeakKeyDictionary()


def watch(model: nn.Module) -> None:
    """Let `model`, which is a `Stepped`, hear of the steps of all optimizers that hold its shards."""
    global _generation
    _models.add(model)
    _generation += 1


def _before(optimizer: Optimizer, *_: Any) -> None:
    for model in _models_of(optimizer):
        model.before_step()


def _after(optimizer: Optimizer, *_: Any) -> None:
    stepped = [param for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
    for model in _models_of(optimizer):
        model.after_step(stepped)


def _models_of(optimizer: Optimizer) -> list[Any]:
    """Return the wrapped models that an optimizer steps, looked up again when its parameters or the models change."""
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    known = _stepping.get(optimizer)
    if known is None or known[:2] != (count, _generation):
        known = (count, _generation, [ref(model) for model in _find(optimizer)])
        _stepping[optimizer] = known
    return [model for each in known[2] if (model := each()) is not None]


def _find(optimizer: Optimizer) -> Iterable[Any]:
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for model in list(_models):
        unsharded = model.names_of_unsharded()
        for wrong in held & unsharded.keys():
            raise LayoutError(
                f"{type(optimizer).__name__} holds the unsharded parameter {unsharded[wrong]!r}, which gets no "
                "gradient: it was built before the model was wrapped. Build it from `model.parameters()` of the "
                "ShardLite model"
            )
        if held & model.shard_ids():
            if model.is_sharded() and type(optimizer).__name__ in WHOLE_MATRICES:
                raise LayoutError(
                    f"{type(optimizer).__name__} computes with whole parameters or all of them together, and would "
                    "train something else on shards: use an elementwise optimizer (SGD, AdamW, ...), or stage 0"
                )
            yield model


register_optimizer_step_pre_hook(_before)
register_optimizer_step_post_hook(_after)
