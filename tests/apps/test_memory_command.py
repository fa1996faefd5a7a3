"""`shardlite memory`: what it records, prints, draws and refuses."""

from pathlib import Path

import pytest
import torch
from shardlite_kernels import chunk_memory
from torch import Tensor, nn
from torch.distributed.run import get_args_parser

from shardlite import AdamW, Precision, ShardLite
from shardlite.apps.cli import main
from shardlite.apps.launch import torchrun
from shardlite.apps.memory.recorder import BACKWARD, FORWARD, ROOT, STEP, Phase, Timeline, record
from shardlite.apps.memory.report import Comparison, table
from shardlite.apps.memory.systems import build_fsdp2, build_shardlite
from shardlite.apps.plan.plan import Planner, Setting
from shardlite.apps.plan.source import find_source
from shardlite.build import ACTIVATIONS
from tests.support.ranks.scripts import run_command

HERE = "tests.apps.test_memory_command"


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        raise KeyError("no such layer")


SETTING = Setting(world_size=2, on_gpu=False)
BLOCKS = ["blocks.0", "blocks.1"]


def record_both(group) -> list[Timeline]:
    """Body of a rank: record a step of each system, in a process in which earlier models have left chunks."""
    earlier = ShardLite(
        nn.Linear(1024, 1024), precision=Precision(compute=torch.bfloat16, master="split24"), group=group
    )
    optimizer = AdamW(earlier.parameters())
    torch.autograd.backward(earlier(torch.ones(1, 1024)).float().sum())
    optimizer.step()
    del earlier, optimizer
    assert sum(each.nbytes for each in chunk_memory()) >= 4 << 20
    source = find_source("demo-tiny", 2, None)
    return [
        record("ShardLite", lambda: build_shardlite(source, SETTING), source),
        record("FSDP2", lambda: build_fsdp2(source, SETTING, BLOCKS), source),
    ]


@pytest.fixture(scope="module")
def timelines(cluster) -> list[Timeline]:
    return cluster.run(record_both, 2)[0]


@pytest.fixture(scope="module")
def comparison(timelines) -> Comparison:
    return Comparison(Planner(find_source("demo-tiny", 2, None)).plan(SETTING), timelines[0])


def test_each_purpose_and_the_peak_are_as_planned(comparison):
    rows = {name: measured for name, _, _, measured in comparison.rows()}
    assert {"parameters", "optimizer state", "gradients", "gradient buckets", ACTIVATIONS} < rows.keys()
    for name, least, most, measured in comparison.rows():
        if name != "chunks of a step":  # of all models in the process, and other tests have left some
            assert abs(comparison.beyond(least, most, measured)) < 0.02, name
    assert rows["all together"] == comparison.timeline.peak < sum(rows.values())


def test_what_is_beyond_a_prediction(comparison):
    assert comparison.beyond(100, 200, 150) == comparison.beyond(0, 0, 0) == 0
    assert comparison.beyond(100, 200, 50) == -0.5
    assert comparison.beyond(100, 200, 300) == 0.5


def test_both_systems_pass_the_same_phases(timelines):
    passes = [(FORWARD, ROOT), (FORWARD, 0), (FORWARD, 1), (FORWARD, ROOT), (BACKWARD, ROOT), (BACKWARD, 1)]
    for timeline in timelines:
        found = [(phase.name, phase.unit) for phase in timeline.phases]
        assert found == [*passes, (BACKWARD, 0), (STEP, ROOT)], timeline.system
        places = timeline.places()
        assert [places[phase.first] for phase in timeline.phases] == list(range(8))
        assert places == sorted(places)


def test_every_byte_of_a_sample_has_a_purpose(timelines):
    ours, theirs = timelines
    assert [sum(each.values()) for each in ours.purposes] == ours.totals
    assert min(each[ACTIVATIONS] for each in ours.purposes) >= 0
    assert not any(theirs.purposes)
    assert ours.totals[-1] < ours.peak  # gradients and activations are gone
    assert 0.5 < theirs.peak / ours.peak < 2


def test_the_table_and_the_picture(timelines, comparison, tmp_path):
    pytest.importorskip("matplotlib", reason="pictures need it")
    from shardlite.apps.memory.plots import paint

    source = find_source("demo-tiny", 2, None)
    printed = table(source, comparison, timelines[1:]).splitlines()
    assert printed[0] == "demo-tiny on 2 ranks, batch 2 x 64 tokens per rank"
    assert printed[3].split()[-3:] == ["predicted", "measured", "beyond"]
    assert printed[-1].split()[:3] == ["FSDP2,", "all", "together"]
    paint(source, SETTING, timelines, tmp_path / "step.png")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_measures_both_systems_for_a_picture(cluster, tmp_path):
    pytest.importorskip("matplotlib", reason="--timeline needs it")
    picture = tmp_path / "step.png"
    arguments = ["memory", "--model", "demo-tiny", "--batch", "2", "--timeline", str(picture)]
    first, second = run_command(cluster, main, *arguments)
    assert first.status == second.status == 0
    assert second.out == second.err == ""
    assert "FSDP2 trains it" in first.err
    assert first.out.startswith("demo-tiny on 2 ranks, batch 2 x 64 tokens per rank")
    assert f"wrote {picture}" in first.out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_phase_without_samples_takes_no_place():
    phases = [Phase(FORWARD, ROOT, 0), Phase(BACKWARD, ROOT, 2), Phase(STEP, ROOT, 2)]
    empty = Timeline(system="", units=(), phases=phases, totals=[1, 2, 3], purposes=[{}, {}, {}], most={})
    assert empty.places() == [0, 0.5, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "gpt5"], "--model 'gpt5' is no preset, no file and no module:name"),
        (["--batch", "0"], "--batch must be at least 1, got 0"),
        (["--ranks", "0"], "--ranks is 0; it must be at least 1"),
        (["--master", "split24"], 'master="split24" keeps weights as bf16'),
        (["--timeline", "nowhere/step.png"], "there is no folder"),
        (["--model", f"{HERE}:Broken"], "no such layer"),
    ],
)
def test_wrong_options_are_named(arguments, message, capsys):
    pytest.importorskip("matplotlib", reason="--timeline needs it")
    with pytest.raises(SystemExit) as ended:
        main(["memory", "--model", "demo-tiny", *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err.replace("\n", " ")


def test_a_picture_needs_matplotlib(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        main(["memory", "--model", "demo-tiny", "--timeline", str(Path("step.png"))])
    assert "pip install 'shardlite[demo]'" in capsys.readouterr().err


def test_options_of_torchrun_are_not_taken_for_ours():
    arguments = ["memory", "--model", "demo-tiny", "--master", "split24"]
    parsed = get_args_parser().parse_args(torchrun(2, arguments)[3:])
    assert (parsed.training_script, parsed.training_script_args) == ("shardlite", arguments)
