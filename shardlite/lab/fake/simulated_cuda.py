"""CUDA's streams and events without a GPU, to the extent that ShardLite and FSDP2 use them.

Each operation runs immediately on the CPU. Each stream has a vector clock, which records the operations that precede
the stream's next operation. The tests search for races with these clocks (`tests/comm/streams/simulated_gpu.py`).
`bench.gpu_path` counts the calls.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from shardlite.comm import HostWork
from shardlite.comm.streams import CudaStreamQueue, ProgramStreams

Clock = Counter[int]
Node = tuple[int, int]
"""An operation: the number of its stream, and its number there."""


@dataclass(eq=False)
class Stream:
    """Operations in order."""

    gpu: "Cuda"
    name: str
    number: int
    clock: Clock = field(default_factory=Counter)
    ends: set[Node] = field(default_factory=set)
    """The nodes of the captured graph that the next node depends on."""

    def record_event(self, event: "Event | None" = None) -> "Event":
        """Record an event, by default a new event, and return it."""
        event = event or Event(self.gpu)
        event.record(self)
        return event

    def wait_event(self, event: "Event") -> None:
        """Order this stream after an event."""
        self.gpu.calls["events waited for"] += 1
        assert event.clock is not None, "it was not recorded, so a wait for it is none"
        if event.is_captured and (event.capture != self.gpu.captures or not self.gpu.captured):
            raise RuntimeError("operation not permitted on an event last recorded in a capturing stream")
        self.gpu.capture(self, behind_captured=event.is_captured)
        self.clock |= event.clock
        self.ends |= event.ends

    def wait_stream(self, other: "Stream") -> None:
        """Order this stream after another stream."""
        self.wait_event(other.record_event())

    def launch(self) -> int:
        """Begin the next operation, ordered after everything that the host has waited for. Return its number."""
        self.gpu.check_captured(self, "an operation")
        self.clock |= self.gpu.host
        self.clock[self.number] += 1
        if self.gpu.captured:
            node = self.number, self.clock[self.number]
            self.gpu.edges[node], self.ends = self.ends, {node}
        return self.clock[self.number]


@dataclass(eq=False)
class Event:
    """A moment of a stream."""

    gpu: "Cuda"
    clock: Clock | None = None
    asked: int = 0
    is_captured: bool = False
    capture: int = 0
    """Number of captures that had begun when the event was recorded."""

    ends: set[Node] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.gpu.calls["events created"] += 1

    def record(self, stream: Stream | None = None) -> None:
        """Record the present moment of a stream, by default the current stream, in this event."""
        self.gpu.calls["events recorded"] += 1
        stream = stream or self.gpu.current()
        self.clock, self.is_captured, self.asked = Counter(stream.clock), stream in self.gpu.captured, 0
        self.capture, self.ends = self.gpu.captures, set(stream.ends)

    def wait(self, stream: Stream | None = None) -> None:
        """Order a stream, by default the current stream, after this event."""
        (stream or self.gpu.current()).wait_event(self)

    def query(self) -> bool:
        """Return whether this event has completed. The first `Cuda.lag` queries return `False`."""
        self.gpu.refuse_in_capture("an event is queried")
        self.gpu.waits["query"] += 1
        self.asked += 1
        if self.asked <= self.gpu.lag:
            self.gpu.waits["query in vain"] += 1
            return False
        self.gpu.host |= self.clock or Counter()
        return True

    def synchronize(self) -> None:
        """Order the host after this event."""
        self.gpu.refuse_in_capture("the host waits for an event")
        self.gpu.waits["synchronize"] += 1
        self.gpu.host |= self.clock or Counter()


class Cuda:
    """The streams of one GPU. `lag` is the number of queries of an event that return `False`."""

    def __init__(self, lag: int = 0) -> None:
        self.lag = lag
        self.calls: Counter[str] = Counter()
        """How often events were created, recorded and waited for, contexts entered, and the current stream read."""

        self.waits: Counter[str] = Counter()
        """How often the host has waited: `query`, `synchronize`, `item`, and for the hosts of other ranks.

        A query does not block. After a query `in vain`, the host queries again until the operation is over.
        """

        self.captured: set[Stream] = set()
        """The streams that a CUDA graph captures now."""

        self.edges: dict[Node, set[Node]] = {}
        """For each operation of the latest capture, the operations that it depends on directly."""

        self.captures = 0
        """Number of captures so far."""

        self._refused = ""
        self._origin: Stream | None = None

        self.is_elsewhere = False
        """Whether the code that runs now is on a thread other than the program's."""

        self.host: Clock = Counter()
        self._streams: list[Stream] = []
        self._thread = threading.local()
        self.compute = self.stream("compute")

    def stream(self, name: str = "") -> Stream:
        """Make a stream."""
        self._streams.append(Stream(self, name or f"stream {len(self._streams) + 1}", len(self._streams) + 1))
        return self._streams[-1]

    def pin(self, memory: torch.Tensor, _: torch.device) -> None:
        """Pin memory of the host."""
        self.calls["bytes pinned"] += memory.nbytes

    def current(self, _: Any = None) -> Stream:
        """Return the current stream of this thread."""
        self.calls["current stream"] += 1
        return getattr(self._thread, "stream", self.compute)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """Make a stream current within the block."""
        self.calls["stream contexts"] += 1
        before = getattr(self._thread, "stream", self.compute)
        self._thread.stream = stream
        try:
            yield
        finally:
            self._thread.stream = before

    @contextmanager
    def device(self, _: Any) -> Iterator[None]:
        """Do nothing, since there is one device."""
        self.calls["device contexts"] += 1
        yield

    def queue(
        self, name: str, _: torch.device, program: ProgramStreams, *, blocking: bool, **__: Any
    ) -> CudaStreamQueue:
        """Make a queue of the library whose operations the program's thread launches, as over NCCL.

        A blocking queue has its own thread in name only: its operations also run at once, and its waits are not
        counted.
        """
        thread: Any = _OtherThread(self) if blocking else None
        queue = CudaStreamQueue(torch.device("cuda"), thread, program)
        queue._stream.name = name  # type: ignore[attr-defined]
        return queue

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Use these streams in place of CUDA's, and let models of ShardLite use them for tensors of the CPU."""
        cuda: dict[str, Any] = {
            "Stream": lambda *_, **__: self.stream(),
            "Event": lambda *_, **__: Event(self),
            "current_stream": self.current,
            "stream": self.on,
            "device": self.device,
            "is_current_stream_capturing": lambda: getattr(self._thread, "stream", self.compute) in self.captured,
        }
        with ExitStack() as stack:
            for name, value in cuda.items():
                stack.enter_context(mock.patch.object(torch.cuda, name, value))
            streams = ProgramStreams(torch.device("cuda"))
            stack.enter_context(mock.patch("shardlite.comm.context.ProgramStreams", return_value=streams))
            stack.enter_context(mock.patch("shardlite.wrapping.plan.can_offload", return_value=True))
            stack.enter_context(mock.patch("shardlite.model.can_offload", return_value=True))
            stack.enter_context(mock.patch("shardlite.params.host_states.pin", self.pin))
            stack.enter_context(mock.patch("shardlite.params.host_states.unpin"))
            yield

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Capture a CUDA graph as PyTorch does, on a stream for captures.

        Raises:
            RuntimeError: the block does something that CUDA refuses in a capture. As in PyTorch, all later calls are
                refused too, and the stream of the capture stays the current stream.
        """
        origin = self._origin = self._origin or self.stream("captured")
        for stream in self._streams:  # PyTorch waits for the GPU before
            self.host |= stream.clock
            stream.ends = set()
        self.edges, self._refused = {}, ""
        self.captures += 1
        with self.on(origin):
            self.captured, waits = {origin}, Counter(self.waits)
            try:
                yield
                if self.waits != waits:
                    self.refuse_in_capture(f"the host waits: {self.waits - waits}")
                unjoined = [each.name for each in self.captured if origin.clock[each.number] < each.clock[each.number]]
                if unjoined:
                    self.refuse_in_capture(f"not joined to the stream of the capture: {unjoined}")
            finally:
                self.captured = set()
        if self._refused:  # the program has caught the error
            raise RuntimeError(f"operation failed due to a previous error during capture: {self._refused}")

    def refuse_in_capture(self, what: str) -> None:
        """Refuse what CUDA refuses while a graph is captured.

        Raises:
            RuntimeError: a graph is captured.
        """
        if self.captured:
            self._refused = self._refused or what
            raise RuntimeError(f"operation not permitted when stream is capturing: {what}")

    def capture(self, stream: Stream, *, behind_captured: bool) -> None:
        """Also capture a stream that waits for a captured stream."""
        if not behind_captured and stream in self.captured:
            self.refuse_in_capture(f"{stream.name} is put behind what is not captured")
        if self.captured and behind_captured:
            self.captured.add(stream)

    def check_captured(self, stream: Stream, what: str) -> None:
        """If a graph is captured, check that it captures the stream."""
        if self._refused or (self.captured and stream not in self.captured):
            self.refuse_in_capture(self._refused or f"{what} of {stream.name} is not captured")


@dataclass
class _OtherThread:
    """A thread of a queue, whose work the program's thread does."""

    gpu: Cuda

    def submit(self, *operations: Callable[[], None]) -> HostWork:
        work = HostWork()
        before, self.gpu.is_elsewhere = self.gpu.is_elsewhere, True
        with work:
            for operation in operations:
                operation()
        self.gpu.is_elsewhere = before
        return work
