"""How deep the library is: the calls from a module's hook to the first message, and what a traceback shows."""

import sys
import threading
import traceback
from collections.abc import Iterator
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
from shardlite import CommError, ShardLite
from shardlite.comm.executor import Channel
from shardlite.comm.streams import ThreadQueue
from shardlite.grads import Skips
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
    "comm/executor.py: send",
    "the transport",
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
    submit, send = ThreadQueue.submit, Channel.send

    def submitting(self: Any, *operations: Any, **options: Any) -> Any:
        seen.setdefault("submit", [*calls(), "comm/streams.py: submit"])
        return submit(self, *operations, **options)

    def sending(self: Any, chunk: Any, peer: Any) -> Any:
        return send(self._replace(transport=Noting(self.transport, seen)), chunk, peer)

    ThreadQueue.submit, Channel.send = submitting, sending  # type: ignore[method-assign]
    try:
        yield
    finally:
        ThreadQueue.submit, Channel.send = submit, send  # type: ignore[method-assign]


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
    "optim/adamw.py: _step_slots",
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


@pytest.mark.every_stage
def test_from_a_step_to_the_kernel_are_six_calls_in_three_files(cluster, stage):
    for seen in cluster.run(step_body, 2, stage):
        assert seen == {"before": BEFORE_A_STEP, "kernel": TO_THE_KERNEL}
    assert len(BEFORE_A_STEP + TO_THE_KERNEL) <= 6
    assert len({call.split(":")[0] for call in BEFORE_A_STEP + TO_THE_KERNEL}) <= 3
