"""Options of `shardlite train`: a file of them, formats and optimizers, the log, the progress line."""

import csv
import importlib.util
import io
import os
import signal
import sys
from argparse import ArgumentParser
from pathlib import Path
from types import SimpleNamespace
from typing import get_args
from unittest import mock

import pytest
import torch
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException

from shardlite import ShardLite, config
from shardlite.cli import launch, main
from shardlite.cli.options import add_command, dtype_of
from shardlite.lab.compared.gpt import GPT
from shardlite.lab.train import command, report, train
from shardlite.lab.train.log import COLUMNS, CSVLog, open_log
from shardlite.lab.train.optimizers import make_optimizer, optimizer_class
from shardlite.lab.train.report import Point, Progress
from shardlite.lab.train.settings import OPTIMIZERS, SIZES, GPTConfig, Settings
from shardlite.optimizers import probe_shards
from tests.support.markdown import ROOT, blocks
from tests.support.ranks.scripts import run_command

TINY = [*("--size", "tiny", "--layers", "2", "--width", "16", "--heads", "2", "--context", "16", "--batch", "1")]
TINY += ["--lr", "0.01", "--data", __file__]
FORMATS = ["--precision", "bf16", "--reduce", "bf16", "--master", "split24", "--state", "int8", "--in-backward"]


def choices(command: str, option: str) -> list[str]:
    """Return the values that an option of a command accepts."""
    commands = ArgumentParser().add_subparsers()
    add_command(commands, command)
    return list(commands.choices[command]._option_string_actions[option].choices)


@pytest.fixture
def refused(monkeypatch, refusal):
    """Return the last line printed by a command that is refused before it reads text or starts ranks."""
    monkeypatch.setattr(launch, "launch", None)
    for name in ("text", "train"):
        monkeypatch.setitem(sys.modules, f"shardlite.lab.train.{name}", None)  # to import it is an error
    return lambda *arguments: refusal(main, ["train", *map(str, arguments)]).splitlines()[-1]


@pytest.fixture
def chosen(monkeypatch, tmp_path):
    """Return the settings of a command line, which ends before it trains."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    seen = []
    monkeypatch.setattr(train, "train", lambda settings, corpus: seen.append(settings))

    def settings_of(*arguments: object) -> Settings:
        assert main(["train", "--data", __file__, "--out", str(tmp_path), *map(str, arguments)]) == 0
        return seen.pop()

    return settings_of


def test_a_limit_is_checked_first(refused):
    assert "--fit '8XB' is neither an amount (80GB, 24GiB)" in refused("--fit", "8XB")
    assert "fit is 8gb, which requires the optimizer adamw; got torch.SGD" in refused(
        "--fit", "8GB", "--optimizer", "torch.SGD"
    )


# ---- the file of options --------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path):
    return tmp_path / "run.toml"


def test_a_file_has_the_options_by_their_names_and_the_command_line_wins(chosen, file):
    file.write_text(
        'size = "tiny"\nheads = 4\nsteps = 7\nlr = 1\nsave-every = 3\nprecision = "bf16"\nin-backward = true\n'
        'optimizer = "adamw"\ntransport = "p2p"\n'
    )
    told = chosen("--config", file, "--steps", 9, "--precision", "fp32")
    assert (told.gpt.width, told.gpt.heads, told.steps, told.lr, told.save_every) == (64, 4, 9, 1.0, 3)
    assert (told.precision, told.in_backward, told.transport) == ("fp32", True, "p2p")
    assert told.checkpoints == told.out / "checkpoints"
    assert chosen("--no-in-backward", "--config", file).in_backward is False


def test_the_file_that_the_documentation_shows(chosen, file):
    (shown,) = blocks((ROOT / "docs" / "getting-started.md").read_text(), "toml")
    file.write_text(shown)
    told = chosen("--config", file)
    assert (told.steps, told.save_every, told.precision, told.log) == (500, 50, "bf16", "csv")
    assert told.activation_checkpointing


def test_a_file_is_read_as_utf_8(file, monkeypatch):
    """TOML is UTF-8 in any locale."""
    monkeypatch.setattr(Path, "read_text", lambda self, encoding: self.read_bytes().decode(encoding))
    parser = ArgumentParser()
    parser.add_argument("--out", type=Path)
    file.write_bytes('out = "l\u00e4ufe"'.encode())
    assert command.arguments_in(file, parser) == ["--out=l\u00e4ufe"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("step = 3", "unknown option 'step'; did you mean 'steps'?"),
        ("save_every = 3", "unknown option 'save_every'; did you mean 'save-every'?"),
        ("no-in-backward = true", "unknown option 'no-in-backward'"),
        ('config = "other.toml"', "unknown option 'config'"),
        ("[train]\nsteps = 3", "unknown option 'train'; options must be at the top level"),
        ('steps = "three"', "argument --steps: invalid int value: 'three'"),
        ("steps = 3.5", "argument --steps: invalid int value: '3.5'"),
        ("steps = true", "argument --steps: invalid int value: 'True'"),
        ('lr = "fast"', "argument --lr: invalid float value: 'fast'"),
        ("in-backward = 1", "argument --in-backward/--no-in-backward: ignored explicit argument '1'"),
        ("resume = 'yes'", "argument --resume/--no-resume: ignored explicit argument 'yes'"),
        ('precision = "fp8"', "argument --precision: invalid choice: 'fp8'"),
        ("stage = 4", "argument --stage: invalid choice: 4"),
    ],
)
def test_a_wrong_file_is_named_with_the_key_and_what_it_has(refused, file, content, message):
    file.write_text(content)
    assert f"{file}: {message}" in refused("--config", file)


def test_a_file_that_is_no_toml_or_not_there_is_named(refused, file):
    assert f"No such file or directory: '{file}'" in refused("--config", file)
    file.write_text("steps = \n")
    assert f"{file} is not TOML: Invalid value (at line 1" in refused("--config", file)


# ---- formats and optimizers -----------------------------------------------------------------------------------------


def test_choices_are_those_of_the_library():
    assert {dtype_of(name) for name in choices("train", "--precision")} == set(config.COMPUTE)
    assert {dtype_of(name) for name in choices("train", "--reduce")} == set(config.WIRE)
    assert choices("train", "--transport") == list(get_args(config.TransportName))
    assert choices("train", "--state") == choices("plan", "--state") == list(config.STATES)
    assert choices("train", "--size") == list(SIZES)
    assert choices("ring", "--algorithm") == list(config.ALGORITHMS)
    theirs = [kind for name in torch.optim.__all__ if isinstance(kind := getattr(torch.optim, name), type)]
    matrix = [torch.nn.Parameter(torch.ones(2, 2))]
    elementwise = [kind for kind in theirs if kind is not torch.optim.Optimizer and probe_shards(kind(matrix)).same]
    assert set(OPTIMIZERS) == {"adamw", "muon", *(f"torch.{kind.__name__}" for kind in elementwise)}


def test_settings_reach_the_model_and_the_optimizer():
    compact = Settings(precision="bf16", reduce="bf16", master="split24", activation_checkpointing=True)
    precision = train.precision_of_run(compact)
    assert (precision.compute, precision.reduce, precision.master) == (torch.bfloat16, torch.bfloat16, "split24")
    assert precision.output == torch.float32  # the loss is computed in it
    assert train.precision_of_run(Settings()) == config.Precision()
    assert train._make_gpt(compact).recompute
    assert not train._make_gpt(Settings()).recompute
    model = torch.nn.Linear(2, 2)
    ours = make_optimizer(model, Settings(state="int8", in_backward=True, lr=0.5))
    assert (type(ours).__name__, ours._moments, ours.defaults["lr"]) == ("AdamW", "int8", 0.5)
    assert [group["weight_decay"] for group in ours.param_groups] == [0.1, 0.0]
    theirs = make_optimizer(model, Settings(optimizer="torch.AdamW"))
    assert type(theirs) is torch.optim.AdamW
    assert [group["weight_decay"] for group in theirs.param_groups] == [0.1, 0.0]


def losses(folder: Path) -> list[float]:
    with (folder / "log.csv").open(newline="") as rows:
        return [float(row["loss"]) for row in csv.DictReader(rows)]


def train_with(cluster, folder: Path, *options: object) -> list[float]:
    """Train six steps on two ranks, and return the losses."""
    arguments = ["train", *TINY, "--steps", 6, "--log", "csv", "--out", folder, *options]
    assert [done.status for done in run_command(cluster, main, *arguments)] == [0, 0]
    return losses(folder)


def test_recomputed_blocks_and_other_transports_give_the_same_bits(cluster, tmp_path):
    expected = train_with(cluster, tmp_path / "plain")
    assert expected[-1] < expected[0]
    assert train_with(cluster, tmp_path / "again", "--activation-checkpointing", "--transport", "p2p") == expected


def test_narrow_formats_train(cluster, tmp_path):
    told = train_with(cluster, tmp_path, *FORMATS)
    assert told[-1] < told[0]


RATES = {"torch.SGD": 0.5, "torch.ASGD": 0.5, "torch.RAdam": 0.5, "torch.Adadelta": 20.0, "torch.optim.Adafactor": 0.5}
"""Those that do not divide a gradient by its size, or not in their first steps, take larger ones. So does Adafactor,
which multiplies updates by the size of the weight.
"""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("muon", "torch.SGD", "torch.RMSprop") else pytest.mark.slow)
        for name in [*OPTIMIZERS, "torch.optim.Adafactor"]
    ],
)
def test_each_optimizer_trains(cluster, tmp_path, name):
    rate = RATES.get(name, 0.01)
    told = train_with(cluster, tmp_path, "--optimizer", name, "--precision", "bf16", "--lr", rate)
    assert told[-1] < told[0]


def test_muon_has_a_default_rate_of_its_own(chosen):
    assert (chosen().lr, chosen("--optimizer", "muon").lr) == (1e-3, 8e-3)
    assert chosen("--optimizer", "muon", "--lr", 0.5).lr == 0.5


@pytest.mark.parametrize("adamw_lr", [None, 0.002])
def test_muon_steps_the_matrices_of_blocks_and_adamw_the_rest(group, adamw_lr):
    gpt = GPTConfig(layers=2, width=16, heads=2, context=16)
    settings = Settings(optimizer="muon", gpt=gpt, lr=0.01, adamw_lr=adamw_lr)
    optimizer = make_optimizer(ShardLite(GPT(gpt), group=group), settings)
    (hidden,) = (each for each in optimizer.param_groups if "momentum" in each)
    assert len(hidden["params"]) == 4 * gpt.layers
    assert (hidden["lr"], hidden["momentum"], hidden["weight_decay"]) == (0.01, 0.95, 0.1)
    others = [each for each in optimizer.param_groups if each is not hidden]
    assert [(each["lr"], each["weight_decay"]) for each in others] == [(adamw_lr or 0.01, 0.1), (adamw_lr or 0.01, 0.0)]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("torch.Muon", "module 'torch' has no attribute 'Muon'"),
        ("nowhere.Muon", "ModuleNotFoundError: No module named 'nowhere'"),
        (".Muon", "nor the import path of a class such as torch.optim.Adafactor"),
        ("torch.optim.Muonn", "has no attribute 'Muonn'"),
        (
            "torch.nn.Linear",
            "must be a subclass of torch.optim.Optimizer, got <class 'torch.nn.modules.linear.Linear'>",
        ),
    ],
)
def test_a_path_without_an_optimizer_is_refused(refused, path, message):
    assert message in refused("--optimizer", path)


def test_a_class_may_be_in_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "own_optimizer.py").write_text("import torch\n\nclass Own(torch.optim.SGD):\n    pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    assert optimizer_class("own_optimizer.Own").__name__ == "Own"


# ---- the log --------------------------------------------------------------------------------------------------------


def test_the_log_has_a_row_for_each_step(cluster, tmp_path):
    train_with(cluster, tmp_path, "--save-every", 3)
    with (tmp_path / "log.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["step", *COLUMNS]
    assert [row["step"] for row in rows] == ["1", "2", "3", "4", "5", "6"]
    with (tmp_path / "loss.csv").open(newline="") as file:
        curve = list(csv.DictReader(file))
    told = Settings(steps=6, lr=0.01)
    for number, (row, point) in enumerate(zip(rows, curve, strict=True)):
        for name, short in (("loss", "train_nats_per_byte"), ("validation_loss", "validation_nats_per_byte")):
            assert float(point[short]) == pytest.approx(float(row[name]), abs=0.6e-6)  # the curve has six decimals
        assert float(row["learning_rate"]) == pytest.approx(train.learning_rate(told, number))
        assert all(float(row[name]) > 0 for name in ("gradient_norm", "step_ms", "exposed_ms", "sent_mib", "held_mib"))


def test_a_resumed_log_drops_what_came_behind_the_checkpoint(tmp_path):
    path = tmp_path / "log.csv"
    for after, steps in ((0, range(1, 6)), (3, range(4, 5))):
        log = CSVLog(path, after)
        for step in steps:
            log.write(step, dict.fromkeys(COLUMNS, step / 3 + after))
        assert path.read_text().splitlines()[-1].startswith(f"{steps[-1]},")  # it can be read meanwhile
        log.close()
    rows = path.read_text().splitlines()
    assert [row.split(",")[:2] for row in rows[1:]] == [
        ["1", "0.333333333"],
        ["2", "0.666666667"],
        ["3", "1"],
        ["4", "4.33333333"],
    ]


def test_a_new_run_and_a_foreign_file_begin_a_new_log(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("step,other\n1,2\n")
    CSVLog(path, after=3).close()
    assert path.read_text().splitlines() == [",".join(["step", *COLUMNS])]


def test_tensorboard_has_a_curve_for_each_value(tmp_path, monkeypatch):
    points, made = [], []

    class Writer:
        def __init__(self, folder: str, purge_step: int) -> None:
            made.append((folder, purge_step))

        def add_scalar(self, *point: object) -> None:
            points.append(point)

        def close(self) -> None:
            points.append("closed")

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
    log = open_log("tensorboard", tmp_path, after=4)
    log.write(5, {"loss": 2.5})
    log.close()
    assert made == [(str(tmp_path / "tensorboard"), 5)]  # what came behind step 4 is hidden
    assert points == [("loss", 2.5, 5), "closed"]


def test_without_tensorboard_nothing_begins(refused, monkeypatch, tmp_path):
    find = importlib.util.find_spec
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == "tensorboard" else find(name))
    folder = tmp_path / "new"
    message = refused("--log", "tensorboard", "--out", folder)
    assert "needs tensorboard, which is not installed: pip install tensorboard, or use --log csv" in message
    assert not folder.exists()


# ---- progress -------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(out: io.StringIO, *, first: int = 0, seconds: float = 2.0, steps: int = 100, stop: int = 100) -> list[str]:
    """Show steps that take some seconds each; return what is printed."""
    with mock.patch.object(report, "perf_counter", return_value=100.0) as clock:
        progress = Progress(steps, 512, out, first=first)
        for step in range(first + 1, stop + 1):
            clock.return_value += seconds
            progress.show(Point(step, 3.0, 2.5 if step == 50 else None), held=1 << 20)
        progress.end()
    return out.getvalue().splitlines()


def test_lines_at_intervals_tell_the_time_that_is_left():
    lines = shown(io.StringIO())
    assert len(lines) == 11
    assert lines[0] == "step   1/100  loss 3.000  3:18 left  256 tokens/s  1.0 MiB held"
    assert lines[1] == "step  10/100  loss 3.000  3:00 left  256 tokens/s  1.0 MiB held"
    assert lines[5] == "step  50/100  loss 3.000  val 2.500  1:40 left  256 tokens/s  1.0 MiB held"
    assert lines[10] == "step 100/100  loss 3.000  val 2.500  took 3:20  256 tokens/s  1.0 MiB held"


def test_a_terminal_has_one_line_that_fits(monkeypatch):
    for width in (80, 40, 15):
        monkeypatch.setattr("shutil.get_terminal_size", lambda width=width: os.terminal_size((width, 24)))
        out = Terminal()
        shown(out, steps=100_000, stop=100, seconds=3600)
        text = out.getvalue()
        assert text.count("\n") == 1
        assert text.endswith("\n")
        lines = text.rstrip("\n").split("\r\033[K")[1:]
        assert len(lines) == 100
        assert max(map(len, lines)) < width
        assert lines[0].startswith("step      1/100000"[: width - 1])
        assert ("held" in lines[0]) == (width == 80)  # of step 50 on it makes room for the validation


def test_a_resumed_run_names_what_has_changed(cluster, tmp_path):
    saved = ["--out", tmp_path, "--checkpoints", tmp_path / "run"]
    train_with(cluster, tmp_path, *saved)
    arguments = ["train", *TINY, "--steps", 7, "--lr", 0.002, *saved]
    (alone,) = run_command(cluster, main, *arguments, ranks=1)
    assert "The run resumes after step 6 of 7" in alone.out
    for change in ("ranks 1 instead of 2", "steps 7 instead of 6", "lr 0.002 instead of 0."):
        assert f"It continues with {change}" in alone.out


def test_a_signal_ends_the_launcher_in_one_line(monkeypatch):
    monkeypatch.setattr(torchrun, "main", mock.Mock(side_effect=SignalException("got it", signal.SIGTERM)))
    with pytest.raises(SystemExit, match=r"^shardlite: SIGTERM has ended all ranks$"):
        launch.run_launcher()
