"""Test `bench.gpu --ranks N` without GPUs: on two ranks over gloo, with small models; and what `--land` refuses."""

import json
import os
import sys
import warnings
from contextlib import nullcontext
from importlib.util import find_spec
from unittest import mock

import pytest
import torch

from bench.gpu import run
from bench.gpu.land import landed
from bench.gpu.report import Report
from bench.gpu.results import render_ranks
from bench.gpu.run import FORMAT, ROWS, Probe, finish, main, probes_on
from bench.gpu.several import launch, links, pause, steps
from shardlite.comm.transport.group_collectives import GroupCollectives
from shardlite.lab.compared.workloads import perceptrons
from shardlite.lab.table import read_rows

TIMES = {"ms_p20", "ms_p50", "ms_p80", "host_ms_p50"}
STEP = TIMES | {"model", "system", "words", "parameters", "busbw_gbps"}
LINK = TIMES | {"collective", "nbytes", "algbw_gbps", "busbw_gbps"}
PAUSE = {"model", "system", "ms_p50", "paused_ms_p50", "host_ms_p50", "paused_host_ms_p50", "pause_ms", "lost_ms"}
COLLECTIVES = ["all-gather", "reduce-scatter", "all-to-all", "all-to-all, one peer at a time"]


def rows_of(probe, module, group, folder):
    """Run a probe on the ranks of a test, and return the rows of this rank: only rank 0 writes some."""
    file = folder / f"{probe}-{group.rank()}.jsonl"
    report = Report(probe, file, dry=True, ranks=group.size())
    report.quiet = group.rank() > 0
    small = {name: perceptrons(name, blocks=2, width=32, batch=2) for name in steps.MODELS}
    with warnings.catch_warnings(), mock.patch.dict(steps._ON_A_CPU, small):
        module.run(report, group)
    return read_rows([file] if file.exists() else [])


def test_each_system_has_a_row_for_each_model(group, tmp_path):
    for system in steps.SYSTEMS:
        if system.endswith("_compiled"):  # see test_a_dry_run_has_all_rows
            continue
        rows = rows_of(system, steps, group, tmp_path)
        assert [row["model"] for row in rows] == list(steps.MODELS) * (group.rank() == 0)
        for row in rows:
            assert (row["bench"], row["ranks"], row["system"]) == ("gpu-ranks", 2, system)
            assert "note" in row if system in steps._ONLY_ON_GPUS else row.keys() >= STEP


@pytest.mark.ranks(2, 3)
def test_each_collective_is_checked_and_has_its_bandwidth(group, tmp_path):
    rows = rows_of("links", links, group, tmp_path)
    assert [row["collective"] for row in rows] == COLLECTIVES * (group.rank() == 0)
    for row in rows:
        assert row.keys() >= LINK
        assert row["busbw_gbps"] == pytest.approx(row["algbw_gbps"] * (1 - 1 / group.size()), abs=2e-3)
    only = rows_of("copy_engines", links, group, tmp_path)
    assert [row["note"] for row in only] == ["needs GPUs and NCCL 2.28"] * (group.rank() == 0)


def test_a_collective_with_wrong_values_is_told(group, tmp_path):
    exchange = mock.patch.object(GroupCollectives, "_exchange_in_bucket")
    with exchange, pytest.raises(AssertionError, match=r"one peer at a time: rank . has wrong values"):
        rows_of("links", links, group, tmp_path)


def test_only_the_last_rank_pauses(group, tmp_path):
    with mock.patch.object(pause.time, "sleep") as slept:
        rows = rows_of("pause", pause, group, tmp_path)
    pauses = [call.args[0] for call in slept.call_args_list]
    assert pauses.count(pause.PAUSE) == (3 if group.rank() == group.size() - 1 else 0)
    assert [row["system"] for row in rows] == ["fsdp2", "exact", "fast"] * (group.rank() == 0)
    assert all(row.keys() >= PAUSE for row in rows)


# ---- ranks that fail ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "errors"),
    [
        ("os.abort() if rank else time.sleep(1000)", ["the ranks ended with [-9, -6]; see the log"]),
        (f"sys.exit({launch.REPORTED}) if rank else time.sleep(1000)", []),
    ],
)
def test_a_rank_that_dies_ends_the_others(tmp_path, monkeypatch, script, errors):
    program, popen = f"import os, sys, time; rank = int(os.environ['RANK']); {script}", launch.subprocess.Popen
    monkeypatch.setattr(launch, "GRACE", 0.1)
    monkeypatch.setattr(launch.subprocess, "Popen", lambda _, **given: popen([sys.executable, "-c", program], **given))
    assert launch.lead(Probe("links", "several.links", 1, "several"), tmp_path / ROWS, True, 2) == 1
    rows = read_rows([tmp_path / ROWS]) if errors else []
    assert [row["error"] for row in rows] == errors


def test_a_rank_reports_its_error_before_it_ends(tmp_path, monkeypatch):
    """Results are those of rank 0."""

    def fail(report, group):
        report(model="llama-4k")
        raise ValueError("no room\nfor it")

    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr("shardlite.lab.ranks.one_of_them", lambda: nullcontext(mock.Mock()))
    monkeypatch.setattr(steps, "run", fail)
    with mock.patch.object(os, "_exit") as exit_:
        launch.be_rank(Probe("exact", "several.steps", 1, "several"), tmp_path / ROWS, True, 2)
    exit_.assert_called_once_with(launch.REPORTED)
    (row,) = read_rows([tmp_path / ROWS])
    assert (row["probe"], row["rank"], row["error"]) == ("exact", 1, "ValueError: no room")


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "gpus", "said"),
    [
        (["--ranks", "8"], 2, "--ranks 8 needs 8 GPUs, but PyTorch finds 2: pass --ranks 2"),
        (["--ranks", "2"], 1, "finds 1: leave --ranks out"),
        (["--ranks", "2"], 0, "finds 0: --dry runs on the CPU"),
        (["--ranks", "9", "--dry"], 8, "from 2 to 8"),
        (["--ranks", "2", "--dry", "--only", "links", "pair"], 8, "--only pair: not a probe of a run with --ranks 2"),
        (["--only", "links"], 8, "pass --ranks N"),
    ],
)
def test_a_run_that_cannot_be_is_refused_before_it_starts(tmp_path, monkeypatch, refusal, arguments, gpus, said):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert said in refusal(main, [*arguments, "--out", str(tmp_path / "gpu")])
    assert not (tmp_path / "gpu").exists()


@pytest.mark.slow
@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
def test_a_dry_run_has_all_rows(tmp_path):
    assert main(["--dry", "--ranks", "2", "--out", str(tmp_path)]) == 0
    rows = read_rows([tmp_path / ROWS])
    assert not [row for row in rows if "error" in row]
    expected = {probe.name: STEP if probe.module == "several.steps" else set() for probe in probes_on(2)}
    expected |= {"links": LINK, "pause": PAUSE, "environment": {"triton", "topology"}}
    for probe, keys in expected.items():
        found = [row for row in rows if row["probe"] == probe and "status" not in row]
        assert found, probe
        assert all(row.keys() >= keys or "note" in row for row in found), probe


# ---- an archive that comes back -------------------------------------------------------------------------------------

WHERE = {"card": "NVIDIA Made-up 9000", "machine": "NVIDIA Made-up 9000; a processor, 64 cores", "torch": "2.11.0"}
WHERE |= {"python": "3.12.3", "date": "2026-01-02"}
ORIGIN = {
    "probe": "run",
    "format": FORMAT,
    "command": "python -m bench.gpu --ranks 8",
    "commit": "5" * 40,
    "clean": True,
}
FOUND = {
    "model": "gpt2-xl",
    "ms_p20": 100.0,
    "ms_p80": 140.0,
    "host_ms_p50": 40.0,
    "busbw_gbps": 80.0,
    "peak_bytes": 2**34,
}
RUN = [
    ORIGIN,
    {"probe": "environment", "triton": "3.6.0", "topology": "GPU0 GPU1\nNV18 NV18", **WHERE},
    {"probe": "fsdp2", "system": "fsdp2", "ms_p50": 130.0, **FOUND, **WHERE},
    {"probe": "exact", "system": "exact", "ms_p50": 117.0, **FOUND, **WHERE},
    {"probe": "registered", "error": "LayoutError: no multicast | here", **WHERE},
    *({"probe": probe.name, "status": "ok", "seconds": 9.0, "rows": 1} for probe in probes_on(8)),
]


def archive_of(folder, rows):
    """The archive of a run as it comes back."""
    folder.mkdir(exist_ok=True)
    (folder / run.LOG).write_text("==== links\n")
    marked = [{"bench": "gpu-ranks", "ranks": 8, "dry": False, **row} for row in rows]
    (folder / ROWS).write_text("".join(f"{json.dumps(row)}\n" for row in marked))
    finish(folder)
    return folder / run.ARCHIVE


def test_an_archive_lands_in_a_file_of_its_machine_and_day(tmp_path):
    archive = archive_of(tmp_path / "gpu", RUN)
    results = tmp_path / "results"
    results.mkdir()
    file = landed(archive, results)
    assert file == results / "gpu-8x-made-up-9000-2026-01-02.jsonl"
    assert read_rows([file]) == read_rows([tmp_path / "gpu" / ROWS])
    assert landed(tmp_path / "gpu", results) == file
    assert len(read_rows([file])) == len(RUN)
    text = render_ranks(read_rows([file]))
    assert text.startswith(
        "8 x NVIDIA Made-up 9000, torch 2.11.0, 2026-01-02; commit 555555555555; `python -m bench.gpu"
    )
    assert "| gpt2-xl | exact | 117.00 | 100.0 to 140.0 | 0.90 | 80 |" in text
    assert "`LayoutError: no multicast / here`" in text


def changed(probe, **values):
    return [row | values if row["probe"] == probe else row for row in RUN]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([row | {"dry": True} for row in RUN], "dry run, which measures nothing"),
        (changed("run", clean=False), "changed files: commit or stash them"),
        (changed("run", commit=None), "names no commit: run in a clone"),
        (changed("run", format=FORMAT + 1), f"in format {FORMAT + 1} on 8 GPUs, not of gpu-ranks in format {FORMAT}"),
        (RUN[1:], "in format None on None GPUs, not of gpu-ranks"),
        (changed("run", ranks="x"), f"on x GPUs, not of gpu-ranks in format {FORMAT} on 2 to 8"),
        (RUN[:-1], "incomplete: these probes did not run: fsdp2_again"),
        (changed("pause", status="not started: no time was left"), "incomplete: these probes did not run: pause"),
        (changed("exact", card="NVIDIA Other"), "rows of several cards"),
        ([row | {"date": "../../2026"} for row in RUN], "expected YEAR-MONTH-DAY"),
    ],
)
def test_an_archive_that_proves_nothing_is_refused(tmp_path, rows, said):
    with pytest.raises(ValueError, match=said):
        landed(archive_of(tmp_path / "gpu", rows), tmp_path)
    assert not list(tmp_path.glob("*.jsonl"))
