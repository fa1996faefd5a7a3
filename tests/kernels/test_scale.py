"""`scale` against its reference and PyTorch: on the CPU, and as a kernel (`test_interpreter.py`)."""

import pytest
import torch
from shardlite_kernels.scale import _table, scale, scale_all, scale_reference

from tests.kernels.bits import assert_same_bits, pairs

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
FACTORS = (0.3, 1.0, 1 - 2**-12, 0.0, 1e-30, float("nan"), float("inf"))


@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_bits_are_those_of_pytorch_and_of_the_reference(dtype, factor, wide):
    x = pairs(20_005, seed=0)[0].to(dtype)
    factor = torch.tensor(factor, dtype=wide)
    got, reference, torchs = x.clone(), x.clone(), x.clone()
    scale(got, factor)
    scale_reference(reference, factor)
    torch._foreach_mul_([torchs], factor.to(dtype))
    assert_same_bits(got, reference)
    assert_same_bits(got, torchs)


def test_a_factor_of_1_writes_nothing():
    """One that is 1 in the dtype of the tensor is 1."""
    for dtype, factor in ((torch.float32, 1.0), (torch.bfloat16, 1 - 2**-12), (torch.float16, 1 - 2**-13)):
        x = torch.ones(8, dtype=dtype)
        version = x._version
        scale(x, torch.tensor(factor))
        assert x._version == version


def test_nothing_is_written_beyond_the_end():
    buffer = torch.full((32,), 8.0)
    scale(buffer[:17], torch.tensor(0.5))
    scale(buffer[:0], torch.tensor(0.5))
    assert buffer.tolist() == [4.0] * 17 + [8.0] * 15


SIZES = {"aligned": (32, 96, 20_000, 64), "not aligned": (17, 1, 0, 40_003, 5), "one": (64,)}


@pytest.mark.parametrize("factor", [0.3, 1.0, float("nan")])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("dtypes", [*((dtype,) for dtype in FLOATS), FLOATS], ids=str)
def test_tensors_are_multiplied_as_if_one_by_one(dtypes, sizes, factor):
    """In any order of their addresses, and with bytes between them that stay as they are."""
    memory = [pairs(sum(sizes) + 3 * len(sizes), seed=0)[0].to(dtype) for dtype in dtypes]
    got, expected, factor = [each.clone() for each in memory], [each.clone() for each in memory], torch.tensor(factor)
    scale_all([part for each in got for part in cut(each, sizes)][::-1], factor)
    for part in (part for each in expected for part in cut(each, sizes)):
        scale(part, factor)
    for mine, theirs in zip(got, expected, strict=True):
        assert_same_bits(mine, theirs)


def cut(memory, sizes):
    """Return parts of memory. Those whose sizes are multiples of 32 begin at such, too."""
    gap = 0 if all(size % 32 == 0 for size in sizes) else 3
    starts = [sum(sizes[:i]) + gap * i for i in range(len(sizes))]
    return [memory[start : start + size] for start, size in zip(starts, sizes, strict=True)]


def test_a_table_of_tensors_tells_each_program_its_own_part():
    """Columns: the first block, the distance from the first tensor, the length; of no other tensor, no block."""
    table, blocks = _table(((0, 33), (64, 16), (-80, 40)), 16, torch.device("cpu"), 0)
    assert table.tolist() == [[0, 3, 4, 7], [0, 64, -80, 0], [33, 16, 40, 0]]
    assert blocks == 7


def test_nothing_to_multiply():
    scale_all([], torch.tensor(0.5))
    scale_all([torch.ones(0)], torch.tensor(0.5))


X = torch.zeros(8)


@pytest.mark.parametrize(
    ("x", "factor", "message"),
    [
        (X.view(2, 4), torch.tensor(0.5), "x must be 1-D and contiguous"),
        (torch.zeros(16)[::2], torch.tensor(0.5), "x must be 1-D and contiguous"),
        (X.int(), torch.tensor(0.5), "x must be fp32, bf16, fp16 or fp64, got torch.int32"),
        (X, torch.tensor([0.5]), r"factor must be a single fp32 or fp64 number on cpu, got shape \(1,\)"),
        (X, torch.tensor(0.5).half(), "got .*, torch.float16 on cpu"),
        (X, torch.tensor(0.5, device="meta"), "on meta"),
    ],
)
def test_errors_name_what_does_not_fit(x, factor, message):
    with pytest.raises(ValueError, match=message):
        scale(x, factor)
