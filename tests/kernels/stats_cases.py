"""What the tests of statistics share: tensors, and how far a sum may be off."""

import torch
from shardlite_kernels import new_stats, stats_block
from shardlite_kernels.stats import stats_reference
from torch import Tensor

from tests.kernels.bits import pairs

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def numels() -> list[int]:
    """Nothing, less than a row, rows exactly, and many with a rest: more than one chunk on the CPU."""
    block = stats_block(torch.empty(0))
    return [0, 1, 37, block - 1, block, 3 * block, 5 * block + 77]


def finite(numel: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)


def countable(numel: int, dtype: torch.dtype) -> Tensor:
    """Small integers whose squares, one element more or less, change every sum: all of them are exact in fp32."""
    return (torch.arange(numel) % 7 + 1).to(dtype)


def awkward(numel: int, seed: int) -> Tensor:
    """Infinities, NaN and numbers whose squares overflow, in some rows."""
    values = pairs(numel, seed)[0]
    values[numel // 3 : 2 * numel // 3] = 3e30
    return values


def expected_rows(values: Tensor) -> Tensor:
    rows = new_stats(values)
    stats_reference(values, rows)
    return rows


def assert_rows(got: Tensor, values: Tensor) -> None:
    """Flags are exact. The bound of a sum is that of `stats_reference`."""
    expected = expected_rows(values)
    assert got[:, 1].tolist() == expected[:, 1].tolist()
    block = stats_block(values)
    bits, smallest = (53, 2.0**-1074) if got.dtype == torch.float64 else (24, 2.0**-149)
    rtol = (block + 3) * 2.0**-bits / (1 - (block + 3) * 2.0**-bits)
    overflown = expected[:, 0].isfinite() & (expected[:, 0] > torch.finfo(got.dtype).max * (1 - rtol))
    assert not overflown.any(), "a sum so near to an overflow says nothing"
    torch.testing.assert_close(got[:, 0], expected[:, 0], rtol=rtol, atol=block * smallest, equal_nan=True)
