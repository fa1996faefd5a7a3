"""Every probe of `bench.gpu` runs at toy size on the CPU, and one that hangs or fails costs no other."""

import sys

import pytest
import torch

from bench.gpu import run
from bench.gpu.run import PARTS, Probe, be_probe, main, render, run_part
from bench.support.table import read_rows

SLOW = {"gpu_tests", "host_waits", "ranks_on_one_card", "all_kernels", "steps", "compiled", "largest_model"}
EXPECTED = {
    "environment": {"triton", "kernel"},
    "gpu_tests": {"failures"},
    "memcheck": {"tool", "note"},
    "ranks_on_one_card": {"ranks", "system", "tolerance_used", "ms_p50"},
    "copies": {"nbytes", "ms_p50", "gbps"},
    "all_kernels": {"system", "operation", "ms_p50", "bytes_per_element"},
    "beside_a_matrix_product": {"work", "ms_alone", "product_ms_alone", "ms_both"},
    "steps": {"system", "ms_p50", "host_ms_p50", "peak_bytes", "ms_p50_vs_fsdp2", "peak_bytes_vs_fsdp2"},
    "host_waits": {"system", "waits", "refused"},
    "compiled": {"system", "compiled", "ms_p50"},
    "messages_to_itself": {"nbytes", "us_p50", "host_us_p50"},
    "largest_model": {"system", "parameters", "peak_bytes"},
}
"""Keys of the rows of each probe."""


def names():
    for probes in PARTS.values():
        for probe in probes:
            yield pytest.param(probe.name, marks=pytest.mark.slow if probe.name in SLOW else ())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo looks at it
@pytest.mark.parametrize("name", [*names()])
def test_each_probe_runs_without_a_gpu(name, tmp_path):
    rows = tmp_path / "rows.jsonl"
    be_probe(name, rows, dry=True)
    found = read_rows([rows])
    assert found
    for row in found:
        assert row["probe"] == name
        assert row["dry"] is True
        assert row.keys() >= EXPECTED.get(name, set()) | {"machine", "torch", "date"}


def test_all_stages_and_formats_are_beside_a_twin(tmp_path):
    be_probe("twins", tmp_path / "rows.jsonl", dry=True)
    found = read_rows([tmp_path / "rows.jsonl"])
    assert {row["system"] for row in found if "system" in row} >= {f"stage{stage}" for stage in range(4)}
    for row in found:
        assert row.get("tolerance_used", 0) <= 1
        assert row.get("off", 0) < 0.05
    assert {row["format"] for row in found if "format" in row} >= {"in_backward", "compact"}
    assert not torch.distributed.is_initialized()


def test_a_probe_that_hangs_or_fails_costs_no_other(tmp_path, monkeypatch, capsys):
    script = "import sys, time; name = sys.argv[sys.argv.index('--probe') + 1]; exec(name)"
    launched = []

    def started(command, **options):
        launched.append(command)
        return popen([sys.executable, "-c", script, *command[3:]], **options)

    popen = run.subprocess.Popen
    monkeypatch.setattr(run.subprocess, "Popen", started)
    hangs = "time.sleep(1000)"
    monkeypatch.setitem(PARTS, 1, [Probe("x", hangs, 1), Probe("x", "sys.exit(3)", 60), Probe("x", "print(7)", 60)])
    ended = run_part(1, tmp_path, dry=True)
    assert [row["status"] for row in ended] == ["ended after 1 s", "failed with status 3", "ok"]
    assert [row["status"] for row in read_rows([tmp_path / "part-1.jsonl"])] == [row["status"] for row in ended]
    assert "==== print(7)\n7\n" in (tmp_path / "part-1.log").read_text()
    assert all(command[-1] == "--dry" for command in launched)
    assert render(ended).count("\n| 1 |") == 3
    assert main(["--dry", "--part", "1", "--out", str(tmp_path)]) == 1
    assert "| sys.exit(3) | failed with status 3 |" in capsys.readouterr().out


def test_parts_take_less_than_nine_minutes():
    for part, probes in PARTS.items():
        assert sum(probe.seconds for probe in probes) < 9 * 60, part


@pytest.mark.slow
def test_the_command_runs_a_part(tmp_path):
    assert main(["--dry", "--part", "2", "--out", str(tmp_path)]) == 0
    assert sorted(file.name for file in tmp_path.iterdir()) == ["part-2.jsonl", "part-2.log"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_without_a_gpu_it_says_so(capsys):
    with pytest.raises(SystemExit):
        main(["--part", "1"])
    assert "no GPU that PyTorch can use; --dry" in capsys.readouterr().err
