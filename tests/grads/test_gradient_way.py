"""What the library enters on a gradient's way, in a steady step: function calls, and the files of these functions.

All calls count, also those that have returned when the way ends. A list comprehension is no call, as from Python 3.12
on. Left out is what these enter: landings of earlier reductions and the ledger, whose work depends on when another
thread is done, and the submitted operation, which the host of a GPU launches at once.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import shardlite
from shardlite import AdamW, ShardLite
from tests.comm.streams.programs import Training
from tests.comm.streams.simulated_gpu import Gpu

HOUSE = f"{Path(shardlite.__file__).parent}/"
HOOK = "engine/backward.py: _deliver"
CLOSED = {
    "grads/backward_run.py: _land_finished",
    "telemetry/ledger.py: track",
    "comm/streams.py: on_stream",
}
"""Functions that count, but not what they enter."""

SUBMITS = "comm/streams.py: submit"
WIDTH = 16


class Block(nn.Module):
    """Four parameters in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.rise, self.fall = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.fall(torch.relu(self.rise(x)))


class Entered(NamedTuple):
    """What the hook of one gradient has entered, in order."""

    calls: list[str]

    @property
    def files(self) -> int:
        """Number of files."""
        return len({call.split(":")[0] for call in self.calls})

    @property
    def counts(self) -> tuple[int, int]:
        """Numbers of calls and of files."""
        return len(self.calls), self.files


@contextmanager
def hooks_watched() -> Iterator[list[Entered]]:
    """Record what each hook of a gradient enters on this thread, without landings."""
    hooks: list[Entered] = []
    depth = left_out = 0

    def look(frame: Any, event: str, _: Any) -> None:
        nonlocal depth, left_out
        code = frame.f_code
        path = code.co_filename
        if event not in ("call", "return") or not path.startswith(HOUSE) or code.co_name == "<listcomp>":
            return
        if path.startswith(f"{HOUSE}lab/"):  # the simulated GPU
            return
        name = f"{code.co_filename.removeprefix(HOUSE)}: {code.co_name}"
        if name == HOOK and event == "call":
            hooks.append(Entered([]))
            depth = 0
        if not hooks:
            return
        if event == "call":
            depth += 1
            if depth > 0 and not left_out:
                hooks[-1].calls.append(name)
            left_out += left_out > 0 or name in CLOSED
        else:
            depth -= 1
            left_out -= left_out > 0
            if depth == 0:
                depth = -(10**9)  # what follows is not in a hook

    sys.setprofile(look)
    try:
        yield hooks
    finally:
        sys.setprofile(None)


class Ways(NamedTuple):
    """Calls and files of the hooks of a unit in the middle of a backward."""

    between: tuple[int, int]
    """The way of a gradient that is neither the unit's first nor its last: to its place in the bucket."""

    last: tuple[int, int]
    """The last gradient's way: to its place in the bucket, and from there to the submitted reduction."""

    submits: int
    """Number of submitted operations."""


def ways(backward: Callable[[], None], params: int) -> Ways:
    """Return what the hooks of a unit with `params` parameters enter. The unit is the second that has gradients."""
    with hooks_watched() as hooks:
        backward()
    _, *between, last = hooks[params + 2 : 2 * params + 2]  # after those of the last layer, and of one block
    assert len({each.counts for each in between}) == 1, between
    submits = [place for place, call in enumerate(last.calls) if call == SUBMITS]
    beyond = last.calls[submits[-1] + 1 :]
    inside = next((place for place, call in enumerate(beyond) if call.startswith("grads/")), len(beyond))
    to_the_queue = Entered(last.calls[: submits[-1] + 1 + inside])  # with what `submit` enters
    return Ways(between[0].counts, to_the_queue.counts, len(submits))


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Block() for _ in range(4)), nn.Linear(WIDTH, WIDTH))


def on_the_cpu(group: Any, stage: int) -> Ways:
    model = ShardLite(net(), stage=stage, units=Block, group=group)
    optimizer = AdamW(model.parameters())

    def step() -> Ways:
        loss = model(torch.ones(2, WIDTH)).square().mean()
        seen = ways(loss.backward, 4)
        optimizer.step()
        optimizer.zero_grad()
        return seen

    return [step() for _ in range(4)][-1]


HOST = Ways(between=(4, 4), last=(18, 9), submits=1)
"""These numbers, and those on a GPU, may only fall."""

STREAM = Ways(between=(5, 5), last=(34, 12), submits=1)


@pytest.mark.parametrize("stage", [2, 3])
def test_on_the_cpu(cluster: Any, stage: int) -> None:
    assert cluster.run(on_the_cpu, 2, stage) == [HOST, HOST]


def test_on_a_gpu():
    with Gpu().ranks(2):
        training = Training(clip=False)
        training.step(3)
        loss = training.model(torch.ones(2, 32)).square().mean()
        seen = ways(partial(loss.backward), 4)
        training.finish()
    assert seen == STREAM
