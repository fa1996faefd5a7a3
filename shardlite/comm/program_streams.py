"""The streams of a GPU on which the program computes.

The library allocates, frees and starts its operations on one of them. `streams.py` has the library's own streams.
"""

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress

import torch
from torch import Tensor

from shardlite.config import streams_share_a_queue


def check_connections(device: torch.device) -> None:
    """Warn if the streams of a GPU cannot overlap. Python shows the warning once."""
    if device.type == "cuda" and streams_share_a_queue():
        warnings.warn(
            "CUDA_DEVICE_MAX_CONNECTIONS=1 puts the work of all streams into one queue, so prefetched gathers cannot "
            "overlap with the computation. Unset it: ShardLite orders its streams itself",
            stacklevel=1,  # one place for all models, so that Python shows it once
        )


class ProgramStreams:
    """The streams on which the program computes. Most programs use one stream.

    The library uses one of these streams, the home stream, to allocate and free memory and to start operations. The
    home stream is the stream from which the model was called most recently. If the program calls the model from another
    stream within a forward or a backward, both streams wait for each other. On the CPU there are no streams.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.on_gpu = device.type == "cuda"
        """Whether there are streams."""

        self._home: torch.cuda.Stream | None = None

    def captures(self) -> bool:
        """Return whether the program captures a CUDA graph on the current stream.

        A captured stream must not wait for work launched before the capture. PyTorch has already waited for the GPU.
        """
        return self.on_gpu and torch.cuda.is_current_stream_capturing()

    def move_home(self) -> torch.cuda.Stream | None:
        """Make the current stream the home stream. Return the new home stream, or `None` if nothing changes.

        Call this between passes. The new home stream waits for the former one, because the former home stream may
        still read cached memory.
        """
        other = self.other()
        if other is not None and self._home is not None and not self.captures():
            other.wait_stream(self._home)
        self._home = other or self._home
        return other

    def other(self) -> torch.cuda.Stream | None:
        """Return the current stream, or `None` if the current stream is the home stream."""
        if not self.on_gpu:
            return None
        current = torch.cuda.current_stream(self._device)
        if self._home is None:
            self._home = current
        return None if current == self._home else current

    def at_home(self) -> AbstractContextManager[None]:
        """Run a block on the home stream, after the current stream. The current stream then waits for the block."""
        other = self.other()
        return _IS_HOME if other is None else self.across(other)

    @contextmanager
    def across(self, other: torch.cuda.Stream) -> Iterator[None]:
        """Run a block on the home stream, after the work of the stream `other`. `other` then waits for the block."""
        home = self._home
        assert home is not None, "`other` differs from it"
        home.wait_stream(other)
        with torch.cuda.stream(home):
            yield
        other.wait_stream(home)

    def wait_for(self, other: torch.cuda.Stream) -> None:
        """Let the home stream wait for another stream."""
        if self._home is not None:
            self._home.wait_stream(other)

    def wait_outside_captures(self, other: torch.cuda.Stream) -> None:
        """Let the home stream wait for another stream, unless a CUDA graph captures only one of the two.

        Finalizers call this, on any thread and in any capture.
        """
        with suppress(RuntimeError):  # after an error of the device there is nothing to wait for
            if self._home is not None and _is_captured(self._home) == _is_captured(other):
                self._home.wait_stream(other)

    def record_stream(self, tensor: Tensor) -> None:
        """Record that the home stream uses a tensor of another stream. The memory is reused only after both streams."""
        if self._home is not None:
            tensor.record_stream(self._home)


_IS_HOME = nullcontext()


def _is_captured(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()
