"""`AdamW` against PyTorch's: bits on flat tensors, independence of how a model is sharded, use."""

import copy
from itertools import pairwise

import pytest
import torch
from shardlite_kernels import FORMATS
from torch import nn

from shardlite.optim.adamw import AdamW
from shardlite.params import ShardInfo
from tests.support.optim_cases import (
    HYPER,
    NUMELS,
    SCENARIOS,
    PaddedTwins,
    assert_same,
    by_cpu,
    fused_twin,
    make_arena,
    padded_numel,
    place_shards,
    run,
)
from tests.support.twins.sharded import WIDE


@pytest.fixture
def launches(monkeypatch):
    """The number of elements of each kernel call."""
    import shardlite.optim.counts

    numels, kernel = [], shardlite.optim.counts.adamw_cpu

    def counting(state, *args, **kwargs):
        numels.append(state.param.numel())
        kernel(state, *args, **kwargs)

    monkeypatch.setattr(shardlite.optim.counts, "adamw_cpu", counting)
    return numels


# Bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_an_arena_has_the_bits_of_torch_fused_on_the_flat_buffer(dtype):
    arena = make_arena(dtype=dtype)
    twin, twin_optimizer = fused_twin(arena)
    run(arena, AdamW(arena.params, **HYPER), 5, twin, twin_optimizer)
    assert_same(arena.flat, twin.data)


def test_one_kernel_call_steps_a_whole_arena(launches):
    arena = make_arena()
    run(arena, AdamW(reversed(arena.params), **HYPER), 2)
    assert launches == [sum(-(-numel // 32) * 32 for numel in NUMELS)] * 2


@pytest.mark.parametrize("world_size", [2, WIDE])
def test_bits_do_not_depend_on_how_the_buffer_is_cut(world_size):
    whole = make_arena([2048])
    start_values, shards = whole.flat.clone(), []
    run(whole, AdamW(whole.params, **HYPER), 3)
    for rank in range(world_size):
        start, stop = rank * 2048 // world_size, (rank + 1) * 2048 // world_size
        ranges = list(pairwise([start, start + 64, start + 96 + 32 * rank, stop]))
        shard = make_arena([b - a for a, b in ranges])
        shard.flat[: stop - start] = start_values[start:stop]
        optimizer = AdamW(shard.params, **HYPER)
        for seed in range(3):
            whole.new_grads(seed)
            shard.new_grads(seed)
            shard.flat_grad[: stop - start] = whole.flat_grad[start:stop]
            optimizer.step()
        shards.append(shard.flat[: stop - start])
    assert_same(torch.cat(shards), whole.flat)


def test_bits_do_not_depend_on_where_parameters_end():
    """A parameter of 33 elements on its own ends in PyTorch's other rounding; as part of an arena it must not."""
    arena = make_arena([33, 47])
    twin, twin_optimizer = fused_twin(arena)
    optimizer = AdamW(arena.params, **HYPER)
    for seed in range(4):
        arena.new_grads(seed)
        twin.grad = arena.flat_grad.clone()
        arena.params[seed % 2].grad = None  # so each parameter is a run of its own, which ends at its padding
        optimizer.step()
        arena.params[1 - seed % 2].grad = None
        arena.params[seed % 2].grad = _grad_view(arena, seed % 2)
        optimizer.step()
        twin_optimizer.step()
    assert_same(arena.flat, twin.data)


def _grad_view(arena, index):
    param = arena.params[index]
    return arena.flat_grad.as_strided(param.shape, param.stride(), param.storage_offset())


def test_padding_stays_zero():
    arena = make_arena()
    run(arena, AdamW(arena.params, **HYPER), 2)
    owned = torch.zeros_like(arena.flat, dtype=torch.bool)
    for param in arena.params:
        owned[param.storage_offset() : param.storage_offset() + param.numel()] = True
    assert not arena.flat[~owned].any()


# What does not belong together


def test_gradients_that_are_not_laid_out_alike_end_a_run(launches):
    arena = make_arena([64, 64, 64])
    twin, twin_optimizer = fused_twin(arena)
    arena.params[1].grad = arena.params[1].grad.clone()
    twin.grad = arena.flat_grad.clone()
    AdamW(arena.params, **HYPER).step()
    twin_optimizer.step()
    assert launches == [64, 64, 64]
    assert_same(arena.flat, twin.data)


def test_gradients_that_lie_side_by_side_in_two_storages_are_two_runs(launches):
    arena = make_arena([64, 64])
    memory = torch.randn(128)
    halves = [torch.frombuffer(memory.numpy(), dtype=torch.float32, count=64, offset=offset) for offset in (0, 256)]
    assert halves[1].data_ptr() - halves[0].data_ptr() == 256
    for param, half in zip(arena.params, halves, strict=True):
        param.grad = half.view(64, 1)
    AdamW(arena.params, **HYPER).step()
    assert launches == [64, 64]


def test_groups_have_their_own_hyper_parameters(launches):
    arena = make_arena([64, 64, 64])
    before = arena.flat.clone()
    groups = [{"params": arena.params[::2], "weight_decay": 0.5}, {"params": arena.params[1:2], "lr": 0.0}]
    AdamW(groups, lr=0.1, weight_decay=0.0).step()
    assert launches == [64, 64, 64]
    # The first step moves a weight by lr, after a decay by lr * weight_decay.
    decayed = before[:192] * torch.tensor([0.95, 1.0, 0.95]).repeat_interleave(64)
    moved = 0.1 * arena.flat_grad[:192].sign() * torch.tensor([1.0, 0.0, 1.0]).repeat_interleave(64)
    torch.testing.assert_close(arena.flat[:192], decayed - moved, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tight", [[1, 0], [0, 1]])
def test_a_gradient_that_lies_in_the_padding_of_another_is_not_taken_for_zeros(tight):
    arena = make_arena([33, 40])
    memory, params = torch.randn(73), [arena.params[index] for index in tight]
    params[0].grad, params[1].grad = (part.view(-1, 1) for part in memory.split([p.numel() for p in params]))
    AdamW(arena.params, **HYPER).step()
    assert not arena.flat[33:64].any()


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("moments", FORMATS)
def test_each_parameter_is_stepped_as_if_it_were_alone(moments, name):
    SCENARIOS[name].run(moments, by_cpu)


def test_the_state_of_a_frozen_parameter_moves_along():
    arena = make_arena([100, 33])
    optimizer, twins = AdamW(arena.params, **HYPER), PaddedTwins(arena.params)
    extra = nn.Parameter(torch.ones(5))
    for seed in range(4):
        arena.new_grads(seed)
        twins.take_grads()
        if seed == 1:
            arena.params[1].requires_grad_(False)
            optimizer.add_param_group({"params": [extra]})  # so everything finds a new place
        if seed in (1, 2):
            twins.flats[1].grad = None
        if seed == 3:
            arena.params[1].requires_grad_(True)
        optimizer.step()
        twins.optimizer.step()
        first, second = (optimizer.state[param]["exp_avg"] for param in arena.params)
        assert second.data_ptr() == first.data_ptr() + 128 * 4, "the arenas that were left are kept alive"
    twins.assert_same()
    twins.assert_same_states(optimizer)


# What else the buffers hold

GAPS = [4096, 0, 64, 96, 32 * 1001]


@pytest.mark.parametrize("gaps", [[], GAPS])
def test_moments_are_aligned_and_in_the_order_of_the_parameters(gaps):
    arena = make_arena(gaps=gaps)
    optimizer = AdamW(reversed(arena.params), **HYPER)
    optimizer.step()
    offsets = [optimizer.state[param]["exp_avg"].storage_offset() for param in arena.params]
    assert offsets == [sum(padded_numel(numel) for numel in NUMELS[:index]) for index in range(len(NUMELS))]


# What lies behind a gradient


@pytest.mark.parametrize("state", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("behind", [1e6, float("inf")])
def test_what_lies_behind_a_gradient_is_not_its_padding(state, behind):
    """Autograd delivers views: the gradient of a concatenation shares memory with other gradients."""
    buffer = torch.zeros(64)
    param = nn.Parameter(buffer[:5])
    ShardInfo(0, None).mark(param)
    with torch.no_grad():
        param.normal_(generator=torch.Generator().manual_seed(0))
    (twin,) = place_shards([nn.Parameter(param.detach().clone())])
    other = torch.ones(59, requires_grad=True)
    (torch.cat([param, other]) * torch.tensor([1.0] * 5 + [behind] * 59)).sum().backward()
    assert param.grad.untyped_storage().nbytes() > 4 * param.numel()
    twin.grad = param.grad.clone()
    for each in (param, twin):
        AdamW([each], state=state).step()
    assert_same(param.data, twin.data)
    assert not buffer[5:32].any()


def test_a_scale_divides_no_gradient_of_another_optimizer():
    first, second = nn.Parameter(torch.zeros(64)[:5]), nn.Parameter(torch.zeros(59))
    ShardInfo(0, None).mark(first)
    (torch.cat([first, second]) * 48).sum().backward()
    optimizer = AdamW([first])
    optimizer.found_inf, optimizer.grad_scale = torch.zeros(()), torch.tensor(8.0)
    optimizer.step()
    assert_same(first.grad, torch.full((5,), 6.0))
    assert_same(second.grad, torch.full((59,), 48.0))


# The ways of torch.optim


def test_versions_tell_that_a_parameter_was_stepped():
    arena = make_arena()
    arena.params[1].grad = None
    before = [param._version for param in arena.params]
    AdamW(arena.params, **HYPER).step()
    grown = [param._version - version for param, version in zip(arena.params, before, strict=True)]
    assert grown == [0 if index == 1 else 1 for index in range(len(NUMELS))]


@pytest.mark.parametrize("as_tensor", [False, True])
def test_schedulers_and_tensor_lr(as_tensor):
    arena = make_arena()
    twin = nn.Parameter(arena.flat.clone())
    hyper = HYPER | {"lr": torch.tensor(1e-2) if as_tensor else 1e-2}
    pairs = []
    for make, params, extra in ((AdamW, arena.params, {}), (torch.optim.AdamW, [twin], {"fused": True})):
        optimizer = make(params, **copy.deepcopy(hyper), **extra)
        pairs.append((optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)))
    for seed in range(4):
        arena.new_grads(seed)
        twin.grad = arena.flat_grad.clone()
        for optimizer, scheduler in pairs:
            optimizer.step()
            scheduler.step()
    assert_same(arena.flat, twin.data)


# Errors


@pytest.mark.parametrize(
    ("hyper", "message"),
    [
        ({"lr": -1.0}, "lr must be at least 0, got -1.0"),
        ({"lr": torch.ones(2)}, "lr must be a number, or a tensor with one number"),
        ({"eps": float("nan")}, "eps must be at least 0, got nan"),
        ({"weight_decay": -0.1}, "weight_decay must be at least 0"),
        ({"betas": (0.9, 1.0)}, r"betas must be two numbers from 0 to below 1, got \(0.9, 1.0\)"),
        ({"betas": (0.9,)}, "betas must be two numbers"),
    ],
)
def test_bad_hyper_parameters(hyper, message):
    kind = TypeError if "must be a number" in message else ValueError
    with pytest.raises(kind, match=message):
        AdamW([nn.Parameter(torch.ones(1))], **hyper)


def test_bad_parameters():
    good, bad = (nn.Parameter(torch.ones(3).to(dtype)) for dtype in (torch.float32, torch.float8_e4m3fn))
    with pytest.raises(ValueError, match="parameter 1 of the group must be of a floating dtype"):
        AdamW([good, bad])
    optimizer = AdamW([good])
    with pytest.raises(ValueError, match="parameter named of the group"):
        AdamW([("named", bad)])
    with pytest.raises(ValueError, match="must be of a floating dtype"):
        optimizer.add_param_group({"params": [bad]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("is_shard", [False, True])
def test_a_sparse_gradient_is_refused_before_anything_is_updated(is_shard):
    arena, sparse = make_arena(), nn.Parameter(torch.ones(32, 1))
    if is_shard:
        ShardInfo(0, None).mark(sparse)
    before = arena.flat.clone()
    sparse.grad = torch.ones(32, 1).to_sparse()
    with pytest.raises(ValueError, match="gradients must be dense"):
        AdamW([*arena.params, sparse]).step()
    assert_same(arena.flat, before)
