"""What all bridges do: check the options of `ShardLite`, find the optimizers of a model, and read files on one rank."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from torch.optim import Optimizer

from shardlite.comm import agree
from shardlite.model import ModelState, ShardLite

_T = TypeVar("_T")

OPTIONS = inspect.signature(ShardLite.__init__).parameters.keys() - {"self", "module", "device", "deprecated"}
"""Keywords of `ShardLite` that a program passes to a bridge. The device is the trainer's."""


def check_options(caller: str, options: Mapping[str, Any], more: frozenset[str] = frozenset()) -> None:
    """Check the keywords of `ShardLite`. `more`: other keywords that `caller` takes.

    Raises:
        TypeError: a keyword is unknown.
        ValueError: `stage` is not 0, 1, 2 or 3.
    """
    if unknown := options.keys() - OPTIONS - more:
        raise TypeError(f"{caller} got unknown options {sorted(unknown)}: it takes {sorted(OPTIONS | more)}")
    stage = options.get("stage", 3)
    if stage not in range(4):
        raise ValueError(f"{caller} got stage={stage!r}: the stages are 0, 1, 2 and 3")


def bare(optimizer: Any) -> Any:
    """Return the optimizer inside a trainer's wrapper, such as `AcceleratedOptimizer`."""
    return getattr(optimizer, "optimizer", optimizer)


def holds(optimizer: Any, model: ShardLite) -> bool:
    """Return whether an optimizer holds shards of a model."""
    shards = set(model.parameters())
    return any(param in shards for group in optimizer.param_groups for param in group["params"])


def adopt(model: ShardLite, optimizer: Optimizer) -> None:
    """Replace the parameters of a model in an optimizer by their shards, if the optimizer holds any."""
    params = set(model.module.parameters())
    if any(param in params for group in optimizer.param_groups for param in group["params"]):
        model.adopt(optimizer)


@contextmanager
def replaced(target: Any, **values: Any) -> Iterator[None]:
    """Set attributes of an object inside the context."""
    held = {name: vars(target)[name] for name in values if name in vars(target)}
    for name, value in values.items():
        setattr(target, name, value)
    try:
        yield
    finally:
        for name in values:
            if name in held:
                setattr(target, name, held[name])
            else:
                delattr(target, name)


def read_on_first(model: ShardLite, what: str, read: Callable[[], _T]) -> _T | None:
    """Return what `read` returns on the model's first rank, and `None` on other ranks. Collective.

    Raises:
        Exception: `read` has raised it. Raised on the first rank.
        LayoutError: the same, on other ranks.
    """
    return together(model, what, lambda: read() if ModelState(model).context.rank == 0 else None)


def together(model: ShardLite, what: str, act: Callable[[], _T]) -> _T:
    """Return what `act` returns. If it raises on a rank, raise on each rank of the model. Collective.

    Raises:
        Exception: `act` has raised it on this rank.
        LayoutError: `act` has raised an error on another rank.
    """
    state, problem = ModelState(model), None
    try:
        value = act()
    except Exception as error:  # other ranks wait for this rank
        problem = error
    watch = state.context.reports.watching
    agree(state.ranks, [], problem, what=what, timeout=state.context.timeout, watch=watch)
    return value
