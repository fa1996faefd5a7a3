"""Muon and AdamW are tuned over one grid, compared by the best runs of each, and plotted."""

from unittest import mock

import pytest

from bench.optimizers import losses
from shardlite.lab.table import read_rows
from shardlite.lab.train.settings import GPTConfig
from tests.support.ranks.scripts import run_command


def row(optimizer, lr, seed, *values):
    return {"optimizer": optimizer, "lr": lr, "seed": seed, "validated": [10, 20, 30], "losses": values}


ROWS = [
    row("adamw", 0.1, 0, 3.0, 2.5, 2.0),
    row("adamw", 0.2, 0, 3.0, 2.9, 2.8),
    row("adamw", 0.1, 1, 3.0, 2.5, 2.2),
    row("muon", 0.1, 0, 3.0, 3.0, float("nan")),
    row("muon", 0.2, 0, 3.0, 2.1, 1.5),
    row("muon", 0.2, 1, 3.0, 2.1, 1.5),
]


def test_the_best_runs_are_compared_by_their_means():
    found = losses.compare(ROWS)
    assert found.rates == {"adamw": 0.1, "muon": 0.2}
    assert found.curves["adamw"] == pytest.approx([3.0, 2.5, 2.1])
    assert found.crossed == 20
    slow = [*ROWS[:3], row("muon", 0.2, 0, 3.0, 2.9, 2.8)]
    assert losses.compare(slow).crossed is None


SMALL = GPTConfig(layers=1, width=16, heads=2, context=8)


def small_main(arguments):
    with mock.patch.multiple(losses, CONFIG=SMALL, GRID=(0.01, 0.02), BATCH=4):
        return losses.main(arguments)


def test_rows_table_and_picture_are_written(cluster, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib paints the picture")
    first, second = run_command(cluster, small_main, "--steps", 4, "--every", 2, "--out", tmp_path)
    rows = read_rows([tmp_path / "optimizers-losses.jsonl"])
    assert first.status == second.status == (losses.compare(rows).crossed in (None, 4)), first.err
    assert [(each["optimizer"], each["seed"]) for each in rows] == [
        *[("adamw", 0), ("adamw", 0), ("adamw", 1)],
        *[("muon", 0), ("muon", 0), ("muon", 1)],
    ]
    assert all(each["validated"] == [2, 4] and len(each["losses"]) == 2 for each in rows)
    assert "Muon reaches AdamW's final loss" in first.out
    assert (tmp_path / "optimizers-losses.png").read_bytes().startswith(b"\x89PNG")
