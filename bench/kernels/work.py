"""Works (`bench.kernels.clock.Work`) that measure single kernels of ShardLite.

The results of a kernel must have the bits of its reference. The exceptions are sums of squares and, on a GPU, 8-bit
moments, because the kernel for 8-bit moments uses the device's approximations. On the CPU, the expected step decodes
with the reference, applies PyTorch's operator to fp32 tensors, and encodes with the reference.

Legend: `S` elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from shardlite_kernels import FORMATS, State, add_rows, cast, hop, new_stats, split, stats, stats_block
from shardlite_kernels.adamw import adamw, adamw_reference, add_rows_adamw, reduce_adamw
from shardlite_kernels.adamw_cpu import adamw_cpu, add_rows_adamw_cpu, reduce_adamw_cpu
from shardlite_kernels.cast import cast_reference
from shardlite_kernels.hop import hop_reference
from shardlite_kernels.launch import SCALE_BLOCK
from shardlite_kernels.moments import encode
from shardlite_kernels.quantize import dequantize, dequantize_reference, quantize, quantize_reference
from shardlite_kernels.rows import add_rows_reference
from shardlite_kernels.scale import scale, scale_reference
from shardlite_kernels.split import join, join_reference, split_reference
from shardlite_kernels.stats import stats_reference
from torch import Tensor

from bench.kernels.clock import Result, Run, Work
from bench.kernels.inputs import (
    HYPER,
    MASTERS,
    STEP,
    by_kernels,
    cpu_step,
    gradient,
    nbytes,
    numbers,
    state_of,
    table,
)

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}

ROWS = 8
"""Number of ranks whose parts of a segment are added in one call."""

DIVISOR = 7
"""Divisor of the sum. Its reciprocal is not exact, so a kernel that multiplies instead of dividing gives other bits."""

WEIGHT_BOUND = 2.0**-22
"""Bound for fp32 weights. A step changes them by about 1e-3, so the update may have a relative error of 2^-12."""

SPLIT_BOUND = 2.0**-17
"""Bound for split weights: the rounding error of `split`."""

_CODES_BOUND = 2.0**-10  # one code in a thousand may be the next code, which differs by at most 1/127


def works(device: torch.device) -> Iterator[Work]:
    """Yield ShardLite's works for a device. On the CPU, narrow gradients are measured with only two formats."""
    for master, moments, dtype in product(MASTERS, FORMATS, NAMES):
        if by_kernels(device) or dtype == torch.float32 or moments == "fp32":
            yield _adamw(master, moments, dtype, device)
    for wire, (master, moments) in product(NAMES, (("fp32", "fp32"), ("split24", "fp32"), ("split24", "int8"))):
        if by_kernels(device) or wire == torch.float32 or master == "fp32":
            yield _reduced("reduce_adamw", master, moments, wire)
            yield _reduced("hop, adamw", master, moments, wire)
            yield _rows_adamw(master, moments, wire)
    for dtype in NAMES:
        yield from (_hop(dtype, False), _hop(dtype, True), _scale(dtype, 1.0), _scale(dtype, 0.99))
        yield from (_rows(dtype, tree=False), _rows(dtype, tree=True), _stats(dtype))
        yield from (_quantize(dtype), _dequantize(dtype))
    yield Work(system="shardlite", operation="cast", format="fp32 to bf16", make=_make_cast)
    yield Work(system="shardlite", operation="split", format="fp32 to bf16 and 8 bits", make=_make_split)
    yield Work(system="shardlite", operation="join", format="bf16 and 8 bits to fp32", make=_make_join)


def step_by(state: State, grad: Tensor) -> Callable[[], None]:
    """Return a function that steps `state` [S] with a gradient [S] on its device."""
    if by_kernels(grad.device):
        rows = table(grad.numel(), grad.device)
        return lambda: adamw(state, grad, rows)
    step = cpu_step(grad.numel())
    return lambda: adamw_cpu(state, grad, step)


def after(state: State, grad: Tensor) -> State:
    """Return `state` [S] after a step with a gradient [S], computed by the specification."""
    new, numel = state.clone(), grad.numel()
    rows = table(numel, grad.device)
    if by_kernels(grad.device):
        adamw_reference(new, grad, rows)
        return new
    p, (m, v) = new.weight(), new.moments()
    steps, hyper = [torch.tensor(float(STEP))], HYPER._asdict()
    del hyper["max_update"]
    torch._fused_adamw_([p], [grad.float()], [m], [v], [], steps, **hyper, amsgrad=False, maximize=False)
    if new.low is not None:
        split_reference(new.param, new.low, p)
    if m is not new.exp_avg:
        encode(m, v, *new.codes(), random=rows.random_bits(numel))
    return new


def _compared(state: State) -> list[Result]:
    """Return the results of a state. They must be bit-equal unless the kernel uses approximations."""
    if state.avg_exponent is None or not by_kernels(state.param.device):
        return [Result(tensor) for tensor in state.tensors()]
    m, v = state.moments()
    bound = WEIGHT_BOUND if state.low is None else SPLIT_BOUND
    return [Result(state.weight(), bound), Result(m, _CODES_BOUND), Result(v, _CODES_BOUND)]


def _stepped(state: State, step: Callable[[], object], gradient: Callable[[], Tensor], *read: Tensor | None) -> Run:
    """Return a run that steps `state`. `gradient()` returns the gradient, which the step computes from `read`."""
    return Run(
        step=step,
        results=lambda: _compared(state),
        expected=lambda: [result.tensor for result in _compared(after(state, gradient()))],
        moved=2 * nbytes(*state.tensors()) + nbytes(*read),
        held=nbytes(*state.tensors(), *read),
    )


def _format(master: str, moments: str, dtype: torch.dtype) -> str:
    return f"{master} weights, {moments} moments, {NAMES[dtype]} gradient"


def _adamw(master: str, moments: str, dtype: torch.dtype, device: torch.device) -> Work:
    def make(numel: int, device: torch.device) -> Run:
        state, grad = state_of(master, moments, numel, device), gradient(numel, device, dtype)
        return _stepped(state, step_by(state, grad), lambda: grad, grad)

    on_cpu, exact = not by_kernels(device), (master, moments) == ("fp32", "fp32")
    cpu_goal = {("fp32", "fp32"): 1.05, ("split24", "fp32"): 1.7}.get((master, moments))
    share = 0.92 if exact else 0.8 if (master, moments) == ("split24", "int8") else None
    return Work(
        system="shardlite",
        operation="adamw",
        format=_format(master, moments, dtype),
        make=make,
        at_most=cpu_goal if on_cpu and dtype == torch.float32 else None,
        share_at_least=None if on_cpu else share,
    )


def _reduced(operation: str, master: str, moments: str, wire: torch.dtype) -> Work:
    """Return a work that runs the last hop of a reduction and the step, fused or as separate kernels."""

    def make(numel: int, device: torch.device) -> Run:
        state = state_of(master, moments, numel, device)
        received, own = (gradient(numel, device, wire, seed) for seed in (5, 6))
        fused = operation == "reduce_adamw"
        total = torch.empty_like(own) if not fused else None
        if total is not None:
            step = _apart(state, received, own, total)
        elif by_kernels(device):
            step = partial(reduce_adamw, state, received, own, table(numel, device))
        else:
            step = partial(reduce_adamw_cpu, state, received, own, cpu_step(numel))

        def grad() -> Tensor:
            return received.float() + own.float() if fused else received + own

        run = _stepped(state, step, grad, received, own, total)
        return replace(run, moved=run.moved + nbytes(total))  # the sum of the hop is also written and read

    return Work(system="shardlite", operation=operation, format=_format(master, moments, wire), make=make)


def _apart(state: State, received: Tensor, own: Tensor, total: Tensor) -> Callable[[], None]:
    step = step_by(state, total)

    def apart() -> None:
        hop(total, received, own)
        step()

    return apart


def _run(step: Callable[[], object], reference: Callable[..., object], *results: Result, moved: int) -> Run:
    """Return a run whose expected values are computed by a reference, in tensors like the results."""

    def expected() -> list[Tensor]:
        right = [torch.empty_like(result.tensor) for result in results]
        reference(*right)
        return right

    return Run(step=step, results=lambda: results, expected=expected, moved=moved, held=moved)


def _sums(rows: Tensor, of: Tensor) -> Result:
    return Result(rows, (stats_block(of) + 3) * 2.0**-24)


def _hop(dtype: torch.dtype, with_stats: bool) -> Work:
    def make(numel: int, device: torch.device) -> Run:
        received, own = (gradient(numel, device, dtype, seed) for seed in (5, 6))
        out = torch.empty_like(own)
        rows = [new_stats(out)] if with_stats else []
        return _run(
            lambda: hop(out, received, own, 1, *rows),
            lambda right, *sums: hop_reference(right, received, own, 1, *sums),
            Result(out),
            *(_sums(each, out) for each in rows),
            moved=nbytes(received, own, out, *rows),
        )

    operation = "hop with statistics" if with_stats else "hop"
    return Work(system="shardlite", operation=operation, format=NAMES[dtype], make=make)


def _scale(dtype: torch.dtype, factor: float) -> Work:
    """Return a multiplication by `factor`. The factor keeps numbers normal, and is 1 in all dtypes or in none."""

    def make(numel: int, device: torch.device) -> Run:
        x, by = gradient(numel, device, dtype), torch.tensor(factor, device=device)
        moved = 0 if factor == 1 else 2 * nbytes(x)
        run = _run(lambda: scale(x, by), lambda right: scale_reference(right.copy_(x), by), Result(x), moved=moved)
        return replace(run, held=nbytes(x))

    return Work(system="shardlite", operation=f"scale by {factor:g}", format=NAMES[dtype], make=make)


def _draw_rows(numel: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return one row for each of `ROWS` ranks, [W, S]."""
    rows = torch.empty(ROWS, numel, dtype=dtype, device=device)
    for seed, row in enumerate(rows):
        row.copy_(gradient(numel, device, dtype, seed))
    return rows


def _rows(dtype: torch.dtype, *, tree: bool) -> Work:
    """Return the exact reduction of a segment to fp32, in the ring order of rank 0 or as a tree, with statistics."""

    def make(numel: int, device: torch.device) -> Run:
        rows, out = _draw_rows(numel, device, dtype), torch.empty(numel, device=device)
        first, sums = (None if tree else 1), new_stats(out)

        return _run(
            lambda: add_rows(out, rows, first, DIVISOR, sums),
            lambda right, right_sums: add_rows_reference(right, rows, first, DIVISOR, right_sums),
            Result(out),
            _sums(sums, out),
            moved=nbytes(rows, out, sums),
        )

    order = "as a tree" if tree else "in ring order"
    return Work(system="shardlite", operation=f"add {ROWS} rows {order}", format=f"{NAMES[dtype]} to fp32", make=make)


def _rows_adamw(master: str, moments: str, wire: torch.dtype) -> Work:
    """Return the exact reduction of a segment, fused with the step."""

    def make(numel: int, device: torch.device) -> Run:
        state, rows = state_of(master, moments, numel, device), _draw_rows(numel, device, wire)
        if by_kernels(device):
            step = partial(add_rows_adamw, state, rows, table(numel, device), first=1, divisor=DIVISOR)
        else:
            step = partial(add_rows_adamw_cpu, state, rows, cpu_step(numel), first=1, divisor=DIVISOR)

        def mean() -> Tensor:
            out = torch.empty(numel, device=device)
            add_rows_reference(out, rows, 1, DIVISOR)
            return out

        return _stepped(state, step, mean, rows)

    operation = f"add {ROWS} rows and adamw"
    return Work(system="shardlite", operation=operation, format=_format(master, moments, wire), make=make)


def _stats(dtype: torch.dtype) -> Work:
    def make(numel: int, device: torch.device) -> Run:
        x = gradient(numel, device, dtype)
        rows, moved = new_stats(x), nbytes(x, new_stats(x))
        return _run(lambda: stats(x, rows), lambda right: stats_reference(x, right), _sums(rows, x), moved=moved)

    return Work(system="shardlite", operation="statistics", format=NAMES[dtype], make=make)


def _codes(numel: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return empty 8-bit codes and their scales [G], padded to a multiple of 32 elements."""
    groups = -(-numel // SCALE_BLOCK)
    codes = torch.empty(groups * SCALE_BLOCK, dtype=torch.int8, device=device)
    return codes, torch.empty(groups, dtype=torch.uint8, device=device)


def _quantize(dtype: torch.dtype) -> Work:
    def make(numel: int, device: torch.device) -> Run:
        codes, scales = _codes(numel, device)
        source = gradient(len(codes), device, dtype)
        return _run(
            lambda: quantize(codes, scales, source),
            lambda *right: quantize_reference(*right, source),
            Result(codes),
            Result(scales),
            moved=nbytes(source, codes, scales),
        )

    return Work(system="shardlite", operation="quantize", format=f"{NAMES[dtype]} to 8 bits", make=make)


def _dequantize(dtype: torch.dtype) -> Work:
    def make(numel: int, device: torch.device) -> Run:
        codes, scales = _codes(numel, device)
        quantize_reference(codes, scales, gradient(len(codes), device, torch.float32))
        out = torch.empty(len(codes), dtype=dtype, device=device)
        return _run(
            lambda: dequantize(out, codes, scales),
            lambda right: dequantize_reference(right, codes, scales),
            Result(out),
            moved=nbytes(codes, scales, out),
        )

    return Work(system="shardlite", operation="dequantize", format=f"8 bits to {NAMES[dtype]}", make=make)


def _make_split(numel: int, device: torch.device) -> Run:
    source = numbers(numel, device, 2)
    parts = torch.empty_like(source, dtype=torch.bfloat16), torch.empty_like(source, dtype=torch.int8)
    return _run(
        lambda: split(*parts, source),
        lambda *right: split_reference(*right, source),
        *map(Result, parts),
        moved=nbytes(source, *parts),
    )


def _make_join(numel: int, device: torch.device) -> Run:
    out = numbers(numel, device, 2)
    parts = torch.empty_like(out, dtype=torch.bfloat16), torch.empty_like(out, dtype=torch.int8)
    split_reference(*parts, out)
    moved = nbytes(out, *parts)
    return _run(lambda: join(out, *parts), lambda right: join_reference(right, *parts), Result(out), moved=moved)


def _make_cast(numel: int, device: torch.device) -> Run:
    source = numbers(numel, device, 2)
    out = torch.empty_like(source, dtype=torch.bfloat16)
    moved = nbytes(source, out)
    return _run(lambda: cast(out, source), lambda right: cast_reference(right, source), Result(out), moved=moved)
