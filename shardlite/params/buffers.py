"""Buffers for full weights, and pools that keep them on a GPU.

    take -> [gather, compute] -> give back -> take again: by the unit that had the buffer last, if it is free

On a GPU a pool keeps a few buffers for the life of the model. A unit then finds its weights at the same addresses in
every step, which a CUDA graph needs (`torch.compile(mode="reduce-overhead")` records again when an address changes),
and a steady step asks the allocator for no buffer. On a CPU no buffer is kept: the transport reuses the pages.

A pool orders no streams. Who gives a buffer back has put the home stream behind all streams that use it, and who takes
one writes to it behind the home stream.
"""

import weakref
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from shardlite.comm import Context, Transport

BUCKETS = 2
"""Buckets on a CPU that exist at once beside the root's, while ranks follow one order: one is reduced as another fills.

It is one where shards are stepped in the backward on CPUs: such a program asks for little memory, and reductions take
the cores that would fill the next bucket. A backward waits for a reduction rather than take more. It must not wait for
one that a peer starts only after a gather that takes this rank: `comm/control/progress.py`.
"""


class Buffer:
    """Memory for one unit's full weights, which can tell whether other tensors still view it."""

    kept = False
    """Whether it is one of those that a pool keeps."""

    def __init__(self, memory: Tensor) -> None:
        self.bytes = memory
        self.nbytes = memory.numel()
        self.key = storage_key(self.bytes)
        self._own_uses = torch._C._storage_Use_Count(self.key)
        self._views: dict[object, list[Tensor]] = {}

    def views(self, owner: object, make: Callable[[Tensor], list[Tensor]]) -> list[Tensor]:
        """Return the views that `make` has made of the memory for `owner`. They are kept, and not made again.

        Not within a mode of the program, or a `torch.func` transform, in which tensors may be of another kind.
        """
        kept = self._views.get(owner)
        if kept is not None:
            return kept
        if torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack() is not None:
            return make(self.bytes)
        before = torch._C._storage_Use_Count(self.key)
        kept = self._views[owner] = make(self.bytes)
        self._own_uses += torch._C._storage_Use_Count(self.key) - before
        return kept

    def escaped(self) -> bool:
        """Whether tensors outside the library still view this buffer. Call it after our own views are gone."""
        return bool(torch._C._storage_Use_Count(self.key) > self._own_uses)

    def poison(self) -> None:
        """Fill with NaN: all bits set is a NaN in every floating-point dtype."""
        self.bytes.fill_(0xFF)


class BufferPool:
    """Buffers for one purpose, of which up to `most` are kept on a GPU, and none on a CPU.

    More may be in use at once. Those are freed when they are given back, so that the kept ones stay the same.
    """

    def __init__(self, context: Context, purpose: str, *, most: int, carrier: Transport | None = None) -> None:
        """Kept buffers are memory of `carrier`, the transport that sends them, if it is given."""
        self._context = context
        self._carrier = carrier
        self._ledger = context.ledger
        self._purpose = purpose
        self._most = most if context.streams.on_gpu else 0
        self._free: list[Buffer] = []
        self._kept: weakref.WeakSet[Buffer] = weakref.WeakSet()
        """Those that are free, and those in use that will be."""

        self._last: dict[Hashable, weakref.ref[Buffer]] = {}

    def take(self, owner: Hashable, nbytes: int) -> Buffer:
        """Return a buffer of `nbytes` or more.

        It is the one that `owner` had last, else the smallest free one that is large enough, else new memory, for which
        a free one that is too small is given up.
        """
        buffer = self._find(owner, nbytes) or self._allocate(nbytes)
        if buffer.kept:
            self._last[owner] = weakref.ref(buffer)
        self._ledger.track(self._purpose, buffer.bytes)  # again: its user may have counted it for something else
        return buffer

    def give_back(self, buffer: Buffer) -> bool:
        """Keep a buffer for the next one who takes it, if it is one of those to keep. Return whether it is kept.

        A buffer that other tensors still view is not.
        """
        keeps = buffer.kept and not buffer.escaped()
        if keeps:
            self._free.append(buffer)
        return keeps

    def last(self, owner: Hashable) -> Buffer | None:
        """Return the buffer that `owner` had last, if it is one of those that are kept."""
        last = self._last.get(owner)
        return None if last is None else last()

    def fits(self, buffer: Buffer, nbytes: int) -> bool:
        """Whether a buffer can serve for `nbytes`. One that is not kept has to have just that size."""
        return buffer.nbytes >= nbytes if buffer.kept else buffer.nbytes == nbytes

    def is_surplus(self, buffer: Buffer) -> bool:
        """Whether this is one more than those that are kept."""
        return self._most > 0 and not buffer.kept

    def spare(self) -> list[Tensor]:
        """Return the memory of the free buffers."""
        return [buffer.bytes for buffer in self._free]

    def _find(self, owner: Hashable, nbytes: int) -> Buffer | None:
        fitting = [buffer for buffer in self._free if buffer.nbytes >= nbytes]
        if not fitting:
            return None
        last = self.last(owner)
        found = last if last in fitting else min(fitting, key=_nbytes_of)
        self._free.remove(found)
        return found

    def _allocate(self, nbytes: int) -> Buffer:
        if self._free and len(self._kept) >= self._most:
            self._free.remove(min(self._free, key=_nbytes_of))  # before, not after, there is another one
        if len(self._kept) >= self._most:
            return Buffer(self._context.empty(nbytes, torch.uint8))
        buffer = Buffer(self._persistent(nbytes))
        buffer.kept = True
        self._kept.add(buffer)
        return buffer

    def _persistent(self, nbytes: int) -> Tensor:
        if self._carrier is None:
            return self._context.empty(nbytes, torch.uint8)
        return self._carrier.empty_persistent(nbytes, self._context.device)


def storage_key(tensor: Tensor) -> int:
    """Return what all views of one storage, and only they, have in common."""
    key: int = tensor.untyped_storage()._cdata
    return key


def _nbytes_of(buffer: Buffer) -> int:
    return buffer.nbytes
