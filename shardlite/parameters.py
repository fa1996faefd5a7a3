"""Parameters that know that they are sharded.

A parameter whose values are elsewhere is a `Placeholder`: it has the shape, the dtype and the attributes of the
parameter, and whatever needs its values asks the wrapped model for them first. The model gathers its unit if it is in a
forward or a backward, and raises otherwise. So nobody ever computes with what a placeholder holds, which is NaN.

A parameter is turned into a placeholder and back by its `__class__`, as `torch.nn.parameter.UninitializedParameter` is:
it stays the same object, with its hooks, and while it is full nothing of this is in the way.
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

_ATTRIBUTES = (
    "shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "names", "requires_grad", "grad", "grad_dtype", "is_leaf",
    "grad_fn", "output_nr", "retains_grad", "_version", "_backward_hooks", "_post_accumulate_grad_hooks", "is_cpu", "is_cuda", "is_meta",
    "is_sparse", "is_sparse_csr", "is_nested", "is_quantized", "is_mps", "is_xpu", "is_mkldnn", "is_mtia", "is_maia", "is_ipu", "is_vulkan", "is_xla",
)  # fmt: skip
_METHODS = (
    "size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "get_device", "is_floating_point", "is_complex", "is_signed",
    "is_inference", "__len__", "requires_grad_", "register_hook", "register_post_accumulate_grad_hook",
    "new", "new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full", "new_tensor", "type",
)  # fmt: skip
_FUNCTIONS = (
    "numel", "is_floating_point", "is_complex", "is_signed", "is_inference", "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like",
    "get_device", "result_type",
)  # fmt: skip

_harmless: frozenset[Any] = frozenset(
    [
        *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES if hasattr(Tensor, name)),
        *(getattr(Tensor, name).__set__ for name in ("requires_grad", "grad", "names", "_backward_hooks", "grad_dtype") if hasattr(Tensor, name)),
        *(getattr(Tensor, name) for name in _METHODS),
        *(getattr(torch, name) for name in _FUNCTIONS),
    ]
)
"""What needs no values."""

_users: Any = WeakTensorKeyDictionary()
"""What to call before the values of a placeholder are used."""


class Placeholder:
    """A base of the class of a parameter while its values are elsewhere."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Have the values of placeholders gathered before `func` uses them."""
        kwargs = kwargs or {}
        if func in _harmless:
            with as_they_are():
                return func(*args, **kwargs)
        for each in tree_leaves((args, kwargs)):
            if isinstance(each, Placeholder):
                _users[each](each)
        return func(*args, **kwargs)

    def __repr__(self) -> str:
        """Tell the shape: there are no values."""
        with as_they_are():
            return f"Parameter, sharded: shape {list(self.shape)}, dtype {self.dtype}"  # type: ignore[attr-defined]


def as_they_are() -> AbstractContextManager[None]:
    """Look at placeholders without asking for their values."""
    return torch._C.DisableTorchFunctionSubclass()  # type: ignore[no-any-return]


def announce(params: Iterable[nn.Parameter], use: Callable[[nn.Parameter], None]) -> None:
    """Let `use` be called before somebody uses the values of these parameters while they are placeholders."""
    for param in params:
        _users[param] = use


def empty(param: nn.Parameter) -> None:
    """Turn a parameter into a placeholder."""
    kind = type(param)
    if not issubclass(kind, Placeholder):
        param.__class__ = _placeholder_of(kind)


def fill(param: nn.Parameter) -> None:
    """Turn a placeholder back into what it was."""
    kind = type(param)
    if issubclass(kind, Placeholder):
        param.__class__ = kind.__mro__[2]


class Shard(nn.Parameter):
    """A parameter that an optimizer steps: what this rank keeps of one of the module's.

    Of an ordinary parameter `.data` is memory whose changes nobody sees. Of a shard they are seen, so that the next
    forward gathers it anew.
    """

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """The shard, without its history: a view that shares the counter of changes."""
        view = self.detach()
        self._handed = ref(view)
        return view

    @data.setter
    def data(self, value: Tensor) -> None:
        """Copy `value` into the shard, whose memory is a part of a larger one.

        Raises:
            LayoutError: it has another shape, or somebody still has the former `.data`, which would change with it.
        """
        former = self._handed() if hasattr(self, "_handed") else None
        if value.shape != self.shape or (former is not None and former is not value):
            what = f"shape {list(value.shape)} instead of {list(self.shape)}" if value.shape != self.shape else "other memory, while its former `.data` is kept"
            raise LayoutError(
                f"a shard of shape {list(self.shape)} was given {what} (`.data = ...`): copy into it, `.data.copy_(...)`"
            )
        if former is not value:
            self.detach().copy_(value)


@cache
def _placeholder_of(kind: type) -> type:
    return type(kind)(f"Sharded{kind.__name__}", (Placeholder, kind), {})
