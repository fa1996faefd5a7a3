"""Optimizer states of a unit in host memory: pinned memory, and the events after which it may be read.

A GPU copies from pinned memory and to it while the host goes on. PyTorch's own pinned memory is rounded up to a power
of two, so memory is allocated here and then registered with the driver. Pages lie on the NUMA node of the GPU, where
copies are fastest, because a thread that runs on that node writes them first. The mapping is shared, so a fork does not
lead to copies of pages that the GPU still uses.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from mmap import mmap
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardlite.errors import LayoutError

OFFLOADED = "offloaded state"
"""The purpose under which states in host memory are counted."""


class HostStates:
    """The states of one unit in host memory, with events after the latest copies to it and the latest step."""

    def __init__(self, device: torch.device) -> None:
        """Initialize without memory. `device` is the GPU on which the states are stepped."""
        self.device = device
        self.waits = False
        """Whether readers of the unit's weights call `wait_for_step`, so that a step may run beside a forward."""

        self._stepped: Any = None  # event after the latest step of the weights on a stream of its own
        self._landed: list[Any] = []  # event after the latest copy to this memory; a list for finalizers

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return zeros [numel] in pinned memory. The memory is freed after the last tensor in it is deleted.

        Raises:
            LayoutError: the driver cannot pin the memory.
        """
        if self.device.type == "meta":
            return torch.empty(numel, dtype=dtype, device=self.device)
        nbytes = numel * dtype.itemsize
        if not nbytes:
            return torch.empty(0, dtype=dtype)
        _unpin_retired()
        try:
            pages = mmap(-1, nbytes)
        except OSError as error:
            raise LayoutError(f"offload: the host has no {nbytes} bytes for optimizer states: {error}") from error
        memory = torch.frombuffer(pages, dtype=torch.uint8)
        with _running_on(near_cpus(self.device)):
            ctypes.memset(memory.data_ptr(), 0, nbytes)
            pin(memory, self.device)
        retired = _Retired(pages, memory.data_ptr(), self._landed, unpin, os.getpid())
        weakref.finalize(memory.untyped_storage(), _retire, retired).atexit = False
        return memory.view(dtype)

    def record_step(self) -> None:
        """Record that the current stream, which others do not wait for, has stepped the unit's weights."""
        self._stepped = self._stepped or torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._stepped.record()

    def wait_for_step(self) -> None:
        """Order the current stream of `device`, which may not be the current device, after the latest step."""
        if self._stepped is not None:
            self._stepped.wait(torch.cuda.current_stream(self.device))

    def record_copies(self) -> None:
        """Record that the current stream has copied states to this memory."""
        if not self._landed:
            self._landed.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
        self._landed[0].record()

    def wait_for_copies(self) -> None:
        """Order the current stream after the latest copy to this memory."""
        for event in self._landed:
            event.wait()

    def settle(self) -> None:
        """Let the host wait until the latest states have arrived in this memory. The host may then read or write it."""
        for event in self._landed:
            event.synchronize()


def pin(memory: Tensor, device: torch.device) -> None:
    """Let the driver of `device` copy from and to `memory` without a copy in between.

    Raises:
        LayoutError: the driver refuses. The message has the limit of the process.
    """
    with torch.cuda.device(device):
        driver: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        error = int(driver.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if error:
        _clear_error(device)
        import resource  # this module does not exist on Windows

        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        words = "without a limit" if limit == resource.RLIM_INFINITY else f"at most {limit} bytes"
        raise LayoutError(
            f"offload: the driver could not pin {memory.nbytes} bytes of host memory for optimizer states (cudaError "
            f"{error}); this process may lock {words} (`ulimit -l`): raise the limit (`ulimit -l unlimited`, "
            "`docker run --ulimit memlock=-1`), free host memory, or keep more states on the GPU with offload=NBYTES"
        )


def _clear_error(device: torch.device) -> None:
    """Let the CUDA runtime forget its latest error. Otherwise an unrelated kernel launch would raise this error.

    PyTorch has no function for this, but each of its launches reads and clears the latest error.
    """
    with suppress(RuntimeError, AssertionError):  # an `AssertionError` if PyTorch was built without CUDA
        torch.zeros(1, device=device)


def unpin(pointer: int) -> None:
    """Undo `pin` of the memory at `pointer`."""
    driver: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    driver.cudaHostUnregister(pointer)


class _Retired(NamedTuple):
    """Pinned memory without tensors, which the driver may still copy to."""

    pages: mmap
    pointer: int
    landed: list[Any]
    unpin: Callable[[int], None]
    process: int


_retired: deque[_Retired] = deque()


def _retire(memory: _Retired) -> None:
    """Unpin and free memory, at once or in a later call. A finalizer must not wait."""
    _retired.append(memory)
    _unpin_retired()


def _unpin_retired() -> None:
    """Unpin and free the retired memory to which all copies have ended, unless a CUDA graph is captured."""
    if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        for _ in range(len(_retired)):
            memory = _retired.popleft()
            if memory.process != os.getpid():
                continue  # a forked child has no driver, and its parent frees the memory
            if all(event.query() for event in memory.landed):
                memory.unpin(memory.pointer)
            else:
                _retired.append(memory)


def near_cpus(device: torch.device, system: Path = Path("/sys")) -> set[int]:
    """Return the CPUs of the NUMA node that `device` is attached to. Empty if the node is unknown.

    The files are those that `torch.numa.binding` reads to bind a process.
    """
    try:
        place: Any = torch.cuda.get_device_properties(device)
        name = f"{place.pci_domain_id:04x}:{place.pci_bus_id:02x}:{place.pci_device_id:02x}.0"
        node = int((system / "bus/pci/devices" / name / "numa_node").read_text())
        ranges = (system / f"devices/system/node/node{node}/cpulist").read_text().strip().split(",")
    except (AssertionError, AttributeError, OSError, RuntimeError, ValueError):
        return set()
    bounds = [each.partition("-") for each in ranges if each]
    return {cpu for first, _, last in bounds for cpu in range(int(first), int(last or first) + 1)}


@contextmanager
def _running_on(cpus: set[int]) -> Iterator[None]:
    """Run this thread on the given CPUs, as far as the process may use them. New pages are allocated near them."""
    before = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    if not before & cpus:
        yield
        return
    os.sched_setaffinity(0, before & cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
