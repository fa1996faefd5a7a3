"""Ranks that step with different options, or train different parameters, are named on every rank, without a message."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

from shardlite import AdamW, LayoutError, ShardLite, WholeParameters
from shardlite.grads.options import EVERY, STEPS
from tests.support.twins.sharded import take_step

OPTIMIZERS: dict[str, tuple[Callable[[Any, int], optim.Optimizer], str]] = {
    "lr": (lambda params, rank: AdamW(params, lr=0.25 + rank), "lr of group 0 of AdamW is 0.25 on rank 0 and 1.25 on"),
    "in backward": (lambda params, rank: AdamW(params, lr=0.25 + rank, in_backward=True), "lr of group 0 of AdamW"),
    "max_norm": (lambda params, rank: AdamW(params, max_norm=1.0 + rank), "max_norm of AdamW is 1 on rank 0 and 2 on"),
    "betas": (
        lambda params, rank: optim.Adam(params, betas=(0.5, 0.5 + rank / 8)),
        "betas of group 0 of Adam is 0.5 on",
    ),
    "weight_decay": (lambda params, rank: optim.SGD(params, weight_decay=rank / 8), "weight_decay of group 0 of SGD"),
    "whole": (lambda params, rank: changed(WholeParameters(params, optim.Adafactor), lr=rank / 8), "lr of group 0"),
    "clip": (lambda params, rank: optim.SGD(params), "max_norm of clip_grad_norm_ is 1 on rank 0 and 2 on rank 1"),
}


def changed(optimizer: optim.Optimizer, **options: float) -> optim.Optimizer:
    optimizer.param_groups[0].update(options)
    return optimizer


def wrapped(group: Any, stage: int = 3) -> ShardLite:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    return ShardLite(net, group=group, stage=stage, units=nn.Linear)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.stages(0, 3)
def test_options_that_differ_are_named_in_the_next_backward(group: Any, name: str, stage: int) -> None:
    model, rank = wrapped(group, stage), dist.get_rank()
    make, message = OPTIMIZERS[name]
    optimizer = make(model.parameters(), rank)
    model(torch.ones(2, 8)).sum().backward()
    if name == "clip":
        nn.utils.clip_grad_norm_(model.parameters(), 1.0 + rank)
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(LayoutError, match=f"ranks step with different options: {message}"):
        model(torch.ones(2, 8)).sum().backward()


def test_a_rate_that_differs_later_is_named(group: Any) -> None:
    """Schedules change options on all ranks. Options are compared every `EVERY` steps, and tensors are not read."""
    model = wrapped(group)
    optimizer = AdamW(model.parameters(), lr=0.1)
    other = optim.AdamW(model.parameters(), lr=torch.tensor(0.1 + dist.get_rank()))
    for step in range(EVERY + STEPS):
        optimizer.param_groups[0]["lr"] = 0.1 / (step + 1) + (dist.get_rank() if step == EVERY else 0)
        loss = model(torch.ones(2, 8)).sum()
        if step == EVERY + 1:
            with pytest.raises(
                LayoutError, match=r"lr of group 0 of AdamW is 0\.0019.* on rank 0 and 1\.0019.* on rank 1"
            ):
                loss.backward()
            break
        take_step(other if step == 1 else optimizer, loss)


@pytest.mark.parametrize("frozen", ["1.bias", "1"])
def test_a_parameter_that_one_rank_has_frozen_is_named(doomed: Any, frozen: str, tmp_path: Path) -> None:
    for ended in doomed.run(freezing, 2, frozen, directory=tmp_path):
        assert "Every rank must train the same parameters: change requires_grad on every rank" in ended.text


def freezing(group: Any, frozen: str) -> None:
    model = wrapped(group)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    take_step(optimizer, model(torch.ones(2, 8)).sum())
    if dist.get_rank() == 1:
        model.module.get_submodule("1").requires_grad_(frozen != "1")
        model.module[1].bias.requires_grad_(False)
    take_step(optimizer, model(torch.ones(2, 8)).sum())
