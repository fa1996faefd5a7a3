"""Compile and launch kernels. Only this file knows whether Triton is installed, and which path runs.

Triton has wheels for Linux only. Without it this package still imports and serves CPU tensors.

With `TRITON_INTERPRET=1` in the environment (read once, by Triton, at import) kernels run in Triton's interpreter on
CPU tensors: slowly, but with the bits of the compiled kernel, so kernels are tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
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
"""Whether kernels run in Triton's interpreter."""

CPU_CHUNK = 1 << 16
"""Elements that a CPU path works on at a time: temporaries of 256 KB stay in the cache of a core."""

_SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
_THREADS = 256  # per program
_THREADS_PER_WARP = 64 if torch.version.hip else 32
_BYTES_PER_ACCESS = 16  # the widest access of a thread
_INTERPRETED_BLOCK = 16384  # the interpreter takes about 1 ms per program, whatever its size


def jit(function: Callable[..., Any], *, unspecialized: Sequence[str] = ()) -> Any:
    """Apply `triton.jit`; without Triton return the plain function, which `launch` refuses.

    Triton recompiles a kernel for integers that are 1 or divisible by 16, except for the `unspecialized` ones.
    """
    return function if triton is None else triton.jit(function, do_not_specialize=unspecialized)


def constexpr(value: int) -> Any:
    """Make a global number readable by kernels, which cannot read plain globals."""
    return value if triton is None else tl.constexpr(value)


INTERPRETED = constexpr(INTERPRET)
GROUP = constexpr(SCALE_BLOCK)


def use_triton(tensor: Tensor) -> bool:
    """Return whether `tensor` is processed by a Triton kernel rather than by PyTorch's CPU operators."""
    return INTERPRET or tensor.device.type != "cpu"


def check_flat(
    who: str,
    name: str,
    tensor: Tensor,
    dtypes: Collection[torch.dtype] | None = None,
    *,
    numel: int | None = None,
    device: torch.device | None = None,
) -> None:
    """Check that a tensor is 1-D and contiguous, and has one of these dtypes, this length and this device.

    Raises:
        ValueError: it does not.
    """
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(f"{who}: {name} must be 1-D and contiguous, got {tuple(tensor.shape)}, {tensor.stride()}")
    if dtypes is not None and tensor.dtype not in dtypes:
        *others, last = (_SHORT.get(each, str(each).removeprefix("torch.")) for each in dtypes)
        allowed = f"{', '.join(others)} or {last}" if others else last
        raise ValueError(f"{who}: {name} must be {allowed}, got {tensor.dtype}")
    if numel is not None and (tensor.numel(), tensor.device) != (numel, device):
        raise ValueError(
            f"{who}: {name} must have {numel} elements on {device}, got {tensor.numel()} on {tensor.device}"
        )


def chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same `CPU_CHUNK` elements of each tensor [S], chunk by chunk."""
    return zip(*(torch.split(tensor, CPU_CHUNK) for tensor in tensors), strict=True)


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

    `args[0]` is a tensor on the device to run on, or a tuple that begins with one. Triton compiles `n` divisible by 16
    and 16-byte aligned tensors to vector accesses, everything else to scalar ones: the same bits, only slower.

    Args:
        kernel: the compiled kernel.
        args: its positional arguments before `n`.
        n: number of elements; of one row, with `rows`.
        block: elements per program.
        rows: number of rows, up to 65535. The second index of a program is its row.
        together: run that many programs, all resident at once, because they wait for programs of other devices. A GPU
            without room for them refuses the launch.
        constexprs: compile-time constants of the kernel.

    Raises:
        RuntimeError: Triton is not installed.
    """
    device = (args[0][0] if isinstance(args[0], tuple) else args[0]).device
    if triton is None:
        raise RuntimeError(f"tensors on {device} need Triton, which is not installed: pip install triton")
    if n * rows == 0:
        return
    with torch.cuda.device(device if device.type == "cuda" else -1):  # -1: leave the current device as it is
        # Fusing a multiplication with an addition changes bits; the default differs between versions of Triton.
        options = {"num_warps": _THREADS // _THREADS_PER_WARP, "enable_fp_fusion": False}
        if together is not None and not INTERPRET:
            options["launch_cooperative_grid"] = True
        kernel[(together or triton.cdiv(n, block), rows)](*args, n, BLOCK=block, **constexprs, **options)
