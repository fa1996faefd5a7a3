"""Shared by the tests of AdamW's kernels: states in all six formats, tables of rows, and comparisons."""

from itertools import product

import torch
from shardlite_kernels import FORMATS, SCALE_BLOCK, Hyper, State, Table
from shardlite_kernels.adamw_cpu import CpuStep
from shardlite_kernels.moments import encode
from shardlite_kernels.noise import keys
from shardlite_kernels.scalars import adamw_scalars, adamw_scalars_reference, hyper_table
from shardlite_kernels.split import split_reference

from tests.kernels.bits import assert_same_bits, pairs

CPU = torch.device("cpu")
HYPER = Hyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1)
FORMS = list(product(("whole", "split"), FORMATS))
"""How weights and moments are kept."""


def state_of(form, param, exp_avg, exp_avg_sq):
    """A state [S] that stands for these fp32 numbers, rounded to nearest; nothing is shared with them."""
    weights, moments = form
    param, low = param.clone(), None
    if weights == "split":
        high, low = torch.empty_like(param, dtype=torch.bfloat16), torch.empty_like(param, dtype=torch.int8)
        split_reference(high, low, param)
        param = high
    avg, sq, exponents = torch.empty_like(exp_avg, dtype=FORMATS[moments]), torch.empty_like(exp_avg_sq), (None, None)
    if moments == "int8":
        exponents = tuple(torch.zeros(groups(len(param)), dtype=torch.uint8) for _ in range(2))
    sq = torch.empty_like(sq, dtype=torch.uint8 if moments == "int8" else avg.dtype)
    encode(exp_avg, exp_avg_sq, avg, sq, *exponents, random=None)
    state = State(param, avg, sq, low, *exponents)
    state.check("test")
    return state


def groups(numel):
    return -(-numel // SCALE_BLOCK)


def random_state(form, numel, seed):
    generator = torch.Generator().manual_seed(seed)
    param, exp_avg, exp_avg_sq = torch.randn(3, numel, generator=generator)
    return state_of(form, param, exp_avg * 0.1, (exp_avg_sq * 0.1) ** 2)


def awkward(numel=1003):
    """Numbers that are hard to round: a weight, its moments, and a gradient."""
    param, grad = pairs(numel, seed=3)
    exp_avg, exp_avg_sq = (tensor.roll(7) for tensor in pairs(numel, seed=4))
    return param, exp_avg, exp_avg_sq.abs(), grad


def random_grad(numel, seed, dtype=torch.float32):
    return torch.randn(numel, generator=torch.Generator().manual_seed(1000 + seed)).to(dtype)


# What may differ between the rows of one launch: a step, and hyper-parameters; the fourth row is not active.
ROWS = [
    (1, HYPER),
    (7, HYPER._replace(lr=1e-2, weight_decay=0.0)),
    (2, HYPER._replace(beta2=0.95, max_update=0.5)),
    (3, HYPER._replace(lr=1.0)),
    (1000, HYPER._replace(beta1=0.0, eps=1e-3, max_update=2.0)),
]
INACTIVE = 3


def mixed_table(numel, seed=0, first=64):
    """Every group of 32 elements belongs to one of `ROWS`."""
    steps = torch.tensor([float(step) for step, _ in ROWS])
    active = torch.ones(len(ROWS))
    active[INACTIVE] = 0
    scalars = adamw_scalars(
        steps,
        hyper_table([hyper for _, hyper in ROWS], CPU),
        active=active,
        factor=torch.tensor([1.0, 0.7, 1.0, 1.0, 1e-3]),
        grad_scale=torch.tensor(3.0),
    )
    numbers = torch.arange(len(ROWS))
    rows = torch.randint(0, len(ROWS), (groups(numel),), generator=torch.Generator().manual_seed(seed))
    return Table(rows.to(torch.int16), keys(steps, numbers, -640 * numbers), scalars, first)


def one_row(numel, step=1, hyper=HYPER, first=0, number=0, **flags):
    """All elements belong to one parameter, which starts at position 0."""
    scalars = torch.tensor([adamw_scalars_reference(step, hyper, **flags)])
    key = keys(torch.tensor([float(step)]), torch.tensor([number]), torch.zeros(1, dtype=torch.int64))
    return Table(torch.zeros(groups(numel), dtype=torch.int16), key, scalars, first)


def cpu_step(numel, number=3, hyper=HYPER, **options):
    """With keys, which narrow moments need."""
    return CpuStep(number=number, hyper=hyper, table=one_row(numel, number, first=64), **options)


def torch_fused(param):
    betas = (HYPER.beta1, HYPER.beta2)
    return torch.optim.AdamW([param], HYPER.lr, betas, HYPER.eps, HYPER.weight_decay, fused=True)


def assert_same_state(got, expected):
    for name, mine, theirs in zip(State._fields, got, expected, strict=True):
        assert (mine is None) == (theirs is None), name
        if mine is not None:
            assert_same_bits(mine, theirs)
