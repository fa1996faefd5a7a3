"""Models with parts that are to keep fp32, and their losses."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.support.twins.sharded import Turn


class Router(nn.Module):
    """A router that leaves casts to others, as most do."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(3, width) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.gate).softmax(-1)


class Block(nn.Module):
    """Experts, a router between them whose fp32 output meets the narrow ones, and layers of PyTorch behind."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router, self.body = nn.LayerNorm(8), Router(), nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        weights = self.router(normed)
        mixed = sum(weights[..., i : i + 1] * body(normed) for i, body in enumerate(self.body))
        return x + self.out(mixed)


class Net(nn.Module):
    """Blocks whose class repeats. `again` calls the first block twice, `saves` recomputes each."""

    def __init__(self, again: bool = False, saves: bool | None = None) -> None:
        super().__init__()
        self.inp, self.blocks, self.head = nn.Linear(7, 8), nn.ModuleList(Block() for _ in range(2)), nn.Linear(8, 4)
        self.again, self.saves = again, saves

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in (*self.blocks, *self.blocks[: int(self.again)]):
            x = block(x) if self.saves is None else checkpoint(block, x, use_reentrant=self.saves)
        return self.head(x)


class Declares(Net):
    """A model that declares what to keep: a parameter, and layers."""

    _keep_in_fp32_modules = ("gate", "absent")
    _keep_in_fp32_modules_strict = ("blocks.*.out",)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:  # like the models that declare, this one casts for its own functions
            block.router.forward = lambda h, r=block.router: functional.linear(h.to(r.gate.dtype), r.gate).softmax(-1)
        return super().forward(x)


class CastsRouter(Router):
    """A router that computes in fp32 by itself, also in `torch.autocast`."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return super().forward(x.float())


class Mixture(nn.Module):
    """A classifier with a norm that has running statistics, and experts that the router mixes."""

    def __init__(self, inputs: int, classes: int, router: type[Router] = Router) -> None:
        super().__init__()
        self.inp, self.norm, self.router = nn.Linear(inputs, 8), nn.BatchNorm1d(8), router()
        self.experts = nn.ModuleList(nn.Linear(8, classes) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.inp(x)).relu()
        weights = self.router(x)
        return sum(weights[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


def conv() -> nn.Module:
    """Norms with running statistics: of batches, and one that PyTorch calls an instance norm."""
    norm = nn.InstanceNorm2d(6, affine=True, track_running_stats=True)
    layers = [nn.Conv2d(1, 6, 1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 1), norm, nn.Conv2d(6, 2, 1)]
    return nn.Sequential(*layers)


def rows(model: Callable[..., Any], turn: Turn) -> Tensor:
    return model(torch.randn(5, 7, generator=turn.generator())).float().square().sum()


def images(model: Callable[..., Any], turn: Turn) -> Tensor:
    return model(torch.randn(3, 1, 2, 4, generator=turn.generator())).float().square().sum()
