"""`bench.kernels` fills its rows, and does not time a kernel with wrong results."""

import json
from dataclasses import replace

import pytest
import torch

from bench.kernels import chain as kernel_chain
from bench.kernels import clock as kernel_runs
from bench.kernels import inputs as kernel_inputs
from bench.kernels import peers as kernel_peers
from bench.kernels import run as kernels
from bench.kernels import work as kernel_work
from bench.kernels.clock import ResultError, verify
from bench.kernels.run import Plan, measure
from shardlite.lab.table import differences, read_rows

CPU = torch.device("cpu")
TINY = Plan(numels=(64, 3200), rounds=2, ceiling_bytes=4096, room=1 << 28)
KEYS = set(
    """
    bench device threads load ceiling verified triton cuda machine torch python date numel
    system operation format bytes_per_element contract error tolerance_used note
    ms_p20 ms_p50 ms_p80 cpu_ms_p50 gbps ceiling_gbps share vs_raw cpu_vs_raw rounds goal reached
    """.split()  # noqa: SIM905
)


@pytest.fixture(autouse=True)
def _short_period(monkeypatch):
    """Draw few numbers: drawing a million takes longer than these tests."""
    monkeypatch.setattr(kernel_inputs, "_PERIOD", 1 << 12)


@pytest.fixture
def small(monkeypatch):
    """Compare fewer elements, still more than a block of statistics."""
    monkeypatch.setattr(kernel_runs, "VERIFIED", 20_005)
    monkeypatch.setattr(kernels, "VERIFIED", 20_005)


def works_of(operation):
    return [work for work in [*kernel_work.works(CPU), *kernel_peers.peers(CPU)] if work.operation == operation]


# ---- rows -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small")
def test_a_row_for_each_work_and_size():
    works = [*kernel_work.works(CPU), *kernel_chain.chains(), *kernel_peers.peers(CPU)]
    rows = list(measure(works, CPU, TINY))
    assert len(rows) == (1 + len(works)) * len(TINY.numels)
    assert len({(row["numel"], row["system"], row["operation"], row["format"]) for row in rows}) == len(rows)
    for row in rows:
        assert set(row) == KEYS
        assert json.loads(json.dumps(row)) == row
        assert row["rounds"] == 2
        assert row["note"] is None
        assert 0 < row["ms_p20"] <= row["ms_p50"] <= row["ms_p80"]
        assert row["tolerance_used"] <= 1
        assert (row["contract"] == "bits") <= (row["error"] == 0)
        assert (row["goal"] is None) == (row["reached"] is None)
    assert [row["vs_raw"] for row in rows if row["operation"] == "_fused_adamw_"] == [1, 1]
    goals = {row["format"]: row["goal"] for row in rows if row["operation"] == "adamw" and row["goal"]}
    assert goals == {
        "fp32 weights, fp32 moments, fp32 gradient": "vs_raw <= 1.05",
        "split24 weights, fp32 moments, fp32 gradient": "vs_raw <= 1.7",
    }


@pytest.mark.usefixtures("small")
def test_the_command_writes_rows_and_prints_tables(tmp_path, monkeypatch, capsys):
    plan_for = kernels.plan_for
    monkeypatch.setattr(kernels, "plan_for", lambda *args: replace(plan_for(*args), ceiling_bytes=4096))
    options = ["--device", "cpu", "--numel", "64", "3.2e3", "--threads", "1", "--rounds", "1", "--out", str(tmp_path)]
    assert kernels.main(options) == 0
    rows = read_rows([tmp_path / "kernels-cpu.jsonl"])
    assert {row["numel"] for row in rows} == {64, 3200}
    assert {row["operation"] for row in rows} >= {"_fused_adamw_", "adamw", "reduce_adamw", "hop", "cast"}
    printed = capsys.readouterr().out
    assert [json.loads(line) for line in printed.splitlines()[: len(rows)]] == rows
    assert printed.endswith(differences(rows) + "\n")


# ---- a spoilt kernel is found ---------------------------------------------------------------------------------------


def nudged(tensor):
    """Change one number by one unit of its last place."""
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
    tensor.view(whole)[7] += 1


def spoil(monkeypatch, name, afterwards):
    """Call `afterwards` after each call of a kernel."""
    real = getattr(kernel_work, name)

    def spoilt(*args, **kwargs):
        real(*args, **kwargs)
        afterwards(*args)

    monkeypatch.setattr(kernel_work, name, spoilt)


SPOILT = {
    "a weight": ("adamw", "adamw_cpu", lambda state, *_: nudged(state.param)),
    "a second moment": ("adamw", "adamw_cpu", lambda state, *_: nudged(state.exp_avg_sq)),
    "a weight after a fused hop": ("reduce_adamw", "reduce_adamw_cpu", lambda state, *_: nudged(state.param)),
    "a sum": ("hop", "hop", lambda out, *_: nudged(out)),
    "a sum beside statistics": ("hop with statistics", "hop", lambda out, *_: nudged(out)),
    "statistics": ("hop with statistics", "hop", lambda *args: args[4][0, 0].mul_(1.2)),
    "a flag": ("hop with statistics", "hop", lambda *args: args[4][0, 1].add_(1)),
    "a product": ("scale by 0.99", "scale", lambda x, *_: nudged(x)),
    "a product by one": ("scale by 1", "scale", lambda x, *_: nudged(x)),
    "a cast": ("cast", "cast", lambda out, *_: nudged(out)),
    "what follows a hop": ("hop, adamw", "hop", lambda out, *_: out.mul_(1.01)),
}


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("what", SPOILT)
def test_a_spoilt_kernel_is_not_timed(monkeypatch, what):
    operation, name, afterwards = SPOILT[what]
    works = works_of(operation)
    spoil(monkeypatch, name, afterwards)
    for work in works:
        with pytest.raises(ResultError, match="off by"):
            verify(work, CPU)
    with pytest.raises(ResultError):
        next(measure(works, CPU, TINY))


OUR_CHAINS = [work for work in kernel_chain.chains() if work.system == "shardlite"]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("work", OUR_CHAINS, ids=lambda work: f"{work.operation}, {work.format}")
def test_a_chain_that_does_not_clip_is_not_timed(monkeypatch, work):
    monkeypatch.setattr(kernel_chain, "scale", lambda *_: None)
    if "below" in work.format:
        assert verify(work, CPU).tolerance_used <= 1
    else:
        with pytest.raises(ResultError):
            verify(work, CPU)


# ---- rounds ---------------------------------------------------------------------------------------------------------
