"""Offloaded states in a plan: bytes on the GPU and on the host, traffic, and the time of their copies."""

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from shardlite.config import Precision
from shardlite.params import round_up
from shardlite.params.host_states import OFFLOADED
from shardlite.plan import CARDS, CLUSTERS, Event, Kind, Planner, RankPlan, Setting, Source, simulate
from shardlite.plan.budget import Recipe, budget_of
from shardlite.plan.timeline import timeline_of
from shardlite.telemetry import not_on
from shardlite.wrapping import Offload, Options, offload_of, plan_units
from tests.comm.streams.programs import WORLD_SIZE, Block, Training
from tests.comm.streams.programs import net as net_of_blocks
from tests.comm.streams.simulated_gpu import Gpu

WIDTH, BLOCKS = 64, 4
BLOCK = WIDTH * WIDTH
"""Parameters of a block. Each rank of two has whole groups of 32 elements, so nothing is padded."""

SPLIT = Precision(compute=torch.bfloat16, master="split24")
COMPACT = {"precision": SPLIT, "state": "int8"}
MIXED = {"precision": Precision(compute=torch.bfloat16)}
ALL = Offload()


def net() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS)])


@pytest.fixture(scope="module")
def planner() -> Planner:
    return Planner(Source("net", net, lambda: (torch.zeros(8, WIDTH),), "8 rows"))


def is_split(how: dict[str, Any]) -> bool:
    return "precision" in how and how["precision"].master == "split24"


def both(planner: Planner, setting: Setting) -> tuple[RankPlan, RankPlan]:
    """Plan a setting with all states on the GPU, and as it is."""
    return planner.plan(replace(setting, offload=None)), planner.plan(setting)


@pytest.mark.parametrize(
    ("how", "per_group"),
    [
        ({}, 2 * 4 * 32),
        (MIXED, 2 * 4 * 32),
        (MIXED | {"state": "bf16"}, 2 * 2 * 32),
        ({"precision": SPLIT}, (2 * 4 + 1) * 32),
        (COMPACT, (2 + 1) * 32 + 2),
    ],
)
@pytest.mark.parametrize(("stage", "own"), [(0, BLOCK), (2, BLOCK // 2), (3, BLOCK // 2)])
def test_moments_and_low_bits_move_to_the_host(planner, how, per_group, stage, own):
    without, plan = both(planner, Setting(stage=stage, world_size=2, offload=ALL, **how))
    nbytes = BLOCKS * own // 32 * per_group
    assert plan.host_traffic == nbytes
    assert plan.host_nbytes == nbytes
    assert without.host_nbytes == without.host_traffic == without.budget.held["offload buffers"] == 0
    assert plan.budget.held["offload buffers"] == 4 * round_up(
        own // 32 * per_group, 512
    )  # a unit is shorter than 32 MiB
    split = BLOCKS * own * is_split(how)
    saved = {purpose: without.budget.held[purpose] - plan.budget.held[purpose] for purpose in plan.budget.held}
    assert saved["parameters"] == split
    assert saved["optimizer state"] == nbytes - split
    assert plan.budget.held["optimizer state"] == BLOCKS * (own // 32 * 2 + 4)  # rows of groups, and step counts


def test_a_unit_with_two_dtypes_has_two_arenas():
    """Three split layers, and one that is kept in fp32: the longer arena decides the buffers."""
    options = Options(units=lambda *_: False, precision=replace(SPLIT, keep="2"), offload=ALL)
    plan = plan_units(net(), options, 2, torch.device("cuda"))
    budget = budget_of(plan, Recipe(options=options, world_size=2, device=torch.device("cuda")))
    split, kept = 3 * BLOCK // 2 * 9, BLOCK // 2 * 8
    assert [unit.offloaded for unit in budget.units] == [split + kept]
    assert budget.held["offload buffers"] == 4 * split
    assert budget.host_nbytes == split + kept


def test_low_bits_take_their_gaps_along_and_are_not_copied_there():
    """A vector of 3 elements fills a group of 32; the shard of rank 0 is longer."""
    bias = Planner(Source("bias", lambda: nn.Linear(33, 3), lambda: (torch.zeros(1, 33),), "a row"))
    plan = bias.plan(Setting(world_size=2, offload=ALL, **COMPACT))
    stepped = plan.host_traffic
    assert stepped % 98 == 0
    assert plan.host_nbytes >= stepped


def test_a_chunk_is_at_most_32_mib():
    wide = Planner(Source("wide", lambda: nn.Linear(4096, 4096, bias=False), lambda: (torch.zeros(1, 4096),), "a row"))
    plan = wide.plan(Setting(world_size=1, offload=ALL, **COMPACT))
    assert plan.budget.held["offload buffers"] == 4 * (32 << 20)


def test_units_that_fit_into_the_resident_bytes_stay(planner):
    """The choice counts fp32 moments, as the program's does, which does not know the optimizer yet."""
    setting = Setting(world_size=2, precision=SPLIT)
    states = 9 * BLOCK // 2
    for offload, stay in (
        (Offload(share=0.5), 2),
        (Offload(resident=states), 1),
        (Offload(resident=4 * states), 4),
        (Offload(share=0.01), 3),
    ):
        plan = planner.plan(replace(setting, offload=offload))
        assert [unit.offloaded for unit in plan.budget.units] == [0] * stay + [states] * (BLOCKS - stay)
        assert plan.host_nbytes == (BLOCKS - stay) * states


def test_the_next_forward_holds_the_gradient_of_a_unit_until_it_uses_the_unit(planner):
    setting = Setting(world_size=2, offload=ALL, **COMPACT)
    without, plan = both(planner, setting)
    gradient = 4 * BLOCK // 2
    assert plan.budget.waiting == dict.fromkeys(range(BLOCKS), gradient)
    start = [Event(Kind.ENTER, 0), Event(Kind.LEAVE, 0), Event(Kind.ENTER, 1)]
    for events, held in ((start[:1], 3), (start[:2], 3), (start, 2), ([Event(Kind.BACKWARD)], 0)):
        events = [*events[:-1], events[-1]._replace(now=10**9)]  # the peak is at the last event
        assert timeline_of(plan.budget, events).peak["gradients"] == held * gradient
        assert timeline_of(plan.budget, events, prompt=True).peak["gradients"] == 0
        assert timeline_of(without.budget, events).peak["gradients"] == 0
    assert planner.plan(replace(setting, in_backward=True)).budget.waiting == {}
    # Nothing is gathered at stage 0 with one dtype, or by one rank: these steps end before the forward.
    for ends in (Setting(stage=0, world_size=2, offload=ALL), Setting(world_size=1, offload=ALL)):
        assert planner.plan(ends).budget.waiting == {}


@pytest.mark.parametrize(
    "how",
    [
        {"offload": True},
        {"offload": 0.5, "precision": SPLIT},
        {"offload": True, "precision": replace(SPLIT, keep="rise"), "stage": 1},
        {"offload": True, "precision": Precision(compute=torch.bfloat16, keep="rise")},  # fp32 masters of both dtypes
        {"offload": True, "in_backward": True, **COMPACT},
        {"offload": 20_000, **MIXED, "state": "bf16", "stage": 2},
        {"offload": True, **COMPACT, "stage": 0},
    ],
)
def test_a_simulated_gpu_holds_and_copies_what_is_planned(how):
    """Bytes are equal to those of the ledger, and each step copies each state up once and down once."""
    options = {name: how[name] for name in ("stage", "precision") if name in how}
    wrapped = Options(units=Block, offload=offload_of(how["offload"]), **options)
    units = plan_units(net_of_blocks(), wrapped, WORLD_SIZE, torch.device("meta"))
    others = {name: how[name] for name in ("state", "in_backward") if name in how}
    recipe = Recipe(options=wrapped, world_size=WORLD_SIZE, device=torch.device("cuda"), **others)
    budget = budget_of(units, recipe)
    gpu = Gpu()
    with gpu.ranks(WORLD_SIZE):
        training = Training(**how)
        training.step(3)
        held = {purpose: each.now for purpose, each in training.model.memory().items()}
        copied = training.optimizer._layout.offloaded.copied
        assert held["offloaded state"] == budget.host_nbytes
        assert held["offload buffers"] == budget.held["offload buffers"]
        assert held["parameters"] == budget.held["parameters"]
        assert copied == 3 * sum(unit.offloaded for unit in budget.units)
        del training
        gc.collect()


def test_states_on_the_host_are_not_in_the_memory_of_the_gpu():
    assert OFFLOADED in not_on(torch.device("cuda"))
    assert "offload buffers" not in not_on(torch.device("cuda"))


def test_a_cpu_offloads_nothing(planner):
    without, plan = both(planner, Setting(world_size=2, on_gpu=False, offload=ALL, **COMPACT))
    assert plan.by_purpose == without.by_purpose
    assert plan.host_nbytes == plan.host_traffic == 0


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize(("ranks", "how"), [(1, COMPACT), (2, COMPACT), (1, {}), (2, {})])
def test_copies_hide_behind_computation_if_the_host_is_fast(planner, ranks, how, in_backward):
    """With a slow host, a step takes about as long as its copies; 4 of 4 units are copied one after the other."""
    setting = Setting(world_size=ranks, offload=ALL, in_backward=in_backward, **how)
    without, plan = both(planner, setting)
    cluster = CLUSTERS["dgx-a100"]
    times = {}
    for host in (1e18, 1e3):
        times[host] = simulate(plan, replace(cluster, card=replace(cluster.card, host=host)))
        assert times[host].host == pytest.approx(plan.host_traffic / host)
    before = simulate(without, cluster)
    assert before.host == 0
    assert times[1e18].total == pytest.approx(before.total)
    assert times[1e3].total == pytest.approx(times[1e3].host, rel=1e-3)
    assert times[1e3].exposed == pytest.approx(times[1e3].host, rel=1e-3)


def test_a_unit_is_gathered_after_its_copies(planner):
    """While the first unit runs, the others are copied: half as fast a host delays the end by less than all copies."""
    setting = Setting(world_size=2, offload=ALL, **COMPACT)
    without, plan = both(planner, setting)
    cluster = CLUSTERS["dgx-a100"]
    alone = simulate(without, cluster)
    unit = alone.compute / BLOCKS / 3  # a unit's forward takes as long as the copy of a unit
    host = plan.budget.units[0].offloaded / unit
    step = simulate(plan, replace(cluster, card=replace(cluster.card, host=host)))
    assert alone.total < step.total < alone.total + step.host


def test_every_card_has_a_host():
    assert {name for name, card in CARDS.items() if card.host == 0} == {"CPU core"}
