"""Runs of shards that one kernel call steps: they are found once, and again when gradients are arranged differently."""

import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import shardlite
from shardlite import AdamW, ShardLite
from shardlite.optim import layout
from shardlite.optim.in_backward import InBackwardStep

HOUSE = f"{Path(shardlite.__file__).parent}/"


def net(layers: int) -> nn.Module:
    """Two units of so many layers. Biases have padding."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers))) for _ in range(2)))


def wrap(group: Any, layers: int) -> ShardLite:
    return ShardLite(net(layers), units=nn.Sequential, group=group)


def backward(model: ShardLite) -> None:
    model(torch.ones(2, 8)).square().mean().backward()


def entered(step: Callable[[], Any]) -> int:
    """Return how many functions of the library a step enters."""
    names: list[str] = []

    def look(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(HOUSE) and code.co_name != "<listcomp>":
            names.append(code.co_name)

    sys.setprofile(look)
    try:
        step()
    finally:
        sys.setprofile(None)
    return len(names)


def test_a_steady_step_calls_nothing_per_parameter(group: Any) -> None:
    calls = []
    for layers in (2, 6):
        model = wrap(group, layers)
        optimizer = AdamW(model.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            backward(model)
            seen = entered(optimizer.step)
        calls.append(seen)
    assert calls[0] == calls[1]


def in_own_memory(params: list[nn.Parameter]) -> None:
    params[1].grad = None if params[1].grad is None else params[1].grad.clone()


def unmarked(params: list[nn.Parameter]) -> None:
    for param in params:
        param.grad = None if param.grad is None else param.grad.view_as(param.grad)


def left_out(params: list[nn.Parameter]) -> None:
    params[2].grad = None


def not_contiguous(params: list[nn.Parameter]) -> None:
    grad = params[0].grad
    if grad is not None and grad.ndim == 2 and grad.numel():
        params[0].grad = torch.stack([grad, grad], -1)[..., 0]


EVENTS: list[Callable[[list[nn.Parameter]], None]] = [
    lambda params: None,
    lambda params: None,
    in_own_memory,
    lambda params: None,
    unmarked,
    left_out,
    lambda params: None,
    not_contiguous,
]


def trained(group: Any) -> list[Tensor]:
    """Return weights and moments after steps, between which the arrangement of gradients changes."""
    model = wrap(group, 3)
    params = list(model.parameters())
    optimizer = AdamW(params, lr=0.1)
    for number, event in enumerate(EVENTS):
        optimizer.zero_grad()
        backward(model)
        event(params)
        if number == 3:
            optimizer.load_state_dict(optimizer.state_dict())
        if number == 1:
            optimizer.state[params[1]]["step"].add_(5)  # the counts differ, and gradients lie as before
        if number == 6:
            optimizer.param_groups[0]["lr"] = 0.01
        optimizer.step()
    return [each.detach() for each in params] + [each for param in params for each in optimizer.state[param].values()]


@pytest.mark.parametrize("group", [1, 2], indirect=True)
def test_steps_have_the_same_bits_as_with_runs_that_are_found_anew(group: Any) -> None:
    mine = trained(group)
    unlike = count()

    def arranged_anew(_: list[Tensor]) -> int:
        return next(unlike)

    with mock.patch.object(layout, "_arrangement", arranged_anew):
        anew = trained(group)
    assert all(map(torch.equal, mine, anew))
    assert next(unlike) == len(EVENTS)


# ---- inside a backward ----------------------------------------------------------------------------------------------


class Skipping(nn.Module):
    """Layers, some of which a forward may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.skipped: tuple[int, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = x if i in self.skipped else layer(x)
        return x


def trained_in_backward(group: Any) -> list[Tensor]:
    """Return weights after steps inside backwards, to which different layers contribute."""
    torch.manual_seed(0)
    model = ShardLite(Skipping(), group=group)
    optimizer = AdamW(model.parameters(), lr=0.1, in_backward=True)
    for skipped in ((), (), (1,), (1,), (), (0, 2), ()):
        model.module.skipped = skipped
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
    return list(model.full_state_dict().values())


@pytest.mark.parametrize("group", [2], indirect=True)
def test_steps_in_a_backward_have_the_same_bits_as_with_runs_that_are_found_anew(group: Any) -> None:
    mine, stretches, found = trained_in_backward(group), InBackwardStep._stretches, count()

    def found_anew(step: InBackwardStep) -> list[layout.Stretch]:
        next(found)
        step._layout.stretches.clear()
        return stretches(step)

    with mock.patch.object(InBackwardStep, "_stretches", found_anew):
        anew = trained_in_backward(group)
    assert all(map(torch.equal, mine, anew))
    assert next(found) >= 7
