"""Random bits that are a function of where an element lies in its parameter, of the parameter and of its step.

So what is rounded with them depends neither on the number of ranks nor on how memory is cut into launches, and a run
that is continued from a checkpoint goes on with the bits of one that was never stopped.

    bits = mix(position * GOLDEN + key)        key = mix(step, number of the parameter) - (start of the parameter) * GOLDEN

`position` counts elements in an arena; the key shifts it to where the element lies in its parameter. `mix` is the
finaliser of MurmurHash3 (Appleby, public domain): each bit of its input changes each bit of its output half of the
time. All arithmetic is that of unsigned 32-bit integers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .launch import jit, tl

GOLDEN = 0x9E3779B1  # 2^32 over the golden ratio, odd: neighbours are far apart
_STEP, _NUMBER = 0x85EBCA77, 0xC2B2AE3D  # odd, and unlike each other
_MASK = 0xFFFFFFFF


@jit
def random_bits(position: tl.tensor, key: tl.tensor) -> tl.tensor:
    """32 random bits for each position of parameters with these keys, uint32."""
    x = position.to(tl.uint32) * 0x9E3779B1 + key.to(tl.uint32, bitcast=True)
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


def random_bits_reference(position: Tensor, key: Tensor) -> Tensor:
    """The specification of `random_bits`, in int64; tensors of one shape, or such as broadcast."""
    return _mix((position * GOLDEN + key) & _MASK)


def keys(steps: Tensor, numbers: Tensor, starts: Tensor) -> Tensor:
    """The keys [R] of parameters in their updates `steps` [R], as int32, computed where these are.

    `numbers` [R] tell parameters apart. `starts` [R] is the position of the first element of each parameter, negative
    if that lies on another rank. All but `steps` are int64.
    """
    key = _mix((steps.to(torch.int64) * _STEP + numbers * _NUMBER) & _MASK) - starts * GOLDEN
    return key.to(torch.int32)  # wraps around


def _mix(x: Tensor) -> Tensor:
    """Mix numbers from 0 to 2^32 - 1 in int64. Products wrap modulo 2^64, which leaves their lower half right."""
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _MASK
    return x ^ (x >> 16)
