"""Ring collectives over a `Transport`. Pure functions: no process group, no module, no stream, no state.

The transport selects the algorithm, `schedule.py` writes the algorithm as transfers, and `executor.py` executes the
transfers. The drawings show the ring: rank `r` sends only to its right neighbour `r+1` and receives only from its left
neighbour `r-1` (modulo `W`). In every algorithm each rank sends `(W-1)/W` of the buffer per gather or reduction, which
is optimal. The algorithm `direct` adds in the order of the ring and returns the same bits as the ring. A function
returns when the host may use the buffers. If the transport is not `blocking`, the function returns earlier: only
operations that are enqueued on the device's current stream afterwards may use the buffers.

Legend: `W` ranks, `r` this rank, `t` a step of the ring, `n` elements in the full buffer. Segment `k` is
`[cuts[k], cuts[k+1])`. Without `cuts` each segment has `S = ceil(n/W)` elements, but the last segments may be shorter
or empty.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from shardlite_kernels import add_rows, hop, stats_block
from shardlite_kernels import stats as write_stats
from shardlite_kernels.stats import check_stats
from torch import Tensor

from shardlite.comm import schedule
from shardlite.comm.chunking import CHUNK_BYTES, Cut, chunk_numel, cut_up, split
from shardlite.comm.executor import Chunk, LastHop, Rows, run_all_reduce, run_gather, run_reduce
from shardlite.comm.operation import UNNAMED, Operation, Running
from shardlite.comm.schedule import IN_RING_ORDER
from shardlite.comm.transfers import Schedule
from shardlite.comm.transport.base import Message, Transport
from shardlite.comm.transport.group_collectives import FusedStep, GroupCollectives, WholeCollectives
from shardlite.comm.transport.symmetric import SymmetricMemoryTransport
from shardlite.errors import LayoutError

SHORT = 32 << 10
"""Maximum bytes of a buffer that is all-reduced in one round if the transport lends."""

_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SUMMABLE = (*_FLOATS, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)  # dtypes that `hop` adds

_NARROW = (torch.bfloat16, torch.float16)


def staging_numel(
    numel: int,
    transport: Transport,
    dtype: torch.dtype,
    *,
    cuts: Sequence[int] | None = None,
    chunk_bytes: int | None = None,
    grain: int = 1,
) -> int:
    """Return how many elements of `dtype` the staging buffer of a reduction over `transport` needs.

    Over most transports, the buffer holds two chunks. Over a batched transport, the buffer holds all messages of a
    step. Over a transport that lends, the buffer holds the sum of several messages if a rank adds several messages at a
    time, and is empty otherwise. Over collectives of a process group, the buffer holds one row per rank, or less if
    there are two ranks or the rows are long.
    Chunks are multiples of `grain` elements. If the reduction computes statistics, `grain` is the length of a block of
    statistics.

    Raises:
        LayoutError: `cuts` are wrong.
    """
    cut = cut_up(numel, dtype, transport, cuts, chunk_bytes, grain)
    if isinstance(transport, WholeCollectives):
        return transport.rows_numel(cut, dtype.itemsize, grain)
    return cut.slots(_reduction(transport), transport) * cut.slot_numel(transport)


def stages_in_out(transport: Transport) -> bool:
    """Return whether a reduction over `transport` can receive messages in `out` instead of staging memory.

    The reduction then needs no staging memory if all segments are equal.
    """
    return transport.algorithm == "ring" and not transport.lends and not isinstance(transport, WholeCollectives)


def rings_in_kernel(full: Tensor, transport: Transport, cuts: Sequence[int] | None = None) -> bool:
    """Return whether one kernel reduces `full` [n] along the ring, without staging. All ranks get the same answer."""
    if not isinstance(transport, SymmetricMemoryTransport):
        return False
    return transport.rings(full, cut_up(full.numel(), full.dtype, transport, cuts))


def all_gather(full: Tensor, transport: Transport, *, cut: Cut | None = None, operation: Operation = UNNAMED) -> None:
    """Fill `full` [n] in place with the segments of all ranks. Segment `r` must already hold this rank's shard.

    At step `t` rank `r` sends segment `r-t`, which it received at step `t-1`, and receives segment `r-1-t`. After `W-1`
    steps every segment has passed all ranks. Every segment is received in its place, without staging.

        W=3   start        after t=0    after t=1
        r=0   [a . .]      [a . c]      [a b c]
        r=1   [. b .]      [a b .]      [a b c]
        r=2   [. . c]      [. b c]      [a b c]

    Args:
        full: the full buffer [n], in which this rank's shard is already in its place.
        transport: connects the ranks.
        cut: the segments and messages, as returned by `cut_up`. Defaults to equal segments.
        operation: names the operation in errors and counts.

    Raises:
        LayoutError: `full` is not 1-D and contiguous.
        CommError: a peer failed, timed out or runs a different operation; `full` is then undefined.
    """
    _check_flat("full", full)
    if transport.world_size == 1:
        return
    cut = cut or cut_up(full.numel(), full.dtype, transport)
    with Running(operation, full):
        if isinstance(transport, WholeCollectives):
            start, stop = cut.bounds[transport.rank]
            operation.count_collective((transport.world_size - 1) * (stop - start) * full.itemsize)
            transport.all_gather(full, cut)
            return
        channel = operation.channel(transport, full, cut.offsets, transport.algorithm)
        plan = schedule.all_gather(transport.algorithm, transport.world_size, node=transport.node)
        run_gather(channel, plan, cut.of(full, plan.parts))


class StoreMean(NamedTuple):
    """The last addition (the last hop) of a reduction. This last hop divides the sum and stores the mean."""

    out: Tensor | None = None
    """Memory for the result, [numel of the shard]. `None` stores the result in the shard's place in `full`."""

    divisor: int = 1
    stats: Tensor | None = None
    """Memory for the statistics of the shard, [P, 2]: a row per block (`shardlite_kernels.stats`)."""

    def __call__(self, start: int, received: Tensor | Rows, own: Tensor | None) -> None:
        """Add `received` to `own`, or add all rows of `received` if `own` is `None`, and store the mean."""
        part, stats = self.out, self.stats
        assert part is not None, "reduce_scatter sets it"
        summand = received.rows if isinstance(received, Rows) else received
        stop = start + summand.shape[-1]
        if stop - start < part.numel():
            block = stats_block(part)
            part, stats = part[start:stop], None if stats is None else stats[start // block : -(-stop // block)]
        if isinstance(received, Rows):
            add_rows(part, received.rows, received.first, self.divisor, stats, *received[2:])
        else:
            assert own is not None, "only rows have all summands"
            hop(part, received, own, self.divisor, stats)


def reduce_scatter(
    full: Tensor,
    transport: Transport,
    *,
    cut: Cut | None = None,
    last: LastHop | None = None,
    staging: Tensor | None = None,
    operation: Operation = UNNAMED,
) -> Tensor:
    """Sum `full` [n] over the ranks, and return this rank's segment of the sum. The callback `last` may divide the sum.

    At step `t` rank `r` sends the partial sum of segment `r-1-t`, receives the partial sum of segment `r-2-t`, and adds
    its own summand to the received sum. So segment `k` is added in the order `k+1, k+2, ..., k`, for any cuts, chunk
    size and transport. The sum is divided once, at the end, by true division.

        W=3   start          after t=0            after t=1
        r=0   [a0 a1 a2]     [a0    c1+a1 a2   ]  [b0+c0+a0 .        .       ]
        r=1   [b0 b1 b2]     [b0    b1    a2+b2]  [.        c1+a1+b1 .       ]
        r=2   [c0 c1 c2]     [b0+c0 c1    c2   ]  [.        .        a2+b2+c2]

    The rest of `full` is overwritten with messages. These are partial sums or summands in the dtype of `full`. So `out`
    must not overlap `full`, unless it is the shard's place.

    The callback `last` makes the last addition. Without `last`, the sum is stored in the shard's place. The callback
    `StoreMean(out, divisor, stats)` divides the sum, stores the mean in `out`, and computes the statistics of the mean.
    For a bf16 or fp16 `full`, `out` may be fp32: the last addition and the division are then rounded to fp32 only. Any
    other callback consumes the sum, and the returned shard is then undefined. If there is only one rank, such a
    callback is not called, because there is no addition to make. If the callback computes statistics or consumes the
    sum, each message has a whole number of blocks of statistics. So the statistics do not depend on the size of
    messages.

    Messages are received in the buffer `staging`, which needs at least `staging_numel(...)` elements. If the caller
    passes no `staging`, this function allocates the buffer. A ring needs no staging buffer if the caller passes an
    `out` in the dtype of `full`, and all segments are equal: the ring then receives messages in `out`.

    Args:
        full: this rank's summand, [n].
        transport: connects the ranks.
        cut: the segments and messages, as returned by `cut_up`. Defaults to equal segments.
        last: callback that makes the last addition.
        staging: memory for messages.
        operation: names the operation in errors and counts.

    Returns:
        This rank's shard, [numel of segment `r`]: `out`, or a view of `full`.

    Raises:
        LayoutError: a buffer is not 1-D and contiguous or does not fit `full`; the dtype cannot be summed; the dtype
            is an integer, and the divisor is not 1.
        ValueError: `stats` does not fit the shard.
        CommError: a peer failed, timed out or runs a different operation; `full` and `out` are then undefined.
    """
    _check_flat("full", full)
    mean = StoreMean() if last is None else last if isinstance(last, StoreMean) else None
    _check_arithmetic(full, 1 if mean is None else mean.divisor)
    grain = 1 if mean is not None and mean.stats is None else stats_block(full)
    cut = cut or cut_up(full.numel(), full.dtype, transport, grain=grain)
    assert cut.grain % grain == 0, "messages are multiples of a block of statistics"
    start, stop = cut.bounds[transport.rank]
    shard = full[start:stop] if mean is None or mean.out is None else mean.out
    _check_out(full, shard, stop - start)
    if mean is not None and mean.stats is not None:
        check_stats(f"reduce-scatter of {tuple(full.shape)}", shard, mean.stats)
    if transport.world_size == 1:
        return shard if mean is None else _finished_alone(full[start:stop], shard, mean.divisor, mean.stats)
    finish = last if mean is None else mean._replace(out=shard)
    assert finish is not None, "a mean, or the caller's last hop"
    with Running(operation, full):
        if isinstance(transport, WholeCollectives):
            across = transport.nbytes_across(cut, full.itemsize)
            operation.count_collective((full.numel() - (stop - start)) * full.itemsize, across)
            if mean is not None and isinstance(transport, SymmetricMemoryTransport) and transport.rings(full, cut):
                transport.ring_reduce(shard, full, mean.divisor)
                if mean.stats is not None:
                    write_stats(shard, mean.stats)
            else:
                _reduce_rows(full, transport, cut, finish, staging)
        else:
            plan = _reduction(transport)
            free = shard if mean is not None and staging is None and shard.dtype == full.dtype else None
            slots = _slots(full, cut, plan, transport, staging, free)
            channel = operation.channel(transport, full, cut.offsets, transport.algorithm)
            run_reduce(channel, plan, cut.of(full, plan.parts), finish, slots)
    return shard


def ring_step(
    full: Tensor, transport: Transport, step: FusedStep, *, divisor: int = 1, operation: Operation = UNNAMED
) -> None:
    """Sum `full` [n] over the ranks, and update weights by AdamW with this rank's segment of the mean, in one kernel.

    `rings_in_kernel()` must return true. Other ranks may call `reduce_scatter` with an fp32 `out` instead.

    Raises:
        LayoutError: `full` is not 1-D and contiguous, or cannot be summed or divided.
        CommError: a peer failed, timed out or runs a different operation; only some of the weights are then updated.
    """
    _check_flat("full", full)
    _check_arithmetic(full, divisor)
    assert isinstance(transport, SymmetricMemoryTransport), "only its kernel reduces along a ring"
    with Running(operation, full):
        operation.count_collective(full.nbytes - full.nbytes // transport.world_size)
        transport.ring_step(step, full, divisor)


def all_reduce(
    full: Tensor,
    transport: Transport,
    *,
    cut: Cut | None = None,
    divisor: int = 1,
    staging: Tensor | None = None,
    operation: Operation = UNNAMED,
) -> None:
    """Sum `full` [n] over the ranks in place, and divide the sum by `divisor`, with a reduce-scatter and an all-gather.

    All ranks end with the same bits, since each segment is summed by one rank only. If the transport lends, every rank
    sends a short buffer whole to all other ranks, and adds all segments in the order of the ring. This takes one round
    instead of two, which saves time because the time of short messages is mostly latency.

    Args:
        full: this rank's summand, [n]; afterwards the mean.
        transport: connects the ranks.
        cut: the segments and messages, as returned by `cut_up`. Defaults to equal segments.
        divisor: divides the sum.
        staging: memory for messages, as for `reduce_scatter`.
        operation: names the operation in errors and counts.

    Raises:
        LayoutError: a buffer is not 1-D and contiguous; the dtype cannot be summed; the dtype is an integer, and
            `divisor` is not 1.
        CommError: a peer failed, timed out or runs a different operation; `full` is then undefined.
    """
    _check_flat("full", full)
    _check_arithmetic(full, divisor)
    cut = cut or cut_up(full.numel(), full.dtype, transport)
    if isinstance(transport, WholeCollectives) and transport.world_size > 1 and _is_flag(full, transport):
        with Running(operation, full):
            operation.count_collective((transport.world_size - 1) * full.nbytes)
            if full.dtype not in _FLOATS:
                transport.all_reduce(full)
                return
            rows = full.repeat(transport.world_size)
            transport.all_gather(rows, cut_up(rows.numel(), rows.dtype, transport))
            add_rows(full, rows.view(-1, 1), 1, divisor)
        return
    if _is_at_once(full, transport):
        with Running(operation, full):
            run_all_reduce(operation.channel(transport, full, cut.offsets, "whole"), full, cut.bounds, divisor)
        return
    # The reduce-scatter and the all-gather may use the same tag: on each link, all messages of the reduce-scatter are
    # posted before the messages of the all-gather.
    reduce_scatter(full, transport, cut=cut, last=StoreMean(divisor=divisor), staging=staging, operation=operation)
    all_gather(full, transport, cut=cut, operation=operation)


def broadcast(
    full: Tensor,
    transport: Transport,
    *,
    source: int = 0,
    operation: Operation = UNNAMED,
    chunk_bytes: int = CHUNK_BYTES,
) -> None:
    """Copy `full` [n] of rank `source` to `full` of every other rank, chunk by chunk along the ring.

    Raises:
        LayoutError: `full` is not 1-D and contiguous, or there is no rank `source`.
        CommError: a peer failed, timed out or runs a different operation; `full` is then undefined on the other ranks.
    """
    _check_flat("full", full)
    world_size = transport.world_size
    if not 0 <= source < world_size:
        raise LayoutError(f"broadcast: no rank {source} in a world of {world_size}")
    if world_size == 1:
        return
    if isinstance(transport, WholeCollectives):
        with Running(operation, full):
            operation.count_collective(full.nbytes)
            transport.broadcast(full, source)
        return
    chunks = split(full, chunk_numel(full.dtype, chunk_bytes))
    with Running(operation, full):
        chain = schedule.broadcast(world_size, source, parts=len(chunks))
        run_gather(operation.channel(transport, full), chain, lambda _, part: [Chunk(0, chunks[part])])


def exchange(
    parcels: Sequence[tuple[Sequence[tuple[Tensor, int]], Sequence[tuple[Tensor, int]]]],
    transport: Transport,
    numel: int,
    *,
    operation: Operation = UNNAMED,
) -> None:
    """Send tensors to other ranks and receive tensors from them, in place.

    Args:
        parcels: pairs of lists: the tensors that this rank sends, and those that it receives, each with the other
            rank. All ranks must pass parcels in the same order. A parcel has at most two tensors for each other rank
            and direction.
        transport: connects the ranks.
        numel: number of elements of all parcels, equal on all ranks. It identifies the operation.
        operation: names the operation in errors and counts.

    Raises:
        CommError: a peer failed, timed out or runs a different operation; the received tensors are then undefined.
    """
    described = torch.empty(numel, dtype=torch.uint8, device="meta")
    with Running(operation, described):
        channel = operation.channel(transport, described, (), "exchange")
        if transport.batched:
            for departing, arriving in parcels:
                channel.exchange(departing, arriving)
            return
        messages = [Message(each, peer, outgoing=False) for _, arriving in parcels for each, peer in arriving]
        for departing, _ in parcels:
            for each, peer in departing:
                channel.count_sent(each)
                messages.append(Message(each, peer, outgoing=True))
        transport.exchange(messages, channel.tag).wait()


def are_equal(numbers: Sequence[int], transport: GroupCollectives, *, operation: Operation = UNNAMED) -> bool:
    """Return whether all ranks pass the same `numbers`. The check takes one collective of `O(log2(W))` steps.

    Raises:
        CommError: a peer failed, timed out or runs a different operation.
    """
    both = torch.tensor([*numbers, *(-each for each in numbers)])
    with Running(operation, both):
        operation.count_collective(both.nbytes)
        transport.largest(both)
    return torch.equal(both[: len(numbers)], -both[len(numbers) :])


def _is_at_once(full: Tensor, transport: Transport) -> bool:
    """Return whether an all-reduce takes one round, in which each rank reads the buffers of all other ranks."""
    reads_all_ranks = transport.lends and not transport.batched and transport.world_size > 1
    in_any_order = transport.algorithm in IN_RING_ORDER or full.dtype not in _FLOATS
    return reads_all_ranks and in_any_order and 0 < full.nbytes <= SHORT


def _reduction(transport: Transport) -> Schedule:
    return schedule.reduce_scatter(transport.algorithm, transport.world_size, node=transport.node)


def _reduce_rows(full: Tensor, transport: WholeCollectives, cut: Cut, finish: LastHop, staging: Tensor | None) -> None:
    """Exchange the summands of this rank's segment (a row per rank), and add the summands.

    If the process group can add such a buffer itself, let the process group both exchange and add the summands.
    """
    needed = transport.rows_numel(cut, full.itemsize, cut.grain)
    if staging is None:
        staging = full.new_empty(needed)
    _check_like(full, staging, (full.dtype,), needed, staging.numel(), "staging")
    if isinstance(transport, GroupCollectives) and transport.sums(cut):
        finish(0, Rows(transport.reduce_scatter(full, staging)), None)
        return
    own = full[slice(*cut.bounds[transport.rank])]
    for start, received in transport.rows(full, cut, staging):
        if len(rows := received.rows) == 1:  # two ranks: this rank's own summand is added to the other rank's row
            finish(start, rows[0], own[start : start + rows.shape[1]])
        else:
            finish(start, received, None)


def _is_flag(full: Tensor, transport: Transport) -> bool:
    """Return whether one whole all-reduce gives the bits of a ring: for integers, or for one float in ring order."""
    return full.dtype not in _FLOATS or (full.numel() == 1 and transport.algorithm in IN_RING_ORDER)


def _slots(
    full: Tensor, cut: Cut, plan: Schedule, transport: Transport, staging: Tensor | None, free: Tensor | None
) -> Sequence[Tensor]:
    """Return slots for incoming partial sums, in `staging` or in `free`, which is unused until the last step."""
    if free is not None and free.untyped_storage().data_ptr() == full.untyped_storage().data_ptr():
        free = None
    if free is not None and stages_in_out(transport) and cut.even:
        return split(free, cut.chunk)
    length = cut.slot_numel(transport)
    needed = cut.slots(plan, transport) * length
    if staging is None and not needed:
        return ()
    if staging is None:
        staging = full.new_empty(needed)
    _check_like(full, staging, (full.dtype,), needed, staging.numel(), "staging")
    return split(staging[:needed], length)


def _finished_alone(own: Tensor, shard: Tensor, divisor: int, stats: Tensor | None) -> Tensor:
    """Store the summand of the only rank in `shard`, divided in the precision of `shard`, and return `shard`."""
    if divisor != 1:
        # Add zeros, so that the division is the same as for other world sizes.
        hop(shard, torch.zeros_like(own), own, divisor, stats)
        return shard
    shard.copy_(own)
    if stats is not None:
        write_stats(shard, stats)
    return shard


def _check_flat(name: str, tensor: Tensor) -> None:
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise LayoutError(
            f"{name} must be 1-D and contiguous, got shape {tuple(tensor.shape)} with strides {tensor.stride()}"
        )


def _check_like(full: Tensor, buffer: Tensor, dtypes: Sequence[torch.dtype], least: int, most: int, name: str) -> None:
    """Check that `buffer` is 1-D, on the device of `full`, of one of `dtypes`, and has `least` to `most` elements."""
    _check_flat(name, buffer)
    if buffer.dtype not in dtypes or buffer.device != full.device:
        raise LayoutError(f"{name} is {buffer.dtype} on {buffer.device}, full is {full.dtype} on {full.device}")
    if not least <= buffer.numel() <= most:
        bound = "exactly" if least == most else "at least"
        raise LayoutError(f"{name} has {buffer.numel()} elements, expected {bound} {least}")


def _check_out(full: Tensor, out: Tensor, numel: int) -> None:
    """Check that `out` has `numel` elements in the dtype of `full`, or in fp32 if `full` is bf16 or fp16."""
    widest = torch.float32 if full.dtype in _NARROW else full.dtype
    _check_like(full, out, (full.dtype, widest), numel, numel, "out")


def _check_arithmetic(full: Tensor, divisor: int) -> None:
    """Check dtype and divisor before any message is sent. The kernel `hop` would check them too late."""
    if full.dtype not in SUMMABLE:
        raise LayoutError(f"{full.dtype} cannot be summed: convert it first (bool to uint8, for example)")
    if divisor < 1 or (divisor != 1 and full.dtype not in _FLOATS):
        raise LayoutError(f"cannot divide a sum of {full.dtype} by {divisor}: integers take 1, floats 1 or more")
