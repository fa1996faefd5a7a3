"""Module hooks that unshard the units of a module before its forward and reshard them after it.

Every module that owns parameters has hooks, not only the root of each unit. So weights are available in a block that is
called directly, in methods other than `forward`, and in a module that activation checkpointing recomputes. The module
hooks also make the library's saved-tensor hooks the innermost ones, even if the program has entered other saved-tensor
hooks later (`save_on_cpu`, checkpointing).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from operator import attrgetter, is_
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from shardlite.engine.backward import Backward, in_backward
from shardlite.engine.hook_keys import UNSHARD, remove_hooks, set_key
from shardlite.errors import LayoutError, PhaseError
from shardlite.params import ROOT, Shard, Unit, scripts
from shardlite.params.parameters import OTHER_SHAPES
from shardlite.telemetry import profile_label
from shardlite.weights import Gathering, outside_transforms
from shardlite.weights.all_gather import take_over_all
from shardlite.weights.saved_tensors import NO_TRANSFORM, Call, are_innermost, can_push_hooks, pop_hooks, push_hooks

NO_GRAPH = (
    "torch.export and torch.jit.trace record a graph that contains full weights: call them on every rank with the "
    "wrapped module, `model.module`, inside `with model.gathered():`"
)

_NO_FX = (
    "make_fx and torch.func.linearize cannot record the parameters of a wrapped model: use torch.func.jvp in place of "
    "linearize, torch.export in place of make_fx, or record the module after `unwrap()`"
)


@dataclass(frozen=True)
class ParamLocation:
    """Place of a parameter in the model: `module._parameters[attribute]`."""

    name: str
    module: nn.Module
    attribute: str
    param: nn.Parameter


@dataclass(eq=False)
class _Frame:
    """The record of one module whose forward is running."""

    module: nn.Module
    entered: list[Unit] = field(default_factory=list)
    pushed: bool = False
    outermost: bool = False
    """Whether a pass begins and ends with this module."""
    label: AbstractContextManager[object] | None = None
    """The module's label in a profile. `None` if the module is not the root of a unit."""

    thread: int = field(default_factory=get_ident)


class ModuleHooks:
    """The hooks of one wrapped model.

    If `backward.calls` is `None`, full weights are always in memory and autograd may save them.
    """

    def __init__(self, backward: Backward, gatherer: Gathering) -> None:
        self._backward = backward
        self._gatherer = gatherer
        self._calls = backward.calls
        self._needs: Mapping[nn.Module, Sequence[Unit]] = {}
        self._locations: Mapping[Unit, Sequence[ParamLocation]] = {}
        self._names: Mapping[nn.Module, str] = {}
        self._unit_names: Mapping[nn.Module, str] = {}
        self._frames: list[_Frame] = []
        self._depth: dict[Unit, int] = {}
        self._written: dict[Unit, int] = {}
        self._evaluating = False
        self._around = 0  # number of running calls of the wrapped model
        self._thread = get_ident()  # the thread of the pass in progress, or of the latest one

    def install(
        self,
        needs: Mapping[nn.Module, Sequence[Unit]],
        param_locations: Mapping[Unit, Sequence[ParamLocation]],
        roots: Sequence[nn.Module],
        keeps: object,
    ) -> None:
        """Register the hooks.

        `torch.compile` traces hooks together with their module. The hooks of a unit's root module break the graph,
        because the unit must be gathered before its forward. The hooks of modules inside the root module do nothing
        during compilation, because the unit is already unsharded.

        Args:
            needs: the units that each module uses.
            param_locations: places of each unit's parameters.
            roots: the root module of each unit. The first root is the whole model.
            keeps: an object that must live as long as the module, even if the program drops the wrapped model.
        """
        self._needs, self._locations, self._root, self._keeps = needs, param_locations, roots[0], keeps
        self._names = {module: name for root in roots[:1] for name, module in root.named_modules()}
        self._unit_names = {module: self._names[module] or ROOT for module in roots}
        of_roots = _breaking_graphs(self._enter), _breaking_graphs(self._leave)
        of_others = self._hooks_inside()
        for module in needs:
            _register(module, *(of_roots if module in roots else of_others))

    def _hooks_inside(self) -> "tuple[_Hook, _Hook]":
        """Return the hooks of modules inside the root module of a unit, which find the unit unsharded in most calls.

        The hooks are functions and not methods, because `copy.deepcopy` of a module would copy the object of a method.
        """
        frames, depth, needs = self._frames, self._depth, self._needs

        def enter(module: nn.Module, *_: Any) -> None:
            if torch.compiler.is_compiling():
                return
            units = needs.get(module)
            is_ready = (
                units is not None
                and all(map(depth.get, units))
                and frames
                and frames[-1].thread == get_ident()
                and not torch._C._len_torch_dispatch_stack()  # `_enter` refuses some modes
                and self._has_entered(module)
            )
            if not is_ready:
                self._enter(module)

        def leave(module: nn.Module, arguments: Any, outputs: Any) -> Any:
            if torch.compiler.is_compiling() or not frames or frames[-1].module is not module:
                return None
            return self._leave(module, arguments, outputs)

        return enter, leave

    def uninstall(self) -> None:
        """Remove the hooks."""
        for module in self._needs:
            remove_hooks(module, UNSHARD)

    def use(self, unit: Unit) -> bool:
        """Unshard a unit for code outside of the modules that own the unit's weights, until the current pass ends.

        Returns:
            `False` if no pass is in progress. In this case the unit is not unsharded.
        """
        self.check_thread()
        if not in_backward() and (refusal := self._refusal()) is not None:
            raise LayoutError(refusal)
        with outside_transforms():
            if not self._frames and self._around and not in_backward():
                self._begin("code around the forwards of the model", self._root)
            if self._frames:
                self._enter_unit(unit)
                self._frames[0].entered.append(unit)
            elif in_backward():
                self._backward.use(unit)
            else:
                return False
        return True

    @contextmanager
    def around(self) -> Iterator[None]:
        """Allow code inside the block to use weights outside of any module's forward. The first use begins a pass."""
        self._claim()
        pushed = self._calls is not None and not self._frames and can_push_hooks() and push_hooks(self._calls)
        self._around += 1
        try:
            yield
        finally:
            self._around -= 1
            if self._around == 0:
                self.reset()
            if pushed:
                pop_hooks()

    def running(self) -> bool:
        """Return whether a forward or a backward is running."""
        return bool(self._frames or self._around) or in_backward()

    def check_outside(self, call: str) -> None:
        """Raise inside a forward, a backward or `gathered()`."""
        if self.running() or any(unit.users for unit in self._backward.units):
            raise PhaseError(f"{call}: call it outside of forwards, backwards and `gathered()`")

    def recover(self) -> None:
        """Clean up after an exception. Other ranks may wait for this rank in the operation that raised."""
        self.check_thread()
        self._backward.stream.check_closed()
        if self._around == 0:
            self.reset()
        self._backward.repair()

    def reset(self) -> None:
        """Run `_leave` for each module whose post-forward hook did not run because of an interrupt."""
        while self._frames and not in_backward():
            self._leave(self._frames[-1].module)

    def _enter(self, module: nn.Module, *_: Any) -> None:
        units = self._needs.get(module)
        if units is None:
            raise LayoutError(
                "this module is a copy of a wrapped one and does not have its parameters: wrap a second model, and "
                "load it with load_full_state_dict()"
            )
        if (refusal := self._refusal()) is not None:
            if not all(unit.users or not unit.needs_gather for unit in units):
                raise LayoutError(refusal)
            return
        if self._thread != get_ident():
            self._claim()
        if self._frames and all(map(self._depth.get, units)) and self._has_entered(module):
            return  # `_leave` will find no frame of this module, and do nothing
        with outside_transforms():
            if not self._frames and not in_backward():
                frame = self._begin(f"the forward of {self._names[module] or 'the model'}", module)
            else:
                self._frames.append(frame := _Frame(module))  # first: `_leave` undoes it after an error
            for unit in units:
                self._enter_unit(unit)
                frame.entered.append(unit)
        frame.pushed = self._calls is not None and push_hooks(self._calls)
        if module in self._unit_names:
            frame.label = profile_label("recompute" if in_backward() else "forward", self._unit_names[module])
            frame.label.__enter__()

    def _has_entered(self, module: nn.Module) -> bool:
        """Return whether `module` has nothing to do, if an outer forward has already unsharded its units."""
        return (
            self._frames[-1].module is not module  # `_leave` recognizes a frame by its module
            and (self._evaluating or torch.is_grad_enabled() or in_backward())
            and (self._calls is None or are_innermost(self._calls))
        )

    def _leave(self, module: nn.Module, _: Any = None, outputs: Any = None) -> Any:
        """Reshard the units of a module. Return new outputs if the outputs contain parameters, otherwise `None`."""
        if not self._frames or self._frames[-1].module is not module:
            return None  # an outer forward has unsharded the units, or another hook raised before `_enter`
        replaced = _without_params(outputs) if self._frames[-1].outermost else None
        frame = self._frames.pop()
        if frame.label is not None:
            frame.label.__exit__(None, None, None)
        if frame.pushed:
            pop_hooks()
        with outside_transforms():
            try:
                for unit in reversed(frame.entered):
                    self._leave_unit(unit)
            finally:
                if frame.outermost:
                    self._gatherer.passes.end_pass()
        return replaced

    def _refusal(self) -> str | None:
        """Return an error text if the running call keeps weights without gathers, so that units must be unsharded."""
        if torch.compiler.is_exporting() or torch.jit.is_tracing():  # type: ignore[no-untyped-call]
            return NO_GRAPH
        if torch._C._len_torch_dispatch_stack() and torch._C._get_dispatch_mode(_PROXY) is not None:
            raise LayoutError(_NO_FX)
        return None if self._calls is None or can_push_hooks() else NO_TRANSFORM

    def check_thread(self) -> None:
        """Check that no other thread runs the model.

        Raises:
            LayoutError: another thread is inside a forward or a backward of the model.
        """
        if get_ident() in (self._thread, self._backward.thread) or in_backward():
            return  # PyTorch may run a backward on another thread
        if self._frames or self._around or self._backward.thread is not None:
            raise LayoutError(
                "two threads run one ShardLite model at once, but all ranks must gather weights in the same order: "
                "call the model and its methods in one thread, or use a lock around its forwards, backwards and steps"
            )

    @property
    def is_thread_of_model(self) -> bool:
        """Whether this thread has run the latest pass."""
        return get_ident() == self._thread

    def _claim(self) -> None:
        """Record the thread that runs the model. Do nothing in a backward, which PyTorch may run on another thread.

        Raises:
            LayoutError: another thread runs the model.
        """
        self.check_thread()
        if not in_backward():
            self._thread = get_ident()

    def _begin(self, kind: str, module: nn.Module) -> _Frame:
        """Begin a pass with the forward of a module. All passes of one `kind` are expected to use the same units."""
        self._evaluating = not torch.is_grad_enabled()
        self._backward.begin_pass(evaluating=self._evaluating)
        mode = "" if module.training else " in eval mode"
        self._gatherer.begin_forward(f"{kind}{mode}{' without gradients' * self._evaluating}")
        self._frames.append(frame := _Frame(module, outermost=True))
        return frame

    def _enter_unit(self, unit: Unit) -> None:
        depth = self._depth.get(unit, 0)
        if depth == 0:
            there = self._locations[unit]
            found = map(dict.get, map(_table_of, there), map(_attribute_of, there))
            if not all(map(is_, found, map(_param_of, there))):
                self._check_locations(unit)
            unit.check_memory()
            if in_backward():
                if self._calls is not None:
                    self._calls.settle()  # frees the unit whose nodes have just run, before another is gathered
                self._backward.enter(unit)
                self._backward.recomputed(unit)
            elif not self._evaluating:
                self._backward.expect_gradients(unit, recorded=torch.is_grad_enabled())
            self._gatherer.unshard(unit)
            if self._calls is not None:
                self._calls.current[unit] = Call(unit, self._calls)
            self._written[unit] = unit.writes()
        elif not (self._evaluating or torch.is_grad_enabled() or in_backward()):
            self._backward.expect_gradients(unit, recorded=False)
        self._depth[unit] = depth + 1

    def _leave_unit(self, unit: Unit) -> None:
        self._depth[unit] -= 1
        if self._depth[unit]:
            return
        written = unit.was_touched() | (unit.writes() != self._written.pop(unit))
        if written:
            take_over_all(unit)
        if self._calls is not None:
            call = self._calls.current.pop(unit)
            read = call.version
            if written:  # the backward of this forward uses the new weights
                call.version = unit.version()
            if in_backward():
                self._calls.expect_backward(call, read)
        self._gatherer.reshard(unit)

    def _check_locations(self, unit: Unit) -> None:
        """Raise if a parameter of the unit was replaced after wrapping."""
        for location in self._locations[unit]:
            there = location.module._parameters.get(location.attribute)
            if _is_parametrized(location):
                continue
            if there is not location.param and (
                not isinstance(there, Tensor) or isinstance(there, nn.Parameter) or _of_shards(there)
            ):
                raise LayoutError(
                    f"parameter {location.name!r} was replaced after wrapping, so its shards would never be used: "
                    "write into it inside `gathered()` or with `load_full_state_dict()`, or change the module before "
                    f"wrapping. For other shapes {OTHER_SHAPES}"
                )


def param_locations(module: nn.Module, units: Sequence[Unit]) -> dict[Unit, list[ParamLocation]]:
    """Return the places in the model of each unit's parameters. A tied parameter has several places.

    Parameters of TorchScript modules are omitted, because they cannot be replaced.
    """
    never = scripts(module)
    home = {param: unit for unit in units for param in unit.params()}
    found: dict[Unit, list[ParamLocation]] = {unit: [] for unit in units}
    for path, owner in module.named_modules():
        for attribute, param in owner._parameters.items() if owner not in never else ():
            if param is not None and param in home:
                location = ParamLocation(f"{path}.{attribute}".lstrip("."), owner, attribute, param)
                found[home[param]].append(location)
    return found


def _is_parametrized(location: ParamLocation) -> bool:
    """Return whether the module computes a tensor from the parameter in its place (`torch.nn.utils.parametrize`)."""
    lists: Any = location.module._modules.get("parametrizations")
    return lists is not None and location.attribute in lists and lists[location.attribute].original is location.param


def _of_shards(tensor: Tensor) -> bool:
    """Return whether a tensor that replaces a parameter, as in `functional_call`, was computed from shards.

    Gradients of these shards would not be reduced, because shards are not in the model's graph.
    """
    if isinstance(tensor, Shard):
        return True
    seen, left = set(), [tensor.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(getattr(node, "variable", None), Shard):
            return True
        left += [following for following, _ in node.next_functions]
    return False


def _without_params(outputs: Any) -> Any:
    """Return `outputs` with copies in place of parameters, because the parameters are resharded soon.

    Return `None` if the outputs contain no parameters.
    """
    if isinstance(outputs, nn.Parameter):
        return outputs.clone()
    if outputs is None or type(outputs) is Tensor:
        return None
    if not any(isinstance(leaf, nn.Parameter) for leaf in tree_leaves(outputs)):
        return None
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, nn.Parameter) else leaf, outputs)


_Hook = Callable[..., Any]

_table_of, _attribute_of, _param_of = map(attrgetter, ("module._parameters", "attribute", "param"))
"""Functions that return parts of a `ParamLocation`. `map` makes no Python call per parameter with them."""

_PROXY = torch._C._TorchDispatchModeKey.PROXY
"""The dispatch mode in which `make_fx` records a graph."""


def _register(module: nn.Module, enter: _Hook, leave: _Hook) -> None:
    """Register the hooks of one module.

    `leave` is called even if the forward raises, because checkpointing may stop a recomputation by an exception.
    """
    before = module.register_forward_pre_hook(enter, prepend=True)
    after = module.register_forward_hook(leave, always_call=True)
    set_key(module, UNSHARD, (before, after))


def _breaking_graphs(hook: _Hook) -> _Hook:
    reason = "it gathers weights; use torch.export with strict=False, inside `with model.gathered():`"
    disabled: _Hook = torch.compiler.disable(hook, reason=reason)  # type: ignore[no-untyped-call]
    return disabled
