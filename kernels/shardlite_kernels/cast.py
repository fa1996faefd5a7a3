"""Cast a whole flat tensor with one rounding, for example from master weights to the compute dtype.

Bytes per element: `source` is read once and `out` is written once, which is 6 from fp32 to bf16.
Legend: `S` elements.
"""

# ruff: noqa: N803 (compile-time constants of a kernel are written in capitals)

from __future__ import annotations

import torch
from torch import Tensor

from .launch import block_size, check_flat, chunks, jit, launch, tl, use_triton
from .rounding import fp32_by_odd, fp32_by_odd_reference, load_fp32, store_rounded

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_NARROW = (torch.bfloat16, torch.float16)


@jit
def _cast_kernel(
    out_ptr: tl.tensor,
    source_ptr: tl.tensor,
    n: tl.tensor,
    WIDE: tl.constexpr,
    TWICE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    if WIDE:
        value = tl.load(source_ptr + offsets, mask=mask, eviction_policy="evict_first")
        if TWICE:
            value = fp32_by_odd(value)
    else:
        value = load_fp32(source_ptr, offsets, mask)
    store_rounded(out_ptr, offsets, value, mask)


def cast(out: Tensor, source: Tensor) -> None:
    """Write `source` into `out`, rounded once to nearest even.

    PyTorch rounds fp64 to bf16 or fp16 twice: first to fp32. If this first rounding gives a tie, the result may be off
    by one unit in the last place. This function rounds fp64 to fp32 by rounding to odd instead, which never gives a
    tie.

    Args:
        out: output [S], fp32, bf16, fp16 or fp64.
        source: [S], fp32, bf16, fp16 or fp64.

    Raises:
        ValueError: shapes or devices do not match, or a dtype is not supported.
    """
    _check(out, source)
    twice = _takes_two(out, source)
    if use_triton(out):
        flags = {"WIDE": source.dtype == torch.float64, "TWICE": twice}
        launch(_cast_kernel, out, source, n=out.numel(), block=block_size(out, source), **flags)
    elif not twice:
        out.copy_(source)
    else:
        for out_chunk, x in chunks(out, source):
            out_chunk.copy_(fp32_by_odd_reference(x))


def cast_reference(out: Tensor, source: Tensor) -> None:
    """Specification of `cast`: PyTorch's cast, with fp64 first rounded to units in the last place of `out`."""
    _check(out, source)
    if _takes_two(out, source):
        digits, smallest = (8, -133) if out.dtype == torch.bfloat16 else (11, -24)
        last_place = (torch.frexp(source).exponent - digits).clamp(min=smallest).double()
        source = (source * 2.0**-last_place).round() * 2.0**last_place  # both products are exact
    out.copy_(source)


def _check(out: Tensor, source: Tensor) -> None:
    for name, tensor in (("out", out), ("source", source)):
        check_flat("cast", name, tensor, _DTYPES, numel=out.numel(), device=out.device)


def _takes_two(out: Tensor, source: Tensor) -> bool:
    """Return whether the cast needs an intermediate rounding to fp32."""
    return source.dtype == torch.float64 and out.dtype in _NARROW
