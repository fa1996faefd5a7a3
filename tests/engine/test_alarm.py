"""The alarm of steps in the backward, on a GPU whose copies to the host arrive on demand."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from shardlite.errors import NonFiniteError
from shardlite.optim import AdamW, in_backward
from shardlite.telemetry import lagged


class Gpu:
    """Copies to the host are in flight until they `arrive`."""

    def __init__(self):
        self.capturing = False
        self.in_flight = []

    def copy(self, seen, numbers, non_blocking):
        assert non_blocking, "the host must not wait"
        value = numbers.as_subclass(Tensor).clone()
        self.in_flight.append(lambda: seen.as_subclass(Tensor).copy_(value))

    def arrive(self):
        while self.in_flight:
            self.in_flight.pop(0)()


class Flag(Tensor):
    """A number on the GPU. The host must not wait for it."""

    def __int__(self):
        raise AssertionError("the host has waited for the device")


@pytest.fixture
def gpu(monkeypatch):
    gpu = Gpu()
    stream = SimpleNamespace(record_event=lambda: None)
    cuda = SimpleNamespace(is_current_stream_capturing=lambda: gpu.capturing, current_stream=lambda _: stream)

    class Pinned(Tensor):
        def copy_(self, numbers, *, non_blocking):
            gpu.copy(self, numbers, non_blocking)

    def zeros(shape, *, dtype, pin_memory):
        return torch.zeros(shape, dtype=dtype).as_subclass(Pinned)

    monkeypatch.setattr(lagged, "torch", SimpleNamespace(cuda=cuda, zeros=zeros))
    monkeypatch.setattr(in_backward, "is_here", lambda _: False)
    return gpu


def step(alarm, *flags, kind=Flag):
    for flag in flags:
        alarm.note(torch.tensor(flag).as_subclass(kind))
    alarm.look()


def steps_until_told(gpu, alarm, *, lag):
    """Return how many good steps are taken until the alarm raises; copies arrive `lag` steps late."""
    for taken in range(1, 20):
        if taken > lag:
            gpu.arrive()
        try:
            step(alarm, 0)
        except NonFiniteError:
            return taken
    raise AssertionError("it was not told")


@pytest.mark.parametrize("lag", range(in_backward.LATER))
def test_all_ranks_are_told_in_the_same_step_however_late_copies_arrive(gpu, lag):
    alarm = in_backward.Alarm()
    step(alarm, 0)
    step(alarm, 0, 1, 0)
    assert steps_until_told(gpu, alarm, lag=lag) == in_backward.LATER


def test_a_host_that_is_further_ahead_is_told_when_it_hears(gpu):
    alarm = in_backward.Alarm()
    step(alarm, 1)
    assert steps_until_told(gpu, alarm, lag=7) == 8


def test_later_bad_steps_change_nothing_and_it_is_told_once(gpu):
    alarm = in_backward.Alarm()
    step(alarm, 1)
    gpu.arrive()
    for _ in range(in_backward.LATER - 1):
        step(alarm, 1)
        gpu.arrive()
    with pytest.raises(NonFiniteError):
        step(alarm, 1)
    for _ in range(10):
        step(alarm, 0)
        gpu.arrive()


def test_nothing_is_looked_at_while_a_graph_is_captured_but_noted(gpu):
    alarm = in_backward.Alarm()
    step(alarm, 1)
    gpu.arrive()
    gpu.capturing = True
    for _ in range(2 * in_backward.LATER):
        step(alarm, 0)
    gpu.capturing = False
    with pytest.raises(NonFiniteError):
        step(alarm, 0)


def test_steps_that_noted_nothing_count(gpu):
    alarm = in_backward.Alarm()
    step(alarm, 1)
    gpu.arrive()
    for _ in range(in_backward.LATER - 1):
        step(alarm)
    with pytest.raises(NonFiniteError):
        step(alarm, 0)


def test_a_load_makes_it_forget(gpu):
    optimizer = AdamW([nn.Parameter(torch.ones(1))], in_backward=True)
    saved = optimizer.state_dict()
    step(optimizer._backward_steps.alarm, 1)
    optimizer.load_state_dict(saved)
    for _ in range(10):
        step(optimizer._backward_steps.alarm, 0)
        gpu.arrive()
    optimizer.step()


def test_who_keeps_weights_waits(gpu):
    alarm = in_backward.Alarm()
    alarm.wait()
    step(alarm, 0, kind=Tensor)
    alarm.wait()
    step(alarm, 1, kind=Tensor)
    with pytest.raises(NonFiniteError):
        alarm.wait()
