"""The plainest model with repeated blocks, and a loss: for tests that are about something else than the model."""

import torch
from torch import Tensor, nn

WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


def net(count: int = 3) -> nn.Sequential:
    return nn.Sequential(*(Block() for _ in range(count)))


def batch() -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()


def square(model: nn.Module) -> Tensor:
    return model(batch()).square().mean()
