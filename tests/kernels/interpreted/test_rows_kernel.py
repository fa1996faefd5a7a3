"""AdamW's step by the sum of rows, run by Triton's interpreter, against its reference: equal to the bit."""

import pytest
import torch
from shardlite_kernels import add_rows_adamw, add_rows_adamw_reference, use_triton

from tests.kernels.adamw_cases import FORMS, assert_same_state, mixed_table, random_grad, random_state


def test_cpu_tensors_are_interpreted_here():
    assert use_triton(torch.empty(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("form", "count", "first"),
    [
        *((form, 3, 1) for form in FORMS),
        *((FORMS[0], *each) for each in ((1, 0), (2, 0), (8, 7), (70, 3), (8, None), (128, None))),
    ],
)
@pytest.mark.usefixtures("fused")
def test_a_step_by_the_sum(dtype, form, count, first):
    numel = 1003
    rows = torch.stack([random_grad(numel, seed, dtype) for seed in range(count)])
    mine, theirs = (random_state(form, numel, 0) for _ in range(2))
    my_bad, their_bad = (torch.zeros((), dtype=torch.int32) for _ in range(2))
    add_rows_adamw(mine, rows, mixed_table(numel), divisor=count, first=first, bad=my_bad)
    add_rows_adamw_reference(theirs, rows, mixed_table(numel), divisor=count, first=first, bad=their_bad)
    assert_same_state(mine, theirs)
    assert my_bad == their_bad == 0


def test_a_bad_sum_is_seen():
    rows, bad = torch.ones(3, 64), torch.zeros((), dtype=torch.int32)
    rows[1, 5] = float("inf")
    add_rows_adamw(random_state(FORMS[0], 64, 0), rows, mixed_table(64), divisor=3, bad=bad)
    assert bad == 1
