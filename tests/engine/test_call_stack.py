"""How deep the library is: the calls from a module's hook to the first message, and what a traceback shows."""

import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardlite
from shardlite import CommError, ShardLite
from shardlite.comm import collectives
from shardlite.comm.operation import Operation
from shardlite.comm.shm import mailbox
from shardlite.comm.streams import ThreadQueue
from shardlite.grads import Skips
from shardlite.grads.reduce import ReduceQueue
from shardlite.optim import counts
from tests.support.patience import seconds

HOUSE = f"{Path(shardlite.__file__).parent}/"

TO_THE_QUEUE = {
    3: [
        "engine/module_hooks.py: _enter",
        "engine/module_hooks.py: _enter_unit",
        "weights/unshard.py: unshard",
        "weights/all_gather.py: gather",
        "comm/streams.py: submit",
    ],
    2: [
        "engine/module_hooks.py: _enter",
        "engine/module_hooks.py: _begin",
        "weights/resident.py: begin_pass",
        "weights/all_gather.py: gather",
        "comm/streams.py: submit",
    ],
}
TO_THE_QUEUE[1] = TO_THE_QUEUE[2]

TO_THE_WIRE = [
    "comm/streams.py: _work_off",
    "weights/all_gather.py: run",
    "comm/collectives.py: all_gather",
    "comm/executor.py: run_gather",
    "the transport",
]

TO_THE_WAKE = [
    "comm/streams.py: _work_off",
    "weights/all_gather.py: run",
    "comm/collectives.py: all_gather",
    "comm/executor.py: run_gather",
    "comm/shm/transport.py: isend",
    "comm/shm/transport.py: send",
    "comm/shm/mailbox.py: announce",
    "comm/shm/mailbox.py: ring",  # which writes the flag, and calls the kernel to wake the peer
]

TO_THE_SUM = [
    "comm/collectives.py: reduce_scatter",
    "comm/executor.py: run_reduce",
    "comm/collectives.py: __call__",
    "the kernel",
]

STORY = [
    "model.py: __call__",
    "model.py: forward",
    "engine/module_hooks.py: _enter",
    "engine/module_hooks.py: _enter_unit",
    "weights/unshard.py: unshard",
    "weights/unshard.py: _land",
    "weights/all_gather.py: wait",
    "comm/streams.py: wait",
    "comm/streams.py: _raise_error",
    "comm/streams.py: _work_off",  # from here on the queue's thread, which failed
    "weights/all_gather.py: run",
    "comm/collectives.py: all_gather",
    "comm/operation.py: __exit__",  # which names the operation
]


def calls() -> list[str]:
    """Return the running functions of the library, the innermost last, from a module's hook or a thread's start on."""
    frames = traceback.extract_stack(sys._getframe(1))
    # A list comprehension has no frame of its own from Python 3.12 on.
    ours = [each for each in frames if each.filename.startswith(HOUSE) and each.name != "<listcomp>"]
    names = [f"{each.filename.removeprefix(HOUSE)}: {each.name}" for each in ours]
    hook = "engine/module_hooks.py: _enter"
    return names[names.index(hook) :] if hook in names else names


@contextmanager
def watched(seen: dict[str, list[str]]) -> Iterator[None]:
    """Note the calls that lead to the first submission from a hook, and to the first message of the queue."""
    submit, channel = ThreadQueue.submit, Operation.channel

    def submitting(self: Any, *operations: Any, **options: Any) -> Any:
        seen.setdefault("submit", [*calls(), "comm/streams.py: submit"])
        return submit(self, *operations, **options)

    def noting(self: Any, transport: Any, *arguments: Any) -> Any:
        return channel(self, Noting(transport, seen), *arguments)

    ThreadQueue.submit, Operation.channel = submitting, noting  # type: ignore[method-assign]
    try:
        yield
    finally:
        ThreadQueue.submit, Operation.channel = submit, channel  # type: ignore[method-assign]


class Noting:
    """A transport that notes who sends the first message of a gather. Rounds of negotiation run beside."""

    def __init__(self, transport: Any, seen: dict[str, list[str]]) -> None:
        self._transport = transport
        self._seen = seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def isend(self, *args: Any) -> Any:
        if threading.current_thread().name == "shardlite-gather":
            self._seen.setdefault("send", [*calls(), "the transport"])
        return self._transport.isend(*args)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def stack_body(group: Any, stage: int) -> dict[str, list[str]]:
    model = ShardLite(net(), stage=stage, units=nn.Linear, group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: dict[str, list[str]] = {}
    for _ in range(2):  # in the first pass ranks negotiate
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with watched(seen):
        model(torch.ones(2, 4))
    return seen


@pytest.mark.parametrize("stage", TO_THE_QUEUE)
def test_from_a_modules_hook_to_the_wire_are_eleven_calls(cluster, stage):
    for seen in cluster.run(stack_body, 2, stage):
        assert seen == {"submit": TO_THE_QUEUE[stage], "send": TO_THE_WIRE}
    assert len(TO_THE_QUEUE[stage]) + len(TO_THE_WIRE) <= 11
    assert len({call.split(":")[0] for call in TO_THE_QUEUE[stage]}) <= 4


def test_stage_0_sends_nothing_in_a_forward(cluster):
    assert cluster.run(stack_body, 2, 0) == [{}, {}]


@contextmanager
def patched(module: Any, name: str, function: Any) -> Iterator[Any]:
    """Put `function(original, *arguments)` in the place of a module's function."""
    original = getattr(module, name)
    setattr(module, name, partial(function, original))
    try:
        yield
    finally:
        setattr(module, name, original)


def shared_memory_body(group: Any) -> dict[str, list[str]]:
    seen: dict[str, list[str]] = {}

    def system(call: Any, number: int, address: Any, operation: int, *rest: Any) -> Any:
        if operation == mailbox._WAKE and threading.current_thread().name == "shardlite-gather":
            seen.setdefault("wake", calls())
        return call(number, address, operation, *rest)

    def add(hop: Any, *arguments: Any) -> Any:
        if threading.current_thread().name == "shardlite-reduce":
            names = calls()
            seen.setdefault("sum", [*names[names.index(TO_THE_SUM[0]) :], "the kernel"])
        return hop(*arguments)

    model = ShardLite(net(), units=nn.Linear, group=group, transport="shared_memory")
    for _ in range(2):  # in the first pass ranks negotiate
        model(torch.ones(2, 4)).sum().backward()
    with patched(mailbox, "_system", system), patched(collectives, "hop", add):
        model(torch.ones(2, 4)).sum().backward()
    return seen


def test_from_the_queue_to_a_peer_that_wakes_up_are_eight_calls_in_six_files(cluster):
    for seen in cluster.run(shared_memory_body, 2):
        assert seen == {"wake": TO_THE_WAKE, "sum": TO_THE_SUM}
    assert len(TO_THE_WAKE) <= 8
    assert len({call.partition(":")[0] for call in TO_THE_WAKE}) <= 6
    assert len(TO_THE_SUM) <= 4


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
    "engine/optimizer_hooks.py: before_step",  # PyTorch's hook of all optimizers
    "engine/optimizer_hooks.py: _prepare",
    "engine/optimizer_hooks.py: before_step",  # of the model
]

TO_THE_KERNEL = [
    "optim/adamw.py: step",
    "optim/layout.py: step_slots",
    "optim/counts.py: update",
]


def step_body(group: Any, stage: int) -> dict[str, list[str]]:
    model = ShardLite(net(), stage=stage, units=nn.Linear, group=group)
    optimizer = shardlite.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    seen: dict[str, list[str]] = {}
    check, kernel = Skips.before_step, counts.adamw_cpu

    def checking(self: Any, *args: Any) -> None:
        seen["before"] = calls()
        check(self, *args)

    def stepping(*args: Any, **options: Any) -> None:
        seen["kernel"] = calls()
        kernel(*args, **options)

    with mock.patch.object(Skips, "before_step", checking), mock.patch.object(counts, "adamw_cpu", stepping):
        optimizer.step()
    return seen


@pytest.mark.stages(2, 3)
def test_from_a_step_to_the_kernel_are_six_calls_in_three_files(cluster, stage):
    for seen in cluster.run(step_body, 2, stage):
        assert seen == {"before": BEFORE_A_STEP, "kernel": TO_THE_KERNEL}
    assert len(BEFORE_A_STEP + TO_THE_KERNEL) <= 6
    assert len({call.split(":")[0] for call in BEFORE_A_STEP + TO_THE_KERNEL}) <= 3


# ---- a gradient, from autograd's hook to the shard ------------------------------------------------------------------

TO_THE_BUCKET = [
    "engine/backward.py: _deliver",
    "engine/backward.py: add_gradient",
    "grads/backward_run.py: add",
    "grads/bucket.py: add",
]
TO_THE_QUEUE_OF_REDUCTIONS = [
    "engine/backward.py: _deliver",
    "engine/backward.py: add_gradient",
    "grads/backward_run.py: complete",
    "grads/backward_run.py: _start",
    "comm/streams.py: submit",
]
TO_THE_COLLECTIVE = [
    "comm/streams.py: _work_off",
    "grads/reduce.py: run",
    "grads/reduce.py: reduce_flat",
    "grads/reduce.py: _average",
    "comm/collectives.py: reduce_scatter",
]
TO_THE_SHARD = [
    "engine/backward.py: _close",
    "grads/backward_run.py: finish",
    "grads/gradient_shards.py: store",
]


@contextmanager
def profiled(stacks: dict[str, list[str]], moments: dict[str, str]) -> Iterator[None]:
    """Record the calls that lead to the first call of each function in `moments`, by its name, on this thread."""

    def look(frame: Any, event: str, _: Any) -> None:
        if event == "call" and (moment := moments.get(frame.f_code.co_name)) and moment in frame.f_code.co_filename:
            stacks.setdefault(frame.f_code.co_name, [])
            if not stacks[frame.f_code.co_name]:
                stacks[frame.f_code.co_name] = library_frames(frame)

    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(None)


def library_frames(frame: Any) -> list[str]:
    """Return the functions of the library that run in `frame` and around it, the innermost last."""
    names: list[str] = []
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(HOUSE):
            names.append(f"{code.co_filename.removeprefix(HOUSE)}: {code.co_name}")
        frame = frame.f_back
    return names[::-1]


def gradient_body(group: Any, stage: int) -> dict[str, list[str]]:
    model = ShardLite(net(), stage=stage, units=nn.Linear, group=group)
    stacks: dict[str, list[str]] = {}
    for _ in range(2):  # in the first backward the ranks agree on an order
        model(torch.ones(2, 4)).sum().backward()
        model.zero_grad()
    run = ReduceQueue.run

    def profiled_run(*arguments: Any) -> None:
        with profiled(stacks, {"hop": "shardlite_kernels"}):
            run(*arguments)

    loss = model(torch.ones(2, 4)).sum()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReduceQueue, "run", profiled_run)
        moments = {"add": "grads/bucket", "submit": "comm/streams", "store": "grads/gradient_shards"}
        with profiled(stacks, moments):
            loss.backward()
    return stacks


@pytest.mark.parametrize("stage", [1, 2])
def test_from_a_gradients_hook_to_the_shard_are_twelve_calls_and_four_of_collectives(cluster, stage):
    for seen in cluster.run(gradient_body, 2, stage):
        collective = seen["hop"][len(TO_THE_COLLECTIVE) - 1 :]
        assert seen["add"] == TO_THE_BUCKET
        assert seen["submit"] == TO_THE_QUEUE_OF_REDUCTIONS
        assert seen["hop"][: len(TO_THE_COLLECTIVE)] == TO_THE_COLLECTIVE
        assert seen["store"] == TO_THE_SHARD
        assert len(collective) <= 4
    ours = {*TO_THE_BUCKET, *TO_THE_QUEUE_OF_REDUCTIONS, *TO_THE_COLLECTIVE, *TO_THE_SHARD}
    ours = {each for each in ours if not each.startswith("comm/")}
    assert len(ours) <= 12
    assert len({each.split(":")[0] for each in ours}) <= 5
