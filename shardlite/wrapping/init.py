"""Initialize tensors that are on the meta device: rank 0 computes values, and all ranks get them unit by unit.

All ranks first turn these tensors into placeholders on a real device. Then rank 0 initializes one module after the
other. When all modules inside a unit are initialized, the unit's values are broadcast, and the former memory of its
parameters is freed. So at any time, at most one unit and the units around it have full values.

A parameter on the meta device may have its values in a file (`set_values`). Each rank reads its own part of them, and
nothing is sent.

Legend: `W` ranks that share a model, `S` elements per shard; a full buffer has `W*S` elements.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import WeakTensorKeyDictionary

from shardlite.comm import Context, broadcast
from shardlite.comm.chunking import CHUNK_BYTES
from shardlite.errors import LayoutError
from shardlite.params import ROOT, Flat, Unit
from shardlite.wrapping.partition import UnitPlan

Init = Callable[[nn.Module], None] | None
"""A function that initializes the parameters and buffers of a module, and is called as in `nn.Module.apply`. `None`
stands for a call of `reset_parameters()` of each module that owns parameters or buffers.
"""

_CHUNKS = 4
"""Number of messages per rank in one broadcast. The ranks form a chain, along which each message travels. So before its
first message, the final rank waits while each earlier rank passes on one message."""

_METHODS = ("reset_parameters", "_reset_parameters")


class Values(Protocol):
    """The values of a parameter that is on the meta device."""

    def pieces(self, start: int, stop: int) -> Iterator[Tensor]:
        """Yield elements `[start, stop)` of the flattened parameter, in pieces [n] that follow each other."""
        ...


_values = WeakTensorKeyDictionary()
"""The `Values` of parameters on the meta device. A parameter belongs to one rank, also if ranks are threads."""


def set_values(param: nn.Parameter, values: Values) -> None:
    """Let `ShardLite` read the values of a parameter on the meta device from `values`, on each rank its own part."""
    _values[param] = values


def values_of(param: Tensor) -> Values | None:
    """Return what `set_values` has set for a parameter that is still on the meta device, or `None`."""
    return _values.get(param) if param.is_meta else None  # type: ignore[no-untyped-call]


_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def check(module: nn.Module, init: Init, ignored: Collection[Tensor], *, first: bool) -> None:
    """Check the model's tensors on the meta device. If `first` is set, each must also have an initialization.

    Raises:
        LayoutError: a tensor cannot leave the meta device, or cannot be initialized.
    """
    has_values = any(values_of(param) is not None for param in module.parameters())
    for path, owner in module.named_modules():
        for name, value in vars(owner).items():
            if isinstance(value, Tensor) and value.is_meta:
                raise LayoutError(
                    f"{_join(path, name)!r} is on the meta device but neither a parameter nor a buffer of "
                    f"{type(owner).__name__}, so it would stay there: register it as a buffer (with "
                    "persistent=False if checkpoints do not need it)"
                )
        for name, tensor in _own(owner):
            if tensor.is_meta:
                what = f"{_kind(tensor)} {_join(path, name)!r} is on the meta device"
                if tensor in ignored:
                    raise LayoutError(f"{what} and ignored: allocate and initialize it before wrapping the model")
                if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
                    raise LayoutError(f"{what} and has a hook, which would be lost: register hooks after wrapping")
                if values_of(tensor) is not None:
                    continue
                if init is None and has_values:
                    raise LayoutError(
                        f"{what}, and unlike other parameters it has no values in a file: it was added or replaced "
                        "after the model was read. Pass init=, a function that initializes what a module owns"
                    )
                if first and init is None and _method(owner) is None:
                    raise LayoutError(
                        f"{what}, and {type(owner).__name__} has no reset_parameters() to initialize it: pass init=, a "
                        "function that initializes the parameters and buffers that a module owns"
                    )


def children_first(module: nn.Module, seen: set[nn.Module] | None = None) -> Iterator[nn.Module]:
    """Yield each module once, after all modules inside it, as `nn.Module.apply` does. Skip modules in `seen`."""
    seen = set() if seen is None else seen
    seen.add(module)
    for child in module.children():
        if child not in seen:
            yield from children_first(child, seen)
    yield module


class _Initializer:
    """Initializes the tensors of a model that have no values yet. If `first` is not set, nothing is initialized.

    An error is stored, not raised, because other ranks wait for the values. After an error, nothing more is
    initialized.
    """

    def __init__(self, module: nn.Module, init: Init, device: torch.device, *, first: bool) -> None:
        self._call = _reset if init is None else init
        self._called = "reset_parameters()" if init is None else "init"
        self._first = first
        self._paths = {each: path for path, each in module.named_modules()}
        self._names = {tensor: name for name, tensor in (*module.named_parameters(), *module.named_buffers())}
        unread = {tensor for tensor in self._names if values_of(tensor) is not None}
        self._missing = {tensor for tensor in self._names if tensor.is_meta} - unread
        # `init` is also called with modules that own no tensors, because it may write to tensors of their children.
        self._for_all = bool(self._missing) and init is not None
        self._sent: dict[nn.Parameter, int] = {}
        self._error: LayoutError | None = None
        for tensor in self._missing | unread:
            _leave_meta(tensor, device)

    def initialize(self, module: nn.Module) -> None:
        """Allocate and initialize the module's own tensors that were on the meta device.

        The module's other tensors keep their values.
        """
        own = _own(module)
        due = {tensor for _, tensor in own if tensor in self._missing}
        called = bool(due) or (not own and self._for_all)
        if not called or not self._first or self._error is not None:
            return
        self._missing -= due
        with torch.no_grad():
            kept = [(tensor, tensor.clone()) for _, tensor in own if tensor not in due]
            self._run(module, {tensor: _blank(tensor) for tensor in due})
            for tensor, value in kept:
                if not torch.equal(tensor, value):
                    tensor.copy_(value)

    def sent(self, params: Iterable[nn.Parameter]) -> None:
        """Record that all ranks have the values of `params`. Later writes to `params` would be lost."""
        self._sent.update((param, param._version) for param in params)

    def error(self) -> LayoutError | None:
        """Return the first error, or `None`."""
        late = [self._names[param] for param, version in self._sent.items() if param._version != version]
        if self._error is None and late:
            return LayoutError(
                f"parameter {late[0]!r} was initialized again by a module outside of its unit, after its values had "
                "been sent to all ranks: let the initialization of a module write only to tensors that it owns"
            )
        return self._error

    def _run(self, module: nn.Module, blanks: dict[Tensor, "_Blank"]) -> None:
        """Initialize a module. Check that its tensors in `blanks` were filled, and that only values have changed."""
        own, before = _own(module), _described(module)
        who = f"{self._called} of module {self._paths[module] or '(the model itself)'!r} ({type(module).__name__})"
        try:
            self._call(module)
        except Exception as error:
            self._error = LayoutError(f"{who} failed: {type(error).__name__}: {error}")
            self._error.__cause__ = error
            return
        if _described(module) != before:
            self._error = LayoutError(
                f"{who} changed the module's tensors from {before} to {_described(module)}, which other ranks do not "
                "have: register parameters and buffers in the constructor"
            )
            return
        for (name, tensor), (_, now) in zip(own, _own(module), strict=True):
            wrong = blanks[tensor].wrong(tensor, now) if tensor in blanks else None
            if wrong is not None:
                self._error = LayoutError(f"{who} left {_kind(tensor)} {self._names[tensor]!r} {wrong}")
                return
            if now is not tensor:  # the program replaced the tensor: restore it, and copy the replacement's values
                registry = module._parameters if name in module._parameters else module._buffers
                registry[name] = tensor  # type: ignore[assignment]
                tensor.copy_(now)


def broadcast_init(
    plans: Sequence[UnitPlan], units: Sequence[Unit], module: nn.Module, init: Init, context: Context
) -> LayoutError | None:
    """Copy rank 0's parameters to the shards of all ranks. Return an error if the initialization has failed.

    On rank 0, `init` initializes tensors that are on the meta device. On other ranks, any parameter may be on the meta
    device. Each rank reads its part of parameters that have values (`set_values`).
    """
    unread = {param: values for param in module.parameters() if (values := values_of(param)) is not None}
    initializer = _Initializer(module, init, context.device, first=context.rank == 0)
    by_name = {unit.name: unit for unit in units}
    ends: dict[nn.Module, list[Unit]] = {}
    for plan in plans:
        if plan.params:
            ends.setdefault(plan.module, []).append(by_name[plan.name or ROOT])
    for each in children_first(module):
        initializer.initialize(each)
        for unit in ends.get(each, ()):
            broadcast_values(unit, context, lambda param: param.detach(), sent=Flat.unbind, unread=unread)
            initializer.sent(unit.params())
    error = _read_values(units, unread)
    for unit in units:
        if unit.replicated or not unit.needs_gather:
            unit.bind()
    for buffer in module.buffers():
        if buffer.device != context.device:
            buffer.data = buffer.to(context.device)
    return initializer.error() or error


def _read_values(units: Sequence[Unit], unread: Mapping[nn.Parameter, Values]) -> LayoutError | None:
    """Fill this rank's shards of the parameters in `unread`. Return an error if values cannot be read."""
    with torch.no_grad():
        for flat in (flat for unit in units for flat in unit.flats):
            own = flat.own_range(flat.layout)
            for index, (param, slot) in enumerate(zip(flat.params, flat.layout.slots, strict=True)):
                start, stop = flat.range_of(index)
                begin = slot.within(*own)[0]
                try:
                    for piece in unread[param].pieces(start, stop) if param in unread and start < stop else ():
                        flat.write(piece.to(param.dtype), begin)
                        begin += piece.numel()
                except Exception as error:  # other ranks wait for this rank
                    return LayoutError(f"the values of parameter {slot.name!r} cannot be read: {error}")
                _values.pop(param, None)  # type: ignore[no-untyped-call]
    return None


def broadcast_values(
    unit: Unit,
    context: Context,
    value: Callable[[nn.Parameter], Tensor],
    *,
    sent: Callable[[Flat], None] = lambda _: None,
    unread: Collection[nn.Parameter] = (),
) -> None:
    """Set a unit's shards on all ranks to the values of rank 0. Collective.

    Values are sent piece by piece through the same memory. New memory for each piece would be slower, because the first
    write to a page takes longer than all other work.

    Args:
        unit: unit whose shards are set.
        context: the ranks.
        value: function that returns the value of a parameter. The function is called on rank 0 only.
        sent: function that is called for each flat when the values of its parameters are no longer needed.
        unread: parameters whose values are not sent. A flat of only such parameters is skipped.
    """
    with torch.no_grad():
        for i, flat in enumerate(unit.flats):
            if context.rank != 0:
                sent(flat)
            if not all(param in unread for param in flat.params):
                _broadcast_flat(flat, context, value, f"the values of unit {unit.name!r}, flat {i}")
            if context.rank == 0:
                sent(flat)


def _broadcast_flat(flat: Flat, context: Context, value: Callable[[nn.Parameter], Tensor], what: str) -> None:
    first, stop = flat.own_range(flat.layout)
    numel, source = flat.layout.full_numel, _Source(flat, value)
    length = _CHUNKS * context.world_size * CHUNK_BYTES // flat.master.itemsize
    memory = context.empty(min(length, numel), flat.master)
    context.ledger.track("staging", memory)
    for start in range(0, numel, length):
        piece = memory[: numel - start]
        if context.rank == 0:
            source.write(piece, start)
        operation = context.operation(what, "values")
        for transport in context.transports:
            broadcast(piece, transport, operation=operation)
        begin, end = max(first, start), min(stop, start + len(piece))
        if begin < end:
            flat.write(piece[begin - start : end - start], begin - first)


def broadcast_full(module: nn.Module, units: Sequence[Unit], context: Context, source: Mapping[Tensor, Tensor]) -> None:
    """Write rank 0's values of parameters and buffers, full tensors by entry, on all ranks. Collective."""
    for unit in units:
        broadcast_values(unit, context, lambda param: source[param])
    with torch.no_grad():
        for entry, value in source.items():
            if not isinstance(entry, nn.Parameter) and context.rank == 0:
                entry.copy_(value)
    broadcast_buffers(module, context)
    context.trim(keep=0)


class _Source:
    """The values of a flat (flat parameter) in the layout of a full buffer [W*S], read in pieces in ascending order."""

    def __init__(self, flat: Flat, value: Callable[[nn.Parameter], Tensor]) -> None:
        self._flat = flat
        self._value = value
        self._cut: tuple[int, Tensor] = (-1, torch.empty(0))
        """Index and values of the latest parameter that lies in several pieces."""

    def write(self, piece: Tensor, start: int) -> None:
        """Write elements `[start, start + n)` to `piece` [n], with zeros between parameters."""
        piece.zero_()
        for index, (param, slot) in enumerate(zip(self._flat.params, self._flat.layout.slots, strict=True)):
            begin, end = slot.within(start, start + piece.numel())
            if end - begin == slot.numel:
                piece[begin:end].view(slot.shape).copy_(self._value(param))
            elif begin < end:
                if self._cut[0] != index:
                    self._cut = index, self._value(param).reshape(-1)
                offset = start - slot.start
                piece[begin:end].copy_(self._cut[1][begin + offset : end + offset])


def broadcast_buffers(module: nn.Module, context: Context, compound: Collection[Tensor] = ()) -> None:
    """Copy rank 0's buffers (for example running statistics) and the parameters in `compound` to all ranks.

    A buffer that already has rank 0's values is not written, because such a buffer may be an expanded view (a mask),
    which does not allow writes.
    """
    named = [(name, param) for name, param in module.named_parameters() if param in compound]
    with torch.no_grad():
        for name, buffer in (each for pair in (*module.named_buffers(), *named) for each in _inner(*pair)):
            flat = buffer.detach().reshape(-1).clone()
            operation = context.operation(f"buffer {name!r}", "buffers")
            for transport in context.transports:
                broadcast(flat, transport, operation=operation)
            if not torch.equal(flat.view(buffer.shape), buffer):
                buffer.copy_(flat.view(buffer.shape))


def _inner(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the names of the tensors of which `tensor` consists, and these tensors: ordinarily `tensor` itself."""
    if is_traceable_wrapper_subclass(tensor):
        for each in tensor.__tensor_flatten__()[0]:
            yield from _inner(f"{name}.{each}", getattr(tensor, each))
    else:
        yield name, tensor


class _Blank(NamedTuple):
    """The record of a tensor before its initialization, when all its bits are set: NaN in floating-point dtypes."""

    shape: torch.Size
    dtype: torch.dtype
    version: int

    def wrong(self, tensor: Tensor, now: Tensor) -> str | None:
        """Return a description of the error in the initialization of `tensor`, or `None`.

        Args:
            tensor: tensor that was to be initialized.
            now: tensor that the module has now. It may be another tensor than `tensor`.
        """
        if (now.shape, now.dtype) != (self.shape, self.dtype):
            return f"as {list(now.shape)} {now.dtype}, it was {list(self.shape)} {self.dtype}"
        if now.is_meta:
            return "on the meta device"
        unwritten = self._unwritten(now) if now is tensor else 0
        return f"with {unwritten} of {now.numel()} elements uninitialized" if unwritten else None

    def _unwritten(self, tensor: Tensor) -> int:
        """Return the number of elements that were not written.

        In floating-point dtypes, elements with all bits set were not written. The version counter is not used
        for these dtypes, because it misses writes through `.data`. In other dtypes an element with all bits set may be
        valid (-1), so all elements count as written if the version has changed.
        """
        raw = tensor.detach().reshape(-1)
        if tensor.dtype.is_floating_point and tensor.itemsize in _INTEGERS:
            return int((raw.view(_INTEGERS[tensor.itemsize]) == -1).sum())
        untouched = tensor._version == self.version and bool((raw.view(torch.uint8) == 0xFF).all())
        return tensor.numel() if untouched else 0


def _blank(tensor: Tensor) -> _Blank:
    """Allocate the memory of a placeholder, set all bits of it, and return the placeholder's record."""
    tensor.data = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    tensor.detach().reshape(-1).view(torch.uint8).fill_(0xFF)
    return _Blank(tensor.shape, tensor.dtype, tensor._version)


def _leave_meta(tensor: Tensor, device: torch.device) -> None:
    """Move a tensor from the meta device to `device`. A buffer is allocated; a parameter gets memory for one element.

    The tensor stays the same object, so that references to it (tied weights, lists of `nn.LSTM`, an optimizer) stay
    valid. `torch.utils.swap_tensors` is not used, because it refuses tensors with weak references, and would also swap
    attributes.
    """
    shape = () if isinstance(tensor, nn.Parameter) else tensor.shape
    memory = torch.zeros(shape, dtype=tensor.dtype, device=device)
    fresh = memory.expand(tensor.shape).data.requires_grad_(tensor.requires_grad)
    torch._C._swap_tensor_impl(tensor, fresh)


def _reset(module: nn.Module) -> None:
    method = _method(module)
    assert method is not None, "`check` ensures it"
    method()


def _method(module: nn.Module) -> Callable[[], None] | None:
    return next((getattr(module, name) for name in _METHODS if callable(getattr(module, name, None))), None)


def _own(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the names and tensors of the parameters and buffers that the module itself owns."""
    registered = (*module._parameters.items(), *module._buffers.items())
    return [(name, tensor) for name, tensor in registered if tensor is not None]


def _described(module: nn.Module) -> list[str]:
    """Return a description of each parameter and buffer that the module itself owns."""
    unsaved = module._non_persistent_buffers_set
    return [f"{_kind(tensor)} {name}{' (not saved)' * (name in unsaved)}" for name, tensor in _own(module)]


def _join(path: str, name: str) -> str:
    return f"{path}.{name}".lstrip(".")


def _kind(tensor: Tensor) -> str:
    return "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
