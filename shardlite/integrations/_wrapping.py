"""What all bridges do: check the options of `ShardLite`, find the optimizers of a model, and read files on one rank."""

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

from torch.optim import Optimizer

from shardlite.comm import agree
from shardlite.config import launched_ranks
from shardlite.errors import LayoutError, ShardWarning
from shardlite.model import ModelState, ShardLite

_T = TypeVar("_T")

OPTIONS = inspect.signature(ShardLite.__init__).parameters.keys() - {"self", "module", "device"}
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


def check_processes(caller: str, used: int, *, on_cpus: str, shards: bool) -> None:
    """Warn once if a trainer shards nothing, because it uses one process.

    Args:
        caller: the trainer.
        used: the number of processes that the trainer uses together.
        on_cpus: what the trainer needs to use several processes without GPUs.
        shards: whether the model will be sharded.

    Raises:
        LayoutError: a launcher has started more processes. Each would read all data, as if it were alone.
    """
    launched = launched_ranks()
    if launched > used:
        raise LayoutError(
            f"{caller}: {launched} processes were started, and the trainer uses {used}, so each would train as if it "
            f"were alone. Without GPUs the trainer needs {on_cpus}"
        )
    if not shards:
        _warn_once(f"{caller} shards nothing in one process: start the program with torchrun --nproc-per-node N")


@cache
def _warn_once(message: str) -> None:
    warnings.warn(message, ShardWarning, stacklevel=3)


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
