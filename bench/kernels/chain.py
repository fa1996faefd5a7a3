"""Chains of kernels in a clipped step of ShardLite and of FSDP2: from the sum of gradients to weights for the gather.

Legend: `S` elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

import torch
from shardlite_kernels import State, cast, hop, new_stats
from shardlite_kernels.scale import scale
from shardlite_kernels.stats import stats_total
from torch import Tensor, nn

from bench.kernels.clock import Result, Run, Work
from bench.kernels.inputs import MASTERS, exact_weights, gradient, nbytes, state_of
from bench.kernels.peers import adamw_of_torch
from bench.kernels.work import SPLIT_BOUND, WEIGHT_BOUND, step_by

_NOT_NEEDED, _NEEDED = 1e9, 1e-2  # limits for the gradient's norm divided by `sqrt(S)`, which is about 0.14

# Bound for bf16 weights: if fp32 weights are off by one bit, one weight in a few hundred rounds differently.
_CAST_BOUND = 2.0**-12


def chains() -> Iterator[Work]:
    """Yield ShardLite's chains for both masters, then PyTorch's, each with the norm below and above the limit."""
    for master, needed in product(MASTERS, (False, True)):
        yield _ours(master, needed)
    yield from (_theirs(needed) for needed in (False, True))


def _largest_norm(numel: int, needed: bool) -> float:
    """Return the limit for the norm of a sum of two gradients [S]. The norm exceeds this limit if `needed`."""
    return (_NEEDED if needed else _NOT_NEEDED) * math.sqrt(numel)


def _format(needed: bool) -> str:
    """Return the entry `format` of the row of a chain."""
    return f"fp32, the norm is {'above' if needed else 'below'} the limit"


def _expected(state: State, received: Tensor, own: Tensor, limit: float) -> Tensor:
    """Return the weights [S] after a step with the clipped sum, in fp64."""
    total = received.double() + own.double()
    factor = min(1.0, limit / (float(total.norm()) + 1e-6))
    return exact_weights(state, total, factor)


def _ours(master: str, needed: bool) -> Work:
    """Return ShardLite's chain. Split weights need no cast."""

    def make(numel: int, device: torch.device) -> Run:
        state = state_of(master, "fp32", numel, device)
        received, own = (gradient(numel, device, torch.float32, seed) for seed in (5, 6))
        total, limit = torch.empty_like(own), _largest_norm(numel, needed)
        rows, update = new_stats(total), step_by(state, total)
        half = torch.empty_like(total, dtype=torch.bfloat16) if state.low is None else None

        def step() -> None:
            hop(total, received, own, 1, rows)
            norm = stats_total(rows)[0].sqrt()
            scale(total, (limit / (norm + 1e-6)).clamp(max=1).float())
            update()
            if half is not None:
                cast(half, state.param)

        def expected() -> list[Tensor]:
            right = _expected(state, received, own, limit)
            return [right] if half is None else [right, right.float().bfloat16()]

        bound = WEIGHT_BOUND if state.low is None else SPLIT_BOUND
        casts = [] if half is None else [Result(half, _CAST_BOUND)]
        moved = nbytes(received, own, total, rows) + (2 * nbytes(total) if needed else 0)
        moved += 2 * nbytes(*state.tensors()) + nbytes(total) + (0 if half is None else nbytes(state.param, half))
        return Run(
            step=step,
            results=lambda: [Result(state.weight(), bound), *casts],
            expected=expected,
            moved=moved,
            held=nbytes(received, own, total, rows, half, *state.tensors()),
        )

    last = ", cast" if master == "fp32" else ""
    operation = f"hop with statistics, scale, adamw{last} ({master} weights)"
    return Work(system="shardlite", operation=operation, format=_format(needed), make=make)


def _theirs(needed: bool) -> Work:
    """Return FSDP2's chain: the sum (computed by NCCL in FSDP2), the norm, clipping, the fused step, and the cast."""

    def make(numel: int, device: torch.device) -> Run:
        state, limit = state_of("fp32", "fp32", numel, device), _largest_norm(numel, needed)
        received, own = (gradient(numel, device, torch.float32, seed) for seed in (5, 6))
        param, total = nn.Parameter(state.param), torch.empty_like(own)
        param.grad, half = total, torch.empty_like(total, dtype=torch.bfloat16)
        optimizer = adamw_of_torch(param, state, {"fused": True})

        def step() -> None:
            torch.add(received, own, out=total)
            nn.utils.clip_grad_norm_([param], limit)
            optimizer.step()
            half.copy_(param.detach())

        def expected() -> list[Tensor]:
            right = _expected(state, received, own, limit)
            return [right, right.float().bfloat16()]

        moved = nbytes(received, own, total) + 3 * nbytes(total)
        moved += 2 * nbytes(*state.tensors()) + nbytes(total) + nbytes(param, half)
        return Run(
            step=step,
            results=lambda: [Result(param.detach(), WEIGHT_BOUND), Result(half, _CAST_BOUND)],
            expected=expected,
            moved=moved,
            held=nbytes(received, own, total, half, *state.tensors()) + nbytes(total),
        )

    operation = "add, clip_grad_norm_, AdamW(fused=True), cast"
    return Work(system="torch", operation=operation, format=_format(needed), make=make)
