"""A model whose forwards take different branches on each rank."""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.support.models.small import Residual, run_all
from tests.support.twins.sharded import Turn

WIDTH = 12


class Branching(nn.Module):
    """Residual blocks, of which a batch names those that it uses, in that order, and a tower that it may leave out."""

    def __init__(self, blocks: int = 5, *, reentrant: bool | None = None) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.blocks = nn.ModuleList([Residual(WIDTH, 2 * WIDTH + 1) for _ in range(blocks)])
        self.tower = nn.ModuleList([Residual(WIDTH, WIDTH + 3) for _ in range(2)])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, route: list[int], with_tower: bool) -> Tensor:
        for place in route:
            x = self.run(self.blocks[place], x)
        if with_tower:
            x = run_all(self.tower, x)
        return self.head(x)

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return block(x)
        return checkpoint(block, x.requires_grad_() if x.is_leaf else x, use_reentrant=self.reentrant)


def layer_drop(step: int, rank: int) -> tuple[list[int], bool]:
    """Each rank drops other blocks in each step."""
    draw = torch.rand(5, generator=torch.Generator().manual_seed(100 * step + rank))
    return [i for i in range(5) if draw[i] > 0.4], True


def early_exit(step: int, rank: int) -> tuple[list[int], bool]:
    return list(range(1 + (rank + step) % 5)), False


def missing_modality(step: int, rank: int) -> tuple[list[int], bool]:
    """A rank's batch has the other modality now and then; at first no rank's has."""
    return list(range(5)), step > 1 and (rank + step) % 3 == 0


def other_orders(step: int, rank: int) -> tuple[list[int], bool]:
    """Nothing is alike: each rank calls its blocks in an order of its own, some of them twice."""
    shuffled = torch.randperm(5, generator=torch.Generator().manual_seed(100 * step + rank)).tolist()
    return [*shuffled, *shuffled[: rank % 3]], rank % 2 == 0


def one_rank_alone(step: int, rank: int) -> tuple[list[int], bool]:
    return ([0, 1, 2, 3, 4], True) if rank == 1 else ([], False)


ROUTES = [layer_drop, early_exit, missing_modality, other_orders, one_rank_alone]


def loss_on(route):
    def loss(model, turn: Turn) -> Tensor:
        x = torch.randn(3, WIDTH, generator=turn.generator())
        return functional.cross_entropy(model(x, *route(turn.step, turn.rank)), torch.tensor([0, 1, 2]))

    return loss
