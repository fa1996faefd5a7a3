"""Scaling is measured on the stated batches, and simulated from measurements on one and two ranks."""

import pytest
import torch

from bench.scale import run, simulated
from bench.scale.results import paint, render
from shardlite.cli.launch import usable_cores
from shardlite.lab.memory.machine import machine
from shardlite.lab.table import read_rows
from shardlite.lab.workloads import WORKLOADS
from shardlite.plan import CLUSTERS

TINY = WORKLOADS["tiny"]
FIT = {
    "compute_seconds": 0.1,
    "update_seconds": 0.02,
    "alpha": 1e-3,
    "beta": 0.0,
    "gamma": 0.0,
    "overhead": 0.0,
    "overlaps": False,
}


def measured(ranks, mode, ms):
    return {
        "bench": "scale",
        "kind": "measured",
        "cluster": simulated.HERE,
        "mode": mode,
        "ranks": ranks,
        "model": "tiny",
        "words": TINY.words,
        "rounds": 3,
        "ms_p50": ms,
        "per_second": 4e3 * (ranks if mode == "weak" else 1) / ms,
        "item": "samples",
        **machine(),
    }


@pytest.fixture(scope="module")
def rows():
    """Rows of a machine on which nothing gets faster by more ranks."""
    times = {("weak", ranks): 120.0 * ranks for ranks in (1, 2, 4)} | {("strong", ranks): 120.0 for ranks in (1, 2, 4)}
    taken = [measured(ranks, mode, ms) for (mode, ranks), ms in times.items()]
    found = simulated.with_efficiency(taken)
    return [*found, *simulated.here(TINY, FIT, taken), *simulated.elsewhere([CLUSTERS["dgx-h100"]], "demo-tiny")]


def test_strong_scaling_divides_the_batch():
    half = run.divided(TINY, 2)
    assert half.items == 2
    assert half.terms == TINY.terms // 2
    assert half.batch(0, 1)[0].equal(TINY.batch(0, 1)[0][:2])
    with pytest.raises(ValueError, match="a batch of 4 cannot be divided among 3 ranks"):
        run.divided(TINY, 3)


def test_efficiency_is_that_of_one_rank(rows):
    for row in rows:
        if row["ranks"] == 1:
            assert row["efficiency"] == 1
    slow = [row["efficiency"] for row in rows if row["kind"] == "measured" and row["ranks"] == 4]
    assert slow == [0.25, 0.25]


def test_one_rank_is_simulated_as_it_was_measured(rows):
    one = [row for row in rows if row["kind"] == "simulated" and row["cluster"] == simulated.HERE and row["ranks"] == 1]
    assert len(one) == 2
    for row in one:
        assert row["ms_p50"] == pytest.approx(120, rel=1e-3)  # 0.1 s and 0.02 s
        assert row["simulated_vs_measured"] == pytest.approx(1, rel=1e-3)


def test_ranks_share_the_cores(rows):
    sharing = max(1, 4 / usable_cores())
    four = next(
        row
        for row in rows
        if (row["cluster"], row["kind"], row["mode"], row["ranks"]) == (simulated.HERE, "simulated", "weak", 4)
    )
    assert four["ms_p50"] > 100 * sharing  # computation alone


def test_named_clusters_reach_4096_ranks(rows):
    named = [row for row in rows if row["cluster"] == "dgx-h100"]
    assert max(row["ranks"] for row in named) == 4096
    assert {row["mode"] for row in named} == {"weak", "strong"}
    assert all(row["kind"] == "simulated" for row in named)


def test_measured_and_simulated_are_told_apart(rows, tmp_path):
    table = render(rows)
    assert "simulated / measured" in table
    assert "Simulated on `dgx-h100`, not measured" in table
    for name in ("a.svg", "b.svg"):
        paint(rows, tmp_path / name)
    text = (tmp_path / "a.svg").read_text()
    assert text == (tmp_path / "b.svg").read_text()
    assert "measured" in text
    assert "simulated" in text


@pytest.mark.parametrize(("cores", "words"), [(2, "4 ranks share 2 cores:"), (3, "75 % at most"), (4, None)])
def test_the_figure_says_why_ranks_that_share_cores_are_slow(rows, tmp_path, cores, words):
    machine = f"a processor, 2.4 GHz, {cores} cores"
    paint([{**row, "machine": machine} if row["kind"] == "measured" else row for row in rows], tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    assert words in text if words else "ranks share" not in text


def test_both_modes_are_verified_and_timed(group):
    torch.set_num_threads(1)
    found = run.measure(TINY, 1, group)
    assert [(row["mode"], row["ranks"]) for row in found] == [("weak", 2), ("strong", 2)]
    for row in found:
        items = 2 * 4 if row["mode"] == "weak" else 4
        assert row["per_second"] == pytest.approx(items / row["ms_p50"] * 1e3, rel=0.02)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--ranks", "4"], "must include 1 and 2"),
        (["--ranks", "1", "2", "3"], "a batch of 8 cannot be divided among 3 ranks"),
        (["--planned", "gpt5"], "'gpt5' is neither a preset"),
        (["--steps", "0"], "must be at least 1"),
    ],
)
def test_what_cannot_end_well_is_not_begun(options, words, refusal):
    assert words in refusal(run.main, options)


@pytest.mark.slow
def test_the_command_writes_measured_and_simulated_rows(tmp_path, capsys):
    options = ["--model", "tiny", "--ranks", "1", "2", "--steps", "1", "--named", "cpu", "--planned", "demo-tiny"]
    assert run.main([*options, "--out", str(tmp_path)]) == 0
    found = read_rows(tmp_path.glob("scale-*.jsonl"))
    assert {row["bench"] for row in found} == {"scale", "scale-fit"}
    assert {row["kind"] for row in found if row["bench"] == "scale"} == {"measured", "simulated"}
    assert render(found) in capsys.readouterr().out
