"""Module hooks: entering a module's forward unshards the units whose weights it needs, leaving it reshards them.

Every module that owns parameters has them, not only the roots of units. So a block that is called directly, a method
other than `forward`, or a module recomputed by activation checkpointing finds its weights, and finds our saved-tensor
hooks innermost even where a user's own (`save_on_cpu`, a checkpoint) were entered after ours.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from shardlite.engine.backward import Backward, in_backward
from shardlite.errors import LayoutError
from shardlite.params import OTHER_SHAPES, ROOT, Shard, Unit, scripts
from shardlite.telemetry import profile_label
from shardlite.weights import Call, Gathering, are_innermost, pop_hooks, push_hooks, take_over_all

NO_GRAPH = (
    "torch.export and torch.jit.trace record a graph with whole weights in it: call them with the module that was "
    "wrapped, `model.module`, inside `with model.gathered():`, on every rank"
)


@dataclass(frozen=True)
class ParamLocation:
    """Where the model keeps a parameter: `module._parameters[attribute]`."""

    name: str
    module: nn.Module
    attribute: str
    param: nn.Parameter


@dataclass(eq=False)
class _Frame:
    """One module whose forward is running."""

    module: nn.Module
    entered: list[Unit] = field(default_factory=list)
    pushed: bool = False
    outermost: bool = False
    """Whether a pass began with it, and ends with it."""
    label: AbstractContextManager[object] | None = None
    """Its label in a profile, if its module is a unit's."""


class ModuleHooks:
    """The hooks of one wrapped model; without calls the weights keep their memory, and autograd may save them."""

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
        self._around = 0  # calls of the wrapped model that are running
        self._thread: int | None = None  # that the pass in progress is on

    def install(
        self,
        needs: Mapping[nn.Module, Sequence[Unit]],
        param_locations: Mapping[Unit, Sequence[ParamLocation]],
        roots: Sequence[nn.Module],
        keeps: object,
    ) -> None:
        """Register the hooks: `needs` has the units that each module uses, `roots` the modules where a unit starts.

        The first of them is the whole model. What it `keeps` lives as long as the module, also where a program drops
        the wrapped model.

        A compiled function is traced through its modules' hooks. At the root of a unit the graph is broken, since the
        gather must happen before what follows; below it the unit is unsharded already and the hooks vanish.
        """
        self._needs, self._locations, self._root, self._keeps = needs, param_locations, roots[0], keeps
        self._names = {module: name for root in roots[:1] for name, module in root.named_modules()}
        self._unit_names = {module: self._names[module] or ROOT for module in roots}
        of_roots = _breaking_graphs(self._enter), _breaking_graphs(self._leave)
        of_others = _unless_compiling(self._enter), _unless_compiling(self._leave)
        for module in needs:
            _register(module, *(of_roots if module in roots else of_others))

    def uninstall(self) -> None:
        """Remove the hooks."""
        for module in self._needs:
            for table in _tables(module):
                table.pop(_KEY, None)

    def use(self, unit: Unit) -> bool:
        """Unshard a unit for code outside of the modules that own its weights, until the pass in progress ends.

        Returns:
            Whether there is a pass.
        """
        if not self._frames and self._around and not in_backward():
            self._begin("what is around the forwards of the model", self._root)
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
        """Allow weights to be used inside, outside of any module's forward too: the first use begins a pass."""
        self._claim()
        pushed = self._calls is not None and not self._frames and push_hooks(self._calls)
        self._around += 1
        try:
            yield
        finally:
            self._around -= 1
            if self._around == 0:
                self.reset()
                self._thread = None
            if pushed:
                pop_hooks()

    def running(self) -> bool:
        """Whether a forward or a backward is running."""
        return bool(self._frames or self._around) or in_backward()

    def reset(self) -> None:
        """Forget frames that were left by something stronger than an exception (an interrupt)."""
        while self._frames and not in_backward():
            self._leave(self._frames[-1].module)

    def _enter(self, module: nn.Module, *_: Any) -> None:
        units = self._needs.get(module)
        if units is None:
            raise LayoutError(
                "this module is a copy of a wrapped one, whose parameters it does not have: wrap a second model, and "
                "load it with load_full_state_dict()"
            )
        if torch.compiler.is_exporting() or torch.jit.is_tracing():  # type: ignore[no-untyped-call]
            _check_held(units)
            return
        if self._thread != get_ident():
            self._claim()
        if self._frames and self._has_entered(module, units):
            return  # without a frame, so that `_leave` has nothing to do either
        if not self._frames and not in_backward():
            frame = self._begin(f"the forward of {self._names[module] or 'the model'}", module)
        else:
            self._frames.append(frame := _Frame(module))  # before anything can fail: `_leave` runs in any case
        for unit in units:
            self._enter_unit(unit)
            frame.entered.append(unit)
        frame.pushed = self._calls is not None and push_hooks(self._calls)
        if module in self._unit_names:
            frame.label = profile_label("recompute" if in_backward() else "forward", self._unit_names[module])
            frame.label.__enter__()

    def _has_entered(self, module: nn.Module, units: Sequence[Unit]) -> bool:
        """Whether a forward around that of `module` has done what its units need: a layer inside of a block."""
        return (
            all(map(self._depth.get, units))
            and self._frames[-1].module is not module  # `_leave` finds the frame of a module by the module
            and (self._evaluating or torch.is_grad_enabled() or in_backward())
            and (self._calls is None or are_innermost(self._calls))
        )

    def _leave(self, module: nn.Module, _: Any = None, outputs: Any = None) -> Any:
        """Reshard the units of a module. Return what replaces its outputs, if those have parameters in them."""
        if not self._frames or self._frames[-1].module is not module:
            return None  # a forward around it has its units; or an earlier hook, not ours, failed, and ours never ran
        replaced = _without_params(outputs) if self._frames[-1].outermost else None
        frame = self._frames.pop()
        if frame.label is not None:
            frame.label.__exit__(None, None, None)
        if frame.pushed:
            pop_hooks()
        try:
            for unit in reversed(frame.entered):
                self._leave_unit(unit)
        finally:
            if frame.outermost:
                self._gatherer.end_pass()
                if not self._around:
                    self._thread = None
        return replaced

    def _claim(self) -> None:
        """Note the thread that runs the model. (A backward may run on threads of PyTorch's, one at a time.)

        Raises:
            LayoutError: another one does.
        """
        thread = get_ident()
        if self._thread != thread and not in_backward():
            if self._thread is not None:
                raise LayoutError(
                    "two threads run one ShardLite model at once: its ranks gather weights in one order, which threads "
                    "would mix up. Let one thread run it, or put a lock around its calls"
                )
            self._thread = thread

    def _begin(self, kind: str, module: nn.Module) -> _Frame:
        """Begin a pass with the forward of a module. Passes of one `kind` are expected to be alike."""
        self._evaluating = not torch.is_grad_enabled()
        self._backward.begin_pass(evaluating=self._evaluating)
        mode = "" if module.training else " in eval mode"
        self._gatherer.begin_pass(f"{kind}{mode}{' without gradients' * self._evaluating}")
        self._frames.append(frame := _Frame(module, outermost=True))
        return frame

    def _enter_unit(self, unit: Unit) -> None:
        depth = self._depth.get(unit, 0)
        if depth == 0:
            self._check_locations(unit)
            unit.check_memory()
            if in_backward():
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
        if unit.was_touched() | (unit.writes() != self._written.pop(unit)):
            take_over_all(unit)
            if self._calls is not None:  # what this forward computes from now on, its backward computes with, too
                self._calls.current[unit].version = unit.version()
        if self._calls is not None:
            call = self._calls.current.pop(unit)
            if in_backward():
                self._calls.expect_backward(call)
        self._gatherer.reshard(unit)

    def _check_locations(self, unit: Unit) -> None:
        """Raise if the model no longer holds the parameters that were wrapped."""
        for location in self._locations[unit]:
            there = location.module._parameters.get(location.attribute)
            if there is not location.param and (
                not isinstance(there, Tensor) or isinstance(there, nn.Parameter) or _of_shards(there)
            ):
                raise LayoutError(
                    f"parameter {location.name!r} was replaced after wrapping, so the sharded one would never be used. "
                    "Write into it inside `gathered()` or with `load_full_state_dict()`, or change the module before "
                    f"wrapping it. For other shapes {OTHER_SHAPES}"
                )


def param_locations(module: nn.Module, units: Sequence[Unit]) -> dict[Unit, list[ParamLocation]]:
    """Return where the model keeps each unit's parameters; a tied one is kept in several places.

    What TorchScript modules keep is left out: it cannot be replaced.
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


def _check_held(units: Iterable[Unit]) -> None:
    """Raise unless `gathered()` holds the units: a graph that is recorded has weights in it, and no gathers."""
    if not all(unit.users or not unit.needs_gather for unit in units):
        raise LayoutError(NO_GRAPH)


def _of_shards(tensor: Tensor) -> bool:
    """Whether a tensor, which takes the place of a parameter in `functional_call`, was computed from shards.

    Those are not in the graph of the model: what came to them would not be reduced.
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
    """Return outputs with copies instead of parameters, or `None` if there are none: these are sharded again soon."""
    if isinstance(outputs, nn.Parameter):
        return outputs.clone()
    if outputs is None or type(outputs) is Tensor:
        return None
    if not any(isinstance(leaf, nn.Parameter) for leaf in tree_leaves(outputs)):
        return None
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, nn.Parameter) else leaf, outputs)


_Hook = Callable[..., Any]


_KEY = -1
"""Key of our hooks in the tables of every module, where PyTorch numbers hooks from 0 on. `torch.compile` guards on
keys, and would compile equal blocks again if their hooks had different numbers.
"""


def _register(module: nn.Module, enter: _Hook, leave: _Hook) -> None:
    """Register the hooks of one module.

    `leave` is called even if the forward raises: an early-stopped recomputation leaves its modules by an exception.
    """
    before = module.register_forward_pre_hook(enter, prepend=True)
    after = module.register_forward_hook(leave, always_call=True)
    for table, given in zip(_tables(module), (before.id, after.id, after.id), strict=True):
        rest = dict(table)
        table.clear()
        for number, each in rest.items():
            table[_KEY if number == given else number] = each


def _tables(module: nn.Module) -> tuple[dict[int, Any], ...]:
    """Return where a module keeps hooks that run before, and twice those that run after its forward."""
    return module._forward_pre_hooks, module._forward_hooks, module._forward_hooks_always_called


def _breaking_graphs(hook: _Hook) -> _Hook:
    reason = "it gathers weights; export by torch.export with strict=False, inside `with model.gathered():`"
    disabled: _Hook = torch.compiler.disable(hook, reason=reason)  # type: ignore[no-untyped-call]
    return disabled


def _unless_compiling(hook: _Hook) -> _Hook:
    def eager(module: nn.Module, *arguments: Any) -> Any:
        return None if torch.compiler.is_compiling() else hook(module, *arguments)

    return eager
