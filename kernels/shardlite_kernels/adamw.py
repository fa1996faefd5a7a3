"""AdamW on flat tensors, in place, with the arithmetic of PyTorch's fused optimizer on CUDA.

`adamw` updates weights with a gradient. `reduce_adamw` updates weights with the mean that a ring reduction's last hop
computes from the received partial sum and this rank's own summand. `add_rows_adamw` updates weights with the mean that
`add_rows` computes from the summands of all ranks (`rows.py`). Neither mean is written to memory.

Bytes per element, read and written, if weights and moments take `s` bytes (12 in fp32, 5.0625 with split weights and
codes) and a gradient takes `g` bytes: `adamw` moves `2*s + g + 1/16`, `reduce_adamw` `2*s + 2*g + 1/16` and
`add_rows_adamw` `2*s + W*g + 1/16`. The `1/16` is for the table of rows. In fp32 these are 28.06, 32.06 and, for 8
ranks, 56.06. If the gradient is divided by a scale, the quotient is also written. A skipped step reads, but writes
nothing.
Legend: `S` elements, `G = ceil(S / 32)` groups. All scalars are rounded to fp32 before they are used.

PyTorch on CUDA computes these lines, all in fp32 (read from the machine code of torch 2.11 to 2.13):

    decay = lr * weight_decay              bias1 = 1 - beta1^step            bias2 = 1 - beta2^step
    g = g / grad_scale                     only if `grad_scale` is given; written back
    p = fma(p, -decay, p)                  only if weight_decay is not zero
    m = fma(m, beta1, fma(g, -beta1, g))
    v = fma(v, beta2, fma(g*g, -beta2, g*g))
    p = p - (lr / bias1) * m / (sqrt(v) / sqrt(bias2) + eps)

The kernel computes the same lines, so it has PyTorch's bits for the same scalars, with two exceptions. First,
`beta^step` is correctly rounded here. PyTorch computes it by CUDA's `powf`, which is off by a few units in the last
place at most. So bits agree at step 1, at every step in which `powf` rounds correctly, and as soon as `beta2^step` is
negligible compared with 1. Second, the kernel does not multiply a weight if `decay` is zero. If `decay` is zero only
because `lr` is zero, PyTorch multiplies, and turns an infinite weight into NaN and -0 into 0.

Unlike PyTorch, the kernel can multiply the gradient by a factor first, and clamp the subtrahend of the last line to a
limit. A factor of 1 and an infinite limit change no bit. Narrow weights and moments are converted to fp32, updated in
fp32, and converted back, as `split.py` and `moments.py` describe. If moments are 8-bit codes, roots and quotients are
the device's approximations, off by two units in the last place at most, and the division by `sqrt(bias2)` is a
multiplication by its inverse.
"""

# ruff: noqa: N803 (compile-time constants of a kernel are written in capitals)

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from . import moments
from . import scalars as column
from .hop import check_divisor, divided_reference
from .launch import GROUP, SCALE_BLOCK, block_size, check_flat, jit, launch, tl, use_triton
from .moments import load_moments, store_avg, store_sq
from .noise import random_bits
from .rounding import fma_reference, load_fp32, ratio, store_rounded
from .rows import (
    TREE,
    UNSPECIALIZED,
    add_rows_reference,
    arguments_of,
    check_rows,
    row_of,
    sum_rows,
    sum_tree,
)
from .scalars import COLUMNS, WIDTH, Table
from .split import load_weight, split_reference, store_weight
from .state import State

GRADIENTS = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of gradients that are allowed with fp32 weights."""


@partial(jit, unspecialized=UNSPECIALIZED)
def _adamw_kernel(
    state: State,
    table: Table,
    grad_ptr: tl.tensor,
    received_ptr: tl.tensor,
    staged_ptr: tl.tensor,
    bad_ptr: tl.tensor,
    begin: tl.tensor,
    count: tl.tensor,
    stride: tl.tensor,
    shift: tl.tensor,
    start: tl.tensor,
    divisor: float,
    n: tl.tensor,
    UNROLL: tl.constexpr,
    STAGED: tl.constexpr,
    UNSCALE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    group = tl.program_id(0).to(tl.int64) * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)[:, None]
    offsets = group * GROUP + tl.arange(0, GROUP)[None, :]
    mask = offsets < n
    in_group = group * GROUP < n
    row = tl.load(table.rows + group, mask=in_group, other=0).to(tl.int64)
    if grad_ptr is None:  # `received`, and `staged`, have the rows of all ranks
        if STAGED == TREE:
            total = sum_tree(received_ptr, offsets, mask, stride, 0, UNROLL, False)
        else:
            places = begin, count, stride, shift, start
            total = sum_rows(received_ptr, staged_ptr, offsets, mask, *places, UNROLL, STAGED, False)
        total = tl.div_rn(total, divisor)
    else:
        total = load_fp32(grad_ptr, offsets, mask)
        if received_ptr is not None:
            total = tl.div_rn(load_fp32(received_ptr, offsets, mask) + total, divisor)
    step_block(state, table, grad_ptr, bad_ptr, total, row, group, offsets, mask, in_group, UNSCALE)


@jit
def step_block(
    state: tl.tuple,
    table: tl.tuple,
    grad_ptr: tl.tensor,
    bad_ptr: tl.tensor,
    total: tl.tensor,
    row: tl.tensor,
    group: tl.tensor,
    offsets: tl.tensor,
    mask: tl.tensor,
    in_group: tl.tensor,
    UNSCALE: tl.constexpr,
) -> None:
    """Update the elements at `offsets` [G, 32] of a state with their gradient `total`.

    `group` [G, 1] has the numbers of the groups, and `row` [G, 1] the number of each group's row of scalars. Elements
    outside of `mask` and groups outside of `in_group` are not accessed. The `total` of such elements must be zero, so
    that it increases no exponent. `grad_ptr` is only used to write back the gradient that was divided by its scale.
    """
    scalar = table.scalars + row * WIDTH
    beta1 = tl.load(scalar + column.BETA1)
    beta2 = tl.load(scalar + column.BETA2)
    eps = tl.load(scalar + column.EPS)
    decay = tl.load(scalar + column.DECAY)
    step_size = tl.load(scalar + column.STEP_SIZE)
    root_bias2 = tl.load(scalar + column.ROOT_BIAS2)
    limit = tl.load(scalar + column.LIMIT)
    factor = tl.load(scalar + column.FACTOR)
    active = tl.load(scalar + column.ACTIVE)

    # The gradient.
    g = total
    if UNSCALE:
        g = tl.div_rn(g, tl.load(scalar + column.GRAD_SCALE))
        unscaled = g
    g *= factor

    # The state.
    p = load_weight(state, offsets, mask)
    m, v = load_moments(state, offsets, group, mask, in_group)

    # The step.
    p = tl.where(decay != 0, tl.fma(p, -decay, p), p)  # avoids infinity times zero, which is NaN
    m = tl.fma(m, beta1, tl.fma(g, -beta1, g))
    squared = g * g
    v = tl.fma(v, beta2, tl.fma(squared, -beta2, squared))
    if (
        state.avg_exponent is not None
    ):  # approximations save half of the instructions, and their error is smaller than that of a code
        root = tl.sqrt(v)
        update = ratio(step_size * m, root * ratio(1.0, root_bias2) + eps)
    else:
        root = tl.sqrt_rn(v)
        update = tl.div_rn(step_size * m, tl.div_rn(root, root_bias2) + eps)
    update = tl.clamp(update, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    p -= update

    if bad_ptr is not None:  # after all loads, because the exchange between threads would delay later loads
        infinite = (total.to(tl.int32, bitcast=True) & 0x7F800000) == 0x7F800000
        if tl.max(tl.max((infinite & mask & (active != 0)).to(tl.int32), axis=1), axis=0) != 0:
            tl.store(bad_ptr, 1)  # concurrent writes store the same value

    # Inactive rows are masked. A branch would delay the loads until its condition is known.
    kept = mask & (active != 0)
    in_group = in_group & (active != 0)
    store_weight(state, offsets, p, kept)
    random = 0
    if state.exp_avg.dtype.element_ty != tl.float32:
        random = random_bits(table.first + offsets, tl.load(table.keys + row))
    store_avg(state, offsets, group, m, kept, in_group)
    store_sq(state, offsets, group, v, root, random, kept, in_group)
    if UNSCALE:
        store_rounded(grad_ptr, offsets, unscaled, kept)


def adamw(state: State, grad: Tensor, table: Table, *, unscale: bool = False, bad: Tensor | None = None) -> None:
    """Update weights and moments in place with a gradient. The host does not wait for the device.

    Args:
        state: weights [S], fp32 or split, and moments [S]. Elements whose row of `table` is inactive are not changed.
        grad: gradient [S], fp32, bf16 or fp16.
        table: the table with the scalars of the step.
        unscale: whether to first divide each element of `grad` in place by the `grad_scale` of the element's row.
        bad: optional output [], int32, set to 1 if the gradient of a stepped element is NaN or infinite.

    Raises:
        ValueError: shapes, devices or dtypes do not match, or tensors are on the CPU and Triton's interpreter is not in
            use. Use `adamw_cpu` on the CPU.
    """
    check_step("adamw", state, table, grad)
    _launch(state, table, bad, grad=grad, unscale=unscale)


def reduce_adamw(
    state: State, received: Tensor, own: Tensor, table: Table, *, divisor: int = 1, bad: Tensor | None = None
) -> None:
    """Update weights and moments in place with the gradient `(received + own) / divisor`.

    The gradient is computed in fp32 and never stored.

    Args:
        state: as for `adamw`.
        received: partial sum of other ranks [S], fp32, bf16 or fp16.
        own: summand of this rank [S], fp32, bf16 or fp16.
        table: as for `adamw`.
        divisor: from 1 to 2^24.
        bad: as for `adamw`.

    Raises:
        ValueError: as for `adamw`, or `divisor` is not from 1 to 2^24.
    """
    check_step("reduce_adamw", state, table, own, received)
    check_divisor("reduce_adamw", divisor)
    _launch(state, table, bad, grad=own, received=received, divisor=divisor)


def add_rows_adamw(
    state: State,
    rows: Tensor,
    table: Table,
    *,
    first: int | None = 0,
    divisor: int = 1,
    bad: Tensor | None = None,
    staged: Tensor | None = None,
    start: int = 0,
) -> None:
    """Update weights and moments in place with the gradient that `add_rows` computes. The gradient is never stored.

    Args:
        state: as for `adamw`.
        rows: [W, S], fp32, bf16 or fp16.
        table: as for `adamw`.
        first: as for `add_rows`.
        divisor: from 1 to 2^24.
        bad: as for `adamw`.
        staged, start: as for `add_rows`.

    Raises:
        ValueError: as for `adamw` and `add_rows`.
    """
    check_rows("add_rows_adamw", rows, first, staged)
    check_step("add_rows_adamw", state, table, row_of(rows, staged, start, state.param.numel()))
    check_divisor("add_rows_adamw", divisor)
    _launch(state, table, bad, *arguments_of(rows, first, staged, start), staged=staged, divisor=divisor)


def adamw_reference(
    state: State, grad: Tensor, table: Table, *, unscale: bool = False, bad: Tensor | None = None
) -> None:
    """Specification of `adamw`: the formulas in the docstring of this file, computed on any device."""
    numel = state.param.numel()
    each = table.scalars[table.row_of_each(numel)].unbind(1)  # in the order of `Scalars`
    beta1, beta2, eps, decay, step_size, root_bias2, limit, factor, grad_scale, active = each
    g = grad.float()
    if bad is not None and not g[active != 0].isfinite().all():
        bad.fill_(1)
    if unscale:
        g = g / grad_scale
        grad.copy_(torch.where(active != 0, g, grad.float()))
    g = g * factor
    p = state.weight()
    m, v = state.moments()
    p = torch.where(decay != 0, fma_reference(p, -decay, p), p)
    m = fma_reference(m, beta1, fma_reference(g, -beta1, g))
    squared = g * g
    v = fma_reference(v, beta2, fma_reference(squared, -beta2, squared))
    root = v.double().sqrt().float()  # PyTorch's fp32 square root on the CPU is sometimes off by one unit
    corrected = root / root_bias2 if state.avg_exponent is None else root * (1 / root_bias2)
    update = m * step_size / (corrected + eps)
    update = torch.where(update > limit, limit, torch.where(update < -limit, -limit, update))
    after = state.clone()
    if after.low is None:
        after.param.copy_(p - update)
    else:
        split_reference(after.param, after.low, p - update)
    moments.encode(m, v, *after.codes(), random=table.random_bits(numel))
    for old, new in zip(state.tensors(), after.tensors(), strict=True):
        changed = active[:: 1 if len(new) == numel else SCALE_BLOCK] != 0
        old.copy_(torch.where(changed, new, old))


def reduce_adamw_reference(
    state: State, received: Tensor, own: Tensor, table: Table, *, divisor: int = 1, bad: Tensor | None = None
) -> None:
    """Specification of `reduce_adamw`."""
    adamw_reference(state, divided_reference(received.float() + own.float(), divisor), table, bad=bad)


def add_rows_adamw_reference(
    state: State,
    rows: Tensor,
    table: Table,
    *,
    first: int | None = 0,
    divisor: int = 1,
    bad: Tensor | None = None,
    staged: Tensor | None = None,
    start: int = 0,
) -> None:
    """Specification of `add_rows_adamw`."""
    grad = torch.empty_like(state.param, dtype=torch.float32)
    add_rows_reference(grad, rows, first, divisor, None, staged, start)
    adamw_reference(state, grad, table, bad=bad)


def _launch(
    state: State,
    table: Table,
    bad: Tensor | None,
    received: Tensor | None = None,
    places: tuple[int, ...] = (0, 0, 0, 0, 0),
    unroll: int = 0,
    number: int = 0,
    *,
    grad: Tensor | None = None,
    staged: Tensor | None = None,
    divisor: int = 1,
    unscale: bool = False,
) -> None:
    """Launch the kernel with `grad` [S], with `grad` and `received` [S], or only with rows.

    The rows are in `received` [W, S], and in `staged` [D] if it is not `None`. `places`, `unroll` and `number` are
    those of `arguments_of`.
    """
    launch(
        _adamw_kernel,
        *(state, table, grad, received, staged, bad, *places),
        float(divisor),
        n=state.param.numel(),
        block=block_of(state, grad, received, unscale=unscale),
        UNROLL=unroll,
        STAGED=number,
        UNSCALE=unscale,
    )


def block_of(state: State, grad: Tensor | None, received: Tensor | None, *, unscale: bool = False) -> int:
    """Return the number of elements per program for which each thread writes 16 bytes of the widest tensor.

    Gradients are only read, so they do not count: if the state is narrow, a thread reads an fp32 gradient in two
    accesses. If moments have 8 bits, each thread of `adamw` steps twice as many elements. On an H200, `adamw` then
    reaches 0.86 of the bandwidth of a copy instead of 0.72 (split24 weights, fp32 gradient, 2^27 elements).
    """
    alone = received is None and not unscale
    return (1 + (alone and state.exp_avg.dtype is torch.int8)) * block_size(
        *(state.param, state.exp_avg), *([grad] if unscale and grad is not None else [])
    )


def check_step(who: str, state: State, table: Table, *grads: Tensor) -> None:
    """Check the arguments of a step. `grads` are the gradient, or the summands of the gradient.

    Raises:
        ValueError: shapes, devices or dtypes do not match, or tensors are on the CPU without Triton's interpreter.
    """
    param = state.param
    if not use_triton(param):
        raise ValueError(f"{who}: param is on the CPU: use adamw_cpu there, or set TRITON_INTERPRET=1")
    state.check(who)
    if state.low is None and param.dtype != torch.float32:
        raise ValueError(f"{who}: param on {param.device} must be fp32 or split, got {param.dtype}")
    for grad in grads:
        check_flat(who, "grad", grad, GRADIENTS, numel=param.numel(), device=param.device)
    groups = -(-param.numel() // SCALE_BLOCK)
    if table.first % SCALE_BLOCK:
        raise ValueError(f"{who}: first must be a multiple of {SCALE_BLOCK}, got {table.first}")
    check_flat(who, "rows", table.rows, (torch.int16, torch.int32), numel=groups, device=param.device)
    check_flat(who, "keys", table.keys, (torch.int32,), numel=len(table.scalars), device=param.device)
    if table.scalars.shape != (len(table.keys), COLUMNS) or not table.scalars.is_contiguous():
        raise ValueError(f"{who}: scalars must be [{len(table.keys)}, {COLUMNS}], got {tuple(table.scalars.shape)}")
    flat = table.scalars.view(-1)
    check_flat(who, "scalars", flat, (torch.float32,), numel=flat.numel(), device=param.device)
