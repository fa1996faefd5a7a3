"""A model that raises where a test wants it."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support.models.small import Residual
from tests.support.twins.sharded import Turn

WIDTH = 12


class AnyError(Exception):
    """Something that no library knows."""


class Trap(nn.Module):
    """Passes its input on; raises `error` in its forward or its backward if it is armed."""

    def __init__(self) -> None:
        super().__init__()
        self.error: BaseException | None = None
        self.backwards = False

    def forward(self, x: Tensor) -> Tensor:
        if self.error is not None and not self.backwards:
            raise self.error
        if self.error is not None:
            x = x.clone() if not x.requires_grad else x * 1
            x.register_hook(self._raise)
        return x

    def _raise(self, _: Tensor) -> None:
        if self.error is not None:
            raise self.error


class Trapped(nn.Module):
    """Residual blocks with a trap before each."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.start = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Residual(WIDTH, 2 * WIDTH + 1) for _ in range(blocks)])
        self.traps = nn.ModuleList([Trap() for _ in range(blocks)])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        for block, trap in zip(self.blocks, self.traps, strict=True):
            x = block(trap(x))
        return self.head(x)


def loss_of(model, turn: Turn) -> Tensor:
    x = torch.randn(3, WIDTH, generator=turn.generator())
    return functional.cross_entropy(model(x), torch.tensor([0, 1, 2]))
