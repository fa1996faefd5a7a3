"""A whole step in a CUDA graph has the bits of steps without one.

`test_capture.py` captures steps on a simulated GPU, which refuses what CUDA refuses. Only the first test of this file
has run on a GPU. **The tests of `model.capture` have never run.**
"""

from functools import partial

import pytest
import torch
from torch import nn

from shardlite import AdamW, PhaseError, Precision, ShardLite
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


class Program:
    """A model whose step is captured by `model.capture`, or launched."""

    def __init__(self, group, *, captured, stage=3, lr=1e-3, dropout=0.0):
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH), *[Block() for _ in range(4)], nn.Dropout(dropout), nn.Linear(WIDTH, 1)]
        compute = Precision(compute=torch.bfloat16)
        self.model = ShardLite(nn.Sequential(*layers).cuda(), stage=stage, units=Block, group=group, precision=compute)
        self.optimizer = AdamW(self.model.parameters(), lr=lr)
        self.step = self.model.capture(self.train) if captured else self.train

    def train(self, x, read=lambda loss: None):
        self.optimizer.zero_grad()
        loss = self.model(x).float().square().mean()
        loss.backward()
        self.model.clip_grad_norm_(1.0)
        self.optimizer.step()
        read(loss)
        return loss.detach()

    def steps(self, numbers, rows=32):
        draw = partial(torch.randn, rows, WIDTH, device="cuda")
        return [self.step(draw(generator=torch.Generator("cuda").manual_seed(each))).clone() for each in numbers]


def evaluated(program):
    program.model.eval()
    with torch.no_grad():
        out = program.model(torch.ones(4, WIDTH, device="cuda"))
    program.model.train()
    return out


@pytest.mark.parametrize("stage", [3, 2, 0])
def test_a_step_captured_by_one_call_has_the_bits_of_a_launched_one(stage):
    """Other shapes, evaluations, `gathered()` and a changing learning rate lie between the steps."""
    found = []
    for captured in (False, True):
        with only_rank(torch.device("cuda")) as group:
            rate = torch.tensor(1e-3, device="cuda")
            program = Program(group, captured=captured, stage=stage, lr=rate)
            outputs = [*program.steps(range(6)), evaluated(program), *program.steps(range(6, 8))]
            outputs += program.steps(range(8, 10), rows=48)
            program.optimizer.param_groups[0]["lr"].fill_(1e-4)
            outputs += program.steps(range(10, 12))
            with program.model.gathered(), torch.no_grad():
                program.model.module[0].weight.mul_(0.5)
            outputs += [*program.steps(range(12, 18)), evaluated(program)]
            found.append([*outputs, *program.model.full_state_dict().values()])
    assert all(map(torch.equal, *found))


def test_each_replay_draws_new_numbers():
    with only_rank(torch.device("cuda")) as group:
        program = Program(group, captured=True, lr=0.0, dropout=0.5)
        assert len({float(loss) for loss in program.steps([7] * 8)}) == 8


def test_a_capture_that_cuda_refuses_leaves_the_run_as_it_was():
    found = []
    for fails in (False, True):
        with only_rank(torch.device("cuda")) as group:
            program = Program(group, captured=True)
            program.steps(range(3))
            if fails:
                program.step._step = partial(program.train, read=float)
                with pytest.raises(PhaseError, match="in the step, the host must not wait for the GPU"):
                    program.steps([50])
                program.step._step = program.train
            found.append([*program.steps(range(3, 9)), *program.model.full_state_dict().values()])
    assert all(map(torch.equal, *found))


def test_former_graphs_free_their_memory():
    with only_rank(torch.device("cuda")) as group:
        program = Program(group, captured=True)
        program.steps(range(6))
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        for rows in (48, 32) * 4:
            program.steps([1], rows=rows)
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() <= 1.5 * before
