"""Freezing and unfreezing parameters between steps, and its savings."""

import copy

import pytest
import torch
from torch import nn, optim

from shardlite import AdamW, LayoutError, PhaseError, ShardLite
from tests.support.twins.plain import PaddedAdamW, Twin
from tests.support.twins.sharded import WIDE, local_parts, some_stages, take_step


def net(width: int = 24) -> nn.Sequential:
    torch.manual_seed(7)
    blocks = [
        nn.Sequential(nn.Linear(width, 40), nn.GELU(), nn.Linear(40, width), nn.LayerNorm(width)) for _ in range(3)
    ]
    return nn.Sequential(*blocks, nn.Linear(width, 5))


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(6, 24, generator=torch.Generator().manual_seed(100 * step + rank))


def freeze(module: nn.Module, step: int) -> None:
    """Freeze other parameters in each step: whole blocks, single biases, nothing."""
    for name, param in module.named_parameters():
        param.requires_grad_(
            {
                0: True,
                1: not name.startswith("1."),
                2: "bias" in name,
                3: not name.endswith("0.weight"),
                4: name == "3.weight",
            }.get(step, True)
        )


def assert_same(what: str, model: ShardLite, ours: dict, expected: dict) -> None:
    for name, part in local_parts(model, expected).items():
        torch.testing.assert_close(ours[name], part, rtol=0, atol=0, msg=lambda m, n=name: f"{what} of {n}: {m}")


@pytest.mark.ranks(1, 2, WIDE)
@pytest.mark.parametrize("start", [0, 2])
def test_training_follows_the_twin_whatever_is_frozen_meanwhile(group, start):
    world_size, rank = group.size(), group.rank()
    for stage in some_stages(2, 3):
        module = net()
        freeze(module, start)
        twin = Twin(copy.deepcopy(module), world_size)
        model = ShardLite(module, stage=stage, group=group)
        ours = AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
        theirs = PaddedAdamW(list(twin.masters.values()), lr=0.01, weight_decay=0.1)
        for step in [start, 1, 2, 3, 4, 5, 2]:
            freeze(module, step)
            freeze(twin.module, step)
            twin.backward(lambda plain, r, step=step: plain(batch(step, r)).pow(2).mean().backward())
            model(batch(step, rank)).pow(2).mean().backward()
            norms = model.clip_grad_norm_(0.1), twin.clip_grad_norm(0.1)
            torch.testing.assert_close(*norms, rtol=0, atol=0)
            shards = dict(model.named_parameters())
            grads = {name: param.grad for name, param in twin.masters.items() if param.grad is not None}
            assert {name for name, shard in shards.items() if shard.grad is not None} == set(grads)
            assert_same(f"stage {stage}, step {step}: gradient", model, {n: s.grad for n, s in shards.items()}, grads)
            for optimizer in (ours, theirs):
                take_step(optimizer)
            assert_same(f"stage {stage}, step {step}: weight", model, dict(model.named_parameters()), twin.masters)


def bytes_body(group, stage):
    """Return, for all parameters and for a few, the bytes of gradients and those sent to reduce them."""
    module = net(96)
    model = ShardLite(module, stage=stage, group=group, units=nn.Sequential)
    x = torch.randn(2, 96)
    figures = []
    for kept in ("", "0.weight", "bias"):
        for name, param in module.named_parameters():
            param.requires_grad_(name.endswith(kept))
        before = {unit: sent["reduce"].nbytes for unit, sent in model.traffic().items() if "reduce" in sent}
        model(x).sum().backward()
        after = {unit: sent["reduce"].nbytes for unit, sent in model.traffic().items() if "reduce" in sent}
        grads = {
            shard.grad.untyped_storage()._cdata: shard.grad for shard in model.parameters() if shard.grad is not None
        }
        held = sum(grad.untyped_storage().nbytes() for grad in grads.values())
        figures.append((held, sum(after.values()) - sum(before.values()), model.memory()["gradients"].now))
        model.zero_grad()
    return figures


def padded(numels) -> int:
    return sum(-(-numel // 32) * 32 for numel in numels) * 4


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("world_size", [2, WIDE])
def test_gradient_memory_and_traffic_are_for_trainable_parameters_only(cluster, world_size, stage):
    """Over all ranks: each element is kept once and sent `W - 1` times."""
    ranks = cluster.run(bytes_body, world_size, stage)
    for i, kept in enumerate(["", "0.weight", "bias"]):
        held = sum(rank[i][0] for rank in ranks)
        expected = padded(p.numel() for name, p in net(96).named_parameters() if name.endswith(kept))
        tail = 0 if kept else 4 * 32 * world_size * 5  # with all parameters shards are equal, so padded once more
        assert expected <= held <= expected + tail
        assert sum(rank[i][1] for rank in ranks) == (world_size - 1) * held
        assert [rank[i][2] for rank in ranks] == [rank[i][0] for rank in ranks]


def test_requires_grad_of_the_model_reaches_the_shards_at_once(group):
    model = ShardLite(net(), group=group)
    model.requires_grad_(False)
    assert not any(shard.requires_grad for shard in model.parameters())
    with torch.no_grad():
        model(batch(0, 0))
    model.requires_grad_(True)
    optimizer = optim.SGD((p for p in model.parameters() if p.requires_grad), lr=1.0)
    assert len(optimizer.param_groups[0]["params"]) == len(list(net().parameters()))
    model(batch(0, 0)).sum().backward()
    assert all(shard.grad is not None for shard in model.parameters())


def test_changing_it_while_gradients_are_accumulated_is_an_error(group):
    module = net()
    model = ShardLite(module, group=group)
    with model.no_sync():
        model(batch(0, 0)).sum().backward()
    module[1].requires_grad_(False)
    with pytest.raises(PhaseError, match=r"requires_grad was changed while accumulated gradients of unit"):
        model(batch(0, 0))
    model.zero_grad()
    model(batch(0, 0)).sum().backward()
    assert model.module[1][0].weight.grad is None


@pytest.mark.parametrize("stage", [2, 3])
def test_a_forward_without_gradients_may_freeze_parameters_between_a_forward_and_its_backward(group, stage):
    """PEFT's `disable_adapter()` freezes adapters while the reference model of DPO runs."""
    module, plain = net(), net()
    model = ShardLite(module, stage=stage, group=group)
    loss = model(batch(0, 0)).square().mean()
    module[1].requires_grad_(False)
    with torch.no_grad():
        model(batch(1, 0))
    module[1].requires_grad_(True)
    loss.backward()
    plain(batch(0, 0)).square().mean().backward()
    expected = {name: param.grad for name, param in plain.named_parameters()}
    ours = {name: shard.grad for name, shard in model.named_parameters()}
    assert_same("gradient", model, ours, expected)


def test_a_parameter_that_is_kept_in_few_bits_cannot_be_unfrozen(group):
    module = net()
    module[0].bfloat16().requires_grad_(False)
    model = ShardLite(nn.Sequential(module[0], Widen(), *module[1:]), group=group)
    assert model.module[0][0].weight.dtype == torch.bfloat16
    module[0].requires_grad_(True)
    with pytest.raises(LayoutError, match=r"'0.0.weight' was frozen when it was wrapped, .* stored in torch.bfloat16"):
        model(batch(0, 0).bfloat16())


class Widen(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.float()
