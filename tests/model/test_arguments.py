"""Wrong arguments are named, also on the ranks that have passed right ones."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardlite
from shardlite import AdamW, CheckpointError, LayoutError, ShardLite, WholeParameters
from tests.support.twins.whole import Norms


def model_of(group: Any) -> tuple[ShardLite, AdamW]:
    model = ShardLite(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), group=group)
    return model, AdamW(model.parameters())


@pytest.mark.parametrize("stage", [True, 3.0, "3", None, 10**30])
def test_a_stage_is_an_int(group: Any, stage: Any) -> None:
    with pytest.raises(LayoutError, match="stage must be one of"):
        ShardLite(nn.Linear(2, 2), group=group, stage=stage)


@pytest.mark.parametrize("timeout", [timedelta(0), timedelta(days=10**8)])
def test_a_timeout_that_clocks_cannot_count(group: Any, timeout: timedelta) -> None:
    with pytest.raises(ValueError, match="timeout must be above zero, and at most"):
        ShardLite(nn.Linear(2, 2), group=group, timeout=timeout)


@pytest.mark.parametrize(("rank", "kind"), [(2, ValueError), (-1, ValueError), ("x", TypeError), (True, TypeError)])
def test_a_rank_that_does_not_exist(group: Any, rank: Any, kind: type[Exception]) -> None:
    model, _ = model_of(group)
    with pytest.raises(kind, match="full_state_dict: rank must be"):
        model.full_state_dict(rank=rank)
    assert bool(model.full_state_dict(rank=1)) == (dist.get_rank(group) == 1)


WRONG: dict[str, tuple[type[Exception], str, Any]] = {
    "save, path": (TypeError, "path must be a str", lambda m, o, path: shardlite.save(None, m, o)),
    "save, empty path": (ValueError, "path must name a folder", lambda m, o, path: shardlite.save("", m, o)),
    "save, keep": (TypeError, "keep must be an int", lambda m, o, path: shardlite.save(path, m, o, keep=1.5)),
    "save, extra": (TypeError, "extra must be a dict", lambda m, o, path: shardlite.save(path, m, o, [1])),
    "async_save, optimizer": (
        TypeError,
        "optimizer must be a torch.optim.Optimizer",
        lambda m, o, path: shardlite.async_save(path, m, 3),
    ),
    "load, path": (ValueError, "path must name a folder", lambda m, o, path: shardlite.load("\0", m, o)),
    "save_in_memory, step": (
        ValueError,
        "step must be at least 0",
        lambda m, o, path: shardlite.save_in_memory(path, m, o, step=-1),
    ),
    "full_state_dict, rank": (ValueError, "rank must be None, or", lambda m, o, path: m.full_state_dict(rank=9)),
    "full_optimizer_state, optimizer": (
        TypeError,
        "optimizer must be a torch.optim.Optimizer",
        lambda m, o, path: shardlite.full_optimizer_state(m, nn.Linear),
    ),
}
RIGHT = {
    "save": lambda m, o, path: shardlite.save(path, m, o),
    "async_save": lambda m, o, path: shardlite.async_save(path, m, o),
    "load": lambda m, o, path: shardlite.load(path, m, o),
    "save_in_memory": lambda m, o, path: shardlite.save_in_memory(path, m, o, step=1),
    "full_state_dict": lambda m, o, path: m.full_state_dict(),
    "full_optimizer_state": lambda m, o, path: shardlite.full_optimizer_state(m, o),
}


@pytest.mark.parametrize("call", WRONG)
def test_a_wrong_argument_on_one_rank_is_named_on_every_rank(group: Any, call: str, tmp_path: Path) -> None:
    model, optimizer = model_of(group)
    kind, text, wrong = WRONG[call]
    if dist.get_rank(group) == 1:
        with pytest.raises(kind, match=f"{call.split(',')[0].removeprefix('async_')}: {text}"):
            wrong(model, optimizer, tmp_path)
    else:
        with pytest.raises((CheckpointError, LayoutError), match=f"rank 1: .*{text}"):
            RIGHT[call.split(",")[0]](model, optimizer, tmp_path)
    model.full_state_dict()


@pytest.mark.parametrize("call", [shardlite.full_optimizer_state, shardlite.save_in_memory])
def test_a_model_that_is_not_wrapped(call: Any) -> None:
    options = {} if call is shardlite.full_optimizer_state else {"step": 1}
    with pytest.raises(TypeError, match=r"expected a ShardLite model, got (int|Linear): wrap it first"):
        call(3, nn.Linear(2, 2), **options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lr": "x"}, "AdamW: lr must be a number"),
        ({"lr": 10**400}, "AdamW: lr is too large"),
        ({"lr": torch.ones(2)}, "AdamW: lr must be a number"),
        ({"eps": None}, "AdamW: eps must be a number"),
        ({"betas": None}, "AdamW: betas must be two numbers"),
        ({"betas": "xy"}, "AdamW: betas must be a number"),
        ({"max_norm": "x"}, "AdamW: max_norm must be a number"),
    ],
)
def test_hyper_parameters_are_numbers(options: Any, text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        AdamW([nn.Parameter(torch.ones(2))], **options)


@pytest.mark.parametrize("params", [None, 3, [{}], [{"params": None}]])
def test_parameters_are_a_list_or_groups(params: Any) -> None:
    with pytest.raises(TypeError, match=r"AdamW: (params must be|a group must be)"):
        AdamW(params)
    with pytest.raises(TypeError, match=r"WholeParameters: (params must be|a group must be)"):
        WholeParameters(params, Norms)


def test_a_limit_of_a_norm_is_a_number(group: Any) -> None:
    model, _ = model_of(group)
    model(torch.ones(2, 4)).sum().backward()
    for limit in (None, "x", torch.ones(2)):
        with pytest.raises(TypeError, match="max_norm must be a number"):
            model.clip_grad_norm_(limit)


def test_verify_names_a_wrong_argument_on_every_rank(group: Any) -> None:
    wrong = dist.get_rank(group) == 1
    with pytest.raises(TypeError if wrong else LayoutError, match="verify: make_model must be callable, got None"):
        shardlite.verify(
            None if wrong else lambda: nn.Linear(2, 2), lambda step, rank: (torch.ones(1, 2),), group=group
        )
