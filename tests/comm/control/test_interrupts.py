"""Ctrl-C at any moment on all ranks: the run continues with the same bits, or ends in an error at once.

A rank takes the number of its steps from its optimizer: an interrupt may come between a step and its counter.
"""

import os
import random
import signal
import sys
import threading
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import FrameType, SimpleNamespace

import numpy
import pytest
import shardlite_kernels
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import shardlite.cli.commands
import shardlite.comm.streams
from shardlite import AdamW, Route, ShardLite
from shardlite.comm.control import interrupts
from shardlite.comm.control.failure_reports import FailureReports
from shardlite.comm.streams import HostWork, ThreadQueue, _work_off
from shardlite.engine.patches import install_patches
from shardlite.errors import CommError
from tests.comm.control.boards import SharedBoard
from tests.support.models.small import Residual
from tests.support.patience import until
from tests.support.ranks.doomed import JOIN

WIDTH, STEPS = 8, 12
LONG = JOIN + 60
"""The timeout: longer than the ranks may live."""
MOMENTS = 15
"""How many moments of a run, drawn from its first 0.15 s, the slow tests interrupt in each way."""


class Slow(nn.Module):
    """Residual blocks whose forward spends some time in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Residual(WIDTH, 12) for _ in range(3)])
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            sum(range(2000))
            x = block(x)
        return self.head(x).mean()


def batch(step: int, rank: int) -> Tensor:
    time.sleep(1e-3)  # read it
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def interrupted_body(group, stage, transport, seed):
    """Train with Ctrl-C at some moment, unless `seed` is `None`; return the losses, and how often it came."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    model = ShardLite(
        Slow(), group=group, stage=stage, route=Route(transport=transport), timeout=timedelta(seconds=LONG)
    )
    optimizer = AdamW(model.parameters(), lr=0.1)
    some = next(model.parameters())
    moment = random.Random(seed).uniform(0, 0.15) + random.Random(f"{seed}, {group.rank()}").uniform(0, 0.004)
    begun, given_up, pressed = threading.Event(), threading.Event(), threading.Event()

    def press() -> None:
        begun.wait()
        if not given_up.wait(moment):
            pressed.set()
            os.kill(os.getpid(), signal.SIGINT)

    pressing = threading.Thread(target=press)
    if seed is not None:
        pressing.start()
    losses: dict[int, float] = {}
    came, error = 0, ""
    while True:  # it comes once at most, so each line in which it may come is in this block
        try:
            begun.set()
            try:
                while not error and (step := _taken(optimizer, some)) < STEPS:
                    model.zero_grad()
                    loss = model(batch(step, group.rank()))
                    loss.backward()
                    losses[step] = loss.item()
                    optimizer.step()
            except CommError as failure:
                error = str(failure)
                given_up.set()
            if seed is not None:
                pressing.join()
            while came != pressed.is_set():
                time.sleep(1e-3)
            return list(losses.values()), came, error
        except KeyboardInterrupt:
            came += 1


def _taken(optimizer: AdamW, param: Tensor) -> int:
    """Return how many steps an optimizer has taken."""
    return int(optimizer.state[param]["step"]) if param in optimizer.state else 0


def check_moments(doomed, directory, world_size, stage, transport, seeds):
    """Run once for each seed; return how many runs went on, and the errors of the others."""
    undisturbed = doomed.run(interrupted_body, world_size, stage, transport, None, directory=directory)
    went_on, errors = 0, []
    for seed in seeds:
        folder = directory / str(seed)
        folder.mkdir()
        ended = doomed.run(interrupted_body, world_size, stage, transport, seed, directory=folder)
        assert [each.status for each in ended] == [0] * world_size, f"seed {seed}: {ended}"
        said = [each.result[2] for each in ended]
        for expected, each in zip(undisturbed, ended, strict=True):
            losses, came, error = each.result
            assert losses == expected.result[0][: len(losses)], f"seed {seed}"
            assert error or (len(losses), came) == (STEPS, 1), f"seed {seed}"
            assert "nothing happened" not in error, f"seed {seed}: {error}"
        went_on += not any(said)
        errors += filter(None, said)
    return went_on, errors


@pytest.mark.parametrize("stage", [0, 3])
def test_a_run_goes_on_or_ends_at_once(doomed, tmp_path, stage):
    check_moments(doomed, tmp_path, 2, stage, "shared_memory", range(3))


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "stage", "transport"), [(2, 0, "shared_memory"), (2, 3, "p2p"), (3, 2, "p2p")])
def test_at_many_moments(doomed, tmp_path, world_size, stage, transport):
    went_on, errors = check_moments(doomed, tmp_path, world_size, stage, transport, range(MOMENTS))
    print(f"{went_on} of {MOMENTS} went on", *errors, sep="\n")
    assert went_on > 0


@pytest.fixture
def deferring():
    """Ctrl-C as it is after a model was wrapped in a program that leaves it to Python."""
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupts.defer_interrupts()
    yield signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)


def test_it_waits_for_a_call_of_the_library(deferring):
    done = []

    def program() -> None:
        jobs: SimpleQueue = SimpleQueue()
        jobs.put((HostWork(), (partial(os.kill, os.getpid(), signal.SIGINT), partial(done.append, 1))))
        jobs.put(None)
        _work_off(jobs)
        until(lambda: False)

    with pytest.raises(KeyboardInterrupt):
        program()
    assert done == [1]
    assert not interrupts._deferring.is_pending


@pytest.mark.parametrize("compiled", [False, True])
def test_it_waits_for_the_step_of_any_optimizer_and_its_hooks(deferring, compiled):
    """The weights have changed when a hook of the program runs, and the library's hook runs after it."""
    install_patches()
    told = []
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    optimizer.register_step_post_hook(lambda *_: os.kill(os.getpid(), signal.SIGINT))
    last = register_optimizer_step_post_hook(lambda *_: told.append(1))
    step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step

    def program() -> None:
        step()
        until(lambda: False)

    try:
        with pytest.raises(KeyboardInterrupt):
            program()
    finally:
        last.remove()
    assert told == [1]
    assert not interrupts._deferring.is_pending


def apart_body(group, stage):
    """Press Ctrl-C before the step on rank 0, and in a hook behind it on rank 1; go on as both count their steps."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    model = ShardLite(Slow(), group=group, stage=stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    press = partial(os.kill, os.getpid(), signal.SIGINT)
    steps = []
    optimizer.register_step_post_hook(lambda *_: (steps.append(1), press()))

    def train(step: int, *, press_before: bool = False) -> None:
        model.zero_grad()
        model(batch(step, group.rank())).backward()
        if press_before:
            press()
        optimizer.step()
        until(lambda: False)

    with pytest.raises(KeyboardInterrupt):
        train(0, press_before=group.rank() == 0)
    assert len(steps) == group.rank()
    with pytest.raises(CommError, match="step"):
        train(len(steps))


@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_that_are_a_step_apart_do_not_go_on(doomed, tmp_path, stage):
    for each in doomed.run(apart_body, 2, stage, directory=tmp_path):
        assert (each.status, each.kind) == (0, ""), f"{each.text}\n{each.log}"


def test_in_the_lines_of_a_program_it_comes_at_once(deferring):
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    assert not interrupts._deferring.is_pending


def frame(*files: str) -> FrameType | None:
    """Return the innermost frame of code in such files."""
    inner = None
    for file in reversed(files):
        inner = SimpleNamespace(f_code=SimpleNamespace(co_filename=file), f_back=inner)
    return inner


LIBRARY, PROGRAM = shardlite.comm.streams.__file__, "/home/user/train.py"


@pytest.mark.parametrize(
    ("files", "waits"),
    [
        ((LIBRARY, PROGRAM), True),
        ((PROGRAM, LIBRARY), False),
        ((torch.nn.__file__, threading.__file__, LIBRARY, PROGRAM), True),
        ((shardlite_kernels.__file__, LIBRARY, PROGRAM), True),
        (("<eval_with_key>.0", torch.nn.__file__, PROGRAM), False),
        ((numpy.__file__, LIBRARY), False),
        ((shardlite.cli.commands.__file__, "<frozen runpy>"), False),
        (("<string>",), False),
        ((f"{Path(shardlite.__file__).parent}_train.py",), False),
        ((f"{Path(torch.__file__).parent}vision/models.py", LIBRARY), False),
    ],
)
def test_the_innermost_line_that_is_not_of_pytorch_counts(files, waits):
    assert interrupts._in_library(frame(*files)) == waits


class Leaver:
    failed = ""

    def __init__(self):
        self.notes = []

    def fail(self, note):
        self.notes.append(note)


def test_a_second_one_ends_the_call_and_the_rank_takes_part_in_nothing_more(deferring, monkeypatch):
    leaver = Leaver()
    monkeypatch.setattr(interrupts, "_reports", [leaver])

    main, work, worker = threading.main_thread().ident, HostWork(), ThreadQueue("presses Ctrl-C")

    def press_twice() -> None:
        with work:  # which ends only if this fails
            until(lambda: sys._current_frames()[main].f_code.co_name == "ends_within")
            os.kill(os.getpid(), signal.SIGINT)
            until(lambda: interrupts._deferring.is_pending)
            os.kill(os.getpid(), signal.SIGINT)
            until(lambda: leaver.failed)

    def program() -> None:
        worker.submit(press_twice)
        work.wait()

    with pytest.raises(KeyboardInterrupt):
        program()
    assert not interrupts._deferring.is_pending
    assert leaver.failed == "a second Ctrl-C ended a call of the library"
    until(lambda: leaver.notes == [leaver.failed])


def test_who_waits_for_long_gives_way(deferring, monkeypatch):
    own = FailureReports(SharedBoard(), rank=0, world_size=2)
    monkeypatch.setattr(interrupts, "_reports", [own])
    monkeypatch.setattr(interrupts, "_in_library", lambda frame: True)
    deferring(signal.SIGINT, None)
    with pytest.raises(KeyboardInterrupt):
        own.deadlock_reason()
    assert own.failed.startswith("Ctrl-C came while it waited in ")
    other = FailureReports(own._board, rank=1, world_size=2)
    assert other.deadlock_reason().startswith("rank 0 has failed: Ctrl-C came while it waited in ")


def test_a_handler_of_the_program_has_its_way():
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        interrupts.defer_interrupts()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
