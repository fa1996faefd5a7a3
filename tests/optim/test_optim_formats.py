"""`AdamW` with narrow moments and limited updates: saving, loading, memory and errors."""

import copy
import pickle

import pytest
import torch
from shardlite_kernels import FORMATS
from torch import nn

from shardlite.optim.adamw import AdamW
from shardlite.params import ShardInfo
from tests.kernels.adamw_cases import state_of
from tests.support.optim_cases import (
    HYPER,
    Alone,
    assert_same,
    make_arena,
    place_shards,
    run,
    set_grads,
    shard_params,
    train,
)

NARROW = ["bf16", "int8"]
by_state = pytest.mark.parametrize("state", FORMATS)
narrow_states = pytest.mark.parametrize("state", NARROW)


def trained_arena(state, steps=5, **options):
    arena = make_arena()
    optimizer = AdamW(arena.params, **HYPER, state=state, **options)
    run(arena, optimizer, steps)
    return arena, optimizer


def trained_plain(state, steps=5, **options):
    params = shard_params()
    optimizer = AdamW(params, **HYPER, state=state, **options)
    step_plain(params, optimizer, range(steps))
    return params, optimizer


def step_plain(params, optimizer, seeds):
    for seed in seeds:
        set_grads(params, seed)
        optimizer.step()


def entries(optimizer):
    """Everything that it remembers, as it is kept."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return [optimizer.state[param] for param in params]


# ---- what is computed ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_update", [None, 0.3])
@pytest.mark.parametrize("where", ["gaps", "plain"])
@by_state
def test_gaps_and_shapes_change_no_bit(state, where, max_update):
    """Also where a moment is rounded at random, and around missing gradients."""
    if where == "plain":
        torch.manual_seed(0)
        params = place_shards([nn.Parameter(torch.randn(shape)) for shape in [(4, 8), (32,), (0, 3), (4, 4, 4)]])
    else:
        arena = make_arena(gaps=[32, 0, 64])
        params = arena.params
    alone = Alone(params, state)
    optimizer = AdamW(params, **HYPER, state=state, max_update=max_update)
    for seed in range(6):
        arena.new_grads(seed) if where != "plain" else set_grads(params, seed)
        if seed in (2, 3):
            params[seed - 1].grad = None
        alone.step(max_update=max_update or float("inf"))
        optimizer.step()
    alone.assert_same(optimizer)


# ---- bytes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("state", "nbytes"), [("fp32", 8), ("bf16", 4), ("int8", 2.0625)])
def test_bytes_per_element(state, nbytes):
    """Of moments and their exponents; a table of rows, for moments that are rounded, takes 1/16 more."""
    arena = make_arena([1024, 2048, 32 * 31])
    optimizer = AdamW(arena.params, **HYPER, state=state)
    optimizer.step()
    numel = sum(param.numel() for param in arena.params)
    kept = [value for entry in entries(optimizer) for name, value in entry.items() if name != "step"]
    storages = {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in kept}
    assert sum(storages.values()) == nbytes * numel
    rows = optimizer._layout.slots[0].arena.rows
    assert rows.nbytes == (0 if state == "fp32" else numel / 16)


# ---- saving and loading --------------------------------------------------------------------------------------------


@narrow_states
def test_a_state_dict_says_what_the_codes_stand_for(state):
    """And is no view of them: training goes on without changing it."""
    params, optimizer = trained_plain(state)
    saved = optimizer.state_dict()["state"]
    exact = trained_plain("fp32")[1].state_dict()["state"]
    before = copy.deepcopy(saved)
    step_plain(params, optimizer, [7])
    for key, entry in saved.items():
        for name in ("exp_avg", "exp_avg_sq"):
            assert_same(entry[name], before[key][name])
            largest = exact[key][name].abs().max() if exact[key][name].numel() else torch.tensor(0.0)
            assert (entry[name] - exact[key][name]).abs().max().item() < 0.03 * largest if largest else True


@pytest.mark.parametrize("fused", [True, False])
@by_state
def test_a_state_of_torch_is_continued(state, fused):
    """By a step number of its own, with moments rounded to nearest."""
    params = shard_params()
    theirs = torch.optim.AdamW(params, **HYPER, fused=fused)
    step_plain(params, theirs, range(3))
    optimizer = AdamW(params, state=state)
    optimizer.load_state_dict(theirs.state_dict())
    for param in params:
        flat = [theirs.state[param][name].flatten() for name in ("exp_avg", "exp_avg_sq")]
        expected = state_of(("whole", state), param.data.flatten(), *flat)
        assert_same(optimizer.state[param]["exp_avg"].flatten(), expected.exp_avg)
        assert_same(optimizer.state[param]["exp_avg_sq"].flatten(), expected.exp_avg_sq)
    step_plain(params, optimizer, [3])
    assert {entry["step"].item() for entry in entries(optimizer)} == {4.0}


@pytest.mark.parametrize("loaded_as", FORMATS)
@by_state
def test_every_format_loads_every_other(state, loaded_as):
    params, optimizer = trained_plain(state)
    other = AdamW(params, state=loaded_as)
    other.load_state_dict(optimizer.state_dict())
    again = AdamW(params, state=loaded_as)
    again.load_state_dict(other.state_dict())
    for mine, theirs in zip(entries(again), entries(other), strict=True):
        assert mine["exp_avg"].dtype == FORMATS[loaded_as]
        assert_same(mine["exp_avg"], theirs["exp_avg"])
    if state == loaded_as:
        for mine, theirs in zip(entries(other), entries(optimizer), strict=True):
            assert_same(mine["step"], theirs["step"])
    step_plain(params, other, [5])


@pytest.mark.parametrize("way", ["state_dict", "file"])
@by_state
def test_a_loaded_run_goes_on_with_the_same_bits(state, way, tmp_path):
    """Also of what is rounded at random; in an arena that lies elsewhere."""
    arena, optimizer = trained_arena(state, max_update=1.5)
    saved = optimizer.state_dict()
    if way == "file":
        torch.save(saved, tmp_path / "state.pt")
        saved = torch.load(tmp_path / "state.pt", weights_only=True)
    twin = make_arena()
    twin.flat.copy_(arena.flat)
    twin_optimizer = AdamW(twin.params, lr=1.0, state=state)
    twin_optimizer.load_state_dict(saved)
    assert twin_optimizer.param_groups[0]["max_update"] == 1.5
    for seed in range(10, 16):
        for each, stepped in ((arena, optimizer), (twin, twin_optimizer)):
            each.new_grads(seed)
            stepped.step()
    assert_same(twin.flat, arena.flat)
    mine, theirs = (o.state_dict()["state"] for o in (optimizer, twin_optimizer))
    assert mine.keys() == theirs.keys()
    for key in mine:
        assert_same(theirs[key], mine[key])


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("how", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_copies_of_plain_parameters_go_on_with_the_same_bits(how, in_backward):
    model = nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 3))
    optimizer = AdamW(model.parameters(), **HYPER, state="int8", in_backward=in_backward)
    train(model, optimizer, range(3))
    twin, twin_optimizer = how((model, optimizer))
    assert (twin_optimizer._moments, twin_optimizer.in_backward) == ("int8", in_backward)
    before = copy.deepcopy(twin.state_dict())
    train(model, optimizer, range(3, 6))
    assert_same(list(twin.state_dict().values()), list(before.values()))
    train(twin, twin_optimizer, range(3, 6))
    assert_same(list(twin.parameters()), list(model.parameters()))


def test_groups_share_one_format_and_have_limits_of_their_own():
    params = shard_params()
    optimizer = AdamW([{"params": params[:2], "max_update": 0.1}, {"params": params[2:]}], **HYPER, state="int8")
    before = [param.data.clone() for param in params]
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0
    step_plain(params, optimizer, [0])
    moved = [(param.data - old).abs().max().item() for param, old in zip(params, before, strict=True) if param.numel()]
    assert all(most <= HYPER["lr"] * 0.1 * 1.001 for most in moved[:2])
    assert all(most > HYPER["lr"] * 0.9 for most in moved[2:])
    (extra,) = place_shards([nn.Parameter(torch.ones(3))])
    optimizer.add_param_group({"params": [extra]})
    assert optimizer.param_groups[2]["max_update"] is None
    step_plain([*params, extra], optimizer, [1])
    assert optimizer.state[extra]["exp_avg"].dtype == torch.int8


# ---- errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["int4", "", "float32", None])
def test_a_format_that_is_none_is_refused(state):
    with pytest.raises(ValueError, match=f"state must be one of fp32, bf16, int8, got {state!r}"):
        AdamW(shard_params(), state=state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@narrow_states
def test_a_narrow_state_goes_with_weights_in_fp32(state, dtype):
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, dtype=dtype))]
    for param in params:
        ShardInfo(0, None).mark(param)
    with pytest.raises(ValueError, match=f"state='{state}' requires fp32 or split weights, but parameter 1 .*{dtype}"):
        AdamW(params, state=state)
    optimizer = AdamW(params[:1], state=state)
    with pytest.raises(ValueError, match="requires fp32 or split weights"):
        optimizer.add_param_group({"params": params[1:]})
    assert len(optimizer.param_groups) == 1
    assert AdamW(params)._moments == "fp32"


@pytest.mark.parametrize("max_update", [0, -1.0, float("nan")])
def test_a_limit_must_be_above_zero(max_update):
    with pytest.raises(ValueError, match=f"max_update must be above 0, or None, got {max_update}"):
        AdamW(shard_params(), max_update=max_update)
    optimizer = AdamW(shard_params(), max_update=1.0)
    with pytest.raises(ValueError, match="max_update must be above 0"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], "max_update": max_update})
