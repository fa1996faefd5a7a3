"""Inputs of the kernels, and AdamW's results in fp64.

Numbers are random and repeat after 2^20 elements, so that filling a billion elements is as fast as a copy. Their
magnitudes are those of training, because arithmetic on subnormal numbers and infinities takes a different time.

Legend: `S` elements, `G = ceil(S / 32)` groups.
"""

from __future__ import annotations

import torch
from shardlite_kernels import FORMATS, SCALE_BLOCK, Hyper, State, Table
from shardlite_kernels.adamw_cpu import CpuStep
from shardlite_kernels.launch import INTERPRET
from shardlite_kernels.moments import encode
from shardlite_kernels.noise import keys
from shardlite_kernels.scalars import adamw_scalars, hyper_table
from shardlite_kernels.split import split_reference
from torch import Tensor

HYPER = Hyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1)
STEP = 3
"""Number of the measured step, chosen so that moments are nonzero and bias corrections are not 1."""

MASTERS = ("fp32", "split24")
_PERIOD = 1 << 20


def by_kernels(device: torch.device) -> bool:
    """Return whether Triton kernels run on a device: on a GPU, or in Triton's interpreter on any device."""
    return INTERPRET or device.type != "cpu"


def numbers(numel: int, device: torch.device, seed: int) -> Tensor:
    """Return normally distributed numbers [S] in fp32, the same on every device."""
    return _tiled(_pattern(seed), numel, device)


def gradient(numel: int, device: torch.device, dtype: torch.dtype, seed: int = 1) -> Tensor:
    """Return a gradient [S]."""
    return _tiled((0.1 * _pattern(seed)).to(dtype), numel, device)


def state_of(master: str, moments: str, numel: int, device: torch.device) -> State:
    """Return weights and moments [S] in a format. `master` is one of `MASTERS`, `moments` one of `FORMATS`."""
    param, low = _pattern(2), None
    exp_avg, exp_avg_sq = 0.1 * _pattern(3), (0.1 * _pattern(4)).square()
    if master == "split24":
        high, low = torch.empty_like(param, dtype=torch.bfloat16), torch.empty_like(param, dtype=torch.int8)
        split_reference(high, low, param)
        param = high
    codes = moments == "int8"
    avg = torch.empty_like(exp_avg, dtype=FORMATS[moments])
    sq = torch.empty_like(exp_avg, dtype=torch.uint8 if codes else avg.dtype)
    exponents = [torch.empty(_PERIOD // SCALE_BLOCK, dtype=torch.uint8) if codes else None for _ in range(2)]
    encode(exp_avg, exp_avg_sq, avg, sq, *exponents, random=None)
    groups = -(-numel // SCALE_BLOCK)
    return State(
        _tiled(param, numel, device),
        _tiled(avg, numel, device),
        _tiled(sq, numel, device),
        None if low is None else _tiled(low, numel, device),
        *(None if each is None else _tiled(each, groups, device) for each in exponents),
    )


def table(numel: int, device: torch.device) -> Table:
    """Return a table in which all elements belong to one parameter, in step `STEP`."""
    step = torch.tensor([float(STEP)], device=device)
    number, start = torch.zeros(2, 1, dtype=torch.int64, device=device)
    rows = torch.zeros(-(-numel // SCALE_BLOCK), dtype=torch.int16, device=device)
    return Table(rows, keys(step, number, start), adamw_scalars(step, hyper_table([HYPER], device)))


def cpu_step(numel: int) -> CpuStep:
    """Return step `STEP` in the form that the CPU kernels take."""
    return CpuStep(number=STEP, hyper=HYPER, table=table(numel, torch.device("cpu")))


def nbytes(*tensors: Tensor | None) -> int:
    """Return the bytes of the tensors that are not `None`."""
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def exact_weights(state: State, grad: Tensor, factor: float = 1.0, step: int = STEP) -> Tensor:
    """Return the weights [S] after step number `step` with `factor` times the gradient, in fp64."""
    lr, beta1, beta2, eps, weight_decay, _ = HYPER
    g = grad.double() * factor
    m, v = (moment.double() for moment in state.moments())
    m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
    update = m / (1 - beta1**step) / ((v / (1 - beta2**step)).sqrt() + eps)
    return state.weight().double() * (1 - lr * weight_decay) - lr * update


def _pattern(seed: int) -> Tensor:
    return torch.randn(_PERIOD, generator=torch.Generator().manual_seed(seed))


def _tiled(pattern: Tensor, numel: int, device: torch.device) -> Tensor:
    """Return `pattern` repeated to [numel]."""
    out = torch.empty(numel, dtype=pattern.dtype, device=device)
    source = pattern.to(device)
    for piece in out.split(len(pattern)):
        piece.copy_(source[: len(piece)])
    return out
