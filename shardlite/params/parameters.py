"""Parameters that know that they are sharded.

A parameter whose values are elsewhere is a `Placeholder`: it has the shape, the dtype and the attributes of the
parameter, and whatever needs its values asks the wrapped model for them first. The model gathers its unit if it is in a
forward or a backward, and raises otherwise. So nobody ever computes with what a placeholder holds, which is NaN.

A parameter is turned into a placeholder and back by its `__class__`, as `torch.nn.parameter.UninitializedParameter` is:
it stays the same object, with its hooks, and while it is full nothing of this is in the way.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from shardlite.errors import LayoutError

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
"""What needs no values."""


class Home(Protocol):
    """Where a sharded parameter belongs."""

    @property
    def name(self) -> str:
        """Of the parameter."""

    def use(self) -> None:
        """Have the values of the parameter gathered, or raise."""

    def gradient(self) -> Tensor | None:
        """Return the gradient of the shard or, before it is reduced, of the whole parameter on this rank."""

    def drop_gradient(self) -> None:
        """Forget it."""

    def touch(self) -> None:
        """Take note that somebody is given the memory of the values, or raise if writes there would be lost."""


_homes: Any = WeakTensorKeyDictionary()
"""The home of each parameter of a wrapped model."""


_handed_out: Any = WeakTensorKeyDictionary()
"""The latest `.data` of each parameter. (Not an attribute of it: those are pickled with parameters.)"""


class Sharded:
    """A base of the class of a parameter of a wrapped model: what optimizers step is another one, its shard."""

    @property
    def grad(self) -> Tensor | None:
        """The gradient that the optimizer of the shard sees; before it is reduced, that of this rank."""
        home = _homes.get(self)
        return _own_grad.__get__(self) if home is None else home.gradient()  # type: ignore[no-any-return]

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        home = _homes.get(self)
        if home is None:  # on one rank a parameter is its own shard
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
        """The values, without their history. Writes are noticed when the forward that makes them ends."""
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
    """The same, while its values are elsewhere."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Have the values of placeholders gathered before `func` uses them."""
        kwargs = kwargs or {}
        if func in _harmless:
            with as_they_are():
                return func(*args, **kwargs)
        used = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Placeholder)]
        if not all(each in _homes for each in used):  # the model is being made
            with as_they_are():
                return func(*args, **kwargs)
        for each in used:
            _homes[each].use()
        return func(*args, **kwargs)

    def __repr__(self) -> str:
        """Tell the shape: there are no values."""
        with as_they_are():
            return f"Parameter, sharded: shape {list(self.shape)}, dtype {self.dtype}"  # type: ignore[attr-defined]


def as_they_are() -> AbstractContextManager[None]:
    """Look at placeholders without asking for their values."""
    return torch._C.DisableTorchFunctionSubclass()


def settle(param: nn.Parameter, home: Home) -> None:
    """Let a parameter be one of a wrapped model."""
    _homes[param] = home
    _become(param, Sharded)


def empty(param: nn.Parameter) -> None:
    """Turn a parameter into a placeholder."""
    _become(param, Placeholder)


def fill(param: nn.Parameter) -> None:
    """Turn a placeholder whose values are there again into an ordinary parameter of a wrapped model."""
    kind = type(param)
    if issubclass(kind, Placeholder):
        param.__class__ = _mixed(Sharded, kind.original)  # type: ignore[attr-defined]


def place(param: nn.Parameter, memory: Tensor) -> None:
    """Let a parameter lie there."""
    with as_they_are():
        _own_data.__set__(param, memory)


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is of PyTorch's own classes, or a parameter of a wrapped model that was, with its values."""
    kind = type(tensor)
    return getattr(kind, "original", kind) in (Tensor, nn.Parameter)


def take_grad(param: nn.Parameter) -> tuple[Tensor | None, bool]:
    """Take the gradient away that autograd has put there; return it, and whether several hooks were to see it."""
    with as_they_are():
        grad: Tensor | None = _own_grad.__get__(param)
        _own_grad.__set__(param, None)
        hooks = param._post_accumulate_grad_hooks
    return grad, hooks is not None and len(hooks) > 1


_own_grad: Any = torch._C.TensorBase.grad
_own_data: Any = torch._C.TensorBase.data


def _become(param: nn.Parameter, what: type) -> None:
    kind = type(param)
    if not issubclass(kind, what):
        param.__class__ = _mixed(what, getattr(kind, "original", kind))


@cache
def _mixed(what: type, kind: type) -> type:
    return type(kind)(f"{what.__name__}{kind.__name__}", (what, kind), {"original": kind})


class Shard(nn.Parameter):
    """A parameter that an optimizer steps: what this rank keeps of one of the module's.

    Of an ordinary parameter `.data` is memory whose changes nobody sees. Of a shard they are seen, so that the next
    forward gathers it anew.
    """

    @property
    def data(self) -> Tensor:
        """The shard, without its history: a view that shares the counter of changes."""
        return _hand_out(self, self.detach())

    @data.setter
    def data(self, value: Tensor) -> None:
        _copy_into(self, value)


def _hand_out(param: Any, view: Tensor) -> Tensor:
    """Return a view, and remember it."""
    _handed_out[param] = ref(view)
    return view


def _copy_into(param: Any, value: Tensor) -> None:
    """Copy values into a parameter that was given other memory: its own is a part of a larger one.

    Raises:
        LayoutError: they have another shape, or somebody still has the former `.data`, which would change with it.
    """
    former = _handed_out[param]() if param in _handed_out else None
    if value.shape != param.shape:
        raise LayoutError(
            f"a parameter of shape {list(param.shape)} of a wrapped model was given data of shape {list(value.shape)}"
        )
    if former is not None and former is not value:
        raise LayoutError(
            "a parameter of a wrapped model was given other memory (`.data = ...`) while its former `.data` is kept "
            "somewhere, which would change with it: copy into it, `.data.copy_(...)`"
        )
    if former is not value:
        param.data.copy_(value)


def is_dtensor(value: object) -> bool:
    """Whether a value is a DTensor. (Its class is looked for by name: to import it takes a while.)"""
    return any(f"{each.__module__}.{each.__qualname__}".endswith(".DTensor") for each in type(value).__mro__)
