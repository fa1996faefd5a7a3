"""All memory is in the account, is freed after its last use, and is measured by `bench.footprint`."""

import gc
import json
import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bench.footprint import source_of
from shardlite import AdamW, ShardLite
from shardlite.comm.transport.shared_memory.rendezvous import rendezvous
from shardlite.lab.compared.systems import MEASURED as SYSTEMS
from shardlite.lab.compared.workloads import perceptrons
from shardlite.lab.memory.recorder import measure
from shardlite.lab.memory.text import as_markdown as render
from tests.support.patience import passes_over
from tests.support.ranks.scripts import run_process
from tests.support.twins.sharded import slow, take_step

WIDTH = 128
TINY = perceptrons("tiny", blocks=2, width=32, batch=4)


def net(units: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(units))
    )


@pytest.mark.stages(2, 3)
def test_a_deleted_model_leaves_nothing(group: Any, stage: int) -> None:
    heap = rendezvous(group).neighbours.heap
    gc.collect()
    before = heap.live
    model = ShardLite(net(4), stage=stage, group=group)
    optimizer = AdamW(model.parameters())
    for _ in range(4):
        model(torch.ones(2, WIDTH)).sum().backward()
        taken = heap.live - before
        take_step(optimizer)
    model.full_state_dict()
    del model, optimizer
    gc.collect()
    left, pages = heap.live - before, os.fstat(heap.descriptor).st_blocks * 512 - heap.live - heap.reserved
    assert taken > 0 or stage >= 2  # there what lasts is this rank's own business
    assert left == heap.warm == 0
    assert pages <= 0


def test_the_account_knows_what_transports_and_steps_hold(group: Any) -> None:
    model = ShardLite(net(3), group=group)
    optimizer = AdamW(model.parameters(), in_backward=True)
    model(torch.ones(2, WIDTH)).sum().backward()
    optimizer.step()
    inside, memory = model.memory(), model.memory(process=True)
    purposes = set(memory) - {"process", "unexplained"}
    assert memory["process"].now - memory["unexplained"].now == sum(memory[each].now for each in purposes)
    assert memory["process"].peak >= memory["process"].now > memory["parameters"].now
    assert "process" not in inside
    neighbours = rendezvous(group).neighbours
    assert 0 < memory["mailboxes"].now < neighbours.heap.reserved
    assert memory["idle shared memory"].now == neighbours.heap.warm
    held = {purpose: held.now for purpose, held in memory.items()}
    assert held["chunks of a step"] > 0
    assert held["gather buffers"] == held["gradient buckets"] == 0


class Tied(nn.Module):
    """An embedding and a head of one matrix, which gets the first gradient and the last one, around some blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, WIDTH)
        self.blocks = net(3)

    def forward(self, x: Tensor) -> Tensor:
        return (self.blocks(self.embedding(x)) @ self.embedding.weight.t()).logsumexp(-1).sum()


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_there_are_no_more_buffers_than_the_documentation_says(group: Any, prefetch: int) -> None:
    model = ShardLite(Tied(), group=group, prefetch=prefetch, units=nn.Sequential)
    assert len(model.unit_names) == 2 or model.unit_names[0] == "(root)"
    optimizer = AdamW(model.parameters())
    for _ in range(3):
        model.ledger.reset_peak()
        take_step(optimizer, model(torch.arange(8)))
    block = 4 * sum(param.numel() for param in net(1).parameters())
    root = 4 * 64 * WIDTH
    peaks = {purpose: held.peak for purpose, held in model.memory().items()}
    assert peaks["gather buffers"] <= (1 + prefetch) * block + root
    assert peaks["gradient buckets"] <= 2 * block + 2 * root  # the last gradient of the root is copied to its place


def test_nothing_is_kept_idle_where_shards_are_stepped_in_the_backward(group: Any) -> None:
    model = ShardLite(Tied(), group=group, units=nn.Sequential)
    optimizer = AdamW(model.parameters(), in_backward=True)
    idle = []
    for _ in range(4):
        model(torch.arange(8)).backward()
        passes_over(model)
        idle.append(model.memory()["idle shared memory"].now)
        take_step(optimizer)
    page = 4096
    _, *later = idle
    assert max(later) <= 2 * page  # the ends of forward and backward may be agreed on behind it, by small messages


def measured_body(group: Any, system: str) -> dict[str, Any]:
    return measure(source_of(TINY), SYSTEMS[system], group, process=True)


@pytest.mark.parametrize("system", [slow("activations, bf16"), slow("plain"), "fsdp2", "compact"])
def test_a_row_has_what_its_table_shows(cluster, system):
    first, second = cluster.run(measured_body, 2, system)
    assert first["pss_bytes"] == second["pss_bytes"] >= first["between_bytes"]
    assert bool(first["purposes"]) == bool(first["pss_purposes"]) == (system == "compact")
    assert first["compute"] == ("bfloat16" if system in ("activations, bf16", "compact") else "float32")
    assert first["weight_bytes"] == first["parameters"] * (2 if first["compute"] == "bfloat16" else 4)
    facts = {"model": "tiny", "ranks": 2, "system": system, "malloc": "returns", "busy": 2}
    row = {**first, **facts, "unexplained": 0.25}
    table = render([row, {**row, "pss_vs_fsdp2": 0.5}])
    assert "2 CPU ranks, 2 busy loops at the same time; malloc returns large blocks to the system" in table
    assert table.count(f"| {system} |") == 2
    assert "| 0.50 |" in table
    assert "| +25.0 % |" in table


@pytest.mark.slow
def test_the_command_starts_its_ranks_and_wrapping_takes_one_unit_more(tmp_path):
    systems = ["fsdp2", "stage3"]
    options = ["--model", "mlp", "--systems", *systems, "--out", str(tmp_path), "--plots", str(tmp_path)]
    done = run_process("-m", "bench.footprint", *options)
    assert done.status == 0, done.err
    rows = [json.loads(line) for line in (tmp_path / "footprint-mlp-2ranks.jsonl").read_text().splitlines()]
    assert [row["system"] for row in rows] == systems
    assert render(rows) in done.out
    assert (tmp_path / "footprint-mlp-2ranks.svg").stat().st_size > 10_000
    unit = 4 * 2 * 512 * 4 * 512
    for row in rows[1:]:
        assert row["wrap_peak_bytes"] <= max(row["made_bytes"], row["wrapped_bytes"]) + 1.2 * unit
