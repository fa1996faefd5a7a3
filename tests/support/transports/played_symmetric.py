"""Simulated symmetric memory: areas are CPU memory, and a barrier consists of signals, as in PyTorch's kernel.

Ranks are threads of this process, or processes that map the same files. What a stream would do, the thread of a rank
does at once. So ranks are as far apart as streams can be, but no host runs ahead.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from shardlite_kernels.signals import flag_numel, slots_nbytes
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardlite.comm.transport import select
from shardlite.comm.transport.symmetric import SymmetricMemoryTransport
from shardlite.config import Route
from tests.support.patience import seconds

CPU = torch.device("cpu")
PATIENCE = timedelta(seconds=seconds(30))
PROGRAMS = 1  # of a ring kernel: in the interpreter they run one after the other
RING = flag_numel(PROGRAMS) * 8 + slots_nbytes(PROGRAMS)  # bytes of an area in front of its windows
NBYTES = RING + (2 << 20)
_REST = 0.0002  # seconds between looks


class PlayedMemory:
    """What a rank sees: the areas of all ranks, and signals [W, W]: of an owner, from a source, 0 or 1."""

    device = CPU

    def __init__(self, rank: int, areas: Sequence[Tensor], signals: Tensor, failures: Sequence[object] = ()) -> None:
        self.rank, self.world_size, self.buffer_size = rank, len(areas), areas[rank].numel()
        self.before_barrier: Callable[[], object] = lambda: None
        self.after_barrier: Callable[[], object] = lambda: None
        self._areas, self._signals, self._failures = areas, signals.numpy(), failures

    def get_buffer(self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        assert (sizes, dtype) == ((self.buffer_size,), torch.uint8)
        return self._areas[rank]

    def barrier(self, channel: int, timeout_ms: int) -> None:
        """Put a signal to each other rank, where there must be none; then take one of each, where there must be one."""
        assert channel == 0
        self.before_barrier()
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        for places, before in (
            ([(other, self.rank) for other in others], 0),
            ([(self.rank, other) for other in others], 1),
        ):
            for place in places:
                self._turn(place, before, time.monotonic() + timeout_ms / 1000)
        self.after_barrier()

    def _turn(self, place: tuple[int, int], before: int, deadline: float) -> None:
        while self._signals[place] != before:
            if time.monotonic() > deadline or self._failures:
                raise RuntimeError(f"trap: the signal (owner, source) {place} is not {before}")
            time.sleep(_REST)
        self._signals[place] = 1 - before


def played(memory: PlayedMemory, timeout: timedelta = PATIENCE) -> SymmetricMemoryTransport:
    """Return the transport over played memory. On the CPU its waits block the host."""
    transport = SymmetricMemoryTransport(memory, timeout, programs=PROGRAMS)
    transport.blocking = True
    return transport


class Launches(TorchDispatchMode):
    """Records the operations that a GPU would run, by name: all but views and allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name not in ("slice", "view", "select", "empty", "new_empty", "detach", "alias"):
            self.names.append(name)
        return function(*args, **(kwargs or {}))


def launches(transport: SymmetricMemoryTransport, call: Callable[[], object]) -> list[str]:
    """Return what `call` enqueues, in order."""
    with Launches() as found, patch.object(transport._memory, "before_barrier", lambda: found.names.append("barrier")):
        call()
    return found.names


def run_memories(
    body: Callable[..., Any], world_size: int, *args: Any, nbytes: int = NBYTES, memories: int = 1
) -> list[Any]:
    """Run `body(*memories, *args)` on each rank, a thread; return the results or raise the first error."""
    worlds = [
        ([torch.zeros(nbytes, dtype=torch.uint8) for _ in range(world_size)], torch.zeros(world_size, world_size))
        for _ in range(memories)
    ]

    failures: list[BaseException] = []

    def on_rank(rank: int) -> Any:
        try:
            return body(*(PlayedMemory(rank, *world, failures) for world in worlds), *args)
        except BaseException as error:
            failures.append(error)
            raise

    with ThreadPoolExecutor(world_size) as pool:
        futures = [pool.submit(on_rank, rank) for rank in range(world_size)]
    if failures:
        raise failures[0]
    return [future.result() for future in futures]


def run_played(body: Callable[..., Any], world_size: int, *args: Any, longest: float = 0.0, seed: int = 0) -> list[Any]:
    """Run `body(transport, *args)` on each rank, a thread. Each pauses for up to `longest` seconds before it pulls."""

    def on_memory(memory: PlayedMemory, *args: Any) -> Any:
        transport, random = played(memory), Random(f"{seed} {memory.rank}")
        if longest:
            memory.after_barrier = lambda: time.sleep(random.uniform(0.0, longest))
        return body(transport, *args)

    return run_memories(on_memory, world_size, *args)


@contextmanager
def playing(folder: Path, group: Any) -> Iterator[list[PlayedMemory]]:
    """Make `transport="symmetric_memory"` available to CPU processes, in files of a folder that is empty at first.

    Yields the memories of this rank, which grow with the connections.
    """
    connections, made, for_host = count(), [], select._for_host

    def choose(group: Any, timeout: timedelta, route: Route) -> select.Choice:
        if route.transport != "symmetric_memory" or dist.get_world_size(group) == 1:
            return for_host(group, timeout, route)
        made.append(_mapped(folder / f"{next(connections)}", group))
        return select.Choice(played(made[-1], timeout), "it is played")

    with patch.object(select, "_for_host", choose):
        yield made
    dist.barrier(group)  # no rank unmaps what another one still writes to


def _mapped(path: Path, group: Any) -> PlayedMemory:
    world_size = dist.get_world_size(group)
    among = "-".join(map(str, dist.get_process_group_ranks(group or dist.group.WORLD)))
    mapped = partial(torch.from_file, shared=True)
    areas = [mapped(f"{path} of {rank} in {among}", size=NBYTES, dtype=torch.uint8) for rank in range(world_size)]
    signals = mapped(f"{path} signals in {among}", size=world_size**2, dtype=torch.uint8)
    return PlayedMemory(dist.get_rank(group), areas, signals.view(world_size, world_size))
