"""`bench.host` measures the work of the host on real ranks, and on rank 0 of fake groups of any size."""

import json

import pytest
import torch

from bench import host
from shardlite.lab.compared.workloads import perceptrons
from shardlite.lab.fake.fake_group import launches
from shardlite.lab.table import render
from tests.support.ranks.scripts import run_process

COMMON = set(
    "bench model words units optimizer ranks threads rounds machine torch python date system".split()  # noqa: SIM905
)


def _quantiles(what):
    return {f"{what}_p{percent}" for percent in (20, 50, 80)}


TIMED = _quantiles("us_per_unit")


FEW = perceptrons("few", blocks=3, width=8, batch=2)


def measured(group):
    return host.measure(FEW, 1, group)


def test_real_ranks_are_timed_and_their_calls_counted(cluster):
    rows, others = cluster.run(measured, 2)
    assert [row["system"] for row in rows] == [row["system"] for row in others] == list(host.CHOSEN)
    for row in rows:
        assert set(row) == COMMON | TIMED | {"main_us_per_unit_p50", "calls_per_step", "us_vs_fsdp2"}
    calls = {row["system"]: row["calls_per_step"] for row in rows}
    assert 0 < calls["floor"] < calls["stage0"] < calls["stage3"]
    assert render(rows).count("few") == len(rows)


ON_FAKE = """
import json
from bench.host import measure_on_fake
from shardlite.lab.table import render
from shardlite.lab.compared.workloads import perceptrons
few = perceptrons("few", blocks=3, width=8, batch=2)
rows = [row for ranks in (2, 16) for row in measure_on_fake(few, 1, ranks)]
print(json.dumps(rows))
assert render(rows).count("collectives") == 2
"""


@pytest.mark.slow
def test_launches_of_collectives_do_not_depend_on_the_number_of_ranks():
    done = run_process("-c", ON_FAKE)
    assert done.status == 0, done.err
    rows = json.loads(done.out)
    assert [(row["ranks"], row["system"]) for row in rows] == [(n, s) for n in (2, 16) for s in host.CHOSEN_ON_FAKE]
    for row in rows:
        assert set(row) == COMMON | {f"cpu_{key}" for key in TIMED} | {"launches_per_unit", "cpu_vs_fsdp2"}
    found = {(row["system"], row["ranks"]): row["launches_per_unit"] for row in rows}
    for system in ("floor", "ddp", "fsdp2", "collectives"):
        assert found[system, 2] == found[system, 16], system
    assert found["p2p", 2] < found["p2p", 16], "a ring has more messages"
    params = 6
    assert found["collectives", 16] <= found["fsdp2", 16] + params


A_BLOCK = """
import json
from bench.host import measure_block_on_fake
from shardlite.lab.table import render
rows = [row for ranks in (8, 64) for row in measure_block_on_fake(1, ranks)]
print(json.dumps(rows))
assert render(rows).count("exact") == 2
"""


def test_a_long_reduction_is_at_most_eight_exchanges_and_a_kernel_on_any_number_of_ranks():
    done = run_process("-c", A_BLOCK)
    assert done.status == 0, done.err
    rows = json.loads(done.out)
    common = COMMON - {"model", "units", "optimizer", "system"}
    assert all(
        set(row) == common | {"reduce", "collectives", "staging_bytes", "launches", *_quantiles("cpu_us")}
        for row in rows
    )
    assert [(row["reduce"], row["ranks"]) for row in rows] == [(way, n) for n in (8, 64) for way in ("exact", "fast")]
    for row in rows:
        assert row["launches"] == row["collectives"] + 1
        assert row["collectives"] == ({8: 7, 64: 8}[row["ranks"]] if row["reduce"] == "exact" else 1)
        assert row["staging_bytes"] <= 110e6


def test_views_and_empty_tensors_are_no_launches():
    x = torch.ones(4, 4)

    def step() -> None:
        y = torch.empty_like(x)
        y.view(2, 8)[0].copy_(x.t().reshape(-1)[:8])  # the reshape copies, too
        y.detach().add_(x)

    assert launches(step) == 3
