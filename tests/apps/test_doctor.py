"""`shardlite doctor`: every transport is asked for, tried, and explained."""

import pytest
import torch

from shardlite.apps import cli, launch
from shardlite.apps.doctor import trials
from shardlite.apps.doctor.trials import Finding, machine, report
from shardlite.comm.shm.transport import SharedMemoryTransport
from shardlite.config import Route
from tests.support.ranks.scripts import run_command, run_process


def assert_says_what_there_is_and_why(out):
    lines = [line.strip() for line in out.splitlines()]
    assert lines[0] == "This machine"
    assert f"torch             {torch.__version__}" in lines
    assert "Messages between 2 ranks: cpu tensors" in lines
    start = lines.index('transport="auto"')
    assert lines[start + 1].startswith("SharedMemoryTransport between 2 ranks, algorithm ring: all ranks are processes")
    assert lines[start + 2].startswith("tried with 1 MiB: all-gather ")
    p2p = lines.index('transport="p2p"')
    assert lines[p2p + 1] == "GlooTransport between 2 ranks, algorithm ring: it was asked for"
    assert lines[p2p + 2].endswith(" ms, results right")


def test_it_says_what_there_is_and_why(cluster):
    first, second = run_command(cluster, cli.main, "doctor", "--ranks", 2)
    assert first.status == second.status == 0
    assert_says_what_there_is_and_why(first.out)
    assert second.out == ""


@pytest.mark.slow
def test_the_command_starts_its_ranks():
    """All commands start them in the same way, and none has less to do then."""
    done = run_process("-m", "shardlite", "doctor", "--ranks", "2")
    assert done.status == 0, done.err
    assert "OMP_NUM_THREADS" not in done.err
    assert_says_what_there_is_and_why(done.out)


def test_it_starts_itself_once_per_rank(monkeypatch):
    started = []
    monkeypatch.setattr(launch, "launch", lambda ranks, arguments: started.append((ranks, arguments)) or 7)
    assert cli.main(["doctor", "--ranks", "3"]) == 7
    assert started == [(3, ["doctor", "--ranks", "3"])]


def test_a_wrong_number_of_ranks_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(launch, "launch", None)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["doctor", "--ranks", "0"])
    assert stopped.value.code == 2
    assert "--ranks is 0" in capsys.readouterr().err


def alters(group, what):
    """Try a transport whose messages do not arrive as they should."""

    class Wrong(SharedMemoryTransport):
        def irecv(self, tensor, peer, tag):
            pending = super().irecv(tensor, peer, tag)
            if what == "gather":
                wait = pending.wait
                pending.wait = lambda: (wait(), tensor.add_(1))
            return pending

        def borrow(self, numel, dtype, peer, tag):
            loan = super().borrow(numel, dtype, peer, tag)
            if what == "reduction":
                look = loan.look
                loan.look = lambda: look() + 1
            return loan

    choice = trials.choose(group, torch.device("cpu"), trials._TIMEOUT, route=Route())
    wrong = Wrong(choice.transport._neighbours, trials._TIMEOUT)
    return trials._try(wrong, torch.device("cpu"), what)


@pytest.mark.parametrize("what", ["gather", "reduction"])
def test_wrong_numbers_are_seen(cluster, what):
    assert cluster.run(alters, 2, what) == ["FAILED: wrong numbers have come"] * 2


def test_right_numbers_are_seen(cluster):
    for trial in cluster.run(alters, 2, "nothing"):
        assert trial.endswith("results right")


def test_the_report_is_text_by_device():
    findings = [Finding("auto", "cpu", "A, algorithm ring: b", "tried"), Finding("p2p", "cuda:0", "not here: c")]
    assert report([("system", "x"), ("GPUs", "none")], findings, 3).splitlines() == [
        "This machine",
        "  system  x",
        "  GPUs    none",
        "",
        "Messages between 3 ranks: cpu tensors",
        '  transport="auto"',
        "      A, algorithm ring: b",
        "      tried",
        "",
        "Messages between 3 ranks: cuda:0 tensors",
        '  transport="p2p"',
        "      not here: c",
    ]
    assert dict(machine())["torch"] == torch.__version__
