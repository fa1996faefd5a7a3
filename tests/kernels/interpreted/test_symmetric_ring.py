"""Training over played symmetric memory whose reductions are the ring kernel, in the interpreter: the bits of a twin.

Kernels of several threads of a rank take turns in the interpreter, which knows one launch at a time.
"""

import threading
import time
import warnings
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch
from shardlite_kernels import device_ring
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode
from triton._C.libtriton.ir import ATOMIC_OP
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, interpreter_builder

from shardlite import AdamW, CommError
from shardlite.comm import Operation
from shardlite.comm.collectives import ring_step
from shardlite.comm.transport.symmetric import SymmetricMemoryTransport
from tests.kernels.adamw_cases import mixed_table, random_state
from tests.kernels.interpreted.language import quicken
from tests.kernels.interpreted.ring_ranks import REST
from tests.support.optim_cases import place_shards
from tests.support.transports import symmetric_training
from tests.support.transports.calls import reduce_scatter
from tests.support.transports.played_symmetric import launches, played, run_memories, run_played
from tests.support.transports.symmetric_training import STEPS
from tests.support.twins.plain import RECIPES, Recipe, of
from tests.support.twins.sharded import slow


def whole(params):
    """Step whole parameters by the kernels, as shards of one rank: PyTorch's operator has other bits."""
    return AdamW(place_shards(list(params)), lr=0.02, weight_decay=0.1)


BY_KERNELS = {"by-kernels": Recipe(of(AdamW, lr=0.02, weight_decay=0.1), twin=whole)}


@contextmanager
def threads_take_turns():
    """Run one launch at a time in this process. One that looks at a flag lets others run meanwhile."""
    turn, launch, look = threading.Lock(), GridExecutor.__call__, InterpreterBuilder.create_atomic_rmw

    def launch_alone(self, *args, **kwargs):
        with turn:
            return launch(self, *args, **kwargs)

    def look_and_rest(self, operation, *given):
        if operation == ATOMIC_OP.ADD:
            grid = interpreter_builder.grid_idx, interpreter_builder.grid_dim
            turn.release()
            time.sleep(REST)
            turn.acquire()
            interpreter_builder.grid_idx, interpreter_builder.grid_dim = grid
        return look(self, operation, *given)

    quicken()
    with (
        patch.object(GridExecutor, "__call__", launch_alone),
        patch.object(InterpreterBuilder, "create_atomic_rmw", look_and_rest),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", "(overflow|invalid value|divide by zero)", RuntimeWarning)
        warnings.filterwarnings("ignore", "Conversion of an array", DeprecationWarning)  # Triton 3.6 on numpy 2.3
        yield


@contextmanager
def counting_rings(counts):
    """Count the launches of a rank by the method of the transport."""

    def counted(name, method):
        def call(self, *args):
            counts[name] = counts.get(name, 0) + 1
            method(self, *args)

        return call

    methods = {name: getattr(SymmetricMemoryTransport, name) for name in ("ring_reduce", "ring_step", "exchange_rows")}
    counted_methods = {name: counted(name, method) for name, method in methods.items()}
    with patch.multiple(SymmetricMemoryTransport, **counted_methods):
        yield


def interpreted(group, folder, body, name, stage):
    counts = {}
    with threads_take_turns(), counting_rings(counts), patch.dict(RECIPES, BY_KERNELS):
        body(group, folder, name, stage, recipe="by-kernels")
    return counts


def each_rank(cluster, tmp_path, body, size, stage, name="plain"):
    return cluster.run(interpreted, size, tmp_path, body, name, stage)


CONNECTING, FLATS = 2, 3
"""One reduction over each connection when they are made; each step reduces the flats of two blocks and the root."""


@pytest.mark.parametrize(("size", "stage"), [slow(2, 1), slow(3, 3), slow(4, 3), slow(4, 0)])
def test_training_has_the_bits_of_plain_data_parallel(cluster, tmp_path, size, stage):
    for counts in each_rank(cluster, tmp_path, symmetric_training.train, size, stage):
        assert counts == {"ring_reduce": CONNECTING + STEPS * FLATS}


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize(("size", "stage"), [(3, 3), slow(2, 1), slow(4, 3)])
def test_steps_in_the_backward_have_the_same_bits(cluster, tmp_path, size, stage):
    """The last rank has padding behind its parameters, so it may step behind the ring in which others step."""
    ordinary = CONNECTING + STEPS * FLATS
    first, *_, last = each_rank(cluster, tmp_path, symmetric_training.train_in_backward, size, stage)
    assert first == {"ring_reduce": ordinary + CONNECTING, "ring_step": STEPS * FLATS}
    behind = STEPS * {2: 0, 3: 1, 4: 3}[size]
    expected = {"ring_reduce": ordinary + CONNECTING + behind, "ring_step": STEPS * FLATS - behind}
    assert last == {name: count for name, count in expected.items() if count}


def alone_in_a_ring(memory):
    """Rank 1 reduces, rank 0 does nothing."""
    transport = played(memory)
    transport._peers = replace(transport._peers, limit=20)
    if memory.rank == 1:
        reduce_scatter(torch.zeros(4), transport, operation=Operation("reduce-scatter of unit 'head'", 3))


def test_a_silent_neighbour_is_an_error_with_the_operation():
    with threads_take_turns(), pytest.raises(CommError) as failed:
        run_memories(alone_in_a_ring, 2)
    assert str(failed.value).startswith(
        "reduce-scatter of unit 'head' (operation 3, 4 elements of torch.float32): rank 1 in reduce-scatter failed: "
        "16 bytes, timeout "
    )
    assert str(failed.value).endswith("The backend reports: a neighbour in the ring did not respond")


def enqueued(transport):
    """What reductions enqueue, in order."""
    full, out, bad = torch.ones(3 * 400, dtype=torch.bfloat16), torch.empty(400), torch.zeros((), dtype=torch.int32)
    step = random_state(("whole", "fp32"), 400, seed=0), mixed_table(400), bad
    reduction = launches(transport, lambda: reduce_scatter(full, transport, out=out, divisor=3))
    assert out.unique().tolist() == [1.0]
    return reduction, launches(transport, lambda: ring_step(full, transport, step, divisor=3))


def launch_ring(launch, *args, **kwargs):
    _get_current_dispatch_mode().names.append("ring")
    with _disable_current_modes():
        launch(*args, **kwargs)


@pytest.mark.usefixtures("fused")
def test_a_reduction_is_one_launch_and_a_look_at_its_error():
    with threads_take_turns(), patch.object(device_ring, "launch", partial(launch_ring, device_ring.launch)):
        assert run_played(enqueued, 3) == [(["ring", "eq", "_assert_async"],) * 2] * 3
