"""Collectives with the parts of their records as arguments of their own, for tests with many cases."""

from collections.abc import Sequence
from typing import Any

from shardlite_kernels import stats_block
from torch import Tensor

from shardlite.comm import Operation, Transport, collectives, cut_up
from shardlite.comm.collectives import StoreMean
from shardlite.comm.operation import UNNAMED


def all_gather(
    full: Tensor,
    transport: Transport,
    *,
    cuts: Sequence[int] | None = None,
    operation: Operation = UNNAMED,
    chunk_bytes: int | None = None,
) -> None:
    """Gather as the library does."""
    cut = cut_up(full.numel(), full.dtype, transport, cuts, chunk_bytes)
    collectives.all_gather(full, transport, cut=cut, operation=operation)


def all_reduce(
    full: Tensor,
    transport: Transport,
    *,
    cuts: Sequence[int] | None = None,
    divisor: int = 1,
    operation: Operation = UNNAMED,
    chunk_bytes: int | None = None,
) -> None:
    """Sum as the library does."""
    cut = cut_up(full.numel(), full.dtype, transport, cuts, chunk_bytes)
    collectives.all_reduce(full, transport, cut=cut, divisor=divisor, operation=operation)


def reduce_scatter(
    full: Tensor,
    transport: Transport,
    *,
    cuts: Sequence[int] | None = None,
    out: Tensor | None = None,
    divisor: int = 1,
    stats: Tensor | None = None,
    last: Any = None,
    staging: Tensor | None = None,
    operation: Operation = UNNAMED,
    chunk_bytes: int | None = None,
) -> Tensor:
    """Reduce as the library does."""
    grain = 1 if stats is None and last is None else stats_block(full)
    cut = None
    if cuts is not None or chunk_bytes is not None:
        cut = cut_up(full.numel(), full.dtype, transport, cuts, chunk_bytes, grain)
    last = last or StoreMean(out, divisor, stats)
    return collectives.reduce_scatter(full, transport, cut=cut, last=last, staging=staging, operation=operation)
