"""States in host memory: pinned memory near the GPU, which is unpinned at its end."""

import ctypes
import gc
import os
import resource
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from shardlite import LayoutError
from shardlite.params import host_states
from shardlite.params.host_states import HostStates, near_cpus

CUDA = torch.device("cuda", 0)


@pytest.fixture
def driver():
    """A driver that pins whatever it is given. `pinned` maps addresses to bytes."""
    gc.collect()  # finalizers of other tests use the real driver
    fake = SimpleNamespace(pinned={}, error=0)

    def register(pointer, nbytes, flags):
        assert flags == 0
        if not fake.error:
            fake.pinned[pointer] = nbytes
        return fake.error

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=lambda pointer: fake.pinned.pop(pointer))
    with mock.patch.object(torch.cuda, "cudart", return_value=runtime), mock.patch.object(torch.cuda, "device"):
        yield fake
        gc.collect()


def test_memory_is_pinned_as_long_as_it_is_used(driver):
    states = HostStates(CUDA)
    memory = states.zeros(1000, torch.bfloat16)
    assert memory.shape == (1000,)
    assert memory.dtype == torch.bfloat16
    assert not memory.any()
    assert driver.pinned == {memory.data_ptr(): 2000}
    assert memory.data_ptr() % resource.getpagesize() == 0, "no page is pinned twice"
    assert memory.untyped_storage().nbytes() == 2000
    part = memory[10:20]
    del memory
    assert driver.pinned
    del part
    gc.collect()
    assert not driver.pinned


def test_memory_without_elements_is_not_pinned(driver):
    assert HostStates(CUDA).zeros(0, torch.float32).numel() == 0
    assert not driver.pinned


@pytest.mark.parametrize("captures", [False, True])
def test_memory_is_freed_after_the_last_copy(driver, captures):
    """The finalizer waits neither for the GPU nor for the end of a capture: a later call frees the memory."""
    states, answers = HostStates(CUDA), [False, True]
    memory = states.zeros(8, torch.float32)
    event = SimpleNamespace(record=lambda: None, query=lambda: captures or answers.pop(0))
    with mock.patch.object(torch.cuda, "Event", return_value=event):
        states.record_copies()
    address = memory.data_ptr()
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=captures),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=captures),
    ):
        del memory
        gc.collect()
    assert driver.pinned == {address: 32}
    ctypes.memset(address, 1, 32)  # the driver may copy to it
    other = HostStates(CUDA).zeros(8, torch.float32)
    assert list(driver.pinned) == [other.data_ptr()]
    assert not other.any()


@pytest.mark.parametrize(("limit", "words"), [(8 << 20, "at most 8388608 bytes"), (resource.RLIM_INFINITY, "without")])
def test_a_driver_that_refuses_is_an_error_with_the_limit(driver, limit, words):
    driver.error = 2
    with (
        mock.patch.object(resource, "getrlimit", return_value=(limit, limit)),
        mock.patch.object(torch, "zeros", side_effect=RuntimeError) as launch,
        pytest.raises(LayoutError, match=rf"could not pin 4000 bytes .*cudaError 2.* may lock {words}.*memlock"),
    ):
        HostStates(CUDA).zeros(1000, torch.float32)
    launch.assert_called_once_with(1, device=CUDA)  # reads and clears the error of the driver


@pytest.mark.parametrize(
    ("node", "cpus", "expected"),
    [("1", "2-4,8\n", {2, 3, 4, 8}), ("0", "0", {0}), ("-1", None, set()), (None, None, set())],
)
def test_memory_is_near_the_gpu(tmp_path, node, cpus, expected):
    if node is not None:
        place = tmp_path / "bus/pci/devices/0001:0a:1f.0"
        place.mkdir(parents=True)
        (place / "numa_node").write_text(node)
    if cpus is not None:
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus)
    properties = SimpleNamespace(pci_domain_id=1, pci_bus_id=10, pci_device_id=31)
    with mock.patch.object(torch.cuda, "get_device_properties", return_value=properties):
        assert near_cpus(CUDA, tmp_path) == expected


def test_pages_are_written_on_the_cpus_of_the_node(driver):
    del driver
    allowed, used = os.sched_getaffinity(0), []
    one = {min(allowed)}
    memset = host_states.ctypes.memset

    def writing(*arguments):
        used.append(os.sched_getaffinity(0))
        return memset(*arguments)

    for cpus in (one | {4095}, set(), {4095}):
        with mock.patch.object(host_states, "near_cpus", return_value=cpus):
            with mock.patch.object(host_states.ctypes, "memset", writing):
                HostStates(CUDA).zeros(8, torch.float32)
    assert used == [one, allowed, allowed]
    assert os.sched_getaffinity(0) == allowed


def test_readers_wait_on_the_gpu_of_the_states():
    """The current GPU of the program may be another one."""
    states, event = HostStates(torch.device("cuda:1")), mock.Mock()
    states._stepped = event
    with mock.patch.object(torch.cuda, "current_stream", side_effect=lambda device=None: device):
        states.wait_for_step()
    event.wait.assert_called_once_with(torch.device("cuda:1"))
