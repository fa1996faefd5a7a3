"""Deleted models are collected anywhere: on any thread, and inside any code of the library."""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from shardlite import AdamW, ShardLite
from shardlite.comm.control.collective_waits import collective_of
from tests.support.twins.sharded import same_states, take_step

STEPS = 4
WIDTH = 12


@contextmanager
def frequent_collections() -> Iterator[None]:
    """Collect garbage all the time, also on a thread that looks at the program's frames as the library's does."""
    main, end, before = threading.get_ident(), threading.Event(), gc.get_threshold()

    def look() -> None:
        while not end.wait(1e-3):
            collective_of(main, frozenset())

    looking = threading.Thread(target=look)
    looking.start()
    gc.set_threshold(20, 1, 1)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        end.set()
        looking.join()


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))


def batch(step: int) -> torch.Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(step))


def discard_a_model(group: Any, stage: int, step: int) -> None:
    """Use a model, and leave it in a reference cycle, with a graph that still has handles."""
    model = ShardLite(net(), group=group, stage=stage)
    outs = [model(batch(step)).sum() for _ in range(2)]
    outs[0].backward()
    cycle: list[Any] = [model, outs]
    cycle.append(cycle)


@pytest.mark.ranks(3)
@pytest.mark.stages(0, 3)
def test_training_goes_on_while_deleted_models_are_collected(group, stage):
    def trained(*, discards: bool) -> dict[str, torch.Tensor]:
        model = ShardLite(net(), group=group, stage=stage)
        optimizer = AdamW(model.parameters(), lr=0.01)
        for step in range(STEPS):
            if discards:
                discard_a_model(group, stage, step)
            model(batch(step)).square().mean().backward()
            take_step(optimizer)
        return model.full_state_dict()

    expected = trained(discards=False)
    with frequent_collections():
        weights = trained(discards=True)
    same_states("state", weights, expected)
