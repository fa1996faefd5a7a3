"""The kernels of split weights, run by Triton's interpreter, against their references: equal to the bit."""

import pytest
import torch
from shardlite_kernels import join, join_reference, split, split_reference

from tests.kernels.bits import AWKWARD, assert_same_bits
from tests.kernels.pack_cases import NANS, every_kind, from_bits


def sources():
    generator = torch.Generator().manual_seed(0)
    yield torch.cat([every_kind(), torch.tensor(AWKWARD), from_bits(NANS)])
    yield from_bits(torch.randint(0, 1 << 32, (20_005,), generator=generator))  # any bits, more than one program
    for numel in (0, 1, 31):
        yield torch.randn(numel, generator=generator)


@pytest.mark.parametrize("source", list(sources()), ids=len)
def test_split_and_join(source):
    mine, theirs = (
        (torch.empty_like(source, dtype=torch.bfloat16), torch.empty_like(source, dtype=torch.int8)) for _ in range(2)
    )
    given = source.clone()
    split(*mine, source)
    split_reference(*theirs, source)
    assert torch.equal(source.view(torch.int32), given.view(torch.int32))
    for got, expected in zip(mine, theirs, strict=True):
        assert_same_bits(got, expected)
    back, expected = torch.empty_like(source), torch.empty_like(source)
    join(back, *mine)
    join_reference(expected, *mine)
    assert_same_bits(back, expected)


def test_nothing_is_written_beyond_the_end():
    high, low, out = (
        torch.full((32,), 7.0, dtype=torch.bfloat16),
        torch.full((32,), 7, dtype=torch.int8),
        torch.ones(32),
    )
    split(high[:17], low[:17], torch.full((17,), 1.003))
    join(out[:17], high[:17], low[:17])
    for tensor, rest in ((high, 7), (low, 7), (out, 1)):
        assert (tensor[:17] != rest).all()
        assert (tensor[17:] == rest).all()
