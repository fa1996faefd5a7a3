"""Training over played symmetric memory whose reductions are the ring kernel, in the interpreter: the bits of a twin.

Kernels of several threads of a rank take turns in the interpreter, which knows one launch at a time.
"""

import threading
import time
import warnings
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from shardlite_kernels import device_ring
from triton._C.libtriton.ir import ATOMIC_OP
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, interpreter_builder

from shardlite import AdamW
from shardlite.comm.transport.symmetric import SymmetricMemoryTransport
from tests.kernels.interpreted.language import quicken
from tests.kernels.interpreted.ring_ranks import REST
from tests.support.transports import symmetric_training
from tests.support.twins.plain import RECIPES, Recipe, of
from tests.support.twins.sharded import slow

# A twin takes the same kernels for its whole parameters: PyTorch's operator has other bits (kernels/README.md).
BY_KERNELS = {"by-kernels": Recipe(of(AdamW, lr=0.02, weight_decay=0.1))}


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


@pytest.mark.parametrize(("size", "stage"), [(2, 1), (3, 3), slow(4, 3), slow(4, 0)])
def test_training_has_the_bits_of_plain_data_parallel(cluster, tmp_path, size, stage):
    counts = each_rank(cluster, tmp_path, symmetric_training.train, size, stage)
    print(counts)


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize(("size", "stage"), [(2, 3), slow(3, 1), slow(4, 3)])
def test_steps_in_the_backward_have_the_same_bits(cluster, tmp_path, size, stage):
    counts = each_rank(cluster, tmp_path, symmetric_training.train_in_backward, size, stage)
    print(counts)
