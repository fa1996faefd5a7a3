"""No two streams of a GPU touch the same bytes in an order of their own, whatever a program does."""

import gc
from contextlib import suppress
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardlite import AdamW, Precision, ShardLite
from tests.comm.streams.simulated_gpu import Gpu

BF16 = Precision(compute=torch.bfloat16)
WIRE = Precision(compute=torch.bfloat16, reduce=torch.bfloat16)
SPLIT = Precision(compute=torch.bfloat16, master="split24")
WIDTH = 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.rise, self.fall = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.fall(torch.tanh(self.rise(x)))


class Checkpointed(Block):
    reentrant = False

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class Reentrant(Checkpointed):
    reentrant = True


def net(block=Block, depth=4):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *[block() for _ in range(depth)], nn.Linear(WIDTH, WIDTH))


def loss(model):
    return model(torch.randn(2, WIDTH)).float().square().mean()


class Training:
    """A model on a simulated GPU, and its optimizer."""

    def __init__(self, block=Block, *, state="fp32", in_backward=False, clip=True, **options):
        self.model = ShardLite(net(block), units=block, **options)
        self.optimizer = AdamW(self.model.parameters(), lr=0.01, state=state, in_backward=in_backward)
        self.clips = clip and not in_backward

    def step(self):
        loss(self.model).backward()
        self.finish()

    def finish(self):
        if self.clips:
            self.model.clip_grad_norm_(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def assert_no_race(gpu, drop=()):
    """What the program has dropped is freed, too."""
    del drop
    gc.collect()
    assert not gpu.races, "\n".join(f"{count} x {race}" for race, count in gpu.races.most_common(8))


RUNS = {
    **{f"stage {stage}": {"stage": stage} for stage in range(4)},
    **{f"stage {stage}, ring": {"stage": stage, "transport": "p2p"} for stage in range(4)},
    **{f"in_backward, stage {stage}": {"stage": stage, "in_backward": True} for stage in range(4)},
    "in_backward, ring": {"in_backward": True, "transport": "p2p"},
    "direct": {"transport": "p2p", "algorithm": "direct"},
    "fast": {"transport": "collectives", "reduce": "fast"},
    "bf16": {"precision": BF16},
    "bf16 on the wire": {"precision": WIRE},
    "split24": {"precision": SPLIT},
    "split24, stage 1": {"precision": SPLIT, "stage": 1},
    "int8": {"state": "int8"},
    "compact": {"precision": SPLIT, "state": "int8", "in_backward": True},
    "quantized": {"quantized_gather": True},
    "far prefetch": {"prefetch": 3},
    "no prefetch": {"prefetch": 0},
    "kept until backward": {"reshard_after_forward": False},
    "checkpointed": {"block": Checkpointed},
    "checkpointed, reentrant": {"block": Reentrant},
    "checkpointed, in_backward": {"block": Checkpointed, "in_backward": True},
}


@pytest.mark.parametrize("lag", [0, 3])
@pytest.mark.parametrize("name", RUNS)
def test_training(name, lag):
    gpu = Gpu(lag)
    with gpu.ranks(4):
        training = Training(**RUNS[name])
        for _ in range(4):
            training.step()
        del training
        assert_no_race(gpu)


def accumulates(training, **options):
    with training.model.no_sync(**options):
        loss(training.model).backward()
    training.step()


def fails_in_forward(training):
    handle = training.model.module[3].register_forward_pre_hook(_fail)
    with suppress(KeyError):
        loss(training.model)
    handle.remove()
    training.step()


def fails_in_backward(training):
    hook = training.model.module[2].fall.register_full_backward_pre_hook(_fail)
    with suppress(KeyError):
        loss(training.model).backward()
    hook.remove()
    training.model.zero_grad()
    training.step()


def _fail(*_):
    raise KeyError("as out of memory")


def evaluates(training):
    training.model.eval()
    with torch.no_grad():
        loss(training.model)
    training.model.train()


def leaves_out_a_unit(training):
    training.model.module[2].forward = lambda x: x
    training.step()
    del training.model.module[2].forward
    training.step()


def gathers(training):
    with training.model.gathered():
        for param in training.model.module.parameters():
            param.data.mul_(0.5)


def loads(training):
    training.model.load_full_state_dict(training.model.full_state_dict())


def saves(training):
    training.model.full_state_dict()
    training.optimizer.state_dict()


def freezes(training):
    training.model.module[1].requires_grad_(False)
    training.step()
    training.model.module[1].requires_grad_(True)


EVENTS = {
    "no_sync": accumulates,
    "no_sync, sharded": partial(accumulates, sharded=True),
    "an exception in a forward": fails_in_forward,
    "an exception in a backward": fails_in_backward,
    "an evaluation": evaluates,
    "a unit that is left out": leaves_out_a_unit,
    "gathered()": gathers,
    "a load": loads,
    "a save": saves,
    "frozen parameters": freezes,
}


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("name", EVENTS)
def test_between_steps(name, stage):
    gpu = Gpu(1)
    with gpu.ranks(4):
        training = Training(stage=stage)
        for _ in range(2):
            training.step()
        for _ in range(2):
            EVENTS[name](training)
            training.step()
        del training
        assert_no_race(gpu)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("transport", ["collectives", "p2p"])
def test_a_model_that_is_dropped_with_operations_in_flight(where, transport):
    gpu = Gpu(1)
    with gpu.ranks(4):
        training = Training(transport=transport)
        for _ in range(2):
            training.step()
        if where == "forward":
            training.model.module[3].register_forward_pre_hook(_fail)
        else:
            training.model.module[2].fall.register_full_backward_pre_hook(_fail)
        with suppress(KeyError):
            loss(training.model).backward()
        del training
        assert_no_race(gpu)


def test_two_models():
    gpu = Gpu(1)
    with gpu.ranks(4):
        first, second = Training(), Training(stage=2)
        for _ in range(3):
            together = loss(first.model) + loss(second.model)
            together.backward()
            first.finish()
            second.finish()
            del together
        del first, second
        assert_no_race(gpu)
