"""Ring collectives over a `Transport`. Pure functions: no process group, no module, no stream, no state.

A function here checks its arguments, names the operation in errors, and calls the method of the transport that has the
same name. By default, the transport sends messages: `schedule.py` writes the algorithm as transfers, and
`transport/base.py` sends them. The docstring of `transport/base.py` names the transports that do otherwise.

The drawings show the ring: rank `r` sends only to its right neighbour `r+1` and receives only from its left neighbour
`r-1` (modulo `W`). In every algorithm each rank sends `(W-1)/W` of the buffer per gather or reduction, which is
optimal. The algorithm `direct` adds in the order of the ring and returns the same bits as the ring. A function returns
when the host may use the buffers. If the transport is not `blocking`, the function returns earlier: only operations
that are enqueued on the device's current stream afterwards may use the buffers.

Legend: `W` ranks, `r` this rank, `t` a step of the ring, `n` elements in the full buffer. Segment `k` is
`[cuts[k], cuts[k+1])`. Without `cuts` each segment has `S = ceil(n/W)` elements, but the last segments may be shorter
or empty.
"""

from collections.abc import Callable, Sequence

import torch
from shardlite_kernels import hop, stats_block
from shardlite_kernels import stats as write_stats
from shardlite_kernels.stats import check_stats
from torch import Tensor

from shardlite.comm.chunking import CHUNK_BYTES, Cut, cut_up
from shardlite.comm.operation import UNNAMED, Operation, Running
from shardlite.comm.transport.base import FusedStep, LastHop, Parcels, StoreMean, Transport
from shardlite.errors import LayoutError

_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SUMMABLE = (*_FLOATS, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)  # dtypes that `hop` adds

_NARROW = (torch.bfloat16, torch.float16)


Memory = Callable[[int, torch.dtype], Tensor]
"""Function that returns memory for a number of elements of a dtype."""


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

    The transport decides; over most transports, the buffer holds two chunks.
    Chunks are multiples of `grain` elements. If the reduction computes statistics, `grain` is the length of a block of
    statistics.

    Raises:
        LayoutError: `cuts` are wrong.
    """
    cut = cut_up(numel, dtype, transport, cuts, chunk_bytes, grain)
    return transport.staging_numel(cut, dtype.itemsize)


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
        transport.all_gather(full, cut, operation)


def reduce_scatter(
    full: Tensor,
    transport: Transport,
    *,
    cut: Cut | None = None,
    last: LastHop | None = None,
    staging: Tensor | Memory | None = None,
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

    Messages are received in the buffer `staging`, which needs at least `staging_numel(...)` elements. Without
    `staging`, this function allocates the buffer. A ring needs no staging buffer if the caller passes an `out` in the
    dtype of `full`, and all segments are equal: the ring then receives messages in `out`.

    Args:
        full: this rank's summand, [n].
        transport: connects the ranks.
        cut: the segments and messages, as returned by `cut_up`. Defaults to equal segments.
        last: callback that makes the last addition.
        staging: memory for messages, or a function that returns it and is called only if memory is needed.
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
    staging = _staging(full, shard, cut, transport, staging, has_mean=mean is not None)
    with Running(operation, full):
        transport.reduce_scatter(full, cut, finish, staging, operation)
    return shard


def ring_step(
    full: Tensor, transport: Transport, step: FusedStep, *, divisor: int = 1, operation: Operation = UNNAMED
) -> None:
    """Sum `full` [n] over the ranks, and update weights by AdamW with this rank's segment of the mean, in one kernel.

    `transport.rings()` must return true. Other ranks may call `reduce_scatter` with an fp32 `out` instead.

    Raises:
        LayoutError: `full` is not 1-D and contiguous, or cannot be summed or divided.
        CommError: a peer failed, timed out or runs a different operation; only some of the weights are then updated.
    """
    _check_flat("full", full)
    _check_arithmetic(full, divisor)
    with Running(operation, full):
        operation.count_collective(full.nbytes - full.nbytes // transport.world_size)
        transport.ring_step(step, full, divisor)


def all_reduce(
    full: Tensor,
    transport: Transport,
    *,
    cut: Cut | None = None,
    divisor: int = 1,
    staging: Tensor | Memory | None = None,
    operation: Operation = UNNAMED,
) -> None:
    """Sum `full` [n] over the ranks in place, and divide the sum by `divisor`, with a reduce-scatter and an all-gather.

    All ranks end with the same bits, since each segment is summed by one rank only. Some transports add short buffers
    at once, in one round instead of two.

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
    if transport.world_size > 1 and transport.adds_at_once(full):
        with Running(operation, full):
            transport.all_reduce(full, cut, divisor, operation)
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
    with Running(operation, full):
        transport.broadcast(full, source, operation, chunk_bytes)


def exchange(
    parcels: Sequence[tuple[Parcels, Parcels]],
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
        transport.swap(parcels, operation.tag(described, (), "exchange"), operation)


def _staging(
    full: Tensor, shard: Tensor, cut: Cut, transport: Transport, staging: Tensor | Memory | None, *, has_mean: bool
) -> Tensor:
    """Return memory for messages: `staging`, or `shard` if it is unused until the last step, or new memory."""
    if isinstance(staging, Tensor):
        needed = transport.staging_numel(cut, full.itemsize)
        _check_like(full, staging, (full.dtype,), needed, staging.numel(), "staging")
        return staging
    may_use = has_mean and shard.dtype == full.dtype and cut.even and transport.stages_in_out()
    if may_use and full.untyped_storage().data_ptr() != shard.untyped_storage().data_ptr():
        return shard
    needed = 0 if has_mean and transport.rings(full, cut) else transport.staging_numel(cut, full.itemsize)
    return full.new_empty(needed) if staging is None or not needed else staging(needed, full.dtype)


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
