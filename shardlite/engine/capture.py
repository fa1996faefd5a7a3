"""Capture a whole training step in a CUDA graph, and replay the graph: `ShardLite.capture`.

    call 1 .. warmup    the step runs; it records orders, and allocates states
    the next call       the step is captured, which runs nothing; then the graph is replayed
    each later call     inputs are copied, and the graph is replayed

So each call trains exactly one batch. A graph repeats the kernels of the captured step on the same memory, and none of
its Python code. So `_Facts` lists what this code depends on besides its inputs. Facts change on all ranks together.
After a change, the step runs `warmup` times before the next capture. Different inputs need only another capture, even
if one rank alone gets them: the collectives stay the same, so one rank may capture while other ranks replay.
"""

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import partial
from operator import attrgetter
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from shardlite.engine.steps import OptimizerBridge, models_of
from shardlite.errors import LayoutError, PhaseError, ShardLiteError, ShardWarning, check_int
from shardlite.grads import Reducer
from shardlite.params import as_they_are, requires_grad_of

Function = Callable[..., Any]

_trains = attrgetter("training")  # `map` with this function makes no Python call per module

_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), Enum, torch.dtype, torch.device, torch.Generator)
"""Types of the inputs that a graph fixes."""

_REMEDIES = {
    "capturable": "build the optimizer with capturable=True, or use shardlite.AdamW",
    "current_seed": "pass preserve_rng_state=False to torch.utils.checkpoint.checkpoint",
    "enerator": "pass the torch.Generator to the step as an argument",
    "": "in the step, the host must not wait for the GPU, as .item(), float(), print() and `if tensor:` do: return "
    "tensors, and read them after the call",
}
"""What to do, by a part of PyTorch's message."""


class _Facts(NamedTuple):
    """What a step depends on besides its inputs."""

    weights: tuple[int, int]
    """The numbers of changes of the weights, and of calls of `gathered()`."""

    trained: Sequence[bool]
    """`requires_grad` of each parameter."""

    reduction: tuple[object, ...]
    """What gradients are divided by."""

    mode: tuple[object, ...]
    """Whether autograd records, the dtype of autocast if it is on, and whether each module trains."""

    options: Sequence[object]
    """The options of the optimizers."""


class _Graph(NamedTuple):
    """A captured step."""

    replay: Callable[[], None]
    form: object
    """Structure, shapes, dtypes and constants of the inputs."""

    inputs: list[Tensor]
    outputs: Any
    steps: int
    """Number of optimizer steps."""

    gradients: Sequence[tuple[nn.Parameter, Tensor | None]]
    """The gradients before the step, without those that the step has dropped before it could use them."""

    buffers: set[int]
    """Addresses of the gather buffers, which the pool keeps for passes with and without the graph."""


def capture(step: Function, warmup: int, bridge: OptimizerBridge, reducer: Reducer, module: nn.Module) -> Function:
    """Return a function that replays `step` as a CUDA graph, or on a CPU `step` itself. See `ShardLite.capture`."""
    if not callable(step):
        raise TypeError(f"capture(): step must be a function that takes a training step, got {step!r}")
    check_int("capture(): warmup", warmup, 1)
    context = bridge.context
    if not context.streams.on_gpu:
        if context.rank == 0:
            warnings.warn(
                f"capture(): the model is on {context.device.type!r}, which has no CUDA graphs, so the step runs as it "
                "is",
                ShardWarning,
                stacklevel=3,
            )
        return step
    if reducer.diagnose:
        raise LayoutError("capture(): Precision(diagnose=True) reads gradients on the host: wrap without `diagnose`")
    if reducer.adds_parts:
        raise LayoutError(
            "capture(): with order='tree' the host seeds generators for each part: wrap without Route(order='tree')"
        )
    if any(each.flat.states is not None for each in bridge.shards.entries):
        raise LayoutError(
            "capture(): a graph would repeat the copies of the captured step, but not their order with other steps: "
            "wrap without offload"
        )
    transports = [each for each in (context.transport, *context.inline, *context.reducing) if each is not None]
    if found := sorted({type(each).__name__ for each in transports if each.blocking or not each.replays}):
        raise LayoutError(f"capture(): a CUDA graph cannot repeat the messages of {', '.join(found)}: use NCCL")
    return CapturedStep(step, warmup, bridge, reducer, module)


class CapturedStep:
    """A training step that runs as it is at first, and then as a CUDA graph."""

    def __init__(
        self, step: Function, warmup: int, bridge: OptimizerBridge, reducer: Reducer, module: nn.Module
    ) -> None:
        self._step = step
        self._warmup = self._left = warmup
        self._bridge = bridge
        self._context = bridge.context
        self._reducer = reducer
        self._module = module
        self._modules = [*module.modules()]
        self._units = list(dict.fromkeys(each.unit for each in bridge.shards.entries))
        self._facts: _Facts | None = None  # at the end of the latest call; `None` if they are unknown
        self._graph: _Graph | None = None
        self._options: dict[Optimizer, object] = {}  # of each optimizer that the step steps, at its latest step
        self._has_warned = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Take a training step. See `ShardLite.capture`."""
        leaves, structure = tree_flatten((args, kwargs))
        form = (structure, *map(self._form_of, leaves))
        self._prepare()
        self._follow(self._facts_now())
        if self._left:
            return self._run(args, kwargs)
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if self._graph is None or self._graph.form != form:
            together, self._graph = self._graph is None, None  # frees the memory of the former graph
            inputs = [each.clone() for each in given]
            source = iter(inputs)
            leaves = [next(source) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            self._graph = self._captured(tree_unflatten(leaves, structure), form, inputs, together=together)
        return self._replay(self._graph, given)

    # ---- rules ------------------------------------------------------------------------------------------------------

    def _form_of(self, leaf: object) -> object:
        """Return what a graph fixes of an input.

        Raises:
            TypeError, ValueError: a graph would not see changes of this input.
        """
        device = self._context.device
        if isinstance(leaf, Tensor):
            if leaf.device != device or leaf.layout != torch.strided or leaf.requires_grad:
                grad = ", which requires a gradient" * leaf.requires_grad
                raise ValueError(
                    f"captured step: got a tensor with layout {leaf.layout} on {str(leaf.device)!r}{grad}: pass dense "
                    f"tensors without gradients on {str(device)!r}, because a graph reads its inputs from there"
                )
            return leaf.shape, leaf.dtype
        if not isinstance(leaf, _CONSTANTS):
            raise TypeError(
                f"captured step: got a {type(leaf).__name__}, whose changes a graph would not see: pass tensors and "
                "numbers, alone or in lists, tuples and dicts (`dict(batch)` for a batch of Transformers)"
            )
        return type(leaf), leaf

    def _prepare(self) -> None:
        """Clean up after an exception, and check that a step may begin."""
        bridge = self._bridge
        bridge.hooks.check_thread()
        bridge.hooks.reset()
        bridge.hooks.check_outside("captured step")
        bridge.backward.prepare()
        self._check_reduced()
        if bridge.scale.is_next_counted:
            raise PhaseError("captured step: call count_items() inside the step, so that replays count, too")

    def _check_reduced(self) -> None:
        if self._bridge.backward.holds_unreduced or self._bridge.backward.accumulates():
            raise PhaseError(
                "captured step: gradients are accumulated at its begin or end, where each replay would find those of "
                "the capture: accumulate inside the step, with no_sync() around all backwards but the last"
            )

    def _facts_now(self) -> _Facts:
        context, reducer = self._context, self._reducer
        return _Facts(
            weights=(context.version.number, context.version.gathered),
            trained=requires_grad_of(each.param for each in self._bridge.shards.entries),
            reduction=(reducer.counts, reducer.divisor, self._bridge.scale.divides),
            mode=(torch.is_grad_enabled(), self._autocast(), *map(_trains, self._modules)),
            options=[self._options_of(optimizer) for optimizer in self._options],
        )

    def _autocast(self) -> torch.dtype | None:
        kind = self._context.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

    def _options_of(self, optimizer: Optimizer, *, reads: bool = False) -> list[object]:
        """Return the options of an optimizer. If `reads`, the host waits for those that are tensors on the GPU."""

        def value(option: Any) -> object:
            if not isinstance(option, Tensor):
                return option
            return option.data_ptr() if option.device == self._context.device and not reads else option.tolist()

        return [
            {name: len(each) if name == "params" else value(each) for name, each in group.items()}
            for group in optimizer.param_groups
        ]

    def _follow(self, now: _Facts) -> None:
        """Drop the graph if a fact has changed since the latest call."""
        if self._facts == now and (self._graph is None or self._is_valid(self._graph)):
            return
        self._left, self._graph = self._warmup, None
        if self._facts is not None and self._facts.options != now.options and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "captured step: an option of an optimizer has changed, for example its learning rate. A graph fixes "
                f"numbers, so the next {self._warmup} steps run without it. If the learning rate changes often, pass "
                f"it as a tensor: lr=torch.tensor(1e-3, device={str(self._context.device)!r})",
                ShardWarning,
                stacklevel=3,
            )

    def _is_valid(self, graph: _Graph) -> bool:
        """Return whether the memory that the graph uses still exists, and gradients are as before its capture."""
        with as_they_are():
            same = [param.grad is grad for param, grad in graph.gradients]
        return False not in same and graph.buffers <= self._gather_buffers()

    def _gradients(self) -> list[tuple[nn.Parameter, Tensor | None, int]]:
        """Return all parameters, their gradients, and the version counters of the gradients."""
        params = [*self._bridge.shards, *self._module.parameters()]
        params += [param for each in self._options for group in each.param_groups for param in group["params"]]
        with as_they_are():
            return [(param, grad := param.grad, -1 if grad is None else grad._version) for param in params]

    def _gather_buffers(self) -> set[int]:
        lent = (unit.buffer.bytes for unit in self._units if unit.buffer is not None)
        return {memory.data_ptr() for memory in (*lent, *self._bridge.gatherer.spare())}

    # ---- a step without the graph -----------------------------------------------------------------------------------

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Take a step that is not captured."""
        self._facts = None  # until the step has ended
        outputs = self._checked(args, kwargs, reads=True)
        self._left -= 1
        self._facts = self._facts_now()
        return outputs

    def _checked(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, reads: bool) -> Any:
        """Run the step, and check that it can be repeated without its Python code. Return its outputs.

        `reads` is as for `_options_of`.
        """
        number, thread = self._context.version.number, get_ident()

        def note(optimizer: Optimizer, *_: Any) -> None:
            if get_ident() != thread:
                return
            if any(model is not self._bridge for model in models_of(optimizer)):
                raise PhaseError(
                    f"captured step: {type(optimizer).__name__} steps another wrapped model, too: capture a step for "
                    "each model"
                )
            if optimizer not in self._options:
                optimizer.register_load_state_dict_post_hook(partial(_forget, weakref.ref(self)))
            self._options[optimizer] = self._options_of(optimizer, reads=reads)

        hook, scale = register_optimizer_step_pre_hook(note), self._bridge.scale
        try:
            scale.is_repeated = True
            outputs = self._step(*args, **kwargs)
        finally:
            scale.is_repeated = False
            hook.remove()
        self._check_reduced()
        if self._context.version.number == number:
            raise PhaseError(
                "captured step: no optimizer has stepped the model: each call must take a whole step, with forward, "
                "backward and optimizer.step()"
            )
        if any(self._options_of(optimizer, reads=reads) != before for optimizer, before in self._options.items()):
            raise PhaseError(
                "captured step: an option of an optimizer has changed inside the step, and replays would not change "
                "it: call scheduler.step() after the captured step"
            )
        return tree_map_only(Tensor, Tensor.detach, outputs)

    # ---- the graph --------------------------------------------------------------------------------------------------

    def _captured(self, call: tuple[Any, Any], form: object, inputs: list[Tensor], *, together: bool) -> _Graph:
        """Capture the step. `together`: whether all ranks capture now, so that an error is raised on every rank."""
        context, problem, before = self._context, None, self._gradients()
        with self._undone_after_errors(together=together):
            self._bridge.in_backward.announce_change()
            self._bridge.gatherer.settle()
            self._bridge.gatherer.prepare_capture()
            self._bridge.in_backward.mark_stepped()  # the graph must gather all weights, also those that are fresh now
            number, replay, outputs = context.version.number, None, None
            try:
                with context.progress.uncounted():
                    replay, outputs = self._recorded(*call)
            except Exception as error:
                problem = _explained(error)
            if together:
                context.agree("capture()", problem)
            elif problem is not None:
                raise problem
            steps, context.version.number = context.version.number - number, number
        assert replay is not None, "otherwise there was a problem"
        with as_they_are():
            used = [(p, grad) for p, grad, was in before if grad is None or grad is p.grad or grad._version != was]
        return _Graph(replay, form, inputs, outputs, steps, used, self._gather_buffers())

    def _recorded(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Callable[[], None], Any]:
        """Return a function that replays the step, and the outputs that it writes."""
        graph, first, kept = torch.cuda.CUDAGraph(), None, self._kept()
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Generator):
                graph.register_generator_state(leaf)
        # The outer context is for errors: a capture that CUDA has refused leaves its own stream current.
        try:
            with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):
                try:
                    outputs = self._checked(args, kwargs, reads=False)
                except BaseException as error:
                    first = error
                    raise
        except BaseException as error:
            if first in (None, error):
                raise
            raise first from error  # the error of the end of a capture says only that an earlier call failed
        finally:
            del first  # otherwise the error, its traceback and this frame would be a reference cycle
        for name, tensor in self._kept().items():
            if kept.get(name) is not tensor:
                raise PhaseError(
                    f"captured step: {name} was made or replaced in the step, and each replay would begin with the old "
                    "one: change it in place"
                )
        return graph.replay, outputs

    def _kept(self) -> dict[str, Tensor]:
        """Return the tensors that a step leaves to the next step, by description."""
        kept = {f"buffer {name!r}": buffer for name, buffer in self._module.named_buffers()}
        for optimizer in self._options:
            states = tree_leaves(list(optimizer.state.values()))
            kept |= {f"state {i} of {type(optimizer).__name__}": each for i, each in enumerate(states)}
        return {name: each for name, each in kept.items() if isinstance(each, Tensor)}

    @contextmanager
    def _undone_after_errors(self, *, together: bool) -> Iterator[None]:
        """After an error in the block, restore the state from before the block, because captured work has not run."""
        number, bridge, grads = self._context.version.number, self._bridge, self._gradients()
        try:
            yield
        except BaseException:
            bridge.gatherer.abandon_capture()
            bridge.backward.abandon_capture()
            bridge.hooks.reset()
            bridge.backward.repair()
            bridge.backward.forget_forwards()
            bridge.skips.after_step()
            if (steps := bridge.in_backward.steps()) is not None:
                steps.forget()
            with as_they_are():
                for param, grad, _ in grads:
                    param.grad = grad
            self._context.version.number = number
            bridge.in_backward.mark_stepped()
            if together:
                self._left = self._warmup
            raise

    @torch.no_grad()
    def _replay(self, graph: _Graph, given: list[Tensor]) -> Any:
        """Take a step by replaying the graph. Return its outputs, which the next replay overwrites."""
        facts, bridge = self._facts, self._bridge
        assert facts is not None, "there was a step before the capture"
        bridge.in_backward.announce_change()
        bridge.gatherer.settle()
        if given:
            torch._foreach_copy_(graph.inputs, given)
        graph.replay()
        self._context.version.number += graph.steps
        bridge.in_backward.mark_stepped()
        self._facts = facts._replace(weights=(self._context.version.number, self._context.version.gathered))
        return graph.outputs


def _forget(captured: "weakref.ref[CapturedStep]", _: Optimizer) -> None:
    """Capture again, because an optimizer has loaded states."""
    if (step := captured()) is not None:
        step._facts = None


def _explained(error: Exception) -> Exception:
    """Return the error of a capture. An error of PyTorch gets a remedy, any other error is returned unchanged."""
    if isinstance(error, ShardLiteError) or not isinstance(error, RuntimeError):
        return error
    text = str(error)
    remedy = next(remedy for part, remedy in _REMEDIES.items() if part in text)
    refused = PhaseError(f"capture(): a CUDA graph cannot contain this step: {remedy}. PyTorch: {text.splitlines()[0]}")
    refused.__cause__ = error
    return refused
