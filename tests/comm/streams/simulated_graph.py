"""A stand-in for `torch.cuda.CUDAGraph` on the simulated GPU: it records operators, and carries them out again.

As on a GPU, a capture leaves memory as it was, a replay runs no Python code of the program, and operators use the
addresses of the capture. Memory that is allocated during a capture belongs to the graph, which has its own copy of it:
the program may free it. All other memory must outlive the graph.
"""

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

if TYPE_CHECKING:
    from tests.comm.streams.simulated_gpu import Gpu, Memory


class Graph:
    """What a capture has recorded."""

    def __init__(self, gpu: "Gpu") -> None:
        self._gpu = gpu
        self._calls: list[Callable[[], None]] = []
        self._bytes: dict[Memory, Tensor] = {}
        """For memory that the graph uses its bytes, as a tensor that does not keep it alive."""

        self._before: dict[Memory, tuple[int, bytes]] = {}
        """For memory that the capture has written its address and its bytes before."""

        self.own: dict[Memory, int] = {}
        """Addresses of memory that was allocated during the capture."""

        self.generators: list[torch.Generator] = []

    def register_generator_state(self, generator: torch.Generator) -> None:
        """Note a generator."""
        self.generators.append(generator)

    def arguments(self, args: Any, kwargs: Any) -> Any:
        """Return the arguments of a call that has not run, as the graph has them."""
        with _disable_current_modes(), torch.no_grad():
            return tree_map_only(Tensor, self._argument, (args, kwargs))

    def record(self, function: Callable[..., Any], arguments: Any, out: Any = None) -> None:
        """Record a call that has run: its results are in `out`, or in its arguments."""
        args, kwargs = arguments
        with _disable_current_modes(), torch.no_grad():
            given = {each.untyped_storage().data_ptr() for each in tree_leaves((args, kwargs)) if _is_tensor(each)}
            outs = [self._alias(each) if _is_tensor(each) else None for each in tree_leaves(out)]

        def call() -> None:
            for place, value in zip(outs, tree_leaves(function(*args, **kwargs)), strict=False):
                if place is not None and place.untyped_storage().data_ptr() not in given:
                    place.copy_(value)

        self._calls.append(call)

    def save(self, tensor: Tensor) -> None:
        """Keep what is in the memory of a tensor that is about to be written."""
        memory, storage = self._gpu.memory_of(tensor), tensor.untyped_storage()
        if memory not in self.own and memory not in self._before:
            self._before[memory] = storage.data_ptr(), ctypes.string_at(storage.data_ptr(), storage.nbytes())

    def end(self) -> None:
        """Undo what the capture has written. The graph's own memory has no values before a replay."""
        for memory, (address, before) in self._before.items():
            if memory.is_alive:
                ctypes.memmove(address, before, len(before))
        for memory, address in self.own.items():
            if memory.is_alive and memory in self._bytes:
                ctypes.memset(address, 0xFF, self._bytes[memory].nbytes)

    def replay(self) -> None:
        """Carry out the operators, as one operation of the current stream."""
        freed = [memory for memory in self._bytes if memory not in self.own and not memory.is_alive]
        assert not freed, f"a graph uses memory that was freed, as of: {freed[0].accesses[-1]}"
        stream = self._gpu.current()
        stream.launch()
        self._gpu.replays += 1
        for memory, there in self._bytes.items():
            if memory.is_alive:
                self._gpu.access_bytes(memory, 0, there.nbytes, stream, "a graph", writes=True)
        with _disable_current_modes(), torch.no_grad():
            for call in self._calls:
                call()
        for memory, address in self.own.items():
            if memory.is_alive and memory in self._bytes:
                ctypes.memmove(address, self._bytes[memory].data_ptr(), self._bytes[memory].nbytes)

    def _argument(self, tensor: Tensor) -> Tensor:
        """Return an argument. A number, which PyTorch passes as a tensor, is part of a kernel's launch."""
        is_known = self._gpu.knows(tensor)
        return self._alias(tensor) if is_known else tensor.detach().clone()

    def _alias(self, tensor: Tensor) -> Tensor:
        """Return a tensor with the same bytes, or those of the graph's copy, which does not keep the memory alive."""
        memory, storage = self._gpu.memory_of(tensor), tensor.untyped_storage()
        if storage.nbytes() == 0:
            return tensor.detach().clone()
        if memory not in self._bytes:
            there = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
            own = torch.empty(storage.nbytes(), dtype=torch.uint8)
            self._bytes[memory] = own if memory in self.own else torch.frombuffer(there, dtype=torch.uint8)
        empty = torch.empty(0, dtype=tensor.dtype)
        place = tensor.storage_offset(), tensor.size(), tensor.stride()
        return empty.set_(self._bytes[memory].untyped_storage(), *place)


def _is_tensor(each: object) -> bool:
    return isinstance(each, Tensor)
