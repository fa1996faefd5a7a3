"""Trace the activations and operations of one step with fake tensors, which have real shapes and lifetimes.

The model runs forward and backward once under `FakeTensorMode` on the CPU. Every operator is intercepted, as in
`telemetry.Meter`: the storages of its results are tracked, and its floating-point operations are counted. Hooks on
modules and in the graph, in the same places as the engine's hooks, record when the weights of a unit are used and when
autograd delivers a gradient. Each gradient is dropped immediately.

In: a module of fake tensors, its units, and a function that runs it and returns the loss. Out: a list of `Event`s. The
events do not depend on stage, format or number of ranks, because each rank does the same work on its part of the batch.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from shardlite.engine import in_backward
from shardlite.params import Unit, storage_key
from shardlite.plan.timeline import Event, Kind
from shardlite.telemetry import Ledger
from shardlite.wrapping import UnitPlan, needs

_LIVE = "activations"

_Pair = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


_ON_CPU: dict[Any, Callable[..., int]] = {  # operators that `flop_registry` lacks
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(
        q.shape, k.shape, v.shape
    ),  # type: ignore[no-untyped-call]
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda grad, q, k, v, *_, **__: (
        sdpa_backward_flop_count(grad.shape, q.shape, k.shape, v.shape)  # type: ignore[no-untyped-call]
    ),
}


def trace(
    module: nn.Module, units: Sequence[Unit], plans: Sequence[UnitPlan], loss: Callable[[], Tensor]
) -> list[Event]:
    """Run `loss` forward and backward under the active fake mode, and return the events.

    Args:
        module: a module of fake tensors. The hooks of the trace remain on the module.
        units: the units of the module.
        plans: the plans of the units.
        loss: function that calls the module and returns a scalar [].
    """
    recorder = _Recorder(module)
    _Hooks(recorder.note, needs(module, plans, units), units)
    with recorder:
        result = loss()
        torch.autograd.backward(result)
    recorder.note(Kind.END)  # noted here, while the batch and the loss are alive
    return recorder.events


class _Recorder(TorchDispatchMode):
    """Intercepts every operator. Weights and buffers of the module are not counted: the budget includes them."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[Event] = []
        self._ledger = Ledger()
        self._others = {storage_key(each) for each in (*module.parameters(), *module.buffers())}
        self._most, self._flops = 0, 0.0

    @property
    def live(self) -> int:
        """Bytes in the program's tensors."""
        return self._ledger.current().get(_LIVE, 0)

    def note(self, kind: Kind, unit: int = -1, nbytes: int = 0) -> None:
        """Add an event."""
        now = self.live - nbytes
        self.events.append(Event(kind, unit, nbytes, max(self._most, now), now, self._flops))
        self._most, self._flops = now, 0.0

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func`, and record the bytes of its arguments and results, and its operations."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        for value in tree_leaves((args, kwargs, result)):
            if isinstance(value, Tensor) and storage_key(value) not in self._others:
                self._ledger.track(_LIVE, value)
        self._most = max(self._most, self.live)
        count = flop_registry.get(func._overloadpacket) or _ON_CPU.get(func._overloadpacket)
        self._flops += count(*args, **kwargs, out_val=result) if count else 0
        return result


class _Call:
    """One forward of a unit, and the use of the unit's weights by its backward (see `weights/saved_tensors.py`)."""

    def __init__(self, unit: int, hooks: "_Hooks") -> None:
        self.unit, self.hooks = unit, hooks
        self.handles = 0
        self.uses = False

    def enter(self) -> None:
        """Record that the backward uses the weights, until autograd drops the call's final handle."""
        if not self.uses:
            self.uses = True
            self.hooks.note(Kind.ENTER, self.unit)


class _Handle:
    """The object that the graph of autograd saves in place of a weight."""

    def __init__(self, call: _Call, view: Tensor) -> None:
        self.call, self.view = call, view
        if call.handles == 0:
            call.hooks.live[call.unit].append(call)
        call.handles += 1

    def __del__(self) -> None:
        call = self.call
        call.handles -= 1
        if call.handles == 0:
            call.hooks.live[call.unit].remove(call)
            if call.uses:
                call.uses = False
                call.hooks.note(Kind.LEAVE, call.unit)


class _SavedTensors:
    """Saved-tensor hooks for weights. Other tensors are passed to the hooks that were active before."""

    def __init__(self, hooks: "_Hooks") -> None:
        self.hooks = hooks
        self._outer: _Pair | None = torch._C._autograd._top_saved_tensors_default_hooks(True)

    def pack(self, tensor: Tensor) -> Any:
        """Return the object that the graph saves instead of `tensor`."""
        unit = self.hooks.home.get(storage_key(tensor))
        if unit is not None:
            call = self.hooks.current.get(unit) or _Call(unit, self.hooks)
            return _Handle(call, tensor.detach())
        return tensor.detach() if self._outer is None else self._outer[0](tensor)

    def unpack(self, packed: Any) -> Tensor:
        """Return the tensor that was packed."""
        if isinstance(packed, _Handle):
            self.hooks.open()
            packed.call.enter()
            return packed.view
        view: Tensor = packed if self._outer is None else self._outer[1](packed)
        return view


class _Hooks:
    """Hooks in the same places as the engine's, which record the uses of units and the gradients."""

    def __init__(
        self, note: Callable[..., None], needed: Mapping[nn.Module, Sequence[Unit]], units: Sequence[Unit]
    ) -> None:
        """Register the hooks.

        Args:
            note: function that records an event.
            needed: for each module, the units whose weights the module uses.
            units: all units.
        """
        self.note = note
        self.home = {storage_key(param): unit.index for unit in units for param in unit.params()}
        """The index of the unit to which each storage of weights belongs."""

        self.live: dict[int, list[_Call]] = {unit.index: [] for unit in units}
        """Calls with handles, oldest first."""

        self.current: dict[int, _Call] = {}
        """Calls whose forward is running."""

        self._needed = needed
        self._depth = dict.fromkeys(self.live, 0)
        self._opened = False
        for module in needed:
            module.register_forward_pre_hook(self._before, prepend=True)
            module.register_forward_hook(self._after, always_call=True)
        for unit in units:
            for param in unit.params():
                if param.requires_grad:
                    hook = partial(self._take_gradient, unit.index)
                    param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def open(self) -> None:
        """Record the start of the backward, once."""
        if not self._opened and in_backward():
            self._opened = True
            self.note(Kind.BACKWARD)

    def _take_gradient(self, unit: int, param: Tensor) -> None:
        self.open()
        assert param.grad is not None, "the hook runs after the gradient is stored"
        self.note(Kind.GRADIENT, unit, param.grad.untyped_storage().nbytes())
        param.grad = None

    def _before(self, module: nn.Module, *_: Any) -> None:
        for unit in self._needed[module]:
            if self._depth[unit.index] == 0:
                self.open()
                self.note(Kind.ENTER, unit.index)
                self.current[unit.index] = _Call(unit.index, self)
            self._depth[unit.index] += 1
        ours = _SavedTensors(self)
        torch._C._autograd._push_saved_tensors_default_hooks(ours.pack, ours.unpack)

    def _after(self, module: nn.Module, *_: Any) -> None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
        for unit in reversed(self._needed[module]):
            self._depth[unit.index] -= 1
            if self._depth[unit.index] == 0:
                self._expect_backward(self.current.pop(unit.index))
                self.note(Kind.LEAVE, unit.index)

    def _expect_backward(self, call: _Call) -> None:
        """If the backward recomputes a unit, keep the unit in use until the nodes that need its weights have run."""
        if in_backward():
            if call.handles:
                call.enter()
            earlier = [each for each in self.live[call.unit] if each is not call]
            if earlier:
                earlier[-1].enter()
