"""Split weights: the rounding of `split`, and the exactness of `join`.

They run on the CPU, and as kernels (`test_interpreter.py`).
"""

import pytest
import torch
from shardlite_kernels import split
from shardlite_kernels.split import join, join_on_cpu, join_reference, split_on_cpu, split_reference

from tests.kernels.bits import AWKWARD, assert_all_same_bits, assert_same_bits
from tests.kernels.pack_cases import NANS, bits_of, every_kind, from_bits

LARGEST = torch.finfo(torch.float32).max


def split_in_cache(high, low, source):
    split_on_cpu(high, low, source)


def parts_of(x, by=split):
    high, low = torch.empty_like(x, dtype=torch.bfloat16), torch.empty_like(x, dtype=torch.int8)
    by(high, low, x.clone())
    return high, low


def joined(high, low):
    out = torch.empty_like(high, dtype=torch.float32)
    join(out, high, low)
    return out


def test_the_error_is_at_most_half_a_unit_of_24_bits():
    x = every_kind()
    back = joined(*parts_of(x))
    largest = LARGEST * (1 - 2.0**-17)
    fits = x.abs() < largest
    assert back[fits].isfinite().all()
    # Bits of a magnitude are an integer that grows with it; a unit of 24 bits is 256 of the last one of 32.
    assert (bits_of(back[fits].abs()) - bits_of(x[fits].abs())).abs().max() == 128
    assert torch.equal(back[fits].signbit(), x[fits].signbit())
    normal = fits & (x.abs() >= torch.finfo(torch.float32).tiny)
    relative = (back.double() - x.double()).abs()[normal] / x.double().abs()[normal]
    assert relative.max() <= 2.0**-16
    assert relative.max() > 2.0**-16 * 0.9


@pytest.mark.parametrize(("update", "steps"), [(1e-5, 0), (1.6e-5, 100), (-1e-5, -100), (-7e-6, 0)])
def test_an_update_below_half_a_unit_is_lost(update, steps):
    """In units of 2^-15 above 1 and 2^-16 below."""
    weight = torch.ones(1)
    for _ in range(100):
        weight = joined(*parts_of(weight + update))
    assert weight.item() == 1 + steps * (2.0**-15 if update > 0 else 2.0**-16)


def test_a_tie_is_rounded_away_from_zero():
    for bits in (0x3F800080, 0x3F800180, 0x3F80FF80, 0x3FFFFF80, 0xBF800080, 0xBF80FF80, 0x00000080, 0x80000080):
        x = from_bits([bits])
        assert bits_of(joined(*parts_of(x))).item() == bits + 0x80


def test_the_upper_part_is_the_nearest_bf16():
    """To what the parts stand for; the larger magnitude if two are as near. So to the number itself, unless it lies
    within half a unit of 24 bits of the middle between two bf16 numbers."""
    x = every_kind()
    high, low = parts_of(x)
    back = joined(high, low)
    fits = back.isfinite() & (x.abs() < LARGEST * (1 - 2.0**-8))
    tie = bits_of(back) & 0xFFFF == 0x8000
    clear = fits & ~tie
    assert_same_bits(high[clear], back[clear].bfloat16())
    assert_same_bits(high[clear], x[clear].bfloat16())
    assert tie.any()
    assert (high[tie & fits].float().abs() > back[tie & fits].abs()).all()
    assert (low[tie] == -128).all()
    assert (low[~tie] != -128).all()


def test_what_was_joined_splits_into_the_same_parts():
    high, low = parts_of(torch.cat([every_kind(), torch.tensor(AWKWARD), from_bits(NANS)]))
    again = parts_of(joined(high, low))
    assert torch.equal(again[0].view(torch.int16), high.view(torch.int16))
    assert torch.equal(again[1], low)


def test_nothing_is_cut_off_a_number_of_24_bits():
    x = from_bits(bits_of(every_kind()) & 0xFFFFFF00)
    back = joined(*parts_of(x))
    assert torch.equal(bits_of(back), bits_of(x))


@pytest.mark.parametrize("by", [split, split_reference, split_in_cache])
def test_a_nan_stays_a_nan(by):
    """Whatever its payload. Rounded like a number it could become -0, whose bits come after those of all NaNs."""
    generator = torch.Generator().manual_seed(0)
    payloads = torch.randint(1, 1 << 23, (2, 4096), generator=generator) + torch.tensor([[0x7F800000], [0xFF800000]])
    for bits in (torch.tensor(NANS), payloads.flatten(), payloads[:, :1].flatten()):
        high, low = parts_of(from_bits(bits), by)
        assert high.isnan().all()
        assert joined(high, low).isnan().all()
        assert (low == 0).all()


@pytest.mark.parametrize("by", [split, split_reference, split_in_cache])
def test_infinities_and_zeros_stay_what_they_are(by):
    x = torch.tensor([float("inf"), float("-inf"), 0.0, -0.0])
    for numbers in (x, x[:1], x[1:2], x[2:]):
        assert_same_bits(joined(*parts_of(numbers, by)), numbers)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("by", [split, split_reference, split_in_cache])
def test_the_largest_numbers(by, sign):
    """Those within 2^-17 of the largest one become infinite; of those within 2^-9 only the upper part is."""
    edge = from_bits([0x7F7FFF7F, 0x7F7FFF80, 0x7F7FFFFF, 0x7F7F7F7F, 0x7F7F7F80]) * sign
    high, low = parts_of(edge, by)
    infinity = float("inf") * sign
    assert high.tolist() == [infinity, infinity, infinity, torch.finfo(torch.bfloat16).max * sign, infinity]
    rounded = from_bits([0x7F7FFF00, 0x7F800000, 0x7F800000, 0x7F7F7F00, 0x7F7F8000]) * sign
    assert_same_bits(joined(high, low), rounded)


def test_subnormal_numbers_are_rounded_like_others():
    x = from_bits([1, 0x7F, 0x80, 0x100, 0x7F80, 0x8000, 0x7FFFFF, 0x80000080])
    assert bits_of(joined(*parts_of(x))).tolist() == [0, 0, 0x100, 0x100, 0x8000, 0x8000, 0x800000, 0x80000100]


@pytest.mark.parametrize("any_bits", [False, True])
def test_the_bits_are_those_of_the_references(any_bits):
    source = torch.cat([every_kind(), torch.tensor(AWKWARD), from_bits(NANS)])
    if any_bits:
        source = from_bits(torch.randint(0, 1 << 32, (20_005,), generator=torch.Generator().manual_seed(0)))
    mine, theirs = parts_of(source), parts_of(source, split_reference)
    assert_all_same_bits(mine, theirs)
    back = torch.empty_like(source)
    join_reference(back, *theirs)
    assert_same_bits(joined(*mine), back)


def test_nothing_is_written_beyond_the_end():
    high, low, out = torch.full((32,), 7.0).bfloat16(), torch.full((32,), 7, dtype=torch.int8), torch.ones(32)
    split(high[:17], low[:17], torch.full((17,), 1.003))
    join(out[:17], high[:17], low[:17])
    for tensor, rest in ((high, 7), (low, 7), (out, 1)):
        assert (tensor[:17] != rest).all()
        assert (tensor[17:] == rest).all()


# As the CPU splits what is in its cache


@pytest.mark.parametrize("numel", [0, 1, 7, 8, 16, 31, 1000, 70_001])
def test_on_the_cpu_the_bits_are_the_same(numel):
    generator = torch.Generator().manual_seed(numel)
    for source in (
        torch.randn(numel, generator=generator),
        from_bits(torch.randint(0, 0x7E000000, (numel,), generator=generator)) * torch.randn(numel).sign(),
        from_bits(torch.randint(0, 1 << 23, (numel,), generator=generator)),  # subnormal
    ):
        assert_all_same_bits(parts_of(source, split_in_cache), parts_of(source, split_reference))


def test_on_the_cpu_all_kinds_of_numbers_have_the_same_bits():
    """In pieces, most of which are far from the largest number, and so take the fast way."""
    for piece in every_kind().split(61):
        assert_all_same_bits(parts_of(piece, split_in_cache), parts_of(piece, split_reference))


@pytest.mark.parametrize("worst", [float("inf"), float("-inf"), float("nan"), LARGEST, -LARGEST])
@pytest.mark.parametrize("place", [0, 500, 999])
def test_on_the_cpu_one_bad_number_spoils_no_other(place, worst):
    source = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    source[place] = worst
    assert_all_same_bits(parts_of(source, split_in_cache), parts_of(source, split_reference))


def test_on_the_cpu_huge_numbers_that_cancel_are_right():
    """Their plain sum would not show them."""
    huge = from_bits(torch.randint(0x7E800000, 0x7F800000, (4096,), generator=torch.Generator().manual_seed(0)))
    huge = torch.cat([huge, from_bits([0x7F7FFF7F, 0x7F7FFF80, 0x7F7FFFFF, 0x7F7F7F80])])
    source = torch.stack([huge, -huge], dim=1).flatten()
    for piece in (source, *source.split(2)):
        assert_all_same_bits(parts_of(piece, split_in_cache), parts_of(piece, split_reference))


@pytest.mark.parametrize("numel", [0, 1, 100, 1 << 16, (1 << 16) + 1, 3 * (1 << 16) + 17])
def test_lengths(numel):
    """More than one chunk, and nothing at all; sources stay as they are."""
    source = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    high, low = parts_of(source, split_reference)
    mine = torch.empty_like(high), torch.empty_like(low)
    given = source.clone()
    split(*mine, source)
    assert_same_bits(source, given)
    assert_all_same_bits(mine, (high, low))
    back = torch.empty_like(source)
    join_reference(back, high, low)
    assert_same_bits(joined(high, low), back)
    in_cache = torch.empty_like(source)
    join_on_cpu(in_cache, high, low, torch.empty_like(source, dtype=torch.int32))
    assert_same_bits(in_cache, back)


X, HIGH, LOW = torch.zeros(8), torch.zeros(8, dtype=torch.bfloat16), torch.zeros(8, dtype=torch.int8)


@pytest.mark.parametrize(
    ("whole", "high", "low", "message"),
    [
        (X.double(), HIGH, LOW, "the fp32 part must be fp32, got torch.float64"),
        (X, X, LOW, "the high part must be bf16, got torch.float32"),
        (X, HIGH, LOW.to(torch.uint8), "the low part must be int8, got torch.uint8"),
        (X, HIGH.view(2, 4), LOW, r"the high part must be 1-D.*\(2, 4\)"),
        (X, HIGH, torch.zeros(16, dtype=torch.int8)[::2], r"the low part must be 1-D and contiguous, .*\(2,\)"),
        (X, HIGH[:7], LOW, "the high part must have 8 elements on cpu, got 7 on cpu"),
        (X, HIGH, LOW.to("meta"), "the low part must have 8 elements on cpu, got 8 on meta"),
    ],
)
def test_errors_name_what_does_not_fit(whole, high, low, message):
    with pytest.raises(ValueError, match=f"^split: {message}"):
        split(high, low, whole)
    with pytest.raises(ValueError, match=f"^join: {message}"):
        join(whole, high, low)
