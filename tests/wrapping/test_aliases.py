"""Parameters that share memory with something else."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardlite import LayoutError, ShardLite
from tests.support.twins.sharded import Turn, trained

WORDS, WIDTH = 40, 8


class TiedByData(nn.Module):
    """Two parameters that share memory, as old scripts tie weights."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight.data = self.table.weight.data

    def forward(self, words: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(self.table(words))))


class Tied(TiedByData):
    """The same as one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.table.weight


def on_words(model: Any, turn: Turn) -> Tensor:
    words = torch.randint(WORDS, (4, 3), generator=turn.generator())
    return model(words).logsumexp(-1).mean()


@pytest.mark.stages(2, 3)
def test_parameters_of_one_memory_are_tied(group: Any, stage: int) -> None:
    """Training follows that of the model which is tied as it should be."""
    pair = trained(Tied, on_words, group, stage=stage)
    torch.manual_seed(0)
    module = TiedByData()
    model = ShardLite(module, group=group, stage=stage)
    assert module.head.weight is module.table.weight
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in pair.model.named_parameters()]
    theirs = pair.model.full_state_dict()
    model.load_full_state_dict(theirs)
    assert all(torch.equal(value, theirs[name]) for name, value in model.full_state_dict().items())


def part_of_another() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    module[1].weight.data = module[0].weight.data[:2]
    return module


def transposed() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[1].weight.data = module[0].weight.data.T
    return module


def with_a_buffer() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4))
    module[0].register_buffer("first_row", module[0].weight.detach()[0])
    return module


def with_an_attribute() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4))
    module[0].flat = module[0].weight.data.view(-1)
    return module


REFUSED = {
    part_of_another: "parameter '1.weight' and '0.weight' share memory",
    transposed: "parameter '1.weight' and '0.weight' share memory",
    with_a_buffer: "parameter '0.weight' and '0.first_row' share memory",
    with_an_attribute: "parameter '0.weight' and '0.flat' share memory",
}


@pytest.mark.parametrize("make", REFUSED)
def test_other_overlaps_are_refused(group: Any, make: Any) -> None:
    with pytest.raises(LayoutError, match=REFUSED[make]):
        ShardLite(make(), group=group)
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer, weight in zip(module, torch.randn(2, 4, 4), strict=True):
        layer.weight.data = weight  # neighbours in one buffer, as of a recurrent layer, do not overlap
    full = ShardLite(module, group=group).full_state_dict()
    assert not torch.equal(full["0.weight"], full["1.weight"])
