"""Ring collectives over a `Transport`. Pure blocking functions: no process group, no module, no stream, no state.

Rank `r` sends only to its right neighbour `r+1` and receives only from its left neighbour `r-1` (modulo `W`). A segment
travels in chunks, and a chunk is passed on as soon as it came, so all links are busy after the first chunk. Each rank
sends `(W-1)/W` of the buffer per gather or reduction, which is optimal (Thakur, Rabenseifner, Gropp, 2005, IJHPCA 19).

Legend: `W` ranks, `r` this rank, `t` a step of the ring, `n` elements in the full buffer, `S = ceil(n/W)` elements in a
segment. The last segments may be shorter or empty.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from zlib import crc32

import torch
from shardlite_kernels import hop
from torch import Tensor

from shardlite.errors import CommError, LayoutError
from shardlite.transport import Pending, Transport

CHUNK_BYTES = 8 << 20
"""Bytes per message, equal on all ranks.

A gloo message costs a rendezvous. Measured on 2 shared x86 cores over gloo, 16 MB of fp32, median ms of 40 interleaved
runs: a reduce-scatter of 2 / 4 processes takes 21.6 / 111.6 with 128 KiB, 11.5 / 38.4 with 1 MiB, 8.1 / 31.7 with 4 MiB
and 8.6 / 31.0 with 8 MiB; an all-gather 16.8 / 39.6, 6.2 / 25.0, 6.6 / 23.3 and 6.8 / 23.4.
"""

_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SUMMABLE = (*_FLOATS, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)  # what `hop` adds

_SLOTS = 2  # staging chunks of a reduction: one is being added while the other is being filled


@dataclass(frozen=True)
class Operation:
    """The name of a collective, in the same words on every rank: `Operation("all-gather of unit 'blocks.0'", 17)`.

    `sequence` tells repeated operations with one label apart.
    """

    label: str = "unnamed collective"
    sequence: int = 0

    def tag(self, full: Tensor) -> int:
        """Return a message tag that only ranks doing the same operation on a like buffer share.

        Ranks that disagree therefore do not mix data: their receives stay unanswered and end in a `CommError`. The tag
        is 31 bits of a CRC, so that no registry of labels has to be agreed on; two names collide once in 2^31.
        """
        return crc32(f"{self.label}\n{self.sequence}\n{full.dtype}\n{full.numel()}".encode()) & 0x7FFFFFFF


UNNAMED = Operation()
"""For a program that runs one collective at a time."""


def segment_bounds(numel: int, world_size: int) -> list[tuple[int, int]]:
    """Return `(start, stop)` of each rank's segment: `[0, S), [S, 2S), ...`, cut off at `numel`."""
    length = -(-numel // world_size)
    return [(min(r * length, numel), min((r + 1) * length, numel)) for r in range(world_size)]


def staging_numel(numel: int, world_size: int, dtype: torch.dtype, *, chunk_bytes: int = CHUNK_BYTES) -> int:
    """Return how many elements of `dtype` the staging buffer of a reduction needs: two chunks of a segment."""
    return _SLOTS * min(_chunk_numel(dtype, chunk_bytes), -(-numel // world_size))


def all_gather(
    full: Tensor, transport: Transport, *, operation: Operation = UNNAMED, chunk_bytes: int = CHUNK_BYTES
) -> None:
    """Fill `full` [n] in place, given that segment `r` already holds this rank's shard.

    At step `t` rank `r` sends segment `r-t`, which it received at step `t-1`, and receives segment `r-1-t`. After `W-1`
    steps every segment has gone round. Nothing is staged: a segment is received where it belongs.

        W=3   start        after t=0    after t=1
        r=0   [a . .]      [a . c]      [a b c]
        r=1   [. b .]      [a b .]      [a b c]
        r=2   [. . c]      [. b c]      [a b c]

    Raises:
        LayoutError: `full` is not 1-D and contiguous.
        CommError: a peer failed, is late or does another operation; `full` is then undefined.
    """
    _check_flat("full", full)
    rank, world_size = transport.rank, transport.world_size
    if world_size == 1:
        return
    segments = _chunked_segments(full, world_size, chunk_bytes)
    arriving = [chunk for t in range(world_size - 1) for chunk in segments[(rank - 1 - t) % world_size]]
    # What arrives at the last step has been everywhere: it is the right neighbour's own segment.
    passed_on = len(arriving) - len(segments[(rank + 1) % world_size])
    with _named(operation, full):
        _relay(_Ring(transport, operation.tag(full)), segments[rank], arriving, passed_on)


def reduce_scatter(
    full: Tensor,
    transport: Transport,
    *,
    out: Tensor | None = None,
    divisor: int = 1,
    staging: Tensor | None = None,
    operation: Operation = UNNAMED,
    chunk_bytes: int = CHUNK_BYTES,
) -> Tensor:
    """Add `full` [n] over the ranks and return segment `r` of the sum, divided by `divisor`.

    At step `t` rank `r` sends the partial sum of segment `r-1-t` and receives that of segment `r-2-t`, to which it adds
    its own. So segment `k` is added in the order `k+1, k+2, ..., k`, with any chunk size and over any transport. The
    division is a true one and happens once, after the whole sum.

        W=3   start          after t=0            after t=1
        r=0   [a0 a1 a2]     [a0    c1+a1 a2   ]  [b0+c0+a0 .        .       ]
        r=1   [b0 b1 b2]     [b0    b1    a2+b2]  [.        c1+a1+b1 .       ]
        r=2   [c0 c1 c2]     [b0+c0 c1    c2   ]  [.        .        a2+b2+c2]

    The shard is written to `out` [its numel] or, without it, to its own place in `full`. The rest of `full` is
    overwritten with partial sums. What arrives is staged in `out`, which is free until the last step; without `out`, or
    if segments differ in length, in `staging` [`staging_numel(...)` or more], which is allocated if not given.

    Raises:
        LayoutError: a buffer is not 1-D and contiguous or does not fit `full`; a dtype without a sum; integers divided.
        CommError: a peer failed, is late or does another operation; `full` and `out` are then undefined.
    """
    _check_flat("full", full)
    _check_arithmetic(full, divisor)
    rank, world_size = transport.rank, transport.world_size
    own = full[slice(*segment_bounds(full.numel(), world_size)[rank])]
    shard = own if out is None else out
    _check_like(full, shard, own.numel(), own.numel(), "out")
    if world_size == 1:
        return torch.div(own, divisor, out=shard) if divisor != 1 else shard.copy_(own)
    in_out = staging is None and full.numel() % world_size == 0 and _apart(shard, full)
    slots = _chunks(shard, chunk_bytes) if in_out else _slots(full, world_size, staging, chunk_bytes)
    segments = _chunked_segments(full, world_size, chunk_bytes)
    with _named(operation, full):
        ring = _Ring(transport, operation.tag(full))
        _reduce(ring, segments, _Destination(_chunks(shard, chunk_bytes), divisor), slots)
    return shard


def all_reduce(
    full: Tensor,
    transport: Transport,
    *,
    divisor: int = 1,
    staging: Tensor | None = None,
    operation: Operation = UNNAMED,
    chunk_bytes: int = CHUNK_BYTES,
) -> None:
    """Add `full` [n] over the ranks in place and divide by `divisor`: a reduce-scatter, then an all-gather.

    Every rank ends with the same bits, since each segment is summed by one rank only.

    Raises:
        LayoutError, CommError: as `reduce_scatter`.
    """
    # Both halves may share a tag: on each link all messages of the first are sent and expected before the second's.
    reduce_scatter(full, transport, divisor=divisor, staging=staging, operation=operation, chunk_bytes=chunk_bytes)
    all_gather(full, transport, operation=operation, chunk_bytes=chunk_bytes)


def broadcast(
    full: Tensor,
    transport: Transport,
    *,
    source: int = 0,
    operation: Operation = UNNAMED,
    chunk_bytes: int = CHUNK_BYTES,
) -> None:
    """Copy `full` [n] of rank `source` into that of every other rank, chunk by chunk along the ring.

    Raises:
        LayoutError: `full` is not 1-D and contiguous, or there is no rank `source`.
        CommError: a peer failed, is late or does another operation; `full` is then undefined on the other ranks.
    """
    _check_flat("full", full)
    world_size = transport.world_size
    if not 0 <= source < world_size:
        raise LayoutError(f"broadcast: no rank {source} in a world of {world_size}")
    if world_size == 1:
        return
    distance = (transport.rank - source) % world_size
    chunks = _chunks(full, chunk_bytes)
    with _named(operation, full):
        ring = _Ring(transport, operation.tag(full))
        if distance == 0:
            _relay(ring, chunks, [], 0)
        else:
            _relay(ring, [], chunks, len(chunks) if distance < world_size - 1 else 0)


@dataclass(frozen=True)
class _Ring:
    """The two links that a rank uses in one operation."""

    transport: Transport
    tag: int

    def send(self, chunk: Tensor) -> Pending:
        right = (self.transport.rank + 1) % self.transport.world_size
        return self.transport.isend(chunk, right, self.tag)

    def receive(self, chunk: Tensor) -> Pending:
        left = (self.transport.rank - 1) % self.transport.world_size
        return self.transport.irecv(chunk, left, self.tag)


@dataclass(frozen=True)
class _Destination:
    """Where the chunks of the finished sum go, and by what they are divided on the way."""

    chunks: Sequence[Tensor]
    divisor: int


def _relay(ring: _Ring, departing: Sequence[Tensor], arriving: Sequence[Tensor], passed_on: int) -> None:
    """Send `departing`, receive `arriving`, and pass the first `passed_on` of those on as they come."""
    incoming = [ring.receive(chunk) for chunk in arriving]
    outgoing = [ring.send(chunk) for chunk in departing]
    for i, (pending, chunk) in enumerate(zip(incoming, arriving, strict=True)):
        pending.wait()
        if i < passed_on:
            outgoing.append(ring.send(chunk))
    _wait_all(outgoing)


def _reduce(ring: _Ring, segments: Sequence[Sequence[Tensor]], end: _Destination, slots: Sequence[Tensor]) -> None:
    """Walk the reduction: while what has arrived in one slot is added to an own chunk, the other slots are filled."""
    rank, world_size = ring.transport.rank, len(segments)
    own = [chunk for t in range(world_size - 1) for chunk in segments[(rank - 2 - t) % world_size]]
    passed_on = len(own) - len(end.chunks)
    ahead = len(slots)
    received = [slots[i % ahead][: chunk.numel()] for i, chunk in enumerate(own)]
    incoming = [ring.receive(chunk) for chunk in received[:ahead]]
    outgoing = [ring.send(chunk) for chunk in segments[(rank - 1) % world_size]]
    for i in range(len(own)):
        incoming[i].wait()
        if i < passed_on:
            # In place: a segment passes each rank once, so nothing that is still being sent is overwritten.
            hop(own[i], received[i], own[i], 1)
            outgoing.append(ring.send(own[i]))
        else:
            hop(end.chunks[i - passed_on], received[i], own[i], end.divisor)
        if i + ahead < len(own):
            incoming.append(ring.receive(received[i + ahead]))  # its slot has just been read
    _wait_all(outgoing)


def _wait_all(pending: Sequence[Pending]) -> None:
    for message in pending:
        message.wait()


def _chunk_numel(dtype: torch.dtype, chunk_bytes: int) -> int:
    return max(1, chunk_bytes // dtype.itemsize)


def _chunks(segment: Tensor, chunk_bytes: int) -> list[Tensor]:
    """Cut a segment into messages; an empty one has none."""
    return list(torch.split(segment, _chunk_numel(segment.dtype, chunk_bytes))) if segment.numel() else []


def _chunked_segments(full: Tensor, world_size: int, chunk_bytes: int) -> list[list[Tensor]]:
    return [_chunks(full[start:stop], chunk_bytes) for start, stop in segment_bounds(full.numel(), world_size)]


def _slots(full: Tensor, world_size: int, staging: Tensor | None, chunk_bytes: int) -> Sequence[Tensor]:
    """Cut the staging buffer, or a new one, into the slots where partial sums arrive."""
    needed = staging_numel(full.numel(), world_size, full.dtype, chunk_bytes=chunk_bytes)
    if staging is None:
        staging = full.new_empty(needed)
    _check_like(full, staging, needed, staging.numel(), "staging")
    return staging[:needed].view(_SLOTS, -1).unbind() if needed else []


def _apart(first: Tensor, second: Tensor) -> bool:
    return first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()


def _check_flat(name: str, tensor: Tensor) -> None:
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise LayoutError(
            f"{name} must be 1-D and contiguous, got shape {tuple(tensor.shape)} with strides {tensor.stride()}"
        )


def _check_like(full: Tensor, buffer: Tensor, least: int, most: int, name: str) -> None:
    """Check a buffer that goes with `full`: flat, the same dtype and device, `least` to `most` elements."""
    _check_flat(name, buffer)
    if (buffer.dtype, buffer.device) != (full.dtype, full.device):
        raise LayoutError(f"{name} is {buffer.dtype} on {buffer.device}, full is {full.dtype} on {full.device}")
    if not least <= buffer.numel() <= most:
        bound = "exactly" if least == most else "at least"
        raise LayoutError(f"{name} has {buffer.numel()} elements, expected {bound} {least}")


def _check_arithmetic(full: Tensor, divisor: int) -> None:
    """Refuse here what `hop` would refuse when messages are already on their way."""
    if full.dtype not in SUMMABLE:
        raise LayoutError(f"{full.dtype} cannot be summed: convert it first (bool to uint8, for example)")
    if divisor < 1 or (divisor != 1 and full.dtype not in _FLOATS):
        raise LayoutError(f"cannot divide a sum of {full.dtype} by {divisor}: integers take 1, floats 1 or more")


@contextmanager
def _named(operation: Operation, full: Tensor) -> Iterator[None]:
    """Put the name of the operation before a transport's error, which knows only ranks and bytes."""
    try:
        yield
    except CommError as error:
        what = f"{operation.label} (operation {operation.sequence}, {full.numel()} elements of {full.dtype})"
        raise CommError(f"{what}: {error}") from error
