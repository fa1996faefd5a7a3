"""Read a few integers from a GPU without waiting for the GPU. The host gets the values of an earlier step."""

from collections.abc import Sequence

import torch
from torch import Tensor


class LaggedNumbers:
    """Host copy of `numbers` [n] on a GPU. The numbers change in place, so CUDA graphs can be replayed."""

    def __init__(self, numbers: Tensor) -> None:
        self.numbers = numbers
        self._copy = torch.zeros(numbers.shape, dtype=numbers.dtype, pin_memory=numbers.is_cuda)
        self._host = self._copy.numpy()  # a view, which the host reads without synchronization
        self._sent: torch.cuda.Event | None = None

    def read(self, *, wait: bool = False) -> Sequence[int] | None:
        """Return the numbers of the latest copy that has arrived, or `None` during the capture of a CUDA graph.

        If `wait` is true, first wait for the latest copy that `send` has started.
        """
        if torch.cuda.is_current_stream_capturing():
            return None  # no event may be queried during a capture
        if wait and self._sent is not None:
            self._sent.synchronize()
        return [int(each) for each in self._host]

    def send(self) -> None:
        """Start copying the current numbers. The copy arrives as soon as the stream reaches it."""
        self._copy.copy_(self.numbers, non_blocking=True)
        if not torch.cuda.is_current_stream_capturing():
            self._sent = torch.cuda.current_stream(self.numbers.device).record_event()
