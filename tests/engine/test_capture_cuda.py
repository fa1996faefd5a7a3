"""A whole step in a CUDA graph has the bits of steps without one.

`tests/comm/streams/test_stream_races.py` captures steps on a simulated GPU, which refuses what CUDA refuses.
"""

import pytest
import torch
from torch import nn

from shardlite import AdamW, Precision, ShardLite
from shardlite.lab.ranks import only_rank

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

WIDTH, WARM_UP, STEPS = 256, 4, 9


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.rise, self.fall = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.fall(torch.tanh(self.rise(x)))


def train(group, stage, *, captured):
    """Return the losses and the weights of a run whose later steps are replayed, or launched."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), *[Block() for _ in range(4)], nn.Linear(WIDTH, 1)).cuda()
    model = ShardLite(net, stage=stage, units=Block, group=group, precision=Precision(compute=torch.bfloat16))
    optimizer = AdamW(model.parameters(), lr=1e-3)
    x = torch.zeros(32, WIDTH, device="cuda")
    losses = []

    def step():
        loss = model(x).float().square().mean()
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    replay = None
    for attempt in range(STEPS):
        x.normal_(generator=torch.Generator(device="cuda").manual_seed(attempt))
        if captured and attempt == WARM_UP:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                loss = step()
            replay = graph.replay
        if replay is None:
            losses.append(step().clone())
        else:
            replay()
            losses.append(loss.clone())
    return losses, model.full_state_dict()


@pytest.mark.parametrize("stage", [3, 2, 1, 0])
def test_a_captured_step_has_the_bits_of_a_launched_one(stage):
    with only_rank(torch.device("cuda")) as group:
        launched, captured = (train(group, stage, captured=captured) for captured in (False, True))
    assert all(map(torch.equal, launched[0], captured[0]))
    assert all(torch.equal(weight, captured[1][name]) for name, weight in launched[1].items())
