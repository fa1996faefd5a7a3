"""Handles, which the autograd graph saves in place of gathered weights.

A view of a full buffer must not be saved for the backward, because another unit may use the buffer before the backward.
Saved-tensor hooks replace the view with a `Handle`, from which the same view can be created again. The handles of one
forward call of a unit belong to a `Call`:

    forward   pack: view -> Handle(call, size, stride, offset)
    backward  unpack: Handle -> the call unshards its unit, which gathers it if necessary -> view
              autograd drops each handle with its node; after the last handle, the call reshards its unit

So a unit is resharded when its last weight has been used. To wait for the unit's gradients would be wrong: if some
weights are frozen, the gradients are complete before the last use of a weight. To wait for the end of the unit's
backward would be wrong too, because a unit may be called twice. In two cases the unit is resharded later, before the
next unit is unsharded:

- A view is still alive, because a compiled function drops its handles before it computes with the views.
- The garbage collector drops the last handle. It runs on any thread, and inside any code of this library.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.autograd.graph import Node, _engine_run_backward

from shardlite.errors import LayoutError
from shardlite.params import Placeholder, Unit, storage_key
from shardlite.params.full_buffer import ViewPlace
from shardlite.params.parameters import is_plain
from shardlite.weights.all_gather import isolated
from shardlite.weights.unshard import Gatherer

_ENGINE = _engine_run_backward.__code__
_LIBRARY = str(Path(__file__).parents[1])

NO_TRANSFORM = (
    "torch.func.grad, vjp, jacrev and hessian of a stage 3 model, or in its forward, would keep weights that are freed "
    "too early, because PyTorch allows no saved-tensor hooks inside them: call them on every rank inside `with "
    "model.gathered():`, or use torch.func.jvp and jacfwd, torch.autograd.grad, or stages 0 to 2"
)


class Call:
    """One forward call of a unit, with the handles that its backward uses."""

    __slots__ = ("calls", "handles", "unit", "uses", "version")

    def __init__(self, unit: Unit, calls: "Calls") -> None:
        self.unit = unit
        self.calls = calls
        self.version = unit.gathered_version
        self.handles = 0
        self.uses = False

    def unshard(self) -> None:
        """Unshard the unit until the last handle is dropped or the backward ends.

        Raises:
            RuntimeError: the weights have changed since the forward. The message begins like PyTorch's own message.
        """
        if not self.uses:
            self.check_version()
            self.calls.settle()
            self.calls.gatherer.unshard(self.unit, binds=False)  # handles need no parameters
            self.uses = True
            self.calls.using.append(self)

    def check_version(self) -> None:
        """Raise `RuntimeError` if the weights have changed since the forward, for example by a step."""
        now = self.unit.version()
        if now != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"weights of unit {self.unit.name!r} are at version {now}; expected version {self.version} instead. "
                "Was the optimizer stepped, or were weights loaded, between this forward and its backward? "
                "AdamW(in_backward=True) steps in every backward outside of `model.no_sync()`"
            )

    def release(self) -> None:
        """Reshard the unit if this call has unsharded it."""
        if self.uses:
            self.uses = False
            self.calls.gatherer.reshard(self.unit)

    def forget_handles(self) -> None:
        """Reshard the unit after its last handle was dropped: now if autograd has dropped the handle, else later."""
        unit = self.unit
        self.calls.live[unit].remove(self)
        if not self.uses:
            return
        # Defer the release if this is the last use but other tensors than the module's parameters view the weights.
        if not _autograd_drops_handle() or (unit.users == 1 and unit.escaped()):
            self.calls.lingering.append(self)
        else:
            self.release()


def _autograd_drops_handle() -> bool:
    """Return whether a backward on this thread, and not code of this library, has dropped the handle."""
    frame = sys._getframe(2).f_back  # of what runs `Handle.__del__`
    while frame is not None and frame.f_code is not _ENGINE:
        if frame.f_code.co_filename.startswith(_LIBRARY):
            return False
        frame = frame.f_back
    return torch._C._current_graph_task_id() != -1


class Handle:
    """A description of one view of a unit's full weights. The view can be created again from this description."""

    __slots__ = ("call", "conj", "neg", "place")

    def __init__(self, call: Call, view: Tensor) -> None:
        self.place: ViewPlace = view.dtype, view.size(), view.stride(), int(view.storage_offset())
        self.conj, self.neg = view.is_conj(), view.is_neg()  # `as_strided` ignores both
        self.call = call
        if call.handles == 0:
            call.calls.live[call.unit].append(call)
        call.handles += 1

    def __del__(self) -> None:
        if not hasattr(self, "call"):
            return  # `__init__` has failed, because the view has no storage
        self.call.handles -= 1
        if self.call.handles == 0:
            self.call.forget_handles()

    def view(self) -> Tensor:
        """Return the view. The weights are gathered again if necessary.

        Raises:
            RuntimeError: the weights have changed since the forward.
        """
        call = self.call
        if not call.uses:
            call.calls.on_use(call.unit)
            call.unshard()
        else:
            call.calls.gatherer.follow(call.unit)
        if call.unit.overwritten:
            call.unit.check_not_overwritten(self.place[3] * self.place[0].itemsize)
        if torch.is_grad_enabled():
            # With `create_graph=True`, autograd records this node too, so the node must save handles again. The hooks
            # are not popped, because after every node the engine restores the state of its thread, hooks included.
            push_hooks(call.calls)
        return self._of_buffer()

    def copy(self) -> Tensor:
        """Return a copy of the view, for code that reads the graph outside of a backward. Collective."""
        self.call.check_version()
        gatherer = self.call.calls.gatherer
        with gatherer.passes.inside_pass(f"a look at unit {self.call.unit.name!r}"):
            gatherer.unshard(self.call.unit)
        try:
            return self._of_buffer().clone()
        finally:
            gatherer.reshard(self.call.unit)

    def _of_buffer(self) -> Tensor:
        buffer = self.call.unit.buffer
        assert buffer is not None, "a unit in use has a buffer"
        kept = buffer.kept_view(self.place)
        if kept is not None and not (self.conj or self.neg):
            return kept
        with isolated():
            view = buffer.view(self.place)
            view = view.conj() if self.conj else view
            return view._neg_view() if self.neg else view


class Kept(tuple[Tensor, int]):
    """A saved tensor that is not a weight, and the version that the tensor must still have in the backward.

    PyTorch does not check the versions of tensors that hooks have packed. The tensor is detached, because a graph that
    held the tensor itself would be a reference cycle and never be freed. (Unlike a dataclass, a tuple is created
    without a Python call.)
    """

    __slots__ = ()


class Calls:
    """The calls of all units of one wrapped model."""

    def __init__(self, gatherer: Gatherer, units: Sequence[Unit], *, on_use: Callable[[Unit], None]) -> None:
        self.gatherer = gatherer
        self.on_use = on_use
        """Function to call before a backward uses a unit's handle."""

        self._sizes = {unit.nbytes for unit in units}
        self.live: dict[Unit, list[Call]] = {unit: [] for unit in units}
        """Calls with handles, oldest first."""

        self.using: list[Call] = []
        """Calls whose units this backward has unsharded."""

        self.lingering: list[Call] = []
        """Calls in `using` whose handles have been dropped although a view of the weights is still alive."""

        self.gathered = 0
        """Number of running `gathered()`. Inside, weights stay in memory without handles."""

        self.transformed = False
        """Whether a function of `torch.func` has saved weights without handles in this `gathered()`."""

        self.current: dict[Unit, Call] = {}
        """Calls whose forward is running."""

    def expect_backward(self, call: Call, read: int) -> None:
        """Keep a unit unsharded after its recomputation inside a backward, until the backward has used the unit.

        With reentrant checkpointing, the nodes of `call` use the unit. Non-reentrant checkpointing discards the
        recomputed graph, so the nodes of an earlier call use the unit. This is the latest of the earlier
        calls, because its backward runs first.
        """
        if call.handles:
            call.unshard()
        earlier = [each for each in self.live[call.unit] if each is not call]
        if earlier:
            if earlier[-1].version == read:
                earlier[-1].version = call.version
            earlier[-1].unshard()

    @contextmanager
    def inside_gathered(self) -> Iterator[None]:
        """Make autograd save handles for computations with parameters inside the block."""
        pushed = push_hooks(self)
        self.gathered += 1
        try:
            yield
        finally:
            self.gathered -= 1
            if pushed:
                pop_hooks()
            if self.transformed and not self.gathered:
                self.transformed = False
                # Later backwards of what was saved without handles must raise, because they would read placeholders.
                for unit in self.live:
                    torch.autograd.graph.increment_version(unit.params())

    def settle(self) -> None:
        """Reshard units whose release was deferred because a view was alive. Call this before a unit is unsharded."""
        lingering, self.lingering = self.lingering, []
        for call in lingering:
            call.release()

    def end_backward(self) -> None:
        """End the uses of handles that outlive the backward (`retain_graph=True`, or an exception)."""
        for call in self.using:
            call.release()
        self.using.clear()
        self.lingering.clear()

    def has_given_up(self, tensor: Tensor) -> bool:
        """Return whether `tensor` views a dropped buffer. A buffer is dropped if the program keeps a view of it."""
        if tensor.untyped_storage().nbytes() not in self._sizes:
            return False
        kept = (each() for unit in self.live for each in unit.escapes)
        return any(each is not None and each._cdata == storage_key(tensor) for each in kept)


class SavedTensorHooks:
    """Saved-tensor hooks that replace weights, and pass every other tensor to the hooks that were active before.

    The other hooks must get the same tensors each time a forward runs, because checkpoints count the tensors that a
    recomputation saves. So these hooks never get a weight, not even a weight in a dropped buffer that the program still
    views.
    """

    def __init__(self, calls: Calls) -> None:
        self.calls = calls
        self._current, self._unit_of = calls.current, calls.gatherer.owners.get
        self._outer: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)  # (pack, unpack), or `None`

    def pack(self, tensor: Tensor) -> Any:
        """Return the object that the graph saves instead of `tensor`."""
        # Sparse tensors and many subclasses have no storage. Gathered weights always have one.
        has_storage = is_plain(type(tensor)) and tensor.layout is torch.strided
        # The key is the `storage_key`, without a call.
        if has_storage and (unit := self._unit_of(tensor.untyped_storage()._cdata)) is not None:
            # A view that is saved outside of any forward gets a new call.
            return Handle(self._current.get(unit) or Call(unit, self.calls), tensor)
        is_weight = self.calls.gatherer.has_dropped and has_storage and self.calls.has_given_up(tensor)
        if self._outer is not None and not is_weight:
            return self._outer[0](tensor)
        return Kept((tensor.detach(), tensor._version))

    def unpack(self, packed: Any) -> Tensor:
        """Return the tensor that `pack` has replaced.

        Raises:
            RuntimeError: the tensor was modified in place after it was saved. The message is PyTorch's own.
        """
        if type(packed) is Kept:
            tensor, version = packed
            if tensor._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"[{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; "
                    f"expected version {version} instead"
                )
            return tensor
        if isinstance(packed, Handle):
            return packed.view() if torch._C._current_graph_task_id() != -1 else packed.copy()
        return self._outer[1](packed)  # type: ignore[no-any-return]


def are_innermost(calls: Calls) -> bool:
    """Return whether the saved-tensor hooks of `calls` are the innermost ones."""
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return top is not None and getattr(getattr(top[0], "__self__", None), "calls", None) is calls


def _innermost() -> "SavedTensorHooks | None":
    """Return the innermost saved-tensor hooks if they are the library's."""
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    innermost = getattr(top[0], "__self__", None) if top is not None else None
    return innermost if isinstance(innermost, SavedTensorHooks) else None


can_push_hooks: Callable[[], bool] = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]
"""Function that returns whether PyTorch accepts saved-tensor hooks now. Inside `torch.func.grad` it does not."""


def push_hooks(calls: Calls) -> bool:
    """Make the saved-tensor hooks of `calls` the innermost ones. Return whether `pop_hooks` must be called."""
    if are_innermost(calls):
        return False
    hooks = SavedTensorHooks(calls)
    _push(hooks.pack, hooks.unpack)
    return True


_push: Callable[..., None] = torch._C._autograd._push_saved_tensors_default_hooks

pop_hooks: Callable[[], None] = torch._C._autograd._pop_saved_tensors_default_hooks
"""Function that undoes a `push_hooks` that returned `True`."""


@contextmanager
def set_hooks_aside() -> Iterator[None]:
    """Pop the library's innermost hooks inside the block, because PyTorch disables hooks there and accepts none.

    Raises:
        LayoutError: the block is inside a forward, which frees its weights, and not inside `gathered()`.
    """
    aside: list[SavedTensorHooks] = []
    try:
        while (hooks := _innermost()) is not None:
            if not hooks.calls.gathered:
                raise LayoutError(NO_TRANSFORM)
            pop_hooks()
            aside.append(hooks)
            hooks.calls.transformed = True
            _transformed.add(hooks.calls)
        yield
    finally:
        while aside:
            _push(aside[-1].pack, aside.pop().unpack)


_transformed: WeakSet[Calls] = WeakSet()
"""Models inside whose `gathered()` a function of `torch.func` has saved weights without handles."""


def check_transform(outputs: Sequence[Any]) -> None:
    """Check that a backward of `torch.func`, such as the function that `vjp` returns, finds its saved weights.

    PyTorch does not compare versions there, so the backward would compute with placeholders.

    Raises:
        LayoutError: the backward needs weights of a model that is no longer inside `gathered()`.
    """
    left = [each.grad_fn for each in outputs if isinstance(each, Tensor) and is_functorch_wrapped_tensor(each)]
    if not left or not _transformed:
        return
    seen: set[Node] = set()
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if any(map(_is_placeholder, _saved_by(node))):
            raise LayoutError(
                "a function that torch.func.vjp returned inside `with model.gathered():` was called outside of it, "
                "where the weights that it needs are freed: call it inside `with model.gathered():` too, on every rank"
            )
        left += [following for following, _ in node.next_functions]


def _saved_by(node: Node) -> Iterator[Any]:
    """Yield what a node of a graph has saved, tensors and others."""
    for name in dir(node):
        if name.startswith("_saved_"):
            yield getattr(node, name)
    yield from getattr(node, "saved_tensors", ())


def _is_placeholder(saved: Any) -> bool:
    while isinstance(saved, Tensor) and is_functorch_wrapped_tensor(saved):
        saved = get_unwrapped(saved)
    return isinstance(saved, Placeholder)
