"""The alarm of steps inside a backward, with a GPU that is played: its copies arrive when the test says so."""

from types import SimpleNamespace

import pytest
import torch

from shardlite.errors import NonFiniteError
from shardlite.optim import in_backward


class Gpu:
    """Stands in for `torch` in the file under test. Copies to the host are under way until they `arrive`."""

    def __init__(self):
        self.capturing = False
        self.int32 = torch.int32
        self.cuda = SimpleNamespace(is_current_stream_capturing=lambda: self.capturing)
        self.under_way = []

    def zeros(self, shape, *, dtype, pin_memory):
        assert (shape, dtype, pin_memory) == ((), torch.int32, True)
        return Pinned(self)

    def zeros_like(self, flag):
        return type(flag)(0)

    def maximum(self, left, right):
        return Flag(max(left.value, right.value))

    def where(self, condition, left, right):
        return left if condition.value else right

    def arrive(self):
        while self.under_way:
            self.under_way.pop(0)()


class Pinned:
    def __init__(self, gpu):
        self.gpu, self.value = gpu, 0

    def copy_(self, first, *, non_blocking):
        assert non_blocking, "the host must not wait"
        value = first.value
        self.gpu.under_way.append(lambda: setattr(self, "value", value))

    def numpy(self):
        return self.value


class Flag:
    is_cuda, device = True, SimpleNamespace(type="cuda")

    def __init__(self, value):
        self.value = value

    def __gt__(self, other):
        return type(self)(int(self.value > other))

    def __mul__(self, number):
        return type(self)(self.value * number)

    def copy_(self, other):
        self.value = other.value

    def to(self, dtype):
        return self

    def __int__(self):
        raise AssertionError("the host has waited for the device")


class Waited(Flag):
    def __int__(self):
        return self.value


@pytest.fixture
def gpu(monkeypatch):
    gpu = Gpu()
    monkeypatch.setattr(in_backward, "torch", gpu)
    return gpu


def step(alarm, *flags, kind=Flag):
    for flag in flags:
        alarm.note(kind(flag))
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
    alarm = in_backward._Alarm()
    step(alarm, 0)
    step(alarm, 0, 1, 0)
    assert steps_until_told(gpu, alarm, lag=lag) == in_backward.LATER


def test_a_host_that_is_further_ahead_is_told_when_it_hears(gpu):
    alarm = in_backward._Alarm()
    step(alarm, 1)
    assert steps_until_told(gpu, alarm, lag=7) == 8


def test_later_bad_steps_change_nothing_and_it_is_told_once(gpu):
    alarm = in_backward._Alarm()
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
    alarm = in_backward._Alarm()
    step(alarm, 1)
    gpu.arrive()
    gpu.capturing = True
    for _ in range(2 * in_backward.LATER):
        step(alarm, 0)
    gpu.capturing = False
    with pytest.raises(NonFiniteError):
        step(alarm, 0)


def test_steps_that_noted_nothing_count(gpu):
    alarm = in_backward._Alarm()
    step(alarm, 1)
    gpu.arrive()
    for _ in range(in_backward.LATER - 1):
        step(alarm)
    with pytest.raises(NonFiniteError):
        step(alarm, 0)


def test_a_load_makes_it_forget(gpu):
    steps = in_backward.InBackwardSteps(lambda: None)
    steps.note(Flag(1))
    steps.close([])
    steps.forget()
    gpu.arrive()
    for _ in range(10):
        steps.note(Flag(0))
        steps.close([])
    assert steps._alarm._first.value == 0


def test_who_keeps_weights_waits(gpu):
    alarm = in_backward._Alarm()
    alarm.wait()
    step(alarm, 0, kind=Waited)
    alarm.wait()
    step(alarm, 1, kind=Waited)
    with pytest.raises(NonFiniteError):
        alarm.wait()
