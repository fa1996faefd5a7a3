"""Calls of the wrapped module and of its methods, which may use weights.

A call is no part of a compiled graph until the module itself runs.
"""

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial, wraps
from inspect import isgenerator
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from shardlite.comm import Context
from shardlite.engine.module_hooks import ModuleHooks

# `torch.compiler.disable` would import the compiler here. PyTorch's private form imports it at the first call.
uncompiled = torch._disable_dynamo


class _Uncompiled:
    """Exclude a context manager from `torch.compile`."""

    def __init__(self, manager: AbstractContextManager[None]) -> None:
        self._manager = manager

    @uncompiled
    def __enter__(self) -> None:
        self._manager.__enter__()

    @uncompiled
    def __exit__(self, *raised: Any) -> bool | None:
        return self._manager.__exit__(*raised)


@contextmanager
def running(context: Context, hooks: ModuleHooks) -> Iterator[None]:
    """Let code inside the context use the module's weights. Every rank must enter the context."""
    with context.reporting_failures(), _Uncompiled(hooks.around()):
        yield


Running = Callable[[], AbstractContextManager[None]]


def method_of_module(
    method: Callable[..., Any], running: Running, adopt: Callable[[Optimizer], object]
) -> Callable[..., Any]:
    """Return a function that calls a method of the wrapped module as its forward is called.

    The module builds optimizers from its own parameters, but an optimizer must step shards. So `adopt` is called with
    each optimizer that the method returns.
    """

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with running():
            results = method(*args, **kwargs)
        if isgenerator(results):
            return _steps(results, running)
        for each in tree_leaves(results):
            if isinstance(each, Optimizer):
                adopt(each)
        return results

    return call


def _steps(generator: Generator[Any, Any, Any], running: Running) -> Generator[Any, Any, Any]:
    """Yield what a generator yields. Its body runs as a method does, and the code between its steps does not."""
    advance = partial(next, generator)
    while True:
        with running():
            try:
                value = advance()
            except StopIteration as end:
                return end.value
        try:
            advance = partial(generator.send, (yield value))
        except GeneratorExit:
            generator.close()
            raise
        except BaseException as error:
            advance = partial(generator.throw, error)
