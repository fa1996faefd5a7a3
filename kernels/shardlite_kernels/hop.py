"""One hop of a ring reduction: the partial sum that came in, plus this rank's own part, optionally averaged.

Bytes per element: `received` and `own` are read once, `out` is written once: 12 in fp32, 6 in bf16.
Legend: `S` elements.
"""

# ruff: noqa: N803 (compile-time constants of a kernel are written in capitals)

from __future__ import annotations

import torch
from torch import Tensor

from .launch import INTERPRET, block_size, jit, launch, tl, use_triton
from .rounding import load_fp32, store_rounded

_NARROW = (torch.float32, torch.bfloat16, torch.float16)  # added in fp32, in any mixture
_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
_NATIVE = (torch.float64, *_INTEGERS)  # added in themselves
_LARGEST_DIVISOR = 2**24  # every smaller integer is exact in fp32
_CPU_CHUNK = 1 << 16  # elements: a temporary of 256 KB stays in the cache of a core


@jit
def _hop_kernel(
    out_ptr: tl.tensor,
    received_ptr: tl.tensor,
    own_ptr: tl.tensor,
    divisor: float,
    n: int,
    NATIVE: tl.constexpr,
    DIVIDE: tl.constexpr,
    INTERPRET: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    if NATIVE:
        total = tl.load(received_ptr + offsets, mask=mask) + tl.load(own_ptr + offsets, mask=mask)
        if DIVIDE:
            total = total / divisor  # only fp64 comes here, and its division is exact to the last bit
    else:
        total = load_fp32(received_ptr, offsets, mask, INTERPRET) + load_fp32(own_ptr, offsets, mask, INTERPRET)
        if DIVIDE:
            total = tl.div_rn(total, divisor)  # a plain `/` is off by up to two units in the last place
    store_rounded(out_ptr, offsets, total, mask, INTERPRET)


def hop(out: Tensor, received: Tensor, own: Tensor, divisor: int = 1) -> None:
    """Write `(received + own) / divisor` [S] into `out` [S], which may be the memory of `received` or of `own`.

    fp32, bf16 and fp16, in any mixture, are added and divided in fp32 and rounded once to the dtype of `out`. fp64 and
    integers are added in their own dtype, which all three must share; integers wrap around.

    Raises:
        ValueError: shapes, devices or dtypes do not fit together, or `divisor` does not fit the dtype.
    """
    _check(out, received, own, divisor)
    tensors = out, received, own
    if not use_triton(out):
        _hop_cpu(*tensors, divisor)
        return
    flags = {"NATIVE": out.dtype in _NATIVE, "DIVIDE": divisor > 1, "INTERPRET": INTERPRET}
    launch(_hop_kernel, *tensors, float(divisor), n=out.numel(), block=block_size(*tensors), **flags)


def hop_reference(out: Tensor, received: Tensor, own: Tensor, divisor: int = 1) -> None:
    """The specification of `hop`."""
    _check(out, received, own, divisor)
    accumulate = out.dtype if out.dtype in _NATIVE else torch.float32
    total = received.to(accumulate) + own.to(accumulate)
    out.copy_(total / divisor if divisor > 1 else total)


def _check(out: Tensor, received: Tensor, own: Tensor, divisor: int) -> None:
    for name, tensor in (("out", out), ("received", received), ("own", own)):
        if tensor.dim() != 1 or not tensor.is_contiguous():
            raise ValueError(f"hop: {name} must be 1-D and contiguous, got {tuple(tensor.shape)}, {tensor.stride()}")
        if tensor.numel() != out.numel() or tensor.device != out.device:
            raise ValueError(
                f"hop: {name} has {tensor.numel()} elements on {tensor.device}, out has {out.numel()} on {out.device}"
            )
    dtypes = {out.dtype, received.dtype, own.dtype}
    if not (dtypes <= set(_NARROW) or (len(dtypes) == 1 and out.dtype in _NATIVE)):
        raise ValueError(
            f"hop: cannot add {received.dtype} and {own.dtype} into {out.dtype}; "
            "fp32, bf16 and fp16 may be mixed, fp64 and integers must be alone"
        )
    if divisor != 1 and out.dtype in _INTEGERS:
        raise ValueError(f"hop: {out.dtype} cannot be divided by {divisor}: integers are only summed")
    if not 1 <= divisor <= _LARGEST_DIVISOR:
        raise ValueError(f"hop: divisor must be from 1 to {_LARGEST_DIVISOR}, got {divisor}")


def _hop_cpu(out: Tensor, received: Tensor, own: Tensor, divisor: int) -> None:
    summed_in = torch.promote_types(received.dtype, own.dtype)
    wide = summed_in in (torch.float32, *_NATIVE)
    if divisor == 1 and (wide or summed_in == out.dtype):
        torch.add(received, own, out=out)  # one rounding: PyTorch adds bf16 and fp16 in fp32
    elif wide and summed_in == out.dtype:
        torch.add(received, own, out=out)
        out.div_(divisor)
    else:
        chunks = (torch.split(tensor, _CPU_CHUNK) for tensor in (out, received, own))
        for out_chunk, received_chunk, own_chunk in zip(*chunks, strict=True):
            hop_reference(out_chunk, received_chunk, own_chunk, divisor)
