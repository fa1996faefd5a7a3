"""Ranks that diverge in a backward do not deadlock, although streams wait for reductions.

Each collective of a rank is behind others: those that its stream, and those that this one has waited for, have
launched before. The k-th collective of a stream meets the k-th of the same stream on the other ranks, as in NCCL. So
ranks hang if, taken together, one is behind itself.
"""

from graphlib import CycleError, TopologicalSorter
from itertools import cycle

import pytest
import torch
from torch import nn
from torch.nn import functional

from shardlite.grads.stream_run import StreamRun
from tests.comm.streams.programs import WIDTH, WORLD_SIZE, Training, loss
from tests.comm.streams.simulated_gpu import Gpu

DEPTH = 8

Behind = dict[tuple[str, int], set[tuple[str, int]]]
"""For each collective, by stream and number, those that it is behind on one rank."""


class Parting(nn.Module):
    """A block whose forward is always the same; its backward may leave out all of it, or a part."""

    def __init__(self):
        super().__init__()
        self.rise, self.fall = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.left_out = ""

    def forward(self, x):
        bias = self.fall.bias.detach() if self.left_out == "a bias" else self.fall.bias
        out = functional.linear(torch.tanh(self.rise(x)), self.fall.weight, bias)
        return x + (out.detach() if self.left_out == "all" else out)


class Shift(nn.Module):
    """A unit whose backward needs no weights, so that none are gathered for it."""

    def __init__(self):
        super().__init__()
        self.by = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x):
        return x + self.by


def with_shifts():
    """Return what makes a block, and after every second one a shift."""
    kinds = cycle([Parting, Parting, Shift])
    return lambda: next(kinds)()


def collectives(left_out: dict[int, str], *, accumulates=False, shifts=False, **options) -> Behind:
    """Return, for each collective of the last backward of a steady run, which others it is behind on such a rank."""
    gpu = Gpu()
    with gpu.ranks(WORLD_SIZE):
        block, units = (with_shifts(), (Parting, Shift)) if shifts else (Parting, Parting)
        training = Training(block, units=units, depth=DEPTH * 3 // 2 if shifts else DEPTH, **options)
        for _ in range(4):
            if accumulates:
                with training.model.no_sync():
                    loss(training.model).backward()
            training.step()
        if accumulates:
            with training.model.no_sync():
                loss(training.model).backward()
        blocks = [each for each in training.model.module if isinstance(each, Parting)]
        for place, how in left_out.items():
            blocks[place].left_out = how
        gpu.collectives.clear()
        gpu.waits.clear()
        training.step()
    assert not gpu.waits["query"], "streams wait, not the host"
    assert not gpu.races
    seen: dict[str, int] = {}
    names = []
    for stream, _, _ in gpu.collectives:
        names.append((stream.name, seen.setdefault(stream.name, 0)))
        seen[stream.name] += 1
    return {
        name: {
            other
            for other, (stream, tick, _) in zip(names, gpu.collectives, strict=True)
            if other != name and tick <= clock[stream.number]
        }
        for name, (_, _, clock) in zip(names, gpu.collectives, strict=True)
    }


def hangs(*ranks: Behind) -> bool:
    """Return whether ranks with such collectives wait for each other for good."""
    assert len({frozenset(rank) for rank in ranks}) == 1, "all ranks take part in the same collectives"
    graph = TopologicalSorter()
    for rank in ranks:
        for name, before in rank.items():
            graph.add(name, *before)
    try:
        graph.prepare()
    except CycleError:
        return True
    return False


PARTINGS: dict[str, dict[int, str]] = {
    "the first of a backward": {7: "all"},
    "the first ones": {7: "all", 6: "all", 5: "all"},
    "some in the middle": {5: "all", 4: "all", 3: "all", 2: "all"},
    "by turns": {7: "all", 5: "all", 3: "all", 1: "all"},
    "all but one": dict.fromkeys((7, 6, 5, 4, 3, 2, 0), "all"),
    "all": dict.fromkeys(range(DEPTH), "all"),
    "a bias": {6: "a bias"},
    "a bias, then more": {6: "a bias", 5: "all", 4: "all", 3: "all"},
    "a bias of each": dict.fromkeys(range(DEPTH), "a bias"),
}


@pytest.fixture(scope="module")
def whole():
    """What a rank does that leaves out nothing, by options."""
    known: dict[str, dict] = {}

    def of(options):
        if str(options) not in known:
            known[str(options)] = collectives({}, **options)
        return known[str(options)]

    return of


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"in_backward": True},
        {"prefetch": 0},
        {"accumulates": True},
        {"shifts": True},
        pytest.param({"prefetch": 3}, marks=pytest.mark.slow),
        pytest.param({"reshard_after_forward": False}, marks=pytest.mark.slow),
        pytest.param({"stage": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("left_out", PARTINGS.values(), ids=PARTINGS)
@pytest.mark.sample(3)
def test_ranks_that_leave_out_units_do_not_hang(whole, left_out, options):
    assert not hangs(whole(options), collectives(left_out, **options))


def test_ranks_that_leave_out_different_units_do_not_hang(whole):
    ranks = [whole({}), *(collectives(PARTINGS[name]) for name in ("the first ones", "some in the middle", "by turns"))]
    assert not hangs(*ranks)


def test_they_would_if_a_unit_were_behind_what_follows_it(whole, monkeypatch):
    """The rest of a unit is not known to come: its gradients are behind the moment at which the backward went on."""
    expected = whole({})
    monkeypatch.setattr(StreamRun, "enter", lambda self, unit: None)
    assert hangs(expected, collectives(PARTINGS["a bias, then more"]))
