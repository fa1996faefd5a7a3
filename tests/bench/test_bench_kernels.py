"""`bench.kernels` fills its rows, and does not time a kernel with wrong results."""

import json
import math
from dataclasses import replace

import pytest
import torch

from bench.kernels import chain as kernel_chain
from bench.kernels import clock as kernel_runs
from bench.kernels import inputs as kernel_inputs
from bench.kernels import peers as kernel_peers
from bench.kernels import run as kernels
from bench.kernels import work as kernel_work
from bench.kernels.clock import HostClock, ResultError, Run, Sample, Work, packed, time_runs, verify
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


@pytest.mark.parametrize(
    ("master", "moments", "gradient", "expected"),
    [
        ("fp32", "fp32", "fp32", 28),
        ("fp32", "fp32", "bf16", 26),
        ("fp32", "bf16", "fp32", 20),
        ("fp32", "int8", "fp32", 16.125),
        ("split24", "fp32", "fp32", 26),
        ("split24", "bf16", "fp32", 18),
        ("split24", "int8", "fp32", 14.125),
    ],
)
def test_bytes_are_those_of_the_format(master, moments, gradient, expected):
    form = f"{master} weights, {moments} moments, {gradient} gradient"
    (work,) = (work for work in works_of("adamw") if work.format == form)
    assert work.make(3200, CPU).moved == expected * 3200
    fused, apart = (
        [w.make(3200, CPU).moved for w in works_of(name) if w.format == "fp32 weights, fp32 moments, fp32 gradient"]
        for name in ("reduce_adamw", "hop, adamw")
    )
    assert (fused, apart) == ([32 * 3200], [40 * 3200])


def test_on_a_gpu_all_formats_are_measured_with_both_gradients():
    works = list(kernel_work.works(torch.device("cuda")))
    assert sum(work.operation == "adamw" for work in works) == 12
    assert len(list(kernel_peers.peers(torch.device("cuda")))) == 3


@pytest.mark.usefixtures("small")
def test_what_does_not_fit_has_a_row_that_says_so():
    held = verify(kernel_peers.raw_fused(), CPU).held * 3200 // 20_005
    plan = replace(TINY, numels=(3200,), room=held + 2 * TINY.ceiling_bytes + 3200 * 12)
    work, narrow = works_of("adamw")[0], works_of("cast")[0]
    rows = list(measure([work, narrow], CPU, plan))
    assert [row["note"] for row in rows] == [None, "does not fit", None]
    assert rows[1]["ms_p50"] is None


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


@pytest.mark.parametrize("operation", ["scale by 1", "scale by 0.99"])
def test_bytes_that_are_counted_are_written(operation):
    for work in works_of(operation):
        run = work.make(64, CPU)
        (x,) = (result.tensor for result in run.results())
        before = x.clone()
        run.step()
        assert run.moved == (0 if torch.equal(x, before) else 2 * x.nbytes)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("work", OUR_CHAINS, ids=lambda work: f"{work.operation}, {work.format}")
def test_a_chain_that_does_not_clip_is_not_timed(monkeypatch, work):
    monkeypatch.setattr(kernel_chain, "scale", lambda *_: None)
    if "below" in work.format:
        assert verify(work, CPU).tolerance_used <= 1
    else:
        with pytest.raises(ResultError):
            verify(work, CPU)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("wrong", [{"lr": 1.001e-3}, {"betas": (0.9, 0.9991)}, {"weight_decay": 0.101}])
def test_a_peer_with_other_hyper_parameters_is_not_timed(monkeypatch, wrong):
    for name, value in wrong.items():
        monkeypatch.setitem(kernel_peers._OPTIONS, name, value)
    for work in [*kernel_peers.peers(CPU), *(work for work in kernel_chain.chains() if work.system == "torch")]:
        with pytest.raises(ResultError):
            verify(work, CPU)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_number_that_is_none_is_found(value):
    def make(numel, device):
        x = torch.zeros(numel)
        step = lambda: x[5].fill_(value)  # noqa: E731
        return Run(
            step=step,
            results=lambda: [kernel_runs.Result(x, 0.5)],
            expected=lambda: [torch.ones(numel)],
            moved=1,
            held=1,
        )

    with pytest.raises(ResultError, match="off by inf"):
        verify(Work(system="a", operation="b", format="c", make=make), CPU)


# ---- rounds ---------------------------------------------------------------------------------------------------------


class ScriptedClock:
    """Takes no time, and says what it is told."""

    def __init__(self, seconds):
        self.seconds, self.order = seconds, []

    def sample(self, step):
        name = step()
        self.order.append(name)
        return Sample(self.seconds[name], self.seconds[name])


def run_named(name):
    return Run(step=lambda: name, results=list, expected=list, moved=1, held=1)


def test_rounds_are_interleaved_and_each_starts_with_another_one():
    clock = ScriptedClock({"a": 1.0, "b": 2.0, "c": 100.0})
    taken = time_runs({name: run_named(name) for name in "abc"}, clock, rounds=5, budget=50.0)
    assert "".join(clock.order) == "aabbc" + "abc" + "bca" + "cab" + "ba" + "ab"
    assert {name: len(samples) for name, samples in taken.items()} == {"a": 5, "b": 5, "c": 3}


def test_a_host_clock_counts_forwards():
    sample = HostClock().sample(lambda: sum(range(100)))
    assert sample.wall > 0
    assert sample.cpu >= 0


def test_groups_hold_what_fits():
    assert packed({"a": 4, "b": 3, "c": 11, "d": 4, "e": 9}, 10) == [["a", "b"], ["d"], ["e"]]
    assert packed({}, 10) == []
