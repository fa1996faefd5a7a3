"""Build and install the engine of one wrapped model, and run the module and its methods with the engine."""

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial, wraps
from inspect import isgenerator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from shardlite.comm import Context
from shardlite.engine.backward import Backward
from shardlite.engine.conversions import allow_conversions, cast_inputs, refuse_conversions, take_inputs_as_they_are
from shardlite.engine.local_shards import Shards
from shardlite.engine.module_buffers import Buffers
from shardlite.engine.module_hooks import ModuleHooks, param_locations
from shardlite.engine.part_loop import PartLoop
from shardlite.engine.steps import InBackwardOptimizer, OptimizerBridge, register_model, unregister_model
from shardlite.engine.uneven_inputs import Join
from shardlite.full import FullParameters
from shardlite.grads import Clipper, Reducer, Skips
from shardlite.grads.flags import SoloGradientFlags
from shardlite.grads.solo import SoloScale
from shardlite.weights import Gatherer
from shardlite.weights.resident import ResidentWeights
from shardlite.wrapping import flats_of, needs
from shardlite.wrapping.allocate import Wrapped, part_of


class Engine(NamedTuple):
    """What drives the units of one wrapped model."""

    bridge: OptimizerBridge
    reducer: Reducer
    full: FullParameters
    join: Join
    parts: PartLoop | None
    buffers: Buffers | None


def connect(wrapped: Wrapped, model: Callable[[], Any], judge: Callable[[OptimizerBridge, Optimizer], None]) -> Engine:
    """Build the engine from the bottom up (weights, gradients, hooks, optimizers), and install it.

    `model` returns the wrapper while it exists. `judge` is called before an optimizer that holds shards first steps.
    """
    module, units, context, options = wrapped.module, wrapped.units, wrapped.context, wrapped.options
    diagnose, parts, alone = options.precision.diagnose, options.route.parts, wrapped.placement.single_rank
    flats = flats_of(units)
    gatherer: Gatherer | ResidentWeights
    if wrapped.placement.permanent:
        gatherer = ResidentWeights(units, context)
    else:
        gatherer = Gatherer(units, context, prefetch=options.prefetch)
    full = FullParameters(module, units, context, gatherer, options.ignored)
    shards = Shards(units, context.trace)
    in_backward = InBackwardOptimizer(shards, gatherer)
    loop = None if parts is None else PartLoop(parts, context)
    reducer = Reducer([] if alone else units, context, stage=options.stage, diagnose=diagnose, parts=parts)
    begin_steps = in_backward.prepare_backward
    backward = Backward(reducer, gatherer, units, context.streams, begin_steps, stream=full.stream, parts=loop)
    results = reducer.results
    flags = SoloGradientFlags(flats, context.device, diagnose=diagnose) if alone else results
    explain, note = results.options.check, results.options.note
    bridge = OptimizerBridge(
        model=model,
        shards=shards,
        scale=SoloScale(flats, context.device, backward.accumulates) if alone else reducer.scale,
        skips=Skips(flags.nonfinite, context.device, context.rank, explain=explain, warns=not diagnose),
        step_options=results.options,
        clipper=Clipper(flats, context, results.reduced_norm, note, by_blocks=loop is not None),
        context=context,
        ranks=context.ranks,
        in_backward=in_backward,
        backward=backward,
        hooks=ModuleHooks(backward, gatherer),
        gatherer=gatherer,
        place=f"rank {context.rank} of {context.world_size} (stage {options.stage})",
        part=part_of(units),
        judge=judge,
    )
    buffers = Buffers(module, context, options.ignored_modules) if options.buffers == "rank0" else None
    _install(bridge, wrapped)
    return Engine(bridge, reducer, full, Join(context), loop, buffers)


def _install(bridge: OptimizerBridge, wrapped: Wrapped) -> None:
    """Hook the module, its gradients and all optimizers."""
    module, plan, units, options = wrapped.module, wrapped.plan, wrapped.units, wrapped.options
    refuse_conversions(module, options.ignored_modules, options.ignored)
    cast_inputs(plan.dtypes.inputs, plan.dtypes.outside)
    if not wrapped.placement.single_rank:
        modules, roots = needs(module, plan.units, units), [unit.module for unit in plan.units]
        bridge.hooks.install(modules, param_locations(module, units), roots, keeps=bridge)
        bridge.shards.attach(bridge.hooks, bridge.backward)
    bridge.backward.catch_gradients()
    register_model(bridge)


def disconnect(bridge: OptimizerBridge, module: nn.Module, inputs: Iterable[nn.Module]) -> None:
    """Remove everything that `connect` has installed. `inputs` are the modules that cast their inputs."""
    bridge.hooks.uninstall()
    take_inputs_as_they_are(inputs)
    allow_conversions(module)
    unregister_model(bridge)


# ---- calls of the module --------------------------------------------------------------------------------------------

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
    """Return a function that calls a method of the wrapped module in the way its forward is called.

    The method may build an optimizer from the module's own parameters, but an optimizer must step shards. So `adopt` is
    called with each optimizer that the method returns.
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
    """Yield what a generator yields. Its body may use weights as a method may. The code of the caller may not."""
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
