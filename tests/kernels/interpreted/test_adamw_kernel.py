"""The AdamW kernels, run by Triton's interpreter, against their references: equal to the bit."""

from itertools import pairwise

import pytest
import torch
from shardlite_kernels import FORMATS, State, Table, use_triton
from shardlite_kernels.adamw import (
    adamw,
    adamw_reference,
    add_rows_adamw,
    add_rows_adamw_reference,
    reduce_adamw,
    reduce_adamw_reference,
)

from tests.kernels.adamw_cases import (
    FORMS,
    HYPER,
    INACTIVE,
    assert_same_state,
    awkward,
    groups,
    mixed_table,
    one_row,
    random_grad,
    random_state,
    state_of,
)
from tests.kernels.all_pairs import all_pairs
from tests.kernels.bits import assert_all_same_bits, assert_same_bits
from tests.kernels.rows_cases import exchanged_in_place

GRADIENTS = [torch.float32, torch.bfloat16, torch.float16]
NUMEL = 20_005  # more than one program; neither whole groups nor a multiple of 16
by_form = pytest.mark.parametrize("form", FORMS, ids="-".join)


def by_pairs(names, *factors):
    """Weights and moments are two factors: a form has one of each."""
    return pytest.mark.parametrize(("weights", "moments", *names), all_pairs(("whole", "split"), FORMATS, *factors))


def assert_adamw_is_the_reference(state, grad, table, unscale=False):
    """Return what became of state and gradient."""
    mine, theirs = state.clone(), state.clone()
    my_grad, their_grad = grad.clone(), grad.clone()
    given = [tensor.clone() for tensor in table[:3]]
    adamw(mine, my_grad, table, unscale=unscale)
    adamw_reference(theirs, their_grad, table, unscale=unscale)
    assert_same_state(mine, theirs)
    assert_same_bits(my_grad, their_grad)
    assert_all_same_bits(table[:3], given)
    return mine, my_grad


def assert_reduce_adamw_is_the_reference(state, received, own, table, divisor):
    """Return what became of the state, and whether the sum was bad."""
    mine, theirs = state.clone(), state.clone()
    my_bad, their_bad = torch.zeros(2, dtype=torch.int32)
    given = received.clone(), own.clone()
    reduce_adamw(mine, received, own, table, divisor=divisor, bad=my_bad)
    reduce_adamw_reference(theirs, received, own, table, divisor=divisor, bad=their_bad)
    assert_same_state(mine, theirs)
    assert_same_bits(my_bad, their_bad)
    assert_all_same_bits((received, own), given)
    return mine, bool(my_bad)


def active_elements(table, numel):
    return table.row_of_each(numel) != INACTIVE


def assert_changed_where_active(after, before, table):
    """Every weight but those of rows that are not active, and of these nothing at all."""
    numel = len(before.param)
    active = active_elements(table, numel)
    for new, old in zip(after.tensors(), before.tensors(), strict=True):
        still = ~active[:: 1 if len(new) == numel else 32]
        assert_same_bits(new[still], old[still])
    changed = after.weight() != before.weight()
    assert changed[active].float().mean() > 0.99
    assert not changed[~active].any()


@pytest.mark.usefixtures("fused")
@by_pairs(["unscale", "grad_dtype"], [False, True], GRADIENTS)
@pytest.mark.sample(2)
def test_adamw(weights, moments, unscale, grad_dtype):
    form = weights, moments
    state, grad, table = random_state(form, NUMEL, 0), random_grad(NUMEL, 0, grad_dtype), mixed_table(NUMEL)
    after, divided = assert_adamw_is_the_reference(state, grad, table, unscale)
    assert_changed_where_active(after, state, table)
    expected = torch.where(active_elements(table, NUMEL), grad.float() / 3, grad.float()) if unscale else grad
    assert_same_bits(divided, expected.to(grad_dtype))


@pytest.mark.usefixtures("fused")
@by_pairs(["divisor", "dtypes"], [1, 3, 4], [*((each, each) for each in GRADIENTS), tuple(GRADIENTS[:2])])
@pytest.mark.sample(2)
def test_reduce_adamw(weights, moments, divisor, dtypes):
    state, table = random_state((weights, moments), NUMEL, 0), mixed_table(NUMEL)
    received, own = (random_grad(NUMEL, seed, dtype) for seed, dtype in enumerate(dtypes))
    after, bad = assert_reduce_adamw_is_the_reference(state, received, own, table, divisor)
    assert_changed_where_active(after, state, table)
    assert not bad
    apart = state.clone()
    adamw_reference(apart, (received.float() + own.float()) / divisor, table)
    assert_same_state(after, apart)


@pytest.mark.usefixtures("fused")
@by_pairs(["weight_decay", "step"], [0.0, 0.1], [1, 2, 1000])
@pytest.mark.sample(2)
def test_one_row_of_scalars(weights, moments, weight_decay, step):
    table = one_row(NUMEL, step, HYPER._replace(weight_decay=weight_decay))
    assert_adamw_is_the_reference(random_state((weights, moments), NUMEL, step), random_grad(NUMEL, step), table)


@by_pairs(["unscale", "flag"], [False, True], [0.0, "-0.0"])
def test_what_is_not_active_stays(weights, moments, unscale, flag):
    state, grad = random_state((weights, moments), NUMEL, 0), random_grad(NUMEL, 0, torch.bfloat16)
    grad[::3] = float("nan")
    table = one_row(NUMEL, 7, active=float(flag), grad_scale=3.0)
    after, same = assert_adamw_is_the_reference(state, grad, table, unscale)
    assert_same_state(after, state)
    assert_same_bits(same, grad)


@pytest.mark.usefixtures("fused")
@by_pairs(["unscale", "weight_decay"], [False, True], [0.0, 0.1])
@pytest.mark.sample(2)
def test_awkward_numbers(weights, moments, unscale, weight_decay):
    *tensors, grad = awkward()
    form = weights, moments
    table = one_row(1003, 3, HYPER._replace(weight_decay=weight_decay), grad_scale=0.1)
    assert_adamw_is_the_reference(state_of(form, *tensors), grad, table, unscale)
    assert_adamw_is_the_reference(state_of(form, *tensors), grad, mixed_table(1003), unscale)


@pytest.mark.usefixtures("fused")
@by_form
def test_awkward_sums(form):
    *tensors, own = awkward()
    state, received = state_of(form, *tensors), own.roll(11)
    assert assert_reduce_adamw_is_the_reference(state, received, own, mixed_table(1003), 3)[1]


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("worst", [float("inf"), float("-inf"), float("nan"), 3e38])
@pytest.mark.parametrize("place", [0, 16_384, NUMEL - 1])
@pytest.mark.sample(2)
def test_one_bad_element_is_seen(place, worst):
    """Also where a sum is what overflows, and in the last, shorter program."""
    state, received, own = random_state(FORMS[0], NUMEL, 0), random_grad(NUMEL, 0), random_grad(NUMEL, 1)
    received[place] = own[place] = worst
    assert assert_reduce_adamw_is_the_reference(state, received, own, mixed_table(NUMEL), 2)[1]


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("form", "count", "first"),
    [
        *((form, 3, 1) for form in FORMS),
        *((FORMS[0], *each) for each in ((1, 0), (2, 0), (8, 7), (70, 3), (8, None), (128, None))),
    ],
)
@pytest.mark.sample(2)
def test_add_rows_adamw(dtype, form, count, first):
    numel = 1003
    rows = torch.stack([random_grad(numel, seed, dtype) for seed in range(count)])
    mine, theirs = (random_state(form, numel, 0) for _ in range(2))
    my_bad, their_bad = torch.zeros(2, dtype=torch.int32)
    add_rows_adamw(mine, rows, mixed_table(numel), divisor=count, first=first, bad=my_bad)
    add_rows_adamw_reference(theirs, rows, mixed_table(numel), divisor=count, first=first, bad=their_bad)
    assert_same_state(mine, theirs)
    assert my_bad == their_bad == 0


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("form", "count", "rank", "staged"),
    [*((form, 3, 1, 1003) for form in FORMS), (FORMS[0], 70, 3, 9027), (FORMS[0], 2, 0, 256)],
)
@pytest.mark.sample(3)
def test_add_rows_adamw_that_were_exchanged_in_place(dtype, form, count, rank, staged):
    """A part of a row at a time, a row, or several. Of a part of the elements, too."""
    numel = 1003
    rows = torch.stack([random_grad(numel, seed, dtype) for seed in range(count)])
    mine, theirs, plain = (random_state(form, numel, 0) for _ in range(3))
    table, given = mixed_table(numel), {"divisor": count}
    add_rows_adamw(mine, table=table, **exchanged_in_place(rows, rank, staged), **given)
    add_rows_adamw_reference(theirs, table=table, **exchanged_in_place(rows, rank, staged), **given)
    add_rows_adamw(plain, rows, table, first=(rank + 1) % count, **given)
    assert_same_state(mine, theirs)
    assert_same_state(mine, plain)
    places = exchanged_in_place(rows, rank, staged)
    for part in (slice(0, 160), slice(160, numel)):
        some = random_state(form, numel, 0).part(part.start, part.stop)
        add_rows_adamw(some, table=table.part(part.start, part.stop), **places, start=part.start, **given)
        assert_same_state(some, plain.part(part.start, part.stop))


def test_a_flag_that_is_up_stays_up():
    state, rows, bad = random_state(FORMS[0], 64, 0), torch.ones(3, 64), torch.zeros((), dtype=torch.int32)
    rows[1, 5] = float("inf")
    add_rows_adamw(state, rows, mixed_table(64), divisor=3, bad=bad)
    assert bad == 1
    reduce_adamw(state, rows[0], rows[0], one_row(64), bad=bad)
    assert bad == 1


def test_cpu_tensors_are_interpreted_here():
    assert use_triton(torch.empty(1))


@pytest.mark.parametrize("hyper", [HYPER._replace(weight_decay=0.0), HYPER._replace(lr=0.0)])
@pytest.mark.parametrize("weights", ["whole", "split"])
def test_without_decay_odd_weights_are_left_alone(weights, hyper):
    param, zeros = torch.tensor([-0.0, 0.0, float("inf"), float("-inf"), float("nan")]), torch.zeros(5)
    state = state_of((weights, "fp32"), param, zeros, zeros)
    after, _ = assert_adamw_is_the_reference(state, zeros, one_row(5, hyper=hyper))
    assert_same_bits(after.weight(), param)


@by_form
def test_nothing_is_written_beyond_the_end(form):
    """Seventeen elements in the middle of buffers that are full of something else, and none at all."""
    rest = random_state(form, 96, 5)
    buffers, grad = rest.clone(), torch.full((96,), 7.0)
    part = buffers.part(32, 49)
    inside = random_state(form, 17, 0)
    for tensor, value in zip(part.tensors(), inside.tensors(), strict=True):
        tensor.copy_(value)
    adamw(part, grad[32:49], one_row(17, grad_scale=2.0), unscale=True)
    reduce_adamw(buffers.part(0, 0), grad[:0], grad[:0], one_row(0))
    assert (part.weight() != inside.weight()).all()
    assert (grad[32:49] == 3.5).all()
    assert (torch.cat([grad[:32], grad[49:]]) == 7).all()
    for start, stop in ((0, 32), (64, 96)):
        assert_same_state(buffers.part(start, stop), rest.part(start, stop))
    for got, before in zip(buffers.tensors(), rest.tensors(), strict=True):
        if len(got) == 96:
            assert_same_bits(got[49:64], before[49:64])


@pytest.mark.usefixtures("fused")
@by_pairs(["reduce"], [False, True])
@pytest.mark.sample(2)
def test_results_do_not_depend_on_how_a_state_is_cut(weights, moments, reduce):
    """Neither on the cuts of launches, nor on those of programs: the random bits of an element are its own."""
    whole, table = random_state((weights, moments), NUMEL, 0), mixed_table(NUMEL)
    grad, received = random_grad(NUMEL, 0), random_grad(NUMEL, 1)

    def step(state, table, start, stop):
        if reduce:
            reduce_adamw(state, received[start:stop], grad[start:stop], table, divisor=3)
        else:
            adamw(state, grad[start:stop], table)

    parts = whole.clone()
    step(whole, table, 0, NUMEL)
    cuts = [0, 32, 96, 4096, 16_384 + 64, 19_968, NUMEL]
    for start, stop in pairwise(cuts):
        step(parts.part(start, stop), table.part(start, stop), start, stop)
    assert_same_state(parts, whole)


def test_rows_may_be_many():
    state, table = random_state(FORMS[0], 200, 0), mixed_table(200)
    wide = table._replace(rows=table.rows.to(torch.int32))
    mine, theirs = state.clone(), state.clone()
    adamw(mine, random_grad(200, 0), wide)
    adamw(theirs, random_grad(200, 0), table)
    assert_same_state(mine, theirs)


# Errors

X, ROW = torch.zeros(40), one_row(40)
INT8 = state_of(("split", "int8"), X, X, X)


@pytest.mark.parametrize(
    ("state", "grad", "table", "message"),
    [
        (State(*[X.double()] * 3), X.double(), ROW, r"must be fp32 or split, got torch\.float64"),
        (State(X, torch.zeros(41), X), X, ROW, "exp_avg must have 40 elements on cpu, got 41"),
        (State(X, X, X.bfloat16()), X, ROW, "exp_avg_sq must be fp32, got torch.bfloat16"),
        (State(X, X, X.view(2, 20)), X, ROW, "exp_avg_sq must be 1-D and contiguous"),
        (
            State(X, X.half(), X.half()),
            X,
            ROW,
            r"moments in torch\.float16 cannot be combined with a param in torch\.float32",
        ),
        (State(X, X, X), X[:39], ROW, "grad must have 40 elements"),
        (State(X, X, X), X.double(), ROW, "grad must be fp32, bf16 or fp16, got torch.float64"),
        (INT8._replace(sq_exponent=None), X, ROW, "moments in int8 codes need exponents"),
        (INT8._replace(sq_exponent=torch.zeros(1, dtype=torch.uint8)), X, ROW, "sq_exponent must have 2 elements"),
        (INT8._replace(param=X), X, ROW, "param must be bf16, got torch.float32"),
        (State(X, X, X), X, ROW._replace(rows=torch.zeros(1, dtype=torch.int16)), "rows must have 2 elements"),
        (State(X, X, X), X, ROW._replace(rows=torch.zeros(2)), r"rows must be int16 or int32, got torch\.float32"),
        (State(X, X, X), X, ROW._replace(first=16), "first must be a multiple of 32, got 16"),
        (State(X, X, X), X, ROW._replace(keys=torch.zeros(1)), "keys must be int32, got torch.float32"),
        (State(X, X, X), X, ROW._replace(scalars=torch.zeros(1, 7)), r"scalars must be \[1, 10\]"),
        (State(X, X, X), X, ROW._replace(scalars=ROW.scalars.double()), "scalars must be fp32, got torch.float64"),
        (State(X, X, X), X, ROW._replace(scalars=torch.zeros(1, 20)[:, ::2]), "scalars"),
    ],
)
def test_errors_name_what_does_not_fit(state, grad, table, message):
    with pytest.raises(ValueError, match=message):
        adamw(state, grad, table)
    with pytest.raises(ValueError, match=message):
        reduce_adamw(state, X if len(grad) < 40 else grad, grad, table)


def test_both_parts_of_a_sum_must_fit():
    with pytest.raises(ValueError, match="reduce_adamw: grad must have 40 elements"):
        reduce_adamw(State(X, X, X), torch.zeros(39), X, ROW)


def test_a_table_is_cut_with_its_state():
    table = Table(torch.arange(4, dtype=torch.int16), torch.zeros(4, dtype=torch.int32), torch.zeros(4, 10), first=64)
    part = table.part(32, 100)
    assert (part.rows.tolist(), part.first) == ([1, 2, 3], 96)
    assert part.row_of_each(68).tolist() == [1] * 32 + [2] * 32 + [3] * 4
    assert groups(68) == 3
