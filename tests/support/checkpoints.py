"""Runs to save and load, and the contents of their folders."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

from shardlite import AdamW, Precision, ShardLite, load, save
from shardlite.checkpoint import lease
from tests.support.twins.sharded import same_bits, take_step


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
        take_step(optimizer, model(x).float().square().mean())


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


WIDTH = 24


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 40)
        self.outer = nn.Linear(40, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.outer(torch.tanh(self.inner(x)))


class Net(nn.Module):
    """Tied weights, a scalar, a frozen parameter, running statistics, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(37, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.frozen = nn.Parameter(torch.randn(5, 7), requires_grad=False)
        self.norm = nn.BatchNorm1d(WIDTH, affine=False)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(WIDTH, 37, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.drop(self.norm(x.float()).to(x.dtype)))


class Run:
    """A model in training, with a schedule."""

    def __init__(self, group: Any, state: str = "fp32", make: Any = None, seed: int = 0, **options: Any) -> None:
        torch.manual_seed(seed)
        precision = Precision(master="split24", compute=torch.bfloat16) if state == "int8" else Precision()
        self.rank = dist.get_rank()
        self.model = ShardLite(Net(), **{"group": group, "precision": precision, "units": Block, **options})
        make = make or (lambda params: AdamW(params, lr=0.02, state=state))
        names = dict(self.model.named_parameters())
        decayed = [param for name, param in names.items() if "inner" in name]
        others = [param for name, param in names.items() if "inner" not in name and param.requires_grad]
        self.optimizer = make([{"params": decayed, "weight_decay": 0.2}, {"params": others}])
        self.schedule = optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        torch.manual_seed(100 + self.rank)  # of dropout

    def train(self, steps: range) -> "Run":
        for step in steps:
            seed = torch.Generator().manual_seed(1000 * step + self.rank)
            self.model(torch.randint(0, 37, (6,), generator=seed)).float().square().mean().backward()
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
        return self

    def extra(self) -> dict[str, Any]:
        return {"schedule": self.schedule, "rank": self.rank, "nested": {"data": [1, (2.5, "x")], "t": torch.ones(2)}}

    def save(self, path: str | Path, **options: Any) -> Path:
        return save(path, self.model, self.optimizer, self.extra(), **options)

    def load(self, path: str | Path) -> dict[str, Any]:
        return load(path, self.model, self.optimizer, self.extra())

    def moments(self) -> dict[str, Any]:
        """The state of the optimizer as this rank has it, by name."""
        names = {param: name for name, param in self.model.named_parameters()}
        saved = self.optimizer.state_dict()
        order = [names[param] for group in self.optimizer.param_groups for param in group["params"]]
        return {
            f"{order[i]}.{key}": getattr(value, "to_local", lambda value=value: value)()
            for i, entry in saved["state"].items()
            for key, value in entry.items()
        }

    def assert_like(self, other: "Run") -> None:
        ours, theirs = self.model.full_state_dict(), other.model.full_state_dict()
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            if self.rank == 0 or not name.startswith("norm."):  # the next forward gives all ranks the first one's
                same_bits(name, value, theirs[name])
        mine, its = self.moments(), other.moments()
        assert mine.keys() == its.keys()
        same_state(mine, its)
        for one, another in zip(self.optimizer.param_groups, other.optimizer.param_groups, strict=True):
            assert {**one, "params": 0} == {**another, "params": 0}


OPTIMIZERS: dict[str, Any] = {
    "ours": None,
    "in_backward": lambda params: AdamW(params, lr=0.02, in_backward=True),
    "fused": lambda params: optim.AdamW(params, lr=0.02, fused=True),
    "foreach": lambda params: optim.Adam(params, lr=0.02),
    "momentum": lambda params: optim.SGD(params, lr=0.02, momentum=0.9),
}
