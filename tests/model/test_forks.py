"""Forked children, as of data loaders and background saves, do not affect the weights of ranks."""

import os
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

from shardlite import AdamW, Route, ShardLite
from shardlite.errors import CommError
from tests.support.twins.sharded import same_states, slow, take_step

WIDTH = 64


def wrapped(group: Any, stage: int) -> tuple[ShardLite, optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])
    model = ShardLite(net, stage=stage, units=nn.Linear, group=group)
    return model, AdamW(model.parameters(), lr=0.1)


def step(model: ShardLite, optimizer: optim.Optimizer) -> None:
    take_step(optimizer, model(torch.ones(2, WIDTH)).sum())


def look_at(model: ShardLite) -> list[torch.Tensor]:
    """Return the full weights, which are up to date after a forward."""
    with torch.no_grad():
        model(torch.ones(2, WIDTH))
    return [param.data for param in model.module.parameters()]


def in_child(act: Any) -> int:
    """Run `act` in a forked child, and return its number."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            act()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return pid


def ended_well(pid: int) -> bool:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_child_that_writes_weights_changes_no_rank(group: Any, stage: int) -> None:
    """Compare the weights of a run with children that write, and of one without."""
    states = []
    for forks in (True, False):
        model, optimizer = wrapped(group, stage)
        for _ in range(3):
            step(model, optimizer)
            if forks:
                weights = look_at(model)
                assert ended_well(in_child(lambda weights=weights: [weight.fill_(7.0) for weight in weights]))
        states.append(model.full_state_dict())
    same_states("weights", *states)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_child_that_reads_weights_sees_those_of_its_birth(group: Any, stage: int) -> None:
    """Let a child look at weights before and after the ranks have gone on: it sees the same."""
    model, optimizer = wrapped(group, stage)
    step(model, optimizer)
    weights = look_at(model)
    before = [weight.clone() for weight in weights]
    (go_on, gone_on), (seen, has_seen) = os.pipe(), os.pipe()

    def look() -> None:
        os.close(gone_on)
        for _ in range(2):
            assert all(torch.equal(weight, value) for weight, value in zip(weights, before, strict=True))
            os.write(has_seen, b"1")
            os.read(go_on, 1)

    pid = in_child(look)
    os.close(has_seen)
    assert os.read(seen, 1), "the child has looked"
    step(model, optimizer)
    assert not any(torch.equal(weight, value) for weight, value in zip(look_at(model), before, strict=True))
    os.write(gone_on, b"11")
    for end in (go_on, gone_on, seen):
        os.close(end)
    assert ended_well(pid)


def loaded(group: Any, stage: int, start: str | None) -> dict[str, torch.Tensor]:
    """Train on what workers load, started as `start` says, and return the weights."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(16, WIDTH))
    model, optimizer = wrapped(group, stage)
    workers = {"num_workers": 2, "multiprocessing_context": start} if start else {}
    for _ in range(2):
        for (x,) in DataLoader(data, batch_size=4, **workers):
            take_step(optimizer, model(x * (1 + group.rank())).square().mean())
    return model.full_state_dict()


@pytest.mark.parametrize(("start", "stage"), [("fork", 2), slow("spawn", 3)])
def test_workers_of_data_loaders_change_nothing(group, start, stage):
    same_states("weights", *(loaded(group, stage, each) for each in (start, None)))


CALLS: dict[str, Callable[[ShardLite], object]] = {
    "a forward": lambda model: model(torch.ones(2, WIDTH)),
    "saving": lambda model: model.full_state_dict(),
    "wrapping": lambda model: ShardLite(nn.Linear(2, 2)),
    "clipping": lambda model: model.clip_grad_norm_(1.0),
}


@pytest.mark.parametrize("transport", ["shared_memory", "p2p"])
def test_a_child_that_takes_other_ranks_is_told(group: Any, transport: str) -> None:
    """Let a child do what takes other ranks, and go on."""
    model = ShardLite(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)), route=Route(transport=transport), group=group
    )
    optimizer = AdamW(model.parameters())
    step(model, optimizer)

    def communicate() -> None:
        for call in CALLS.values():
            with pytest.raises(CommError, match=rf"process {os.getpid()} is a forked child of .* {os.getppid()} "):
                call(model)

    model(torch.ones(2, WIDTH)).sum().backward()
    assert ended_well(in_child(communicate))
    take_step(optimizer)
    step(model, optimizer)
