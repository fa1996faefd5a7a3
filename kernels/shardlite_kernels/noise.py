"""Random bits that are a function of where an element lies in its parameter, of the parameter and of its step.

So what is rounded with them depends neither on the number of ranks nor on how memory is cut into launches, and a run
that is continued from a checkpoint goes on with the bits of one that was never stopped.

    bits = mix(position * GOLDEN + key)        key = mix(step, number of the parameter) - start * GOLDEN

`position` counts elements in an arena, `start` is that of the parameter's first one. `mix` is the
finaliser of MurmurHash3 (Appleby, public domain): each bit of its input changes each bit of its output half of the
time. All arithmetic is that of unsigned 32-bit integers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .launch import constexpr, jit, tl

GOLDEN = 0x9E3779B1  # 2^32 over the golden ratio, odd: neighbours are far apart
_STEP, _NUMBER = 0x85EBCA77, 0xC2B2AE3D  # odd, and unlike each other
_FIRST, _SECOND = 0x85EBCA6B, 0xC2B2AE35  # the factors of MurmurHash3's finaliser
_TL_GOLDEN, _TL_FIRST, _TL_SECOND = constexpr(GOLDEN), constexpr(_FIRST), constexpr(_SECOND)


@jit
def random_bits(position: tl.tensor, key: tl.tensor) -> tl.tensor:
    """32 random bits for each position of parameters with these keys, uint32."""
    x = position.to(tl.uint32) * _TL_GOLDEN + key.to(tl.uint32, bitcast=True)
    x = (x ^ (x >> 16)) * _TL_FIRST
    x = (x ^ (x >> 13)) * _TL_SECOND
    return x ^ (x >> 16)


def random_bits_reference(position: Tensor, key: Tensor) -> Tensor:
    """The specification of `random_bits`, as int32; int64 tensors of one shape, or such as broadcast."""
    return _mix((position * GOLDEN + key).to(torch.int32))


def random_bits_by_group(keys: Tensor, first: int, group: int) -> Tensor:
    """`random_bits_reference` for the `group` positions of each of `keys` [G], int64, in order from `first` on."""
    starts = torch.arange(first, first + len(keys) * group, group, device=keys.device)
    within = (torch.arange(group, device=keys.device) * GOLDEN).to(torch.int32)
    return _mix((starts * GOLDEN + keys).to(torch.int32).unsqueeze(1) + within).view(-1)


def keys(steps: Tensor, numbers: Tensor, starts: Tensor) -> Tensor:
    """The keys [R] of parameters in their updates `steps` [R], as int32, computed where these are.

    `numbers` [R] tell parameters apart. `starts` [R] is the position of the first element of each parameter, negative
    if that lies on another rank. All but `steps` are int64.
    """
    key = _mix((steps.to(torch.int64) * _STEP + numbers * _NUMBER).to(torch.int32))
    return (key - starts * GOLDEN).to(torch.int32)


def _mix(x: Tensor) -> Tensor:
    """Mix int32 numbers in their bits; conversions to int32 keep the lowest bits, and products wrap around."""
    x = (x ^ _shift(x, 16)) * _signed(_FIRST)
    x = (x ^ _shift(x, 13)) * _signed(_SECOND)
    return x ^ _shift(x, 16)


def _shift(x: Tensor, by: int) -> Tensor:
    """Shift right as if there were no sign."""
    return (x >> by).bitwise_and_((1 << (32 - by)) - 1)


def _signed(bits: int) -> int:
    return bits - (1 << 32)
