"""What the tests of casts, quantization and split weights share: inputs that are hard to round."""

import torch
from shardlite_kernels.quantize import dequantize, quantize
from torch import Tensor

from tests.kernels.bits import pairs

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
NARROW = (torch.bfloat16, torch.float16)


def near_ties(dtype: torch.dtype) -> Tensor:
    """The middle of every two neighbours of bf16 or fp16, and what is just beside it, in fp64.

    Some is nearer to the next number of fp32 than to the middle.
    """
    bits = torch.arange(-(2**15), 2**15 - 1).to(torch.int16)
    lower, upper = bits.view(dtype).double(), (bits + 1).view(dtype).double()
    middle = (lower + upper) / 2
    return torch.cat([middle * (1 + beside) for beside in (0, 2**-40, -(2**-40), 0.75 * 2**-23, -0.75 * 2**-23)])


FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def inputs() -> dict[str, Tensor]:
    """fp32 numbers, [S] each: awkward ones, all magnitudes, all bit patterns, and blocks of one kind."""
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-149, 128, (3000, 1), generator=generator)
    magnitudes = torch.randn(3000, 32, generator=generator).clamp(-1.9, 1.9) * 2.0 ** exponents.double()
    bits = torch.randint(-(2**31), 2**31, (32 * 3000,), generator=generator)
    largest = torch.finfo(torch.float32).max
    return {
        "awkward": pairs(70_016, seed=0)[0],  # more than one chunk
        "magnitudes": magnitudes.float().view(-1),
        "bits": bits.to(torch.int32).view(torch.float32).clone(),
        "zeros": torch.tensor([0.0, -0.0] * 32),
        "smallest": torch.full((32,), -1e-45),
        "largest": torch.full((32,), largest).where(torch.arange(32) % 2 == 0, -largest),
        "nothing": torch.empty(0),
    }


INPUTS = list(inputs())


def written(source: Tensor, by=quantize) -> tuple[Tensor, Tensor]:
    codes = torch.empty(source.numel(), dtype=torch.int8)
    scales = torch.empty(source.numel() // 32, dtype=torch.uint8)
    by(codes, scales, source)
    return codes, scales


def read(codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32, by=dequantize) -> Tensor:
    out = torch.empty(codes.numel(), dtype=dtype)
    by(out, codes, scales)
    return out


NANS = [0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFF800001, 0x7FC00000, 0xFFC00000, 0x7FBFFFFF, 0x7FFFFF80, 0x7FFF8000]


def from_bits(bits):
    """Integers up to 2^32 as the fp32 numbers that have these bits."""
    return torch.as_tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


def bits_of(x):
    return x.view(torch.int32).long() & 0xFFFFFFFF


def every_kind():
    """Fp32 numbers of every exponent and both signs, with mantissas next to the borders of rounding; no NaN."""
    lower = [0, 1, 0x7F, 0x80, 0x81, 0xFF, 0x7F7F, 0x7F80, 0x7FFF, 0x8000, 0x807F, 0x8080, 0xFF7F, 0xFF80, 0xFFFF]
    generator = torch.Generator().manual_seed(0)
    exponents = torch.arange(255).repeat_interleave(4)
    mantissas = torch.randint(0, 128, (len(exponents),), generator=generator)
    mantissas[::4], mantissas[1::4] = 0, 127
    upper = (exponents << 7 | mantissas) << 16
    positive = (upper[:, None] + torch.tensor(lower)).flatten()
    return torch.cat([from_bits(positive), from_bits(positive + 2**31), pairs(10_000, 1)[0].nan_to_num(1.0, 2.0, -2.0)])
