"""`shardlite train` resumes from its newest checkpoint, with the bits of an uninterrupted run."""

import csv
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from shardlite import cli
from shardlite.checkpoint import Checkpoint, checkpoints_in, latest
from shardlite.cli import launch
from shardlite.lab.train import train
from shardlite.lab.train.settings import Settings
from shardlite.lab.train.train import _firsts
from tests.support.patience import seconds, until
from tests.support.ranks.restarts import TINY, assert_same_weights, ranks_of, started, train_straight
from tests.support.ranks.scripts import run_command

TINY += ["--lr", "0.01", "--stage", "3", "--data", __file__]


def test_a_run_that_ended_early_goes_on(cluster, tmp_path):
    options = ["train", *TINY, "--steps", "5", "--out", str(tmp_path)]
    whole = run_command(cluster, cli.main, *options, "--checkpoints", str(tmp_path / "whole"), "--save-every", 2)
    assert whole[0].status == 0
    assert "goes on" not in whole[0].out
    assert list(checkpoints_in(tmp_path / "whole")) == [4, 5]
    (tmp_path / "parts").mkdir()
    (tmp_path / "whole" / "step-00000004").rename(tmp_path / "parts" / "step-00000004")
    first, second = run_command(cluster, cli.main, *options, "--checkpoints", str(tmp_path / "parts"))
    assert first.status == second.status == 0
    assert f"The run resumes after step 4 of 5, from {tmp_path / 'parts'}." in first.out
    assert_same_weights(tmp_path / "parts", tmp_path / "whole")
    rows = (tmp_path / "loss.csv").read_text().splitlines()
    assert len(rows) == 6  # a header, and all steps
    again, _ = run_command(cluster, cli.main, *options, "--checkpoints", str(tmp_path / "parts"))
    assert again.status == 0
    assert "The run resumes after step 5 of 5" in again.out
    assert "The model writes:" in again.out


class Died(BaseException):
    """Ends a run as a failure would."""


def main_until_step_6(arguments: list[str]) -> int:
    """Run a training command that dies in its sixth step."""
    step = train._step

    def mortal(run: Any, number: int, drawn: int) -> Any:
        if number == 5:
            raise Died
        return step(run, number, drawn)

    with mock.patch.object(train, "_step", mortal), pytest.raises(Died):
        cli.main(arguments)
    return 0


COMPACT = [*("--precision", "bf16", "--master", "split24", "--state", "int8", "--in-backward")]


@pytest.mark.parametrize(
    "more",
    [
        [],
        [*COMPACT, "--activation-checkpointing", "--accumulate", "2"],
        ["--precision", "fp16", "--optimizer", "torch.NAdam"],  # whose scale is a part of the run
        [*COMPACT[:-1], "--optimizer", "muon", "--adamw-lr", "0.003"],
    ],
    ids=["plain", "compact", "scaled", "muon"],
)
def test_resume_goes_on_with_the_bits_of_an_uninterrupted_run(cluster, tmp_path, more):
    def options(name: str) -> list[str]:
        fixed = [*("--steps", "8"), *("--log", "csv"), *("--save-every", "2")]
        return ["train", *TINY, *more, *fixed, "--out", str(tmp_path / name)]

    assert run_command(cluster, cli.main, *options("whole"))[0].status == 0
    run_command(cluster, main_until_step_6, *options("parts"))
    assert len(logged(tmp_path / "parts")) == 5
    first, _ = run_command(cluster, cli.main, *options("parts"), "--resume")
    assert f"The run resumes after step 4 of 8, from {tmp_path / 'parts' / 'checkpoints'}." in first.out
    assert_same_weights(tmp_path / "parts" / "checkpoints", tmp_path / "whole" / "checkpoints")
    assert logged(tmp_path / "parts") == logged(tmp_path / "whole")
    assert (tmp_path / "parts" / "loss.csv").read_text() == (tmp_path / "whole" / "loss.csv").read_text()


def logged(folder: Path) -> list[list[str]]:
    """Return the columns of a log except for times and bytes."""
    with (folder / "log.csv").open(newline="") as file:
        names = ("step", "loss", "validation_loss", "learning_rate", "gradient_norm")
        return [[row[name] for name in names] for row in csv.DictReader(file)]


def test_resume_needs_a_checkpoint_and_a_new_run_a_new_folder(tmp_path, monkeypatch, refusal):
    started = []
    monkeypatch.setattr(launch, "launch", lambda ranks, arguments, **_: started.append(arguments) or 0)
    arguments = ["train", *TINY, "--out", str(tmp_path)]
    newest = tmp_path / "checkpoints" / "step-00000040"
    words = f"--resume: there is no checkpoint in {tmp_path / 'checkpoints'}; omit --resume"
    assert words in refusal(cli.main, [*arguments, "--resume"])
    newest.mkdir(parents=True)
    (newest / ".metadata").write_bytes(b"of another program, without a manifest")
    words = f"{newest} belongs to an earlier run: give --resume to resume that run, or another"
    assert words in refusal(cli.main, [*arguments, "--save-every", "5"])
    assert not started
    assert cli.main([*arguments, "--resume"]) == 0
    assert cli.main([*arguments, "--checkpoints", str(tmp_path / "checkpoints")]) == 0  # which goes on by itself
    assert cli.main(arguments) == 0  # which saves nothing
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert cli.main([*arguments, "--save-every", "5"]) == 0  # torchrun starts the ranks of one run again
    assert len(started) == 4


def test_a_run_goes_on_with_fewer_ranks_at_the_sequence_where_the_others_stopped(cluster, tmp_path):
    folder, options = tmp_path / "run", ["train", *TINY, "--batch", "2", "--out", str(tmp_path)]
    options += ["--checkpoints", str(folder), "--save-every", "1"]
    assert run_command(cluster, cli.main, *options, "--steps", 3)[0].status == 0
    newest = latest(folder)
    assert newest is not None
    assert Checkpoint(newest).object("ranks.0.extra")["sequences"] == 3 * 2 * 2
    (alone,) = run_command(cluster, cli.main, *options, "--steps", 5, ranks=1)
    assert alone.status == 0
    assert "The run resumes after step 3 of 5" in alone.out
    newest = latest(folder)
    assert newest is not None
    assert Checkpoint(newest).object("ranks.0.extra")["sequences"] == 3 * 2 * 2 + 2 * 2


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_draw_the_sequences_of_a_step_between_them(ranks):
    settings = Settings(batch=3, accumulate=2)
    firsts = [first for rank in range(ranks) for first in _firsts(settings, 12, rank, ranks=ranks)]
    drawn = [first + i for first in firsts for i in range(settings.batch)]
    assert sorted(drawn) == list(range(12, 12 + ranks * 3 * 2))


def trained(folder: Path, kills: int) -> int:
    """Train on three ranks; kill a random one at a random moment, again and again. Return how many were killed."""
    killed, dice = 0, random.Random(0)
    with started(folder, restarts=kills) as agent:

        def newest() -> int:
            return max(checkpoints_in(folder / "run"), default=0)

        for _ in range(kills):
            goal = newest() + dice.randint(1, 3)
            until(lambda goal=goal: newest() >= goal or agent.poll() is not None)
            ranks = ranks_of(agent.pid)
            if agent.poll() is not None or not ranks:
                break
            os.kill(dice.choice(ranks), signal.SIGKILL)
            killed += 1
        status = agent.wait(seconds(240))
    assert status == 0, (folder / "log").read_text()[-4000:]
    return killed


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks /proc for children")
def test_a_run_whose_ranks_are_killed_ten_times_has_the_same_bits(cluster, tmp_path):
    train_straight(cluster, tmp_path / "straight", 3)
    assert trained(tmp_path / "killed", 10) == 10
    assert_same_weights(tmp_path / "killed" / "run", tmp_path / "straight" / "run")


def test_redundancy_takes_a_folder_for_checkpoints() -> None:
    with pytest.raises(ValueError, match="redundancy needs checkpoints: give --checkpoints FOLDER or --save-every N"):
        Settings(redundancy="neighbour")


def test_restarts_are_passed_to_torchrun(monkeypatch: Any) -> None:
    started = []
    monkeypatch.setattr(launch, "launch", lambda *args, **options: started.append((args, options)) or 0)
    arguments = ["train", "--ranks", "3", "--restarts", "7", *TINY]
    assert cli.main(arguments) == 0
    assert started == [((3, arguments), {"restarts": 7})]
    command = launch.torchrun(3, arguments, restarts=7)
    assert command[command.index("--max-restarts") + 1] == "7"
    assert "--max-restarts" not in launch.torchrun(3, arguments)
