"""AdamW on the CPU with narrow states, or with limited updates, in chunks."""

import pytest
import torch
from shardlite_kernels import State, add_rows, hop
from shardlite_kernels.adamw import adamw_reference
from shardlite_kernels.adamw_cpu import _CHUNK as CHUNK
from shardlite_kernels.adamw_cpu import _NARROW_CHUNK as NARROW_CHUNK
from shardlite_kernels.adamw_cpu import CpuStep, adamw_cpu, add_rows_adamw_cpu, reduce_adamw_cpu
from shardlite_kernels.moments import encode
from shardlite_kernels.split import split_reference

from shardlite.telemetry.meter import Meter
from tests.kernels.adamw_cases import (
    FORMS,
    HYPER,
    assert_same_state,
    awkward,
    cpu_step,
    one_row,
    random_grad,
    random_state,
    state_of,
)
from tests.kernels.all_pairs import all_pairs
from tests.kernels.bits import assert_same_bits
from tests.kernels.rows_cases import exchanged_in_place

LENGTHS = [0, 1, 1027, CHUNK, CHUNK + 1, 2 * CHUNK + 37]
by_form = pytest.mark.parametrize("form", FORMS, ids="-".join)


def by_hand(state, grad, step):
    """As a whole: read, PyTorch's operator or the limit, write."""
    param, (m, v) = state.weight().clone(), (moment.clone() for moment in state.moments())
    whole = State(param, m, v)
    adamw_cpu(whole, grad.float(), CpuStep(number=step.number, hyper=step.hyper))
    after = state.clone()
    if after.low is None:
        after.param.copy_(param)
    else:
        split_reference(after.param, after.low, param)
    encode(m, v, *after.codes(), random=step.table.random_bits(len(grad)))
    return after


def assert_stepped_as_by_hand(state, grad):
    step = cpu_step(len(grad))
    expected, given = by_hand(state, grad, step), grad.clone()
    adamw_cpu(state, grad, step)
    assert_same_state(state, expected)
    assert_same_bits(grad, given)


@pytest.mark.parametrize(("form", "grad_dtype", "numel"), all_pairs(FORMS, [torch.float32, torch.bfloat16], LENGTHS))
def test_narrow_states_are_read_stepped_and_written(form, grad_dtype, numel):
    """To the bit: chunks change nothing."""
    assert_stepped_as_by_hand(random_state(form, numel, 0), random_grad(numel, 0, grad_dtype))


@by_form
def test_a_step_takes_temporaries_of_a_chunk(form):
    """However long the state is: moments that are decoded and encoded take some sixteen tensors of a shorter chunk."""
    numel = 5 * CHUNK
    state, grad, step = random_state(form, numel, 0), random_grad(numel, 0), cpu_step(numel)
    adamw_cpu(state, grad, step)  # allocates what a thread keeps
    with Meter() as meter:
        before = meter.live
        adamw_cpu(state, grad, step)
        extra = meter.peak - before
    narrow = state.exp_avg.dtype != torch.float32
    assert extra <= 4 * (16 * NARROW_CHUNK if narrow else CHUNK)


@by_form
def test_awkward_numbers_on_the_cpu(form):
    *tensors, grad = awkward()
    assert_stepped_as_by_hand(state_of(form, *tensors), grad)


@by_form
def test_random_bits_do_not_depend_on_how_a_state_is_cut(form):
    numel = CHUNK + 320
    whole, grad, step = random_state(form, numel, 0), random_grad(numel, 0), cpu_step(numel)
    parts = whole.clone()
    adamw_cpu(whole, grad, step)
    for start, stop in ((0, 96), (96, CHUNK + 32), (CHUNK + 32, numel)):
        part = CpuStep(number=step.number, hyper=HYPER, table=step.table.part(start, stop))
        adamw_cpu(parts.part(start, stop), grad[start:stop], part)
    assert_same_state(parts, whole)


@pytest.mark.parametrize(
    ("form", "divisor", "dtypes"),
    all_pairs(FORMS, [1, 3, 4], [(torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.float32, torch.float16)]),
)
def test_a_reduction_is_a_hop_and_a_step(form, divisor, dtypes):
    numel = CHUNK + 1027
    received, own = (random_grad(numel, seed, dtype) for seed, dtype in enumerate(dtypes))
    mine, theirs = (random_state(form, numel, 0) for _ in range(2))
    given, bad = (received.clone(), own.clone()), torch.zeros((), dtype=torch.int32)
    reduce_adamw_cpu(mine, received, own, cpu_step(numel), divisor=divisor, bad=bad)
    total = torch.empty(numel)
    hop(total, received, own, divisor)
    adamw_cpu(theirs, total, cpu_step(numel))
    assert_same_state(mine, theirs)
    assert_same_bits(received, given[0])
    assert_same_bits(own, given[1])
    assert bad == 0


@pytest.mark.parametrize(
    ("form", "count", "dtype"), all_pairs(FORMS, [2, 3, 8], [torch.float32, torch.bfloat16, torch.float16])
)
def test_a_step_by_rows_is_their_sum_and_a_step(form, count, dtype):
    numel = CHUNK + 1027
    rows = torch.stack([random_grad(numel, seed, dtype) for seed in range(count)])
    mine, theirs = (random_state(form, numel, 0) for _ in range(2))
    bad = torch.zeros((), dtype=torch.int32)
    add_rows_adamw_cpu(mine, rows, cpu_step(numel), first=1, divisor=count, bad=bad)
    total = torch.empty(numel)
    add_rows(total, rows, 1, count)
    adamw_cpu(theirs, total, cpu_step(numel))
    assert_same_state(mine, theirs)
    assert bad == 0
    moved = random_state(form, numel, 0)
    add_rows_adamw_cpu(moved, step=cpu_step(numel), divisor=count, **exchanged_in_place(rows, 0, numel // 2))
    assert_same_state(moved, theirs)
    rows[1, CHUNK] = float("nan")
    add_rows_adamw_cpu(mine, rows, cpu_step(numel), first=1, divisor=count, bad=bad)
    assert bad == 1


@pytest.mark.parametrize("worst", [float("inf"), float("-inf"), float("nan"), 3e38])
@pytest.mark.parametrize("place", [0, CHUNK - 1, CHUNK, CHUNK + 4])
def test_a_bad_sum_is_seen(place, worst):
    numel = CHUNK + 5
    received, own, bad = random_grad(numel, 0), random_grad(numel, 1), torch.zeros((), dtype=torch.int32)
    received[place] = own[place] = worst
    reduce_adamw_cpu(random_state(FORMS[0], numel, 0), received, own, cpu_step(numel), bad=bad)
    assert bad == 1


def test_a_sum_that_is_large_in_all_is_not_bad():
    """The sum over a chunk, by which most chunks are found to be good, overflows here."""
    grad, bad = torch.full((64,), 1e38), torch.zeros((), dtype=torch.int32)
    reduce_adamw_cpu(random_state(FORMS[0], 64, 0), grad, grad, cpu_step(64), bad=bad)
    assert bad == 0


@by_form
def test_a_factor_multiplies_a_copy_of_the_gradient(form):
    numel = CHUNK + 5
    mine, theirs = (random_state(form, numel, 0) for _ in range(2))
    grad = random_grad(numel, 0)
    given = grad.clone()
    adamw_cpu(mine, grad, cpu_step(numel, factor=0.3))
    adamw_cpu(theirs, grad * 0.3, cpu_step(numel))
    assert_same_state(mine, theirs)
    assert_same_bits(grad, given)


@by_form
def test_a_scale_divides_gradients_of_narrow_states_in_place(form):
    numel = CHUNK + 5
    for dtype in (torch.float32, torch.bfloat16):
        mine, theirs = (random_state(form, numel, 0) for _ in range(2))
        grad = random_grad(numel, 0, dtype)
        divided = grad.float() / 3
        adamw_cpu(mine, grad, cpu_step(numel, grad_scale=3.0))
        adamw_cpu(theirs, divided, cpu_step(numel))
        assert_same_state(mine, theirs)
        assert_same_bits(grad, divided.to(dtype))


# The limit of an update


@by_form
@pytest.mark.parametrize("limit", [0.01, 0.5, 1e30])
def test_moments_of_a_limited_step_are_those_without_a_limit(form, limit):
    numel = CHUNK + 37
    limited, free = (random_state(form, numel, 0) for _ in range(2))
    grad, hyper = random_grad(numel, 0), HYPER._replace(max_update=limit)
    adamw_cpu(limited, grad, cpu_step(numel, hyper=hyper))
    adamw_cpu(free, grad, cpu_step(numel))
    for name in ("exp_avg", "exp_avg_sq", "avg_exponent", "sq_exponent"):
        if getattr(free, name) is not None:
            assert_same_bits(getattr(limited, name), getattr(free, name))


@pytest.mark.parametrize("limit", [0.01, 0.5])
def test_no_update_exceeds_the_limit(limit):
    """From weights of zero, where a change is not rounded once more."""
    numel = 1027
    state = random_state(FORMS[0], numel, 0)
    state.param.zero_()
    adamw_cpu(state, random_grad(numel, 0), cpu_step(numel, hyper=HYPER._replace(max_update=limit)))
    largest = torch.tensor(HYPER.lr * limit)
    assert state.param.abs().max() <= torch.nextafter(largest, torch.tensor(1.0))
    assert (state.param.abs() > 0.999 * largest).float().mean() > 0.1
    assert (state.param.abs() < 0.999 * largest).any()


def test_a_limited_step_is_that_of_the_reference_but_for_roundings():
    """The two formulas weight new gradients differently by 1.3e-5; see `test_reference_is_adamw`."""
    numel = 1027
    mine, theirs = (random_state(FORMS[0], numel, 0) for _ in range(2))
    hyper = HYPER._replace(max_update=0.5)
    adamw_cpu(mine, random_grad(numel, 0), cpu_step(numel, 5, hyper=hyper))
    adamw_reference(theirs, random_grad(numel, 0), one_row(numel, 5, hyper))
    torch.testing.assert_close(mine.param, theirs.param, rtol=2 * 2**-23, atol=1e-3 * 4e-5)


@by_form
def test_a_nan_is_not_limited(form):
    state, grad = random_state(form, 70, 0), random_grad(70, 0)
    grad[3] = float("nan")
    adamw_cpu(state, grad, cpu_step(70, hyper=HYPER._replace(max_update=1.0)))
    weight = state.weight()
    assert weight[3].isnan()
    assert weight[32:].isfinite().all()
    assert state.moments()[0][3].isnan()
    assert state.moments()[1][3].isnan()


def test_an_infinite_update_is_limited():
    """A first moment without a second one, and eps of zero: a division by zero."""
    state = State(torch.zeros(3), torch.tensor([1.0, -1.0, 0.0]), torch.zeros(3))
    hyper = HYPER._replace(eps=0.0, max_update=2.0)
    adamw_cpu(state, torch.zeros(3), cpu_step(3, hyper=hyper))
    torch.testing.assert_close(state.param, torch.tensor([-2e-3, 2e-3, float("nan")]), equal_nan=True)


@by_form
def test_threads_change_no_bit_of_a_step(form):
    numel = CHUNK + 37
    states = [random_state(form, numel, 0) for _ in range(2)]
    grad, before = random_grad(numel, 0), torch.get_num_threads()
    try:
        for state, count in zip(states, (1, 2), strict=True):
            torch.set_num_threads(count)
            adamw_cpu(state, grad, cpu_step(numel))
    finally:
        torch.set_num_threads(before)
    assert_same_state(*states)


def test_what_a_thread_keeps_serves_steps_of_any_size_and_mode():
    form = ("split24", "fp32")
    with torch.inference_mode():
        adamw_cpu(random_state(form, 64, 0), random_grad(64, 0), cpu_step(64))
    for numel in (CHUNK + 5, 33):
        assert_stepped_as_by_hand(random_state(form, numel, 0), random_grad(numel, 0))
