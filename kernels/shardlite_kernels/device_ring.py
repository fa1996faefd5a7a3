"""Run ring reductions inside one kernel. Each rank writes its messages directly into memory of the next rank.
`signals.py` describes the protocol.

    ring_reduce_scatter   out = the mean of this rank's segment over all ranks, cast
    ring_reduce_adamw     an AdamW step with this mean as the gradient; the mean is never written

One launch runs all hops. Each program moves some blocks of each segment through all steps. `D - 1` messages of a
program are in flight: while one message is summed, the next messages are transferred. In step `t` of a reduction, rank
`r` adds its own summand to the partial sum of segment `r - 1 - t`, received from rank `r - 1`, and writes the sum
directly to a slot of rank `r + 1`. The first step only sends. The last step only receives, and completes this rank's
own segment:

    W=3   t=0                t=1                  t=2
    r=0   sends part of 2    adds to 1, sends     adds to 0
    r=1   sends part of 0    adds to 2, sends     adds to 1
    r=2   sends part of 1    adds to 0, sends     adds to 2

So segment `k` is added in the order `k+1, k+2, ..., k`, for any number of programs. `full` is only read, so `out` may
be this rank's segment of `full`.

Bytes per element of a segment, if an element has `g` bytes in the gradient, `w` in messages, `o` in the result and `s`
in a state: the first step moves `g + w`, each middle step `g + 2*w`, and the last step `g + w + o`, or with AdamW
`g + w + 2*s + 1/16`. In fp32 these are 8, 12 and 12, which is `12*W - 4` in total for `W` ranks. In each step except
the last, `w` bytes cross a link.

Legend: `W` ranks, `S` elements per segment, `P` programs, `D` slots per program, `G = ceil(S / 32)` groups.
"""

# ruff: noqa: N803 (compile-time constants of a kernel are written in capitals)

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from .adamw import check_step, reduce_adamw_reference, step_block
from .hop import check_divisor, hop_reference
from .launch import GROUP, block_size, check_flat, jit, launch, tl, use_triton
from .rounding import load_fp32, store_rounded
from .scalars import Table
from .signals import (
    FREED,
    LARGEST_EPOCH,
    NOTHING_ARRIVED,
    NOTHING_FREED,
    Peers,
    await_flag,
    begin_ring,
    flags_of,
    put_signal,
    report_failure,
    slots_of,
)
from .state import State

_WIRES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_AMD = torch.version.hip is not None
_UNSPECIALIZED = ("rank", "world", "epoch", "limit", "blocks")
"""Arguments for whose values Triton must not compile special versions. Otherwise a rank would recompile while its
neighbours wait."""


@jit
def wrapped(rank: tl.tensor, world: tl.tensor) -> tl.tensor:
    """Return `rank`, or `rank + world` if `rank` is negative. Triton's `%` would leave negative numbers negative."""
    return tl.where(rank < 0, rank + world, rank)


@jit
def place_of(action: tl.tensor, messages: tl.tensor, world: tl.tensor, DEPTH: tl.constexpr) -> tl.tensor:
    """Return four numbers for an action of a program: a message, a step, a sent message and a received message.

    The first number is the index of the message within the step. The numbers of the sent and the received message are
    indices within the launch. The last step sends nothing and the first step receives nothing, so these numbers are
    meaningless in these steps. Messages go through all steps in batches of `DEPTH - 1` messages, one batch after the
    other. The last batch may be smaller.
    """
    done = action // (world * (DEPTH - 1)) * (DEPTH - 1)
    batch = tl.minimum(messages - done, DEPTH - 1)
    left = action - done * world
    sent = done * (world - 1) + left
    return done + left % batch, left // batch, sent, sent - batch


class Links(NamedTuple):
    """Addresses of the memory to which ranks write for each other. All tensors are int64."""

    slot_table: Tensor
    """Addresses of each rank's slots [W]."""

    flag_table: Tensor
    """Addresses of each rank's flags [W]."""

    error: Tensor
    """The error word of this rank [1]. A program of this rank that fails writes its failure to this word."""


class Result(NamedTuple):
    """Outputs of the last step other than a state."""

    out: Tensor | None
    """Output for the mean [S]. `None`: the mean is the gradient of a step and is not written."""

    bad: Tensor | None
    """Output [], int32, which is set to 1 if the gradient of a step is not finite."""


@partial(jit, unspecialized=_UNSPECIALIZED)
def _ring_reduce_scatter_kernel(
    full_ptr: tl.tensor,
    links: Links,
    result: Result,
    state: State,
    table: Table,
    divisor: float,
    rank: tl.tensor,
    world: tl.tensor,
    epoch: tl.tensor,
    limit: tl.tensor,
    blocks: tl.tensor,
    n: tl.tensor,
    WIRE: tl.constexpr,
    DEPTH: tl.constexpr,
    AMD: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    program, programs = tl.program_id(0), tl.num_programs(0)
    after, before = wrapped(rank + 1 - world, world), wrapped(rank - 1, world)
    numel = blocks * BLOCK  # elements per message
    flags_ptr, to_before_ptr = flags_of(links.flag_table, rank), flags_of(links.flag_table, before) + FREED
    to_after_ptr = flags_of(links.flag_table, after)
    slots_ptr = slots_of(links.slot_table, rank, DEPTH * numel, WIRE)
    slots_after_ptr = slots_of(links.slot_table, after, DEPTH * numel, WIRE)
    messages = (tl.cdiv(n, numel) - program + programs - 1) // programs  # messages of this program per step
    last = world - 1

    zero = epoch.to(tl.int64) << 32  # the flag of this epoch with a count of 0
    patience = begin_ring(to_before_ptr, zero, links.error, limit)
    for action in tl.range(0, messages * world, disable_licm=True):
        message, step, sent, received = place_of(action, messages, world, DEPTH)
        segment = wrapped(rank - 1 - step, world).to(tl.int64) * n
        if step > 0:
            patience = await_flag(flags_ptr, zero + received + 1, step, NOTHING_ARRIVED, patience)
        if step < last:
            freed = zero + tl.maximum(sent - DEPTH + 1, 0)  # the flag at which message `sent` may be written
            patience = await_flag(flags_ptr + FREED, freed, step, NOTHING_FREED, patience)
        end = tl.where(patience > 0, n, 0)  # 0 after a failure, so that no memory is accessed
        start = (message * programs + program).to(tl.int64) * numel
        for block in tl.range(0, tl.cdiv(tl.minimum(n - start, numel), BLOCK), disable_licm=True):
            line = tl.arange(0, BLOCK // GROUP)[:, None]
            inside = block * BLOCK + line * GROUP + tl.arange(0, GROUP)[None, :]
            offsets = start + inside
            mask = offsets < end
            total = load_fp32(full_ptr, segment + offsets, mask)
            if step > 0:
                slot = received % DEPTH * numel
                total = load_fp32(slots_ptr, slot + inside, mask) + total
            if step < last:
                slot = sent % DEPTH * numel
                store_rounded(slots_after_ptr, slot + inside, total, mask)
            else:
                total = tl.div_rn(total, divisor)  # division by 1 is exact
                if result.out is not None:
                    store_rounded(result.out, offsets, total, mask)
                else:
                    group = start // GROUP + block * (BLOCK // GROUP) + line
                    in_group = group * GROUP < end
                    row = tl.load(table.rows + group, mask=in_group, other=0).to(tl.int64)
                    step_block(state, table, None, result.bad, total, row, group, offsets, mask, in_group, False)
        if patience > 0:
            if step < last:
                put_signal(to_after_ptr, zero + sent + 1, AMD)
            if step > 0:
                put_signal(to_before_ptr, zero + received + 1, AMD)
    report_failure(zero, links.error, patience)


def ring_reduce_scatter(
    out: Tensor, full: Tensor, peers: Peers, *, epoch: int, divisor: int = 1, wire: torch.dtype = torch.float32
) -> None:
    """Sum segment `rank` of `full` over all ranks, divide the sum by `divisor`, and write it to `out`.

    Summands are added in fp32. Partial sums are rounded to `wire`, and the quotient to the dtype of `out`. The kernel
    waits for neighbours, but not longer than a limit. After a wait beyond this limit, `ring_failure(peers.error)`
    returns a description of the failure, and `out` is undefined.

    Args:
        out: output [S], fp32, bf16 or fp16.
        full: [W*S], fp32, bf16 or fp16.
        peers: memory of all ranks.
        epoch: number of the launch, which is equal on all ranks and larger than in any earlier launch.
        divisor: from 1 to 2^24.
        wire: dtype of partial sums between ranks.

    Raises:
        ValueError: shapes, devices or dtypes do not match, a number is out of range, or tensors are on the CPU without
            Triton's interpreter.
    """
    who = "ring_reduce_scatter"
    check_flat(who, "out", out, _WIRES, numel=out.numel(), device=full.device)
    block = block_size(out, full, torch.empty(0, dtype=wire))
    _launch(who, full, peers, out.numel(), (Result(out, None), None, None), block, epoch, divisor, wire)


def ring_reduce_adamw(
    state: State,
    full: Tensor,
    table: Table,
    peers: Peers,
    *,
    epoch: int,
    divisor: int = 1,
    wire: torch.dtype = torch.float32,
    bad: Tensor | None = None,
) -> None:
    """Update `state` by AdamW with the gradient that `ring_reduce_scatter` would write in fp32.

    The gradient is never stored. Other ranks may launch `ring_reduce_scatter` with an fp32 `out` instead, because the
    messages are the same. After a failure (see `ring_reduce_scatter`), only some elements have been updated.

    Args:
        state: weights and moments [S], which are updated in place.
        full: [W*S], fp32, bf16 or fp16.
        table: scalars of the step.
        peers: memory of all ranks.
        epoch: as for `ring_reduce_scatter`.
        divisor: as for `ring_reduce_scatter`.
        wire: dtype of partial sums between ranks.
        bad: optional output [], int32, set to 1 if the gradient of a stepped element is NaN or infinite.

    Raises:
        ValueError: as for `ring_reduce_scatter` and `reduce_adamw`.
    """
    who = "ring_reduce_adamw"
    check_step(who, state, table)
    block = block_size(torch.empty(0))  # as for fp32: with more elements per thread, registers would be spilled
    _launch(who, full, peers, state.param.numel(), (Result(None, bad), state, table), block, epoch, divisor, wire)


def ring_reduce_scatter_reference(
    out: Tensor, fulls: Sequence[Tensor], rank: int, *, divisor: int = 1, wire: torch.dtype = torch.float32
) -> None:
    """Specification of `ring_reduce_scatter`, given the `full` tensors [W*S] of all ranks."""
    received, own = _before_the_last(fulls, rank, wire)
    hop_reference(out, received, own, divisor)


def ring_reduce_adamw_reference(
    state: State,
    fulls: Sequence[Tensor],
    table: Table,
    rank: int,
    *,
    divisor: int = 1,
    wire: torch.dtype = torch.float32,
    bad: Tensor | None = None,
) -> None:
    """Specification of `ring_reduce_adamw`, given the `full` tensors [W*S] of all ranks."""
    received, own = _before_the_last(fulls, rank, wire)
    reduce_adamw_reference(state, received, own, table, divisor=divisor, bad=bad)


def _before_the_last(fulls: Sequence[Tensor], rank: int, wire: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the partial sum [S] that `rank` receives in the last step, and the rank's own summand [S]."""
    segments = [full.view(len(fulls), -1)[rank] for full in fulls]
    order = [*segments[rank + 1 :], *segments[: rank + 1]]
    partial_sum = order[0].to(wire)
    for own in order[1:-1]:
        hop_reference(partial_sum, partial_sum, own)
    return partial_sum, order[-1]


def _launch(
    who: str,
    full: Tensor,
    peers: Peers,
    n: int,
    last: tuple[Result, State | None, Table | None],
    block: int,
    epoch: int,
    divisor: int,
    wire: torch.dtype,
) -> None:
    """Check the arguments and launch a reduction of segments [n]. The tuple `last` has the arguments of the last step.

    Raises:
        ValueError: shapes, devices or dtypes do not match, or a number is out of range.
    """
    if not use_triton(full):
        raise ValueError(f"{who}: full is on the CPU, where this needs Triton's interpreter (TRITON_INTERPRET=1)")
    check_flat(who, "full", full, _WIRES, numel=peers.world_size * n, device=full.device)
    peers.check(who, full.device)
    if not 1 <= epoch <= LARGEST_EPOCH:
        raise ValueError(f"{who}: epoch must be from 1 to {LARGEST_EPOCH}, got {epoch}")
    if wire not in _WIRES:
        raise ValueError(f"{who}: wire must be fp32, bf16 or fp16, got {wire}")
    check_divisor(who, divisor)
    blocks, programs = _cut(who, peers, n, block, wire.itemsize)
    launch(
        _ring_reduce_scatter_kernel,
        *(full, Links(peers.slots, peers.flags, peers.error), *last, float(divisor)),
        *(peers.rank, peers.world_size, epoch, peers.limit, blocks),
        n=n,
        block=block,
        together=programs,
        WIRE=getattr(tl, _WIRES[wire], None),
        DEPTH=peers.depth,
        AMD=_AMD,
    )


def _cut(who: str, peers: Peers, n: int, block: int, itemsize: int) -> tuple[int, int]:
    """Return the number of blocks per message and the number of programs. Both are equal on all ranks.

    A message is as large as a slot, or smaller if programs would otherwise have fewer than `D` messages each.
    """
    most = peers.slot_nbytes // (block * itemsize)
    if not most:
        raise ValueError(
            f"{who}: a slot of {peers.slot_nbytes} bytes is too small for {block} elements of {itemsize} bytes"
        )
    count = -(-n // block)
    blocks = min(most, max(1, count // (peers.programs * peers.depth)))
    return blocks, min(peers.programs, -(-count // blocks))
