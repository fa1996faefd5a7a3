"""Parameters that consist of other tensors, such as the quantized weights of torchao: a frozen base with adapters."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.testing._internal.two_tensor import TwoTensor

import shardlite
from shardlite import LayoutError, ShardLite
from tests.support.twins.sharded import same_bits, same_states, take_step

WIDTH = 12


class Adapted(nn.Module):
    """A frozen weight that consists of two tensors, and an adapter."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.base, self.adapter = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        halves = torch.full((WIDTH, WIDTH), 0.1 + rank), torch.full((WIDTH, WIDTH), 0.1 + rank)
        self.base.weight = nn.Parameter(TwoTensor(*halves), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        base = self.base(x)
        return torch.tanh((base.a if isinstance(base, TwoTensor) else base) + self.adapter(x))


def net(rank: int = 0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Adapted(rank) for _ in range(3)))


@pytest.mark.parametrize("keyword", ["ignore", "replicate"])
@pytest.mark.stages(0, 2, 3)
def test_training_with_a_frozen_base(group: Any, tmp_path: Path, keyword: str, stage: int) -> None:
    """`replicate` gives every rank the base of rank 0. Ignored bases are those of each rank."""
    plain, twin = net(dist.get_rank() if keyword == "replicate" else 0), net()
    model = ShardLite(plain, group=group, stage=stage, **{keyword: [each.base for each in plain]})
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    other = optim.SGD(twin.parameters(), lr=0.1)
    for step in range(3):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        losses = [each(x).square().mean() for each in (model, twin)]
        same_bits("loss", losses[0].detach(), losses[1].detach())
        take_step(optimizer, losses[0])
        take_step(other, losses[1])
    full, expected = model.full_state_dict(), twin.state_dict()
    bases = [f"{block}.base.weight" for block in range(3)]
    for name in bases:
        assert isinstance(full[name], TwoTensor)
        same_bits(name, full.pop(name).b, expected.pop(name).b)
    same_states("adapters", full, expected)
    shardlite.save(tmp_path / "saved", model, optimizer)
    with torch.serialization.safe_globals([TwoTensor]):
        shardlite.load(tmp_path / "saved", model, optimizer)
    assert isinstance(model.unwrap()[0].base.weight, TwoTensor)


@pytest.mark.stages(0, 3)
def test_elsewhere_such_parameters_are_named_on_every_rank(group: Any, stage: int) -> None:
    plain = net()
    given = [each.base for each in plain] if dist.get_rank() else []
    with pytest.raises(LayoutError, match=r"'0\.base\.weight' is a TwoTensor.*pass its module in `ignore`"):
        ShardLite(plain, group=group, stage=stage, ignore=given)
    plain.requires_grad_()
    with pytest.raises(LayoutError, match=r"if it is frozen, in `replicate`"):
        ShardLite(plain, group=group, stage=stage, replicate=[each.base for each in plain])
