"""A driver for GPUs that are not there: Triton launches as ever, but nothing is compiled or run."""

import gc
from collections import defaultdict
from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import triton
from shardlite_kernels import launch
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction


class Launched(NamedTuple):
    """What reaches the driver."""

    function: tuple[str, int]
    """The hash of the compiled kernel, and the device on which it is loaded."""

    grid: tuple[int, ...]
    stream: tuple[str, int, int]
    arguments: tuple[Any, ...]
    """Tensors are given by their addresses."""


class Pointer:
    """What Triton and `launch` ask of a tensor, at any address."""

    def __init__(self, dtype: torch.dtype, address: int) -> None:
        self.dtype, self.address, self.device = dtype, address, torch.device("cuda", 0)

    def data_ptr(self) -> int:
        return self.address


class StubDriver:
    """Two GPUs of compute capability 9.0. The kernels in `kernels` have not been compiled yet."""

    def __init__(self, patch: pytest.MonkeyPatch, kernels: list[Any]) -> None:
        gc.collect()  # finalizers of models on a simulated GPU of an earlier test must not see the functions below
        self.launched: list[Launched] = []
        self.by_triton = 0
        self.device = 0
        self.streams = [0, 0]
        self.utils = SimpleNamespace(
            load_binary=lambda name, binary, shared, device: (None, (binary, device), 0, 0, 1024)
        )  # no module, because Triton would unload it, possibly after the test
        patch.setattr(triton.runtime.driver, "_active", self)
        patch.setattr(triton.compiler, "compile", _hash_only)
        patch.setattr(triton.compiler.compiler, "max_shared_mem", lambda device: 1 << 17)
        patch.setattr(torch.cuda, "current_device", self.get_current_device)
        patch.setattr(torch.cuda, "device", self._on)
        patch.setattr(launch, "_COMPILED", {})
        for kernel in kernels:
            patch.setattr(kernel, "device_caches", defaultdict(kernel.create_binder))
        run = JITFunction.run

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.by_triton += 1
            return run(*args, **kwargs)

        patch.setattr(JITFunction, "run", counted)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> tuple[str, int, int]:
        return ("stream", device, self.streams[device])

    def launcher_cls(self, src: Any, metadata: Any) -> Callable[..., None]:
        """Called by Triton once for each compiled kernel. The result has the arguments of Triton's launcher in C."""

        def launcher(x, y, z, stream, function, packed, launch_metadata, enter, exit_, *args):
            assert packed == metadata.packed
            assert len(args) == len(src.fn.arg_names)
            for hook in (enter, exit_):
                if hook is not None:
                    hook(launch_metadata)
            self.launched.append(Launched(function, (x, y, z), stream, tuple(map(_as_passed, args))))

        return launcher

    @contextmanager
    def _on(self, device):
        before, self.device = self.device, device.index
        yield
        self.device = before


def _as_passed(argument: Any) -> Any:
    if isinstance(argument, tuple):
        return tuple(map(_as_passed, argument))
    return argument.data_ptr() if hasattr(argument, "data_ptr") else argument


def _hash_only(src: Any, target: Any = None, options: Any = None, **_: Any) -> CompiledKernel:
    """Take the place of `triton.compile`: the machine code is the hash of all that it is compiled from."""
    compiled = object.__new__(CompiledKernel)
    packed = (options["num_warps"], options["num_ctas"], 0)
    metadata = SimpleNamespace(
        shared=0, num_warps=options["num_warps"], warp_size=32, target=target, packed=packed, tmem_size=None
    )
    compiled.src, compiled.name, compiled.metadata, compiled.packed_metadata = src, src.name, metadata, packed
    compiled.hash = compiled.kernel = f"{src.name} {src.hash()} {sorted(options.items())}"
    compiled.module = compiled.function = compiled._run = compiled._module_pid = None
    compiled.metadata_group = {}
    return compiled
