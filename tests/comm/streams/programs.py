"""Programs that train on a simulated GPU, with all combinations of streams, memory and passes."""

import gc
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial, wraps
from unittest import mock

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardlite import AdamW, EscapedViewWarning, Precision, Route, ShardLite
from shardlite.engine import backward
from shardlite.params import Weights
from tests.comm.streams.simulated_gpu import Gpu
from tests.support.internals import units

BF16 = Precision(compute=torch.bfloat16)
WIRE = Precision(compute=torch.bfloat16, reduce=torch.bfloat16)
SPLIT = Precision(compute=torch.bfloat16, master="split24")
WIDTH = 32


class Block(nn.Module):
    inner = 2 * WIDTH

    def __init__(self):
        super().__init__()
        self.rise, self.fall = nn.Linear(WIDTH, self.inner), nn.Linear(self.inner, WIDTH)

    def forward(self, x):
        return x + self.fall(torch.tanh(self.rise(x)))


class Wide(Block):
    """Its shard has five blocks of statistics on four ranks, and so five slices if these are as short as can be."""

    inner = 8 * WIDTH


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

    def __init__(self, block=Block, *, depth=4, units=None, state="fp32", in_backward=False, clip=True, **options):
        self.model = ShardLite(net(block, depth), units=units or block, **options)
        self.optimizer = AdamW(self.model.parameters(), lr=0.01, state=state, in_backward=in_backward)
        self.clips = clip and not in_backward

    def step(self, times=1):
        for _ in range(times):
            loss(self.model).backward()
            self.finish()

    def finish(self):
        if self.clips:
            self.model.clip_grad_norm_(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


RUNS = {
    **{f"stage {stage}": {"stage": stage} for stage in range(4)},
    **{f"stage {stage}, ring": {"stage": stage, "route": Route(transport="p2p")} for stage in range(4)},
    **{f"in_backward, stage {stage}": {"stage": stage, "in_backward": True} for stage in range(4)},
    "in_backward, ring": {"in_backward": True, "route": Route(transport="p2p")},
    "direct": {"route": Route(transport="p2p", algorithm="direct")},
    "fast": {"route": Route(transport="collectives", reduce="fast")},
    "bf16": {"precision": BF16},
    "bf16 on the wire": {"precision": WIRE},
    "split24": {"precision": SPLIT},
    "split24, stage 1": {"precision": SPLIT, "stage": 1},
    "int8": {"state": "int8"},
    "compact": {"precision": SPLIT, "state": "int8", "in_backward": True},
    "quantized": {"precision": Precision(quantized_gather=True)},
    "far prefetch": {"prefetch": 3},
    "no prefetch": {"prefetch": 0},
    "kept until backward": {"reshard_after_forward": False},
    "checkpointed": {"block": Checkpointed},
    "checkpointed, reentrant": {"block": Reentrant},
    "checkpointed, in_backward": {"block": Checkpointed, "in_backward": True},
}


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


def _fail(*_, **__):
    raise KeyError("as out of memory")


def evaluates(training):
    training.model.eval()
    with torch.no_grad():
        loss(training.model)
    training.model.train()


def leaves_out(training, block):
    with mock.patch.object(training.model.module[block], "forward", lambda x: x):
        training.step()
    training.step()


def needs_no_weights(training):
    block = training.model.module[1]
    with mock.patch.object(block, "forward", lambda x: x + block.rise.weight.mean()):  # needs a shape only
        training.step()
    training.step()


def leaves_out_a_bias(training):
    layer = training.model.module[3].fall
    with mock.patch.object(layer, "forward", lambda x: torch.nn.functional.linear(x, layer.weight)):
        training.step()
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


EVENTS: dict[str, Callable[[Training], None]] = {
    "no_sync": accumulates,
    "no_sync, sharded": partial(accumulates, sharded=True),
    "an exception in a forward": fails_in_forward,
    "an exception in a backward": fails_in_backward,
    "an evaluation": evaluates,
    "a unit that is left out": partial(leaves_out, block=2),
    "the last unit of a backward is left out": partial(leaves_out, block=1),
    "a unit whose weights the backward does not need": needs_no_weights,
    "a bias that is left out": leaves_out_a_bias,
    "gathered()": gathers,
    "a load": loads,
    "a save": saves,
    "frozen parameters": freezes,
}


NOT_IN_BACKWARD = {"no_sync", "no_sync, sharded", "an exception in a forward", "an exception in a backward"}
"""Steps in the backward cannot be taken back, and take one backward each."""


class OnSide(torch.autograd.Function):
    """A linear layer on another stream. The order that PyTorch's engine keeps in a backward is kept by hand."""

    @staticmethod
    def forward(ctx, x, weight, bias, gpu, side):
        ctx.save_for_backward(x, weight)
        ctx.gpu, ctx.side = gpu, side
        side.wait_stream(gpu.current())
        with gpu.on(side):
            out = torch.addmm(bias, x, weight.t())
        gpu.current().wait_stream(side)
        out.record_stream(gpu.current())
        return out

    @staticmethod
    def backward(ctx, grad):
        gpu, side = ctx.gpu, ctx.side
        side.wait_stream(gpu.current())
        with gpu.on(side):
            x, weight = ctx.saved_tensors
            grads = [grad @ weight, grad.t() @ x, grad.sum(0)]
            gpu.hand_over(*grads)
        for each in (grad, x):
            each.record_stream(side)
        return *(each if need else None for each, need in zip(grads, ctx.needs_input_grad, strict=False)), None, None


class TwoStreams(nn.Module):
    """Two layers side by side. In a backward, the one on the other stream comes first."""

    gpu = side = None

    def __init__(self, trains_both):
        super().__init__()
        self.here, self.there = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.there.requires_grad_(trains_both)

    def forward(self, x):
        other = torch.sin(x)
        here = self.here(x)
        return x + here + OnSide.apply(other, self.there.weight, self.there.bias, self.gpu, self.side)


class CalledOnSide(TwoStreams):
    """The module itself is called on the other stream."""

    def forward(self, x):
        self.side.wait_stream(self.gpu.current())
        with self.gpu.on(self.side):
            there = self.there(x)
        here = self.here(x)
        self.gpu.current().wait_stream(self.side)
        there.record_stream(self.gpu.current())
        return x + here + there


WORLD_SIZE = 4


def on_ranks(program):
    """Run a program on a simulated GPU, and drop there what it leaves."""

    @wraps(program)
    def run(gpu: Gpu, *arguments, **options) -> None:
        with gpu.ranks(WORLD_SIZE):
            program(gpu, *arguments, **options)
            gc.collect()

    return run


@on_ranks
def trains(gpu: Gpu, name: str, **options) -> None:
    """Train for a few steps, and drop the model."""
    Training(**RUNS[name], **options).step(4)


def reduces_in_slices(gpu: Gpu, name: str) -> None:
    """Train blocks whose reductions go in slices."""
    gpu.slice_nbytes = 1
    trains(gpu, name, block=Wide)


@on_ranks
def is_interrupted(gpu: Gpu, event: str, **options) -> None:
    """Do something else between steps, twice."""
    training = Training(**options)
    training.step(2)
    for _ in range(2):
        EVENTS[event](training)
        training.step()


@on_ranks
def is_dropped(gpu: Gpu, where: str, transport: str = "collectives") -> None:
    """Drop a model with operations in flight, as a program does that runs out of memory."""
    training = Training(route=Route(transport=transport), prefetch=2)
    training.step(2)
    if where == "forward":
        training.model.module[2].register_forward_pre_hook(_fail)
    else:
        training.model.module[3].fall.register_full_backward_pre_hook(_fail)
    with suppress(KeyError):
        loss(training.model).backward()
    assert where == "backward" or any(unit.phase is Weights.GATHERING for unit in units(training.model))
    model = weakref.ref(training.model)
    del training
    gc.collect()
    assert model() is None


@on_ranks
def is_replaced(gpu: Gpu) -> None:
    """Drop models with operations in flight, each on a stream that waits for no other one."""
    for _ in range(4):
        with gpu.on(gpu.stream()):
            training = Training(prefetch=2)
            training.step()
            training.model.module[2].register_forward_pre_hook(_fail)
            with suppress(KeyError):
                loss(training.model)
            assert any(unit.phase is Weights.GATHERING for unit in units(training.model))
            del training
            gc.collect()


@on_ranks
def has_two_streams(gpu: Gpu, block: type[TwoStreams], *, trains_both: bool, **options) -> None:
    """Train a model whose blocks compute on two streams."""
    TwoStreams.gpu, TwoStreams.side = gpu, gpu.stream("side")
    Training(partial(block, trains_both), units=block, **options).step(3)


@on_ranks
def grows(gpu: Gpu, **options) -> None:
    """Use a unit that earlier steps have left out: it is not in the gather order."""
    training = Training(**options)
    with mock.patch.object(training.model.module[2], "forward", lambda x: x):
        training.step(2)
    training.step(2)


KEPT = "a view that is kept"


def keeps_a_view(training):
    kept = []
    handle = training.model.module[2].register_forward_hook(lambda block, *_: kept.append(block.rise.weight.view(-1)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EscapedViewWarning)
        training.step()
    handle.remove()


@on_ranks
def moves(gpu: Gpu, event: str, **options) -> None:
    """Go on with a run on another stream, and come back; before that, or there, `event` leaves something in a cache."""
    training = Training(**options)
    training.step()
    if event != KEPT:  # else no unit has a buffer when the run moves
        EVENTS[event](training)
        loss(training.model)
    own = gpu.stream("own")
    own.wait_stream(gpu.current())
    with gpu.on(own):
        training.step(2)
        if event == KEPT:
            keeps_a_view(training)
        loss(training.model)
    gpu.current().wait_stream(own)
    training.step()


@on_ranks
def alternates(gpu: Gpu, **options) -> None:
    """Evaluate on two streams by turns. No stream waits for the other: only weights are read, of a step before both."""
    training = Training(**options)
    training.step()
    own = gpu.stream("own")
    own.wait_stream(gpu.current())
    for turn in range(6):
        with gpu.on(own if turn % 2 else gpu.current()):
            evaluates(training)
    gpu.current().wait_stream(own)


@on_ranks
def accumulates_elsewhere(gpu: Gpu, dims=(1, 2), **options) -> None:
    """Have gradients on another stream, as parameters do that were used there first: those with so many dimensions."""
    side = gpu.stream("side")

    def deliver(take, unit, param):
        if param.ndim not in dims:
            real(take, unit, param)
            return
        side.wait_stream(gpu.current())
        with gpu.on(side):
            grad = torch._C.TensorBase.grad  # as autograd sets it
            grad.__get__(param).record_stream(side)
            grad.__set__(param, grad.__get__(param).clone())
            real(take, unit, param)
        gpu.current().wait_stream(side)

    real = backward._deliver
    with mock.patch.object(backward, "_deliver", deliver):
        Training(**options).step(3)


@on_ranks
def has_two_models(gpu: Gpu) -> None:
    """Train two models by one loss."""
    first, second = Training(), Training(stage=2)
    for _ in range(3):
        (loss(first.model) + loss(second.model)).backward()
        first.finish()
        second.finish()
