"""`AdamW` with loss scaling: the flag and the scale that `torch.amp.GradScaler`, or a program, sets for a step."""

import pytest
import torch
from torch import nn

from shardlite.optim.adamw import AdamW
from shardlite.params import ShardInfo
from tests.support.optim_cases import HYPER, PaddedTwins, assert_same, make_arena, plain_params


def scaled_grads(arena, scaler, seed, bad):
    """Gradients of a scaled loss. A scale of 2^k changes no bit but the exponent, so 3 is mixed in."""
    arena.new_grads(seed)
    arena.flat_grad *= scaler.get_scale() * 3
    if bad:
        arena.params[-1].grad[0] = float("inf")


@pytest.mark.parametrize("unscale_first", [False, True])
def test_a_grad_scaler_makes_the_steps_of_torch_fused(unscale_first):
    arena = make_arena()
    optimizer, twins = AdamW(arena.params, **HYPER), PaddedTwins(arena.params)
    pairs = [(torch.amp.GradScaler("cpu", init_scale=2.0**10), each) for each in (optimizer, twins.optimizer)]
    for seed in range(5):
        scaled_grads(arena, pairs[0][0], seed, bad=seed in (0, 3))
        twins.take_grads()
        for scaler, each in pairs:
            scaler.scale(torch.zeros(()))  # it learns its device from a loss
            if unscale_first:
                scaler.unscale_(each)
            scaler.step(each)
            scaler.update()
        twins.assert_same()
        twins.assert_same_grads()
        twins.assert_same_states(optimizer)
    assert pairs[0][0].get_scale() == pairs[1][0].get_scale() == 2.0**8
    assert optimizer.state[arena.params[0]]["step"].item() == 3
    assert not hasattr(optimizer, "found_inf")


def test_a_grad_scaler_without_gradients():
    """A rank may have no gradient at all; the scaler then sets the number 0, not a tensor."""
    optimizer = AdamW(plain_params(), **HYPER)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    scaler.step(optimizer)
    assert len(optimizer.state) == 0


@pytest.mark.parametrize("flag", [1.0, 2.0, float("nan")])
def test_with_the_flag_nothing_changes(flag):
    """Two devices that both found an infinity make a flag of 2, which PyTorch does not see."""
    arena = make_arena()
    optimizer = AdamW(arena.params, **HYPER)
    optimizer.step()
    arena.new_grads(1)
    everything = [
        arena.flat,
        arena.flat_grad,
        *(value for state in optimizer.state.values() for value in state.values()),
    ]
    before = [tensor.clone() for tensor in everything]
    optimizer.found_inf, optimizer.grad_scale = torch.tensor(flag), torch.tensor(2.0)
    optimizer.step()
    assert_same(everything, before)


def test_narrow_gradients_are_divided_in_fp32():
    """1 / 2^16 is no normal number of fp16: dividing there would lose most of the gradient."""
    scale = 2.0**16
    flat = torch.randn(64)
    param, twin = nn.Parameter(flat.clone()), nn.Parameter(flat.clone())
    ShardInfo(0, None).mark(param)
    grad = torch.linspace(0.01, 0.3, 64).to(torch.float16)
    param.grad_dtype = torch.float16
    param.grad, twin.grad = grad.clone(), grad.float() / scale
    optimizer, twin_optimizer = AdamW([param], **HYPER), torch.optim.AdamW([twin], **HYPER, fused=True)
    optimizer.found_inf, optimizer.grad_scale = torch.zeros(()), torch.tensor(scale)
    for each in (optimizer, twin_optimizer):
        each.step()
    assert_same(param.data, twin.data)
    assert_same(param.grad, twin.grad.to(torch.float16))


def test_a_gradient_with_gaps_is_divided_in_place():
    param, twin = (nn.Parameter(torch.ones(32, 2)) for _ in range(2))
    ShardInfo(0, None).mark(param)
    memory = torch.randn(2, 32)
    param.grad, twin.grad = memory.t(), memory.t().contiguous()
    optimizer, twin_optimizer = AdamW([param], **HYPER), torch.optim.AdamW([twin], **HYPER, fused=True)
    for each in (optimizer, twin_optimizer):
        each.found_inf, each.grad_scale = torch.zeros(()), torch.tensor(3.0)
        each.step()
    assert_same(param.data, twin.data)
    assert_same(memory.t(), twin.grad)


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_gradients_that_lie_in_each_others_padding_are_divided_once(order):
    arena = make_arena([33, 40])
    memory, params = torch.randn(73), [arena.params[index] for index in order]
    params[0].grad, params[1].grad = (part.view(-1, 1) for part in memory.split([p.numel() for p in params]))
    before = memory.clone()
    optimizer = AdamW(arena.params, **HYPER)
    optimizer.found_inf, optimizer.grad_scale = torch.zeros(()), torch.tensor(2.0)
    optimizer.step()
    assert_same(memory, before / 2)
