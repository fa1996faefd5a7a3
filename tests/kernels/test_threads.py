"""Stretches on threads: all elements once, no graph, errors come back, and operators take one thread each."""

import threading

import pytest
import torch
from shardlite_kernels import adamw_cpu
from shardlite_kernels.adamw_cpu import _STRETCH as STRETCH
from shardlite_kernels.threads import on_threads

from tests.kernels.adamw_cases import FORMS, assert_same_state, cpu_step, random_grad, random_state


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("numel", [0, 1, 95, 96, 97, 1000])
def test_stretches_cover_all_elements_once(threads, numel):
    seen, lock = [], threading.Lock()

    def work(start, stop):
        with lock:
            seen.append((start, stop))

    on_threads(numel, 32, work)
    seen.sort()
    assert [start for start, _ in seen] == [0, *(stop for _, stop in seen[:-1])]
    assert seen[-1][1] == numel
    assert all(start % 32 == 0 for start, _ in seen)
    assert len(seen) <= threads
    if numel == 1000:
        assert len(seen) == threads


def test_operators_in_a_stretch_take_one_thread_and_no_graph(threads):
    found, lock = [], threading.Lock()

    def work(start, stop):
        with lock:
            found.append((torch.get_num_threads(), torch.is_grad_enabled()))

    with torch.no_grad():
        on_threads(1000, 32, work)
    assert found == [(1, False)] * threads
    assert torch.get_num_threads() == threads
    others = []
    other = threading.Thread(target=lambda: others.append(torch.get_num_threads()))
    other.start()
    other.join()
    assert others == [threads], "what other threads find is as before"


def test_an_error_in_one_stretch_comes_back_when_all_have_ended(threads):
    ended = []

    def work(start, stop):
        if start == 0:
            raise RuntimeError("of the first stretch")
        ended.append(start)

    with pytest.raises(RuntimeError, match="of the first stretch"):
        on_threads(1000, 32, work)
    assert len(ended) == threads - 1


@pytest.mark.parametrize("form", FORMS, ids="-".join)
def test_threads_change_no_bit_of_a_step(form):
    numel = 2 * STRETCH + 37
    states = [random_state(form, numel, 0) for _ in range(2)]
    grad, before = random_grad(numel, 0), torch.get_num_threads()
    try:
        for state, count in zip(states, (1, 2), strict=True):
            torch.set_num_threads(count)
            adamw_cpu(state, grad, cpu_step(numel))
    finally:
        torch.set_num_threads(before)
    assert_same_state(*states)
