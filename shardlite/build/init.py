"""Initial values: rank 0 initializes tensors on the meta device, and its values are sent to all ranks, unit by unit.

All ranks first move tensors on the meta device to a real device as placeholders. Then rank 0 initializes one module
after the other. A unit's values are sent as soon as all modules inside it are initialized, and then the former memory
of its parameters is freed. So at most one unit, and the units around it, have whole values at a time.

Legend: `W` ranks that share a model, `S` elements per shard; a full buffer has `W*S` elements.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardlite.build.partition import UnitPlan
from shardlite.comm import CHUNK_BYTES, Context, broadcast
from shardlite.errors import LayoutError
from shardlite.params import ROOT, Flat, Unit

Init = Callable[[nn.Module], None] | None
"""A function that initializes the parameters and buffers of a module, as `nn.Module.apply` takes it. `None`: call
`reset_parameters()` of every module that owns any.
"""

_CHUNKS = 4
"""Messages per rank in a piece of values. The last rank of the chain waits for one message per rank before it."""

_METHODS = ("reset_parameters", "_reset_parameters")

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def check(module: nn.Module, init: Init, ignored: Collection[Tensor], *, first: bool) -> None:
    """Check the model's tensors on the meta device. Only the `first` rank must be able to initialize them.

    Raises:
        LayoutError: a tensor cannot leave meta, or nothing can initialize it.
    """
    for path, owner in module.named_modules():
        for name, value in vars(owner).items():
            if isinstance(value, Tensor) and value.is_meta:
                raise LayoutError(
                    f"{_join(path, name)!r} is on meta and neither a parameter nor a buffer of {_class(owner)}, so it "
                    "would stay there: register it as a buffer (persistent=False if it is not to be saved)"
                )
        for name, tensor in _own(owner):
            if tensor.is_meta:
                what = f"{_kind(tensor)} {_join(path, name)!r} is on meta"
                if tensor in ignored:
                    raise LayoutError(f"{what} and ignored: give it memory and values before wrapping")
                if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
                    raise LayoutError(f"{what} and has a hook, which would be lost: register hooks after wrapping")
                if first and init is None and _method(owner) is None:
                    raise LayoutError(
                        f"{what}, and {_class(owner)} has no reset_parameters() to initialize it: pass init=, which "
                        "takes a module and initializes the parameters and buffers that it owns"
                    )


def children_first(module: nn.Module) -> Iterator[nn.Module]:
    """Yield every module once, after all modules inside it: the order of `nn.Module.apply`."""
    seen: set[nn.Module] = set()

    def visit(module: nn.Module) -> Iterator[nn.Module]:
        seen.add(module)
        for child in module.children():
            if child not in seen:
                yield from visit(child)
        yield module

    return visit(module)


class _Initializer:
    """Initializes the tensors of a model that have no values yet. Does nothing on ranks that are not `first`.

    An error is stored, not raised, because other ranks wait for the values. Nothing is initialized after it.
    """

    def __init__(self, module: nn.Module, init: Init, device: torch.device, *, first: bool) -> None:
        self._call = _reset if init is None else init
        self._called = "reset_parameters()" if init is None else "init"
        self._first = first
        self._paths = {each: path for path, each in module.named_modules()}
        self._names = {tensor: name for name, tensor in (*module.named_parameters(), *module.named_buffers())}
        self._missing = {tensor for tensor in self._names if tensor.is_meta}
        self._for_all = bool(self._missing) and init is not None  # modules without tensors may write to their children
        self._sent: dict[nn.Parameter, int] = {}
        self._error: LayoutError | None = None
        for tensor in self._missing:
            _leave_meta(tensor, device)

    def initialize(self, module: nn.Module) -> None:
        """Allocate and initialize the module's own tensors that were on the meta device. Others keep their values."""
        own = _own(module)
        due = {tensor for _, tensor in own if tensor in self._missing}
        called = bool(due) or (not own and self._for_all)
        if not called or not self._first or self._error is not None:
            return
        self._missing -= due
        with torch.no_grad():
            kept = [(tensor, tensor.clone()) for _, tensor in own if tensor not in due]
            self._run(module, {tensor: _Blank.of(tensor) for tensor in due})
            for tensor, value in kept:
                if not torch.equal(tensor, value):
                    tensor.copy_(value)

    def sent(self, params: Iterable[nn.Parameter]) -> None:
        """Record that all ranks have the values of `params`, so that later writes to them are lost."""
        self._sent.update((param, param._version) for param in params)

    def error(self) -> LayoutError | None:
        """Return the first error, if any."""
        late = [self._names[param] for param, version in self._sent.items() if param._version != version]
        if self._error is None and late:
            return LayoutError(
                f"the initialization of a module outside of its unit wrote to parameter {late[0]!r}, whose values had "
                "been sent to all ranks by then: let it write only to what the module itself owns"
            )
        return self._error

    def _run(self, module: nn.Module, blanks: dict[Tensor, "_Blank"]) -> None:
        """Initialize a module. Check that its `blanks` were filled, and that nothing but values changed."""
        own, before = _own(module), _described(module)
        who = f"{self._called} of module {self._paths[module] or '(the model itself)'!r} ({_class(module)})"
        try:
            self._call(module)
        except Exception as error:
            self._error = LayoutError(f"{who} failed: {type(error).__name__}: {error}")
            self._error.__cause__ = error
            return
        if _described(module) != before:
            self._error = LayoutError(
                f"{who} changed what there is from {before} to {_described(module)}, which other ranks do not know: "
                "register parameters and buffers in the constructor"
            )
            return
        for (name, tensor), (_, now) in zip(own, _own(module), strict=True):
            wrong = blanks[tensor].wrong(tensor, now) if tensor in blanks else None
            if wrong is not None:
                self._error = LayoutError(f"{who} left {_kind(tensor)} {self._names[tensor]!r} {wrong}")
                return
            if now is not tensor:  # restore the tensor that was replaced, with the value of its replacement
                registry = module._parameters if name in module._parameters else module._buffers
                registry[name] = tensor  # type: ignore[assignment]
                tensor.copy_(now)


def broadcast_init(
    plans: Sequence[UnitPlan], units: Sequence[Unit], module: nn.Module, init: Init, context: Context
) -> LayoutError | None:
    """Set all ranks' parameters to rank 0's values, in their new memory. Return why one has no value, if so.

    Tensors on the meta device are initialized by `init`. Parameters of other ranks' models may be on it, too.
    """
    initializer = _Initializer(module, init, context.device, first=context.rank == 0)
    by_name = {unit.name: unit for unit in units}
    ends = {plan.module: by_name[plan.name or ROOT] for plan in plans if plan.params}
    for each in children_first(module):
        initializer.initialize(each)
        if each in ends:
            broadcast_values(ends[each], context, lambda param: param.detach(), sent=Flat.unbind)
            initializer.sent(ends[each].params())
    for unit in units:
        if not unit.needs_gather:
            unit.bind()
    for buffer in module.buffers():
        if buffer.device != context.device:
            buffer.data = buffer.to(context.device)
    return initializer.error()


def broadcast_values(
    unit: Unit,
    context: Context,
    value: Callable[[nn.Parameter], Tensor],
    *,
    sent: Callable[[Flat], None] = lambda _: None,
) -> None:
    """Set a unit's shards on every rank to `value(param)` of rank 0, for each parameter of the module.

    Values are sent piece by piece through the same memory, because the first write to a page takes longer than the rest
    of the work. `sent` is called for each flat when `value` is no longer called for its parameters.
    """
    with torch.no_grad():
        for i, flat in enumerate(unit.flats):
            if context.rank != 0:
                sent(flat)
            _broadcast_flat(flat, context, value, f"the values of unit {unit.name!r}, flat {i}")
            if context.rank == 0:
                sent(flat)


def _broadcast_flat(flat: Flat, context: Context, value: Callable[[nn.Parameter], Tensor], what: str) -> None:
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
        _store(flat, piece, start)


class _Source:
    """The values of a flat as a full buffer [W*S], of which pieces are written in ascending order."""

    def __init__(self, flat: Flat, value: Callable[[nn.Parameter], Tensor]) -> None:
        self._flat = flat
        self._value = value
        self._cut: tuple[int, Tensor] = (-1, torch.empty(0))
        """Index and values of the latest parameter that did not fit into a piece."""

    def write(self, piece: Tensor, start: int) -> None:
        """Write elements `[start, start + n)` to `piece` [n], and zeros between parameters."""
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


def _store(flat: Flat, piece: Tensor, start: int) -> None:
    """Store the part of elements `[start, start + n)` of a full buffer that this rank keeps."""
    first, stop = flat.own_range(flat.layout)
    begin, end = max(first, start), min(stop, start + piece.numel())
    if begin < end:
        flat.write(piece[begin - start : end - start], begin - first)


def broadcast_buffers(module: nn.Module, context: Context) -> None:
    """Copy rank 0's buffers (for example running statistics) to every rank.

    Equal buffers are not written: a mask may be an expanded view, which does not allow writes.
    """
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            flat = buffer.detach().reshape(-1).clone()
            operation = context.operation(f"buffer {name!r}", "buffers")
            for transport in context.transports:
                broadcast(flat, transport, operation=operation)
            if not torch.equal(flat.view(buffer.shape), buffer):
                buffer.copy_(flat.view(buffer.shape))


@dataclass(frozen=True)
class _Blank:
    """State of a tensor before its initialization. All bits are set, which is a NaN in floating-point dtypes."""

    shape: torch.Size
    dtype: torch.dtype
    version: int

    @staticmethod
    def of(tensor: Tensor) -> "_Blank":
        """Allocate memory for a placeholder, and set all bits."""
        tensor.data = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        tensor.detach().reshape(-1).view(torch.uint8).fill_(0xFF)
        return _Blank(tensor.shape, tensor.dtype, tensor._version)

    def wrong(self, tensor: Tensor, now: Tensor) -> str | None:
        """Return what is wrong with `tensor` after its initialization, or `None`; `now` is the tensor in its place."""
        if (now.shape, now.dtype) != (self.shape, self.dtype):
            return f"as {list(now.shape)} {now.dtype}, it was {list(self.shape)} {self.dtype}"
        if now.is_meta:
            return "on meta"
        unwritten = self._unwritten(now) if now is tensor else 0
        return f"uninitialized, {unwritten} of {now.numel()} elements of it" if unwritten else None

    def _unwritten(self, tensor: Tensor) -> int:
        """Count the elements that were not written.

        Floating dtypes count elements whose bits are all set, because the version counter misses writes through
        `.data`. In other dtypes all bits set may be a valid value (-1), so there a changed version counter counts as a
        write.
        """
        raw = tensor.detach().reshape(-1)
        if tensor.dtype.is_floating_point and tensor.itemsize in _INTEGERS:
            return int((raw.view(_INTEGERS[tensor.itemsize]) == -1).sum())
        untouched = tensor._version == self.version and bool((raw.view(torch.uint8) == 0xFF).all())
        return tensor.numel() if untouched else 0


def _leave_meta(tensor: Tensor, device: torch.device) -> None:
    """Move a tensor from the meta device to `device`: a parameter gets the memory of one element, a buffer all of it.

    The tensor stays the same object, so references to it stay valid: tied weights, `nn.LSTM`'s lists, an optimizer.
    `torch.utils.swap_tensors` refuses tensors with weak references, and would also swap what they refer to.
    """
    whole = () if isinstance(tensor, nn.Parameter) else tensor.shape
    memory = torch.zeros(whole, dtype=tensor.dtype, device=device)
    fresh = memory.expand(tensor.shape).data.requires_grad_(tensor.requires_grad)
    torch._C._swap_tensor_impl(tensor, fresh)


def _reset(module: nn.Module) -> None:
    method = _method(module)
    assert method is not None, "`check` ensures it"
    method()


def _method(module: nn.Module) -> Callable[[], None] | None:
    return next((getattr(module, name) for name in _METHODS if callable(getattr(module, name, None))), None)


def _own(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the parameters and buffers that the module itself owns."""
    registered = (*module._parameters.items(), *module._buffers.items())
    return [(name, tensor) for name, tensor in registered if tensor is not None]


def _described(module: nn.Module) -> list[str]:
    """Return descriptions of the parameters and buffers that the module itself owns."""
    unsaved = module._non_persistent_buffers_set
    return [f"{_kind(tensor)} {name}{' (not saved)' * (name in unsaved)}" for name, tensor in _own(module)]


def _join(path: str, name: str) -> str:
    return f"{path}.{name}".lstrip(".")


def _class(module: nn.Module) -> str:
    return type(module).__name__


def _kind(tensor: Tensor) -> str:
    return "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
