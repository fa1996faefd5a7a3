"""AdamW on flat tensors, in place, in the arithmetic of PyTorch's fused optimizer on the same kind of device.

Bytes per element in fp32: read `param`, `grad` and both moments, write all but `grad`: 28; with bf16 gradients 26. A
gradient that is divided by a scale is written as well: 32 and 28. A step that is skipped only reads.
Legend: `S` elements. `fp32(x)` is `x` rounded to fp32; all scalars are rounded before they are used.

On CUDA PyTorch computes, every line one fp32 operation (read from the machine code of torch 2.11 to 2.13):

    decay = lr * weight_decay              bias1 = 1 - beta1^step            bias2 = 1 - beta2^step
    g = g / grad_scale                     only if there is one; written back
    p = fma(p, -decay, p)                  only if weight_decay is not zero
    m = fma(m, beta1, fma(g, -beta1, g))
    v = fma(v, beta2, fma(g*g, -beta2, g*g))
    p = p - (lr / bias1) * m / (sqrt(v) / sqrt(bias2) + eps)

The kernel does the same, so given the same scalars its bits are PyTorch's. They differ in two places. `beta^step` is
rounded correctly here and computed by CUDA's `powf` there, a few units away at most: so bits agree at step 1 and once
`beta2^step` has vanished beside 1, and between where `powf` rounds correctly. And a weight is left alone if `decay` is
zero, also where that is because `lr` is: PyTorch then makes a NaN of an infinite weight, and 0 of -0.
"""

# ruff: noqa: N803 (compile-time constants of a kernel are written in capitals)

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .launch import INTERPRET, block_size, jit, launch, tl, use_triton
from .rounding import fma_reference, load_fp32, store_rounded
from .scalars import Hyper, Scalars

_CPU_PARAMS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_GRADS = (torch.float32, torch.bfloat16, torch.float16)
_CPU_CHUNK = 1 << 18  # elements of a gradient that are converted at a time; a multiple of 32, see README


@jit
def _adamw_kernel(
    param_ptr: tl.tensor,
    grad_ptr: tl.tensor,
    exp_avg_ptr: tl.tensor,
    exp_avg_sq_ptr: tl.tensor,
    scalars_ptr: tl.tensor,
    n: int,
    UNSCALE: tl.constexpr,
    INTERPRET: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    p = tl.load(param_ptr + offsets, mask=mask)
    g = load_fp32(grad_ptr, offsets, mask, INTERPRET)
    m = tl.load(exp_avg_ptr + offsets, mask=mask)
    v = tl.load(exp_avg_sq_ptr + offsets, mask=mask)
    # In the order of `Scalars`.
    beta1 = tl.load(scalars_ptr)
    beta2 = tl.load(scalars_ptr + 1)
    eps = tl.load(scalars_ptr + 2)
    decay = tl.load(scalars_ptr + 3)
    step_size = tl.load(scalars_ptr + 4)
    root_bias2 = tl.load(scalars_ptr + 5)
    found_inf = tl.load(scalars_ptr + 7)
    if UNSCALE:
        g = tl.div_rn(g, tl.load(scalars_ptr + 6))
    p = tl.where(decay != 0, tl.fma(p, -decay, p), p)  # infinity times zero would be NaN
    m = tl.fma(m, beta1, tl.fma(g, -beta1, g))
    squared = g * g
    v = tl.fma(v, beta2, tl.fma(squared, -beta2, squared))
    p -= tl.div_rn(step_size * m, tl.div_rn(tl.sqrt_rn(v), root_bias2) + eps)
    # Not a branch: the elements would not be loaded before its condition is known.
    mask = offsets < tl.where(found_inf == 0, n, 0)
    tl.store(param_ptr + offsets, p, mask=mask)
    tl.store(exp_avg_ptr + offsets, m, mask=mask)
    tl.store(exp_avg_sq_ptr + offsets, v, mask=mask)
    if UNSCALE:
        store_rounded(grad_ptr, offsets, g, mask, INTERPRET)


def adamw(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, scalars: Tensor, *, unscale: bool = False
) -> None:
    """Update `param`, `exp_avg` and `exp_avg_sq` [S] in place by the kernel, without waiting for the device.

    `scalars` [8] is a row of `adamw_scalars` on the same device. With `unscale` the gradient is divided by its
    `grad_scale`, in place. If its `found_inf` is not zero, nothing changes. Param and moments are fp32, the gradient
    is fp32, bf16 or fp16.

    Raises:
        ValueError: shapes, devices or dtypes do not fit together, or CPU tensors are not to be interpreted: those take
            `adamw_cpu`.
    """
    if not use_triton(param):
        raise ValueError("adamw: param is on the CPU, which takes adamw_cpu (or TRITON_INTERPRET=1)")
    _check(param, grad, exp_avg, exp_avg_sq)
    if param.dtype != torch.float32:
        raise ValueError(f"adamw: param on {param.device} must be fp32, got {param.dtype}")
    is_row = scalars.shape == (len(Scalars._fields),) and scalars.is_contiguous()
    if not is_row or scalars.dtype != torch.float32 or scalars.device != param.device:
        raise ValueError(
            f"adamw: scalars must be a row of {len(Scalars._fields)} fp32 numbers on {param.device}, "
            f"got {tuple(scalars.shape)}, {scalars.dtype} on {scalars.device}"
        )
    flags = {"UNSCALE": unscale, "INTERPRET": INTERPRET}
    tensors = (param, grad, exp_avg, exp_avg_sq)
    launch(_adamw_kernel, *tensors, scalars, n=param.numel(), block=block_size(*tensors), **flags)


def adamw_reference(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, scalars: Tensor, *, unscale: bool = False
) -> None:
    """The specification of the kernel that `adamw` launches: the formula of CUDA, on any device, one line per line."""
    s = Scalars(*scalars.tolist())
    if s.found_inf != 0:
        return
    g = grad.float()
    if unscale:
        g = g / s.grad_scale
        grad.copy_(g)
    if s.decay != 0:
        param.copy_(fma_reference(param, -s.decay, param))
    exp_avg.copy_(fma_reference(exp_avg, s.beta1, fma_reference(g, -s.beta1, g)))
    squared = g * g
    exp_avg_sq.copy_(fma_reference(exp_avg_sq, s.beta2, fma_reference(squared, -s.beta2, squared)))
    root = exp_avg_sq.double().sqrt().float()  # PyTorch's fp32 square root on the CPU is off by one unit now and then
    param.sub_(exp_avg * s.step_size / (root / s.root_bias2 + s.eps))


def adamw_cpu(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: float,
    hyper: Hyper,
    grad_scale: float | None = None,
) -> None:
    """Update `param`, `exp_avg` and `exp_avg_sq` [S] on the CPU; `step` counts from 1 and is the number of this update.

    The bits of `torch.optim.AdamW(fused=True)` on the same flat tensors, whose operator this is: it keeps up with
    memory. All four may be fp32, fp64, bf16 or fp16; the gradient of fp32 parameters may also be bf16 or fp16. With
    `grad_scale` the gradient is divided by it, in place.

    Raises:
        ValueError: shapes, devices or dtypes do not fit together, `step` is less than 1, or a beta is 1 in fp32.
    """
    _check(param, grad, exp_avg, exp_avg_sq)
    if param.device.type != "cpu" or param.dtype not in _CPU_PARAMS:
        raise ValueError(
            f"adamw_cpu: param must be of a floating dtype and on the CPU, got {param.dtype} on {param.device}"
        )
    if step < 1:
        raise ValueError(f"adamw_cpu: step must be at least 1, got step {step}")
    hyper.check()
    count = torch.tensor(float(step), dtype=torch.float32)
    for p, g, m, v in _cpu_pieces(param, grad, exp_avg, exp_avg_sq, written=grad_scale is not None):
        torch._fused_adamw_(
            *([p], [g], [m], [v], [], [count]),
            **hyper._asdict(),
            amsgrad=False,
            maximize=False,
            grad_scale=None if grad_scale is None else torch.tensor(grad_scale, dtype=torch.float32),
        )


def _check(param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
    for name, tensor in (("param", param), ("grad", grad), ("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
        if tensor.dim() != 1 or not tensor.is_contiguous():
            raise ValueError(f"adamw: {name} must be 1-D and contiguous, got {tuple(tensor.shape)}, {tensor.stride()}")
        if tensor.numel() != param.numel() or tensor.device != param.device:
            raise ValueError(
                f"adamw: {name} has {tensor.numel()} elements on {tensor.device}, "
                f"param has {param.numel()} on {param.device}"
            )
    if not param.dtype == exp_avg.dtype == exp_avg_sq.dtype:
        raise ValueError(f"adamw: moments are {exp_avg.dtype} and {exp_avg_sq.dtype}, param is {param.dtype}")
    if grad.dtype != param.dtype and (grad.dtype not in _GRADS or param.dtype != torch.float32):
        raise ValueError(f"adamw: a gradient in {grad.dtype} does not go with a param in {param.dtype}")


def _cpu_pieces(param: Tensor, grad: Tensor, *moments: Tensor, written: bool) -> Iterator[tuple[Tensor, ...]]:
    """The tensors whole, or in chunks with the gradient converted, so that no second gradient is ever whole.

    With `written` a converted gradient is rounded back when its chunk is done.
    """
    if grad.dtype == param.dtype:
        yield param, grad, *moments
        return
    for p, g, *rest in zip(*(torch.split(t, _CPU_CHUNK) for t in (param, grad, *moments)), strict=True):
        wide = g.to(p.dtype)
        yield p, wide, *rest
        if written:
            g.copy_(wide)
