"""Test `shardlite doctor`: it requests, tries and explains every transport."""

from itertools import count
from statistics import median

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
    said = "SharedMemoryTransport between 2 ranks, algorithm direct: all ranks are processes of this host"
    assert " ".join(lines[start + 1 : start + 3]) == said
    assert lines[start + 3].startswith("right results with 1 MiB: all-gather ")
    assert max(map(len, out.splitlines())) <= 80
    p2p = lines.index('transport="p2p"')
    assert lines[p2p + 1] == "GlooTransport between 2 ranks, algorithm ring: it was requested"
    assert lines[p2p + 2].startswith("right results with 1 MiB: all-gather ")


def test_it_says_what_there_is_and_why(cluster):
    first, second = run_command(cluster, cli.main, "doctor", "--ranks", 2)
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
    assert cli.main(["doctor", "--ranks", "3"]) == 7
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
    """Pretend that another rank takes twice as long, and agrees otherwise."""

    def gather(group, mine, *_):
        return [mine, mine if isinstance(mine, str) else [[2 * each for each in taken] for taken in mine]]

    monkeypatch.setattr(trials, "all_gather_json", gather)


def recorded(events, name="call", right=True, fill=lambda: None, make=lambda i: None):
    """Return a call that records what is done with it."""
    return trials.Call(
        torch.device("cpu"),
        lambda: events.append(f"fill {name}") or fill(),
        lambda i: events.append(f"make {name} {i}") or make(i),
        lambda: events.append(f"check {name}") or right,
    )


def test_a_trial_warms_up_before_it_is_checked(one_rank):
    events = []
    assert trials.failure([recorded(events)]) == ""
    warm_up = [each for i in range(trials._WARM_UP) for each in ("fill call", f"make call {i}")]
    assert events == [*warm_up, "check call"]
    assert len(warm_up) >= 4
    assert trials.failure([recorded(events, right=False), recorded(events)]) == "FAILED: wrong numbers have come"


def test_warm_calls_are_timed_in_turn_and_without_filling(one_rank, monkeypatch):
    """On a clock that only calls and fillings move: each call takes a second more than the one before."""
    now, events = [0.0], []
    monkeypatch.setattr(trials.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(trials, "start_together", lambda: events.append("start"))

    def work(i=1e6):
        now[0] += i

    calls = [recorded(events, name, fill=work, make=work) for name in "ab"]
    numbers = range(trials._WARM_UP, trials._WARM_UP + trials._REPEATS)
    assert trials.milliseconds(calls) == [1e3 * 2 * median(numbers)] * 2
    assert events == [each for i in numbers for name in "ab" for each in (f"fill {name}", "start", f"make {name} {i}")]


def test_ranks_of_several_machines_start_though_their_clocks_differ(monkeypatch):
    """A clock that is an hour ahead makes nobody wait for an hour."""
    ticks = count()
    monkeypatch.setattr(trials.time, "perf_counter", lambda: 1e-6 * next(ticks))
    monkeypatch.setattr(trials.dist, "all_reduce", lambda moment, op, group: moment.add_(3600))
    trials.start_together()
    assert next(ticks) < 1e6 * 2 * trials._AHEAD


@pytest.mark.parametrize("what", ["gather", "reduction"])
def test_wrong_numbers_are_seen(cluster, what):
    assert cluster.run(alters, 2, what) == ["FAILED: wrong numbers have come"] * 2


def test_right_numbers_are_seen(cluster):
    assert cluster.run(alters, 2, "nothing") == [""] * 2


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
