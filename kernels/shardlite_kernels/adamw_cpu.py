"""Run AdamW on the CPU by PyTorch's operator, with the bits of `torch.optim.AdamW(fused=True)` on the same tensors.

On the CPU the operator is limited by memory bandwidth. Split weights, narrow moments and gradients that are sums have
to be computed from stored tensors before the operator runs. In these cases, the operator runs on one chunk after the
other. A chunk stays in the cache until it is written back, and no whole tensor is converted.

Legend: `S` elements.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import inf, sqrt
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from .adamw import GRADIENTS
from .hop import hop
from .launch import check_flat
from .moments import encode
from .rows import add_rows, check_rows, row_of
from .scalars import Hyper, Table
from .split import join_on_cpu, split_on_cpu
from .state import State

_WEIGHTS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_CHUNK = 1 << 19
"""Number of elements per chunk. The division into chunks changes no bit, because the length is a multiple of 32 (see
"Lengths on the CPU" in `kernels/README.md`)."""

_NARROW_CHUNK = 1 << 17
"""Number of elements per chunk if moments are narrow. Decoding and encoding need a dozen temporaries of this length.
"""


class _CpuMemory(dict[tuple[str, torch.dtype], Tensor]):
    """The buffers that one thread keeps, by name and dtype."""

    __hash__ = object.__hash__  # type: ignore[assignment]  # members of a set must be hashable


_all_kept: WeakSet[_CpuMemory] = WeakSet()


def chunk_memory() -> list[Tensor]:
    """Return the buffers that the threads of this process keep for the chunks of CPU steps."""
    return [buffer for kept in list(_all_kept) for buffer in list(kept.values())]


def chunk_nbytes(numel: int, *, split: bool, narrow: bool, sums: bool) -> int:
    """Return the bytes of the buffers that a thread keeps after steps.

    Args:
        numel: number of elements of the longest state that one call has stepped.
        split: whether weights are split.
        narrow: whether moments are narrow.
        sums: whether gradients are sums (`reduce_adamw_cpu`, `add_rows_adamw_cpu`).
    """
    itemsize = split * (torch.float32.itemsize + torch.int32.itemsize) + sums * torch.float32.itemsize
    return min(numel, _NARROW_CHUNK if narrow else _CHUNK) * itemsize


_TEMPORARIES = {"fp32": 0.0, "bf16": 25.0, "int8": 40.25}
"""Peak of the temporary tensors that decode and encode moments, in bytes per element of a chunk, for each format."""


def temporary_nbytes(numel: int, moments: str) -> int:
    """Return the peak in bytes of a step's temporary tensors, for `numel` elements and a format of moments."""
    return round(min(numel, _NARROW_CHUNK) * _TEMPORARIES[moments])


class _Buffers(threading.local):
    """Buffers that each thread keeps from step to step, because new pages would take as long as updating a chunk."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, torch.dtype], Tensor] = _CpuMemory()
        _all_kept.add(self._kept)

    def of(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a buffer for `numel` elements of a chunk."""
        buffer = self._kept.get((name, dtype))
        if buffer is None or len(buffer) < numel:
            with torch.inference_mode(False):  # later steps may run outside of inference mode
                buffer = torch.empty(numel, dtype=dtype, device="cpu")
            # In a dispatch mode, the buffer may have another type. Such a buffer is invalid after the mode, so it is
            # not kept.
            if type(buffer) is Tensor:
                self._kept[name, dtype] = buffer
        return buffer[:numel]


_buffers = _Buffers()


@dataclass(frozen=True, kw_only=True)
class CpuStep:
    """The numbers of one step that are equal for all its elements."""

    number: float
    """Number of this update, from 1."""

    hyper: Hyper
    factor: float = 1.0
    """Factor by which gradients are multiplied. The products are not written back."""

    grad_scale: float | None = None
    """Divisor of gradients, which is applied before `factor`. The quotients are written back."""

    table: Table | None = None
    """Table with the keys of stochastic rounding. Narrow moments need it."""

    def __post_init__(self) -> None:
        """Validate the number and the betas.

        Raises:
            ValueError: the number is less than 1, or a beta is not in [0, 1) in fp32.
        """
        if self.number < 1:
            raise ValueError(f"adamw_cpu: update numbers start at 1, got {self.number}")
        self.hyper.check()

    @cached_property
    def operator(self) -> Callable[[Tensor, Tensor, Tensor, Tensor], None]:
        """Function that updates tensors by PyTorch's operator, and divides gradients by `grad_scale`."""
        return _operator(self, self.grad_scale)


def adamw_cpu(state: State, grad: Tensor, step: CpuStep, *, bad: Tensor | None = None) -> None:
    """Update weights and moments in place with a gradient.

    Args:
        state: weights and moments [S], all in fp32, fp64, bf16 or fp16, or in the narrow formats.
        grad: gradient [S] in the dtype of the weights. If weights are computed in fp32, bf16 and fp16 are also allowed.
        step: constants of the step.
        bad: optional output [], int32, set to 1 if the gradient has a NaN or infinity.

    Raises:
        ValueError: shapes, devices or dtypes do not match.
    """
    weight = _check("adamw_cpu", state, step, grad)
    _look(grad, bad)
    if state.exact and grad.dtype == weight and step.factor == 1 and step.hyper.max_update == inf:
        step.operator(state.param, grad, state.exp_avg, state.exp_avg_sq)
    else:
        _by_chunks(state, (_unscaled(chunk, weight, step) for chunk in torch.split(grad, _chunk_of(state))), step)


def reduce_adamw_cpu(
    state: State, received: Tensor, own: Tensor, step: CpuStep, *, divisor: int = 1, bad: Tensor | None = None
) -> None:
    """Update weights and moments in place with the gradient `(received + own) / divisor`, chunk by chunk.

    Args:
        state: as for `adamw_cpu`.
        received: partial sum of other ranks [S].
        own: summand of this rank [S].
        step: constants of the step.
        divisor: from 1 to 2^24.
        bad: as for `adamw_cpu`.

    Raises:
        ValueError: as for `adamw_cpu` and `hop`.
    """
    weight = _check("reduce_adamw_cpu", state, step, received, own)
    pairs = zip(*(torch.split(each, _chunk_of(state)) for each in (received, own)), strict=True)
    hops = (partial(hop, received=partial_sum, own=mine, divisor=divisor) for partial_sum, mine in pairs)
    _by_chunks(state, _sums(hops, state, weight, bad), step)


def add_rows_adamw_cpu(
    state: State,
    rows: Tensor,
    step: CpuStep,
    *,
    first: int | None = 0,
    divisor: int = 1,
    bad: Tensor | None = None,
    staged: Tensor | None = None,
    start: int = 0,
) -> None:
    """Update weights and moments in place with the gradient that `add_rows` computes, chunk by chunk.

    Args:
        state: as for `adamw_cpu`.
        rows: [W, S].
        step: constants of the step.
        first: as for `add_rows`.
        divisor: from 1 to 2^24.
        bad: as for `adamw_cpu`.
        staged, start: as for `add_rows`.

    Raises:
        ValueError: as for `adamw_cpu` and `add_rows`.
    """
    check_rows("add_rows_adamw_cpu", rows, first, staged)
    numel, chunk = state.param.numel(), _chunk_of(state)
    weight = _check("add_rows_adamw_cpu", state, step, row_of(rows, staged, start, numel))
    places = (
        {"rows": rows[:, at : at + chunk]} if staged is None else {"rows": rows, "staged": staged, "start": start + at}
        for at in range(0, numel, chunk)
    )
    sums = (partial(add_rows, first=first, divisor=divisor, **each) for each in places)
    _by_chunks(state, _sums(sums, state, weight, bad), step)


def _chunk_of(state: State) -> int:
    """Return the number of elements per chunk of a state."""
    narrow = not state.exact and state.exp_avg.dtype != torch.float32
    return _NARROW_CHUNK if narrow else _CHUNK


def _sums(
    additions: Iterable[Callable[[Tensor], None]], state: State, weight: torch.dtype, bad: Tensor | None
) -> Iterator[Tensor]:
    """Yield the gradient of each chunk of a state. Each of `additions` writes one of them, all to the same memory."""
    for piece, add in zip(state.split(_chunk_of(state)), additions, strict=True):
        total = _buffers.of("sums", len(piece.param), weight)
        add(total)
        _look(total, bad)
        yield total


def _unscaled(given: Tensor, weight: torch.dtype, step: CpuStep) -> Tensor:
    """Divide a gradient chunk in place by `grad_scale`, if set, and return the chunk in the dtype of the weights."""
    wide = given.to(weight)
    if step.grad_scale is not None:
        wide.div_(_constant(step.grad_scale))
        if wide is not given:
            given.copy_(wide)
    return wide


def _look(grad: Tensor, bad: Tensor | None) -> None:
    """Set `bad` to 1 if a gradient has a NaN or infinity. If the sum is finite, all elements are finite."""
    if bad is not None and not grad.sum().isfinite() and not grad.isfinite().all():
        bad.fill_(1)


def _by_chunks(state: State, gradients: Iterable[Tensor], step: CpuStep) -> None:
    """Update each chunk of a state with its gradient."""
    run = _operator(step) if step.hyper.max_update == inf else _limited(step)
    start = 0
    for piece, g in zip(state.split(_chunk_of(state)), gradients, strict=True):
        p, (m, v) = piece.param, piece.moments()
        if piece.low is not None:
            p = _buffers.of("weights", len(g), torch.float32)
            join_on_cpu(p, piece.param, piece.low, _buffers.of("bytes", len(g), torch.int32))
        run(p, g if step.factor == 1 else g * step.factor, m, v)
        if piece.low is not None:
            split_on_cpu(piece.param, piece.low, p)
        if m is not piece.exp_avg:
            assert step.table is not None, "`_check` has raised"
            random = step.table.part(start, start + len(g)).random_bits(len(g))
            encode(m, v, *piece.codes(), random=random)
        start += len(g)


def _operator(step: CpuStep, grad_scale: float | None = None) -> Callable[[Tensor, Tensor, Tensor, Tensor], None]:
    """Return a function that updates tensors by PyTorch's operator.

    With `grad_scale`, the operator also divides the gradient, and writes the quotient back.
    """
    number, scale = _constant(step.number), None if grad_scale is None else _constant(grad_scale)
    options: dict[str, Any] = step.hyper._asdict()
    del options["max_update"]

    def run(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> None:
        torch._fused_adamw_(
            *([p], [g], [m], [v], [], [number]), **options, amsgrad=False, maximize=False, grad_scale=scale
        )

    return run


def _constant(value: float) -> Tensor:
    return torch.scalar_tensor(value, dtype=torch.float32, device="cpu")  # `torch.tensor` takes twice as long


def _limited(step: CpuStep) -> Callable[[Tensor, Tensor, Tensor, Tensor], None]:
    """Return a function that updates moments by PyTorch's operator, and limits each update to `lr * max_update`."""
    lr, beta1, beta2, eps, weight_decay, max_update = step.hyper
    still = _operator(replace(step, hyper=step.hyper._replace(lr=0.0, weight_decay=0.0)))

    def run(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> None:
        still(torch.zeros_like(p), g, m, v)
        root_bias2 = sqrt(1 - beta2**step.number)
        update = m / (1 - beta1**step.number) / (v.sqrt().div_(root_bias2).add_(eps))
        p.mul_(1 - lr * weight_decay).sub_(update.clamp_(-max_update, max_update), alpha=lr)

    return run


def _check(who: str, state: State, step: CpuStep, *grads: Tensor) -> torch.dtype:
    """Check the arguments of a step. Return the dtype in which weights are computed.

    Raises:
        ValueError: shapes, devices or dtypes do not match, or moments are narrow and `step` has no table.
    """
    state.check(who)
    weight = torch.float32 if state.low is not None else state.param.dtype
    if state.param.device.type != "cpu" or weight not in _WEIGHTS:
        raise ValueError(
            f"{who}: param must be floating-point and on the CPU, got {state.param.dtype} on {state.param.device}"
        )
    for grad in grads:
        check_flat(who, "grad", grad, numel=state.param.numel(), device=state.param.device)
        if grad.dtype != weight and (grad.dtype not in GRADIENTS or weight != torch.float32):
            raise ValueError(f"{who}: a gradient in {grad.dtype} cannot be combined with weights in {weight}")
    if state.exp_avg.dtype not in (weight, torch.float32) and step.table is None:
        raise ValueError(
            f"{who}: moments in {state.exp_avg.dtype} are rounded stochastically, so step.table is required"
        )
    return weight
