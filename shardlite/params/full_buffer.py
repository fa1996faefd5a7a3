"""A buffer for one unit's full weights. It detects whether tensors outside the library still view its memory."""

from collections.abc import Callable

import torch
from torch import Tensor

ViewPlace = tuple[torch.dtype, torch.Size, tuple[int, ...], int]
"""Dtype, size, strides and first element of a view."""

_MOST_KEPT = 128
"""Number of sets of views that a buffer keeps. Programs may cut weights in ever new ways."""


class Buffer:
    """Memory for the full weights of one unit at a time."""

    def __init__(self, memory: Tensor, *, kept: bool = False) -> None:
        self.bytes = memory
        self.nbytes = memory.numel()
        self.kept = kept
        """Whether a pool keeps this buffer for later gathers."""

        self.key = storage_key(self.bytes)
        self._own_uses = torch._C._storage_Use_Count(self.key)
        self._views: dict[object, list[Tensor]] = {}

    def views(self, owner: object, make: Callable[[Tensor], list[Tensor]]) -> list[Tensor]:
        """Return the views of the memory that `make` creates for `owner`, cached after the first call.

        Inside a dispatch mode, views may have a different type. Such views are not cached.
        """
        cached = self._views.get(owner)
        if cached is not None:
            return cached
        if torch._C._len_torch_dispatch_stack():
            return make(self.bytes)
        before = torch._C._storage_Use_Count(self.key)
        cached = self._views[owner] = make(self.bytes)
        self._own_uses += torch._C._storage_Use_Count(self.key) - before
        return cached

    def kept_view(self, place: ViewPlace) -> Tensor | None:
        """Return the view at `place` if the buffer has kept it. Autograd computes with a copy of the tensor object."""
        kept = self._views.get(place)
        return None if kept is None else kept[0]

    def view(self, place: ViewPlace) -> Tensor:
        """Return the view at `place`, and keep it if there is room."""

        def make(memory: Tensor) -> list[Tensor]:
            dtype, size, stride, first = place
            return [memory.view(dtype).as_strided(size, stride, first)]

        return (self.views(place, make) if len(self._views) < _MOST_KEPT else make(self.bytes))[0]

    def escaped(self, params: int = 0) -> bool:
        """Return whether a tensor outside the library views this buffer.

        The module's own parameters do not count. `params` is the number of those that view the buffer.
        """
        return bool(torch._C._storage_Use_Count(self.key) > self._own_uses + params)

    def poison(self) -> None:
        """Fill the buffer with NaN: setting all bits gives NaN in every floating-point dtype."""
        self.bytes.fill_(0xFF)


def storage_key(tensor: Tensor) -> int:
    """Return a number that identifies the storage of `tensor`. All views of one storage have the same number."""
    key: int = tensor.untyped_storage()._cdata
    return key
