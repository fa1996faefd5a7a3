"""Before a forward, broadcast those buffers of rank 0 that earlier forwards have changed (running statistics).

`DistributedDataParallel` does the same by default. Without this broadcast, each rank would have statistics of its own
batches, and an evaluation would give different results on each rank. Only buffers that some rank may have changed are
broadcast. Masks and large tables, which forwards do not change, are not broadcast.
"""

import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardlite.comm import Context, broadcast
from shardlite.errors import LayoutError

LARGE = 65536
"""Number of elements. A CPU buffer with more elements is broadcast only if its values have changed."""


@dataclass(eq=False)
class _Place:
    """Place of a buffer in its module, with the state of the buffer at the latest `record`."""

    name: str
    module: nn.Module
    key: str
    seen: "weakref.ref[Tensor] | None" = None
    version: int = -1
    trained: bool = False
    """Whether the module was in training mode."""

    sums: tuple[float, float] | None = None
    """Fingerprint of the buffer's elements if the buffer is large."""

    @property
    def buffer(self) -> Tensor | None:
        """The current buffer."""
        return self.module._buffers.get(self.key)

    def changed(self) -> bool:
        """Return whether the buffer may have been written or replaced since `record`.

        PyTorch's version counter counts neither writes by batch normalization nor writes through `.data`. So a
        floating-point buffer of a module in training mode counts as changed. If such a buffer is large, its fingerprint
        is compared instead.
        """
        buffer = self.buffer
        if buffer is None:
            return self.seen is not None
        trains = (self.trained or self.module.training) and _is_number(buffer)
        unseen = trains and (not _is_compared(buffer) or self.sums != _sums(buffer))
        return unseen or self.seen is None or self.seen() is not buffer or buffer._version != self.version

    def record(self) -> None:
        """Record the state of the buffer for the next call of `changed`."""
        buffer = self.buffer
        self.seen = None if buffer is None else weakref.ref(buffer)
        self.version = -1 if buffer is None else buffer._version
        self.trained = self.module.training
        self.sums = None if buffer is None or not _is_compared(buffer) else _sums(buffer)


class Buffers:
    """The buffers of one wrapped model, which rank 0 broadcasts to the other ranks."""

    def __init__(self, module: nn.Module, context: Context, ignored: Collection[nn.Module]) -> None:
        """Find the buffers of `module`, except the buffers of `ignored` modules."""
        self._context = context
        own = {id(buffer) for each in ignored for buffer in each.buffers()}
        places = {
            id(buffer): _Place(f"{path}.{key}".lstrip("."), each, key)
            for path, each in module.named_modules()
            for key, buffer in each._buffers.items()
            if buffer is not None and id(buffer) not in own
        }
        self._places = list(places.values()) if context.world_size > 1 else []
        self._due = True  # whether a forward may have changed buffers
        for place in self._places:
            place.record()

    def before_forward(self, *, trains: bool) -> None:
        """Broadcast changed buffers if the previous forward may have changed any buffer.

        Args:
            trains: whether the next forward may change buffers.

        Raises:
            LayoutError: the length of a buffer differs between ranks.
        """
        if self._due and self._places:
            self._send(self._changed())
        self._due = trains

    def _changed(self) -> list[_Place]:
        """Return the buffers that have changed on any rank. This takes one all-reduce."""
        numels = [0 if place.buffer is None else place.buffer.numel() for place in self._places]
        rows = [(place.changed(), n, n * n) for place, n in zip(self._places, numels, strict=True)]
        numbers = torch.tensor(rows, dtype=torch.int64)
        operation = self._context.operation("which buffers have changed", "buffers")
        self._context.all_reduce_host(numbers.view(-1), operation)
        changed = []
        for place, (ranks, total, squares) in zip(self._places, numbers.tolist(), strict=True):
            if ranks and squares * self._context.world_size != total * total:
                raise LayoutError(
                    f"buffer {place.name!r} does not have the same length on all ranks, so rank 0's cannot be copied: "
                    'give it the same length, or wrap with buffers="own"'
                )
            if ranks and total:
                changed.append(place)
        return changed

    @torch.no_grad()
    def _send(self, places: Sequence[_Place]) -> None:
        """Overwrite the buffers at `places` with rank 0's buffers."""
        buffers = [buffer for place in places if (buffer := place.buffer) is not None]
        for dtype in sorted({buffer.dtype for buffer in buffers}, key=str):
            alike = [buffer for buffer in buffers if buffer.dtype == dtype]
            flat = torch.cat([buffer.reshape(-1) for buffer in alike]).to(self._context.device)
            operation = self._context.operation(f"the buffers of {dtype}", "buffers")
            for transport in self._context.transports:
                broadcast(flat, transport, operation=operation)
            if self._context.rank > 0:
                for buffer, part in zip(alike, torch.split(flat, [buffer.numel() for buffer in alike]), strict=True):
                    # A write through `.data` does not change the version. This is safe, because no backward reads
                    # statistics that autograd has saved. DDP also writes through `.data`.
                    buffer.data.copy_(part.view(buffer.shape))
        for place in self._places:
            place.record()


def _is_number(buffer: Tensor) -> bool:
    """Return whether training may change a buffer in place. A mask, an index or an expanded view is not changed."""
    spread = any(stride == 0 and size > 1 for stride, size in zip(buffer.stride(), buffer.shape, strict=True))
    return buffer.is_floating_point() and not spread


def _is_compared(buffer: Tensor) -> bool:
    """Return whether comparing a buffer costs less than sending it."""
    return buffer.numel() > LARGE and buffer.device.type == "cpu" and _is_number(buffer)


def _sums(buffer: Tensor) -> tuple[float, float]:
    """Return a fingerprint of a buffer: the sum of all elements, and the sum of every second element."""
    flat = buffer.detach().reshape(-1)  # a view, no copy
    return flat.sum(dtype=torch.float64).item(), flat[::2].sum(dtype=torch.float64).item()
