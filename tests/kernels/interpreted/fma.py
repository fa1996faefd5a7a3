"""Whether Triton's interpreter has a fused multiply-add."""

import torch
import triton
import triton.language as tl


@triton.jit
def _fma_kernel(out_ptr, a_ptr, c_ptr):
    tl.store(out_ptr, tl.fma(tl.load(a_ptr), tl.load(a_ptr), tl.load(c_ptr)))


def interpreted_fma_rounds_once():
    """(1 + 2^-12)^2 - 1 - 2^-11 is 2^-24, which a product rounded to fp32 has lost."""
    out, a, c = torch.empty(1), torch.tensor([1 + 2.0**-12]), torch.tensor([-1 - 2.0**-11])
    _fma_kernel[(1,)](out, a, c)
    return out.item() == 2.0**-24
