"""Buffers changed by a forward are replaced by rank 0's at the next forward, as in `DistributedDataParallel`."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from shardlite import LayoutError, ShardLite
from shardlite.engine.module_buffers import LARGE
from tests.support.models.residual import WIDTH, Block
from tests.support.twins.sharded import Turn, same_states


class Counting(nn.Module):
    """Has a queue that is written to, a number that is replaced, and a table that stays."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.instance = nn.InstanceNorm1d(WIDTH, track_running_stats=True)
        self.register_buffer("queue", torch.zeros(4, WIDTH))
        self.register_buffer("total", torch.zeros(()), persistent=False)
        self.register_buffer("table", torch.arange(100_000.0).expand(3, 100_000))
        self.register_buffer("large", torch.zeros(LARGE + 1))
        self.register_buffer("code", torch.zeros(WIDTH))
        self.register_buffer("stored_mean", torch.zeros(WIDTH))
        self.register_buffer("unset", None)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.block(x))
        x = self.instance(x[None].transpose(1, 2)).transpose(1, 2)[0]
        if self.training:
            with torch.no_grad():
                self.queue.copy_(torch.cat([self.queue[1:], x.mean(0, keepdim=True)]))
                self.total = self.total + x.abs().sum()
                self.code.data.mul_(0.9).add_(x.square().mean(0) + x[0])  # PyTorch counts neither this nor the next one
                self.large.data[:WIDTH].add_(x.square().mean(0) * 3)
            x = functional.batch_norm(x, self.stored_mean, torch.ones(WIDTH), training=True)
        return x + self.code + self.queue.mean(0) + self.table[0, 1]


def rows(turn: Turn) -> Tensor:
    return torch.randn(6, WIDTH, generator=turn.generator())


@pytest.mark.parametrize(("group", "stage"), [(2, 1), (3, 3)], indirect=["group"])
def test_buffers_are_those_of_ddp(group: Any, stage: int) -> None:
    """Trained with accumulation and evaluated in between, the buffers have the bits of DDP's all along."""
    model = ShardLite(Counting(), group=group, stage=stage)
    torch.manual_seed(0)
    plain = Counting()
    plain.table = plain.table.clone()  # DDP writes into all
    ddp = DistributedDataParallel(plain, process_group=group)
    rank = dist.get_rank(group)
    for step, mode in enumerate(["step", "local", "step", "evaluate", "evaluate", "step", "local", "local", "step"]):
        for each in (model, ddp):
            each.train(mode != "evaluate")
            if mode == "evaluate":
                with torch.no_grad():
                    each(rows(Turn(step, rank, 0)))
            elif mode == "local":
                with each.no_sync():
                    each(rows(Turn(step, rank, 0))).square().mean().backward()
            else:
                each(rows(Turn(step, rank, 0))).square().mean().backward()
                each.zero_grad()
        same_states(f"step {step}, {mode}", dict(model.named_buffers()), dict(ddp.module.named_buffers()))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.norm, self.out = Block(), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.block(x)))


@pytest.mark.stages(0, 3)
def test_two_forwards_before_a_backward(group: Any, stage: int) -> None:
    """Two forwards before one backward (GAN, BYOL): what autograd has saved of statistics may change in between."""
    model = ShardLite(Normed(), group=group, stage=stage, units=Block)
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Normed(), process_group=group)
    for step in range(2):
        for each in (model, ddp):
            each.zero_grad()
            real, fake = (each(rows(Turn(step, dist.get_rank(group), micro))) for micro in range(2))
            (real.mean() - fake.square().mean()).backward()
        same_states("buffer", dict(model.named_buffers()), dict(ddp.module.named_buffers()))
    assert all(shard.grad is not None for shard in model.parameters())


def test_only_what_has_changed_is_sent(group: Any) -> None:
    """What stays is not sent: once a forward has changed nothing, a number for each buffer is all that is."""
    model = ShardLite(Counting(), group=group)

    def sent() -> int:
        return sum(each.nbytes for unit in model.traffic().values() for kind, each in unit.items() if kind == "buffers")

    model(rows(Turn(0, 0, 0))).sum().backward()
    before = sent()
    model(rows(Turn(1, 0, 0))).sum().backward()
    changing = sent() - before
    assert 0 < changing < 300_000 + 4 * LARGE
    model.eval()
    model(rows(Turn(2, 0, 0))).sum().backward()
    before = sent()
    model(rows(Turn(3, 0, 0))).sum().backward()
    numbers = sent() - before
    assert 0 < numbers <= changing
    if dist.get_rank(group) == 0:
        assert changing - numbers > 4 * WIDTH * 4


def test_each_rank_may_have_its_own(group: Any) -> None:
    """On request, and in ignored modules, each rank has its own."""
    net = Counting()
    model = ShardLite(net, group=group, ignore=[net.norm])
    other = ShardLite(Counting(), group=group, buffers="own")
    for each in (model, other):
        for step in range(2):
            each(rows(Turn(step, dist.get_rank(group), 0))).sum().backward()
        each.eval()
        each(rows(Turn(2, dist.get_rank(group), 0)))
        told: list[Any] = [None, None]
        dist.all_gather_object(told, {name: buffer.clone() for name, buffer in each.named_buffers()}, group=group)
        same = {name for name in told[0] if torch.equal(told[0][name], told[1][name])}
        changing = {"queue", "total", "code", "large", "norm.running_mean", "norm.running_var", "instance.running_mean"}
        kept = changing if each is other else {name for name in changing if "norm." in name}
        assert changing - same == kept


def test_what_cannot_be_sent_is_refused_on_every_rank(group: Any) -> None:
    with pytest.raises(LayoutError, match=r'buffers must be "rank0" or "own", got \'all\''):
        ShardLite(Counting(), group=group, buffers="all")
    with pytest.raises(LayoutError, match="rank 0 has buffers 'rank0', rank 1 has buffers 'own'"):
        ShardLite(Counting(), group=group, buffers=("rank0", "own")[dist.get_rank(group)])
    model = ShardLite(Counting(), group=group)
    model(rows(Turn(0, 0, 0))).sum().backward()
    model.module.queue = torch.zeros(4 + dist.get_rank(group), WIDTH)
    with pytest.raises(LayoutError, match=r"buffer 'queue' does not have the same length on all ranks"):
        model(rows(Turn(0, 0, 0)))
