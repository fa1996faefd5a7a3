"""Handles: what the autograd graph holds in place of a gathered weight.

A view of a full buffer must not be saved for backward, because the buffer will be another unit's by then. Saved-tensor
hooks replace it by a `Handle`, from which the same view can be made again. The handles of one forward call of a unit
belong to a `Call`:

    forward   pack: view -> Handle(call, size, stride, offset)
    backward  unpack: Handle -> the call unshards its unit (which gathers it, if need be) -> view
              autograd drops the handle with its node; with the last handle the call reshards its unit

So a unit is resharded when its last weight was used. That is not when its gradients are complete (with frozen weights
they are complete too early), nor when its backward ran once (it may have been called twice). A compiled function drops
its handles before it computes with the views. If a view is alive then, the unit is resharded at the next unshard.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardlite.params import Unit, is_plain, storage_key
from shardlite.weights.all_gather import isolated
from shardlite.weights.unshard import Gatherer

Pair = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""A pair of saved-tensor hooks, (pack, unpack)."""


class Call:
    """One forward call of a unit, as its backward sees it."""

    __slots__ = ("calls", "handles", "unit", "uses", "version")

    def __init__(self, unit: Unit, calls: "Calls") -> None:
        self.unit = unit
        self.calls = calls
        self.version = unit.gathered_version
        self.handles = 0
        self.uses = False

    def unshard(self) -> None:
        """Unshard the unit until the last handle is gone or the backward ends.

        Raises:
            RuntimeError: the weights have changed since the forward, in the words of PyTorch's own error.
        """
        if not self.uses:
            self.check_version()
            self.calls.settle()
            self.calls.gatherer.unshard(self.unit, binds=False)  # handles view the buffer
            self.uses = True
            self.calls.using.append(self)

    def check_version(self) -> None:
        """Raise if a step, or anything else, has changed the weights since the forward."""
        now = self.unit.version()
        if now != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"weights of unit {self.unit.name!r} are at version {now}; expected version {self.version} instead. "
                "Was the optimizer stepped, or were weights loaded, between this forward and its backward?"
            )

    def release(self) -> None:
        """End the use."""
        if self.uses:
            self.uses = False
            self.calls.gatherer.reshard(self.unit)

    def forget_handles(self) -> None:
        """Reshard the unit, because autograd has dropped the last handle."""
        unit = self.unit
        self.calls.live[unit].remove(self)
        # Do other tensors than the module's parameters view the full weights, and is this their last use?
        if self.uses and unit.users == 1 and unit.escaped():
            self.calls.lingering.append(self)
        else:
            self.release()


class Handle:
    """A description of one view of a unit's full weights, from which it can be made again."""

    __slots__ = ("call", "dtype", "offset", "size", "stride")

    def __init__(self, call: Call, view: Tensor) -> None:
        self.size = view.size()
        self.stride = view.stride()
        self.offset = view.storage_offset()
        self.dtype = view.dtype
        self.call = call
        if call.handles == 0:
            call.calls.live[call.unit].append(call)
        call.handles += 1

    def __del__(self) -> None:
        if not hasattr(self, "call"):
            return  # the view had no storage
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
            call.unit.check_not_overwritten(int(self.offset) * self.dtype.itemsize)
        if torch.is_grad_enabled():
            # `create_graph=True`: this node is recorded too, and must save handles again. The hooks need no pop: the
            # engine restores its thread's state, which includes them, after every node.
            push_hooks(call.calls)
        return self._of_buffer()

    def copy(self) -> Tensor:
        """Return a copy of the view, for code that reads the graph outside a backward. Collective."""
        self.call.check_version()
        gatherer = self.call.calls.gatherer
        with gatherer.inside_pass(f"a look at unit {self.call.unit.name!r}"):
            gatherer.unshard(self.call.unit)
        try:
            return self._of_buffer().clone()
        finally:
            gatherer.reshard(self.call.unit)

    def _of_buffer(self) -> Tensor:
        buffer = self.call.unit.buffer
        assert buffer is not None, "a unit in use has a buffer"
        with isolated():
            (whole,) = buffer.views(self.dtype, lambda memory: [memory.view(self.dtype)])
            return whole.as_strided(self.size, self.stride, self.offset)


@dataclass(slots=True)
class Kept:
    """Any other saved tensor, with the version that it must still have in the backward.

    PyTorch does not check versions if there are hooks. The tensor is detached, because a graph that packs the tensor
    itself references itself and is never freed.
    """

    tensor: Tensor
    version: int

    def error(self) -> RuntimeError:
        """Return PyTorch's error for a tensor that was modified in place since it was saved."""
        return RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{self.tensor.type()} {list(self.tensor.shape)}] is at version {self.tensor._version}; "
            f"expected version {self.version} instead"
        )


class Calls:
    """All calls of one wrapped model, and the hooks that make handles of weights."""

    def __init__(self, gatherer: Gatherer, units: Sequence[Unit], *, on_use: Callable[[Unit], None]) -> None:
        self.gatherer = gatherer
        self.on_use = on_use
        """Function that is called before a handle of a unit is used in a backward."""

        self._sizes = {unit.nbytes for unit in units}
        self.live: dict[Unit, list[Call]] = {unit: [] for unit in units}
        """Calls with handles, oldest first."""

        self.using: list[Call] = []
        """Calls whose units this backward has unsharded."""

        self.lingering: list[Call] = []
        """Those of `using` whose handles are gone although a view of the weights is alive."""

        self.current: dict[Unit, Call] = {}
        """The calls whose forward is running."""

    def expect_backward(self, call: Call) -> None:
        """Keep a unit that was recomputed inside a backward unsharded until the nodes that asked for it have run.

        These are the nodes of this call. Non-reentrant checkpointing throws the recomputed graph away; then they are
        the nodes of the last earlier call, whose backward comes first.
        """
        if call.handles:
            call.unshard()
        earlier = [each for each in self.live[call.unit] if each is not call]
        if earlier:
            earlier[-1].unshard()

    def settle(self) -> None:
        """Reshard units whose release was deferred because a view was alive. Call it before a unit is unsharded."""
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
        """Return whether `tensor` views a buffer that was given up because a view of it was kept."""
        if tensor.untyped_storage().nbytes() not in self._sizes:
            return False
        kept = (each() for unit in self.live for each in unit.escapes)
        return any(each is not None and each._cdata == storage_key(tensor) for each in kept)


class SavedTensorHooks:
    """Saved-tensor hooks that replace weights, and pass every other tensor to the hooks that were active before.

    Those must get the same tensors whenever a forward is run, because checkpoints count what a recomputation saves. So
    they do not get a weight that a program has kept elsewhere either.
    """

    def __init__(self, calls: Calls) -> None:
        self.calls = calls
        self._outer: Pair | None = torch._C._autograd._top_saved_tensors_default_hooks(True)

    def pack(self, tensor: Tensor) -> Any:
        """Return what the graph keeps instead of `tensor`."""
        calls = self.calls
        # Sparse tensors and many subclasses have no storage. Gathered weights are neither.
        has_storage = (type(tensor) is Tensor or is_plain(tensor)) and tensor.layout is torch.strided
        if has_storage:
            unit = calls.gatherer.owners.get(tensor.untyped_storage()._cdata)  # its `storage_key`, without a call
            if unit is not None:
                # A view that is saved outside of any forward is a call by itself.
                return Handle(calls.current.get(unit) or Call(unit, calls), tensor)
        if self._outer is not None and not (has_storage and calls.has_given_up(tensor)):
            return self._outer[0](tensor)
        return Kept(tensor.detach(), tensor._version)

    def unpack(self, packed: Any) -> Tensor:
        """Return what was packed.

        Raises:
            RuntimeError: it has changed since.
        """
        if isinstance(packed, Kept):
            if packed.tensor._version != packed.version:
                raise packed.error()
            return packed.tensor
        if isinstance(packed, Handle):
            return packed.view() if torch._C._current_graph_task_id() != -1 else packed.copy()
        assert self._outer is not None
        return self._outer[1](packed)


def are_innermost(calls: Calls) -> bool:
    """Return whether the library's saved-tensor hooks are the innermost ones."""
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    innermost = getattr(top[0], "__self__", None) if top is not None else None
    return isinstance(innermost, SavedTensorHooks) and innermost.calls is calls


def push_hooks(calls: Calls) -> bool:
    """Make the library's saved-tensor hooks the innermost ones. Return whether `pop_hooks` must be called."""
    if are_innermost(calls):
        return False
    ours = SavedTensorHooks(calls)
    torch._C._autograd._push_saved_tensors_default_hooks(ours.pack, ours.unpack)
    return True


def pop_hooks() -> None:
    """Undo a `push_hooks` that returned `True`."""
    torch._C._autograd._pop_saved_tensors_default_hooks()
