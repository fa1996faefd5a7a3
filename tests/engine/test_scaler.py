"""With `torch.amp.GradScaler` ranks agree on the scale and on skipped steps, and take the steps of a plain twin.

Every rank trains a twin of its own (see `plain.py`) with a scaler of its own on the batches of all ranks.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.amp.grad_scaler import GradScaler

from shardlite import AdamW, Precision, ShardLite
from tests.support.models.small import named
from tests.support.twins.plain import PaddedAdamW, Twin
from tests.support.twins.sharded import same_bits, some_stages, without_warnings

Make = Callable[..., optim.Optimizer]


def torchs(params: Any, **options: Any) -> optim.Optimizer:
    return optim.AdamW(params, lr=0.02, weight_decay=0.1, **options)


OPTIMIZERS: dict[str, tuple[Make, Make]] = {
    "ours": (lambda p: AdamW(p, lr=0.02, weight_decay=0.1), lambda p: PaddedAdamW(p, lr=0.02, weight_decay=0.1)),
    "foreach": (lambda p: torchs(p, foreach=True), lambda p: torchs(p, foreach=True)),
    "fused": (lambda p: torchs(p, fused=True), lambda p: torchs(p, fused=True)),
    "sgd": (lambda p: optim.SGD(p, lr=0.1, momentum=0.9), lambda p: optim.SGD(p, lr=0.1, momentum=0.9)),
}
"""For shards, and for the twin."""

BAD = {2: (-1, None), 4: (0, "last.bias"), 5: (-1, "last.weight")}
"""At which steps there is an infinity: on which rank, and in the loss or in the gradient of a parameter."""

SCALES = [2.0**9, 2.0**10, 2.0**9, 2.0**9, 2.0**8, 2.0**7, 2.0**7, 2.0**8]
"""After each step: halved after a bad one, doubled after two good ones in a row."""


def tiny() -> nn.Module:
    """Two slots of 32 elements: of four ranks two have nothing."""
    return named(last=nn.Linear(16, 1))


@dataclass(frozen=True)
class Way:
    """How a step is made, and with which precision."""

    optimizer: str
    unscale: bool
    half: bool

    def __str__(self) -> str:
        return f"{self.optimizer}-{'unscale' if self.unscale else 'step'}-{'fp16' if self.half else 'fp32'}"

    @property
    def precision(self) -> Precision:
        return Precision(compute=torch.float16, output=torch.float32) if self.half else Precision()

    def net(self) -> nn.Module:
        """Return two layers. PyTorch's fused kernels round the last `numel % 16` elements otherwise, so avoid these."""
        hidden, width = (32, 16) if self.optimizer == "fused" else (33, 5)
        torch.manual_seed(1)
        return named(first=nn.Linear(16, hidden), tanh=nn.Tanh(), last=nn.Linear(hidden, width))


@contextmanager
def infinity(module: nn.Module, name: str) -> Iterator[None]:
    """Make the last element of a gradient infinite."""

    def spoil(grad: Tensor) -> Tensor:
        grad = grad.clone()
        grad.view(-1)[-1] = math.inf
        return grad

    hook = module.get_parameter(name).register_hook(spoil)
    yield
    hook.remove()


def backward(model: Callable[[Tensor], Tensor], scaler: GradScaler, step: int, rank: int, world_size: int) -> None:
    """Run a backward of one rank."""
    culprit, name = BAD.get(step, (None, None))
    here = culprit is not None and culprit % world_size == rank
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(10 * step + rank))
    with infinity(model.module, name) if here and name else nullcontext():
        loss = model(x).square().mean()
        scaler.scale(loss * math.inf if here and not name else loss).backward()


def finish(way: Way, scaler: GradScaler, optimizer: optim.Optimizer, clip: Callable[[], Any]) -> None:
    if way.unscale:
        scaler.unscale_(optimizer)
        clip()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def agrees_body(group: Any, way: Way, stage: int) -> None:
    """Train eight steps like the twin."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    twin = Twin(way.net(), world_size, nn.Linear, precision=way.precision)
    model = ShardLite(way.net(), stage=stage, group=group, units=nn.Linear, precision=way.precision)
    ours, theirs = OPTIMIZERS[way.optimizer]
    optimizer, twins = ours(model.parameters()), theirs(twin.masters.values())
    scaler, twin_scaler = (GradScaler("cpu", init_scale=2.0**9, growth_interval=2) for _ in range(2))
    for step, scale in enumerate(SCALES):
        before = {name: shard.detach().clone() for name, shard in model.named_parameters()}
        twin.backward(lambda _, r, s=step: backward(twin, twin_scaler, s, r, world_size))
        backward(model, scaler, step, rank, world_size)
        finish(way, scaler, optimizer, lambda: model.clip_grad_norm_(0.01))
        finish(way, twin_scaler, twins, lambda: twin.clip_grad_norm(0.01))
        assert scaler.get_scale() == twin_scaler.get_scale() == scale, f"step {step}"
        for name, shard in model.named_parameters():
            whole = twin.masters[name].detach()
            expected = whole.reshape(-1) if stage == 0 else twin.part(name, whole, rank)
            same_bits(f"stage {stage}, step {step}: {name!r}", shard.detach().reshape(-1), expected)
            moved = not torch.equal(shard, before[name])
            assert moved == (step not in BAD and shard.numel() > 0)
    made = {int(state["step"]) for state in optimizer.state.values() if "step" in state}
    assert made <= {len(SCALES) - len(BAD)}


WAYS = [Way(name, unscale, half) for name in OPTIMIZERS for unscale in (True, False) for half in (False, True)]
PAIRWISE = [place for place in range(len(WAYS)) if (place // 4 + place // 2 + place) % 2]
"""The places of ways in which each two choices meet."""


@pytest.mark.parametrize(
    "way",
    [pytest.param(way, marks=() if place in PAIRWISE else pytest.mark.slow) for place, way in enumerate(WAYS)],
    ids=str,
)
def test_all_ranks_make_the_steps_of_the_twin(group: Any, way: Way) -> None:
    for stage in some_stages(2, 3):
        agrees_body(group, way, stage)


@pytest.mark.parametrize("way", WAYS[1::5], ids=str)
def test_one_rank_makes_the_steps_of_the_twin(cluster, way):
    cluster.check(agrees_body, 1, way, 3)


def tiny_body(group: Any, half: bool) -> list[Any]:
    """Return after each step the scale, and how many steps the optimizer has made."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    history = []
    for i, (name, (make, _)) in enumerate(OPTIMIZERS.items()):
        way = Way(name, i % 2 == 0, half)
        torch.manual_seed(1)
        model = ShardLite(tiny(), stage=1 + i % 3, group=group, precision=way.precision)
        assert (sum(shard.numel() for shard in model.parameters()) == 0) == (rank >= 2)
        optimizer, scaler = make(model.parameters()), GradScaler("cpu", init_scale=2.0**9, growth_interval=2)
        for step in range(len(SCALES)):
            backward(model, scaler, step, rank, world_size)
            finish(way, scaler, optimizer, lambda model=model: model.clip_grad_norm_(0.01))
            history.append((scaler.get_scale(), [int(each.get("step", -1)) for each in optimizer.state.values()]))
    return history


@pytest.mark.parametrize("half", [False, True])
def test_ranks_with_nothing_keep_the_same_scale_and_count_the_same_steps(cluster, half):
    histories = cluster.run(tiny_body, 4, half)
    assert all(history == histories[0] for history in histories)
    assert [scale for scale, _ in histories[0]] == SCALES * len(OPTIMIZERS)
    assert histories[0][7][1] == [5, 5]


@pytest.mark.ranks(4)
def test_a_scale_that_overflows_on_one_rank(group: Any) -> None:
    """All ranks lower it: 65504 / 30 is 2183, so 2^11 is the first scale that fits."""
    rank = dist.get_rank(group)
    model = ShardLite(tiny(), group=group, precision=Precision(compute=torch.float16))
    optimizer = OPTIMIZERS["ours"][0](model.parameters())
    scaler = GradScaler("cpu", init_scale=2.0**14)
    scales = []
    for _ in range(6):
        scaler.scale(model(torch.full((1, 16), 30.0 if rank == 1 else 0.5)).float().sum()).backward()
        finish(Way("ours", False, True), scaler, optimizer, lambda: None)
        scales.append(scaler.get_scale())
    assert scales == [2.0**13, 2.0**12, 2.0**11, 2.0**11, 2.0**11, 2.0**11]


@without_warnings
def test_a_scaler_that_is_switched_off(group: Any) -> None:
    """A scaler that is switched off leaves skipping to us."""
    model = ShardLite(tiny(), group=group)
    optimizer, scaler = OPTIMIZERS["ours"][0](model.parameters()), GradScaler("cpu", enabled=False)
    before = [shard.detach().clone() for shard in model.parameters()]
    scaler.scale(model(torch.full((1, 16), math.nan if dist.get_rank(group) else 1.0)).sum()).backward()
    finish(Way("ours", True, False), scaler, optimizer, lambda: None)
    assert model.skipped_steps == 1
    for shard, expected in zip(model.parameters(), before, strict=True):
        same_bits("a weight", shard.detach(), expected)


def test_an_optimizer_of_something_else(group: Any) -> None:
    """An optimizer of something else decides for itself, though the ranks have one scaler for both."""
    rank = dist.get_rank(group)
    model, plain = ShardLite(tiny(), group=group), nn.Linear(16, 1)
    optimizers = OPTIMIZERS["sgd"][0](model.parameters()), OPTIMIZERS["sgd"][0](plain.parameters())
    scaler = GradScaler("cpu", init_scale=2.0**9)
    before = plain.weight.detach().clone()
    scaler.scale(model(torch.full((1, 16), math.inf if rank else 1.0)).sum()).backward()
    scaler.scale(plain(torch.ones(1, 16)).sum()).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(plain.weight, before)
    assert scaler.get_scale() == 2.0**8
