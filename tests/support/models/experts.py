"""A mixture of experts: some ranks, or all, leave experts out."""

import torch
from torch import Tensor, nn

from tests.support.twins.sharded import Turn

WIDTH = 18


EXPERTS = 5


class MixtureOfExperts(nn.Module):
    """A block whose experts compute what they are given; those that are given nothing do not run at all."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        y = torch.tanh(self.shared(x))
        for i in chosen.unique().tolist():
            rows = chosen == i
            y = y.index_put((rows,), y[rows] + self.experts[i](y[rows]))
        return y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MixtureOfExperts() for _ in range(3))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, chosen)
        return x.pow(2).mean()


def routed(turn: Turn) -> Tensor:
    """Choose an expert for each token: 0 always, 1 on the first rank only, 2 in every third step, 3 once, 4 never."""
    choices = [0]
    choices += [1] if turn.rank == 0 else []
    choices += [2] if turn.step % 3 == 2 else []
    choices += [3] if (turn.step, turn.rank) == (6, 1) else []
    return torch.tensor(choices)[torch.randint(len(choices), (8,), generator=turn.generator())]


def loss(model: nn.Module, turn: Turn) -> Tensor:
    return model(torch.randn(8, WIDTH, generator=turn.generator()), routed(turn))
