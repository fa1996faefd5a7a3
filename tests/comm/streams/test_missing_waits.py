"""The simulated GPU finds waits that the library forgets, so a training without a race says something.

Without the mutants these programs have no race: `test_stream_races.py`.
"""

from functools import partial

import pytest

from shardlite.comm.program_streams import ProgramStreams
from shardlite.comm.streams import _StreamWork
from shardlite.grads.backward_run import BackwardRun
from shardlite.weights.negotiation import Passes
from shardlite.weights.unshard import Gatherer
from tests.comm.streams import simulated_gpu
from tests.comm.streams.programs import TwoStreams, has_two_streams, is_dropped
from tests.comm.streams.programs import trains as training
from tests.comm.streams.simulated_gpu import Gpu


def nothing(*_, **__):
    """Wait for nothing."""


def clear_at_once(run, count):
    for reduction in run.started[run.landed : count]:
        reduction.bucket.clear()
        run.landed += 1


STAGE_3 = partial(training, name="stage 3")
FROZEN = partial(has_two_streams, block=TwoStreams, trains_both=False)

MUTANTS = {
    "the program waits for no operation": (_StreamWork, "wait", lambda work, *_: work._host.wait(), STAGE_3),
    "weights are used before they are gathered": (Passes, "wait", lambda _, unit: unit.landed(), STAGE_3),
    "a bucket is freed before it is reduced": (BackwardRun, "_land", clear_at_once, STAGE_3),
    "messages are not waited for": (simulated_gpu._Sent, "wait", nothing, partial(training, name="stage 3, ring")),
    "another stream does not wait for a gather": (Gatherer, "follow", nothing, FROZEN),
    "a buffer is given away while another stream reads it": (ProgramStreams, "wait_for", nothing, FROZEN),
    "a model is freed with operations in flight": (
        ProgramStreams,
        "wait_outside_captures",
        nothing,
        partial(is_dropped, where="forward"),
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_it_is_found(name, monkeypatch):
    owner, method, without, program = MUTANTS[name]
    monkeypatch.setattr(owner, method, without)
    program(gpu := Gpu(1))
    assert gpu.races
