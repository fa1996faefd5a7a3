"""Compilation and launch of kernels. Only this file knows whether Triton is installed, and which path runs.

Triton has wheels for Linux only. Without it this package still imports and serves CPU tensors. With it, it is imported
when a kernel is first launched: its library has half a gigabyte, which a program on CPU tensors does without.

With `TRITON_INTERPRET=1` in the environment (read once, by Triton, at import) kernels run in Triton's interpreter on
CPU tensors: slow, but the bits are those of the compiled kernel, so kernels are tested without a GPU.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    import triton.language as tl
else:
    tl = None  # until `load_triton`

SCALE_BLOCK = 32
"""Number of elements that share an exponent or a row of scalars. Shards are padded to multiples of it."""

_THREADS = 256  # per program
_THREADS_PER_WARP = 64 if torch.version.hip else 32
_BYTES_PER_ACCESS = 16  # the widest access of a thread
_INTERPRETED_BLOCK = 16384  # the interpreter takes about 1 ms per program, whatever its size


class _Late:
    """A kernel, or a number that kernels read, until Triton is imported and makes it."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self.made: Any = None
        self._make = make

    def finish(self, triton: Any) -> Any:
        """Return what Triton makes of it, always the same object."""
        if self.made is None:
            self.made = self._make(triton)
        return self.made

    def __getitem__(self, grid: Any) -> Any:
        return self.finish(load_triton())[grid]


def jit(function: Callable[..., Any], *, unspecialised: Sequence[str] = ()) -> Any:
    """`triton.jit`, when Triton is imported.

    Triton recompiles a kernel for integers that are 1 or divisible by 16, except for the `unspecialised` ones.
    """
    return _Late(lambda triton: triton.jit(function, do_not_specialize=unspecialised))


def constexpr(value: int) -> Any:
    """Make a global number readable by kernels, which cannot read plain globals."""
    return _Late(lambda triton: triton.language.constexpr(value))


def load_triton() -> Any:
    """Import Triton and return it, or `None` if it is not installed.

    Kernels call each other and read numbers and `tl` by the names of their modules. So there each `_Late` is replaced
    by what Triton makes of it.
    """
    with _loading:
        return _load_triton()


_loading = threading.Lock()  # ranks may be threads, whose first launches come at once


@cache
def _load_triton() -> Any:
    try:
        import triton
        import triton.language
    except ImportError:
        return None
    for module in [module for name, module in list(sys.modules.items()) if name.startswith(f"{__package__}.")]:
        for name, value in list(vars(module).items()):
            if isinstance(value, _Late):
                setattr(module, name, value.finish(triton))
            elif name == "tl":
                setattr(module, name, triton.language)
    return triton


def dtype_of_kernel(dtype: torch.dtype) -> Any:
    """Return Triton's dtype for one of PyTorch, or `None` without Triton."""
    triton = load_triton()
    return None if triton is None else getattr(triton.language, str(dtype).removeprefix("torch."))


def _interprets() -> bool:
    """Return whether Triton runs kernels in its interpreter. Imports it only where somebody may have said so."""
    if "triton" not in sys.modules and "TRITON_INTERPRET" not in os.environ:
        return False
    try:
        import triton
    except ImportError:
        return False
    return bool(triton.knobs.runtime.interpret)


INTERPRET = _interprets()


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


def launch(kernel: Any, *args: Any, n: int, block: int, together: int | None = None, **constexprs: Any) -> None:
    """Run `kernel(*args, n, BLOCK=block, ...)` with one program per `block` of the `n` elements.

    With `together`, run that number of programs, all resident at once, because they wait for programs of other devices.
    A GPU without room for them refuses the launch.

    `args[0]` is a tensor on the device to run on. Triton compiles `n` divisible by 16 and 16-byte aligned tensors to
    vector accesses, everything else to scalar ones: the same bits, only slower.

    Raises:
        RuntimeError: Triton is not installed.
    """
    triton = load_triton()
    if triton is None:
        raise RuntimeError(f"tensors on {args[0].device} need Triton, which is not installed: pip install triton")
    if n == 0:
        return
    device = args[0].device
    with torch.cuda.device(device if device.type == "cuda" else -1):  # -1: leave the current device as it is
        # Fusing a multiplication with an addition changes bits; the default differs between versions of Triton.
        options = {"num_warps": _THREADS // _THREADS_PER_WARP, "enable_fp_fusion": False}
        if together is not None and not INTERPRET:
            options["launch_cooperative_grid"] = True
        kernel = kernel.finish(triton) if isinstance(kernel, _Late) else kernel
        kernel[(together or triton.cdiv(n, block),)](*args, n, BLOCK=block, **constexprs, **options)
