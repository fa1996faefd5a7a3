"""Test `bench.gpu` without a GPU: every probe runs at one layer, a failing probe ends no other, and limits add up."""

import os
import sys
import tarfile
from contextlib import nullcontext
from importlib.util import find_spec
from unittest import mock

import pytest
import torch
from shardlite_kernels.device_ring import ring_reduce_scatter_reference

from bench.gpu import ROOT, graphs, kernels, results, run
from bench.gpu.fake_ranks import HOST_SYSTEMS, RANKS, SYSTEMS
from bench.gpu.report import Report
from bench.gpu.run import NO_GPU, Probe, be_probe, main
from shardlite.lab.table import read_rows

EXPECTED = {
    "environment": {"triton", "kernel", "numpy", "transformers"},
    "calls": {"call", "us"},
    "nccl": {"connection", "collective", "host_us", "us"},
    "bits": {"kernel", "format"},
    "bandwidth": {"kernel", "numel", "ms_p50"},
    "compiled": {"system", "compiled", "ms_p50"},
    "pair": {"ranks", "transport"},
}
"""Keys of the rows of each probe."""

needs_transformers = pytest.mark.skipif(
    find_spec("transformers") is None, reason="transformers is not installed: make test-all installs it"
)


def found_by(name, tmp_path):
    rows = tmp_path / "rows.jsonl"
    assert be_probe(name, rows, dry=True) == 0
    found = read_rows([rows])
    for row in found:
        assert row["probe"] == name
        assert row["dry"] is True
        assert row["card"] == "none"
        assert "error" not in row
        assert row.keys() >= EXPECTED.get(name, set()) | {"machine", "torch", "date"}
    return found


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo looks at it
@pytest.mark.parametrize(
    "name",
    [
        "environment",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("nccl", "bits", "compiled", "bandwidth")),
    ],
)
def test_a_probe_runs_without_a_gpu(name, tmp_path):
    assert found_by(name, tmp_path)


@pytest.mark.slow
def test_ranks_of_one_card_have_the_weights_of_one_process(tmp_path):
    staged, direct = found_by("pair", tmp_path)
    assert (staged["transport"], staged["ranks"]) == ("p2p", 2)
    assert staged["off"] < 1e-5
    assert direct["note"] == "needs a GPU"


@pytest.mark.slow
@needs_transformers
def test_all_systems_take_steps_of_eight_ranks(tmp_path):
    found = found_by("fake8", tmp_path)
    models = ("llama-1k", "llama-4k", "gpt2-xl")
    steps = {(row["model"], row["system"]): row for row in found if "system" in row}
    assert steps.keys() == {(model, system) for model in models for system in (*SYSTEMS, "fsdp2, again")}
    for (_, system), row in steps.items():
        assert row["ranks"] == RANKS
        assert row.keys() >= {"bound", "host_ms_p50", "ms_p50_vs_fsdp2", "vs_fsdp2", "runs"}
        if system in SYSTEMS:
            assert 0 <= row["link_ms"] + row["fakes_ms"] < row["ms_p50"]
            assert row.keys() >= {"fakes_ms", "peak_bytes"}
            assert bool(row["predicted_bytes"]) == (system in ("exact", "in_backward"))
            assert row["clip"] == (None if system == "in_backward" else 1.0)


@pytest.mark.slow
@needs_transformers
def test_the_host_of_eight_ranks_is_counted(tmp_path):
    found = found_by("host", tmp_path)
    assert [row["system"] for row in found] == [*HOST_SYSTEMS, "fsdp2, again"]
    for row in found[:-1]:
        assert row["launches_per_unit"] > 10
        assert row["host_us_per_unit"] > 0
        assert row.keys() >= {"blocking_calls", "idle_ms"}


def test_launched_steps_are_timed_in_each_way(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    found = found_by("graphs", tmp_path)
    assert [(row["connections"], row["way"]) for row in found] == [
        *((32, way) for way in graphs.WAYS),
        *((8, way) for way in graphs.WAYS[:2]),
    ]
    assert all(row["launched_ms_p50"] > 0 for row in found)


@pytest.mark.filterwarnings("ignore:offload has no effect")
def test_offload_is_compared_with_other_systems_that_offload(tmp_path):
    found = {(row["system"], row.get("share")): row for row in found_by("offload", tmp_path)}
    ours = [
        ("fp32", 0.0),
        ("fp32", 0.5),
        ("fp32", 1.0),
        *((name, share) for name in ("in_backward", "compact") for share in (0.0, 1.0)),
    ]
    others = [(name, share) for name in ("fsdp2", "torchao") for share in (0.0, 1.0)]
    copies = [(f"copies {way}", None) for way in ("up", "down", "both at once")]
    assert found.keys() == {*copies, *ours, *others, ("fp32, again", 0.0)}
    assert all(found[each]["gbps"] > 0 for each in copies)
    assert found["torchao", 1.0]["note"] == "needs a GPU"
    for each in {*ours, *others} - {("torchao", 1.0)}:
        row = found[each]
        assert row["same_bits"]
        assert row["vs_resident"] > 0
    for system, share in ours:
        row = found[system, share]
        assert row["host_bytes"] == 0  # a CPU keeps all states in place
        assert (row["predicted_host_bytes"] > 0) == (share > 0)
    tables = results.render(list(found.values()))
    assert "| fp32 | 50 % |" in tables


@pytest.mark.slow
@needs_transformers
def test_all_stages_have_the_bits_of_the_twin_and_formats_are_near(tmp_path):
    found = {row["system"]: row for row in found_by("twin", tmp_path)}
    assert all(found[f"stage{stage}"]["same_as_stage3"] for stage in range(4))
    assert all(found[f"stage{stage}"]["same_as_twin"] for stage in range(4))
    assert 0 < found["compact"]["off"] <= found["compact"]["bound"] < 0.05


# ---- the run --------------------------------------------------------------------------------------------------------


@pytest.fixture
def scripts(monkeypatch):
    """Run the name of each probe as its code."""
    script = "import sys, time; name = sys.argv[sys.argv.index('--probe') + 1]; exec(name)"
    launched, popen = [], run.subprocess.Popen

    def started(command, **options):
        if command[0] == "git":
            return popen(command, **options)
        launched.append(command)
        return popen([sys.executable, "-c", script, *command[3:]], **options)

    monkeypatch.setattr(run.subprocess, "Popen", started)
    monkeypatch.setattr(run, "WARM_UP", "print('compiling')")

    def use(*codes):
        monkeypatch.setattr(run, "PROBES", [Probe(code, "x", 1 if "sleep" in code else 60, "any") for code in codes])
        return [*codes]

    use.launched = launched
    return use


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_probe_that_hangs_or_fails_costs_no_other(tmp_path, scripts, ranks):
    names = scripts("time.sleep(1000)", "sys.exit(1)", "print(7)")
    ended = run.run(names, tmp_path, dry=True, ranks=ranks)
    assert [row["status"] for row in ended] == [
        f"ended after {1 if ranks == 1 else run.DRY} s",
        "failed with status 1",
        "ok",
    ]
    rows = [row for row in read_rows([tmp_path / run.ROWS]) if row["probe"] != "run"]
    assert [row["status"] for row in rows] == [row["status"] for row in ended]
    log = (tmp_path / run.LOG).read_text()
    assert "==== print(7)\n7\n" in log
    assert "compiling" in log
    assert all(command[-1] == "--dry" for command in scripts.launched)


def test_a_run_ends_with_a_table_and_one_archive(tmp_path, scripts, capsys):
    scripts("sys.exit(1)", "print(7)")
    assert main(["--dry", "--only", "print(7)", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "| print(7) | ok |" in said
    assert f"to send back: {tmp_path / run.ARCHIVE}" in said
    files = sorted(file.name for file in tmp_path.iterdir())
    assert files == sorted((run.ROWS, run.LOG, run.TABLE_FILE, run.ARCHIVE))
    with tarfile.open(tmp_path / run.ARCHIVE) as archive:
        assert sorted(archive.getnames()) == sorted((run.ROWS, run.LOG, run.TABLE_FILE))
    assert main(["--dry", "--out", str(tmp_path)]) == 1


def test_a_probe_that_only_runs_if_it_is_asked_for_may_be_named():
    names = {probe.name for probe in run.probes_on(1)}
    asked = [probe.name for probe in run.PROBES if probe.on == "asked"]
    assert asked
    assert not names & {*asked}
    assert names | {*asked} == {probe.name for probe in run.probes_on(1, asked)}
    assert not {*asked} & {probe.name for probe in run.probes_on(2, asked)}
    assert "not a probe" in run._wrong(2, asked, dry=True)
    assert run._wrong(1, asked, dry=True) == ""


def test_without_a_gpu_it_ends_at_the_first_probe(tmp_path, scripts, capsys):
    names = scripts(f"sys.exit({NO_GPU})", "print(7)")
    assert len(run.run(names, tmp_path, dry=False)) == 1
    assert "no GPU that PyTorch can use; --dry" in capsys.readouterr().err


def test_a_failed_part_is_a_row_and_the_next_one_runs(tmp_path, capsys):
    report = Report("bits", tmp_path / "rows.jsonl", dry=True)
    for kernel in ("first", "second"):
        with report.guarded(kernel=kernel):
            if kernel == "first":
                raise AssertionError("3 of 8 sums are wrong")
            report(kernel=kernel, contract="bits")
    first, second = read_rows([tmp_path / "rows.jsonl"])
    assert first["error"] == "AssertionError: 3 of 8 sums are wrong"
    assert second["contract"] == "bits"
    assert report.failed
    assert "Traceback" in capsys.readouterr().err
    assert "| first |  |  |  |  | `AssertionError: 3 of 8 sums are wrong` |" in results.render([first, second])


@pytest.mark.slow
def test_a_bare_checkout_needs_no_path(tmp_path):
    """Nothing of the project is installed or on the path, as on a machine that only has the files."""
    script = f"""
import sys
root = {str(ROOT)!r}
sys.path[:] = [root, *(each for each in sys.path if not each.startswith(root) or "site-packages" in each)]
sys.meta_path[:] = [each for each in sys.meta_path if "editable" not in str(each)]
import bench.gpu
import shardlite_kernels
print(shardlite_kernels.__file__, sys.path[-1])
"""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = run.subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    kernels_folder = ROOT / "kernels"
    assert done.stdout.split() == [str(kernels_folder / "shardlite_kernels" / "__init__.py"), str(kernels_folder)]


# ---- what only a GPU runs -------------------------------------------------------------------------------------------


def test_a_wrong_sum_of_virtual_ranks_is_told(monkeypatch):
    def by_reference(wrong):
        def reduce(out, full, peers, *, epoch, divisor):
            calls.append((peers.rank, epoch))
            fulls[peers.rank] = full
            if len(fulls) == kernels.RANKS:
                for rank, target in outs.items():
                    ring_reduce_scatter_reference(target, [fulls[i] for i in range(4)], rank, divisor=divisor)
            outs[peers.rank] = out
            if peers.rank == 3:
                ring_reduce_scatter_reference(out, [fulls[i] for i in range(4)], 3, divisor=divisor)
                outs[2][5] += wrong

        return reduce

    for wrong in (0, 1):
        calls, fulls, outs = [], {}, {}
        monkeypatch.setattr(kernels, "ring_reduce_scatter", by_reference(wrong))
        with pytest.raises(AssertionError, match="rank 2: 1 of 1000 sums") if wrong else nullcontext():
            kernels.ring_on_streams(torch.device("cpu"), torch.bfloat16, 1000)
        assert [rank for rank, _ in calls[:4]] == [0, 1, 2, 3]
        assert len({epoch for _, epoch in calls}) == len(calls) / 4


def test_rings_of_one_process_are_not_launched_cooperatively():
    """A GPU would run such launches one after the other, and the ring would wait for ever."""
    launched = {}
    kernel = {(8,): lambda *arguments, **options: launched.update(options)}
    with mock.patch.object(kernels.device_ring, "_ring_reduce_scatter_kernel", kernel):
        kernels._NotCooperative()[8,](1, num_warps=8, launch_cooperative_grid=True)
    assert launched == {"num_warps": 8}
