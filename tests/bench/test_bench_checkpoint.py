"""`bench.faults` saves in every way, kills ranks and restarts them, and its rows say how fast."""

from unittest import mock

import pytest

from bench.faults import checkpoint, notice
from shardlite.lab.compared.workloads import perceptrons
from shardlite.lab.table import read_rows, render
from tests.support.ranks.scripts import run_process

FEW = perceptrons("few", blocks=2, width=16, batch=2)


def measured(group, folder):
    return checkpoint.measure(FEW, 1, folder, group)


def test_each_system_saves_the_same_bytes_and_is_timed(cluster, tmp_path):
    rows, others = cluster.run(measured, 2, tmp_path)
    assert [row["system"] for row in rows] == ["raw", "raw, early", "torch.save", "fsdp2", "save", "async_save"]
    assert [row["system"] for row in others] == [row["system"] for row in rows]
    assert {row["bytes"] for row in rows} == {12 * FEW.parameters()}
    assert rows[0]["vs_raw"] == 1
    assert all(0 < row["stall_p50"] <= row["seconds_p80"] for row in rows)
    assert render(rows).count("\n") == 9
    assert [each.name for each in tmp_path.iterdir()] == ["verified"]


def test_what_is_not_loaded_as_it_was_saved_is_not_timed(group, tmp_path):
    with mock.patch.object(checkpoint, "load"), pytest.raises(AssertionError):
        measured(group, tmp_path)


@pytest.mark.slow
def test_a_restart_from_memory_loses_no_step(tmp_path):
    options = ["--model", "tiny", "--fatal", "3", "--save-every", "2", "--folder", str(tmp_path)]
    done = run_process("-m", "bench.faults.restart", *options, "--out", str(tmp_path))
    assert done.status == 0, done.err
    rows = read_rows([tmp_path / "restart-tiny-2ranks.jsonl"])
    assert [(row["way"], row["resumed"], row["lost"]) for row in rows] == [("memory", 3, 0), ("disk", 2, 1)]
    assert all(0 < row["started"] < row["started"] + row["loaded"] < row["seconds"] for row in rows)
    assert render(rows) in done.out


@pytest.mark.slow
def test_the_end_of_a_rank_is_noticed_over_each_transport(tmp_path):
    done = run_process("-m", "bench.faults.notice", "--model", "tiny", "--kills", "1", "--out", str(tmp_path))
    assert done.status == 0, done.err
    rows = read_rows([tmp_path / "notice-tiny-2ranks.jsonl"])
    assert [row["transport"] for row in rows] == list(notice.TRANSPORTS)
    assert all(row["seconds_p50"] > 0 for row in rows)
    assert render(rows) in done.out
