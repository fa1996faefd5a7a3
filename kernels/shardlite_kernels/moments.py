"""Store Adam's moments in one of three formats: fp32, bf16, or 8-bit codes with one exponent per 32 elements.

| format | first moment | second moment | bytes for both |
|---|---|---|---|
| `"fp32"` | exact | exact | 8 |
| `"bf16"` | rounded to nearest even | rounded stochastically | 4 |
| `"int8"` | `sign * (q / 127)^2 * 2^k`, to nearest | `((q / 255) * 2^k)^2`, stochastically | 2.0625 |

With `beta2 = 0.999` the second moment decays by a thousandth per step. This is less than half a unit of both narrow
formats, so with rounding to nearest it would never decrease when gradients become smaller. With stochastic rounding it
decreases, because the mean of the rounded numbers is the exact number. Codes are proportional to square roots, so the
steps between the codes of small numbers are small. Zero is not a code of the second moment, because updates are divided
by the root of the second moment. Codes of the first moment are at most 127 in magnitude. Codes of the second moment are
from 1 to 255.

For the first moment, `2^k` is the smallest power of two that is not below any magnitude in the group of 32 elements.
For the second moment, it is the smallest power of two that is not below any square root in the group. `k` is stored as
the exponent of an fp32 number, in one byte. So every value of the format is exact in fp32, and encoding this fp32
number again, rounded to nearest, gives the same code. A checkpoint in fp32 is therefore lossless. A NaN, an infinity or
a magnitude above 2^126 turns the whole group into NaN. In the second moment, a root above about 2^64 does the same,
because its square exceeds the largest fp32 number.

Legend: `S` elements, `G = ceil(S / 32)` groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .launch import SCALE_BLOCK, jit, tl
from .rounding import load_fp32, store_rounded

FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}
"""Dtype of the first moment in each format."""

_NAN = 255  # the exponent of a group whose values are all NaN


# ---- on the device ------------------------------------------------------------------------------------------------


@jit
def power_of_two(exponent: tl.tensor) -> tl.tensor:
    """Return `2^k`, given a biased exponent. The result is 0 for the exponent 0, and NaN for the exponent 255."""
    bits = tl.where(exponent == 255, 0x7FC00000, exponent.to(tl.int32) << 23)
    return bits.to(tl.float32, bitcast=True)


@jit
def inverse_of(exponent: tl.tensor) -> tl.tensor:
    """Return `2^-k`, given a biased exponent. The result is 0 for the exponent 255."""
    return tl.where(exponent == 255, 0, (254 - exponent) << 23).to(tl.float32, bitcast=True)


@jit
def exponent_of(x: tl.tensor) -> tl.tensor:
    """Return the biased exponents [G, 1] of the groups in `x` [G, 32]."""
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    exponent = (tl.max(bits, axis=1, keep_dims=True).to(tl.uint32) + 0x7FFFFF) >> 23
    return tl.where(exponent > 253, 255, exponent).to(tl.int32)


@jit
def decode_avg(code: tl.tensor, exponent: tl.tensor) -> tl.tensor:
    """Return the first moment in fp32."""
    root = code.to(tl.float32) * (1 / 127)
    return root * tl.abs(root) * power_of_two(exponent)


@jit
def encode_avg(m: tl.tensor, exponent: tl.tensor) -> tl.tensor:
    """Return the codes of a first moment, int8."""
    q = tl.sqrt(tl.abs(m) * inverse_of(exponent)) * 127 + 0.5
    q = tl.where(exponent == 255, 0.0, q)
    sign = m.to(tl.int32, bitcast=True) & -0x80000000
    # The conversion to int8 rounds towards zero.
    return (q.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True).to(tl.int8)


@jit
def decode_sq(code: tl.tensor, exponent: tl.tensor) -> tl.tensor:
    """Return the second moment in fp32."""
    unit = power_of_two(exponent) * (1 / 255)  # a subnormal unit is rounded, but the squares of its multiples are zero
    root = code.to(tl.float32) * unit
    return root * root


@jit
def encode_sq(root: tl.tensor, exponent: tl.tensor, random: tl.tensor) -> tl.tensor:
    """Return the codes of second moments, uint8, given their square roots. The codes are rounded stochastically."""
    y = root * inverse_of(exponent) * 255
    q = tl.floor(y)
    uniform = (random >> 8).to(tl.int32).to(tl.float32)  # 2^24 times a uniform number
    q += tl.where(y * y - q * q > uniform * tl.fma(q, 2**-23, 2**-24), 1.0, 0.0)
    return tl.maximum(q, 1.0).to(tl.uint8)  # 1 if `q` is NaN; `q` is at most 255


@jit
def round_to_bf16(x: tl.tensor, random: tl.tensor) -> tl.tensor:
    """Return `x` rounded stochastically to bf16."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + (random & 0xFFFF)) >> 16
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return tl.where(is_nan, (bits >> 16) | 0x40, rounded).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@jit
def load_moments(
    state: tl.tuple, offsets: tl.tensor, group: tl.tensor, mask: tl.tensor, in_group: tl.tensor
) -> tl.tuple:
    """Load both moments from any format, and return them in fp32, [G, 32]."""
    if state.avg_exponent is None:
        return load_fp32(state.exp_avg, offsets, mask), load_fp32(state.exp_avg_sq, offsets, mask)
    else:
        exponent = tl.load(state.avg_exponent + group, mask=in_group, other=0)
        m = decode_avg(tl.load(state.exp_avg + offsets, mask=mask, other=0), exponent)
        exponent = tl.load(state.sq_exponent + group, mask=in_group, other=0)
        return m, decode_sq(tl.load(state.exp_avg_sq + offsets, mask=mask, other=0), exponent)


@jit
def store_avg(
    state: tl.tuple, offsets: tl.tensor, group: tl.tensor, m: tl.tensor, mask: tl.tensor, in_group: tl.tensor
) -> None:
    """Store first moments in their format."""
    if state.avg_exponent is None:
        store_rounded(state.exp_avg, offsets, m, mask)
    else:
        exponent = exponent_of(m)
        tl.store(state.exp_avg + offsets, encode_avg(m, exponent), mask=mask)
        tl.store(state.avg_exponent + group, exponent.to(tl.uint8), mask=in_group)


@jit
def store_sq(
    state: tl.tuple,
    offsets: tl.tensor,
    group: tl.tensor,
    v: tl.tensor,
    root: tl.tensor,
    random: tl.tensor,
    mask: tl.tensor,
    in_group: tl.tensor,
) -> None:
    """Store second moments `v`, whose square roots are `root`, in their format. Narrow formats need random bits."""
    if state.sq_exponent is not None:
        exponent = exponent_of(root)
        tl.store(state.exp_avg_sq + offsets, encode_sq(root, exponent, random), mask=mask)
        tl.store(state.sq_exponent + group, exponent.to(tl.uint8), mask=in_group)
    elif state.exp_avg_sq.dtype.element_ty == tl.bfloat16:
        tl.store(state.exp_avg_sq + offsets, round_to_bf16(v, random), mask=mask)
    else:
        tl.store(state.exp_avg_sq + offsets, v, mask=mask)


# ---- the specification, in PyTorch --------------------------------------------------------------------------------


def decode(avg: Tensor, sq: Tensor, avg_exponent: Tensor | None, sq_exponent: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return both moments in fp32.

    Args:
        avg: stored first moment [S].
        sq: stored second moment [S].
        avg_exponent: exponents of the codes in `avg` [G]. `None` if `avg` has no codes.
        sq_exponent: exponents of the codes in `sq` [G]. `None` if `sq` has no codes.

    Returns:
        First and second moment [S]. If the stored moments are exact, these are `avg` and `sq` themselves.
    """
    if avg_exponent is None or sq_exponent is None:
        narrow = avg.dtype == torch.bfloat16
        return (avg.float(), sq.float()) if narrow else (avg, sq)
    root = avg.float() * (1 / 127)
    sq_root = sq.float() * (1 / 255) * _each(_powers(sq_exponent), sq.numel())
    return root * root.abs() * _each(_powers(avg_exponent), avg.numel()), sq_root * sq_root


def encode(
    m: Tensor,
    v: Tensor,
    avg: Tensor,
    sq: Tensor,
    avg_exponent: Tensor | None,
    sq_exponent: Tensor | None,
    random: Tensor | None,
) -> None:
    """Write moments to `avg` and `sq` in their format.

    Args:
        m: first moment [S], fp32.
        v: second moment [S], fp32.
        avg: output [S]: stored first moment.
        sq: output [S]: stored second moment.
        avg_exponent: output [G]: exponents of the codes in `avg`. `None` if the format has no codes.
        sq_exponent: output [G]: exponents of the codes in `sq`. `None` if the format has no codes.
        random: random bits [S], int32, with which the second moment is rounded stochastically. `None`: the second
            moment is rounded to nearest.
    """
    if avg_exponent is not None and sq_exponent is not None:
        _encode_avg(m, avg, avg_exponent)
        _encode_sq(v, sq, sq_exponent, random)
    else:
        narrow = avg.dtype == torch.bfloat16
        avg.copy_(m)
        sq.copy_(_round_to_bf16(v, random) if narrow and random is not None else v)


def _encode_avg(m: Tensor, avg: Tensor, exponents: Tensor) -> None:
    exponent = _exponents_of(m)
    magnitude = _root(m.abs() * _each(_inverses(exponent), m.numel()))
    q = magnitude.mul_(127).add_(0.5).floor_().copysign_(m)
    if (exponent == _NAN).any():
        q = torch.where(_each(exponent, m.numel()) == _NAN, 0.0, q)
    avg.copy_(q)
    exponents.copy_(exponent)


def _encode_sq(v: Tensor, sq: Tensor, exponents: Tensor, random: Tensor | None) -> None:
    root = _root(v)
    exponent = _exponents_of(root)
    y = root * _each(_inverses(exponent), v.numel()) * 255
    if random is None:
        q = y.add_(0.5).floor_()
    else:
        q = y.floor()
        uniform = (random >> 8).bitwise_and_(0xFFFFFF).float().mul_(2**-24)
        q += y * y - q * q > uniform * (2 * q + 1)
    if (exponent == _NAN).any():
        q = torch.where(_each(exponent, v.numel()) == _NAN, 1.0, q)
    sq.copy_(q.clamp_(1, 255))
    exponents.copy_(exponent)


def _round_to_bf16(x: Tensor, random: Tensor) -> Tensor:
    bits = x.view(torch.int32)
    rounded = (bits + (random & 0xFFFF)) >> 16  # only the addition to some NaNs overflows
    return torch.where(x.isnan(), (bits >> 16) | 0x40, rounded).to(torch.int16).view(torch.bfloat16)


def _root(x: Tensor) -> Tensor:
    """Return the square root. PyTorch's fp32 square root on the CPU is sometimes off by one unit."""
    return x.double().sqrt_().float()


def _exponents_of(x: Tensor) -> Tensor:
    """Return the biased exponents of the groups in `x` [S], [G], int64."""
    bits = torch.nn.functional.pad(x, (0, -x.numel() % SCALE_BLOCK)).view(torch.int32) & 0x7FFFFFFF
    exponent = (bits.view(-1, SCALE_BLOCK).amax(1).to(torch.int64) + 0x7FFFFF) >> 23
    return torch.where(exponent > 253, _NAN, exponent)


def _powers(exponents: Tensor) -> Tensor:
    """Return the powers of two [G] for biased exponents [G]."""
    exponent = exponents.to(torch.int32)
    return torch.where(exponent == _NAN, 0x7FC00000, exponent << 23).view(torch.float32)


def _inverses(exponent: Tensor) -> Tensor:
    """Return the inverses of the powers of two [G] for biased exponents [G]. The inverse for NaN groups is 0."""
    return ((254 - exponent).clamp(min=0) << 23).to(torch.int32).view(torch.float32)


def _each(groups: Tensor, numel: int) -> Tensor:
    """Return the value of each element's group, [S], given one value per group [G]."""
    return groups.repeat_interleave(SCALE_BLOCK)[:numel]
