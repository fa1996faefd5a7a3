"""PyTorch's functions for state dicts of distributed models, told which parameters a wrapped model has.

`get_optimizer_state_dict` and its siblings name an optimizer's parameters by walking through the model's submodules,
whose own parameters are placeholders. A wrapped model is asked itself.
"""

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from torch import nn
from torch.distributed.checkpoint import state_dict as distributed

from shardlite.model import ShardLite

_Walk = Callable[..., Iterator[tuple[str, Any]]]


def _of_wrapped(walk: _Walk) -> _Walk:
    @wraps(walk)
    def entries(model: nn.Module, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        """Yield the names and values of parameters and persistent buffers."""
        if not isinstance(model, ShardLite):
            yield from walk(model, *args, **kwargs)
            return
        shards = dict(model.named_parameters(remove_duplicate=False))
        yield from ((name, shards.get(name, value)) for name, value in model.state_dict().items())

    return entries


def teach() -> None:
    """Let `torch.distributed.checkpoint.state_dict` know wrapped models."""
    walk = distributed._iterate_valid_model_state
    setattr(distributed, "_iterate_valid_model_state", _of_wrapped(walk))  # noqa: B010 (mypy refuses assignment)
