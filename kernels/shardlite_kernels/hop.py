"""Run one hop of a ring reduction: add this rank's own summand to the received partial sum, and optionally divide.

Bytes per element: `received` and `own` are read once and `out` is written once, which is 12 in fp32 and 6 in bf16.
Statistics of `out` add only 8 bytes per block, because the elements of `out` are still in registers, or on the CPU in
the cache.
Legend: `S` elements, `P` rows of statistics (`stats.py`).
"""

# ruff: noqa: N803 (compile-time constants of a kernel are written in capitals)

from __future__ import annotations

import torch
from torch import Tensor

from .launch import block_size, check_flat, chunks, jit, launch, tl, use_triton
from .rounding import as_stored, load_wide, store_rounded
from .stats import check_stats, stats_block, stats_cpu, stats_reference, store_row

_NARROW = (torch.float32, torch.bfloat16, torch.float16)  # these dtypes may be mixed, and are added in fp32
_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
NATIVE_DTYPES = (torch.float64, *_INTEGERS)
"""Dtypes whose sums are computed in the dtype itself, instead of in fp32."""

LARGEST_DIVISOR = 2**24  # every integer up to this one is exact in fp32


@jit
def write_mean(
    out_ptr: tl.tensor,
    stats_ptr: tl.tensor,
    total: tl.tensor,
    divisor: float,
    offsets: tl.tensor,
    mask: tl.tensor,
    NATIVE: tl.constexpr,
    DIVIDE: tl.constexpr,
    STATS: tl.constexpr,
) -> None:
    """Divide a sum, store it in the dtype of `out_ptr`, and store the statistics of the stored numbers.

    With `NATIVE` the sum already has the dtype of `out_ptr`, otherwise it is fp32.
    """
    if DIVIDE and NATIVE:
        total = total / divisor  # only for fp64, whose division is correctly rounded
    elif DIVIDE:
        total = tl.div_rn(total, divisor)  # a plain `/` is off by up to two units in the last place
    store_rounded(out_ptr, offsets, total, mask)
    if STATS:
        store_row(stats_ptr, as_stored(out_ptr, total, NATIVE), mask)


@jit
def _hop_kernel(
    out_ptr: tl.tensor,
    received_ptr: tl.tensor,
    own_ptr: tl.tensor,
    stats_ptr: tl.tensor,
    divisor: float,
    n: tl.tensor,
    NATIVE: tl.constexpr,
    DIVIDE: tl.constexpr,
    STATS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    total = load_wide(received_ptr, offsets, mask, NATIVE) + load_wide(own_ptr, offsets, mask, NATIVE)
    write_mean(out_ptr, stats_ptr, total, divisor, offsets, mask, NATIVE, DIVIDE, STATS)


def hop(out: Tensor, received: Tensor, own: Tensor, divisor: int = 1, stats: Tensor | None = None) -> None:
    """Write `(received + own) / divisor` into `out`, which may share memory with `received` or `own`.

    Tensors in fp32, bf16 and fp16, in any mixture, are added and divided in fp32. The quotient is rounded once to the
    dtype of `out`. Tensors in fp64 or an integer dtype are added in this dtype, which all three tensors must have.
    Integers wrap around.

    Args:
        out: output [S].
        received: partial sum of other ranks [S].
        own: summand of this rank [S].
        divisor: from 1 to 2^24. Integers cannot be divided.
        stats: optional output [P, 2]: statistics of the stored `out`, which must be floating-point.

    Raises:
        ValueError: shapes, devices or dtypes do not match, or `divisor` is not allowed for the dtype.
    """
    check_hop("hop", out, received, own, divisor, stats)
    tensors = out, received, own
    if not use_triton(out):
        hop_cpu(*tensors, divisor)
        if stats is not None:
            stats_cpu(out, stats)  # a separate pass takes less time than several calls per chunk
        return
    block = block_size(*tensors) if stats is None else stats_block(out)
    flags = {"NATIVE": out.dtype in NATIVE_DTYPES, "DIVIDE": divisor > 1, "STATS": stats is not None}
    launch(_hop_kernel, *tensors, stats, float(divisor), n=out.numel(), block=block, **flags)


def hop_reference(out: Tensor, received: Tensor, own: Tensor, divisor: int = 1, stats: Tensor | None = None) -> None:
    """Specification of `hop`. `stats_reference` gives the tolerance of the sums in `stats`."""
    check_hop("hop", out, received, own, divisor, stats)
    accumulate = dtype_of_sums(out)
    total = received.to(accumulate) + own.to(accumulate)
    out.copy_(divided_reference(total, divisor))
    if stats is not None:
        stats_reference(out, stats)


def divided_reference(total: Tensor, divisor: int) -> Tensor:
    """Return `total / divisor` [S], correctly rounded on every device.

    If the divisor is a Python number, CUDA multiplies by its rounded reciprocal, which changes a third of all fp32
    means over 3 ranks (aten/src/ATen/native/cuda/BinaryDivTrueKernel.cu). So the divisor is a tensor here.
    """
    return total if divisor == 1 else total / total.new_tensor(float(divisor))


def dtype_of_sums(out: Tensor) -> torch.dtype:
    """Return the dtype in which a sum is computed, before the sum is rounded to the dtype of `out`."""
    return out.dtype if out.dtype in NATIVE_DTYPES else torch.float32


def check_hop(who: str, out: Tensor, received: Tensor, own: Tensor, divisor: int, stats: Tensor | None) -> None:
    """Check the arguments of a hop.

    Raises:
        ValueError: shapes, devices or dtypes do not match, or `divisor` is not allowed for the dtype.
    """
    for name, tensor in (("out", out), ("received", received), ("own", own)):
        check_flat(who, name, tensor, numel=out.numel(), device=out.device)
    dtypes = {out.dtype, received.dtype, own.dtype}
    if not (dtypes <= set(_NARROW) or (len(dtypes) == 1 and out.dtype in NATIVE_DTYPES)):
        raise ValueError(
            f"{who}: cannot add {received.dtype} and {own.dtype} into {out.dtype}; "
            "fp32, bf16 and fp16 may be mixed, fp64 and integers may not"
        )
    if divisor != 1 and out.dtype in _INTEGERS:
        raise ValueError(f"{who}: {out.dtype} cannot be divided by {divisor}: integers can only be summed")
    check_divisor(who, divisor)
    if stats is not None:
        check_stats(who, out, stats)


def check_divisor(who: str, divisor: int) -> None:
    """Check that a divisor is positive and exact in fp32.

    Raises:
        ValueError: `divisor` is not from 1 to 2^24.
    """
    if not 1 <= divisor <= LARGEST_DIVISOR:
        raise ValueError(f"{who}: divisor must be from 1 to {LARGEST_DIVISOR}, got {divisor}")


def hop_cpu(out: Tensor, received: Tensor, own: Tensor, divisor: int = 1) -> None:
    """Compute `hop` on the CPU, without checks."""
    summed_in = torch.promote_types(received.dtype, own.dtype)
    wide = summed_in in (torch.float32, *NATIVE_DTYPES)
    if divisor == 1 and (wide or summed_in == out.dtype):
        torch.add(received, own, out=out)  # rounds once, because PyTorch adds bf16 and fp16 in fp32
    elif wide and summed_in == out.dtype:
        torch.add(received, own, out=out)
        out.div_(divisor)
    else:
        for out_chunk, received_chunk, own_chunk in chunks(out, received, own):
            hop_reference(out_chunk, received_chunk, own_chunk, divisor)
