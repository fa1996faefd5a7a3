"""Buffers that change in forwards (running statistics): broadcast rank 0's when the next forward begins.

`DistributedDataParallel` does the same by default. Otherwise each rank has statistics of its own batches, and an
evaluation gives other results on each rank. Only buffers that some rank may have changed are sent, not masks and large
tables.
"""

import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor, nn

from shardlite.comm import Context, broadcast
from shardlite.errors import LayoutError

LARGE = 65536
"""Number of elements above which a buffer on a CPU is compared before it is sent."""


@dataclass(eq=False)
class _Place:
    """The place of a buffer in its module, and its state at the latest `record`."""

    name: str
    module: nn.Module
    key: str
    seen: "weakref.ref[Tensor] | None" = None
    version: int = -1
    trained: bool = False
    """Whether the module was in training mode."""

    sums: tuple[float, float] | None = None
    """Fingerprint of its elements, if it is large."""

    @property
    def buffer(self) -> Tensor | None:
        """The current buffer."""
        return self.module._buffers.get(self.key)

    def changed(self) -> bool:
        """Whether the buffer may have been written to or replaced since `record`.

        PyTorch counts neither writes of batch normalization nor writes through `.data`. So numeric buffers of modules
        in training mode count as changed, except large ones, which are compared.
        """
        buffer = self.buffer
        if buffer is None:
            return self.seen is not None
        trains = (self.trained or self.module.training) and _is_number(buffer)
        unseen = trains and (not _is_compared(buffer) or self.sums != _sums(buffer))
        return unseen or self.seen is None or self.seen() is not buffer or buffer._version != self.version

    def record(self) -> None:
        """Record the state of the buffer, with which `changed` compares."""
        buffer = self.buffer
        self.seen = None if buffer is None else weakref.ref(buffer)
        self.version = -1 if buffer is None else buffer._version
        self.trained = self.module.training
        self.sums = None if buffer is None or not _is_compared(buffer) else _sums(buffer)


class Buffers:
    """The buffers of one wrapped model that its ranks share."""

    def __init__(self, module: nn.Module, context: Context, ignored: Collection[nn.Module]) -> None:
        """Leave out buffers of `ignored` modules."""
        self._context = context
        own = {id(buffer) for each in ignored for buffer in each.buffers()}
        places = {
            id(buffer): _Place(f"{path}.{key}".lstrip("."), each, key)
            for path, each in module.named_modules()
            for key, buffer in each._buffers.items()
            if buffer is not None and id(buffer) not in own
        }
        self._places = list(places.values())
        self._due = context.world_size > 1 and bool(self._places)
        for place in self._places:
            place.record()

    def before_forward(self, *, trains: bool) -> None:
        """Broadcast changed buffers, if the previous forward may have changed any. `trains`: whether the next one may.

        Raises:
            LayoutError: a buffer has another shape on another rank.
        """
        if self._due:
            self._send(self._changed())
        self._due = trains and self._context.world_size > 1 and bool(self._places)

    def _changed(self) -> list[_Place]:
        """Return the buffers that have changed on any rank, by one all-reduce."""
        numels = [0 if place.buffer is None else place.buffer.numel() for place in self._places]
        rows = [(place.changed(), n, n * n) for place, n in zip(self._places, numels, strict=True)]
        numbers = torch.tensor(rows, dtype=torch.int64)
        operation = self._context.operation("which buffers have changed", "buffers")
        self._context.all_reduce_host(numbers.view(-1), operation)
        changed = []
        for place, (ranks, total, squares) in zip(self._places, numbers.tolist(), strict=True):
            if ranks and squares * self._context.world_size != total * total:
                raise LayoutError(
                    f"buffer {place.name!r} has another length on some rank, and rank 0's would be copied to all. "
                    'Give it the same length on all ranks, or wrap with buffers="own"'
                )
            if ranks and total:
                changed.append(place)
        return changed

    @torch.no_grad()
    def _send(self, places: Sequence[_Place]) -> None:
        """Overwrite these buffers with rank 0's."""
        buffers = {place.name: buffer for place in places if (buffer := place.buffer) is not None}
        for dtype, alike in groupby(
            sorted(buffers, key=lambda name: str(buffers[name].dtype)), lambda n: buffers[n].dtype
        ):
            names = list(alike)
            flat = torch.cat([buffers[name].reshape(-1) for name in names]).to(self._context.device)
            operation = self._context.operation(f"the buffers of {dtype}", "buffers")
            for transport in self._context.transports:
                broadcast(flat, transport, operation=operation)
            if self._context.rank > 0:
                parts = torch.split(flat, [buffers[name].numel() for name in names])
                for name, part in zip(names, parts, strict=True):
                    # Through `.data`: no backward reads statistics that autograd has saved. DDP does the same.
                    buffers[name].data.copy_(part.view(buffers[name].shape))
        for place in self._places:
            place.record()


def _is_number(buffer: Tensor) -> bool:
    """Whether training may change it in place: it is no mask, index, or expanded view."""
    spread = any(stride == 0 and size > 1 for stride, size in zip(buffer.stride(), buffer.shape, strict=True))
    return buffer.is_floating_point() and not spread


def _is_compared(buffer: Tensor) -> bool:
    """Whether comparing it costs less than sending it."""
    return buffer.numel() > LARGE and buffer.device.type == "cpu" and _is_number(buffer)


def _sums(buffer: Tensor) -> tuple[float, float]:
    """Return a fingerprint of a buffer: the sums of all elements, and of every second."""
    flat = buffer.detach().reshape(-1)  # a view, no copy
    return flat.sum(dtype=torch.float64).item(), flat[::2].sum(dtype=torch.float64).item()
