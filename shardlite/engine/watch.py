"""Warn about programs that use a shard, or its gradient, as if it were the whole parameter.

A norm, a mean or a random fill of a shard covers only this rank's part: hand-written norms and steps, and
`xavier_uniform_`, would silently give different results. (`optim/probe.py` checks the steps of optimizer classes.) So
in some steps a model's shards, their gradients, and views of both have a class that intercepts function calls. In most
steps these tensors have their ordinary classes, because interception costs time. A program that computes a norm or a
mean of shards usually does so in its first steps, or in the steps that it logs, such as every 50th or every 500th.
"""

import copy
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from shardlite.errors import LayoutError, ShardWarning
from shardlite.params import Flat, Shard, Sharded, as_they_are

STEPS = 3
"""Number of steps in a watched period. One period is at the start, and one is around each multiple of `EVERY`."""

EVERY = 50
"""Number of steps from one watched period to the next."""


def _functions(names: str, *owners: Any) -> frozenset[Any]:
    """Return the attributes of `owners` with these space-separated names. Skip names that an owner does not have."""
    return frozenset(getattr(owner, name) for owner in owners for name in names.split() if hasattr(owner, name))


_REDUCTIONS = (
    _functions("norm mean sum var std nansum nanmean dot dist cosine_similarity", Tensor, torch)
    | _functions("var_mean std_mean _foreach_norm", torch)
    | _functions("norm vector_norm matrix_norm", torch.linalg)
    | _functions("cosine_similarity normalize", nn.functional)
)
_FILLS = _functions("uniform_ normal_ random_ bernoulli_ exponential_ log_normal_", Tensor)
_FILLS |= _functions("randn_like rand_like", torch)

_EXTREMES = _functions("max min amax amin argmax argmin aminmax median mode", Tensor, torch)
"""Functions that raise for an empty tensor. So they raise on a rank that has no element of the parameter."""

_ELEMENTS = _functions("__getitem__ item", Tensor)
"""Functions that raise for an empty tensor if they select a single element."""

_PLACED = _functions("__setitem__ index_fill_ index_copy_ index_add_ index_put_ scatter_ scatter_add_", Tensor)
_PLACED |= _functions("fill_diagonal_ tril_ triu_", Tensor)
"""Functions that write to elements by their positions, which are other positions in a shard than in its parameter."""

_NORMS = _functions("norm", Tensor, torch, torch.linalg) | _functions("vector_norm", torch.linalg)
"""Functions that raise for an empty tensor if the exponent is infinite."""

_PASSED_ON = (
    _functions("detach view reshape flatten ravel view_as squeeze float double to cpu clone abs square pow neg", Tensor)
    | _functions("mul __mul__ __rmul__ div __truediv__ __pow__ add __add__ __radd__ sub __sub__ __rsub__", Tensor)
    | _functions("flatten reshape ravel squeeze detach clone cat concat abs square pow mul div add sub", torch)
    | {Tensor.data.__get__}  # type: ignore[attr-defined]
)
"""Functions whose result for a shard is watched as well, because a norm of the result covers only this rank's part."""

_OPERATIONS = ("add", "sub", "mul", "div", "truediv", "lerp", "addcmul", "addcdiv", "copy", "where")
_ARITHMETIC: frozenset[Any] = frozenset().union(
    *(_functions(f"{name} {name}_ __{name}__ __r{name}__ __i{name}__", Tensor) for name in _OPERATIONS),
    *(_functions(f"{name} {name}_ _foreach_{name} _foreach_{name}_", torch) for name in _OPERATIONS),
)
"""Elementwise functions that combine several tensors."""


class Watch:
    """Watches the shards of one wrapped model."""

    def __init__(self, shards: Iterable[tuple[nn.Parameter, Flat, int]]) -> None:
        """Start watching. Each shard comes with its flat (flat parameter) and its index in the flat."""
        self.warned = False
        self._steps = 0
        self.seen: Any = WeakTensorKeyDictionary()
        """The watched tensors."""

        self._shards = [(weakref.ref(shard), _Part.of(flat, index)) for shard, flat, index in shards]
        self.start()

    def after_step(self) -> None:
        """Start or stop watching for the next step. After a warning, watch only in the first `STEPS` steps."""
        self._steps += 1
        at_logs = not self.warned and (self._steps + STEPS // 2) % EVERY < STEPS
        watched = self._steps < STEPS or at_logs
        if watched and not self.seen:
            self.start()
        elif self.seen and not watched:
            self.stop()

    def start(self) -> None:
        """Watch the shards."""
        for there, part in self._shards:
            shard = there()
            if shard is not None:
                _see(shard, (self, part, "the shard"), SeenShard)

    def stop(self) -> None:
        """Restore the ordinary classes of all watched tensors."""
        for tensor in list(self.seen):
            _known.pop(tensor, None)
            tensor.__class__ = tensor.ordinary
        self.seen.clear()


@dataclass(frozen=True, eq=False)
class _Part:
    """Position of a shard in its parameter."""

    name: str
    start: int
    stop: int
    numel: int
    shape: tuple[int, ...]
    """Shape of the whole parameter."""

    without: Sequence[int]
    """The ranks that have no element of the parameter."""

    is_whole: bool
    """Whether the shard has all elements."""

    cuts: Callable[[], Sequence[int]]
    """Function that returns the `W + 1` cuts between ranks, as indices of elements of the parameter."""

    @staticmethod
    def of(flat: Flat, index: int) -> "_Part":
        slot, (start, stop) = flat.layout.slots[index], flat.range_of(index)
        cuts = enumerate(pairwise(flat.cuts_of(index)))
        without = [rank for rank, (first, end) in cuts if first == end]
        cut = partial(slot.cut, flat.layout.cuts)
        return _Part(slot.name, start, stop, slot.numel, slot.shape, without, stop - start == slot.numel, cut)


_known: Any = WeakTensorKeyDictionary()
"""A record for each watched tensor: the `Watch`, the part of the parameter, and words that describe the tensor."""

_Known = tuple[Watch, _Part, str]


def _look(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> _Known | None:
    """Warn or raise if `func` must not be called with its first argument.

    Return the record of the first argument if the result of the call must be watched as well, else `None`.
    """
    found = _known_as(args[0] if args else kwargs.get("input", kwargs.get("self")))
    if found is None or func in _PASSED_ON:
        return found
    look, part, kind = found
    name = getattr(func, "__name__", str(func))
    what = f"{name} of {kind} of {part.name!r}"
    single = func in _ELEMENTS and _has_number(args[1:])
    if func in _ELEMENTS and not single:
        return None
    if part.without and (single or func in _EXTREMES or (func in _NORMS and _infinite(args, kwargs))):
        raise LayoutError(
            f"{what}: ranks {list(part.without)} have no element of that parameter, and only they would fail. "
            f"Compute it inside `gathered()`; for norms of gradients call `clip_grad_norm_()` of the model"
        )
    if func in _PLACED:
        if (part.without or not part.is_whole) and (func is not Tensor.__setitem__ or _selects(args[1])):
            raise LayoutError(
                f"{what}: positions in a shard are not those in its parameter, so other elements would be written. "
                "Write to a gradient in a hook of the module's own parameter (`register_hook`), and to weights inside "
                "`gathered()`"
            )
        return None
    if part.is_whole or look.warned or _flows(args, func):
        return None
    look.warned = True
    warnings.warn(
        f"{what} covers only this rank's part, elements {part.start} to {part.stop} of {part.numel}. For norms of "
        "gradients call `clip_grad_norm_()` of the ShardLite model, for other values of whole parameters use "
        "`gathered()`. A step that needs such values (LAMB, adaptive clipping) belongs in an optimizer class, which "
        "`shardlite.WholeParameters` gives whole parameters. (This warning is given once per model.)",
        ShardWarning,
        stacklevel=4,
    )
    return None


def _flows(args: Sequence[Any], func: Callable[..., Any]) -> bool:
    """Return whether a gradient flows back through the call, as through a penalty in the loss.

    Such a call gives correct results even if each rank computes it for its own part of a parameter.
    """
    first = args[0] if args else None
    tensor = next(iter(first), None) if isinstance(first, list | tuple) else first
    return func not in _FILLS and torch.is_grad_enabled() and isinstance(tensor, Tensor) and tensor.requires_grad


def _known_as(argument: Any) -> _Known | None:
    """Return the record of a tensor. For a list, return the first record of a partial shard, else the first record."""
    if isinstance(argument, list | tuple):
        all_known = [_known[each] for each in argument if isinstance(each, _Watched) and each in _known]
        return next((known for known in all_known if not known[1].is_whole), next(iter(all_known), None))
    return _known.get(argument) if isinstance(argument, _Watched) else None


def _refuse_mixtures(func: Callable[..., Any], args: Sequence[Any]) -> None:
    """Raise if a function combines a shard, or its gradient, with elements that are not those of the shard.

    In a hand-written step, the other tensor may be the whole parameter. In a moving average, the other tensor may be a
    whole copy that was made before wrapping, or a shard of another model.
    """
    for together in _side_by_side(args):
        all_parts = [known[1] for known in map(_known_as, together) if known is not None]
        for part, other in pairwise(all_parts):
            if part.shape == other.shape and part.cuts() != other.cuts():
                raise LayoutError(
                    f"{getattr(func, '__name__', func)} of shards of {part.name!r} and {other.name!r}, which "
                    "are cut at different elements: parameters that were trainable and frozen when a model was wrapped "
                    "lie apart. For equal cuts wrap both models with the same options and the same `requires_grad`, "
                    "and freeze the teacher afterwards (`teacher.requires_grad_(False)`); or use `shardlite.EMA`"
                )
        parts = [part for part in all_parts if not part.is_whole]
        for each in together:
            copied = not isinstance(each, _Watched) and any(
                part.numel > 1 and each.shape == part.shape for part in parts
            )
            if isinstance(each, Sharded) or copied:
                of = f" of {parts[0].name!r}" if parts else ""
                raise LayoutError(
                    f"{getattr(func, '__name__', func)} of a tensor of the size of a whole parameter and a shard{of}: "
                    "gradients belong to shards, so compute with `parameters()` of the ShardLite model, or "
                    "inside `gathered()`; for moving averages use `shardlite.EMA`"
                )


def _side_by_side(args: Sequence[Any]) -> Iterator[list[Tensor]]:
    """Yield lists of tensors that a function combines: its tensor arguments, then the i-th tensors of all its lists."""
    yield [each for each in args if isinstance(each, Tensor)]
    lists = [each for each in args if isinstance(each, list | tuple)]
    if len(lists) > 1:
        for together in zip(*lists, strict=False):
            yield [each for each in together if isinstance(each, Tensor)]


def _has_number(indices: Sequence[Any]) -> bool:
    """Return whether `indices` select a single element along a dimension."""
    index = indices[0] if indices else 0
    return any(isinstance(each, int) for each in (index if isinstance(index, tuple) else (index,)))


def _selects(index: Any) -> bool:
    """Return whether an index selects elements by their positions. Masks and whole slices do not."""
    for each in index if isinstance(index, tuple) else (index,):
        is_whole = each is None or each is Ellipsis or (isinstance(each, slice) and each == slice(None))
        if not is_whole and not (isinstance(each, Tensor) and each.dtype == torch.bool):
            return True
    return False


def _infinite(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    exponent = args[1] if len(args) > 1 else kwargs.get("p", kwargs.get("ord"))
    return exponent in ("inf", float("inf"), "-inf", -float("inf"))


class _Watched:
    """Mixin for tensors that intercept every function that is called with one of them."""

    ordinary: ClassVar[type]
    """The class of the tensor while the tensor is not watched."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Check the call. If `func` is in `_PASSED_ON` and an argument is watched, watch the result too."""
        kwargs = kwargs or {}
        known = None
        if not torch.compiler.is_compiling():
            if func is torch.autograd.grad:
                raise LayoutError(
                    "torch.autograd.grad with respect to a shard: shards are not in autograd's graph. Use the module's "
                    "own parameters (`model.module.parameters()`), which get this rank's gradients of whole parameters"
                )
            if func in _ARITHMETIC:
                _refuse_mixtures(func, args)
            if func in _LOOKED_AT:
                known = _look(func, args, kwargs)
        with as_they_are():
            result = func(*args, **kwargs)
            if known is not None and type(result) is Tensor:
                _see(result, known)
        return result

    def __deepcopy__(self, memo: Any) -> Any:
        """Copy as an ordinary tensor."""
        tensor, kind = cast(Any, self), type(self)
        tensor.__class__ = self.ordinary
        try:
            return copy.deepcopy(tensor, memo)
        finally:
            tensor.__class__ = kind


_LOOKED_AT = _REDUCTIONS | _FILLS | _EXTREMES | _ELEMENTS | _PLACED | _PASSED_ON


class _Seen(_Watched, Tensor):
    """A gradient, or a tensor computed from a gradient or a shard."""

    ordinary = Tensor

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as an ordinary tensor."""
        with as_they_are():
            return self.as_subclass(Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Format as an ordinary tensor."""
        with as_they_are():
            return repr(self.as_subclass(Tensor))


class SeenShard(_Watched, Shard):
    """A watched shard. Its gradient is watched as well."""

    ordinary = Shard

    @property
    @torch._disable_dynamo
    def grad(self) -> Tensor | None:
        """The gradient of the shard. Reading this property turns the gradient into a watched tensor."""
        with as_they_are():
            grad: Tensor | None = _own_grad.__get__(self)
        known = _known.get(self)  # `None` for a copy
        if known is not None and type(grad) is Tensor:
            look, part, _ = known
            _see(grad, (look, part, "the gradient of the shard"))
        return grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        with as_they_are():
            _own_grad.__set__(self, value)


_own_grad: Any = torch._C.TensorBase.grad


def _see(tensor: Tensor, known: _Known, kind: type[Tensor] = _Seen) -> None:
    tensor.__class__ = kind
    _known[tensor] = known
    known[0].seen[tensor] = True
