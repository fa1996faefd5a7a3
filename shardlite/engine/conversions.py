"""Conversions of a wrapped model's modules: `.to()`, `.half()`, `.cuda()` and the like.

PyTorch converts a module by `nn.Module._apply`, which gives its parameters other memory. The shards would not follow.
So a conversion raises before it has changed anything, whichever module of the model it begins at. One that changes
nothing (`.to(device)` where the model is) does nothing.
"""

from collections.abc import Callable, Collection
from functools import wraps
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from shardlite.errors import LayoutError
from shardlite.params import as_they_are

_wrapped: "WeakSet[nn.Module]" = WeakSet()
"""Modules with parameters of a wrapped model. (Not an attribute of them: copies are modules like any other.)"""


def refuse_conversions(module: nn.Module, ignored: Collection[Tensor]) -> None:
    """Refuse conversions of `module` and of the modules in it that have other parameters than `ignored`."""
    _wrapped.update(each for each in module.modules() if any(param not in ignored for param in each.parameters()))


def allow_conversions(module: nn.Module) -> None:
    """Undo `refuse_conversions`."""
    _wrapped.difference_update(module.modules())


def _guarded(original: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    @wraps(original)
    def apply(module: nn.Module, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> nn.Module:
        """Convert a module as ever, unless it is wrapped.

        Raises:
            LayoutError: it is, and `fn` changes a parameter or a buffer.
        """
        if module not in _wrapped:
            return original(module, fn, *args, **kwargs)
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if _changes(tensor, fn):
                raise LayoutError(
                    f"{type(module).__name__}: a wrapped model cannot be moved or converted, and this would convert "
                    f"{name!r}: call .to(), .half() and the like before wrapping. To compute in another dtype, wrap "
                    "with Precision(compute=...) or use torch.autocast; for a plain model, call unwrap()"
                )
        return module

    return apply


def _changes(tensor: Tensor, convert: Callable[[Tensor], Tensor]) -> bool:
    """Return whether a conversion would change a tensor. It is tried on a small one of the same kind."""
    with as_they_are():
        small = torch.empty((2,) * tensor.ndim, dtype=tensor.dtype, device=tensor.device)
    return convert(small) is not small or (small.is_cpu and small.is_shared())  # type: ignore[no-untyped-call]


setattr(nn.Module, "_apply", _guarded(nn.Module._apply))  # noqa: B010 (mypy refuses assignment)
