"""Gathers and reductions overlap with computation, and `traffic()` reports the hidden time.

A block stands for long computation: it does not end before the gather of the next block has come, in a backward that of
the block before. If gathers did not run meanwhile it would never end; then it gives up, and the test fails.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from shardlite import AdamW, ShardLite
from shardlite.comm import context
from shardlite.params import Weights
from shardlite.telemetry import clock
from tests.support.internals import backward_run, units
from tests.support.patience import seconds, until
from tests.support.transports.delays import Delayed
from tests.support.twins.sharded import take_step

WIDTH, BLOCKS = 16, 5
DELAY = 0.004  # seconds before each message


class Compute(torch.autograd.Function):
    """What takes a while, forwards and backwards."""

    @staticmethod
    def forward(ctx, x, there, back):
        ctx.back = back
        there()
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.back()
        return grad.clone(), None, None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.there = self.back = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        # In the middle, so that this block's weights are held on both ways.
        hidden = torch.tanh(self.inner(x))
        return x + Compute.apply(hidden, self.there, self.back) @ self.inner.weight


def deep() -> nn.Sequential:
    return nn.Sequential(*(Block() for _ in range(BLOCKS)))


@contextmanager
def slow_links(**how: Any) -> Iterator[None]:
    def connected(*where: Any, **route: Any) -> Delayed:
        return Delayed(connect(*where, **route), 0, shortest=DELAY, longest=DELAY, **how)

    connect = context.connect
    with mock.patch.object(context, "connect", connected):
        yield


def step(model, optimizer):
    take_step(optimizer, model(torch.ones(2, WIDTH)).square().mean())


def in_flight_or_there(unit):
    """What a block waits for: that the weights of another one have come, although no module has asked for them yet."""
    return unit.phase is not Weights.SHARDED and (unit.work is None or unit.work.done())


def test_the_next_gather_comes_while_a_block_computes(group):
    """Every block waits for its neighbour's gather; the first one's backward for reductions."""
    with slow_links():
        model = ShardLite(deep(), group=group, prefetch=1)
    optimizer = AdamW(model.parameters())
    step(model, optimizer)  # the order is recorded
    by_name = {unit.name: unit for unit in units(model)}
    blocks = list(model.module)
    passed = []

    def after(other):
        def wait():
            until(lambda: in_flight_or_there(by_name[str(other)]))
            passed.append(other)

        return wait

    for i, block in enumerate(blocks):
        if i + 1 < BLOCKS:
            block.there = after(i + 1)
        if i > 0:
            block.back = after(i - 1)
    step(model, optimizer)
    assert passed == [1, 2, 3, 4, 3, 2, 1, 0]


def test_gradients_are_reduced_while_the_backward_goes_on(group):
    """The backward of the first block does not end before the last one's gradients are reduced."""
    with slow_links():
        model = ShardLite(deep(), group=group, stage=2)
    optimizer = AdamW(model.parameters())
    step(model, optimizer)
    passed = []

    def wait():
        until(lambda: (started := backward_run(model).started) and started[0].work.done())
        passed.append("the last block")

    model.module[0].back = wait
    step(model, optimizer)
    assert passed == ["the last block"]


class PlayedTime:
    """The time that `traffic()` reads: only delays of messages take any. So what it tells is the same on any machine.

    With `in_sight`, delays pass only while the main thread waits for something that is timed.
    """

    def __init__(self) -> None:
        self.in_sight = False
        self._now = 0.0
        self._main = threading.get_ident()
        self._watched = threading.Event()

    def perf_counter(self) -> float:
        if threading.get_ident() == self._main:  # when a wait begins, and when it ends
            (self._watched.clear if self._watched.is_set() else self._watched.set)()
        return self._now

    def sleep(self, pause: float) -> None:
        if self.in_sight and threading.get_ident() != self._main:
            assert self._watched.wait(seconds(30)), "nothing waits for a message that is late"
        self._now += pause


def times(group, prefetch):
    """How long gathers ran and what of it computation waited for, in the forwards of some steps."""
    played = PlayedTime()
    with slow_links(sleep=played.sleep):
        model = ShardLite(deep(), group=group, prefetch=prefetch)
    by_name = {unit.name: unit for unit in units(model)}
    with torch.no_grad(), mock.patch.object(clock, "time", played):
        model(torch.ones(2, WIDTH))
        played.in_sight = prefetch == 0
        for i, block in enumerate(list(model.module)[: -1 if prefetch else 0]):
            block.there = partial(until, partial(in_flight_or_there, by_name[str(i + 1)]))
        before = model.traffic()
        for _ in range(3):
            change(model)
            model(torch.ones(2, WIDTH))
        after = model.traffic()
    ran = exposed = 0.0
    for i in range(1, BLOCKS):
        now, then = (counts[str(i)]["gather"] for counts in (after, before))
        assert now.calls == then.calls + 3
        ran += now.seconds - then.seconds
        exposed += now.exposed - then.exposed
    return ran, exposed


def change(model):
    """Change the weights, so that each forward gathers anew."""
    for shard in model.parameters():
        shard.add_(0.001)


def test_traffic_tells_what_of_a_slow_link_is_hidden(cluster):
    delays = 3 * (BLOCKS - 1) * DELAY
    for ran, exposed in cluster.run(times, 2, 0):
        assert ran >= delays
        assert exposed == pytest.approx(ran)  # nothing is gathered ahead: computation waits for all of it
    for ran, exposed in cluster.run(times, 2, 1):
        assert ran >= delays
        assert exposed == 0  # a block ends after the gather of the next one
