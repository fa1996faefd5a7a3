"""Hybrid sharding, groups of some ranks, units that stay unsharded, and ignored parameters."""

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh

from shardlite import AdamW, LayoutError, Precision, ShardLite
from tests.support.internals import units
from tests.support.twins.plain import PaddedAdamW, Twin
from tests.support.twins.sharded import gathers, local_parts, same_bits, same_states, slow, with_twin

WIDTH = 20


def net() -> nn.Sequential:
    torch.manual_seed(11)
    blocks = [nn.Sequential(nn.Linear(WIDTH, 33), nn.GELU(), nn.Linear(33, WIDTH)) for _ in range(3)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 7))


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def loss(module: nn.Module, step: int, rank: int) -> torch.Tensor:
    x = batch(step, rank)
    if not isinstance(module, ShardLite):
        x = x.to(next(module.parameters()).dtype)  # as the wrapper does
    return module(x).float().pow(2).mean()


def train_beside(model: ShardLite, twin: Twin, rank: int, what: str) -> None:
    """Train both for some steps, some of them with accumulation; everything must be the same bits."""
    ours = AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    theirs = PaddedAdamW(list(twin.masters.values()), lr=0.01, weight_decay=0.1)
    for step in range(4):
        if step % 2:
            with model.no_sync(sharded=step == 1):
                loss(model, 50 + step, rank).backward()
            if step == 1:
                twin.keep(lambda plain, r: loss(plain, 51, r).backward())
        loss(model, step, rank).backward()
        accumulated = [53, 3] if step == 3 else [step]
        twin.backward(lambda plain, r, steps=accumulated: [loss(plain, each, r).backward() for each in steps])
        torch.testing.assert_close(model.clip_grad_norm_(0.1), twin.clip_grad_norm(0.1), rtol=0, atol=0)
        ours.step()
        theirs.step()
        ours.zero_grad()
        theirs.zero_grad()
        shards = dict(model.named_parameters())
        for name, part in local_parts(model, twin.masters).items():
            message = f"{what}, step {step}, {name}"
            torch.testing.assert_close(shards[name], part, rtol=0, atol=0, msg=lambda m, n=message: f"{n}: {m}")


@pytest.mark.parametrize("shape", [(2, 2), slow((4, 1)), slow((1, 4))])
@pytest.mark.parametrize("precision", [Precision(), slow(Precision(compute=torch.bfloat16, reduce=torch.bfloat16))])
@pytest.mark.ranks(4)
def test_hybrid_sharding_follows_its_twin_at_every_stage(group, shape, precision):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    rank = dist.get_rank()
    for stage in (0, 1, 2, 3):
        twin = Twin(net(), 4, precision=precision, replicas=shape[0])
        model = ShardLite(net(), stage=stage, group=mesh, precision=precision)
        train_beside(model, twin, rank, f"stage {stage}")
        same_states("weights", model.full_state_dict(rank=3), twin.masters if rank == 3 else {})


@pytest.mark.ranks(4)
def test_hybrid_sharding_holds_a_share_of_the_second_dimension(group):
    mesh = init_device_mesh("cpu", (2, 2))
    hybrid, two_ranks = (ShardLite(net(), group=ranks) for ranks in (mesh, mesh.get_group(1)))
    assert hybrid.memory()["parameters"] == two_ranks.memory()["parameters"]


@pytest.mark.ranks(4)
def test_who_used_what_is_counted_over_replicas_too(group):
    """A parameter that only one rank uses, and one that none does."""
    mesh = init_device_mesh("cpu", (2, 2))
    module = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in ("all", "one", "none")})
    model = ShardLite(module, group=mesh, units=lambda name, _: False)
    x = batch(0, 0)
    with model.gathered():
        y = module["all"](x)
        (module["one"](y) if dist.get_rank() == 2 else y).sum().backward()
    there = {name for name, shard in model.named_parameters() if shard.grad is not None}
    assert there == {"all.weight", "all.bias", "one.weight", "one.bias"}


@pytest.mark.ranks(4)
def test_a_mesh_has_one_dimension_or_two(group):
    with pytest.raises(LayoutError, match=r"one dimension \(shard\) or two \(replicate, shard\), got 3"):
        ShardLite(net(), group=init_device_mesh("cpu", (1, 2, 2)))
    twin = Twin(net(), 4)
    model = ShardLite(net(), group=init_device_mesh("cpu", (4,)))
    train_beside(model, twin, dist.get_rank(), "a mesh of one dimension")


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.ranks(4)
def test_a_group_need_not_have_the_first_rank(group, stage):
    """Ranks 2 and 3 train a model of their own beside ranks 0 and 1."""
    some = init_device_mesh("cpu", (2, 2)).get_group(1)
    first = dist.get_rank() - some.rank()
    twin = Twin(net(), 2)
    module = net()
    if some.rank() == 1:  # the values of the group's first rank count
        for param in module.parameters():
            nn.init.zeros_(param)
    model = ShardLite(module, stage=stage, group=some)
    train_beside(model, twin, some.rank(), f"ranks {first} and {first + 1}")
    assert bool(model.full_state_dict(rank=1)) == (some.rank() == 1)


def test_a_process_outside_the_group_is_told_so(group):
    with pytest.raises(LayoutError, match="not a member of the process group"):
        ShardLite(net(), group=dist.GroupMember.NON_GROUP_MEMBER)


def only_the_second(name, module):
    return name != "1"


@pytest.mark.parametrize(
    ("rule", "counts", "most"), [(True, [2, 2, 1], 1), (False, [1, 1, 1], 3), (only_the_second, [2, 1, 1], 2)]
)
def test_units_stay_gathered_on_request(group, rule, counts, most):
    """Check how often each unit is gathered in one step, and the most bytes of gather buffers."""
    twin = Twin(net(), group.size())
    model = ShardLite(net(), group=group, prefetch=0, reshard_after_forward=rule)
    train_beside(model, twin, group.rank(), f"reshard_after_forward={rule}")
    model.trace.take()
    model.ledger.reset_peak()
    loss(model, 0, 0).backward()
    gathered = gathers(model)
    assert [gathered[name] for name in ("0", "1", "2")] == counts
    held = model.memory()["gather buffers"]
    assert (held.peak // units(model)[1].nbytes, held.now) == (most, 0)


class Routed(nn.Module):
    """A shared layer, and an expert that is each rank's own."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.shared = nn.Linear(WIDTH, WIDTH)
        torch.manual_seed(50 + rank)
        self.expert = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.tensor(1.0 + rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.expert(self.shared(x)) * self.scale


def test_ignored_parameters_are_each_ranks_own(group):
    rank = group.rank()
    for stage in (0, 1, 2, 3):
        module = Routed(rank)
        own = {name: param for name, param in module.named_parameters() if not name.startswith("shared")}
        model, alone = with_twin(module, group, stage=stage, ignore=[module.expert, module.scale])
        assert all(dict(model.named_parameters())[name] is param for name, param in own.items())
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        x = batch(0, rank)
        model(x).pow(2).mean().backward()
        alone(x).pow(2).mean().backward()
        for name, param in own.items():
            same_bits(name, param.grad, alone.get_parameter(name).grad)
        with pytest.raises(LayoutError, match="3 of 5 gradients do not belong to the model"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        model.clip_grad_norm_(1.0)
        optimizer.step()
        torch.testing.assert_close(module.scale, alone.scale - 0.1 * alone.scale.grad, rtol=0, atol=0)
        expert = model.full_state_dict()["expert.weight"].clone()
        same_bits("whole", expert, module.expert.weight.detach())
        model.load_full_state_dict({name: torch.zeros_like(param) for name, param in alone.named_parameters()})
        assert not model.full_state_dict()["shared.weight"].any()
        same_bits("loaded", module.expert.weight.detach(), expert)


def test_what_cannot_be_ignored(group):
    module = Routed(0)
    with pytest.raises(LayoutError, match="no parameters to shard"):
        ShardLite(module, group=group, ignore=[module])
