"""Moments in fewer bytes: range and error of their formats, and convergence of their mean."""

import pytest
import torch
from shardlite_kernels import SCALE_BLOCK
from shardlite_kernels.adamw import adamw_reference
from shardlite_kernels.moments import decode, encode

from tests.kernels.adamw_cases import HYPER, groups, one_row, random_grad, state_of
from tests.kernels.bits import assert_same_bits, pairs
from tests.kernels.random_cases import random_by_rows

NARROW = ["bf16", "int8"]


def moments_of(moments, m, v, random=None):
    """Both moments [S] as a state in this format has them afterwards."""
    state = state_of(("whole", moments), torch.zeros_like(m), m, v)
    encode(m, v, *state.codes(), random=random)
    return state.moments()


def codes_of(m, v, random=None):
    state = state_of(("whole", "int8"), torch.zeros_like(m), m, v)
    encode(m, v, *state.codes(), random=random)
    return state.codes()


# ---- encoding what was decoded -------------------------------------------------------------------------------------


def assert_nothing_is_lost(moments, state):
    """By a checkpoint: whatever the state says is said again by its encoding, rounded to nearest."""
    m, v = (moment.clone() for moment in state.moments())
    again = moments_of(moments, m, v)
    assert_same_bits(again[0], m)
    assert_same_bits(again[1], v)


@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e-12, 1e-18, 3e-22])
@pytest.mark.parametrize("moments", NARROW)
def test_states_after_many_steps_are_encoded_as_they_are(moments, scale):
    """Groups of many magnitudes, some of them all but zero: there squares are subnormal numbers, or zero."""
    numel = 40 * SCALE_BLOCK + 5
    zeros = torch.zeros(numel)
    state = state_of(("whole", moments), zeros, zeros, zeros)
    spread = 10.0 ** (-6 * torch.rand(numel, generator=torch.Generator().manual_seed(0)))
    spread[: 4 * SCALE_BLOCK] = 0
    for step in range(1, 61):
        grad = random_grad(numel, step) * spread * scale * (1 if step < 30 else 1e-2)
        adamw_reference(state, grad, one_row(numel, step, HYPER._replace(beta2=0.9)))
        if step % 4 == 0:
            assert_nothing_is_lost(moments, state)


def test_a_group_whose_largest_root_was_rounded_down_across_a_power_of_two():
    """Its codes are halves of those that its own encoding has, and stand for the same numbers."""
    numel = 64 * SCALE_BLOCK
    root = torch.rand(numel, generator=torch.Generator().manual_seed(0)) * 0.4
    root[::SCALE_BLOCK] = 127.6 / 255
    _, sq, *exponents = codes_of(torch.zeros(numel), root**2, random_by_rows(numel))
    assert set(sq[::SCALE_BLOCK].tolist()) == {127, 128}
    m, v = decode(torch.zeros(numel, dtype=torch.int8), sq, *exponents)
    _, again, *_ = codes_of(m, v)
    smaller = sq[::SCALE_BLOCK] == 127
    assert (again.view(-1, SCALE_BLOCK)[smaller] == 2 * sq.view(-1, SCALE_BLOCK)[smaller]).all()
    assert torch.equal(again.view(-1, SCALE_BLOCK)[~smaller], sq.view(-1, SCALE_BLOCK)[~smaller])
    assert_same_bits(decode(torch.zeros(numel, dtype=torch.int8), again, *codes_of(m, v)[2:])[1], v)


def test_all_codes_are_encoded_as_they_are():
    """Of each exponent: for the second moment up to that at which the square of a root overflows.

    The largest code of a first moment is at least 90 of 127, the root of one half: 2^k is the smallest power that fits.
    """
    generator = torch.Generator().manual_seed(0)
    avg_exponent = torch.arange(254, dtype=torch.uint8).repeat_interleave(64)
    numel = len(avg_exponent) * SCALE_BLOCK
    avg = torch.randint(-127, 128, (numel,), generator=generator, dtype=torch.int8)
    avg[::SCALE_BLOCK] = torch.randint(90, 128, (len(avg_exponent),), generator=generator, dtype=torch.int8)
    sq = torch.randint(1, 256, (numel,), generator=generator).clamp(max=255).to(torch.uint8)
    sq[1::SCALE_BLOCK] = torch.randint(1, 3, (len(avg_exponent),), generator=generator, dtype=torch.uint8)
    sq[: numel // 2 : 2] = 1
    m, v = decode(avg, sq, avg_exponent, avg_exponent.clamp(max=190))
    for got, expected in zip(moments_of("int8", m, v), (m, v), strict=True):
        assert torch.equal(got, expected)  # a zero may lose its sign: a product that was too small for fp32


@pytest.mark.parametrize("moments", NARROW)
def test_zeros_stay_zeros(moments):
    zeros = torch.zeros(70)
    for got in moments_of(moments, zeros, zeros, random_by_rows(70)):
        assert_same_bits(got, zeros)


@pytest.mark.parametrize("numel", [1, 31, 33, 1000])
@pytest.mark.parametrize("moments", [*NARROW, "fp32"])
def test_a_last_group_need_not_be_full(moments, numel):
    m, v = random_grad(numel, 0), random_grad(numel, 1) ** 2
    padded = [torch.nn.functional.pad(each, (0, groups(numel) * SCALE_BLOCK - numel)) for each in (m, v)]
    for got, expected in zip(moments_of(moments, m, v), moments_of(moments, *padded), strict=True):
        assert_same_bits(got, expected[:numel])


# ---- how far off they are ------------------------------------------------------------------------------------------


def magnitudes(numel, seed):
    """Numbers of many magnitudes, also within a group."""
    generator = torch.Generator().manual_seed(seed)
    of_groups = 10.0 ** (20 * torch.rand(groups(numel), generator=generator) - 12)
    return (
        pairs(numel, seed)[1].nan_to_num(0, 1, -1).clamp(-1e4, 1e4) * of_groups.repeat_interleave(SCALE_BLOCK)[:numel]
    )


def powers(x):
    """2^k of each element's group in fp64: the smallest power of two that is not below any magnitude."""
    largest = torch.nn.functional.pad(x, (0, -len(x) % SCALE_BLOCK)).view(-1, SCALE_BLOCK).abs().amax(1).double()
    return torch.exp2(torch.log2(largest.clamp(min=2.0**-126)).ceil()).repeat_interleave(SCALE_BLOCK)[: len(x)]


ROUNDING = 1 + 2.0**-16  # of a few fp32 operations, beside codes that are 2^-8 apart


def test_a_first_moment_in_codes_is_at_most_half_a_code_off():
    """With `y` between the codes: `(y + 1/2)^2 - y^2`, as a part of `2^k`."""
    m = magnitudes(20_000, 5)
    got, _ = moments_of("int8", m, m.abs())
    largest = powers(m)
    y = (m.double().abs() / largest).sqrt() * 127
    bound = (y + 0.25) / 127**2 * largest * ROUNDING
    off = (got.double() - m.double()).abs()
    assert (off <= bound).all()
    assert (off > 0.9 * bound).any()
    assert ((got == 0) | (got.sign() == m.sign())).all()


@pytest.mark.parametrize("stochastic", [False, True])
def test_a_second_moment_in_codes_is_at_most_a_code_off(stochastic):
    """Half of one, rounded to nearest. Zero is no code, so what is below the first one becomes that."""
    v = magnitudes(20_000, 6).abs()
    _, got = moments_of("int8", v, v, random_by_rows(20_000) if stochastic else None)
    largest = powers(v.double().sqrt().float())
    y = v.double().sqrt() / largest * 255
    step = 1.0 if stochastic else 0.5
    bound = torch.where(y < step, torch.ones_like(y), (y + step) ** 2 - y**2) / 255**2 * largest**2 * ROUNDING
    off = (got.double() - v.double()).abs()
    assert (off <= bound).all()
    assert (off > 0.9 * bound).any()
    assert (got.double() >= (0.999 * largest / 255) ** 2).all()


def test_a_first_moment_in_bf16_is_rounded_to_nearest():
    m, v = pairs(5000, 7)
    assert_same_bits(moments_of("bf16", m, v, random_by_rows(5000))[0], m.bfloat16().float())
    assert_same_bits(moments_of("bf16", m, v)[1], v.bfloat16().float())


def test_a_second_moment_in_bf16_is_one_of_its_neighbours():
    v = magnitudes(20_000, 8).abs()
    _, got = moments_of("bf16", v, v, random_by_rows(20_000))
    below = (v.view(torch.int32) & -0x10000).view(torch.float32)
    above = ((v.view(torch.int32) & -0x10000) + 0x10000).view(torch.float32)
    assert ((got == below) | (got == above)).all()
    assert (got == above).any()
    exact = v == below
    assert_same_bits(got[exact], v[exact])


# ---- what is not finite --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("worst", [float("nan"), float("inf"), float("-inf"), 1e38])
def test_a_group_that_cannot_be_said_is_nan_and_no_other(worst):
    m, v = random_grad(100, 0), random_grad(100, 1) ** 2
    m[40] = worst
    got_m, got_v = moments_of("int8", m, v)
    assert got_m[32:64].isnan().all()
    assert got_m[:32].isfinite().all()
    assert got_m[64:].isfinite().all()
    assert got_v.isfinite().all()
    m[40], v[70] = 0, abs(worst)
    got_m, got_v = moments_of("int8", m, v, random_by_rows(100))
    assert got_m.isfinite().all()
    assert got_v[:64].isfinite().all()
    assert got_v[96:].isfinite().all()
    assert got_v[64:96].isnan().all() if worst != 1e38 else got_v.isfinite().all()  # its root is small enough


def test_the_largest_first_moment_that_codes_can_say():
    m = torch.tensor([2.0**126, -(2.0**126), 2.0**120])
    assert_same_bits(moments_of("int8", m, m.abs())[0][:2], m[:2])
    assert moments_of("int8", torch.nextafter(m, m * 2), m.abs())[0].isnan().all()


@pytest.mark.parametrize("worst", [float("nan"), float("inf")])
def test_bf16_moments_keep_what_is_not_finite(worst):
    v = random_grad(100, 1) ** 2
    v[40] = worst
    for random in (None, random_by_rows(100), torch.full((100,), -1, dtype=torch.int32)):
        _, got = moments_of("bf16", v, v, random)
        assert_same_bits(got[40], torch.tensor(worst))
        assert got.isfinite().sum() == 99


def test_every_nan_stays_one_in_bf16():
    payloads = torch.tensor([0x7FFFFFFF, 0x7F800001, 0x7FFF0000, -1, -0x7FFFFF], dtype=torch.int32).view(torch.float32)
    assert moments_of("bf16", payloads, payloads, torch.full((5,), -1, dtype=torch.int32))[1].isnan().all()


# ---- right in the mean ---------------------------------------------------------------------------------------------

TIMES = 4096


def test_a_second_moment_in_bf16_is_right_in_the_mean():
    generator = torch.Generator().manual_seed(0)
    v = 10.0 ** (-30 * torch.rand(SCALE_BLOCK, generator=generator))
    many = v.repeat(TIMES)
    got = moments_of("bf16", many, many, random_by_rows(len(many)))[1].view(TIMES, SCALE_BLOCK).double()
    below = (v.view(torch.int32) & -0x10000).view(torch.float32).double()
    unit = ((v.view(torch.int32) & -0x10000) + 0x10000).view(torch.float32).double() - below
    share = (v.double() - below) / unit
    sigma = unit * (share * (1 - share) / TIMES).sqrt()
    assert ((got.mean(0) - v.double()).abs() <= 4 * sigma).all()
    assert (sigma > 0).all()


@pytest.mark.parametrize("exponent", [0, -20, 9])
def test_a_second_moment_in_codes_is_right_in_the_mean(exponent):
    """The moment itself, not its root; between small codes and large ones. The largest in a group fixes the power."""
    between = torch.tensor([1.02, 1.5, 1.9, 2.2, 2.5, 3.7, 5.1, 8.5, 9.9, 17.3, 33.3, 64.5, 99.1, 127.4, 180.6, 254.2])
    roots = torch.cat([torch.tensor([255.0, 1.0]), between, between[:14] + 0.07])
    v = (roots.double() / 255 * 2.0**exponent).square().float()
    many = v.repeat(TIMES)
    got = moments_of("int8", many, many, random_by_rows(len(many)))[1].view(TIMES, SCALE_BLOCK).double()
    y = v.double().sqrt() * 255 / 2.0**exponent
    low = y.floor()
    share = ((y**2 - low**2) / (2 * low + 1)).clamp(0, 1)
    unit = (2 * low + 1) / 255**2 * 4.0**exponent
    sigma = unit * (share * (1 - share) / TIMES).sqrt()
    # An element that is a code itself may be read as just below or above it: 2^-22 of it.
    assert ((got.mean(0) - v.double()).abs() <= 4 * sigma + 2.0**-20 * v).all()
    assert (sigma[2:] > 0).all()
