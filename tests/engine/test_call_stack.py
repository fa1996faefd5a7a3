"""The depth of the library: calls from a module's hook to the first message, and tracebacks."""

import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardlite
from shardlite import CommError, Route, ShardLite
from shardlite.grads.reduce import ReduceQueue
from shardlite.weights import unshard
from shardlite.weights.all_gather import Gather
from tests.support.internals import units
from tests.support.patience import seconds, until
from tests.support.twins.sharded import take_step

HOUSE = f"{Path(shardlite.__file__).parent}/"

TO_THE_QUEUE = {
    3: [
        "engine/module_hooks.py: _enter",
        "engine/module_hooks.py: _enter_unit",
        "weights/unshard.py: unshard",
        "weights/unshard.py: _gather",
        "weights/negotiation.py: gather",
        "weights/all_gather.py: gather",
        "weights/all_gather.py: submit",
        "comm/streams.py: submit",
    ],
    2: [
        "engine/module_hooks.py: _enter",
        "engine/module_hooks.py: _begin",
        "weights/resident.py: begin_forward",
        "weights/all_gather.py: gather",
        "weights/all_gather.py: submit",
        "comm/streams.py: submit",
    ],
}
TO_THE_QUEUE[1] = TO_THE_QUEUE[2]

TO_THE_WIRE = [
    "comm/streams.py: _work_off",
    "weights/all_gather.py: execute",
    "comm/collectives.py: all_gather",
    "comm/transport/base.py: all_gather",
    "comm/transport/base.py: _spread",
    "comm/transport/shared_memory/transport.py: isend",
    "comm/transport/shared_memory/transport.py: send",
    # `ring` writes the flag, and calls the operating system to wake the peer.
    "comm/transport/shared_memory/mailbox.py: ring",
]

STORY = [
    "model.py: __call__",
    "model.py: forward",
    "engine/module_hooks.py: _enter",
    "engine/module_hooks.py: _enter_unit",
    "weights/unshard.py: unshard",
    "weights/negotiation.py: wait",
    "weights/all_gather.py: wait",
    "comm/streams.py: wait",
    "comm/streams.py: _raise_error",
    "comm/streams.py: _work_off",  # from here on the queue's thread, which failed
    "weights/all_gather.py: execute",
    "comm/collectives.py: all_gather",
    "comm/operation.py: __exit__",  # which names the operation
]


@contextmanager
def profiled(stacks: dict[str, list[str]], moments: dict[str, str]) -> Iterator[None]:
    """Record the calls that lead to the first call of each function in `moments`, by its name, on this thread."""

    def look(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        is_moment = event == "call" and moments.get(code.co_name, "nowhere") in code.co_filename
        if is_moment and code.co_name not in stacks:
            stacks[code.co_name] = library_frames(frame)

    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(None)


@contextmanager
def profiled_on_the_queue(
    of: type, method: str, stacks: dict[str, list[str]], moments: dict[str, str]
) -> Iterator[None]:
    """Record the same on the queue's thread, which calls a method of a class."""
    run = getattr(of, method)

    def recording(*arguments: Any) -> None:
        with profiled(stacks, moments):
            run(*arguments)

    with mock.patch.object(of, method, recording):
        yield


def library_frames(frame: Any) -> list[str]:
    """Return the functions of the library that run in `frame` and around it, the innermost last."""
    names: list[str] = []
    while frame is not None:
        code = frame.f_code
        # A list comprehension has no frame of its own from Python 3.12 on.
        if code.co_filename.startswith(HOUSE) and code.co_name != "<listcomp>":
            names.append(f"{code.co_filename.removeprefix(HOUSE)}: {code.co_name}")
        frame = frame.f_back
    return names[::-1]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def stack_body(group: Any, stage: int) -> dict[str, list[str]]:
    model = ShardLite(net(), stage=stage, units=nn.Linear, group=group, route=Route(transport="shared_memory"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: dict[str, list[str]] = {}
    for _ in range(2):  # in the first pass ranks negotiate
        take_step(optimizer, model(torch.ones(2, 4)).sum())
    hook = "engine/module_hooks.py: _enter"
    with (
        profiled_on_the_queue(Gather, "execute", seen, {"ring": "comm/transport/shared_memory/mailbox"}),
        profiled(seen, {"submit": "comm/streams"}),
    ):
        model(torch.ones(2, 4))
    return {name: each[each.index(hook) :] if hook in each else each for name, each in seen.items()}


def files(calls: Iterable[str]) -> set[str]:
    return {call.split(":")[0] for call in calls}


@pytest.mark.parametrize("stage", TO_THE_QUEUE)
def test_from_a_modules_hook_to_the_wire_are_sixteen_calls_in_nine_files(cluster, stage):
    for seen in cluster.run(stack_body, 2, stage):
        assert seen == {"submit": TO_THE_QUEUE[stage], "ring": TO_THE_WIRE}
    assert len(TO_THE_QUEUE[stage]) + len(TO_THE_WIRE) <= 16
    assert len(files(TO_THE_QUEUE[stage] + TO_THE_WIRE)) <= 9


def test_stage_0_sends_nothing_in_a_forward(cluster):
    assert cluster.run(stack_body, 2, 0) == [{}, {}]


# ---- what a unit's hook enters until the weights are bound ----------------------------------------------------------

ENTERED = 42, 12
"""Functions that are entered in a steady step, and their files. These numbers may only fall."""

INSIDE = 15
"""Functions that are entered in the forward of a block of two linear modules, which saves five tensors."""


def entered_body(group: Any) -> tuple[list[str], list[str]]:
    with mock.patch.object(unshard, "poison_evicted_buffers", return_value=False):
        model = ShardLite(nn.Sequential(*map(Marked, range(5))), units=Marked, group=group, prefetch=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        take_step(optimizer, model(torch.ones(2, 4)).sum())
    entered: list[str] = []

    def look(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code in (computes.__code__, leaves.__code__):
            entered.append(f"{code.co_name} {frame.f_locals.get('at', '')}")
        elif event == "call" and code.co_filename.startswith(HOUSE) and code.co_name != "<listcomp>":
            entered.append(f"{code.co_filename.removeprefix(HOUSE)}: {code.co_name}")

    Marked.landed = lambda: all(unit.work is None or unit.work.done() for unit in units(model))
    sys.setprofile(look)
    try:
        model(torch.ones(2, 4))
    finally:
        sys.setprofile(None)
    hooks = entered[entered.index("leaves 2") : entered.index("computes 3")]
    hooks = hooks[hooks.index("engine/module_hooks.py: _enter") :]
    bound = max(i for i, each in enumerate(hooks) if each.startswith("params/parameters.py"))
    inside = entered[entered.index("computes 3") + 1 : entered.index("leaves 3")]
    return hooks[: bound + 1], [each for each in inside if each != "comm/streams.py: done"]


class Marked(nn.Module):
    """A block whose forward tells when it begins, and ends when the gather of the next block has landed."""

    landed: Callable[[], bool] = staticmethod(lambda: True)

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.first, self.second = at, nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        computes(self.at)
        x = self.second(torch.relu(self.first(x)))
        until(Marked.landed)
        leaves(self.at)
        return x


def computes(at: int) -> None:
    """Mark that the weights of a block are bound."""


def leaves(at: int) -> None:
    """Mark that a block has computed."""


def test_a_units_hook_and_its_forward_enter_few_functions(cluster):
    for hook, inside in cluster.run(entered_body, 2):
        assert (len(hook), len(files(hook))) == ENTERED, "\n".join(hook)
        assert len(inside) == INSIDE, "\n".join(inside)


def story_body(everyone: Any) -> list[str]:
    group = dist.new_group(list(range(everyone.size())))  # connections of its own: they break
    model = ShardLite(net(), units=nn.Linear, group=group, timeout=timedelta(seconds=seconds(2)))
    model(torch.ones(2, 4)).sum().backward()
    if group.rank() == 1:
        return []
    with pytest.raises(CommError) as failed:
        model(torch.ones(2, 4))
    frames = traceback.extract_tb(failed.value.__traceback__)
    return [f"{each.filename.removeprefix(HOUSE)}: {each.name}" for each in frames if each.filename.startswith(HOUSE)]


def test_a_traceback_of_a_failed_gather_is_its_story(cluster):
    """Down to where the host waits, then what the queue did: each name says what was done to the unit."""
    told = cluster.run(story_body, 2)[0]
    assert told == STORY


# ---- a step ---------------------------------------------------------------------------------------------------------

BEFORE_A_STEP = [
    "engine/steps.py: before_step",  # PyTorch's hook of all optimizers
    "engine/steps.py: before_step",  # of the model
]

TO_THE_KERNEL = ["optim/adamw.py: step", "optim/counts.py: update"]


@pytest.mark.stages(2, 3)
def test_from_a_step_to_the_kernel_are_four_calls_in_three_files(group: Any, stage: int) -> None:
    model = ShardLite(net(), stage=stage, units=nn.Linear, group=group)
    optimizer = shardlite.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    seen: dict[str, list[str]] = {}
    with profiled(seen, {"before_step": "grads/skip_step", "adamw_cpu": ""}):
        optimizer.step()
    assert seen == {"before_step": [*BEFORE_A_STEP, "grads/skip_step.py: before_step"], "adamw_cpu": TO_THE_KERNEL}
    assert len(BEFORE_A_STEP + TO_THE_KERNEL) <= 4
    assert len(files(BEFORE_A_STEP + TO_THE_KERNEL)) <= 3


# ---- a gradient, from autograd's hook to the shard ------------------------------------------------------------------

IN_A_BACKWARD = "engine/patches.py: _run_backward"  # around all that autograd calls
TO_THE_BUCKET = [
    IN_A_BACKWARD,
    "engine/backward.py: _deliver",
    "grads/backward_run.py: add_gradient",
    "grads/bucket.py: add_gradient",
]
TO_THE_QUEUE_OF_REDUCTIONS = [
    IN_A_BACKWARD,
    "engine/backward.py: _deliver",
    "grads/backward_run.py: add_gradient",
    "grads/backward_run.py: complete",
    "grads/backward_run.py: _start",
    "comm/streams.py: submit",
]
TO_THE_SUM = [
    "comm/streams.py: _work_off",
    "grads/reduce.py: reduce_unit",
    "grads/reduce.py: _average",
    "grads/reduce.py: _add_ranks",
    "comm/collectives.py: reduce_scatter",
    "comm/transport/base.py: reduce_scatter",
    "comm/transport/base.py: __call__",  # of the last hop, which launches the kernel
]
TO_THE_SHARD = [
    IN_A_BACKWARD,
    "engine/backward.py: _close",
    "grads/backward_run.py: finalize",
    "grads/results.py: store",
]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_from_a_gradients_hook_to_the_step_are_twenty_one_calls_in_twelve_files(group: Any, stage: int) -> None:
    model = ShardLite(net(), stage=stage, units=nn.Linear, group=group, route=Route(transport="shared_memory"))
    stacks: dict[str, list[str]] = {}
    for _ in range(2):  # in the first backward the ranks agree on an order
        model(torch.ones(2, 4)).sum().backward()
        model.zero_grad()
    loss = model(torch.ones(2, 4)).sum()
    moments = {"add_gradient": "grads/bucket", "submit": "comm/streams", "store": "grads/results"}
    with (
        profiled_on_the_queue(ReduceQueue, "reduce_unit", stacks, {"hop": "shardlite_kernels"}),
        profiled(stacks, moments),
    ):
        loss.backward()
    assert stacks == {
        "add_gradient": TO_THE_BUCKET,
        "submit": TO_THE_QUEUE_OF_REDUCTIONS,
        "hop": TO_THE_SUM,
        "store": TO_THE_SHARD,
    }
    calls = {*TO_THE_BUCKET, *TO_THE_QUEUE_OF_REDUCTIONS, *TO_THE_SUM, *TO_THE_SHARD}
    assert len(calls) + len(BEFORE_A_STEP) + len(TO_THE_KERNEL) <= 21
    assert len(files([*calls, *BEFORE_A_STEP, *TO_THE_KERNEL])) <= 12
