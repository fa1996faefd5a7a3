"""Eight ranks on one GPU: what a fake collective costs, that systems take turns, and what is compared with what."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from bench.gpu import fake_ranks, link
from bench.gpu.fake_ranks import RANKS, SYSTEMS, one_of, rows_of
from bench.gpu.link import BANDWIDTH, CLUSTER, FakeLink
from bench.gpu.report import Report, Times, in_turns
from shardlite.lab.compared.systems import build_fsdp2
from shardlite.lab.compared.workloads import perceptrons
from shardlite.lab.fake.fake_group import fake_group, operators
from shardlite.lab.table import read_rows

CPU = torch.device("cpu")
BF16 = torch.bfloat16


def blocks_in_bf16(count):
    """Perceptrons for systems that compute in bf16."""
    workload = perceptrons("blocks", blocks=count, width=8, batch=2)
    return replace(workload, draw=lambda rank, step: tuple(each.bfloat16() for each in workload.draw(rank, step)))


# ---- the link -------------------------------------------------------------------------------------------------------


def test_a_collective_takes_its_bytes_by_the_bandwidth():
    fake = FakeLink(4, CPU)

    def seconds(*arguments):
        before = fake.seconds
        fake(*arguments)
        return fake.seconds - before - CLUSTER.base

    shard, full, row = torch.ones(3), torch.zeros(12), torch.ones(12, dtype=torch.uint8)
    assert seconds("_allgather_base", full, shard) == pytest.approx(36 / BANDWIDTH)
    assert full.tolist() == [1] * 12
    assert seconds("_reduce_scatter_base", shard, full * 2) == pytest.approx(36 / BANDWIDTH)
    assert shard.tolist() == [2] * 3
    assert seconds("alltoall_base", full, full * 3, [], [], None) == pytest.approx(36 / BANDWIDTH)
    assert full.tolist() == [3] * 12
    assert seconds("alltoall_base", row, row * 4, [0, 0, 12, 0], [0, 12, 0, 0], None) == pytest.approx(12 / BANDWIDTH)
    assert seconds("alltoall_base", row, row * 4, [12, 0, 0, 0], [12, 0, 0, 0], None) == pytest.approx(0)


@pytest.mark.parametrize(("offset", "width"), [(0, 8), (4, 4), (2, 2), (1, 1)])
def test_a_fake_collective_is_one_launch(monkeypatch, offset, width):
    launched = []
    monkeypatch.setattr(link, "use_triton", lambda _: True)
    monkeypatch.setattr(link, "launch", lambda *arguments, **options: launched.append((arguments, options)))
    fake, memory = FakeLink(4, CPU), torch.zeros(1024, dtype=torch.uint8)
    target, source = memory[offset : 256 + offset], memory[512 + offset : 576 + offset]
    counts = operators(lambda: fake("_allgather_base", target, source))
    assert not counts["launches"]
    assert not counts["views"]
    ((arguments, options),) = launched
    assert arguments[2:5] == (target.data_ptr(), source.data_ptr(), 64 // width)
    assert (options["ROWS"], options["ELEMENT"].primitive_bitwidth) == (4, 8 * width)
    assert fake.host_seconds > 0


# ---- turns ----------------------------------------------------------------------------------------------------------


def test_systems_take_turns_and_the_first_has_the_last(tmp_path):
    order = []
    steps = {name: partial(order.append, name) for name in "abc"}
    times = in_turns(Report("fake8", tmp_path / "rows.jsonl", dry=True), {}, steps, turns=2, rounds=3)
    assert order == [name for name in "abcabca" for _ in range(4)]  # one step of each turn is not timed
    lengths = {name: [len(turn) for turn in each.steps] for name, each in times.items()}
    assert lengths == {"a": [3, 3], "b": [3, 3], "c": [3, 3], "a, again": [3]}


def test_a_system_that_fails_has_no_more_turns(tmp_path):
    order = []

    def fail():
        order.append("b")
        assert order.count("b") < 4, "the loss is not a number"

    steps = {"a": partial(order.append, "a"), "b": fail}
    report = Report("fake8", tmp_path / "rows.jsonl", dry=True)
    times = in_turns(report, {"model": "llama-1k"}, steps, turns=3, rounds=1)
    assert "".join(order) == "aabb" * 2 + "aa" * 2
    assert [*times] == ["a", "a, again"]
    (row,) = read_rows([tmp_path / "rows.jsonl"])
    assert (row["model"], row["system"], row["error"]) == ("llama-1k", "b", "AssertionError: the loss is not a number")


def test_ratios_are_of_the_same_turn_and_exposed_only_if_the_gpu_bounds():
    times = {
        "fsdp2": Times([[10, 10, 12], [20, 20, 20]], [9, 9], [9, 9], [5, 5]),
        "exact": Times([[5, 5, 5], [20, 22, 24]], [9, 9], [9, 9], [0.1, 0.1]),
        "fsdp2, again": Times([[15, 15, 15]], [9], [9], [5]),
    }
    awake = {name: Times([[4, 4]], [9], [9], [1]) for name in ("fsdp2", "exact")}
    rows = rows_of(times, awake)
    assert rows["exact"]["vs_fsdp2"] == [0.5, 1.1]
    assert rows["exact"]["ms_p50_vs_fsdp2"] == 0.8
    assert rows["fsdp2, again"]["vs_fsdp2"] == [1.5]
    assert [row["runs"] for row in rows.values()] == [2, 2, 1]
    assert [row["bound"] for row in rows.values()] == ["GPU", "host", "GPU"]
    assert rows["fsdp2"]["exposed_ms"] == 16 - 4
    assert "exposed_ms" not in rows["exact"]
    assert "exposed_ms" not in rows["fsdp2, again"]


def test_each_system_of_a_model_has_a_row(tmp_path):
    report = Report("fake8", tmp_path / "rows.jsonl", dry=True)
    with one_of(RANKS, CPU) as (group, fake):
        fake_ranks._fake8(fake_ranks.Bench(blocks_in_bf16(3), group, fake, report))
    rows = {row["system"]: row for row in read_rows([tmp_path / "rows.jsonl"])}
    assert not any("error" in row for row in rows.values())
    assert [*rows] == [*SYSTEMS, "fsdp2, again"]
    assert rows["floor"]["link_ms"] == 0
    assert all(row["link_ms"] > 0 for name, row in rows.items() if name in SYSTEMS.keys() - {"floor"})
    assert rows["fsdp2"]["vs_fsdp2"] == [1]


# ---- the systems ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tuned", [False, True])
def test_a_tuned_fsdp2_gathers_its_last_block_once(tuned):
    gathers = []

    def count(method, *_):
        gathers.append(method) if "gather" in method else None

    with fake_group(4, count) as group:
        trainer = build_fsdp2(blocks_in_bf16(3), group, compute=BF16, tuned=tuned)
        assert isinstance(trainer.model, FSDPModule)
        trainer.step(blocks_in_bf16(3).batch(0, 0))
        gathers.clear()
        trainer.step(blocks_in_bf16(3).batch(0, 0))
    assert len(gathers) == (5 if tuned else 6)
