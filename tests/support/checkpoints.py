"""A small run to save and load, and what is in its folder."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardlite import AdamW, Precision, ShardLite
from shardlite.checkpoint import lease
from tests.support.twins.sharded import same_bits


def run_on(group: Any, seed: int = 0, state: str = "fp32", **options: Any) -> tuple[ShardLite, AdamW]:
    """Return a model with running statistics, and its optimizer."""
    torch.manual_seed(seed)
    layers = nn.Sequential(nn.Linear(64, 300), nn.BatchNorm1d(300, affine=False), nn.Tanh(), nn.Linear(300, 64))
    precision = Precision(master="split24", compute=torch.bfloat16) if state == "int8" else Precision()
    model = ShardLite(layers, group=group, units=nn.Linear, precision=precision, **options)
    return model, AdamW(model.parameters(), lr=0.05, state=state)


def train(model: ShardLite, optimizer: AdamW, steps: int = 1) -> None:
    """Train on data that is the same on all ranks and in all steps."""
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).to(model.precision.compute)
    for _ in range(steps):
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def same_state(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Compare each tensor of `got` with that of the same name."""
    for name, value in got.items():
        same_bits(name, value, expected[name])


def on_first(group: Any, act: Callable[[], object]) -> None:
    """Let rank 0 act, between two barriers."""
    dist.barrier(group)
    if dist.get_rank(group) == 0:
        act()
    dist.barrier(group)


def assert_names(group: Any, path: Path, *expected: str) -> None:
    """Check on all ranks what is in the folder of a run, between two barriers."""
    dist.barrier(group)
    assert names_in(path) == [*expected]
    dist.barrier(group)


def names_in(path: Path) -> list[str]:
    """Return what is in the folder of a run, without the lease."""
    return sorted(each.name for each in path.iterdir() if each.name != lease.NAME)


def tree(root: Path) -> dict[str, bytes]:
    """Return the content of all files in a folder."""
    return {str(each.relative_to(root)): each.read_bytes() for each in sorted(root.rglob("*")) if each.is_file()}
