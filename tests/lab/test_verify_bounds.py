"""Test how `verify` measures differences, bounds them, joins batches and prints its table."""

import math

import pytest
import torch

from shardlite import Precision
from shardlite.lab.verify.bounds import Sum, difference, in_ulps, same_bits
from shardlite.lab.verify.task import joined_batch
from shardlite.lab.verify.verify import Report, ReportRow


def test_differences_and_units_of_last_place():
    ours = torch.tensor([1.0, 1.0, 0.0, -0.0, math.inf, math.nan, 1e-45, 3.0, math.inf])
    theirs = torch.tensor([1.0, 1 + 2**-23, 0.0, 0.0, math.inf, 1.0, 0.0, -3.0, 1.0])
    apart = difference(ours, theirs)
    assert apart.tolist() == [0, 2**-23, 0, 0, 0, math.inf, 2**-149, 6, math.inf]
    assert in_ulps(apart, ours, theirs).tolist() == [0, 1, 0, 0, 0, math.inf, 1, 6 * 2**22, math.inf]
    one, other = torch.tensor([1 + 2**-8]), torch.tensor([1.0], dtype=torch.bfloat16)
    assert in_ulps(difference(one, other), one, other).tolist() == [0.5]


@pytest.mark.parametrize(
    ("ours", "theirs", "same"), [(1.0, 1.0, True), (0.0, -0.0, False), (math.nan, math.nan, False)]
)
def test_same_bits(ours, theirs, same):
    judgement = same_bits("", torch.tensor([2.0, ours]), torch.tensor([2.0, theirs]))
    assert judgement.share == (0 if same else math.inf)
    assert same or judgement.detail.startswith("at [1] ")


def test_no_bits_are_the_same_in_two_dtypes():
    judgement = same_bits("", torch.ones(2), torch.ones(2).half())
    assert (judgement.share, judgement.detail) == (math.inf, "torch.float32 and torch.float16")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world_size", [3, 8, 64])
def test_the_bound_of_a_sum_holds_in_any_order_and_is_not_far_off(world_size, dtype):
    """Means of one set of gradients, added in two orders, one divided before and one after."""
    gradients = torch.randn(world_size, 4096).to(dtype)
    one, other = torch.zeros(4096, dtype=dtype), torch.zeros(4096, dtype=dtype)
    for gradient in gradients:
        one += gradient
    for gradient in gradients.flip(0):
        other += gradient * (1 / world_size)
    mean, sizes, none = one.float() / world_size, gradients.double().abs().mean(0), torch.zeros(4096)
    judge = Sum(world_size, {"x": sizes}, {"x": none}, Precision(reduce=dtype)).data_parallel
    assert 0.3 / world_size < judge("x", mean, other).share <= 1
    assert judge("x", mean * (1 + 8 * world_size * torch.finfo(dtype).eps), other).share > 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_in_fp32_is_as_far_from_one_in_the_dtype_of_the_model_as_that_one_rounds(dtype):
    gradients = torch.randn(3, 4096).to(dtype)
    mean, low_mean = gradients.float().sum(0) / 3, gradients.sum(0) / 3
    sizes, none = gradients.double().abs().mean(0), torch.zeros(4096)
    judge = Sum(3, {"x": sizes}, {"x": none}, Precision()).data_parallel
    assert judge("x", mean, low_mean).share <= 1
    assert judge("x", mean, low_mean * (1 + 8 * torch.finfo(dtype).eps)).share > 1
    assert judge("x", mean * (1 + 2**-6), mean.to(dtype)).share > 1
    cast = Sum(3, {"x": sizes}, {"x": sizes * 2**-6}, Precision()).data_parallel
    assert cast("x", mean * (1 + 2**-6), mean.to(dtype)).share <= 1


def test_batches_are_joined_where_that_means_something():
    a, b, few = torch.zeros(2, 3), torch.ones(2, 3), torch.ones(1, 3)
    (joined, mode), expected = joined_batch([({"x": a}, "mode"), ({"x": b}, "mode")]), torch.cat([a, b])
    assert mode == "mode"
    assert torch.equal(joined["x"], expected)
    for left, right in [((a,), (few,)), ((a,), (b.double(),)), ((a, 1), (b, 2)), ((a,), (b, 1)), ((a,), (1,))]:
        assert joined_batch([left, right]) is None
    assert joined_batch([(torch.zeros(()),)] * 2) is None


OK = [
    ReportRow(opponent="stage 0", quantity="loss of step 1"),
    ReportRow(opponent="stage 0", quantity="gradients of step 1"),
    ReportRow(opponent="DDP", quantity="gradients of step 1", absolute=1.5e-8, ulps=3, equal=False, share=0.251),
    ReportRow(opponent="DDP", quantity="weights after step 2", absolute=0.01, ulps=1e6, equal=False, share=None),
]


def test_the_table_lists_every_comparison():
    assert Report(2, 2, tuple(OK)).table().splitlines() == [
        "stage 3 against                                                difference   ulps",
        "stage 0          loss of step 1        equal to the bit                 0      0",
        "                 gradients of step 1   equal to the bit                 0      0",
        "DDP              gradients of step 1   within its bound (26%)     1.5e-08      3",
        "                 weights after step 2  not judged                    0.01  1e+06",
        "2 ranks, 2 steps: ok",
    ]
    failed = ReportRow(opponent="DDP", quantity="x", absolute=1, ulps=2, equal=False, share=9, failure="rank 1: x")
    report = Report(1, 1, (*OK, failed))
    assert not report.ok
    assert report.first_failure == "rank 1: x"
    assert "BEYOND ITS BOUND" in report.table().splitlines()[-2]
    assert report.table().splitlines()[-1] == "1 rank, 1 step: FAILED: rank 1: x"
