"""Ranks whose forwards take different branches, at stage 3: each gathers what any of them needs, and none hangs."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from shardlite import AdamW, Precision, ShardLite
from shardlite.comm.traffic import NO_UNIT
from shardlite.weights.gather_order import MEMORY
from tests.support.internals import units
from tests.support.models.small import Residual
from tests.support.patience import passes_over
from tests.support.twins.sharded import WIDE, Pair, Turn

WIDTH = 12


class Branching(nn.Module):
    """Residual blocks, of which a batch names those that it uses, in that order, and a tower that it may leave out."""

    def __init__(self, blocks: int = 5, *, reentrant: bool | None = None) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.blocks = nn.ModuleList([Residual(WIDTH, 2 * WIDTH + 1) for _ in range(blocks)])
        self.tower = nn.ModuleList([Residual(WIDTH, WIDTH + 3) for _ in range(2)])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, route: list[int], with_tower: bool) -> Tensor:
        for place in route:
            x = self.run(self.blocks[place], x)
        if with_tower:
            for block in self.tower:
                x = block(x)
        return self.head(x)

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return block(x)
        return checkpoint(block, x.requires_grad_() if x.is_leaf else x, use_reentrant=self.reentrant)


def layer_drop(step: int, rank: int) -> tuple[list[int], bool]:
    """Each rank drops other blocks in each step."""
    draw = torch.rand(5, generator=torch.Generator().manual_seed(100 * step + rank))
    return [i for i in range(5) if draw[i] > 0.4], True


def early_exit(step: int, rank: int) -> tuple[list[int], bool]:
    return list(range(1 + (rank + step) % 5)), False


def missing_modality(step: int, rank: int) -> tuple[list[int], bool]:
    """A rank's batch has the other modality now and then; at first no rank's has."""
    return list(range(5)), step > 1 and (rank + step) % 3 == 0


def other_orders(step: int, rank: int) -> tuple[list[int], bool]:
    """Nothing is alike: each rank calls its blocks in an order of its own, some of them twice."""
    shuffled = torch.randperm(5, generator=torch.Generator().manual_seed(100 * step + rank)).tolist()
    return [*shuffled, *shuffled[: rank % 3]], rank % 2 == 0


def one_rank_alone(step: int, rank: int) -> tuple[list[int], bool]:
    return ([0, 1, 2, 3, 4], True) if rank == 1 else ([], False)


ROUTES = [layer_drop, early_exit, missing_modality, other_orders, one_rank_alone]


def loss_on(route):
    def loss(model, turn: Turn) -> Tensor:
        x = torch.randn(3, WIDTH, generator=turn.generator())
        return functional.cross_entropy(model(x, *route(turn.step, turn.rank)), torch.tensor([0, 1, 2]))

    return loss


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


def cost_body(group, steps):
    """Rank 1 never uses block 2. Return what the ranks have sent for it in each step, as calls by purpose."""
    model = ShardLite(Branching(), group=group, prefetch=0)
    optimizer = AdamW(model.parameters())
    sent, before = [], {}
    for _ in range(steps):
        route = [0, 1, 3, 4] if group.rank() == 1 else [0, 1, 2, 3, 4]
        model(torch.ones(2, WIDTH), route, False).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        now = {purpose: each.calls for purpose, each in model.traffic()["blocks.2"].items()}
        sent.append({purpose: calls - before.get(purpose, 0) for purpose, calls in now.items()})
        before = now
        assert model.ledger.peak()["gather buffers"] < sum(unit.nbytes for unit in units(model))
    return sent


def test_taking_part_is_counted(cluster):
    """What rank 0 gathers, in forward and backward, rank 1 takes part in; and no more than that."""
    first, second = cluster.run(cost_body, 2, 4)
    assert first == [{"gather": 2, "reduce": 1}] * 4
    assert second == [{"take part": 2, "reduce": 1}] * 4


@pytest.mark.ranks(2)
def test_what_nobody_needs_any_more_is_gathered_no_more(group):
    """Only the first batch has the tower."""
    model = ShardLite(Branching(), group=group)
    optimizer = AdamW(model.parameters())
    gathered, before = [], 0
    for step in range(MEMORY + 3):
        model(torch.ones(2, WIDTH), [0, 1], step == 0).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        calls = sum(each.calls for purpose, each in model.traffic()["tower.0"].items() if purpose != "reduce")
        gathered.append(calls > before)
        before = calls
    assert gathered == [True] * MEMORY + [False] * 3


@pytest.mark.ranks(2)
def test_ranks_that_do_the_same_talk_twice_per_step(group):
    """At the end of the forward and of the backward, five integers each, once the gather order has settled."""
    model = ShardLite(Branching(), group=group)
    optimizer = AdamW(model.parameters())
    counts = []
    for _ in range(5):
        before = model.traffic().get(NO_UNIT, {}).get("order negotiation")
        model(torch.ones(2, WIDTH), [0, 1, 2, 3, 4], True).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
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
