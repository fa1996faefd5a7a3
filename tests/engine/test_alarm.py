"""The alarm of steps inside a backward, with a GPU that is played: it copies when it is waited for, and not before."""

from types import SimpleNamespace

import pytest
import torch

from shardlite.errors import NonFiniteError
from shardlite.optim import in_backward


class Gpu:
    """Stands in for `torch` in the file under test: pinned memory, one stream, and a list of what happened."""

    def __init__(self):
        self.events = []
        self.capturing = False
        self.int32 = torch.int32
        self.cuda = SimpleNamespace(
            Event=object,
            current_stream=lambda device: SimpleNamespace(record_event=self.record),
            is_current_stream_capturing=lambda: self.capturing,
        )
        self._queued = []

    def empty(self, shape, *, dtype, pin_memory):
        assert (shape, dtype, pin_memory) == ((), torch.int32, True)
        return Pinned(self)

    def maximum(self, left, right):
        return Flag(max(left.value, right.value))

    def queue(self, copy):
        self._queued.append(copy)

    def record(self):
        copies, self._queued = self._queued, []
        self.events.append("record")
        return SimpleNamespace(synchronize=lambda: self.arrive(copies))

    def arrive(self, copies):
        self.events.append("synchronize")
        for copy in copies:
            copy()


class Pinned:
    def __init__(self, gpu):
        self.gpu, self.value = gpu, None

    def copy_(self, flag, *, non_blocking):
        assert non_blocking, "the host must not wait"
        self.gpu.queue(lambda: setattr(self, "value", flag.value))

    def __int__(self):
        assert self.value is not None, "read before the copy was waited for"
        return self.value


class Flag:
    is_cuda, device = True, "cuda:0"

    def __init__(self, value):
        self.value = value

    def __gt__(self, other):
        return Flag(int(self.value > other))

    def to(self, dtype):
        return self

    def __int__(self):
        raise AssertionError("the host has waited for the device")


@pytest.fixture
def gpu(monkeypatch):
    gpu = Gpu()
    monkeypatch.setattr(in_backward, "torch", gpu)
    return gpu


def step(alarm, *flags):
    for flag in flags:
        alarm.note(Flag(flag))
    alarm.look()


def test_a_good_step_is_waited_for_one_step_later_only(gpu):
    alarm = in_backward._Alarm()
    step(alarm, 0, 0)
    assert gpu.events == ["record"]
    step(alarm, 0)
    assert gpu.events == ["record", "synchronize", "record"]


def test_a_bad_gradient_is_told_one_step_later_and_once(gpu):
    alarm = in_backward._Alarm()
    step(alarm, 0)
    step(alarm, 0, 1, 0)
    with pytest.raises(NonFiniteError, match="go on from a checkpoint"):
        step(alarm, 0)
    step(alarm, 0)
    step(alarm, 0)


def test_a_bad_last_step_is_told_by_the_next_one_though_that_is_bad_as_well(gpu):
    alarm = in_backward._Alarm()
    step(alarm, 1)
    with pytest.raises(NonFiniteError):
        step(alarm, 1)


def test_nothing_is_looked_at_while_a_graph_is_captured(gpu):
    alarm = in_backward._Alarm()
    gpu.capturing = True
    step(alarm, 1)
    assert gpu.events == []


def test_steps_that_noted_nothing_leave_the_last_flag_for_later(gpu):
    alarm = in_backward._Alarm()
    step(alarm, 1)
    step(alarm)
    with pytest.raises(NonFiniteError):
        step(alarm, 0)
