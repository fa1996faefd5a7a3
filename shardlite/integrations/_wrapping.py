"""Shared by all integrations: check options, hand shards to optimizers, gather weights for callbacks, read files."""

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager, nullcontext
from functools import cache, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardlite import LayoutError, ShardLite, ShardWarning, load_optimizer_state
from shardlite.extend import agree, launched_ranks, models_of, ranks_of

_T = TypeVar("_T")

Original = Callable[..., Any]
"""A function of a trainer that was replaced."""

OPTIONS = inspect.signature(ShardLite.__init__).parameters.keys() - {"self", "module", "device"}
"""Keywords of `ShardLite` that integrations accept. The trainer selects the device."""


def check_options(caller: str, options: Mapping[str, Any], more: Set[str] = frozenset()) -> None:
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


def params_of(optimizer: Any) -> list[Tensor]:
    """Return the parameters of all groups of an optimizer."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def shards_of(params: Iterable[Tensor]) -> dict[Tensor, Tensor]:
    """Return the shard of each sharded parameter of the wrapped models that any of `params` belongs to."""
    pairs: dict[Tensor, Tensor] = {}
    for model in models_of(params):
        own = zip(model.module.parameters(), model.parameters(), strict=True)
        pairs.update((param, shard) for param, shard in own if param is not shard)
    return pairs


def model_of(optimizer: Any) -> ShardLite | None:
    """Return the first wrapped model whose shards or parameters an optimizer holds."""
    return next(iter(models_of(params_of(optimizer))), None)


def adopt(model: ShardLite, optimizer: Optimizer) -> None:
    """Replace the parameters of a model in an optimizer by their shards, if the optimizer holds any. Collective."""
    if not set(params_of(optimizer)).isdisjoint(model.module.parameters()):
        model.adopt(optimizer)


def load_full_state(optimizer: Any, state: Any) -> None:
    """Load the full state of an optimizer, which a run without sharding may have saved. Collective if it has shards.

    Args:
        optimizer: an optimizer of a wrapped model, or any other.
        state: the state. Ranks other than the first may pass `None` if the optimizer has shards.
    """
    model = model_of(optimizer)
    if model is None:
        optimizer.load_state_dict(state)
    else:
        load_optimizer_state(model, bare(optimizer), state)


@contextmanager
def required(integration: str, packages: str, extra: str) -> Iterator[None]:
    """Raise an error that says what to install if an import inside the context fails.

    Raises:
        ModuleNotFoundError: the import failed.
    """
    try:
        yield
    except ImportError as error:
        raise ModuleNotFoundError(
            f"{integration} requires {packages}: pip install 'shardlite[{extra}]'", name=error.name
        ) from error


def gather_in(target: Any, name: str, model: Callable[[], ShardLite | None], *, writeback: bool = False) -> None:
    """Run a method of `target` inside `gathered()` of the model that `model` returns. `None` gathers nothing."""
    vars(target).pop(name, None)
    method = getattr(target, name)

    @wraps(method)
    def gathering(*args: Any, **kwargs: Any) -> Any:
        wrapped = model()
        with nullcontext() if wrapped is None else wrapped.gathered(writeback=writeback), torch.no_grad():
            return method(*args, **kwargs)

    vars(target)[name] = gathering


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
    """Return what `read` returns on the model's first rank, and `None` on others. Collective.

    Raises:
        Exception: `read` has raised it. Raised on the first rank.
        LayoutError: the same, on other ranks.
    """
    return together(model, what, lambda: read() if ranks_of(model).rank == 0 else None)


def together(model: ShardLite, what: str, act: Callable[[], _T]) -> _T:
    """Return what `act` returns. If it raises on a rank, raise on each rank of the model. Collective.

    Raises:
        Exception: `act` has raised it on this rank.
        LayoutError: `act` has raised an error on another rank.
    """
    problem = None
    try:
        value = act()
    except Exception as error:  # other ranks wait for this rank
        problem = error
    agree(model, what, problem=problem)
    return value
