"""Shared by the kernel tests: inputs that are hard to round, and bitwise equality."""

from collections.abc import Iterable

import torch
from torch import Tensor

# Zeros, infinities, NaN, subnormal numbers of fp32, bf16 and fp16, the largest ones, and ties of bf16 and fp16.
AWKWARD = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-45, -1e-39, 3e-41, 3.4e38, 6e-8, 65504.0]
AWKWARD += [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11]


def pairs(numel: int, seed: int) -> tuple[Tensor, Tensor]:
    """Two fp32 tensors [numel]: every pair of awkward numbers, then random ones of many magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    awkward = torch.tensor(AWKWARD)
    columns = awkward.repeat_interleave(len(awkward)), awkward.repeat(len(awkward))
    magnitudes = 10.0 ** torch.randint(-12, 5, (2, numel), generator=generator)
    rows = torch.randn(2, numel, generator=generator) * magnitudes
    first, second = (torch.cat([column, row])[:numel].contiguous() for column, row in zip(columns, rows, strict=True))
    return first, second


def assert_same_bits(got: Tensor, expected: Tensor) -> None:
    """Equal to the bit. NaNs are equal, whatever their bits."""
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    if not got.is_floating_point():
        assert torch.equal(got, expected)
        return
    same = ((got == expected) & (got.signbit() == expected.signbit())) | (got.isnan() & expected.isnan())
    assert same.all(), (
        f"{int((~same).sum())} of {same.numel()} differ, first {got[~same][:3]} for {expected[~same][:3]}"
    )


def assert_all_same_bits(got: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    for each, its in zip(got, expected, strict=True):
        assert_same_bits(each, its)
