"""Random bits as a function of an element's position in its parameter, of the parameter and of its step.

So stochastic rounding depends neither on the number of ranks nor on how memory is divided into launches, and a run
continued from a checkpoint has the bits of an uninterrupted one.

    bits = mix(position * GOLDEN + key)        key = mix(step, number of the parameter) - start * GOLDEN

`position` counts elements in an arena, `start` is the position of the parameter's first element. `mix` is the finalizer
of MurmurHash3 (Appleby, public domain): each bit of its input changes each bit of its output half of the time. All
arithmetic is on unsigned 32-bit integers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .launch import constexpr, jit, tl

GOLDEN = 0x9E3779B1  # 2^32 over the golden ratio, odd: spreads neighbouring positions
_STEP, _NUMBER = 0x85EBCA77, 0xC2B2AE3D  # odd, and different
_FIRST, _SECOND = 0x85EBCA6B, 0xC2B2AE35  # the factors of MurmurHash3's finaliser
_TL_GOLDEN, _TL_FIRST, _TL_SECOND = constexpr(GOLDEN), constexpr(_FIRST), constexpr(_SECOND)


@jit
def random_bits(position: tl.tensor, key: tl.tensor) -> tl.tensor:
    """Return 32 random bits for each position of parameters with these keys, uint32."""
    x = position.to(tl.uint32) * _TL_GOLDEN + key.to(tl.uint32, bitcast=True)
    x = (x ^ (x >> 16)) * _TL_FIRST
    x = (x ^ (x >> 13)) * _TL_SECOND
    return x ^ (x >> 16)


def random_bits_reference(position: Tensor, key: Tensor) -> Tensor:
    """Specification of `random_bits`, as int32. Takes int64 tensors of broadcastable shapes."""
    return _mix((position * GOLDEN + key).to(torch.int32))


def random_bits_by_group(keys: Tensor, first: int, group: int) -> Tensor:
    """Return `random_bits_reference` for `group` positions per key of `keys` [G], int64, in order from `first`."""
    starts = torch.arange(first, first + len(keys) * group, group, device=keys.device)
    within = (torch.arange(group, device=keys.device) * GOLDEN).to(torch.int32)
    return _mix((starts * GOLDEN + keys).to(torch.int32).unsqueeze(1) + within).view(-1)


def keys(steps: Tensor, numbers: Tensor, starts: Tensor) -> Tensor:
    """Return the keys [R] of parameters at their updates `steps` [R], as int32, on the device of `steps`.

    `numbers` [R] identify parameters. `starts` [R] is the position of the first element of each parameter, negative if
    that is on another rank. All but `steps` are int64.
    """
    key = _mix((steps.to(torch.int64) * _STEP + numbers * _NUMBER).to(torch.int32))
    return (key - starts * GOLDEN).to(torch.int32)


def _mix(x: Tensor) -> Tensor:
    """Mix the bits of int32 numbers. Conversions to int32 keep the lowest bits, and products wrap around."""
    x = (x ^ _shift(x, 16)) * _signed(_FIRST)
    x = (x ^ _shift(x, 13)) * _signed(_SECOND)
    return x ^ _shift(x, 16)


def _shift(x: Tensor, by: int) -> Tensor:
    """Shift right without sign extension."""
    return (x >> by).bitwise_and_((1 << (32 - by)) - 1)


def _signed(bits: int) -> int:
    return bits - (1 << 32)
