"""Test `shardlite doctor`: it requests, tries and explains every transport."""

import pytest
import torch

from shardlite.cli import launch, main
from shardlite.cli.doctor import trials
from shardlite.comm.transport.shared_memory.transport import SharedMemoryTransport
from shardlite.config import Route
from tests.support.ranks.scripts import run_command, run_process


def assert_says_what_there_is_and_why(out):
    lines = [line.strip() for line in out.splitlines()]
    assert lines[0] == "This machine"
    assert f"torch             {torch.__version__}" in lines
    assert "Messages between 2 ranks: cpu tensors" in lines
    start = lines.index('transport="auto"')
    said = "SharedMemoryTransport between 2 ranks, algorithm direct: all ranks are processes of this host"
    assert " ".join(lines[start + 1 : start + 3]) == said
    assert lines[start + 3].startswith("correct results with 1 MiB: all-gather ")
    assert max(map(len, out.splitlines())) <= 80
    p2p = lines.index('transport="p2p"')
    assert lines[p2p + 1] == "GlooTransport between 2 ranks, algorithm ring: it was requested"
    assert lines[p2p + 2].startswith("correct results with 1 MiB: all-gather ")


def test_it_says_what_there_is_and_why(cluster):
    first, second = run_command(cluster, main, "doctor", "--ranks", 2)
    assert first.status == second.status == 0
    assert_says_what_there_is_and_why(first.out)
    assert second.out == ""


@pytest.mark.slow
def test_the_command_starts_its_ranks():
    """All commands start ranks in the same way; this one does the least work."""
    done = run_process("-m", "shardlite", "doctor", "--ranks", "2")
    assert done.status == 0, done.err
    assert "OMP_NUM_THREADS" not in done.err
    assert_says_what_there_is_and_why(done.out)


def test_it_starts_itself_once_per_rank(monkeypatch):
    started = []
    monkeypatch.setattr(launch, "launch", lambda ranks, arguments: started.append((ranks, arguments)) or 7)
    assert main(["doctor", "--ranks", "3"]) == 7
    assert started == [(3, ["doctor", "--ranks", "3"])]


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
    return trials.failure(trials._calls(wrong, torch.device("cpu"), what))


@pytest.fixture
def one_rank(monkeypatch):
    """Pretend that another rank has the same results."""
    monkeypatch.setattr(trials.comm, "all_gather_json", lambda group, own, *_: [own, own])


def recorded(events, right=True):
    """Return a call that records what is done with it."""
    return trials.Call(
        torch.device("cpu"),
        lambda: events.append("fill call"),
        lambda i: events.append(f"make call {i}"),
        lambda: events.append("check call") or right,
    )


def test_a_trial_warms_up_before_it_is_checked(one_rank):
    events = []
    assert trials.failure([recorded(events)]) == ""
    warm_up = [each for i in range(trials._WARM_UP) for each in ("fill call", f"make call {i}")]
    assert events == [*warm_up, "check call"]
    assert len(warm_up) >= 4
    assert trials.failure([recorded(events, right=False), recorded(events)]) == "FAILED: the result has wrong numbers"


def test_ranks_of_several_machines_start_though_their_clocks_differ(monkeypatch):
    """A clock that is an hour ahead makes nobody wait for an hour: the third reading of the clock is the last one."""
    readings = [0.0, 0.0, trials._AHEAD]
    monkeypatch.setattr(trials.time, "perf_counter", lambda: readings.pop(0))
    monkeypatch.setattr(trials.dist, "all_reduce", lambda moment, op, group: moment.add_(3600))
    trials.start_together()
    assert readings == []


WRONG = "FAILED: the result has wrong numbers"


@pytest.mark.parametrize(("what", "failure"), [("gather", WRONG), ("reduction", WRONG), ("nothing", "")])
def test_wrong_numbers_are_seen(cluster, what, failure):
    assert cluster.run(alters, 2, what) == [failure] * 2
