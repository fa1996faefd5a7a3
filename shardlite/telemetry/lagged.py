"""Read small numbers of a GPU without waiting for it: the host sees those of some earlier step."""

from collections.abc import Sequence

import torch
from torch import Tensor


class LaggedNumbers:
    """A host copy of `numbers` [n] on a GPU, which change in place: graphs may be replayed."""

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers
        self._copy = torch.zeros(numbers.shape, dtype=numbers.dtype, pin_memory=numbers.is_cuda)
        self._host = self._copy.numpy()  # the same memory, which the host reads as it is
        self._sent: torch.cuda.Event | None = None

    def read(self, *, wait: bool = False) -> Sequence[int] | None:
        """Return the numbers of the last copy that has arrived, or `None` while a CUDA graph is captured.

        With `wait`, the host waits for the last copy that was sent.
        """
        if torch.cuda.is_current_stream_capturing():
            return None  # nothing may be queried
        if wait and self._sent is not None:
            self._sent.synchronize()
        return [int(each) for each in self._host]

    def send(self) -> None:
        """Start copying the numbers of now. These few bytes arrive as soon as the stream reaches them."""
        self._copy.copy_(self._numbers, non_blocking=True)
        if not torch.cuda.is_current_stream_capturing():
            self._sent = torch.cuda.current_stream(self._numbers.device).record_event()
