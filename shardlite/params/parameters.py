"""Parameters of a wrapped model: placeholders without values, full parameters, and shards.

While its unit is sharded, a parameter is a `Placeholder`: it has the parameter's shape, dtype and attributes. An
operation that needs its values first asks the wrapped model to unshard the unit. Outside of a forward or a backward the
model raises. So no computation reads the memory of a placeholder, which is NaN.

A parameter becomes a placeholder and back by assignment to `__class__`, as `torch.nn.parameter.UninitializedParameter`
does. It stays the same object and keeps its hooks. While it is full, its operations run as usual.

What happens to the parameter of a unit is passed on to its owner, a record of `engine/local_shards.py`.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from shardlite.errors import LayoutError

OTHER_SHAPES = (
    "load `full_state_dict()` into a new model that is not wrapped, change that one (`resize_token_embeddings(...)`), "
    "and wrap it, with a new optimizer"
)
"""What to do instead of changing the shape of a parameter of a wrapped model."""

_ATTRIBUTES = (
    *("shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "names", "requires_grad", "grad"),
    *("grad_dtype", "is_leaf", "grad_fn", "output_nr", "retains_grad", "_version", "_backward_hooks"),
    *("_post_accumulate_grad_hooks", "is_cpu", "is_cuda", "is_meta", "is_sparse", "is_sparse_csr", "is_nested"),
    *("is_quantized", "is_mps", "is_xpu", "is_mkldnn", "is_mtia", "is_maia", "is_ipu", "is_vulkan", "is_xla"),
)
_SETTABLE = ("requires_grad", "grad", "names", "_backward_hooks", "grad_dtype")
_METHODS = (
    *("size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "storage_offset"),
    *("untyped_storage", "get_device", "__len__", "is_floating_point", "is_complex", "is_signed"),
    *("is_inference", "requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "new", "new_empty"),
    *("new_empty_strided", "new_zeros", "new_ones", "new_full", "new_tensor"),
)
_FUNCTIONS = (
    *("numel", "is_floating_point", "is_complex", "is_signed", "is_inference", "get_device", "result_type"),
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
)

_harmless: frozenset[Any] = frozenset(
    [
        *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES if hasattr(Tensor, name)),
        *(getattr(Tensor, name).__set__ for name in _SETTABLE if hasattr(Tensor, name)),
        *(getattr(Tensor, name) for name in _METHODS),
        *(getattr(torch, name) for name in _FUNCTIONS),
        torch.autograd.grad,
    ]
)
"""Functions that need no values."""


_homes: Any = WeakTensorKeyDictionary()
"""The owner of each parameter of a wrapped model: it unshards the unit, and finds and drops the gradient."""


_handed_out: Any = WeakTensorKeyDictionary()
"""Weak references to the living `.data` tensors of each parameter.

(Not an attribute of the parameter: attributes are pickled with it.)
"""


class Sharded:
    """Mixin class of a wrapped model's parameters. The optimizer steps the shards instead of them."""

    @property
    def grad(self) -> Tensor | None:
        """The gradient of the shard; before it is reduced, this rank's own gradient."""
        home = _homes.get(self)
        return _own_grad.__get__(self) if home is None else home.gradient()  # type: ignore[no-any-return]

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        home = _homes.get(self)
        if home is None:  # a single rank: the parameter is its own shard
            _own_grad.__set__(self, value)
            return
        if value is not None:
            raise LayoutError(
                f"parameter {home.name!r} belongs to a wrapped model, whose optimizer steps shards: give the gradient "
                "to the shard, in `parameters()` of the ShardLite model"
            )
        home.drop_gradient()

    @property
    def data(self) -> Tensor:
        """The values, detached. Writes are detected at the end of the forward in which they are made."""
        home = _homes.get(self)
        if home is not None:
            home.touch()
        return _hand_out(self, _own_data.__get__(self))

    @data.setter
    def data(self, value: Tensor) -> None:
        if self in _homes:
            _copy_into(self, value)
        else:
            _own_data.__set__(self, value)


class Placeholder(Sharded):
    """A parameter whose unit is sharded."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Unshard the placeholders among the arguments before `func` uses them."""
        kwargs = kwargs or {}
        if func in _harmless:
            with as_they_are():
                return func(*args, **kwargs)
        used = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Placeholder)]
        if not all(each in _homes for each in used):  # the model is being wrapped
            with as_they_are():
                return func(*args, **kwargs)
        for each in used:
            _homes[each].use()
        return func(*args, **kwargs)

    def __repr__(self) -> str:
        """Return the shape and the dtype. There are no values."""
        with as_they_are():
            return f"Parameter, sharded: shape {list(self.shape)}, dtype {self.dtype}"  # type: ignore[attr-defined]


as_they_are: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunctionSubclass
"""Access placeholders without unsharding them. This is PyTorch's class itself, because it is entered often."""


def attach(param: nn.Parameter, home: Any) -> None:
    """Make `param` a parameter of a wrapped model, owned by `home`."""
    _homes[param] = home
    kind = type(param)
    if not issubclass(kind, Sharded):
        param.__class__ = _mixed(Sharded, kind)


def to_placeholders(pairs: Iterable[tuple[nn.Parameter, Tensor]]) -> None:
    """Turn parameters into placeholders, each with its memory."""
    put = _own_data.__set__
    with as_they_are():
        for param, memory in pairs:
            put(param, memory)
            kind = type(param)
            if not issubclass(kind, Placeholder):
                param.__class__ = _mixed(Placeholder, getattr(kind, "original", kind))


def to_full(pairs: Iterable[tuple[nn.Parameter, Tensor]]) -> None:
    """Turn placeholders into full parameters of a wrapped model, each with its values."""
    put = _own_data.__set__
    with as_they_are():
        for param, values in pairs:
            put(param, values)
            kind = type(param)
            if issubclass(kind, Placeholder):
                param.__class__ = _mixed(Sharded, kind.original)  # type: ignore[attr-defined]


def detach(param: nn.Parameter, values: Tensor) -> None:
    """Make a parameter of a wrapped model an ordinary one with `values` and its former class: undo `attach`.

    The library's hooks and attributes are removed from it. Those of the program stay.
    """
    _homes.pop(param, None)
    _handed_out.pop(param, None)
    with as_they_are():
        _own_data.__set__(param, values)
        _own_grad.__set__(param, None)
        param.__class__ = getattr(type(param), "original", type(param))
        hooks = param._post_accumulate_grad_hooks or {}
    for number in [number for number, hook in hooks.items() if _is_ours(hook)]:
        del hooks[number]
    for name in [name for name in vars(param) if name.startswith("shardlite")]:
        delattr(param, name)


def _is_ours(hook: Any) -> bool:
    return getattr(getattr(hook, "func", hook), "__module__", "").startswith("shardlite.")


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is a `Tensor` or `nn.Parameter`, or a full parameter of a wrapped model that was one."""
    kind = type(tensor)
    return getattr(kind, "original", kind) in (Tensor, nn.Parameter)


def take_grad(param: nn.Parameter) -> tuple[Tensor | None, bool]:
    """Remove and return the gradient that autograd has accumulated, and whether `param` has several hooks for it."""
    with as_they_are():
        grad: Tensor | None = _own_grad.__get__(param)
        _own_grad.__set__(param, None)
        hooks = param._post_accumulate_grad_hooks
    return grad, hooks is not None and len(hooks) > 1


_own_grad: Any = torch._C.TensorBase.grad
_own_data: Any = torch._C.TensorBase.data


@cache
def _mixed(what: type, kind: type) -> type:
    return type(kind)(f"{what.__name__}{kind.__name__}", (what, kind), {"original": kind})


class Shard(nn.Parameter):
    """A parameter that an optimizer steps: this rank's part of a parameter of the module.

    Unlike those of an ordinary parameter, writes through `.data` of a shard are counted, so that the next forward
    gathers it again.
    """

    @property
    def data(self) -> Tensor:
        """The shard, detached: a view that shares its version counter."""
        return _hand_out(self, self.detach())

    @data.setter
    def data(self, value: Tensor) -> None:
        _copy_into(self, value)


def _hand_out(param: Any, view: Tensor) -> Tensor:
    """Record `view` among the living `.data` of `param`, and return it."""
    _handed_out[param] = [*(each for each in _handed_out.get(param, ()) if each() is not None), ref(view)]
    return view


def _copy_into(param: Any, value: Tensor) -> None:
    """Copy `value` into `param` when `.data` is assigned. The memory of `param` is a part of a larger buffer.

    A former `.data` that is alive gets its own memory and keeps its values, as with an ordinary parameter. So does a
    `value` that is a view of `param` (`param.data.T`).

    Raises:
        LayoutError: the shape differs, or views of a former `.data` are alive and would change as well.
    """
    if value.shape != param.shape:
        raise LayoutError(
            f"a parameter of shape {list(param.shape)} of a wrapped model was given data of shape {list(value.shape)}, "
            f"but its shards keep their place: {OTHER_SHAPES}"
        )
    there = param.data
    with as_they_are():
        if value.data_ptr() == there.data_ptr() and value.stride() == there.stride():
            return
        held = [each for former in _handed_out[param] if (each := former()) is not None and each is not there]
        held = [each for each in held if each.data_ptr() == there.data_ptr()]  # others view a former buffer
        for each in held:
            _check_unviewed(each, value)
        for each in (*held, value) if _begins_in(there, value) else held:
            _own_data.__set__(each, each.detach().clone())
    there.copy_(value)


def _check_unviewed(former: Tensor, value: Tensor) -> None:
    """Raise if views of a former `.data` may be alive, unless `value` was computed from it.

    A graph that saved it counts as a view, because PyTorch does not tell the two apart.
    """
    if former._use_count() > 1 and value.grad_fn is None and value._base is not former:  # type: ignore[attr-defined]
        raise LayoutError(
            "a parameter of a wrapped model was given other memory (`.data = ...`) while a view of its former `.data`, "
            "or a computation with it, is kept somewhere and would change as well: keep a copy, `.data.clone()`"
        )


def _begins_in(memory: Tensor, tensor: Tensor) -> bool:
    """Return whether a tensor begins inside the memory of another, contiguous one."""
    return memory.data_ptr() <= tensor.data_ptr() < memory.data_ptr() + memory.nbytes


def is_dtensor(value: object) -> bool:
    """Return whether a value is a DTensor. (Its class is found by name because importing it is slow.)"""
    return any(f"{each.__module__}.{each.__qualname__}".endswith(".DTensor") for each in type(value).__mro__)


def scripts(model: nn.Module) -> set[nn.Module]:
    """Return the TorchScript modules and all modules inside them. They accept no hooks."""
    outer = [module for module in model.modules() if isinstance(module, torch.jit.ScriptModule)]
    return {inner for script in outer for inner in script.modules()}
