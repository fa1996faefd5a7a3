"""`WholeParameters` on a GPU, over NCCL: the bits of a plain run.

`tests/comm/transport/test_symmetric_cuda.py` trains them on several ranks of one GPU.
"""

import copy

import pytest
import torch
from torch import nn, optim

from shardlite import ShardLite, WholeParameters
from shardlite.lab.ranks import only_rank

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


class SameMuon(optim.Muon):
    """A class of the program: its weights are stepped as whole ones, not as updates in bf16."""


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(96, 160, bias=False), nn.Tanh(), nn.Linear(160, 96, bias=False)) for _ in range(3)]
    )


def train(model, optimizer):
    """Return the losses of five steps."""
    losses = []
    for step in range(5):
        x = torch.randn(32, 96, generator=torch.Generator().manual_seed(step)).cuda()
        loss = model(x).square().mean()
        losses.append(loss.detach())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("kind", [optim.Muon, SameMuon, optim.Adafactor])
@pytest.mark.parametrize("stage", [3, 2, 0])
def test_training_has_the_bits_of_a_plain_run(kind, stage):
    with only_rank(torch.device("cuda")) as group:
        net = make_net().cuda()
        plain = copy.deepcopy(net)
        model = ShardLite(net, stage=stage, group=group)
        losses = train(model, WholeParameters(model.parameters(), kind, lr=0.02))
        expected = train(plain, kind(plain.parameters(), lr=0.02))
        assert all(map(torch.equal, losses, expected))
        weights = model.full_state_dict()
        assert all(torch.equal(weights[name], weight.cpu()) for name, weight in plain.state_dict().items())
