"""`shardlite memory`: what it predicts, measures, records, prints, draws and refuses."""

import json
import sys

import pytest
import torch
from shardlite_kernels import chunk_memory
from torch import nn
from torch.distributed.run import get_args_parser

from bench.footprint import source_of
from shardlite import AdamW, Precision, ShardLite
from shardlite.cli import main
from shardlite.cli.launch import torchrun
from shardlite.lab.compared.systems import MEASURED as SYSTEMS
from shardlite.lab.compared.systems import System, fsdp2_system, shardlite_system
from shardlite.lab.compared.workloads import WORKLOADS
from shardlite.lab.memory import text
from shardlite.lab.memory.plots import paint
from shardlite.lab.memory.predict import Predictor
from shardlite.lab.memory.run import Program, measure_all
from shardlite.lab.memory.text import beyond, comparison
from shardlite.lab.memory.timeline import BACKWARD, CHUNKS, FORWARD, ROOT, STEP, Timeline, record
from shardlite.lab.plan.source import find_source
from shardlite.lab.table import RESULTS
from shardlite.plan import ACTIVATIONS, Planner, RankPlan, Setting
from tests.support.patience import passes_over
from tests.support.ranks.cluster import RemoteError
from tests.support.ranks.scripts import run_command, run_process

WIDTH = 64
HERE = "tests.lab.test_memory_command"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rise, self.fall = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fall(torch.tanh(self.rise(x)))


class Own(nn.Module):
    """A user's model: blocks between two other layers; its output is not a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 32)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.embedding(x)
        for block in self.blocks:
            hidden = block(hidden)
        return {"logits": self.head(hidden)}


class Broken(Own):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        raise KeyError("no such layer")


def batch() -> torch.Tensor:
    return torch.zeros(2, 8, dtype=torch.long)


def options(model: str, *systems: str) -> list[str]:
    return ["memory", "--model", f"{HERE}:{model}", "--inputs", f"{HERE}:batch", "--systems", *systems]


@pytest.fixture
def on_cluster(cluster, monkeypatch, tmp_path):
    """Run programs on the warm ranks instead of starting processes."""

    def measure(program: Program, system: str, ranks: int) -> dict:
        file = tmp_path / f"{system}.json"
        arguments = [*program.arguments, "--systems", system, "--row", str(file)]
        try:
            run_command(cluster, main, *arguments, ranks=ranks)
        except RemoteError:
            assert "error" in json.loads(file.read_text())
        return json.loads(file.read_text())

    monkeypatch.setattr(Program, "measure", measure)


# ---- predictions ----------------------------------------------------------------------------------------------------


def check_rows(model: str, name: str) -> None:
    """Compare rows that `bench.footprint` has measured with the predictions, which are bounds for ShardLite."""
    predictor = Predictor(source_of(WORKLOADS[model]), progress=lambda _: None)
    rows = [json.loads(line) for line in (RESULTS / f"footprint-{name}.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "deepspeed" not in row["system"]]
    assert len(rows) >= 17
    for row in rows:
        least, most = predictor.bounds(row["system"], SYSTEMS[row["system"]], row["ranks"])
        assert 0.99 * least <= row["tensor_bytes"] <= 1.01 * most, row


@pytest.mark.parametrize(("model", "name"), [("mlp", "mlp-2ranks"), ("gpt", "gpt-4ranks")])
def test_systems_hold_what_is_predicted(model, name):
    check_rows(model, name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "name"),
    [("mlp", "mlp-4ranks"), ("gpt", "gpt-2ranks"), ("gpt2", "gpt2-2ranks"), ("gpt2-6", "gpt2-6-4ranks")],
)
def test_other_models_too(model, name):
    if model.startswith("gpt2"):
        pytest.importorskip("transformers", reason="needs transformers: `make test-all` installs it")
    check_rows(model, name)


# ---- the command ----------------------------------------------------------------------------------------------------


def test_a_users_own_model(on_cluster, tmp_path, capsys):
    rows, plots = tmp_path / "rows.jsonl", tmp_path / "plots"
    systems = ["zero", "stage3"]
    assert main([*options("Own", *systems), "--steps", "1", "--json", str(rows), "--plots", str(plots)]) == 0
    told = capsys.readouterr()
    measured = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [row["system"] for row in measured] == systems
    for row in measured:
        assert 0.99 * row["predicted_least_bytes"] <= row["tensor_bytes"] <= 1.01 * row["predicted_bytes"], row
    assert text.render(measured) in told.out
    assert "step, KiB" not in told.out
    assert "[2/2, 2 ranks] stage3: " in told.err
    assert {path.name for path in plots.iterdir()} == {f"footprint-{HERE}-Own-2ranks.png", f"footprint-{HERE}-Own.png"}


def test_a_broken_model_is_a_row_with_its_error(on_cluster, tmp_path, capsys):
    assert main([*options("Broken", "ddp", "stage3"), "--json", str(tmp_path / "rows.jsonl")]) == 1
    told = capsys.readouterr()
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["error"] for row in rows] == ["KeyError: 'no such layer'"] * 2
    assert "ddp failed: KeyError: 'no such layer'" in told.out
    assert "ddp is not predicted: " in told.err


@pytest.mark.slow
def test_processes_are_started_and_what_ends_them_is_reported():
    done = run_process("-m", "shardlite", *options("Own", "compact"), "--process", "--steps", "1")
    assert done.status == 0, done.err
    assert "step, KiB" in done.out
    assert "2 CPU ranks; malloc returns large blocks to the system" in done.out
    program = Program(module="shardlite", arguments=["memory", "--model", f"{HERE}:NoSuchModel"])
    assert "has no attribute 'NoSuchModel'" in program.measure("ddp", 1)["error"]


@pytest.mark.parametrize(("nbytes", "cell"), [(3 << 10, "tensors, KiB\n3"), (20 << 20, "tensors, MiB\n20")])
def test_small_models_are_printed_in_kib(nbytes, cell):
    row = json.loads((RESULTS / "footprint-mlp-2ranks.jsonl").read_text().splitlines()[0])
    for name in {"pss_bytes", "predicted_bytes", "between_bytes", "made_bytes", "wrap_peak_bytes"} & row.keys():
        del row[name]
    columns = text.render([row | {"tensor_bytes": nbytes}], lambda cells: "\n".join(map(str, zip(*cells, strict=True))))
    title, number = cell.split("\n")
    assert f"('{title}', '{number}')" in columns


def test_ranks_that_end_without_a_row_are_reported():
    assert "the ranks ended with status 1" in Program(module="no_such_module", arguments=[]).measure("ddp", 1)["error"]


def test_systems_that_are_not_installed_are_left_out_of_all_and_an_error_by_name(monkeypatch, capsys, refusal):
    monkeypatch.setitem(SYSTEMS, "deepspeed1", System(build=lambda *_: None, package="no_such_package"))
    source = find_source(f"{HERE}:Own", 1, None, f"{HERE}:batch")
    program = Program(module="shardlite", arguments=[])
    assert list(measure_all(source, program, {"deepspeed1": SYSTEMS["deepspeed1"]}, [1])) == [[]]
    left_out = "deepspeed1 is left out: no_such_package is not installed; pip install no_such_package"
    assert left_out in capsys.readouterr().err.splitlines()
    printed = refusal(main, ["memory", "--model", f"{HERE}:Own", "--systems", "ddp", "deepspeed1"])
    assert "--systems 'deepspeed1': no_such_package is not installed; pip install no_such" in printed


def test_ranks_are_started_by_the_command_alone(monkeypatch, refusal):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "run it without torchrun" in refusal(main, options("Own", "ddp"))


def test_options_of_shardlite_add_it_to_the_systems(on_cluster, capsys):
    assert main([*options("Own", "ddp"), "--stage", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.startswith(("ddp", "shardlite"))] == ["ddp", "shardlite"]


def test_plots_of_activations_alone_and_of_a_busy_machine(tmp_path):
    rows = [json.loads(line) for line in (RESULTS / "footprint-gpt2-2ranks-busy.jsonl").read_text().splitlines()]
    alone = [{**row, "predicted_bytes": 1} for row in rows if row["system"] == "activations"]
    assert [path.name for path in paint(alone, tmp_path)] == ["footprint-gpt2-2ranks-busy.png"]


# ---- one step by purpose ---------------------------------------------------------------------------------------------

SETTING = Setting(world_size=2, on_gpu=False)


def record_both(group) -> list[Timeline]:
    """Body of a rank: record a step of each system, in a process in which earlier models have left chunks."""
    earlier = ShardLite(
        nn.Linear(1024, 1024), precision=Precision(compute=torch.bfloat16, master="split24"), group=group
    )
    optimizer = AdamW(earlier.parameters())
    torch.autograd.backward(earlier(torch.ones(1, 1024)).float().sum())
    optimizer.step()
    passes_over(earlier)  # their ends run on a queue, which holds the shards until all ranks are there
    del earlier, optimizer
    assert sum(each.nbytes for each in chunk_memory()) >= 4 << 20
    source = find_source("demo-tiny", 2, None)
    return [
        record(source, shardlite_system(SETTING), group),
        record(source, fsdp2_system(SETTING.precision), group),
    ]


@pytest.fixture(scope="module")
def timelines(cluster) -> list[Timeline]:
    return cluster.run(record_both, 2)[0]


@pytest.fixture(scope="module")
def plan() -> RankPlan:
    return Planner(find_source("demo-tiny", 2, None)).plan(SETTING)


def test_each_purpose_and_the_peak_are_as_planned(plan, timelines):
    rows = {name: measured for name, _, _, measured in comparison(plan, timelines[0])}
    assert {"parameters", "optimizer state", "gradients", "gradient buckets", ACTIVATIONS} < rows.keys()
    for name, least, most, measured in comparison(plan, timelines[0]):
        if name != CHUNKS:  # of all models in the process, and other tests have left some
            assert abs(beyond(least, most, measured)) < 0.02, name
    assert rows["all together"] == timelines[0].peak < sum(rows.values())


def test_both_systems_pass_the_same_phases(timelines):
    passes = [(FORWARD, ROOT), (FORWARD, 0), (FORWARD, 1), (FORWARD, ROOT), (BACKWARD, ROOT), (BACKWARD, 1)]
    for timeline in timelines:
        found = [(phase.name, phase.unit) for phase in timeline.phases]
        assert found == [*passes, (BACKWARD, 0), (STEP, ROOT)]
        assert timeline.units == ["blocks.0", "blocks.1"]
        places = timeline.places()
        assert [places[phase.first] for phase in timeline.phases] == list(range(8))
        assert places == sorted(places)


def test_the_timeline_is_of_two_systems(on_cluster, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="--timeline needs it")
    picture = tmp_path / "step.png"
    assert main(["memory", "--model", "demo-tiny", "--batch", "2", "--timeline", str(picture)]) == 0
    told = capsys.readouterr()
    assert "fsdp2 trains demo-tiny on 2 ranks" in told.err
    printed = told.out.splitlines()
    assert printed[0] == "demo-tiny on 2 ranks, batch 2 x 64 tokens per rank"
    assert printed[3].split()[-3:] == ["predicted", "measured", "beyond"]
    assert printed[-2].split()[:3] == ["FSDP2,", "all", "together"]
    assert printed[-1] == f"wrote {picture}"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_picture_needs_matplotlib(monkeypatch, refusal):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    printed = refusal(main, ["memory", "--model", "demo-tiny", "--timeline", "step.png"])
    assert "pip install 'shardlite[demo]'" in printed


def test_options_of_torchrun_are_not_taken_for_ours():
    arguments = ["memory", "--model", "demo-tiny", "--master", "split24"]
    parsed = get_args_parser().parse_args(torchrun(2, arguments)[3:])
    assert (parsed.training_script, parsed.training_script_args) == ("shardlite", arguments)
