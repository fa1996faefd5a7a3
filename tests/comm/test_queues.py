"""Queues, and the parts of GPU code that can be tested without a GPU."""

import threading
import weakref
from datetime import timedelta
from typing import NoReturn

import pytest
import torch
from torch import nn

import shardlite.comm.context
from shardlite import AdamW, CommError, ShardLite
from shardlite.comm import streams
from shardlite.comm.program_streams import ProgramStreams, check_connections
from shardlite.comm.streams import CudaStreamQueue, ThreadQueue, make_queue
from shardlite.comm.transport.gloo import StagedTransport
from shardlite.comm.transport.nccl import NcclTransport
from tests.support.patience import seconds, until
from tests.support.simulated_cuda import Simulated
from tests.support.twins.sharded import WIDE, same_states, take_step

CPU = torch.device("cpu")
CUDA = torch.device("cuda:0")


def test_a_thread_queue_works_in_order_and_hands_errors_on():
    queue, done = ThreadQueue("test"), []
    gate = threading.Event()
    first = queue.submit(lambda: (gate.wait(seconds(10)), done.append(1)))
    failing = queue.submit(lambda: 1 / 0)
    last = queue.submit(lambda: done.append(2))
    assert not first.done()
    assert not last.wait_unless(lambda: True)
    gate.set()
    last.wait()
    assert done == [1, 2]
    assert first.done()
    with pytest.raises(ZeroDivisionError):
        failing.wait()


def test_an_operation_that_is_over_holds_nothing():
    queue, gate, was_over = ThreadQueue("test"), threading.Event(), []

    class Operation:
        def __call__(self) -> None:
            gate.wait(seconds(10))

    operation = Operation()
    work = queue.submit(operation)
    end = weakref.finalize(operation, lambda: was_over.append(work.done()))
    del operation
    assert end.alive
    gate.set()
    work.wait()
    assert was_over == [False]


def test_a_deleted_queue_is_not_waited_for_and_its_thread_ends_by_itself(monkeypatch):
    """A finalizer must not join: it may run while its thread holds a lock that the queue's thread needs."""
    monkeypatch.setattr(threading.Thread, "join", lambda *_: pytest.fail("a finalizer waits for a thread"))
    queue, gate = ThreadQueue("deleted"), threading.Event()
    work, last = queue.submit(lambda: gate.wait(seconds(10)) and None), queue.submit(lambda: None)
    thread = next(each for each in streams._threads if each.name == "shardlite-deleted")
    del queue
    assert not work.done()
    gate.set()
    last.wait()
    until(lambda: not thread.is_alive())
    assert thread not in streams._threads


def test_the_end_of_the_program_joins_the_threads_of_all_queues(monkeypatch):
    monkeypatch.setattr(streams, "_threads", {})
    queues, done = [ThreadQueue(f"test {number}") for number in range(3)], []
    threads = list(streams._threads)
    for queue in queues:
        queue.submit(lambda: done.append(1))
    del queues[0], queue
    streams.end_queues()
    assert done == [1, 1, 1]
    assert not any(each.is_alive() for each in threads)
    assert not streams._threads


def test_one_queue_for_all_streams_is_warned_of(monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    check_connections(CUDA)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    check_connections(CPU)
    with pytest.warns(UserWarning, match="one queue"):
        check_connections(CUDA)


def test_the_cpu_has_thread_queues_only():
    assert isinstance(make_queue("test", CPU, ProgramStreams(CPU), blocking=False), ThreadQueue)
    assert isinstance(make_queue("test", CPU, ProgramStreams(CPU), blocking=True), ThreadQueue)


@pytest.fixture
def cuda(monkeypatch):
    simulated = Simulated()
    monkeypatch.setattr(torch.cuda, "Stream", simulated.new_stream)
    monkeypatch.setattr(torch.cuda, "Event", simulated.new_event)
    monkeypatch.setattr(torch.cuda, "current_stream", simulated.stream_of_thread)
    monkeypatch.setattr(torch.cuda, "stream", simulated.on)
    monkeypatch.setattr(torch.cuda, "device", lambda _: simulated.on(simulated.stream_of_thread(None)))
    return simulated


@pytest.mark.parametrize("blocking", [False, True])
def test_a_stream_queue_is_behind_its_caller_and_its_caller_behind_it(cuda, blocking):
    queue = make_queue("test", CUDA, ProgramStreams(CUDA), blocking=blocking)
    cuda.run("make gradient")
    work = queue.submit(lambda: cuda.run("reduce"))
    work.wait()
    cuda.run("step")
    assert cuda.log == [
        ("compute", "make gradient"),
        ("compute", "record 1"),
        ("side 1", "wait 1"),
        ("side 1", "reduce"),
        ("side 1", "record 2"),
        ("compute", "wait 2"),
        ("compute", "step"),
    ]
    assert work.done()


def test_an_event_that_a_thread_will_record_is_not_used_before(cuda):
    queue = CudaStreamQueue(CUDA, ThreadQueue("test"), ProgramStreams(CUDA))
    started, gate = threading.Event(), threading.Event()
    work = queue.submit(lambda: (started.set(), gate.wait(seconds(10))))
    assert started.wait(seconds(10))
    del work
    later = queue.submit(lambda: cuda.run("reduce"))
    gate.set()
    later.wait()
    recorded = [{what for where, what in cuda.log if where == by and "record" in what} for by in ("compute", "side 1")]
    assert not set.intersection(*recorded)


def test_only_messages_that_block_take_a_thread(cuda):
    threads = []
    for blocking in (False, True):
        queue = make_queue("test", CUDA, ProgramStreams(CUDA), blocking=blocking)
        queue.submit(lambda: threads.append(threading.current_thread())).wait()
    assert threads[0] is threading.current_thread()
    assert threads[1] is not threading.current_thread()


def test_the_host_goes_on_while_a_thread_waits_for_messages(cuda):
    queue = CudaStreamQueue(CUDA, ThreadQueue("test"), ProgramStreams(CUDA))
    gate = threading.Event()
    work = queue.submit(lambda: (gate.wait(seconds(10)), cuda.run("reduce")))
    cuda.run("compute on")
    assert not work.done()
    assert not work.wait_unless(lambda: True)
    gate.set()
    assert work.wait_unless(lambda: False)
    assert [what for _, what in cuda.log if "wait" not in what and "record" not in what] == ["compute on", "reduce"]


def test_an_error_on_a_stream_queue_is_the_callers(cuda):
    queue = CudaStreamQueue(CUDA, ThreadQueue("test"), ProgramStreams(CUDA))
    with pytest.raises(ZeroDivisionError):
        queue.submit(lambda: 1 / 0).wait()


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(30, 41), nn.Tanh(), nn.Linear(41, 30)) for _ in range(3)])


def trained(group, stage) -> dict[str, torch.Tensor]:
    model = ShardLite(net(), stage=stage, group=group)
    optimizer = AdamW(model.parameters(), lr=0.01)
    for step in range(3):
        x = torch.randn(4, 30, generator=torch.Generator().manual_seed(10 * step + group.rank()))
        model(x).pow(2).mean().backward()
        model.clip_grad_norm_(0.1)
        take_step(optimizer)
    return model.full_state_dict()


@pytest.mark.ranks(2, WIDE)
def test_training_over_the_transports_for_gpus_gives_the_same_bits(group):
    """Train over the transports for GPUs, which carry CPU tensors over gloo as well."""
    connect = shardlite.comm.context.connect
    for stage in (0, 1, 2, 3):
        expected = trained(group, stage)
        for make in (NcclTransport, lambda group: StagedTransport(group, timedelta(seconds=60))):
            shardlite.comm.context.connect = lambda group, *_, make=make, **__: make(group)
            try:
                weights = trained(group, stage)
            finally:
                shardlite.comm.context.connect = connect
            same_states("state", weights, expected)


class _Reports:
    """Finds a wait in vain when it is asked for the third time."""

    failed = ""

    def __init__(self) -> None:
        self.asked, self.went_on = 0, 0

    def deadlock_reason(self) -> str:
        self.asked += 1
        return "never" if self.asked == 3 else ""

    def abort_wait(self, why: str) -> NoReturn:
        raise CommError(why)

    def record_progress(self) -> None:
        self.went_on += 1


def test_a_long_wait_is_asked_about(monkeypatch):
    monkeypatch.setattr("shardlite.comm.streams.SLOW", 0.01)
    go, reports = threading.Event(), _Reports()
    queue = ThreadQueue("test", reports)
    work = queue.submit(lambda: go.wait() and None)
    with pytest.raises(CommError, match="never"):
        work.wait()
    assert (reports.asked, reports.went_on) == (3, 0)
    go.set()
    work.wait()
    late = queue.submit(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        late.wait()


def test_an_operation_may_end_in_a_timeout_of_its_own(monkeypatch):
    monkeypatch.setattr("shardlite.comm.streams.SLOW", 0.01)

    def times_out() -> None:
        raise TimeoutError("of something else")

    with pytest.raises(TimeoutError, match="of something else"):
        ThreadQueue("test", _Reports()).submit(times_out).wait()
