"""`AdamW` on parameters other than shards, alone or with shards, takes the steps of PyTorch's fused optimizer."""

import pytest
import torch
from torch import nn

from shardlite.errors import NonFiniteError, PhaseError
from shardlite.optim.adamw import AdamW
from shardlite.params import ShardInfo
from tests.support.optim_cases import HYPER, PaddedTwins, assert_same, make_arena, plain_params, set_grads, shard_params


def step_both(pairs, seeds):
    for seed in seeds:
        for params, optimizer in pairs:
            set_grads(params, seed)
            optimizer.step()


@pytest.mark.parametrize("options", [{}, {"state": "int8"}, {"in_backward": True}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_they_have_the_bits_of_torch_fused(dtype, options):
    ours, theirs = ([nn.Parameter(p.detach().to(dtype)) for p in plain_params()] for _ in range(2))
    mine, torchs = AdamW(ours, **HYPER, **options), torch.optim.AdamW(theirs, **HYPER, fused=True)
    for seed in range(5):
        for params, optimizer in ((ours, mine), (theirs, torchs)):
            for param in params:
                param.grad = torch.full_like(param, 0.1 + seed).sin_()
            optimizer.step()
    assert_same(ours, theirs)
    assert_same([mine.state[p]["exp_avg_sq"] for p in ours], [torchs.state[p]["exp_avg_sq"] for p in theirs])


@pytest.mark.parametrize("flag", [0.0, 1.0, 2.0, float("nan")])
def test_shards_and_others_are_stepped_and_left_out_together(flag):
    arena, others = make_arena(), plain_params()
    optimizer, twins = AdamW([*others[:2], *arena.params, *others[2:]], **HYPER), PaddedTwins(arena.params)
    theirs = plain_params()
    torchs = torch.optim.AdamW(theirs, **HYPER, fused=True)
    for seed in range(3):
        arena.new_grads(seed)
        twins.take_grads()
        set_grads(others, seed)
        set_grads(theirs, seed)
        for each in (optimizer, twins.optimizer, torchs):
            each.found_inf, each.grad_scale = torch.tensor(flag if seed == 1 else 0.0), torch.tensor(2.0)
            if each is optimizer or seed != 1 or flag == 0:
                each.step()
    twins.assert_same()
    assert_same(others, theirs)
    assert {entry["step"].item() for entry in optimizer.state.values()} == {3.0 - (flag != 0)}


def test_a_norm_is_that_of_shards_and_others_and_changes_no_gradient():
    arena, others = make_arena([64]), plain_params()
    set_grads(others, 0)
    optimizer = AdamW([*others, *arena.params], lr=0.1, eps=1e-3, max_norm=0.5)
    grads = [param.grad.clone() for param in (*others, *arena.params)]
    before = [param.detach().clone() for param in others]
    optimizer.step()
    assert_same([param.grad for param in (*others, *arena.params)], grads)
    norm = torch.cat([grad.flatten() for grad in grads]).norm()
    torch.testing.assert_close(optimizer.grad_norm, norm)
    twins = [nn.Parameter(value) for value in before]
    for twin, grad in zip(twins, grads, strict=False):
        twin.grad = grad * (0.5 / (norm + 1e-6))
    torch.optim.AdamW(twins, lr=0.1, eps=1e-3, fused=True).step()
    torch.testing.assert_close(others, twins)


def test_a_limit_of_updates_is_refused():
    params = plain_params()
    set_grads(params, 0)
    before = [param.detach().clone() for param in params]
    with pytest.raises(ValueError, match=r"max_update=2\.0 is supported only for parameters of ShardLite models"):
        AdamW(params, max_update=2.0).step()
    assert_same([param.detach() for param in params], before)


def test_backward_through_a_stepped_weight_is_pytorchs_error():
    weight = nn.Parameter(torch.ones(3))
    loss = (weight * weight).sum()
    weight.grad = torch.ones(3)
    AdamW([weight]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("state", ["fp32", "int8"])
def test_parameters_become_shards_and_ordinary_ones_again(state):
    """As on one rank, where wrapping and `unwrap()` leave the parameters the same objects."""
    params = plain_params()
    optimizer = AdamW(params, **HYPER, state=state)
    step_both([(params, optimizer)], range(2))
    memory, offset = torch.zeros(512), 0
    for param in params:
        memory[offset : offset + param.numel()] = param.detach().flatten()
        param.data = memory.data[offset : offset + param.numel()].view(param.shape)
        ShardInfo(0, None).mark(param)
        offset += -(-param.numel() // 32) * 32
    step_both([(params, optimizer)], range(2, 4))
    assert {entry["step"].item() for entry in optimizer.state.values()} == {4.0}
    assert {entry["exp_avg"].dtype for entry in optimizer.state.values()} == {
        torch.int8 if state == "int8" else torch.float32
    }
    for param in params:
        param.data = param.data.clone()
        ShardInfo.forget(param)
    step_both([(params, optimizer)], [4])
    assert {entry["step"].item() for entry in optimizer.state.values()} == {5.0}
    assert {entry["exp_avg"].dtype for entry in optimizer.state.values()} == {torch.float32}


def test_a_state_is_exchanged_between_shards_and_others():
    runs = []
    for make in (plain_params, shard_params):
        params = make()
        optimizer = AdamW(params, **HYPER)
        step_both([(params, optimizer)], range(2))
        others = make()
        for mine, other in zip(params, others, strict=True):
            other.data.copy_(mine.data)
        twin = AdamW(others, lr=7.0)
        twin.load_state_dict(optimizer.state_dict())
        step_both([(params, optimizer), (others, twin)], range(2, 4))
        assert_same([p.data for p in others], [p.data for p in params])
        runs.append([p.data for p in params])
    torch.testing.assert_close(runs[0], runs[1], rtol=1e-5, atol=1e-6)


def test_in_backward_they_are_stepped_by_hooks():
    weight, frozen = (nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = AdamW([weight, frozen.requires_grad_(False)], lr=0.1, in_backward=True)
    weight.sum().backward()
    assert (weight < 1).all()
    assert weight.grad is None
    with pytest.raises(PhaseError, match="in an earlier backward"):
        weight.sum().backward()
    optimizer.step()
    frozen.requires_grad_(True).sum().backward()
    optimizer.step()
    assert frozen.grad is None
    assert {entry["step"].item() for entry in optimizer.state.values()} == {1.0}
    (weight.sum() * float("nan")).backward()
    with pytest.raises(NonFiniteError, match="continue from a checkpoint"):
        optimizer.step()
