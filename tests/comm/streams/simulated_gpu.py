"""A simulated GPU that detects races: streams, events, an allocator and NCCL, executed on the CPU.

The streams of a GPU run beside each other, and only events order them. Here every operation is carried out at once, by
the CPU, and noted: on which stream, and which bytes it reads and writes. Each stream
(`shardlite.lab.fake.simulated_cuda`) has a vector clock, which tells what it is behind. Two accesses of the same bytes,
one of them a write, are a race unless one is behind the other. So is memory that is freed while the stream that it was
allocated on is not behind all accesses: the allocator may hand it out again at once. That is how the race detectors of
threads work (Flanagan and Freund, FastTrack, 2009, PLDI).

The operators of PyTorch come by a dispatch mode, messages and collectives by the transports below. The other ranks do
not exist: they send zeros. The host counts what it waits for.
"""

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from shardlite.comm.transport.group_collectives import NcclCollectives
from shardlite.comm.transport.messages import Message, Pending
from shardlite.comm.transport.nccl import MOST_IN_BATCH, Communicator, NcclTransport
from shardlite.comm.transport.staging import SLICE_NBYTES
from shardlite.config import Route
from shardlite.lab.fake.fake_group import HostMessages, as_one_rank, fake_group
from shardlite.lab.fake.simulated_cuda import Clock, Cuda, Event, Stream
from tests.comm.streams.simulated_graph import Graph

_ONLY_ALLOCATES = ("aten.empty", "aten.new_empty")
_ONLY_VIEWS = ("aten.detach", "aten.set_", "aten.alias", "aten._unsafe_view")


@dataclass
class _Access:
    start: int
    stop: int
    stream: Stream
    tick: int
    writes: bool
    what: str

    def is_before(self, stream: Stream) -> bool:
        return stream.clock[self.stream.number] >= self.tick

    def __str__(self) -> str:
        return f"{self.what} {'writes' if self.writes else 'reads'} on {self.stream.name}"


@dataclass(eq=False)
class Memory:
    """Memory of one storage."""

    allocated_on: Stream
    born: int
    """How far that stream was: it may have used the same memory until then."""

    accesses: list[_Access] = field(default_factory=list)
    recorded: list[Stream] = field(default_factory=list)
    """Streams that the allocator knows of (`record_stream`): it frees the memory only behind them."""

    handed_over: Event | None = None
    """Behind which streams are that read it, because autograd's engine sees to it."""

    is_alive: bool = True
    is_graphs: bool = False
    """Whether it was allocated during a capture."""

    is_hosts: bool = False
    """Whether it is pinned memory of the host, which is freed when no stream uses it."""


class Gpu(Cuda):
    """A GPU with memory, and what was found."""

    def __init__(self, lag: int = 0) -> None:
        super().__init__(lag)
        self.slice_nbytes = SLICE_NBYTES
        """Maximum bytes of the rows of a slice."""

        self.races: Counter[str] = Counter()
        self.collectives: list[tuple[Stream, int, Clock]] = []
        """Each collective: its stream, its number there, and what it is behind."""

        self.launched: Counter[str] = Counter()
        """Batches and operations of messages, and collectives."""

        self.moved: Counter[str] = Counter()
        """Bytes that operations have read and written, by the name of the operation."""

        self.by_host = False
        """Whether the operation that runs now is one of the host, on its own memory only."""

        self.largest_batch = 0
        self.communicators: list[Communicator] = []
        self._operations: dict[str, tuple[Stream, int]] = {}
        """The last one of each communicator: its stream, and its number there."""

        self._memory: dict[int, Memory] = {}
        self.recording: Graph | None = None
        self.replays = 0
        self.launched_until = 0
        """Number of collectives and messages until the end of the latest capture."""

    def hosts(self, exchange: Callable[..., None]) -> Callable[..., None]:
        """Count an exchange of the hosts in which the program takes part."""

        def counted(*arguments: Any) -> None:
            self.waits["other hosts"] += not self.is_elsewhere
            exchange(*arguments)

        return counted

    def reading(self, read: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        """Count a way in which the program reads numbers of the device."""

        def counted(tensor: Tensor) -> Any:
            self.note_read()
            return read(tensor)

        return counted

    def note_read(self) -> None:
        """Note that the host reads a number."""
        if not (self.is_elsewhere or _in_place_of_a_kernel()):
            self.refuse_in_capture("the host reads a number")
            self.waits["item"] += 1

    @contextmanager
    def captured_in(self, graph: Graph) -> Iterator[None]:
        """Record what runs, as `torch.cuda.graph` does."""
        with self.capturing():
            self.recording = graph
            try:
                yield
            finally:
                self.recording = None
                graph.end()
                self.launched_until = self.launched.total()
                for stream, captured in product(self._streams, self.captured):  # nothing of it has run
                    stream.clock |= captured.clock

    def carry_out(self, function: Callable[..., None], written: Sequence[Tensor], *read: Tensor) -> None:
        """Do what NCCL does."""
        if self.recording is not None:
            for each in written:
                self.recording.save(each)
            arguments = self.recording.arguments((written, *read), {})
            self.recording.record(function, arguments)
        with _disable_current_modes(), torch.no_grad():
            function(written, *read)

    def access(self, tensor: Tensor, what: str, *, writes: bool, stream: Stream | None = None) -> None:
        """Note that the operation that `stream` has begun last reads or writes a tensor."""
        if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.numel() == 0:
            return
        if tensor.ndim == 0 and _in_place_of_a_kernel():
            return  # an argument of the kernel
        stream = stream or self.current()
        self.moved[what] += tensor.nbytes
        if self.by_host:
            self._access_by_host(self.memory_of(tensor), *_span(tensor), what, writes=writes)
            return
        self.access_bytes(self.memory_of(tensor), *_span(tensor), stream, what, writes=writes)

    def _access_by_host(self, memory: Memory, start: int, stop: int, what: str, *, writes: bool) -> None:
        """Note an access of the host. Operations that are launched later are behind it."""
        for before in memory.accesses:
            overlap = before.start < stop and start < before.stop
            if overlap and (writes or before.writes) and self.host[before.stream.number] < before.tick:
                self.races[f"{what} on the host, but the host has not waited for: {before}"] += 1

    def access_bytes(self, memory: Memory, start: int, stop: int, stream: Stream, what: str, *, writes: bool) -> None:
        """Note an access of bytes."""
        now = _Access(start, stop, stream, stream.clock[stream.number], writes, what)
        if stream.clock[memory.allocated_on.number] < memory.born:
            self.races[f"{now}, but is not behind the stream that allocated it"] += 1
        for before in memory.accesses:
            overlap = before.start < stop and start < before.stop
            if overlap and (writes or before.writes) and not before.is_before(stream):
                self.races[f"{now}, but is not behind: {before}"] += 1
        memory.accesses = [
            each
            for each in memory.accesses
            if not (
                start <= each.start and each.stop <= stop and each.is_before(stream) and (writes or not each.writes)
            )
        ]
        memory.accesses.append(now)

    def communicator(self) -> Communicator:
        """Return the first communicator that is free, as it is on the other ranks, or a new one."""
        found = next((each for each in self.communicators if each.is_free), None)
        if found is None:
            found = Communicator(f"communicator {len(self.communicators)}", None, torch.device("cuda"), None)
            self.communicators.append(found)
        return found

    def begin(self, name: str) -> None:
        """Begin an operation of a communicator, which NCCL needs in one order, on the current stream."""
        stream = self.current()
        now = stream.launch()
        last, tick = self._operations.get(name, (stream, 0))
        if stream.clock[last.number] < tick:
            self.races[f"{name} is used on {stream.name}, but that is not behind: it on {last.name}"] += 1
        self._operations[name] = stream, now

    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        """Free the memory of a tensor only behind all that a stream does with it."""
        self.memory_of(tensor).recorded.append(stream)

    def hand_over(self, *gradients: Tensor) -> None:
        """Have streams that read these be behind the current one, as autograd's engine does with gradients."""
        for each in gradients:
            self.memory_of(each).handed_over = self.current().record_event()
            self.record_stream(each, self.compute)

    def pin(self, memory: Tensor, device: torch.device) -> None:
        """Take memory for memory of the host."""
        super().pin(memory, device)
        self.memory_of(memory).is_hosts = True

    def memory_of(self, tensor: Tensor) -> Memory:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._memory:
            self.check_captured(self.current(), "memory")
            self._memory[key] = memory = Memory(stream := self.current(), stream.clock[stream.number])
            if self.recording is not None:
                self.recording.own[memory], memory.is_graphs = storage.data_ptr(), True
            weakref.finalize(storage, self._free, key).atexit = False
        return self._memory[key]

    def knows(self, tensor: Tensor) -> bool:
        """Return whether the memory of a tensor was used before."""
        return tensor.untyped_storage()._cdata in self._memory

    def _free(self, key: int) -> None:
        memory = self._memory.pop(key, None)
        if memory is None:
            return
        memory.is_alive = False
        if memory.is_graphs and self.recording is None:
            return  # it waits for the end of the graph
        for each in memory.accesses:
            if not memory.is_hosts and not any(
                each.is_before(stream) for stream in (memory.allocated_on, *memory.recorded)
            ):
                self.races[f"{each}, but is freed for {memory.allocated_on.name}"] += 1

    @contextmanager
    def ranks(self, world_size: int) -> Iterator[None]:
        """Be rank 0 of so many, with this GPU."""

        def connect(group: dist.ProcessGroup | None, route: Route) -> NcclTransport:
            if route.transport == "p2p" or route.algorithm != "auto":
                transport = _Messages(self, group)
                transport.algorithm = "ring" if route.algorithm == "auto" else route.algorithm
                return transport
            return _Collectives(self, group)

        with ExitStack() as stack:
            stack.enter_context(self.in_place())
            stack.enter_context(mock.patch.object(torch.cuda, "CUDAGraph", partial(Graph, self)))
            stack.enter_context(mock.patch.object(torch.cuda, "graph", self.captured_in))
            stack.enter_context(mock.patch.object(Tensor, "record_stream", lambda *it: self.record_stream(*it)))
            stack.enter_context(mock.patch.object(Tensor, "tolist", self.reading(Tensor.tolist)))
            for method in ("all_gather", "all_reduce"):
                exchange = self.hosts(getattr(HostMessages, method))
                stack.enter_context(mock.patch.object(HostMessages, method, exchange))
            stack.enter_context(fake_group(world_size))
            stack.enter_context(as_one_rank(connect, self.queue))
            stack.enter_context(_Operators(self))
            yield


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return which bytes of its storage a tensor may touch."""
    start = tensor.storage_offset() * tensor.element_size()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


_STAND_INS = ("adamw_cpu.py", "moments.py", "kernels/scale.py", "HostCounts")
"""What reads numbers on a CPU, and is a kernel, or scalars of the device, on a GPU."""


def _in_place_of_a_kernel() -> bool:
    """Whether what runs is of the CPU only: its counterpart on a GPU is tested there, and in Triton's interpreter."""
    frame = sys._getframe(1)
    while frame is not None:
        path = f"{frame.f_code.co_filename}:{frame.f_code.co_qualname}"
        if any(name in path for name in _STAND_INS):
            return True
        frame = frame.f_back
    return False


class _Operators(TorchDispatchMode):
    """Notes what each operator of PyTorch reads and writes."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        name, schema, graph = str(func), func._schema, self._gpu.recording
        arguments = None if graph is None else graph.arguments(args, kwargs)
        for i, argument in enumerate(schema.arguments if graph is not None else ()):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for each in tree_leaves(args[i] if i < len(args) else kwargs.get(argument.name)):
                    if isinstance(each, Tensor):
                        graph.save(each)
        out = func(*args, **kwargs)
        if name == "aten._local_scalar_dense.default":
            self._gpu.note_read()
        is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns)
        if is_view or name.startswith(_ONLY_VIEWS):
            return out
        if name.startswith(_ONLY_ALLOCATES):
            for each in tree_leaves(out):
                self._gpu.memory_of(each)
            return out
        for each in tree_leaves((args, kwargs)):
            if isinstance(each, Tensor) and (event := self._gpu.memory_of(each).handed_over) is not None:
                event.wait()
        tensors = [each for each in tree_leaves((args, kwargs, out)) if isinstance(each, Tensor)]
        of_host = [self._gpu.memory_of(each).is_hosts for each in tensors if each.numel()]
        self._gpu.by_host = bool(of_host) and all(of_host)
        if not self._gpu.by_host:
            self._gpu.current().launch()
        if graph is not None:
            graph.record(func, arguments, out)
        for i, argument in enumerate(schema.arguments):
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            writes = argument.alias_info is not None and argument.alias_info.is_write
            for each in tree_leaves(value):
                if isinstance(each, Tensor):
                    self._gpu.access(each, name, writes=writes)
        if any(of_host) and not self._gpu.by_host and not kwargs.get("non_blocking", len(args) > 2 and args[2]):
            self._gpu.host |= self._gpu.current().clock  # a copy between host and GPU for which the host waits
        is_argument = any(each.alias_info is not None for each in schema.returns)
        for each in () if is_argument else tree_leaves(out):
            if isinstance(each, Tensor):
                self._gpu.access(each, name, writes=True)
        self._gpu.by_host = False
        return out


class _Messages(NcclTransport):
    """Batches of messages on NCCL's own stream, which the allocator knows of (`ProcessGroupNCCL::pointToPoint`)."""

    def __init__(self, gpu: Gpu, group: dist.ProcessGroup | None) -> None:
        super().__init__(group)
        self._gpu = gpu
        self._stream = gpu.stream("nccl")

    def exchange(self, messages: Sequence[Message], tag: int) -> Pending:
        del tag
        gpu, stream = self._gpu, self._stream
        assert len(messages) <= MOST_IN_BATCH
        gpu.launched["batches"] += 1
        gpu.launched["messages"] += len(messages)
        gpu.largest_batch = max(gpu.largest_batch, len(messages))
        stream.wait_stream(gpu.current())
        stream.launch()
        for each in messages:
            what = "a send" if each.outgoing else "a receive"
            gpu.access(each.tensor, what, writes=not each.outgoing, stream=stream)
            gpu.record_stream(each.tensor, stream)
        gpu.carry_out(_zero, [each.tensor for each in messages if not each.outgoing])
        return _Sent(gpu, stream.record_event())


@dataclass
class _Sent:
    gpu: Gpu
    end: Event

    def wait(self) -> None:
        self.end.wait()


class _Collectives(NcclCollectives):
    """Whole collectives on the current stream, over a communicator that may be that of a model which is gone."""

    def __init__(self, gpu: Gpu, group: dist.ProcessGroup | None) -> None:
        super().__init__(group)
        self.slice_nbytes = gpu.slice_nbytes
        self._gpu = gpu
        self._communicator = gpu.communicator()
        self._communicator.lend(self)

    def _run(self, what: str, call: Any, tensors: Sequence[Tensor], *_: Any) -> None:
        gpu, stream = self._gpu, self._gpu.current()
        gpu.launched["collectives"] += 1
        self._take_turn()
        gpu.begin(self._communicator.name)
        gpu.collectives.append((stream, stream.clock[stream.number], Counter(stream.clock)))
        self._carry_out(what, *tensors)

    def _carry_out(self, what: str, *tensors: Tensor) -> None:
        written, *read = tensors
        for each in read or [written] * (what == "all-reduce"):
            self._gpu.access(each, what, writes=False)
        if what == "broadcast":  # rank 0 is the source
            return self._gpu.access(written, what, writes=False)
        self._gpu.access(written, what, writes=True)
        if what == "all-reduce":
            return None
        return self._gpu.carry_out(_receive, [written], *read)


def _zero(written: Sequence[Tensor]) -> None:
    for each in written:
        each.zero_()


def _receive(written: Sequence[Tensor], *read: Tensor) -> None:
    """Receive this rank's own part of `read` from each rank."""
    kept = [each.reshape(-1).clone() for each in read]
    for into, sent in zip(written, kept, strict=False):
        flat = into.view(-1)
        for part in flat.split(len(sent)):
            part.copy_(sent[: len(part)])
    for each, values in zip(read, kept, strict=True):
        each.copy_(values.view(each.shape))  # a gather finds this rank's part in its place
