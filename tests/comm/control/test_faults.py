"""Ranks that die, stop, come late, diverge or fail: every other rank raises an error that says so, in time.

Shared memory detects the end of a process at once, so its timeout is longer than ranks may live here.
"""

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from shardlite import ShardLite
from shardlite.comm.collectives import all_gather
from shardlite.comm.operation import Operation
from shardlite.comm.transport.select import connect
from shardlite.config import Route
from tests.support.models.small import Residual
from tests.support.patience import seconds, until
from tests.support.ranks.doomed import JOIN
from tests.support.transports.calls import reduce_scatter
from tests.support.transports.delegating import Delegating
from tests.support.twins.sharded import slow, take_step

LONG, SHORT = JOIN + seconds(75), seconds(1.5)  # timeouts: longer than a test may take; to be waited for
WIDTH, CHUNK = 16, 1 << 16


@pytest.fixture(params=["shared_memory", "p2p"])
def transport(request):
    return request.param


@pytest.fixture(params=["shared_memory", "p2p", slow("collectives")])
def carrier(request):
    """A transport for training: `"collectives"` has no messages of its own."""
    return request.param


def connected(group, name, seconds, algorithm="ring"):
    route = Route(transport=name, algorithm=algorithm)
    return connect(group, torch.device("cpu"), timedelta(seconds=seconds), route=route)


class Fatal(Delegating):
    """A transport that sends itself a signal before it sends its n-th message."""

    def __init__(self, transport, number, message):
        super().__init__(transport)
        self._number, self._left = number, message

    def isend(self, tensor, peer, tag):
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), self._number)
        return super().isend(tensor, peer, tag)


def reduce_body(group, name, seconds, victim, number, message):
    """A large reduce-scatter, of which a rank sees only so many messages of its own."""
    transport = connected(group, name, seconds)
    if transport.rank == victim:
        transport = Fatal(transport, number, message)
    full = torch.ones(3 << 20)
    what = Operation("reduce-scatter of unit 'blocks.1' at step 3", 7)
    return reduce_scatter(full, transport, operation=what, chunk_bytes=CHUNK).sum().item()


def has_ended(rank):
    """Whether the body of a rank has ended, as a rank sees it."""
    return (Path(os.environ["TMPDIR"]).parent / "said" / str(rank)).exists()


def assert_failed(ended, *words):
    """Check that each rank ended by an error that names its operation."""
    for each in ended:
        assert each.kind == "CommError", f"{each.kind}: {each.text}\n{each.log}"
        assert each.status == 0, f"{each.status}: {each.text}\n{each.log}"
        assert all(word in each.text for word in words), each.text


NAMED = "reduce-scatter of unit 'blocks.1' at step 3 (operation 7, 3145728 elements of torch.float32): rank "


@pytest.mark.parametrize(
    ("transport", "message"), [("shared_memory", 1), ("p2p", 40), slow("p2p", 1), slow("shared_memory", 40)]
)
def test_a_rank_killed_in_a_collective(doomed, transport, message, tmp_path):
    victim = 1
    ended = doomed.run(reduce_body, 3, transport, LONG, victim, signal.SIGKILL, message, directory=tmp_path)
    assert ended.pop(victim).status == -signal.SIGKILL
    assert_failed(ended, NAMED, *(["rank 1 is gone"] if transport == "shared_memory" else []))


def test_a_rank_stopped_in_a_collective(doomed, transport, tmp_path):
    victim = 2
    ended = doomed.run(reduce_body, 3, transport, SHORT, victim, signal.SIGSTOP, 20, directory=tmp_path, killed=victim)
    assert ended.pop(victim).status == -signal.SIGKILL
    assert_failed(ended, NAMED)
    said = "nothing happened within" if transport == "shared_memory" else "timeout"
    assert any(f"{said} {SHORT:g} s" in each.text for each in ended)


def forked_body(group):
    """The rank that dies has a child, which inherits its open files and survives."""
    transport = connected(group, "shared_memory", LONG)
    if transport.rank == 1 and os.fork() != 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if transport.rank == 1:
        until(lambda: has_ended(0))
        os._exit(0)
    all_gather(torch.ones(2), transport, operation=Operation("all-gather of unit 'a' at step 0"))


def test_a_rank_killed_before_its_children(doomed, tmp_path):
    first, _ = doomed.run(forked_body, 2, directory=tmp_path)
    assert_failed([first], "all-gather of unit 'a' at step 0", "rank 1 is gone")


# In training.


class Model(nn.Module):
    """Residual blocks, of which the last kills its process, or raises, in its n-th forward or backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Residual(WIDTH, 40) for _ in range(3)])
        self.head = nn.Linear(WIDTH, 1)
        self.ends = None

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i == 1 and self.ends == "killed in the forward":
                os.kill(os.getpid(), signal.SIGKILL)
            elif i == 1 and self.ends == "raises":
                raise ArithmeticError("the third batch is bad")
            elif i == 1 and self.ends == "killed in the backward":
                x.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        return self.head(x).mean()


def train_body(group, name, seconds, victim, ends, stage):
    model = ShardLite(
        Model(), group=group, stage=stage, route=Route(transport=name), timeout=timedelta(seconds=seconds)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        if step == 2 and group.rank() == victim:
            model.module.ends = ends
        take_step(optimizer, model(torch.ones(2, WIDTH)))


@pytest.mark.parametrize(
    ("carrier", "ends", "stage"),
    [
        ("shared_memory", "forward", 3),
        ("p2p", "backward", 1),
        slow("p2p", "forward", 3),
        slow("shared_memory", "backward", 1),
        slow("collectives", "forward", 3),
        *(slow(each, "backward", 3) for each in ("shared_memory", "p2p", "collectives")),
    ],
)
def test_a_rank_killed_in_a_step(doomed, carrier, ends, stage, tmp_path):
    ended = doomed.run(train_body, 3, carrier, LONG, 2, f"killed in the {ends}", stage, directory=tmp_path)
    assert ended.pop(2).status == -signal.SIGKILL
    assert_failed(ended, "unit '", "at step 2", *(["rank 2 is gone"] if carrier == "shared_memory" else []))


def test_a_rank_that_raises(doomed, carrier, tmp_path):
    ended = doomed.run(train_body, 3, carrier, LONG, 1, "raises", 3, directory=tmp_path)
    failed = ended.pop(1)
    assert (failed.kind, failed.text, failed.status) == ("ArithmeticError", "the third batch is bad", 0)
    assert_failed(ended, "unit '", "at step 2")
    told = "Meanwhile rank 1: its forward at step 2 ended in ArithmeticError: the third batch is bad"
    assert [each.text for each in ended if told not in each.text] == []


class UnreadError(Exception):
    """Of a data loader."""


def raises_body(group, name, place):
    """Train; rank 1 ends by an uncaught exception, in its third step."""
    model = ShardLite(Model(), group=group, route=Route(transport=name), timeout=timedelta(seconds=LONG))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fail(*_):
        raise UnreadError("the third batch is gone")

    for step in range(4):
        fails = step == 2 and group.rank() == 1
        if fails and place == "hook":
            optimizer.register_step_pre_hook(fail)
        if fails and place == "loader":
            ends_by(fail)
        x = torch.ones(2, WIDTH, requires_grad=True)
        if fails and place == "backward":
            x.register_hook(fail)
        loss = model(x)
        ends_by(loss.backward)
        ends_by(optimizer.step)
        optimizer.zero_grad()


def ends_by(call):
    """Call it; treat an `UnreadError` as Python treats an uncaught exception, but end late."""
    try:
        call()
    except UnreadError:
        sys.excepthook(*sys.exc_info())
        time.sleep(LONG)  # the process ends late


@pytest.mark.parametrize(
    ("carrier", "place"),
    [
        ("shared_memory", "backward"),
        ("p2p", "hook"),
        ("shared_memory", "loader"),
        slow("p2p", "backward"),
        slow("shared_memory", "hook"),
        slow("p2p", "loader"),
        *(slow("collectives", place) for place in ("backward", "hook", "loader")),
    ],
)
def test_an_exception_that_ends_the_program(doomed, carrier, place, tmp_path):
    ended = doomed.run(raises_body, 3, carrier, place, directory=tmp_path, killed=1)
    assert ended.pop(1).status == -signal.SIGKILL
    assert_failed(
        ended, "its program ended in UnreadError: the third batch is gone, raised in ", "test_faults.py, line "
    )


def far_body(group, name):
    """Train over a ring; rank 2 is killed, of whom rank 0 hears nothing itself."""
    limit = timedelta(seconds=LONG)
    model = ShardLite(Model(), group=group, stage=1, route=Route(transport=name, algorithm="ring"), timeout=limit)
    for step in range(4):
        if step == 2 and group.rank() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        model(torch.ones(2, WIDTH)).backward()


def test_a_rank_without_messages_to_the_dead_one_is_told(doomed, transport, tmp_path):
    ended = doomed.run(far_body, 4, transport, directory=tmp_path)
    assert ended.pop(2).status == -signal.SIGKILL
    assert_failed(ended, "rank 2 is gone" if transport == "shared_memory" else " failed: ")


# Ranks that are late, or elsewhere.


def late_body(group, name, seconds):
    """Rank 1 is late, at first within the timeout, and then until the others have given up."""
    patient, impatient = (connected(group, name, timeout, "direct") for timeout in (LONG, seconds))
    in_time = torch.full((6,), float(patient.rank))
    if patient.rank == 1:
        time.sleep(0.2)
    all_gather(in_time, patient, operation=Operation("all-gather of unit 'a' at step 0"))
    assert in_time.tolist() == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
    if patient.rank == 1:
        until(lambda: has_ended(0) and has_ended(2))
    all_gather(in_time, impatient, operation=Operation("all-gather of unit 'a' at step 1"))


def test_a_late_rank(doomed, transport, tmp_path):
    ended = doomed.run(late_body, 3, transport, SHORT, directory=tmp_path)
    assert_failed(ended, "all-gather of unit 'a' at step 1", "rank 1")


def ends_first_body(group, name):
    """Rank 0 finishes while the others still communicate: the end of its process is no error."""
    transport = connected(group, name, LONG, "direct")
    all_gather(torch.ones(3), transport, operation=Operation("all-gather of unit 'a' at step 0"))
    if transport.rank == 2:
        until(lambda: has_ended(0))
    if transport.rank != 0:
        received = torch.zeros(3)
        arriving = transport.irecv(received, 3 - transport.rank, tag=1)
        transport.isend(torch.full((3,), float(transport.rank)), 3 - transport.rank, tag=1).wait()
        arriving.wait()
        return received.tolist()
    return None


def test_a_rank_that_ends_before_the_others(doomed, transport, tmp_path):
    ended = doomed.run(ends_first_body, 3, transport, directory=tmp_path)
    assert [(each.result, each.status) for each in ended] == [(None, 0), ([2.0] * 3, 0), ([1.0] * 3, 0)], ended


def astray_body(group, name, how):
    """Rank 1 does something else than the others at the same time."""
    transport = connected(group, name, SHORT, "direct")
    units = ["a", "b"]
    if transport.rank == 1 and how == "order":
        units.reverse()
    other = transport.rank == 1 and how
    numel = 4 if other == "length" else 6
    dtype = torch.int32 if other == "dtype" else torch.float32
    for unit in units:
        what = Operation(f"all-gather of unit {unit!r} at step 0")
        all_gather(torch.full((numel,), transport.rank, dtype=dtype), transport, operation=what)


@pytest.mark.parametrize(
    ("transport", "how"),
    [
        ("shared_memory", "order"),
        ("p2p", "length"),
        slow("shared_memory", "dtype"),
        slow("p2p", "order"),
        slow("shared_memory", "length"),
        slow("p2p", "dtype"),
    ],
)
def test_ranks_that_do_different_things(doomed, transport, how, tmp_path):
    ended = doomed.run(astray_body, 2, transport, how, directory=tmp_path)
    for rank, each in enumerate(ended):
        unit = "b" if rank == 1 and how == "order" else "a"
        assert_failed([each], f"all-gather of unit '{unit}' at step 0", f"rank {rank} ", f"rank {1 - rank}")


def misfit_body(group):
    """Rank 0 sends what rank 1 does not expect under that tag."""
    transport = connected(group, "shared_memory", LONG)
    if transport.rank == 0:
        transport.isend(torch.zeros(4), 1, tag=9).wait()
    else:
        transport.irecv(torch.zeros(4, dtype=torch.int32), 0, tag=9).wait()


def test_a_message_of_another_kind_ends_both_ranks(doomed, tmp_path):
    sender, receiver = doomed.run(misfit_body, 2, directory=tmp_path)
    assert_failed([sender], "rank 0 sending to rank 1 (4 elements of torch.float32", "rank 1")
    assert_failed([receiver], "rank 1 receiving from rank 0 (4 elements of torch.int32", "16 bytes of a different kind")
