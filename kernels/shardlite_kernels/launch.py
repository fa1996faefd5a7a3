"""Compilation and launch of kernels. Only this file knows whether Triton is installed, and which path runs.

Triton has wheels for Linux only. Without it this package still imports and serves CPU tensors.

With `TRITON_INTERPRET=1` in the environment (read once, by Triton, at import) kernels run in Triton's interpreter on
CPU tensors: slow, but the bits are those of the compiled kernel, so kernels are tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice
except ImportError:
    triton = tl = libdevice = None

SCALE_BLOCK = 32
"""Number of elements that share an exponent or a row of scalars. Shards are padded to multiples of it."""

INTERPRET: bool = triton is not None and bool(triton.knobs.runtime.interpret)

_THREADS = 256  # per program
_THREADS_PER_WARP = 64 if torch.version.hip else 32
_BYTES_PER_ACCESS = 16  # the widest access of a thread
_INTERPRETED_BLOCK = 16384  # the interpreter takes about 1 ms per program, whatever its size


def jit(function: Callable[..., Any], *, unspecialised: Sequence[str] = ()) -> Any:
    """`triton.jit`, or without Triton the plain function, which `launch` refuses.

    Triton recompiles a kernel for integers that are 1 or divisible by 16, except for the `unspecialised` ones.
    """
    return function if triton is None else triton.jit(function, do_not_specialize=unspecialised)


def constexpr(value: int) -> Any:
    """Make a global number readable by kernels, which cannot read plain globals."""
    return value if triton is None else tl.constexpr(value)


def use_triton(tensor: Tensor) -> bool:
    """Return whether `tensor` is processed by a Triton kernel rather than by PyTorch's CPU operators."""
    return INTERPRET or tensor.device.type != "cpu"


def block_size(*tensors: Tensor) -> int:
    """Return the elements per program for which each thread moves 16 bytes of the widest of `tensors` at a time.

    More elements per thread would make Triton exchange values between threads through shared memory, because the
    layouts that suit the narrow and the wide tensors differ; fewer would waste bandwidth.
    """
    if INTERPRET:
        return _INTERPRETED_BLOCK
    return _THREADS * _BYTES_PER_ACCESS // max(tensor.element_size() for tensor in tensors)


def launch(
    kernel: Any, *args: Any, n: int, block: int, rows: int = 1, together: int | None = None, **constexprs: Any
) -> None:
    """Run `kernel(*args, n, BLOCK=block, ...)` with one program per `block` of the `n` elements.

    With `rows`, up to 65535, `n` elements are one row, and the second index of a program is its row.
    With `together`, run that number of programs, all resident at once, because they wait for programs of other devices.
    A GPU without room for them refuses the launch.

    `args[0]` is a tensor on the device to run on. Triton compiles `n` divisible by 16 and 16-byte aligned tensors to
    vector accesses, everything else to scalar ones: the same bits, only slower.

    Raises:
        RuntimeError: Triton is not installed.
    """
    if triton is None:
        raise RuntimeError(f"tensors on {args[0].device} need Triton, which is not installed: pip install triton")
    if n * rows == 0:
        return
    device = args[0].device
    with torch.cuda.device(device if device.type == "cuda" else -1):  # -1: leave the current device as it is
        # Fusing a multiplication with an addition changes bits; the default differs between versions of Triton.
        options = {"num_warps": _THREADS // _THREADS_PER_WARP, "enable_fp_fusion": False}
        if together is not None and not INTERPRET:
            options["launch_cooperative_grid"] = True
        kernel[(together or triton.cdiv(n, block), rows)](*args, n, BLOCK=block, **constexprs, **options)
