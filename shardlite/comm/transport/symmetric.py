"""Transport for CUDA tensors over PyTorch's symmetric memory: GPU memory that the other GPUs of the host can read.

**It has not run on a GPU yet.** The tests use a simulation of symmetric memory on the CPU.

Each rank has an area. A sender copies messages into its own area and signals the receiver, which copies them out.
Everything is enqueued on the current stream, and the host never waits.

    the area of rank 0, W=3      to rank 1             to rank 2
                             [ slot | slot | slot ][ slot | slot | slot ]

The messages of one exchange over one link are packed into parcels, each as large as a slot; parcel `i` of a link is in
slot `i % 3`. The place of a message follows from the sizes of all messages, which are equal on both ends.

Three slots make acknowledgements unnecessary: `put` sets a bit in the receiver's memory, after waiting until the last
one was cleared; `wait` clears it. So when `put i` is done, the receiver has reached `wait i-1`, and its stream had
finished `read i-2` before. Parcels `i-1` and `i` may still be unread: with two slots `write i+1` would overwrite one of
them.

    sender      write 0  put 0  write 1  put 1  write 2  put 2  write 3 ...      put 2 is over after wait 1, that is,
    receiver             wait 0  read 0  wait 1  read 1  wait 2  read 2 ...      after read 0: its slot is free

There is no deadlock: in each round of an exchange a rank first puts one parcel per link, and then waits. A put depends
on waits of earlier rounds only, and a wait on a put of its own round.

Legend: `W` ranks; a slot and an area are counted in bytes.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _SymmetricMemory

from shardlite.comm.control.store import TIMEOUT, all_gather_json
from shardlite.comm.shm.rendezvous import nodes_of
from shardlite.comm.transport.base import BatchedTransport, Completed, Message, Pending
from shardlite.comm.transport.process_group import Posted
from shardlite.config import Algorithm, devices_may_overlap
from shardlite.errors import LayoutError
from shardlite.telemetry import Ledger

AREA = 64 << 20
"""Bytes of the area of a rank. Not measured: 3 MiB in each slot for 8 ranks."""

SLOTS = 3

_ALIGNMENT = 128  # bytes: the size of a GPU's cache line, so no two messages share one

_CHANNEL = 0  # each transport has its own allocation, which has its own signals


class Piece(NamedTuple):
    """Bytes `[start, stop)` of the `message`-th message of a link, stored at `offset` in a slot."""

    message: int
    start: int
    stop: int
    offset: int


def parcels(sizes: Sequence[int], slot: int) -> list[list[Piece]]:
    """Pack messages of these sizes (in bytes) into slots of `slot` bytes, a multiple of 128.

    Messages follow each other, each at a multiple of 128, and are cut where a slot ends. Empty messages are left out.
    """
    packed: list[list[Piece]] = []
    used = slot
    for message, size in enumerate(sizes):
        start = 0
        while start < size:
            if used == slot:
                packed.append([])
                used = 0
            stop = min(size, start + slot - used)
            packed[-1].append(Piece(message, start, stop, used))
            used += -(-(stop - start) // _ALIGNMENT) * _ALIGNMENT
            start = stop
    return packed


class SymmetricMemoryTransport(BatchedTransport):
    """Messages through `memory`, which no other transport uses. **It has not run on a GPU yet.**

    Like NCCL it has no tags, and matches messages by their order alone. So all ranks must start their exchanges in one
    order. Exchanges that run at the same time need separate transports, and streams that do not block each other, as
    those under `CUDA_DEVICE_MAX_CONNECTIONS=1` do. CUDA graphs are not supported: a replay would reuse the slots of the
    capture.

    A waiting stream spins in a kernel of one warp. If its peer is late by `timeout`, that kernel ends in a trap: later
    CUDA calls fail, those of this class with a `CommError`, and the process cannot continue.

    `area` is this rank's allocation, which the transport keeps alive.

    Raises:
        LayoutError: the areas are too small for this number of ranks.
    """

    algorithm: Algorithm = "direct"

    def __init__(self, memory: _SymmetricMemory, timeout: timedelta, area: Tensor | None = None) -> None:
        self.rank, self.world_size = memory.rank, memory.world_size
        self._memory = memory
        self._area = area
        self._timeout = timeout
        self._patience = max(1, int(timeout.total_seconds() * 1000))  # ms; 0 would mean no timeout
        links = max(1, self.world_size - 1)
        self._slot = memory.buffer_size // (SLOTS * links) // _ALIGNMENT * _ALIGNMENT
        if not self._slot:
            raise LayoutError(
                f"symmetric memory of {memory.buffer_size} bytes per rank is too small for {self.world_size} ranks: "
                f"at least {SLOTS * links * _ALIGNMENT} bytes are needed"
            )
        nbytes = (SLOTS * links * self._slot,)
        self._areas = [memory.get_buffer(rank, nbytes, torch.uint8) for rank in range(self.world_size)]
        self._sent = [0] * self.world_size  # parcels to each rank so far
        self._received = [0] * self.world_size
        self._turns = _Turns(memory.device)
        self.holder = books = Ledger()
        if isinstance(area, Tensor):
            books.track("mailboxes", area)

    def exchange(self, messages: Sequence[Message], tag: int) -> Pending:
        """Enqueue all `messages` on the current stream, in as many rounds as the fullest link has parcels.

        Operations enqueued on that stream afterwards may use the tensors, so there is nothing to wait for.
        """
        departing, arriving = (self._links(messages, outgoing=outgoing) for outgoing in (True, False))
        rounds = max((len(link.parcels) for link in (*departing, *arriving)), default=0)
        try:
            self._turns.begin()
            for i in range(rounds):
                for link in departing:
                    if i < len(link.parcels):
                        self._put(link, link.parcels[i])
                for link in arriving:
                    if i < len(link.parcels):
                        self._take(link, link.parcels[i])
            self._turns.end()
        except RuntimeError as error:
            raise Posted(self.rank, messages, tag, self._timeout).refused(error) from error
        return Completed()

    def _links(self, messages: Sequence[Message], *, outgoing: bool) -> list["_Link"]:
        """Group the messages of one direction by peer, in order of first occurrence, and pack them."""
        contents: dict[int, list[Tensor]] = {}
        for message in messages:
            if message.outgoing == outgoing:
                content = message.tensor.detach().view(torch.uint8)
                contents.setdefault(message.peer, []).append(content)
        return [
            _Link(peer, link, parcels([content.numel() for content in link], self._slot))
            for peer, link in contents.items()
        ]

    def _put(self, link: "_Link", parcel: Sequence[Piece]) -> None:
        """Copy a parcel into this rank's area, and signal its receiver."""
        place = self._place(self.rank, link.peer, self._sent[link.peer])
        for each in parcel:
            start = place + each.offset
            room = self._areas[self.rank][start : start + each.stop - each.start]
            room.copy_(link.contents[each.message][each.start : each.stop])
        self._memory.put_signal(link.peer, _CHANNEL, self._patience)
        self._sent[link.peer] += 1

    def _take(self, link: "_Link", parcel: Sequence[Piece]) -> None:
        """Wait for a parcel, and copy it to its messages."""
        self._memory.wait_signal(link.peer, _CHANNEL, self._patience)
        place = self._place(link.peer, self.rank, self._received[link.peer])
        for each in parcel:
            start = place + each.offset
            lying = self._areas[link.peer][start : start + each.stop - each.start]
            link.contents[each.message][each.start : each.stop].copy_(lying)
        self._received[link.peer] += 1

    def _place(self, source: int, target: int, parcel: int) -> int:
        """Return the offset of the `parcel`-th parcel to `target` in the area of `source`."""
        target_of_source = (target - source - 1) % self.world_size
        return (target_of_source * SLOTS + parcel % SLOTS) * self._slot


class _Link(NamedTuple):
    """The messages of an exchange to or from one peer, as bytes, and their parcels."""

    peer: int
    contents: Sequence[Tensor]
    parcels: Sequence[Sequence[Piece]]


class _Turns:
    """Orders exchanges of several streams: a slot is free only if exchanges run in order."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: tuple[torch.cuda.Stream, torch.cuda.Event] | None = None

    def begin(self) -> None:
        """Put the current stream behind the last exchange, if that was enqueued on another stream."""
        if self._last is not None:
            before, done = self._last
            stream = torch.cuda.current_stream(self._device)
            if stream != before:
                stream.wait_event(done)

    def end(self) -> None:
        """Record the end of the exchange on the current stream. No-op on a CPU, in tests."""
        if self._device.type == "cuda":
            stream = torch.cuda.current_stream(self._device)
            self._last = stream, stream.record_event()


_WHAT = "symmetric memory"


def why_not(group: dist.ProcessGroup, device: torch.device, timeout: timedelta = TIMEOUT) -> str:
    """Return why the ranks of `group` cannot use symmetric memory on their devices, or `""`. Equal on every rank.

    Collective; each rank passes its own `device`.
    """
    reason = _not_here(device)
    number = None if reason else _numbered(device).index
    rows = all_gather_json(group, (reason, number, devices_may_overlap()), _WHAT, timeout)
    if missing := next((f"rank {rank}: {row[0]}" for rank, row in enumerate(rows) if row[0]), ""):
        return missing
    if not _on_one_host(group, timeout):
        return "the ranks are on several hosts"
    numbers = [number for _, number, _ in rows]
    shared = next((each for each in numbers if numbers.count(each) > 1), None)
    if shared is not None and not all(may for _, _, may in rows):
        ranks = [rank for rank, each in enumerate(numbers) if each == shared]
        return (
            f"ranks {ranks} all use cuda:{shared}. PyTorch tells devices apart by this number, so each process has to "
            "see all GPUs; set TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 on all ranks if they are to share one"
        )
    own = _numbered(device)
    apart = [each for each in numbers if each != own.index and not torch.cuda.can_device_access_peer(own, each)]
    blind = f"{own} cannot access the memory of cuda:{apart[0]}" if apart else ""
    return next((said for said in all_gather_json(group, blind, _WHAT, timeout) if said), "")


def symmetric_memory(
    group: dist.ProcessGroup, device: torch.device, timeout: timedelta, nbytes: int = AREA
) -> SymmetricMemoryTransport:
    """Return a transport over its own symmetric memory, `nbytes` on each rank. Collective over `group`.

    Raises:
        LayoutError: symmetric memory is not available; the error names the reason.
    """
    reason = why_not(group, device, timeout)
    if not reason:
        failure, memory, area = "", None, None
        try:
            area = _allocate(_numbered(device), nbytes)
            memory = _SymmetricMemory.rendezvous(area, group.group_name)
        except RuntimeError as error:
            failure = f"rank {dist.get_rank(group)}: {error}"
        reason = next((said for said in all_gather_json(group, failure, _WHAT, timeout) if said), "")
        if not reason:
            assert memory is not None, "or there was a reason"
            return SymmetricMemoryTransport(memory, timeout, area)
    raise LayoutError(f"transport='symmetric_memory' cannot be had: {reason}. Use 'p2p', or 'auto'")


def _not_here(device: torch.device) -> str:
    """Return what this process lacks, or `""`."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return "it takes a CUDA device, and there is none"
    backend = _SymmetricMemory.get_backend(device)
    return "" if backend == "CUDA" else f"it takes PyTorch's backend 'CUDA' for symmetric memory, got {backend!r}"


def _on_one_host(group: dist.ProcessGroup, timeout: timedelta) -> bool:
    try:
        return nodes_of(group, timeout) == dist.get_world_size(group)
    except LayoutError:  # several hosts with different numbers of ranks
        return False


def _numbered(device: torch.device) -> torch.device:
    """Return a CUDA device with its index; without one it is the current device."""
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())


def _allocate(device: torch.device, nbytes: int) -> Tensor:
    """Allocate an area. It must be a separate allocation, because signals belong to allocations.

    `torch.distributed._symmetric_memory.empty` allocates from a pool, which may return another transport's former
    allocation, with signals that were put and never taken.
    """
    return _SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device)
