"""Compute random bits from a parameter, the number of its step, and the position of an element in the parameter.

So stochastic rounding depends neither on the number of ranks nor on how memory is divided into launches. A run that
resumes from a checkpoint has the same bits as an uninterrupted run.

    bits = mix(position * GOLDEN + key)        key = mix(step, number of the parameter) - start * GOLDEN

`position` counts elements in an arena (the buffer of many parameters), and `start` is the position of the parameter's
first element. `mix` is the finalizer of MurmurHash3 (Appleby, public domain): each bit of the input changes each bit of
the output half of the time. All arithmetic is on unsigned 32-bit integers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .launch import constexpr, jit, tl

GOLDEN = 0x9E3779B1  # 2^32 divided by the golden ratio, made odd; it spreads neighbouring positions
_STEP, _NUMBER = 0x85EBCA77, 0xC2B2AE3D  # two different odd numbers
_FIRST, _SECOND = 0x85EBCA6B, 0xC2B2AE35  # the factors of MurmurHash3's finalizer
_TL_GOLDEN, _TL_FIRST, _TL_SECOND = constexpr(GOLDEN), constexpr(_FIRST), constexpr(_SECOND)


@jit
def random_bits(position: tl.tensor, key: tl.tensor) -> tl.tensor:
    """Return 32 random bits for each position, uint32, given the keys of the parameters."""
    x = position.to(tl.uint32) * _TL_GOLDEN + key.to(tl.uint32, bitcast=True)
    x = (x ^ (x >> 16)) * _TL_FIRST
    x = (x ^ (x >> 13)) * _TL_SECOND
    return x ^ (x >> 16)


def random_bits_reference(position: Tensor, key: Tensor) -> Tensor:
    """Specification of `random_bits`. Takes int64 tensors of broadcastable shapes, and returns int32."""
    return _mix((position * GOLDEN + key).to(torch.int32))


def random_bits_by_group(keys: Tensor, first: int, group: int) -> Tensor:
    """Return random bits [G * group] of positions from `first` on. Each of `keys` [G], int64, has `group` positions."""
    starts = torch.arange(first, first + len(keys) * group, group, device=keys.device)
    within = (torch.arange(group, device=keys.device) * GOLDEN).to(torch.int32)
    return _mix((starts * GOLDEN + keys).to(torch.int32).unsqueeze(1) + within).view(-1)


def keys(steps: Tensor, numbers: Tensor, starts: Tensor) -> Tensor:
    """Return one key per parameter, for one update of this parameter.

    Args:
        steps: numbers of the updates [R].
        numbers: numbers that identify the parameters [R], int64.
        starts: position of the first element of each parameter [R], int64. A position is negative if this element is on
            another rank.

    Returns:
        [R], int32, on the device of `steps`.
    """
    key = _mix((steps.to(torch.int64) * _STEP + numbers * _NUMBER).to(torch.int32))
    return (key - starts * GOLDEN).to(torch.int32)


def _mix(x: Tensor) -> Tensor:
    """Mix the bits of int32 numbers. Conversions to int32 keep the lowest 32 bits, and products wrap around."""
    x = (x ^ _shift(x, 16)) * _signed(_FIRST)
    x = (x ^ _shift(x, 13)) * _signed(_SECOND)
    return x ^ _shift(x, 16)


def _shift(x: Tensor, by: int) -> Tensor:
    """Shift right by `by` bits, without sign extension."""
    return (x >> by).bitwise_and_((1 << (32 - by)) - 1)


def _signed(bits: int) -> int:
    return bits - (1 << 32)
