"""Warn about programs that use a shard, or its gradient, as if it were the full parameter.

A norm, a mean or a random fill of a shard covers only this rank's part: hand-written norms and steps, and
`xavier_uniform_`, would silently give different results. (A probe checks the steps of optimizer classes.) So in some
steps a model's shards, their gradients, and elementwise results of both have a class that intercepts function calls. A
call is right for a shard if all operators that the call uses are elementwise. Interception costs time, so most steps
run without interception. Programs compute norms or means of shards mostly in their first steps, or when they log.
"""

import copy
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from types import FunctionType
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from shardlite.engine.elementwise import CONDITIONS, SELECTIONS, Operators
from shardlite.errors import LayoutError, ShardWarning
from shardlite.params import Flat, Shard, Slot, as_they_are
from shardlite.params.parameters import Sharded, get_grad, resume_steps, set_grad, wait_for_steps

STEPS, EVERY = 3, 50
"""Periods of `STEPS` steps are watched: one at the start, and one around each multiple of `EVERY`."""


def _functions(names: str, *owners: Any) -> frozenset[Any]:
    """Return the attributes of `owners` with these space-separated names. Skip names that an owner does not have."""
    return frozenset(getattr(owner, name) for owner in owners for name in names.split() if hasattr(owner, name))


_PLACED = _functions("__setitem__ index_fill_ index_copy_ index_add_ index_put_ index_reduce_ put_", Tensor)
_PLACED |= _functions("scatter_ scatter_add_ scatter_reduce_ masked_scatter_ fill_diagonal_ tril_ triu_", Tensor)
"""Functions that write to elements by their positions, which are other positions in a shard than in its parameter."""

_BY_POSITION = _functions("__getitem__ select narrow unbind diagonal", Tensor, torch)
"""Functions that return views of elements at some positions. Other elements would be written through such a view."""

_SINGLE = _BY_POSITION | _functions("item __float__ __int__ __bool__ __index__ tensor_split", Tensor)
"""Functions that may raise for an empty tensor although they are elementwise."""

_UNJUDGED = _functions("backward register_hook __deepcopy__ __reduce_ex__ __repr__ __format__", Tensor)
_UNJUDGED |= _functions("backward grad", torch.autograd)  # `engine/patches.py` judges these in every step

_VIEWS = {getattr(Tensor, name).__get__ for name in ("data", "T", "mT", "H", "mH", "real")}
_READS = {"__int__", "__index__", "__invert__", "__iter__", "requires_grad_", "detach_"}
_NORMS = {"norm", "linalg_vector_norm", "_foreach_norm"}
_SUMS = {"sum", "nansum", "dot", "vdot", *_NORMS}
"""Operators whose gradients are right if each rank calls them for its own part, as in a penalty in the loss. The
gradient of a norm other than the sum of absolute values is right if the norm is squared."""

_SQUARES = _functions("pow square __pow__", Tensor, torch)
_CURVED = _SQUARES | _functions("sqrt rsqrt exp log log1p reciprocal norm prod", Tensor, torch)
"""Functions of a sum whose gradients are wrong if each rank calls them for the sum of its own part."""

_OPERATIONS = ("add", "sub", "mul", "div", "truediv", "lerp", "addcmul", "addcdiv", "copy", "where")
_FORMS = "{0} {0}_ __{0}__ __r{0}__ __i{0}__ _foreach_{0} _foreach_{0}_"
_ARITHMETIC = _functions(" ".join(map(_FORMS.format, _OPERATIONS)), Tensor, torch)
"""Elementwise functions that combine several tensors."""


class Watch:
    """Watches the shards of one wrapped model."""

    def __init__(self, shards: Iterable[tuple[nn.Parameter, Flat, int]]) -> None:
        """Start watching. Each shard comes with its flat (flat parameter) and its index in the flat."""
        self.warned = False
        self._steps = 0
        self.seen: Any = WeakTensorKeyDictionary()
        """The watched tensors."""

        self._shards = [
            (weakref.ref(shard), _Part(flat.layout.slots[index], *flat.range_of(index), flat.layout.cuts))
            for shard, flat, index in shards
        ]
        self.start()

    def after_step(self) -> None:
        """Start or stop watching for the next step. After a warning, watch only in the first `STEPS` steps."""
        self._steps += 1
        watched = self._steps < STEPS or (not self.warned and (self._steps + STEPS // 2) % EVERY < STEPS)
        if watched and not self.seen:
            self.start()
        elif self.seen and not watched:
            self.stop()

    def start(self) -> None:
        """Watch the shards."""
        for there, part in self._shards:
            if (shard := there()) is not None:
                _see(shard, _Known(self, part, "the shard"), SeenShard)

    def stop(self) -> None:
        """Restore the ordinary classes of all watched tensors."""
        tensors = list(self.seen)
        for tensor in tensors:
            _known.pop(tensor, None)
            tensor.__class__ = tensor.ordinary
        self.seen.clear()
        resume_steps(tensors)


@dataclass(frozen=True, eq=False)
class _Part:
    """Position of a shard in its parameter."""

    slot: Slot
    start: int
    stop: int
    bounds: Sequence[int]
    """The `W + 1` cuts between ranks in the full buffer."""

    @cached_property
    def cuts(self) -> Sequence[int]:
        """The cuts as indices of elements of the parameter."""
        return self.slot.cut(self.bounds)

    @cached_property
    def without(self) -> Sequence[int]:
        """The ranks that have no element of the parameter."""
        return [rank for rank, (first, end) in enumerate(pairwise(self.cuts)) if first == end]

    @property
    def is_full(self) -> bool:
        """Whether the shard has all elements."""
        return self.stop - self.start == self.slot.numel


_known: Any = WeakTensorKeyDictionary()
"""A record for each watched tensor: the `Watch`, the part of the parameter, and words that describe the tensor."""


class _Known(NamedTuple):
    look: Watch
    part: _Part
    kind: str
    placed: bool = False
    """Whether the tensor is a view of elements at some positions."""

    wrong: frozenset[Any] | None = None
    """Of a sum or a norm in the loss: the functions whose gradients would be wrong, or all but `_SQUARES` if empty."""


def _first(arguments: Iterable[Any]) -> _Known | None:
    """Return the record of the first watched tensor in arguments and lists, if possible of a partial shard."""
    known = [found for each in arguments if (found := _known_as(each)) is not None]
    return next((each for each in known if not each.part.is_full), next(iter(known), None))


def _known_as(argument: Any) -> _Known | None:
    """Return the record of a tensor. For a list, return the first record of a partial shard, else the first record."""
    if isinstance(argument, list | tuple):
        return _first(each for each in argument if isinstance(each, _Watched))
    return _known.get(argument) if isinstance(argument, _Watched) else None


_used: dict[Any, Operators] = {}
"""The operators of each function that was called, by the function and the types of its arguments."""


def _judged(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], known: _Known) -> Any:
    """Call a function with a watched tensor. Warn or raise if it is wrong for a shard. Watch elementwise results."""
    if known.wrong is not None:
        return _judged_in_loss(func, args, kwargs, known)
    _check_write(func, args)
    key = (func, *map(type, args), *kwargs)
    operators = _used.get(key) or Operators()
    try:
        with as_they_are(), nullcontext() if key in _used else operators:
            result = func(*args, **kwargs)
    except (RuntimeError, IndexError, ValueError):
        if operators.names or func in _SINGLE or known.part.start == known.part.stop:
            _judge(func, operators.names, args, kwargs, known)
        raise
    if func in _SINGLE or func is Tensor.__setitem__:  # written positions of a shard are checked above
        operators.names -= SELECTIONS
    if not isinstance(func, FunctionType) and func not in _SINGLE:
        _used[key] = operators
    if operators.names or func in _SINGLE:
        _judge(func, operators.names, args, kwargs, known)
    if _flows(args, kwargs, operators.names) and not known.part.is_full:
        is_norm = not _NORMS.isdisjoint(operators.names) and 1 not in (*args[1:2], *kwargs.values())
        for each in result if isinstance(result, list | tuple) else [result]:
            _see(each, known._replace(kind=f"a sum of {known.kind}", wrong=frozenset() if is_norm else _CURVED))
    elif operators.names and known.part.without:
        _see_reordered(func, args, kwargs, result, known)
    elif not operators.names and _known_as(args[0] if args else None) is not None:
        _see_results(func, args, result)
    return result


def _judged_in_loss(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], known: _Known) -> Any:
    """Call a function with a sum or a norm that flows into the loss. Warn if its gradient needs the other parts."""
    with as_they_are():
        result = func(*args, **kwargs)
    name = getattr(func, "__name__", "")
    if func in known.wrong if known.wrong else func not in _SQUARES and name not in ("__get__", "__repr__"):
        _warn(f"{name} of {known.kind} of {known.part.slot.name!r}", func, known)
    elif type(result) is Tensor and all(_known_as(each) for each in args if isinstance(each, Tensor | list | tuple)):
        _see(result, known._replace(wrong=_CURVED))
    return result


def _judge(
    func: Callable[..., Any], operators: set[str], args: Sequence[Any], kwargs: dict[str, Any], known: _Known
) -> None:
    """Warn or raise if a call is wrong for a shard, given the operators that are not elementwise."""
    part = known.part
    what = f"{getattr(func, '__name__', func)} of {known.kind} of {part.slot.name!r}"
    if part.without and _results_if_empty(func, args, kwargs) is None:
        raise LayoutError(
            f"{what}: ranks {list(part.without)} have no element of that parameter, and only they would fail. "
            f"Compute it inside `gathered()`; for norms of gradients call `clip_grad_norm_()` of the model"
        )
    if not (part.is_full or operators <= CONDITIONS or _flows(args, kwargs, operators)):
        _warn(what, func, known)


def _warn(what: str, func: Callable[..., Any], known: _Known) -> None:
    """Warn once per model that a value covers only a part."""
    look, part = known.look, known.part
    if look.warned:
        return
    look.warned = True
    warnings.warn(
        f"{what} covers only this rank's part, elements {part.start} to {part.stop} of {part.slot.numel}. For norms of "
        "gradients call `clip_grad_norm_()` of the ShardLite model, for other values of full parameters use "
        "`gathered()`. A step that needs such values (LAMB, adaptive clipping) belongs in an optimizer class, which "
        "`shardlite.WholeParameters` gives full parameters. (This warning is given once per model.)",
        ShardWarning,
        stacklevel=7 if isinstance(func, FunctionType) else 5,
    )


def _flows(args: Sequence[Any], kwargs: dict[str, Any], operators: set[str]) -> bool:
    """Return whether a gradient flows back through the call, as through a penalty in the loss.

    Sums give correct gradients even if each rank computes them for its own part of a parameter.
    """
    sums = _SUMS | {"mse_loss", "smooth_l1_loss", "huber_loss"} if kwargs.get("reduction") == "sum" else _SUMS
    if not (operators and operators <= sums and torch.is_grad_enabled()):
        return False
    first = args[0] if args else None
    tensor = next(iter(first), None) if isinstance(first, list | tuple) else first
    return isinstance(tensor, Tensor) and tensor.requires_grad


def _results_if_empty(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Sequence[Any] | None:
    """Return the results of a call on a rank that has no element of the parameter. `None`: the call would raise.

    On that rank, other tensors with the shape of the shard, such as old copies, have no element either.
    """
    shapes = [each.shape for each in (*args, *kwargs.values()) if isinstance(each, Tensor) and each in _known]

    def emptied(value: Any) -> Any:
        if type(value) in (list, tuple):
            return type(value)(map(emptied, value))
        is_part = _known_as(value) is not None or (isinstance(value, Tensor) and value.shape in shapes)
        return value.new_empty((0, *[1] * (value.ndim - 1))) if is_part else value

    if _writes(func):
        return ()
    try:
        with as_they_are(), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = func(*map(emptied, args), **{name: emptied(value) for name, value in kwargs.items()})
    except (RuntimeError, IndexError, ValueError):
        return None
    return result if isinstance(result, list | tuple) else [result]


def _see_reordered(
    func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], result: Any, known: _Known
) -> None:
    """Watch the results of a function such as `sort`, which are of the shard's size and so are empty on some ranks.

    Reading one of their elements would raise on these ranks only.
    """
    if not isinstance(source := args[0] if args else None, Tensor):
        return
    seen = known._replace(kind=f"the result of {getattr(func, '__name__', func)} of {known.kind}")
    results = result if isinstance(result, list | tuple) else [result]
    for each, there in zip(results, _results_if_empty(func, args, kwargs) or (), strict=False):
        if type(each) is Tensor and each.shape == source.shape and there.shape == (0, *[1] * (source.ndim - 1)):
            _see(each, seen)


def _see_results(func: Callable[..., Any], args: Sequence[Any], result: Any) -> None:
    """Watch the results of an elementwise function. The i-th result belongs to the i-th tensor of a list."""
    name = getattr(func, "__name__", "")
    if name.startswith("new_") or name.endswith(("_like", "as_strided")) or (name == "__get__" and func not in _VIEWS):
        return  # `as_strided`: ShardLite itself views shards with their padding
    first, results = args[0], result if isinstance(result, list | tuple) else [result]
    sources = first if isinstance(first, list | tuple) and len(first) == len(results) else [first] * len(results)
    by_position = func in _BY_POSITION and (func is not Tensor.__getitem__ or _selects(args[1]))
    for source, each in zip(sources, results, strict=True):
        if type(each) is Tensor and (known := _known_as(source)) is not None:
            _see(each, known._replace(placed=known.placed or by_position))


def _check_write(func: Callable[..., Any], args: Sequence[Any]) -> None:
    """Raise if a function writes to elements of a shard by their positions."""
    known = _known_as(args[0] if args else None)
    if known is None or (known.part.is_full and not known.part.without):
        return
    selects = func in _PLACED and (func is not Tensor.__setitem__ or _selects(args[1]))
    if selects or (known.placed and _writes(func)):
        raise LayoutError(
            f"{getattr(func, '__name__', func)} of {known.kind} of {known.part.slot.name!r}: "
            "positions in a shard are not those in its parameter, so other elements would be written. Write to a "
            "gradient in a hook of the module's own parameter (`register_hook`), and to weights inside `gathered()`"
        )


def _writes(func: Callable[..., Any]) -> bool:
    """Return whether a function writes to its first argument."""
    name = getattr(func, "__name__", "")
    writes = name.startswith(("__i", "__setitem__")) if name.startswith("__") else name.endswith("_")
    return writes and name not in _READS


def _refuse_mixtures(func: Callable[..., Any], args: Sequence[Any]) -> None:
    """Raise if a function combines a shard, or its gradient, with elements that are not those of the shard.

    In a hand-written step, the other tensor may be the full parameter. In a moving average, the other tensor may be a
    full copy that was made before wrapping, or a shard of another model.
    """
    for together in _side_by_side(args):
        all_parts = [known.part for known in map(_known_as, together) if known is not None]
        for part, other in pairwise(all_parts):
            if part.slot.shape == other.slot.shape and part.cuts != other.cuts:
                raise LayoutError(
                    f"{getattr(func, '__name__', func)} of shards of {part.slot.name!r} and {other.slot.name!r}, which "
                    "are cut at different elements: parameters that were trainable and frozen when a model was wrapped "
                    "lie apart. For equal cuts wrap both models with the same options and the same `requires_grad`, "
                    "and freeze the teacher afterwards (`teacher.requires_grad_(False)`); or use `shardlite.EMA`"
                )
        parts = [part for part in all_parts if not part.is_full]
        sizes = [part.slot.shape for part in parts if part.slot.numel > 1]
        for each in together:
            if isinstance(each, Sharded) or (not isinstance(each, _Watched) and each.shape in sizes):
                of = f" of {parts[0].slot.name!r}" if parts else ""
                raise LayoutError(
                    f"{getattr(func, '__name__', func)} of a tensor of the size of a full parameter and a shard{of}: "
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


def _selects(index: Any) -> bool:
    """Return whether an index selects elements by their positions. Masks and whole slices do not."""
    for each in index if isinstance(index, tuple) else (index,):
        is_full = each is None or each is Ellipsis or (isinstance(each, slice) and each == slice(None))
        if not is_full and not (isinstance(each, Tensor) and each.dtype == torch.bool):
            return True
    return False


class _Watched:
    """Mixin for tensors that intercept every function that is called with one of them."""

    ordinary: ClassVar[type]
    """The class of the tensor while the tensor is not watched."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Check the call, and watch its result if it is elementwise."""
        kwargs = kwargs or {}
        known = None
        if not torch.compiler.is_compiling():
            wait_for_steps(func, args, kwargs)
            if func in _ARITHMETIC:
                _refuse_mixtures(func, args)
            known = None if func in _UNJUDGED else _first((*args, *kwargs.values()))
        if known is not None and (known.part.without or not known.part.is_full):
            return iter(args[0].unbind()) if func is Tensor.__iter__ else _judged(func, args, kwargs, known)
        with as_they_are():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        """Copy as an ordinary tensor."""
        tensor, kind = cast(Any, self), type(self)
        wait_for_steps(copy.deepcopy, tensor)
        tensor.__class__ = self.ordinary
        try:
            return copy.deepcopy(tensor, memo)
        finally:
            tensor.__class__ = kind


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
        wait_for_steps(get_grad, self)
        with as_they_are():
            grad: Tensor | None = get_grad(self)
        if type(grad) is Tensor and (known := _known.get(self)) is not None:  # a copy has no record
            _see(grad, known._replace(kind="the gradient of the shard"))
        return grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        with as_they_are():
            set_grad(self, value)


def _see(tensor: Tensor, known: _Known, kind: type[Tensor] = _Seen) -> None:
    tensor.__class__ = kind
    _known[tensor] = known
    known.look.seen[tensor] = True
