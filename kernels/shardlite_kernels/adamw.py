"""AdamW on flat tensors, in place, in the arithmetic of PyTorch's fused optimizer on the same kind of device.

Bytes per element in fp32: read `param`, `grad` and both moments, write all but `grad`: 28; with bf16 gradients 26.
Legend: `S` elements. `fp32(x)` is `x` rounded to fp32; all scalars are rounded before they are used.

On CUDA PyTorch computes, every line one fp32 operation (read from the machine code of torch 2.11 to 2.13):

    decay = lr * weight_decay              bias1 = 1 - beta1^step            bias2 = 1 - beta2^step
    p = fma(p, -decay, p)                  only if weight_decay is not zero
    m = fma(m, beta1, fma(g, -beta1, g))
    v = fma(v, beta2, fma(g*g, -beta2, g*g))
    p = p - (lr / bias1) * m / (sqrt(v) / sqrt(bias2) + eps)

The kernel does the same, so given the same scalars its bits are PyTorch's. The scalars come from the host and are
PyTorch's too, but for `beta^step`: it is rounded correctly here and computed by CUDA's `powf` there, a few units away
at most. So bits agree at step 1 and once `beta2^step` has vanished beside 1, and between where `powf` rounds correctly.
"""

# ruff: noqa: N803 (compile-time constants of a kernel are written in capitals)

from __future__ import annotations

from collections.abc import Iterator
from ctypes import c_float
from math import sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from .launch import INTERPRET, block_size, jit, launch, tl, use_triton
from .rounding import fma_reference, load_fp32

_CPU_PARAMS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_GRADS = (torch.float32, torch.bfloat16, torch.float16)
_CPU_CHUNK = 1 << 18  # elements of a gradient that are converted at a time; a multiple of 32, see README


class _Scalars(NamedTuple):
    """What the elements of one step have in common, each an fp32 number, in the order of the kernel's arguments."""

    beta1: float
    beta2: float
    eps: float
    decay: float
    step_size: float
    root_bias2: float


def _scalars(step: float, lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> _Scalars:
    """Round after every operation: fp64 is so much wider that this gives the bits of fp32 arithmetic."""
    beta1, beta2, lr = _fp32(betas[0]), _fp32(betas[1]), _fp32(lr)
    bias1, bias2 = (_fp32(1 - _fp32(beta**step)) for beta in (beta1, beta2))
    return _Scalars(
        beta1=beta1,
        beta2=beta2,
        eps=_fp32(eps),
        decay=_fp32(lr * _fp32(weight_decay)),
        step_size=_fp32(lr / bias1),
        root_bias2=_fp32(sqrt(bias2)),
    )


def _fp32(x: float) -> float:
    return c_float(x).value


@jit
def _adamw_kernel(
    param_ptr: tl.tensor,
    grad_ptr: tl.tensor,
    exp_avg_ptr: tl.tensor,
    exp_avg_sq_ptr: tl.tensor,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
    step_size: float,
    root_bias2: float,
    n: int,
    DECAY: tl.constexpr,
    INTERPRET: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    p = tl.load(param_ptr + offsets, mask=mask)
    g = load_fp32(grad_ptr, offsets, mask, INTERPRET)
    m = tl.load(exp_avg_ptr + offsets, mask=mask)
    v = tl.load(exp_avg_sq_ptr + offsets, mask=mask)
    if DECAY:
        p = tl.fma(p, -decay, p)
    m = tl.fma(m, beta1, tl.fma(g, -beta1, g))
    squared = g * g
    v = tl.fma(v, beta2, tl.fma(squared, -beta2, squared))
    p -= tl.div_rn(step_size * m, tl.div_rn(tl.sqrt_rn(v), root_bias2) + eps)
    tl.store(param_ptr + offsets, p, mask=mask)
    tl.store(exp_avg_ptr + offsets, m, mask=mask)
    tl.store(exp_avg_sq_ptr + offsets, v, mask=mask)


def adamw(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: float,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """Update `param`, `exp_avg` and `exp_avg_sq` [S] in place; `step` counts from 1 and is the number of this update.

    CPU tensors take `torch._fused_adamw_`, which keeps up with memory: the bits of `torch.optim.AdamW(fused=True)` on
    the same flat tensors. There all four may be fp64, bf16 or fp16 as well. In kernels param and moments are fp32. The
    gradient of fp32 parameters may be fp32, bf16 or fp16.

    Raises:
        ValueError: shapes, devices or dtypes do not fit together, `step` is less than 1, or a beta is 1 in fp32.
    """
    tensors = _checked(param, grad, exp_avg, exp_avg_sq, step, betas)
    if use_triton(param):
        scalars = _scalars(step, lr, betas, eps, weight_decay)
        flags = {"DECAY": weight_decay != 0, "INTERPRET": INTERPRET}
        launch(_adamw_kernel, *tensors, *scalars, n=param.numel(), block=block_size(*tensors), **flags)
        return
    count = torch.tensor(float(step), dtype=torch.float32)
    for p, g, m, v in _cpu_pieces(*tensors):
        torch._fused_adamw_(
            *([p], [g], [m], [v], [], [count]),
            lr=lr,
            beta1=betas[0],
            beta2=betas[1],
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=False,
            maximize=False,
        )


def adamw_reference(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: float,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """The specification of the kernel that `adamw` launches: the formula of CUDA, on any device, one line per line."""
    s = _scalars(step, lr, betas, eps, weight_decay)
    g = grad.float()
    if weight_decay != 0:
        param.copy_(fma_reference(param, -s.decay, param))
    exp_avg.copy_(fma_reference(exp_avg, s.beta1, fma_reference(g, -s.beta1, g)))
    squared = g * g
    exp_avg_sq.copy_(fma_reference(exp_avg_sq, s.beta2, fma_reference(squared, -s.beta2, squared)))
    root = exp_avg_sq.double().sqrt().float()  # PyTorch's fp32 square root on the CPU is off by one unit now and then
    param.sub_(exp_avg * s.step_size / (root / s.root_bias2 + s.eps))


def _checked(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: float, betas: tuple[float, float]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    for name, tensor in (("param", param), ("grad", grad), ("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
        if tensor.dim() != 1 or not tensor.is_contiguous():
            raise ValueError(f"adamw: {name} must be 1-D and contiguous, got {tuple(tensor.shape)}, {tensor.stride()}")
        if tensor.numel() != param.numel() or tensor.device != param.device:
            raise ValueError(
                f"adamw: {name} has {tensor.numel()} elements on {tensor.device}, "
                f"param has {param.numel()} on {param.device}"
            )
    if param.dtype != torch.float32 and (use_triton(param) or param.dtype not in _CPU_PARAMS):
        raise ValueError(f"adamw: param on {param.device} must be fp32, got {param.dtype}")
    if not param.dtype == exp_avg.dtype == exp_avg_sq.dtype:
        raise ValueError(f"adamw: moments are {exp_avg.dtype} and {exp_avg_sq.dtype}, param is {param.dtype}")
    if grad.dtype != param.dtype and (grad.dtype not in _GRADS or param.dtype != torch.float32):
        raise ValueError(f"adamw: a gradient in {grad.dtype} does not go with a param in {param.dtype}")
    if step < 1 or not all(0 <= _fp32(beta) < 1 for beta in betas):
        raise ValueError(f"adamw: step must be at least 1, betas in [0, 1) in fp32, got step {step}, betas {betas}")
    return param, grad, exp_avg, exp_avg_sq


def _cpu_pieces(param: Tensor, grad: Tensor, *moments: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The tensors whole, or in chunks with the gradient converted, so that no second gradient is ever whole."""
    if grad.dtype == param.dtype:
        yield param, grad, *moments
        return
    for p, g, *rest in zip(*(torch.split(t, _CPU_CHUNK) for t in (param, grad, *moments)), strict=True):
        yield p, g.to(p.dtype), *rest
