"""Test `shardlite verify`: its table, its status, and its launcher."""

import os
import re
from unittest import mock

import pytest

from shardlite import AdamW, cli
from shardlite.cli import launch
from shardlite.grads import StepOptions
from shardlite.lab.verify import twins
from tests.support.ranks.scripts import run_command, run_process

SMALL = ["--layers", "1", "--width", "16", "--heads", "2", "--context", "8", "--steps", "2"]


def test_the_command_compares_a_small_gpt(cluster):
    first, second = run_command(cluster, cli.main, "verify", "--ranks", 2, "--compute", "bf16", "--elastic", *SMALL)
    assert first.status == second.status == 0
    assert second.out == ""
    assert "simple twin" in first.out
    assert "DistributedDataParallel, no casts" in first.out
    assert re.search(r"itself, order='tree', 4 parts +on 1, 2 ranks +equal to the bit +0 +0", first.out)
    assert first.out.splitlines()[-1] == "2 ranks, 2 steps: ok"


@pytest.mark.slow
def test_the_command_starts_three_ranks():
    done = run_process("-m", "shardlite", "verify", "--ranks", "3", "--compute", "bf16", "--reduce", "fp16", *SMALL)
    assert done.status == 0, done.err
    assert "twin in ring order" in done.out
    assert "DistributedDataParallel, no casts" in done.out
    assert done.out.splitlines()[-1] == "3 ranks, 2 steps: ok"


def main_with_a_spoilt_rank(arguments: list[str]) -> int:
    """Run the command with an optimizer on rank 1 that takes longer steps, which ranks do not tell each other."""
    with mock.patch.object(StepOptions, "note"):
        if os.environ["RANK"] != "1":
            return cli.main(arguments)
        with mock.patch.object(twins, "AdamW", lambda params, lr, weight_decay: AdamW(params, lr=2 * lr)):
            return cli.main(arguments)


def assert_says_what_is_spoilt(out: str) -> None:
    # Rank 1's whole copy of the weights steps otherwise at stage 0, its shards at stage 3.
    assert "2 ranks, 2 steps: FAILED: rank 0: loss of step 2, stage 3 against stage 0: " in out
    assert "BEYOND ITS BOUND" in out


def test_the_command_fails_on_all_ranks_where_one_is_spoilt(cluster):
    first, second = run_command(cluster, main_with_a_spoilt_rank, "verify", "--ranks", 2, *SMALL)
    assert first.status == second.status == 1
    assert_says_what_is_spoilt(first.out)


@pytest.mark.slow
def test_the_launcher_passes_the_failure_on(tmp_path):
    script = tmp_path / "spoilt.py"
    script.write_text(
        f"import sys\nfrom {__name__} import main_with_a_spoilt_rank as main\nsys.exit(main(sys.argv[1:]))\n"
    )
    launcher = launch.torchrun(2, [])[1:-3]  # without `-m -- shardlite`
    done = run_process(*launcher, str(script), "verify", "--ranks", "2", *SMALL)
    assert done.status == 1, done.err
    assert_says_what_is_spoilt(done.out)


def test_verify_starts_itself_once_per_rank(monkeypatch):
    started = []
    monkeypatch.setattr(launch, "launch", lambda ranks, arguments: started.append((ranks, arguments)) or 7)
    assert cli.main(["verify"]) == 7
    assert cli.main(["verify", "--ranks", "4", "--size", "demo"]) == 7
    assert started == [(2, ["verify"]), (4, ["verify", "--ranks", "4", "--size", "demo"])]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "0"], "--ranks is 0; it must be at least 1"),
        (["--steps", "0"], "steps must be positive, got 0"),
        (["--heads", "5"], "multiple of twice the heads: width 64, heads 5"),
    ],
)
def test_wrong_usage_is_refused_before_any_rank_starts(refusal, monkeypatch, arguments, message):
    monkeypatch.setattr(launch, "launch", None)
    assert message in refusal(cli.main, ["verify", *arguments])
