"""Owners, bytes and memory of `WholeParameters`."""

from typing import Any

import pytest
import torch
from torch import optim
from torch.distributed.device_mesh import init_device_mesh

from shardlite import ShardLite, WholeParameters
from shardlite.cli import main
from shardlite.lab.plan.report import owners_of
from shardlite.lab.plan.source import find_source
from shardlite.optimizers.assignment import Loads, Owned, assign, describe, ranges_of
from shardlite.params.layout import lay_out
from shardlite.plan import Planner, Setting
from tests.support.models.losses import on_tokens
from tests.support.models.small import LanguageModel
from tests.support.twins.sharded import Turn, slow, take_step
from tests.support.twins.whole import Norms, sharded_muon


def members(ranks: int, units: list[dict[str, tuple[int, ...]]], *, replicated: bool = False) -> list[Owned]:
    """Return the parameters of units, cut as a model cuts them."""
    found = []
    for number, shapes in enumerate(units):
        layout = lay_out(shapes.items(), dtype=torch.float32, trainable=True, world_size=ranks)
        for index, slot in enumerate(layout.slots):
            ranges, place = ranges_of(layout, index, whole=replicated), len(found)
            found.append(Owned(name=slot.name, unit=f"{number}", shape=slot.shape, ranges=ranges, place=place))
    return found


def gpt(layers: int, width: int) -> list[dict[str, tuple[int, ...]]]:
    block = {"qkv": (3 * width, width), "out": (width, width), "up": (4 * width, width), "down": (width, 4 * width)}
    return [block] * layers


def llama(layers: int, width: int) -> list[dict[str, tuple[int, ...]]]:
    kv, hidden = width // 4, 7 * width // 2
    attention = {"q": (width, width), "k": (kv, width), "v": (kv, width), "o": (width, width)}
    return [attention | {"gate": (hidden, width), "up": (hidden, width), "down": (width, hidden)}] * layers


def highest(found: list[Owned], ranks: int) -> float:
    loads = Loads(found, ranks)
    for each in found:
        loads.add(each, each.owner)
    return max(map(loads.of, range(ranks)))


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("units", [gpt(12, 256), llama(16, 256)], ids=["gpt", "llama"])
def test_work_and_bytes_are_balanced(ranks: int, units: Any) -> None:
    found = members(ranks, units)
    assign(found)
    # At 16 ranks a matrix of the block is a tenth of what a rank owns.
    assert highest(found, ranks) <= (1.12 if ranks == 16 else 1.1)
    again = members(ranks, units)
    assign(again)
    assert [each.owner for each in again] == [each.owner for each in found]


def test_a_parameter_that_lies_whole_on_one_rank_stays_there() -> None:
    found = members(4, gpt(3, 64))
    assign(found)
    alone = [each for each in found if len(each.holders) == 1]
    assert alone
    assert all(each.owner == each.holders[0] for each in alone)
    assert not any(each.nbytes_sent(rank, 8, 4) for each in alone for rank in range(4))


def test_whole_copies_are_divided_at_stage_0() -> None:
    found = members(4, gpt(5, 64), replicated=True)
    assign(found)
    assert highest(found, 4) <= 1.1


def test_later_parameters_go_where_there_is_less() -> None:
    found = members(2, [{"a": (64, 64), "b": (64, 64)}, {"c": (64, 100)}], replicated=True)
    first, *others = found
    assign([first])
    assign(others, [first])
    assert {each.owner for each in found} == {0, 1}
    assert highest(found, 2) <= 1.3


def test_the_description_adds_up() -> None:
    found = members(3, gpt(4, 64))
    assign(found)
    first, others = describe(found)
    assert first.startswith("rank 0: 8 parameters, ")
    assert others.startswith("ranks 1-2, each: 4 parameters, ")
    assert len(found) == 8 + 2 * 4


# ---- of a model -----------------------------------------------------------------------------------------------------


def train(model: ShardLite, optimizer: optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        take_step(optimizer, on_tokens(model, Turn(step, torch.distributed.get_rank(), 0)))


def wrapped(group: Any, **options: Any) -> ShardLite:
    torch.manual_seed(0)
    return ShardLite(LanguageModel(blocks=3), group=group, **options)


@pytest.mark.ranks(2, 3, slow(4))
@pytest.mark.parametrize("kind", ["norms", "muon"])
def test_bytes_of_a_step_by_formula(group: Any, kind: str) -> None:
    """An element that changes ranks costs 8 bytes to its owner and 4 back, and 2 and 2 for Muon."""
    for stage in (0, 1, 3):
        model = wrapped(group, stage=stage)
        optimizer = sharded_muon(model.parameters()) if kind == "muon" else WholeParameters(model.parameters(), Norms)
        train(model, optimizer, 2)
        to, back = (2, 2) if kind == "muon" else (8, 4)
        expected = sum(2 * each.nbytes_sent(group.rank(), to, back) for each in optimizer._members.values())
        sent = [each for unit in model.traffic().values() for name, each in unit.items() if name.endswith("owners")]
        assert sum(each.nbytes for each in sent) == expected
        if stage and group.size() == 2:
            moved = sum(each.numel for each in optimizer._members.values() if each.moves)
            assert moved < sum(each.numel for each in optimizer._members.values()) / 2  # only those that are cut


@pytest.mark.parametrize("kind", ["norms", "muon"])
def test_whole_parameters_take_the_memory_of_two_units_during_a_step(group: Any, kind: str) -> None:
    model = wrapped(group)
    optimizer = sharded_muon(model.parameters()) if kind == "muon" else WholeParameters(model.parameters(), Norms)
    train(model, optimizer, 1)
    model.ledger.reset_peak()
    train(model, optimizer, 1)
    held = model.memory()["whole parameters"]
    units: dict[str, int] = {}
    for each in optimizer._members.values():
        if each.is_mine and each.moves:
            size = (2 if kind == "muon" else 8) * each.numel
            units[each.unit] = units.get(each.unit, 0) + -(-size // 128) * 128 + (0 if kind == "muon" else 128)
    assert held.now == 0
    assert held.peak <= 2 * max(units.values(), default=0)
    assert model.memory()["optimizer state"].now > 0


def test_states_lie_on_owners_only(group: Any) -> None:
    model = wrapped(group)
    optimizer = WholeParameters(model.parameters(), Norms)
    train(model, optimizer, 1)
    owned = {each.name for each in optimizer._members.values() if each.is_mine}
    names = {shard: name for name, shard in model.named_parameters()}
    assert {names[shard] for shard in optimizer.state} == owned
    counts = [None] * group.size()
    torch.distributed.all_gather_object(counts, sorted(owned), group=group)
    assert sorted(name for each in counts for name in each) == sorted(names.values())  # type: ignore[union-attr]


@pytest.mark.ranks(4)
def test_each_replica_has_its_owners(group: Any) -> None:
    model = wrapped(init_device_mesh("cpu", (2, 2)))
    optimizer = WholeParameters(model.parameters(), Norms)
    assert {each.owner for each in optimizer._members.values()} == {0, 1}


def test_the_plan_names_the_owners_of_the_run(group: Any) -> None:
    planner = Planner(find_source("demo-tiny", batch=1, context=None))
    for stage in (0, 3):
        model = ShardLite(planner.source.make(), group=group, stage=stage)
        optimizer = WholeParameters(model.parameters(), optim.Muon, elementwise={})
        planned = owners_of(planner, Setting(stage=stage, world_size=group.size()))
        assert {each.name: each.owner for each in planned} == {
            each.name: each.owner for each in optimizer._members.values()
        }


def test_the_command_prints_owners(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["plan", "--model", "demo-tiny", "--ranks", "4", "--batch", "1", "--checkpoint", "with", "--owners"]) == 0
    )
    out = capsys.readouterr().out
    assert "owners in WholeParameters at stage 3, 4 ranks:" in out
    assert [f"rank {rank}: " in out for rank in range(4)] == [True] * 4
