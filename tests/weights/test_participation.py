"""Ranks whose forwards take different branches at stage 3: each rank gathers every needed unit, and none hangs."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from shardlite import AdamW, Precision, ShardLite
from shardlite.comm.traffic import NO_UNIT
from shardlite.weights.gather_order import MEMORY
from tests.support.internals import units
from tests.support.models.branching import ROUTES, WIDTH, Branching, layer_drop, loss_on, other_orders
from tests.support.patience import passes_over
from tests.support.twins.sharded import WIDE, Pair, take_step


def route_body(group, route, steps=5, *, reentrant=None, **options):
    pair = Pair(lambda: Branching(reentrant=reentrant), group, **options)
    for _ in range(steps):
        pair.step(loss_on(route))
    pair.step(loss_on(route), ("local", "sharded", "step"), clip=0.01)


@pytest.mark.parametrize("world_size", [2, WIDE])
@pytest.mark.parametrize("route", ROUTES)
def test_ranks_may_take_different_branches(cluster, route, world_size):
    cluster.check(route_body, world_size, route)


OPTIONS = {
    "no-prefetch": {"prefetch": 0},
    "far-prefetch": {"prefetch": 3},
    "kept-until-backward": {"reshard_after_forward": False},
    "bf16": {"precision": Precision(compute=torch.bfloat16)},
    "recomputed": {"reentrant": False},
    "recomputed-reentrant": {"reentrant": True},
}


SLOW = {"far-prefetch", "recomputed-reentrant", "bf16"}  # the first two are like "no-prefetch" and "recomputed"


@pytest.mark.parametrize(
    "options", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in OPTIONS]
)
def test_with_any_option(cluster, options):
    cluster.check(route_body, 2, layer_drop, **OPTIONS[options])
    cluster.check(route_body, 2, other_orders, 3, **OPTIONS[options])


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_lower_stages_have_all_weights_anyway(cluster, stage):
    cluster.check(route_body, 2, layer_drop, stage=stage)


@pytest.mark.ranks(4)
def test_in_a_hybrid(group):
    mesh = init_device_mesh("cpu", (2, 2))
    route_body(mesh, layer_drop, 3, replicas=2)


def test_taking_part_is_counted(group):
    """Rank 1 never uses block 2. What rank 0 gathers, in forward and backward, it takes part in; and no more."""
    model = ShardLite(Branching(), group=group, prefetch=0)
    optimizer = AdamW(model.parameters())
    sent, before = [], {}
    for _ in range(4):
        route = [0, 1, 3, 4] if group.rank() == 1 else [0, 1, 2, 3, 4]
        take_step(optimizer, model(torch.ones(2, WIDTH), route, False).sum())
        now = {purpose: each.calls for purpose, each in model.traffic()["blocks.2"].items()}
        sent.append({purpose: calls - before.get(purpose, 0) for purpose, calls in now.items()})
        before = now
        assert model.ledger.peak()["gather buffers"] < sum(unit.nbytes for unit in units(model))
    assert sent == [{"take part" if group.rank() else "gather": 2, "reduce": 1}] * 4


def test_what_nobody_needs_any_more_is_gathered_no_more(group):
    """Only the first batch has the tower."""
    model = ShardLite(Branching(), group=group)
    optimizer = AdamW(model.parameters())
    gathered, before = [], 0
    for step in range(MEMORY + 3):
        model(torch.ones(2, WIDTH), [0, 1], step == 0).sum().backward()
        take_step(optimizer)
        calls = sum(each.calls for purpose, each in model.traffic()["tower.0"].items() if purpose != "reduce")
        gathered.append(calls > before)
        before = calls
    assert gathered == [True] * MEMORY + [False] * 3


def test_ranks_that_do_the_same_communicate_twice_per_step(group):
    """At the end of the forward and of the backward, five integers each, once the gather order has settled."""
    model = ShardLite(Branching(), group=group)
    optimizer = AdamW(model.parameters())
    counts = []
    for _ in range(5):
        before = model.traffic().get(NO_UNIT, {}).get("order negotiation")
        take_step(optimizer, model(torch.ones(2, WIDTH), [0, 1, 2, 3, 4], True).sum())
        passes_over(model)
        after = model.traffic()[NO_UNIT]["order negotiation"]
        counts.append((after.calls - before.calls, after.nbytes - before.nbytes) if before else None)
    assert counts[2:] == [(2, 2 * 20)] * 3


@pytest.mark.ranks(4)
def test_different_numbers_of_forwards_inside_gathered(group):
    """Ranks generate answers of different lengths: inside `gathered()` no rank waits for another."""
    model = ShardLite(Branching(), group=group)
    with model.gathered(writeback=False), torch.no_grad():
        for _ in range(1 + 3 * group.rank()):
            model(torch.ones(2, WIDTH), [0, 1, 2], False)
    model(torch.ones(2, WIDTH), [0, 1, 2], False).sum().backward()
