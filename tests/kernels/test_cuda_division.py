"""References have the bits of the kernels on CUDA too, where PyTorch divides by a number of the host as `a * (1 / b)`.

The rule is that of `div_true_kernel_cuda` (aten/src/ATen/native/cuda/BinaryDivTrueKernel.cu): it holds for a divisor in
host memory, a Python number or a 0-d tensor, and computes in fp32 for fp32 and narrower dtypes.
"""

import math
import numbers

import pytest
import torch
from shardlite_kernels.adamw import add_rows_adamw_reference, reduce_adamw_reference
from shardlite_kernels.device_ring import ring_reduce_scatter_reference
from shardlite_kernels.hop import hop_reference
from shardlite_kernels.quantize import _step_reference
from shardlite_kernels.rows import add_rows_reference
from torch.utils._python_dispatch import TorchDispatchMode

from tests.kernels.adamw_cases import FORMS, assert_same_state, mixed_table, random_grad, random_state
from tests.kernels.bits import assert_same_bits

NUMEL = 1003


class CudaDivision(TorchDispatchMode):
    """Divides CPU tensors by Python numbers as CUDA does."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        if name not in ("aten::div", "aten::div_") or not isinstance(args[1], numbers.Number):
            return func(*args, **(kwargs or {}))
        dividend, divisor = args[:2]
        wide = torch.promote_types(dividend.dtype, torch.float32)
        quotient = (dividend.to(wide) * torch.tensor(divisor, dtype=wide).reciprocal()).to(dividend.dtype)
        return dividend.copy_(quotient) if name == "aten::div_" else quotient


def hop(out):
    hop_reference(out, random_grad(NUMEL, 0), random_grad(NUMEL, 1), 3)


def add_rows(out):
    add_rows_reference(out, torch.stack([random_grad(NUMEL, seed) for seed in range(3)]), 1, 3)


def a_tree_of_rows(out):
    add_rows_reference(out, torch.stack([random_grad(NUMEL, seed) for seed in range(4)]), None, 3)


def a_ring(out):
    ring_reduce_scatter_reference(out, [random_grad(3 * NUMEL, seed) for seed in range(3)], 1, divisor=3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reference", [hop, add_rows, a_tree_of_rows, a_ring])
def test_a_sum_is_divided_as_by_the_kernel(reference, dtype):
    expected, got = torch.zeros(2, NUMEL, dtype=dtype)
    reference(expected)
    with CudaDivision():
        reference(got)
    assert_same_bits(got, expected)


@pytest.mark.parametrize("form", FORMS, ids="-".join)
@pytest.mark.parametrize("name", ["reduce", "rows"])
def test_a_step_by_a_mean_is_that_of_the_kernel(name, form):
    grads, table = torch.stack([random_grad(NUMEL, seed) for seed in range(3)]), mixed_table(NUMEL)
    expected, got = (random_state(form, NUMEL, 0) for _ in range(2))

    def step(state):
        if name == "rows":
            add_rows_adamw_reference(state, grads, table, first=1, divisor=3)
        else:
            reduce_adamw_reference(state, grads[0], grads[1], table, divisor=3)

    step(expected)
    with CudaDivision():
        step(got)
    assert_same_state(got, expected)


def test_powers_of_two_of_the_quantization_are_exact():
    """By their bits, because the power function of a device need not be exact."""
    scales = torch.arange(256, dtype=torch.uint8)
    assert _step_reference(scales).tolist() == [math.ldexp(1.0, scale - 133) for scale in range(256)]
