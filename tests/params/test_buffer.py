"""A buffer knows whether other tensors view it, and keeps the views of the library. Pools keep buffers."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardlite.params import Buffer, BufferPool
from shardlite.telemetry import Ledger


def test_own_views_are_made_once_and_are_no_escape():
    buffer, made = Buffer(torch.empty(64, dtype=torch.uint8)), []

    def halves(memory):
        made.append(memory)
        return [memory[:32], memory[32:]]

    kept = buffer.views("a unit", halves)
    assert buffer.views("a unit", halves) is kept
    assert buffer.views("another unit", halves) is not kept
    assert len(made) == 2
    assert not buffer.escaped()
    outside = kept[0].view(torch.float32)
    assert buffer.escaped()
    del outside
    assert not buffer.escaped()


class Mode(TorchDispatchMode):
    """A mode of the program."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("what", ["a mode", "a transform"])
def test_views_that_may_be_of_another_kind_are_not_kept(what):
    buffer = Buffer(torch.zeros(64, dtype=torch.uint8))

    def whole(memory):
        return [memory.view(torch.float32)]

    if what == "a mode":
        with Mode():
            inside = buffer.views("a unit", whole)
    else:
        inside = []
        torch.func.vmap(lambda x: inside.extend(buffer.views("a unit", whole)) or x)(torch.zeros(2))
    later = buffer.views("a unit", whole)
    assert later is not inside
    assert type(later[0]) is torch.Tensor
    assert buffer.views("a unit", whole) is later


def pool_of(most, *, on_gpu=True):
    """A pool that is like one on a GPU, and the sizes that it has allocated."""
    allocated, ledger = [], Ledger()

    def empty(numel, dtype):
        allocated.append(numel)
        return torch.empty(numel, dtype=dtype)

    context = SimpleNamespace(empty=empty, ledger=ledger, streams=SimpleNamespace(on_gpu=on_gpu))
    return BufferPool(context, "gather buffers", most=most), allocated, ledger


def test_an_owner_gets_the_buffer_that_it_had_last():
    pool, allocated, _ = pool_of(2)
    first, second = pool.take("first", 64), pool.take("second", 64)
    pool.give_back(first)
    pool.give_back(second)
    assert pool.take("second", 64) is second
    assert pool.take("second", 64) is first  # it had the other one last, which is in use
    pool.give_back(second)
    assert pool.take("first", 64) is second
    assert allocated == [64, 64]


def test_a_new_owner_gets_the_smallest_that_is_large_enough():
    pool, allocated, _ = pool_of(3)
    for buffer in [pool.take(size, size) for size in (96, 32, 64)]:
        assert pool.give_back(buffer)
    assert pool.take("new", 48).nbytes == 64
    assert pool.take("newer", 48).nbytes == 96
    assert allocated == [96, 32, 64]


def test_the_smallest_gives_way_to_a_larger_one():
    pool, _, ledger = pool_of(2)
    for buffer in [pool.take(size, size) for size in (32, 64)]:
        pool.give_back(buffer)
    del buffer
    large = pool.take("large", 128)
    assert ledger.current() == {"gather buffers": 64 + 128}
    assert ledger.peak() == {"gather buffers": 64 + 128}  # never all three
    assert pool.give_back(large)
    assert pool.take(32, 32).nbytes == 64


def test_more_than_are_kept_are_freed_when_they_are_given_back():
    pool, _, ledger = pool_of(1)
    kept, more = pool.take("kept", 64), pool.take("more", 64)
    assert pool.is_surplus(more)
    assert not pool.is_surplus(kept)
    assert not pool.give_back(more)
    assert pool.give_back(kept)
    del more
    assert ledger.current() == {"gather buffers": 64}
    assert pool.last("more") is None
    assert pool.fits(kept, 32)


class Carrier:
    """A transport with memory of its own, in which all bits are set."""

    def empty_persistent(self, nbytes, device):
        return torch.full((nbytes,), 0xFF, dtype=torch.uint8, device=device)


def test_only_those_that_are_kept_are_memory_of_the_carrier():
    context = SimpleNamespace(
        empty=lambda numel, dtype: torch.zeros(numel, dtype=dtype),
        ledger=Ledger(),
        streams=SimpleNamespace(on_gpu=True),
        device=torch.device("cpu"),
    )
    pool = BufferPool(context, "gather buffers", most=2, carrier=Carrier())
    buffers = [pool.take(place, 8) for place in range(3)]
    assert [bool(each.bytes.all()) for each in buffers] == [True, True, False]


def test_a_buffer_that_others_view_is_given_up():
    pool, allocated, _ = pool_of(1)
    buffer = pool.take("a unit", 64)
    view = buffer.bytes[:8]
    assert not pool.give_back(buffer)
    del buffer
    assert pool.last("a unit") is None
    assert pool.take("a unit", 64).bytes.data_ptr() != view.data_ptr()
    assert allocated == [64, 64]


def test_memory_is_counted_for_the_purpose_of_who_takes_it():
    pool, _, ledger = pool_of(1)
    buffer = pool.take("a unit", 64)
    ledger.track("gradients", buffer.bytes)
    pool.give_back(buffer)
    pool.take("a unit", 64)
    assert ledger.current() == {"gather buffers": 64, "gradients": 0}


@pytest.mark.parametrize(("most", "on_gpu"), [(2, False), (0, True)])
def test_nothing_is_kept_on_a_cpu_or_where_none_is_to_be(most, on_gpu):
    pool, allocated, ledger = pool_of(most, on_gpu=on_gpu)
    buffer = pool.take("a unit", 64)
    assert pool.fits(buffer, 64)
    assert not pool.fits(buffer, 32)
    assert not pool.is_surplus(buffer)
    assert not pool.give_back(buffer)
    del buffer
    assert ledger.current() == {"gather buffers": 0}
    pool.take("a unit", 64)
    assert allocated == [64, 64]
