"""Compile and launch kernels. Only this file looks for Triton, and chooses between Triton and PyTorch.

Triton has wheels for Linux only. Without Triton this package can be imported and supports CPU tensors.

If the environment has `TRITON_INTERPRET=1` when Triton is imported, kernels run on CPU tensors in Triton's interpreter.
The interpreter is slow but gives the bits of the compiled kernels, so that kernels can be tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from operator import attrgetter
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
"""Number of elements that share an exponent or a row of scalars. Shards are padded to a multiple of this number."""

INTERPRET: bool = triton is not None and bool(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter."""

_DIRECT = (
    triton is not None
    and not INTERPRET
    and torch.version.hip is None
    and (3, 6) <= tuple(map(int, triton.__version__.split(".")[:2])) <= (3, 9)
)
"""Whether `launch` calls compiled kernels itself: on CUDA, in versions of Triton whose compiled kernels are known to
take the same arguments. `tests/kernels/test_direct_launch.py` fails in other versions."""

_specialize: Any = triton.runtime.jit.native_specialize_impl if _DIRECT else None

CPU_CHUNK = 1 << 16
"""Number of elements that a CPU path processes at a time, so that temporaries (256 KB) stay in the cache of a core."""

_SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
_itemsize_of = attrgetter("itemsize")  # `map` with this function makes no Python call per tensor
_THREADS = 256  # of one program
_THREADS_PER_WARP = 64 if torch.version.hip else 32
_BYTES_PER_ACCESS = 16  # of the widest access of a thread
_OPTIONS: dict[str, Any] = {"num_warps": _THREADS // _THREADS_PER_WARP, "enable_fp_fusion": False}
"""Options of all kernels. Fused multiplications and additions change bits, and versions of Triton have different
defaults for them."""

_COOPERATIVE = {**_OPTIONS, "launch_cooperative_grid": True}
_INTERPRETED_BLOCK = 16384  # large, because the interpreter takes about 1 ms per program of any size


def jit(function: Callable[..., Any], *, unspecialized: Sequence[str] = ()) -> Any:
    """Return `function` compiled with `triton.jit`. Without Triton return `function`, which `launch` refuses to run.

    Triton recompiles a kernel if an integer argument is 1 or divisible by 16, except for the `unspecialized` arguments.
    """
    return function if triton is None else triton.jit(function, do_not_specialize=unspecialized)


def constexpr(value: int) -> Any:
    """Return a number as a global that kernels can read. Kernels cannot read plain Python globals."""
    return value if triton is None else tl.constexpr(value)


INTERPRETED = constexpr(INTERPRET)
GROUP = constexpr(SCALE_BLOCK)


def use_triton(tensor: Tensor) -> bool:
    """Return whether `tensor` is processed by a Triton kernel and not by PyTorch's CPU operators."""
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
    """Check that a tensor is 1-D and contiguous, and optionally its dtype, length and device.

    Args:
        who: name of the calling function, for the error.
        name: name of the tensor, for the error.
        tensor: tensor to check.
        dtypes: allowed dtypes. `None`: all dtypes are allowed.
        numel: required length. `None`: length and device are not checked.
        device: required device.

    Raises:
        ValueError: the tensor does not meet a requirement.
    """
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(
            f"{who}: {name} must be 1-D and contiguous, got shape {tuple(tensor.shape)}, strides {tensor.stride()}"
        )
    if dtypes is not None and tensor.dtype not in dtypes:
        *others, last = (_SHORT.get(each, str(each).removeprefix("torch.")) for each in dtypes)
        allowed = f"{', '.join(others)} or {last}" if others else last
        raise ValueError(f"{who}: {name} must be {allowed}, got {tensor.dtype}")
    if numel is not None and (tensor.numel(), tensor.device) != (numel, device):
        raise ValueError(
            f"{who}: {name} must have {numel} elements on {device}, got {tensor.numel()} on {tensor.device}"
        )


def chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield tuples with one chunk of `CPU_CHUNK` elements of each tensor [S]."""
    return zip(*(torch.split(tensor, CPU_CHUNK) for tensor in tensors), strict=True)


def block_size(*tensors: Tensor) -> int:
    """Return the number of elements per program for which each thread moves 16 bytes of the widest of `tensors`.

    With more elements per thread, Triton would exchange values between threads through shared memory, because narrow
    and wide tensors would need different layouts. Fewer elements would waste bandwidth.
    """
    if INTERPRET:
        return _INTERPRETED_BLOCK
    widest: int = max(map(_itemsize_of, tensors))
    return _THREADS * _BYTES_PER_ACCESS // widest


def launch(
    kernel: Any, *args: Any, n: int, block: int, rows: int = 1, together: int | None = None, **constexprs: Any
) -> None:
    """Run `kernel(*args, n, BLOCK=block, ...)` with one program per `block` of the `n` elements.

    The kernel runs on the device of `args[0]`, which is a tensor or a tuple that begins with a tensor. If `n` is
    divisible by 16 and all tensors are aligned to 16 bytes, Triton compiles vector accesses. Otherwise it compiles
    scalar accesses, which are slower but give the same results.

    Args:
        kernel: the compiled kernel.
        args: positional arguments of the kernel before `n`.
        n: number of elements per row.
        block: number of elements per program.
        rows: number of rows, up to 65535. The second index of a program (`program_id(1)`) is its row.
        together: number of programs that must all run at the same time, because they wait for programs of other
            devices. If the GPU has no room for all these programs, the launch fails.
        constexprs: compile-time constants of the kernel.

    Raises:
        RuntimeError: Triton is not installed.
    """
    device = (args[0][0] if isinstance(args[0], tuple) else args[0]).device
    if triton is None:
        raise RuntimeError(f"tensors on {device} need Triton, which is not installed: pip install triton")
    if n * rows == 0:
        return
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(kernel, *args, n=n, block=block, rows=rows, together=together, **constexprs)
        return
    grid = together or -(-n // block), rows, 1
    args = *args, n
    constexprs["BLOCK"] = block
    options = _OPTIONS if together is None or INTERPRET else _COOPERATIVE
    if not _DIRECT or device.type != "cuda":
        kernel[grid](*args, **constexprs, **options)
        return
    key = _key(kernel, device.index, options, args, constexprs)
    found = _COMPILED.get(key)
    if found is not None:
        _launch_compiled(*found, device.index, grid, args)
        return
    compiled = kernel[grid](*args, **constexprs, **options)
    if isinstance(kernel, triton.JITFunction) and isinstance(compiled, triton.compiler.CompiledKernel):
        _COMPILED[key] = compiled, tuple(constexprs[name] for name in kernel.arg_names[len(args) :])


_COMPILED: dict[Any, tuple[Any, tuple[Any, ...]]] = {}
"""For each `_key`, a compiled kernel, and the constants that follow its arguments. A compiled kernel refers to its
kernel, so the `id` of this kernel stays its own."""


def _key(kernel: Any, device: int, options: dict[str, Any], args: tuple[Any, ...], constexprs: dict[str, Any]) -> Any:
    """Return all that determines which compiled kernel `kernel[grid](*args, **constexprs, **options)` launches.

    Triton specializes on the types of arguments, on `None`, on integers that are 1, divisible by 16 or wider than 32
    bits, and on addresses that are divisible by 16. Triton's own function computes the key. Here the key includes the
    `unspecialized` arguments, so one compiled kernel may have several keys. Unlike Triton, a direct launch does not
    compare the globals that the kernel reads with their values at the compilation, because they are constants of
    modules.
    """
    runtime, compilation = triton.knobs.runtime, triton.knobs.compilation
    return (
        *(id(kernel), device, len(options), runtime.debug, compilation.instrumentation_mode),
        _specialize(triton.backends.compiler.BaseBackend, args, False, True, True),
        *constexprs.items(),
    )


def _launch_compiled(
    compiled: Any, constants: tuple[Any, ...], device: int, grid: tuple[int, int, int], args: tuple[Any, ...]
) -> None:
    """Launch a compiled kernel on the current stream of `device`, without calls of hooks if there are no hooks."""
    runtime = triton.knobs.runtime
    if getattr(runtime.launch_enter_hook, "calls", True) or getattr(runtime.launch_exit_hook, "calls", True):
        compiled[grid](*args, *constants)
        return
    stream = triton.runtime.driver.active.get_current_stream(device)
    function, metadata = compiled.function, compiled.packed_metadata
    compiled.run(*grid, stream, function, metadata, None, None, None, *args, *constants)
