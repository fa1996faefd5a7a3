"""Step states that are kept in host memory: copy them to the GPU in chunks, step there, and copy them back.

    stream `up`      | 0 | 1 | 2 | 3 | 4 | 5 |              host to GPU, into the next of four buffers
    the step's           | 0 | 1 | 2 | 3 | 4 | 5 |          the same kernel as for states on the GPU
    stream `down`            | 0 | 1 | 2 | 3 | 4 | 5 |      GPU to host; afterwards the buffer is free

The host starts all operations of a step at once, and events order them, so the host does not wait. A step in the
backward runs on the stream of its reduction. Other steps run on a stream of their own beside the next forward, if
readers of the weights wait for them (`HostStates.waits`). `SteppingShard` does this for the program's own reads.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import cycle, islice
from typing import Any, NamedTuple

import torch
from shardlite_kernels import SCALE_BLOCK, State
from torch import Tensor

from shardlite.optim.counts import RunSlice
from shardlite.params import HostStates, round_up

CHUNK_NBYTES = 32 << 20
"""Bytes of states in a buffer at most. A copy of this length takes most of the bandwidth of a bus."""

_ALIGN = 512
"""Alignment of buffers in bytes, that of PyTorch's allocator."""

BUFFERS = 4
"""Two for each direction: while one is copied up and one down, one is stepped and one waits."""


def stored(state: State) -> list[Tensor]:
    """Return the tensors of a state that are kept in host memory: all but the weights that are gathered."""
    return [each for each in state[1:] if each is not None]


def buffer_nbytes(nbytes: int) -> int:
    """Return the bytes of a buffer, given the bytes of states in the longest arena."""
    return min(round_up(nbytes, _ALIGN), CHUNK_NBYTES)


def chunk_numel(group_nbytes: int, nbytes: int) -> int:
    """Return the number of elements in a chunk of `nbytes`, if 32 elements have `group_nbytes` bytes of states.

    Long chunks have a multiple of 8 groups, so that a kernel finds all parts of its table aligned to 16 bytes.
    """
    groups = max(1, nbytes // group_nbytes)
    return (groups - groups % 8 if groups > 8 else groups) * SCALE_BLOCK


def _placed(part: State, memory: Tensor, size: int) -> State:
    """Return `part` with its states in `memory`, which has room for those of `size` elements."""
    placed, start = [part.param], 0
    for each, numel in zip(part[1:], (*[size] * 3, *[size // SCALE_BLOCK] * 2), strict=True):
        placed.append(None if each is None else memory[start : start + each.nbytes].view(each.dtype))  # type: ignore[arg-type]
        start += 0 if each is None else numel * each.element_size()
    return State(*placed)


class _Buffer(NamedTuple):
    """Memory on the GPU for one chunk, and events of its latest use."""

    memory: Tensor
    ready: Any
    stepped: Any
    free: Any


class OffloadedSteps:
    """The streams and buffers by which one optimizer steps states in host memory."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        """Allocate four buffers. The longest arena in host memory has `nbytes` of states."""
        self._device = device
        self.nbytes = buffer_nbytes(nbytes)
        self._up, self._down, self._beside = (torch.cuda.Stream(device) for _ in range(3))  # type: ignore[no-untyped-call]
        self.memory = torch.empty(BUFFERS, self.nbytes, dtype=torch.uint8, device=device)
        self._up.wait_stream(torch.cuda.current_stream(device))
        self.memory.record_stream(self._down)  # the last stream that uses a buffer
        events = ([torch.cuda.Event() for _ in range(3)] for _ in range(BUFFERS))  # type: ignore[no-untyped-call]
        self._buffers = cycle([_Buffer(*each) for each in zip(self.memory, *zip(*events, strict=True), strict=True)])
        self.copied = 0
        """Bytes of states that were copied to the GPU so far. As many were copied back."""

        self._landed = torch.cuda.Event()  # type: ignore[no-untyped-call]
        for each in islice(self._buffers, BUFFERS):
            each.free.record(self._down)

    def begin_step(self) -> None:
        """Prepare a step: states are copied to the GPU after those of earlier steps have been copied back."""
        self._landed.record(self._down)
        self._landed.wait(self._up)

    def chunks(self, states: HostStates, elements: RunSlice) -> Iterator[tuple[int, RunSlice]]:
        """Yield chunks of `elements` on the GPU, each with its first index. The current stream may step them.

        The caller must step a chunk before it requests the next one, also if it stops early.
        """
        host, numel = stored(elements.state), elements.state.param.numel()
        group = sum(each.element_size() * (SCALE_BLOCK if len(each) == numel else 1) for each in host)
        size = chunk_numel(group, self.nbytes)
        stream = torch.cuda.current_stream(self._device)
        for start in range(0, numel, size):
            part = elements.part(start, min(start + size, numel))
            with self._on_device(states, part.state, size, stream) as state:
                yield start, part._replace(state=state)

    @contextmanager
    def _on_device(self, states: HostStates, part: State, size: int, stream: Any) -> Iterator[State]:
        """Copy a chunk to the GPU, and back at the end of the block, whose operations are on `stream`."""
        buffer = next(self._buffers)
        state = _placed(part, buffer.memory, size)
        with torch.cuda.stream(self._up):
            buffer.free.wait()
            for there, here in zip(stored(state), stored(part), strict=True):
                there.copy_(here, non_blocking=True)
                self.copied += here.nbytes
            buffer.ready.record()
        buffer.ready.wait(stream)
        try:
            yield state
        finally:  # also after an interrupt: the weights may have been stepped
            buffer.stepped.record(stream)
            with torch.cuda.stream(self._down):
                buffer.stepped.wait()
                states.wait_for_copies()
                for here, there in zip(stored(part), stored(state), strict=True):
                    here.copy_(there, non_blocking=True)
                buffer.free.record()
                states.record_copies()

    @contextmanager
    def beside(self, used: Iterable[Tensor]) -> Iterator[None]:
        """Step inside the block on a stream of its own, which later operations do not wait for.

        The step uses the tensors `used` on the device. The program may drop them before the step has ended.
        """
        self._beside.wait_stream(torch.cuda.current_stream(self._device))
        for each in {each.untyped_storage()._cdata: each for each in used}.values():
            each.record_stream(self._beside)
        with torch.cuda.stream(self._beside):
            yield
