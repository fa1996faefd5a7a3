"""Ranks with different numbers of batches finish together; means are over the ranks that have a batch."""

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from shardlite import AdamW, LayoutError, ShardLite
from tests.support.models.small import Residual
from tests.support.twins.plain import PaddedAdamW, Twin, ring_mean
from tests.support.twins.sharded import WIDE, local_parts, same_bits, same_states, take_step

WIDTH = 10
BATCHES = [3, 5, 1, 4]
"""By rank."""


def net() -> nn.Module:
    torch.manual_seed(3)
    blocks = nn.Sequential(*[Residual(WIDTH, 17) for _ in range(3)])
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), blocks, nn.Linear(WIDTH, 2))


def batches_of(rank: int, world_size: int) -> list[Tensor]:
    number = [BATCHES[0], BATCHES[2]][rank] if world_size == 2 else BATCHES[rank]
    return [torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * i + rank)) for i in range(number)]


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return functional.cross_entropy(model(x), torch.tensor([0, 1, 1, 0]))


def twin_steps(twin: Twin, world_size: int) -> list[tuple[int, Tensor, dict[str, Tensor]]]:
    """Train on the batches of all ranks; return for each step how many had one, the norm and the weights."""
    optimizer = PaddedAdamW(twin.masters.values(), lr=0.01)
    batches = [batches_of(rank, world_size) for rank in range(world_size)]
    steps = []
    for step in range(max(map(len, batches))):
        active = [rank for rank in range(world_size) if step < len(batches[rank])]
        twin._mean = partial(ring_mean, divisor=len(active))

        def run(module: nn.Module, rank: int, step: int = step, active: list[int] = active) -> None:
            if rank in active:
                loss_of(module, batches[rank][step]).backward()

        twin.backward(run)
        norm = twin.clip_grad_norm(0.1)
        take_step(optimizer)
        steps.append((len(active), norm, {name: master.detach().clone() for name, master in twin.masters.items()}))
    return steps


@pytest.mark.ranks(2, WIDE)
@pytest.mark.stages(2, 3)
def test_ranks_with_different_numbers_of_batches_finish_together(group, stage):
    rank, world_size = group.rank(), group.size()
    module = net()
    expected = twin_steps(Twin(copy.deepcopy(module), world_size), world_size)
    model = ShardLite(module, group=group, stage=stage)
    optimizer = AdamW(model.parameters(), lr=0.01)
    own, company = batches_of(rank, world_size), []
    for step, x in enumerate(model.join(iter(own))):
        assert model.joined == (step >= len(own))
        company.append(model.joined)
        if not model.joined:
            assert x is own[step]
        loss_of(model, x).backward()
        norm = model.clip_grad_norm_(0.1)
        take_step(optimizer)
        same_bits(f"step {step}: norm", norm, expected[step][1])
        parts = local_parts(model, expected[step][2])
        same_states(f"step {step}", dict(model.named_parameters()), parts)
    assert not model.joined
    assert company.count(False) == len(own)
    assert len(company) == max(BATCHES[:1] if world_size == 2 else BATCHES)


def test_accumulated_gradients_keep_the_weights_of_their_steps(group):
    """The third batch of two is accumulated with a fourth that only one rank has; each mean is over who had a batch."""
    rank = group.rank()
    model = ShardLite(net(), group=group)
    plain = net()
    own = [torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * i + rank)) for i in range(1 + rank)]
    both = [
        [torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * i + r)) for i in (0, 1)] for r in (0, 1)
    ]
    loop = model.join(own)
    with model.no_sync():
        loss_of(model, next(loop)).backward()
    loss_of(model, next(loop)).backward()
    (loss_of(plain, both[0][0]) / 2 + loss_of(plain, both[1][0]) / 2 + loss_of(plain, both[1][1])).backward()
    parts = local_parts(model, {name: param.grad for name, param in plain.named_parameters()})
    for name, shard in model.named_parameters():
        torch.testing.assert_close(shard.grad, parts[name], rtol=1e-5, atol=1e-7)
    assert next(loop, None) is None


def test_several_models_are_trained_in_one_loop(group):
    """Of a second model in the loop a rank without a batch counts no more, either; after the loop all count again."""
    rank = group.rank()
    first, second = ShardLite(net(), group=group), ShardLite(net(), group=group, stage=2)
    plain = net()
    x = torch.ones(4, WIDTH)
    for step, _ in enumerate(first.join(range(1 + rank), also=[second])):
        loss_of(second, x * (1 + rank)).backward()
        if step == 1:
            loss_of(plain, x * 2).backward()
            parts = local_parts(second, {name: param.grad for name, param in plain.named_parameters()})
            for name, shard in second.named_parameters():
                same_bits(name, shard.grad, parts[name])
        second.zero_grad()
    loss_of(second, x * (1 + rank)).backward()
    plain.zero_grad()
    ((loss_of(plain, x) + loss_of(plain, x * 2)) / 2).backward()
    parts = local_parts(second, {name: param.grad for name, param in plain.named_parameters()})
    for name, shard in second.named_parameters():
        torch.testing.assert_close(shard.grad, parts[name], rtol=1e-5, atol=1e-7)


@pytest.mark.ranks(4)
def test_evaluation_joins_too(group):
    """What the loop adds up itself it adds up where there is a batch."""
    model = ShardLite(net(), group=group)
    own = batches_of(group.rank(), 4)
    seen = 0
    with torch.no_grad():
        for x in model.join(own):
            model(x)
            seen += 0 if model.joined else 1
    assert seen == BATCHES[group.rank()]


def test_a_rank_without_a_batch_is_an_error_on_all_ranks(group):
    model = ShardLite(net(), group=group)
    assert list(model.join([])) == [], "no rank has a batch, so there is no step"
    expected = r"(?s)join\(\): rank 0 of 2 ranks got no batch.*sampler=DistributedSampler\(dataset\)"
    with pytest.raises(LayoutError, match=expected):
        next(model.join([1] if group.rank() else []))


@pytest.mark.stages(0, 2, 3)
def test_evaluations_of_different_lengths_inside_gathered(group, stage):
    """What errors tell: ranks may evaluate different numbers of batches, or end early, and train on."""
    model, other = (ShardLite(net(), group=group, stage=stage) for _ in range(2))
    twin, rank = net(), group.rank()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, other)]
    batches = batches_of(0, 2)
    for _ in range(2):
        twin.load_state_dict(model.full_state_dict())
        model.eval()
        with model.gathered(), torch.no_grad():
            for number, x in enumerate(batches):
                same_bits("an output", model(x), twin(x))
                if number == rank:
                    break
        model.train()
        for each, optimizer in zip((model, other), optimizers, strict=True):
            loss_of(each, batches[0]).backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, value in model.full_state_dict().items():
        same_bits(name, value, other.full_state_dict()[name])
