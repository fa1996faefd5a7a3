"""The simulated GPU finds each wait that the library forgets, so a training without a race says something.

Without the mutants these programs have no race: `test_stream_races.py`.
"""

from collections.abc import Callable
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple

import pytest
import torch

from shardlite.comm.program_streams import ProgramStreams
from shardlite.comm.streams import CudaStreamQueue, HostWork, _StreamWork
from shardlite.comm.transport.nccl import Communicator
from shardlite.engine.backward import Backward
from shardlite.grads.backward_run import BackwardRun
from shardlite.grads.bucket import Bucket
from shardlite.grads.reduce import ReduceQueue
from shardlite.grads.stream_run import StreamRun
from shardlite.weights.all_gather import GatherQueue
from shardlite.weights.negotiation import Passes
from shardlite.weights.unshard import Gatherer
from tests.comm.streams import simulated_gpu
from tests.comm.streams.programs import (
    KEPT,
    TwoStreams,
    accumulates_elsewhere,
    alternates,
    grows,
    has_two_streams,
    is_dropped,
    is_interrupted,
    is_replaced,
    moves,
)
from tests.comm.streams.programs import trains as training
from tests.comm.streams.simulated_gpu import Gpu


class Mutant(NamedTuple):
    """One method without one of its waits."""

    owner: Any
    method: str
    without: Callable[..., Any]
    program: Callable[[Gpu], None]


def nothing(*_: Any, **__: Any) -> None:
    """Wait for nothing."""


def wait_of_the_host_alone(work, meanwhile=None):
    work._host.wait(meanwhile)


def submit(queue, *operations, behind=None, begins=True, ends_late=True):
    begin, end = behind or torch.cuda.current_stream().record_event(), torch.cuda.Event()
    host = HostWork()
    with host, torch.cuda.stream(queue._stream), torch.no_grad():
        if begins:
            queue._stream.wait_event(begin)
        if not ends_late:
            end.record(queue._stream)
        for operation in operations:
            operation()
        if ends_late:
            end.record(queue._stream)
    return _StreamWork(queue._device, end, host, queue._free)


def event_of_the_latest_operation(queue):
    """Return the begin, the end, the end and the begin of operations by turns, so that an end becomes a begin."""
    one, other = torch.cuda.Event(), torch.cuda.Event()
    return next(vars(queue).setdefault("two events", cycle([one, other, other, one])))


def submit_beside(queue, *operations, behind=None, **without):
    """Leave out waits of the queue of negotiation only."""
    return submit(queue, *operations, behind=behind, **(without if queue._thread is not None else {}))


def move_at_once(program):
    other = program.other()
    program._home = other or program._home
    return other


def bind_at_once(_, unit):
    unit.landed()


def forget_the_gather(_, unit):
    unit.landed()


def clear_at_once(run, count):
    for reduction in run.started[run.landed : count]:
        reduction.bucket.clear()
        run.landed += 1


def end_passes_at_once(passes):
    while passes._ended:
        passes._ended.pop(0).revise()


def step_at_once(queue, unit, flat):
    unit.mark_stepped(flat)


def free_at_once(run):
    run.copying.clear()


def copy_at_once(bucket):
    """Copy on the program's stream, into memory of the queue's."""
    run, gradients = copy_in(bucket)
    run()
    return nothing, gradients


copy_in = Bucket.copy_in


def start_behind_the_first_gradient(run, unit):
    last = run._last
    if last is not None and last is not unit and last not in run.reduced:
        run._moments[last] = run._began


NOT_NEEDED = "a unit whose weights the backward does not need"
FROZEN = partial(has_two_streams, block=TwoStreams, trains_both=False)

MUTANTS = {
    "the program waits for no operation": Mutant(
        _StreamWork, "wait", wait_of_the_host_alone, partial(training, name="stage 3")
    ),
    "an operation does not wait for the program": Mutant(
        CudaStreamQueue, "submit", partial(submit, begins=False), partial(training, name="stage 3")
    ),
    "the end of an operation is recorded at its start": Mutant(
        CudaStreamQueue, "submit", partial(submit, ends_late=False), partial(training, name="stage 2")
    ),
    "an event is recorded again before the program has waited for it": Mutant(
        CudaStreamQueue, "event", event_of_the_latest_operation, partial(training, name="stage 3")
    ),
    "weights are used before they are gathered": Mutant(
        Passes, "wait", bind_at_once, partial(training, name="stage 3")
    ),
    "weights that stay are used before they are gathered": Mutant(
        GatherQueue, "wait", forget_the_gather, partial(training, name="stage 2")
    ),
    "a bucket is freed before it is reduced": Mutant(
        BackwardRun, "_land", clear_at_once, partial(training, name="stage 3")
    ),
    "gradients are used before they are reduced": Mutant(
        BackwardRun, "_land", clear_at_once, partial(training, name="stage 0")
    ),
    "a step does not wait for gathers": Mutant(
        Passes, "settle", end_passes_at_once, partial(is_interrupted, event=NOT_NEEDED)
    ),
    "a step in the backward does not wait for a gather": Mutant(
        ReduceQueue, "_before_step", step_at_once, partial(is_interrupted, event=NOT_NEEDED, in_backward=True)
    ),
    "messages are not waited for": Mutant(
        simulated_gpu._Sent, "wait", nothing, partial(training, name="stage 3, ring")
    ),
    "another stream does not wait for a gather": Mutant(Gatherer, "follow", nothing, FROZEN),
    "a buffer is given away while another stream reads it": Mutant(ProgramStreams, "wait_for", nothing, FROZEN),
    "a gradient of another stream is read before it is there": Mutant(
        ProgramStreams, "other", nothing, partial(accumulates_elsewhere, dims=(1,))
    ),
    "a gradient of another stream is freed while it is read": Mutant(
        ProgramStreams, "record_stream", nothing, accumulates_elsewhere
    ),
    "a model is freed with operations in flight": Mutant(
        ProgramStreams, "wait_outside_captures", nothing, partial(is_dropped, where="forward")
    ),
    "a cache moves to another stream": Mutant(
        Backward, "_kept", lambda _: iter(()), partial(moves, event="an evaluation", reshard_after_forward=False)
    ),
    "a spare buffer moves to another stream": Mutant(Gatherer, "spare", lambda _: iter(()), partial(moves, event=KEPT)),
    "what was negotiated does not wait for the program": Mutant(
        CudaStreamQueue, "submit", partial(submit_beside, begins=False), grows
    ),
    "the program does not wait for what was negotiated": Mutant(
        CudaStreamQueue, "submit", partial(submit_beside, ends_late=False), grows
    ),
    "a stream does not wait for the one that ran the model before": Mutant(
        ProgramStreams, "move_home", move_at_once, alternates
    ),
    "gradients are freed before they are copied": Mutant(
        StreamRun, "free_copied", free_at_once, partial(training, name="stage 3")
    ),
    "gradients are copied before the last bucket is reduced": Mutant(
        Bucket, "copy_in", copy_at_once, partial(training, name="stage 3")
    ),
    "a late reduction is not behind its gradients": Mutant(
        StreamRun, "enter", start_behind_the_first_gradient, partial(is_interrupted, event="a bias that is left out")
    ),
    "what a late reduction leaves is freed while the program reads it": Mutant(
        StreamRun, "_hand_over", nothing, partial(is_interrupted, event="a unit that is left out")
    ),
    "a communicator of a former model is used at once": Mutant(Communicator, "turn", nothing, is_replaced),
    "a bucket is used again before it is reduced": Mutant(
        BackwardRun, "_land", clear_at_once, partial(training, name="in_backward, stage 3")
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.sample(2)
def test_it_is_found(name, monkeypatch):
    owner, method, without, program = MUTANTS[name]
    monkeypatch.setattr(owner, method, _method(without))
    program(gpu := Gpu(1))
    assert gpu.races


def _method(function):
    """Return a function that becomes a method, which a `partial` does not."""
    return lambda *arguments, **options: function(*arguments, **options)
