"""PyTorch's symmetric memory, played: ranks are threads, areas are CPU memory, and each rank has a stream.

A stream is a thread that does in order what it was given, so the host runs ahead of it, as with a GPU. What touches an
area, and signals, are put on the stream of the memory's rank; `drain` waits for it, as a synchronisation would. Signals
are bits: `put_signal` waits for a 0 and makes it 1, `wait_signal` waits for a 1 and makes it 0.

The areas know what no rank has read yet. Writing there, or reading elsewhere, is an error, whatever the values are.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from random import Random
from typing import Any

import torch
from torch import Tensor

from shardlite.comm.transport.base import Message, Pending, Transport
from shardlite.comm.transport.symmetric import SymmetricMemoryTransport
from tests.support.transports.delegating import Delegating

CPU = torch.device("cpu")
PATIENCE = timedelta(seconds=20)
NBYTES = 3 * 3 * 1024  # of an area: the buffers of most tests take several rounds


class World:
    """The areas and the signals of all ranks."""

    def __init__(self, world_size: int, nbytes: int = NBYTES) -> None:
        self.world_size = world_size
        self.nbytes = nbytes
        self.areas = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(world_size)]
        self.unread = [torch.zeros(nbytes, dtype=torch.bool) for _ in range(world_size)]
        self.signals: defaultdict[tuple[int, int, int], int] = defaultdict(int)  # by owner, channel and source
        self.changed = threading.Condition()

    def turn(self, signal: tuple[int, int, int], before: int, patience: float) -> None:
        """Wait until a signal is `before`, and turn it over."""
        with self.changed:
            if not self.changed.wait_for(lambda: self.signals[signal] == before, patience):
                raise RuntimeError(f"trap: the signal (owner, channel, source) {signal} is not {before}")
            self.signals[signal] = 1 - before
            self.changed.notify_all()


class Stream:
    """A thread that does what it is given, in order. After an error it does nothing more, as a device after a trap."""

    def __init__(self, pause: Callable[[], float]) -> None:
        self._pause = pause
        self._given: SimpleQueue[Callable[[], None] | threading.Event | None] = SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def put(self, operation: Callable[[], None]) -> None:
        if self._error is not None:
            raise RuntimeError(str(self._error)) from self._error
        self._given.put(operation)

    def drain(self) -> None:
        """Wait until all is done that was given so far."""
        done = threading.Event()
        self._given.put(done)
        done.wait()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        self._given.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (given := self._given.get()) is not None:
            if isinstance(given, threading.Event):
                given.set()
            elif self._error is None:
                try:
                    time.sleep(self._pause())
                    given()
                except BaseException as error:
                    self._error = error


class PlayedMemory:
    """What a rank has of a `World`, on a stream of its own or on that of another memory."""

    device = CPU

    def __init__(self, world: World, rank: int, stream: Stream, slow: float = 0.0) -> None:
        self.rank, self.world_size, self.buffer_size = rank, world.world_size, world.nbytes
        self.stream = stream
        self.between_halves: Callable[[], object] = partial(time.sleep, slow)
        self._world = world

    def get_buffer(self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype) -> "Mapped":
        assert dtype == torch.uint8
        return Mapped(self, rank, 0, *sizes)

    def put_signal(self, dst_rank: int, channel: int, timeout_ms: int) -> None:
        signal = dst_rank, channel, self.rank
        self.stream.put(lambda: self._world.turn(signal, 0, timeout_ms / 1000))

    def wait_signal(self, src_rank: int, channel: int, timeout_ms: int) -> None:
        signal = self.rank, channel, src_rank
        self.stream.put(lambda: self._world.turn(signal, 1, timeout_ms / 1000))

    def write(self, owner: int, where: slice, source: Tensor) -> None:
        assert owner == self.rank, f"rank {self.rank} writes to the area of rank {owner}"
        assert where.start % 128 == 0, f"a message lies at {where.start}"
        unread = self._world.unread[owner][where]
        assert not unread.any(), f"rank {owner} overwrites what no rank has read"
        self._world.areas[owner][where].copy_(source)
        unread.fill_(True)

    def read(self, owner: int, where: slice, target: Tensor) -> None:
        """Copy half, wait `between_halves`, copy the other half: a writer that comes too early is seen."""
        unread, area = self._world.unread[owner][where], self._world.areas[owner][where]
        assert unread.all(), f"rank {self.rank} reads what rank {owner} has not written"
        half = len(area) // 2
        target[:half].copy_(area[:half])
        self.between_halves()
        target[half:].copy_(area[half:])
        unread.fill_(False)
        area.fill_(0xFF)  # NaN in every floating-point dtype


class Mapped:
    """Bytes of a rank's area, as another rank (or it itself) sees them. They can be cut and copied, by its stream."""

    def __init__(self, memory: PlayedMemory, owner: int, start: int, stop: int) -> None:
        self.memory, self.owner, self.where = memory, owner, slice(start, stop)

    def __getitem__(self, part: slice) -> "Mapped":
        assert part.step is None
        assert 0 <= part.start <= part.stop <= self.where.stop - self.where.start
        begin = self.where.start
        return Mapped(self.memory, self.owner, begin + part.start, begin + part.stop)

    def copy_(self, source: Tensor) -> "Mapped":
        self.memory.stream.put(lambda: self.memory.write(self.owner, self.where, source))
        return self

    @classmethod
    def __torch_function__(cls, function: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Take part in `tensor.copy_(mapped)`."""
        assert function is Tensor.copy_
        assert not kwargs
        target, mapped = args
        mapped.memory.stream.put(lambda: mapped.memory.read(mapped.owner, mapped.where, target))
        return target


class Drained(Delegating):
    """A transport whose waits wait for the stream: then hosts may use what has arrived, as tests on the CPU do."""

    def __init__(self, transport: Transport, stream: Stream) -> None:
        super().__init__(transport)
        self._stream = stream

    def isend(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        super().isend(tensor, peer, tag)
        return _Drain(self._stream)

    def irecv(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        super().irecv(tensor, peer, tag)
        return _Drain(self._stream)

    def exchange(self, messages: Sequence[Message], tag: int) -> Pending:
        super().exchange(messages, tag)
        return _Drain(self._stream)


class _Drain:
    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def wait(self) -> None:
        self._stream.drain()


def random_pauses(seed: int, rank: int, longest: float) -> Callable[[], float]:
    """Every fourth operation or so is late."""
    random = Random(f"{seed} {rank}")
    return lambda: random.uniform(0.0, longest) if longest and random.random() < 0.25 else 0.0


def run_memories(
    body: Callable[..., Any],
    world_size: int,
    *args: Any,
    nbytes: int = NBYTES,
    memories: int = 1,
    longest: float = 0.0,
    slow: Sequence[float] = (),
    seed: int = 0,
) -> list[Any]:
    """Run `body(*memories, *args)` on each rank, with so many memories; return the results or raise the first error.

    Streams pause for up to `longest` seconds at random; copies out of an area take `slow[rank]` seconds.
    """
    worlds = [World(world_size, nbytes) for _ in range(memories)]

    def on_rank(rank: int) -> Any:
        streams = [Stream(random_pauses(seed + i, rank, longest)) for i in range(memories)]
        try:
            own = [
                PlayedMemory(world, rank, stream, slow[rank] if slow else 0.0)
                for world, stream in zip(worlds, streams, strict=True)
            ]
            result = body(*own, *args)
            for stream in streams:
                stream.drain()
            return result
        finally:
            for stream in streams:
                stream.close()

    with ThreadPoolExecutor(world_size) as pool:
        return [future.result() for future in [pool.submit(on_rank, rank) for rank in range(world_size)]]


def run_played(body: Callable[..., Any], world_size: int, *args: Any, **given: Any) -> list[Any]:
    """Run `body(transport, *args)` on each rank; waits are for the stream. `given` is as in `run_memories`."""

    def on_memory(memory: PlayedMemory, *args: Any) -> Any:
        return body(Drained(SymmetricMemoryTransport(memory, PATIENCE), memory.stream), *args)

    return run_memories(on_memory, world_size, *args, **given)
