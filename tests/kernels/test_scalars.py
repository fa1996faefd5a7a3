"""The scalars of a step as a table, made by the device, against those made one by one in Python."""

import pytest
import torch
from shardlite_kernels import Hyper
from shardlite_kernels.scalars import adamw_scalars, adamw_scalars_reference, hyper_table

from tests.kernels.adamw_cases import CPU, HYPER
from tests.kernels.bits import assert_same_bits

NUMBERS = [1, 2, 3, 4, 5, 7, 10, 31, 100, 999, 1000, 12345, 10**5, 10**6, 2**24]
BETAS = [0.0, 1e-30, 0.1, 0.5, 0.8, 0.9, 0.95, 0.99, 0.995, 0.999, 0.9999, 0.99999, 1 - 2**-24]
RATES = [0.0, 1e-45, 1e-12, 3e-7, 1e-3, 0.1, 7.0, 1e30]


def random_hypers(rows):
    generator = torch.Generator().manual_seed(0)
    magnitudes = 10.0 ** (-8 * torch.rand(rows, 6, dtype=torch.float64, generator=generator))
    magnitudes[:, 1:3] = 1 - magnitudes[:, 1:3].clamp(min=1e-7)
    return [Hyper(*row) for row in magnitudes.tolist()]


def test_a_table_has_the_bits_of_scalars_computed_one_by_one():
    hypers = [
        Hyper(lr, b1, b2, 1e-8, decay) for lr in RATES for b1 in BETAS[::2] for b2 in BETAS for decay in (0.0, 0.1)
    ]
    hypers += random_hypers(2000)
    table = hyper_table(hypers, torch.device("cpu"))
    for step in NUMBERS:
        got = adamw_scalars(torch.full((len(hypers),), float(step)), table)
        assert_same_bits(got, torch.tensor([adamw_scalars_reference(step, hyper) for hyper in hypers]))


def test_every_early_step_has_the_same_bits():
    counts = torch.arange(1, 20_001, dtype=torch.float32)
    got = adamw_scalars(counts, hyper_table([HYPER], torch.device("cpu")).expand(len(counts), 6))
    assert_same_bits(got, torch.tensor([adamw_scalars_reference(step, HYPER) for step in range(1, 20_001)]))


def test_a_table_carries_factor_scale_and_who_is_active():
    hypers = [HYPER, HYPER._replace(lr=2.0, max_update=3.0)]
    table = hyper_table(hypers, CPU)
    flags = {"active": torch.tensor([0.0, 1.0]), "grad_scale": torch.tensor(8.0)}
    got = adamw_scalars(torch.tensor([1.0, 5.0]), table, factor=torch.tensor([0.5, 0.25]), **flags)
    first = adamw_scalars_reference(1, hypers[0], active=0.0, factor=0.5, grad_scale=8.0)
    second = adamw_scalars_reference(5, hypers[1], factor=0.25, grad_scale=8.0)
    assert_same_bits(got, torch.tensor([first, second]))
    assert (first.limit, second.limit) == (float("inf"), 6.0)


def test_no_limit_is_infinity_also_without_a_learning_rate():
    """And not NaN, zero times infinity."""
    hypers = [HYPER._replace(lr=0.0), HYPER._replace(lr=0.0, max_update=1.0)]
    got = adamw_scalars(torch.ones(2), hyper_table(hypers, CPU))[:, 6]
    assert got.tolist() == [float("inf"), 0.0]
    assert [adamw_scalars_reference(1, hyper).limit for hyper in hypers] == got.tolist()


def test_a_table_of_a_beta_that_is_one_is_refused():
    with pytest.raises(ValueError, match=r"betas must be in \[0, 1\) in fp32, got 0\.9, 0\.999999999"):
        hyper_table([HYPER, HYPER._replace(beta2=1 - 1e-9)], CPU)
