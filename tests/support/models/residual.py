"""The plainest model with repeated blocks, and a loss: for tests that are not about the model."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.twins.sharded import Turn

WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


def net(count: int = 3, make: Callable[[], nn.Module] = Block) -> nn.Sequential:
    return nn.Sequential(*(make() for _ in range(count)))


class Chain(nn.Module):
    """`first`, blocks one after the other, and `head`; `end` makes the output of the head's."""

    def __init__(
        self,
        blocks: Iterable[nn.Module],
        first: nn.Module | None = None,
        head: nn.Module | None = None,
        end: Callable[[Tensor], Tensor] = lambda x: x,
    ) -> None:
        super().__init__()
        self.first, self.blocks, self.head, self.end = first, nn.ModuleList(blocks), head, end

    def forward(self, x: Tensor) -> Tensor:
        for module in (self.first, *self.blocks, self.head):
            x = x if module is None else module(x)
        return self.end(x)


def batch() -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()


def square(model: nn.Module) -> Tensor:
    return model(batch()).square().mean()


def rows(turn: Turn, count: int = 3) -> Tensor:
    return torch.randn(count, WIDTH, generator=turn.generator())


def on_rows(model: Callable[..., Any], turn: Turn) -> Tensor:
    return model(rows(turn)).square().mean()


class Nested(nn.Module):
    """Checkpoints all blocks together, and in it each."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = net(3)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._run, x, use_reentrant=False)

    def _run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x
