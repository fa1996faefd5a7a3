"""Random bits depend only on the parameter, its step and the position in it."""

import pytest
import torch
from shardlite_kernels import Table
from shardlite_kernels.noise import keys, random_bits_reference


def bits_of(numel, step=1, number=0, start=0, first=0):
    """Those of `numel` elements from position `first` on, of a parameter that starts at position `start`."""
    key = keys(torch.tensor([float(step)]), torch.tensor([number]), torch.tensor([start]))
    return unsigned(random_bits_reference(torch.arange(first, first + numel), key.long()))


def unsigned(bits):
    return bits.long() & 0xFFFFFFFF


def mix(x):
    """The finaliser of MurmurHash3, in Python's integers."""
    x = ((x ^ x >> 16) * 0x85EBCA6B) % 2**32
    x = ((x ^ x >> 13) * 0xC2B2AE35) % 2**32
    return x ^ x >> 16


@pytest.mark.parametrize("step", [1, 2, 12345, 2**24])
@pytest.mark.parametrize("number", [0, 1, 999])
@pytest.mark.parametrize("start", [0, 32, -(2**20), 3 * 2**33])
def test_in_python(step, number, start):
    key = (mix((step * 0x85EBCA77 + number * 0xC2B2AE3D) % 2**32) - start * 0x9E3779B1) % 2**32
    expected = [mix((position * 0x9E3779B1 + key) % 2**32) for position in range(64, 96)]
    assert bits_of(32, step, number, start, first=64).tolist() == expected
    assert keys(torch.tensor([step]), torch.tensor([number]), torch.tensor([start])).dtype == torch.int32


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_it_does_not_matter_how_many_ranks_share_a_parameter(world):
    """Each rank has a shard at some place in its own arena; the parameter's first element may lie before all of it."""
    numel, whole, place = 960, bits_of(960), 64
    shards = []
    for rank in range(world):
        offset = numel // 32 * rank // world * 32
        end = numel // 32 * (rank + 1) // world * 32
        shards.append(bits_of(end - offset, start=place - offset, first=place))
    assert torch.equal(torch.cat(shards), whole)


def test_it_does_not_matter_how_a_launch_is_cut():
    rows = torch.tensor([0, 0, 1, 1, 2, 0], dtype=torch.int16)
    key = keys(torch.tensor([1.0, 5.0, 1.0]), torch.arange(3), torch.tensor([0, 7, -32]))
    table = Table(rows, key, torch.zeros(3, 10), first=96)
    whole = table.random_bits(170)
    row = rows.long().repeat_interleave(32)[:170]
    assert torch.equal(whole, random_bits_reference(torch.arange(96, 96 + 170), key.long()[row]))
    for start, stop in ((0, 32), (32, 170), (96, 160)):
        assert torch.equal(table.part(start, stop).random_bits(stop - start), whole[start:stop])


def each_bit(numbers):
    """[32, len(numbers)] of zeros and ones."""
    return numbers >> torch.arange(32).unsqueeze(1) & 1


NUMEL = 1 << 16
SERIES = {
    "positions": lambda: bits_of(NUMEL),
    "positions far away": lambda: bits_of(NUMEL, first=2**31 + 7),
    "steps": lambda: _of_keys(torch.arange(1, NUMEL + 1), torch.zeros(NUMEL, dtype=torch.int64)),
    "parameters": lambda: _of_keys(torch.ones(NUMEL), torch.arange(NUMEL)),
    "every 32nd position": lambda: bits_of(32 * NUMEL)[::32],
}


def _of_keys(steps, numbers):
    return unsigned(random_bits_reference(torch.tensor(5), keys(steps, numbers, torch.zeros_like(numbers)).long()))


@pytest.mark.parametrize("series", SERIES)
def test_each_bit_is_set_half_of_the_time_and_changes_half_of_the_time(series):
    numbers = SERIES[series]()
    four_sigma = 4 * 0.5 / NUMEL**0.5
    for sample in (numbers, numbers[1:] ^ numbers[:-1], numbers[2:] ^ numbers[:-2]):
        share = each_bit(sample).double().mean(1)
        assert (share - 0.5).abs().max() < four_sigma, share


def test_keys_of_many_parameters_and_steps_are_all_different():
    steps, numbers = torch.arange(1, 301).repeat(1000), torch.arange(1000).repeat_interleave(300)
    made = keys(steps, numbers, torch.zeros_like(numbers))
    # Among random ones of 32 bits about 10 pairs would be equal.
    assert len(made.unique()) >= len(made) - 30
