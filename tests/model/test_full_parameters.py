"""Full weights, one after the other, and full gradients."""

from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from shardlite import EMA, AdamW, LayoutError, PhaseError, Precision, ShardLite
from shardlite.params import Flat
from tests.support.internals import flats
from tests.support.patience import seconds
from tests.support.twins.plain import Twin
from tests.support.twins.sharded import same_bits, same_states, slow

WIDTH = 33
SPLIT = Precision(compute=torch.bfloat16, master="split24")


def net() -> nn.Sequential:
    """A model with tied, frozen, unused and empty parameters. Cuts between shards fall anywhere."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, WIDTH), nn.Tanh(), *(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    model[3].weight = model[2].weight
    model[0].bias.requires_grad_(False)
    model[4].register_parameter("unused", nn.Parameter(torch.ones(5)))
    model.register_parameter("empty", nn.Parameter(torch.empty(0, 3)))
    return model


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 7, generator=torch.Generator().manual_seed(10 * step + rank))


def train(model: nn.Module, optimizer: Any, steps: int = 2, first: int = 0) -> None:
    for step in range(first, first + steps):
        model(batch(step, dist.get_rank())).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def loss(model: nn.Module, rank: int) -> Tensor:
    x = batch(0, rank)
    x = x if isinstance(model, ShardLite) else x.to(next(model.parameters()).dtype)  # as the wrapper does
    return model(x).float().square().mean()


def wrapped(group: Any, stage: int = 3, **options: Any) -> tuple[ShardLite, AdamW]:
    model = ShardLite(net(), stage=stage, units=nn.Linear, group=group, **options)
    optimizer = AdamW(model.parameters(), lr=0.1)
    train(model, optimizer)
    return model, optimizer


def check_all(model: ShardLite) -> None:
    """Compare with `full_state_dict()`, in every dtype and with every bound."""
    expected = model.full_state_dict()
    for dtype in (None, torch.bfloat16, torch.float64):
        for max_bytes in (None, 20_000, 100_000):
            got = dict(model.full_parameters(dtype=dtype, max_bytes=max_bytes))
            assert got.keys() == expected.keys()
            same_states(f"{dtype}, {max_bytes}", got, {k: v.to(dtype or v.dtype) for k, v in expected.items()})


# ---- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", [Precision(), SPLIT, slow(Precision(compute=torch.bfloat16))])
@pytest.mark.parametrize(("group", "stage"), [(2, 3), (3, 3), (2, 2), slow(2, 1), (2, 0), (1, 3)], indirect=["group"])
@pytest.mark.sample(2)
def test_they_are_those_of_the_full_state_dict(group: Any, stage: int, precision: Precision) -> None:
    """The loop may run between any calls of the model, and leaves no trace in them."""
    model, optimizer = wrapped(group, stage, precision=precision)
    check_all(model)
    with torch.no_grad():
        model(batch(0, 0))
    check_all(model)
    fresh = net()
    fresh.load_state_dict(dict(model.full_parameters()))
    other, its = wrapped(group, stage, precision=precision)
    for each, its_optimizer in ((model, optimizer), (other, its)):
        train(each, its_optimizer, first=2)
    same_states("after the loop", model.full_state_dict(), other.full_state_dict())


@pytest.mark.ranks(4)
def test_hybrid_sharding(group: Any) -> None:
    model, _ = wrapped(init_device_mesh("cpu", (2, 2)))
    check_all(model)


def test_quantized_gathers_and_averages(group: Any) -> None:
    """Weights are those that the optimizer steps, not decoded ones; inside `swapped()`, they are the averages."""
    model, optimizer = wrapped(group, precision=Precision(quantized_gather=True))
    ema = EMA(model, decay=0.5)
    train(model, optimizer, first=2)
    check_all(model)
    with ema.swapped():
        check_all(model)


def test_only_trainable_ones_in_the_units_order(group: Any) -> None:
    model, _ = wrapped(group)
    names = [name for name, _ in model.full_parameters(trainable=True)]
    assert names[:4] == ["empty", "2.weight", "3.weight", "0.weight"]  # first the root, which has the tied weight
    assert "0.bias" not in names
    assert {*names, "0.bias"} == set(model.full_state_dict())
    model.module[4].requires_grad_(False)
    assert not any(name.startswith("4.") for name, _ in model.full_parameters(trainable=True))


def test_ignored_parameters_are_each_ranks_own(group: Any) -> None:
    module = net()
    model = ShardLite(module, group=group, ignore=[module[5]])
    with torch.no_grad():
        module[5].weight.fill_(dist.get_rank() + 0.1)
    got = dict(model.full_parameters(dtype=torch.bfloat16))
    same_bits("ignored", got["5.weight"], module[5].weight.detach().bfloat16())


def test_a_tied_parameter_has_a_copy_under_each_name(group: Any) -> None:
    model = ShardLite(net(), group=group)
    expected = model.full_state_dict()
    for name, value in model.full_parameters():
        same_bits(name, value.cpu(), expected[name])
        value.zero_()


def test_there_may_be_nothing_to_yield(group: Any) -> None:
    module = net().requires_grad_(False)
    assert not list(ShardLite(module, group=group).full_parameters(trainable=True))
    module = net().requires_grad_(False)
    module[5].requires_grad_(True)
    model = ShardLite(module, group=group, ignore=[module[5]])
    assert [name for name, _ in model.full_parameters(trainable=True)] == ["5.weight", "5.bias"]


def test_copies_belong_to_the_program(group: Any) -> None:
    """Writes to them change neither the model nor what other ranks receive."""
    model, _ = wrapped(group, stage=0)
    expected = model.full_state_dict()
    for _, tensor in model.full_parameters():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        tensor.fill_(torch.nan)
    same_states("after writes", dict(model.full_parameters()), expected)


def piece_bytes(flat: Flat) -> int:
    return flat.layout.slots[-1].stop * flat.master.itemsize


def test_the_peak_is_two_units(group: Any) -> None:
    """At most one piece is in use while the next is gathered; nothing is left afterwards."""
    model = ShardLite(net(), units=nn.Linear, group=group)
    sizes = [piece_bytes(flat) for flat in flats(model)]
    model.ledger.reset_peak()
    before = model.memory()["staging"].now
    for _ in model.full_parameters():
        pass
    staging = model.memory()["staging"]
    pairs = [first + second for first, second in pairwise(sizes)]
    assert staging.peak - before == max(pairs)
    assert staging.now == before


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_peak_stays_below_max_bytes(group: Any, dtype: torch.dtype | None) -> None:
    model = ShardLite(net(), units=nn.Linear, group=group)
    largest = WIDTH * WIDTH * (4 if dtype is None else 2)
    with pytest.raises(LayoutError, match=rf"takes {largest} bytes.* pass max_bytes={2 * largest} or more"):
        list(model.full_parameters(dtype=dtype, max_bytes=2 * largest - 1))
    for max_bytes in (2 * largest, 3 * largest, 4 * largest):
        model.ledger.reset_peak()
        before = model.memory()["staging"].now
        for _, tensor in model.full_parameters(dtype=dtype, max_bytes=max_bytes):
            assert model.memory()["staging"].now - before + tensor.nbytes <= max_bytes
        assert largest <= model.memory()["staging"].peak - before <= max_bytes


def test_a_narrow_dtype_takes_fewer_bytes(group: Any) -> None:
    """Shards are cast before they are sent."""
    sent = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = ShardLite(net(), units=nn.Linear, group=group)
        list(model.full_parameters(dtype=dtype))
        sent[dtype] = sum(model.traffic()[unit]["full state"].nbytes for unit in model.unit_names)
    assert 0 < 2 * sent[torch.bfloat16] == sent[torch.float32]


# ---- loops that end early --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_bytes", [None, 10_000])
@pytest.mark.parametrize("place", [0, 1, 4])
@pytest.mark.parametrize("group", [2, 3], indirect=True)
@pytest.mark.sample(3)
def test_all_ranks_may_leave_early(group: Any, place: int, max_bytes: int | None) -> None:
    model, optimizer = wrapped(group)
    for i, _ in enumerate(model.full_parameters(max_bytes=max_bytes)):
        if i == place:
            break
    train(model, optimizer)
    check_all(model)


@pytest.mark.parametrize("max_bytes", [None, 10_000])
@pytest.mark.parametrize("raises", [False, True])
def test_a_rank_that_leaves_alone_is_an_error_on_the_others(group: Any, raises: bool, max_bytes: int | None) -> None:
    """No rank hangs, and all can go on."""
    model, optimizer = wrapped(group)

    def loop() -> None:
        for i, _ in enumerate(model.full_parameters(max_bytes=max_bytes)):
            if i == 1 and dist.get_rank() == 0:
                if raises:
                    raise RuntimeError("no room")
                break

    if dist.get_rank() == 0 and not raises:
        loop()
    else:
        why = "no room" if dist.get_rank() == 0 else "rank 0 has left its loop over full_parameters.. early"
        with pytest.raises(RuntimeError if dist.get_rank() == 0 else PhaseError, match=why):
            loop()
    train(model, optimizer)
    check_all(model)


def test_a_rank_that_leaves_in_the_last_piece(group: Any) -> None:
    """Everything was gathered, so the other ranks can finish."""
    model, optimizer = wrapped(group)
    count = len(model.full_state_dict())
    seen = 0
    for _ in model.full_parameters():
        seen += 1
        if dist.get_rank() == 0 and seen == count:
            break
    assert seen == count
    train(model, optimizer)


@pytest.mark.parametrize("stage", [0, 3])
def test_the_model_cannot_be_used_inside_the_loop(group: Any, stage: int) -> None:
    model, optimizer = wrapped(group, stage)
    before = loss(model, 0)
    calls = [
        lambda: model(batch(0, 0)),
        lambda: model.module[0](batch(0, 0)),
        before.backward,
        optimizer.step,
        model.full_state_dict,
        lambda: next(model.full_parameters()),
        model.unwrap,
    ]
    iterator = model.full_parameters()
    next(iterator)
    for call in calls if stage else [calls[0], *calls[2:]]:
        with pytest.raises(PhaseError, match=r"a loop over full_parameters.. is not finished"):
            call()
    iterator.close()
    train(model, optimizer)


def test_wrong_arguments(group: Any) -> None:
    model, optimizer = wrapped(group)
    with pytest.raises(TypeError, match=r"must be a floating-point dtype, got torch.int8"):
        next(model.full_parameters(dtype=torch.int8))
    with pytest.raises(TypeError, match=r"max_bytes=.* must be an int, got 1.5"):
        next(model.full_parameters(max_bytes=1.5))
    wrong = (TypeError, "got 'x'") if dist.get_rank(group) else (LayoutError, "rank 1: .*got 'x'")
    with pytest.raises(wrong[0], match=wrong[1]):
        next(model.full_parameters(dtype="x" if dist.get_rank(group) else None))
    with pytest.raises(LayoutError, match=r"different calls.*dtype=None.*rank 1 has .*dtype=torch.bfloat16"):
        next(model.full_parameters(dtype=torch.bfloat16 if dist.get_rank() else None))
    with model.gathered(), pytest.raises(PhaseError, match="outside of forwards"):
        next(model.full_parameters())
    train(model, optimizer)


def rank_0_alone(group: Any, call: str) -> None:
    """Body of a rank: rank 0 makes a collective call that rank 1 does not make."""
    model = ShardLite(net(), group=group, timeout=timedelta(seconds=seconds(2)))
    loss(model, 0).backward()
    if dist.get_rank() == 0:
        next(model.full_parameters()) if call == "full_parameters" else model.full_grad("0.weight")


@pytest.mark.parametrize("call", ["full_parameters", "full_grad"])
def test_one_rank_alone_ends_in_an_error(doomed: Any, call: str, tmp_path: Path) -> None:
    first, _ = doomed.run(rank_0_alone, 2, call, directory=tmp_path)
    assert first.kind == "CommError"
    assert call in first.text


# ---- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", [Precision(), Precision(compute=torch.bfloat16)])
@pytest.mark.parametrize(("group", "stage"), [(2, 3), (3, 3), (2, 2), slow(2, 1), (2, 0), (1, 3)], indirect=["group"])
@pytest.mark.sample(2)
def test_a_gradient_is_that_of_a_plain_model(group: Any, stage: int, precision: Precision) -> None:
    """Full gradients have the twin's bits, before and after they are clipped."""
    twin = Twin(net(), dist.get_world_size(group), units=nn.Linear, precision=precision)
    model = ShardLite(net(), stage=stage, units=nn.Linear, group=group, precision=precision)
    loss(model, dist.get_rank()).backward()
    twin.backward(lambda plain, rank: loss(plain, rank).backward())
    for clipped in (False, True):
        if clipped:
            model.clip_grad_norm_(0.01)
            twin.clip_grad_norm(0.01)
        for name, master in twin.masters.items():
            if master.requires_grad and master.grad is not None:
                same_bits(name, model.full_grad(name), master.grad)
        assert model.full_grad("4.unused") is None
        same_bits("tied", model.full_grad("3.weight"), model.full_grad("2.weight"))


@pytest.mark.ranks(4)
def test_a_gradient_under_hybrid_sharding(group: Any) -> None:
    hybrid = ShardLite(net(), group=init_device_mesh("cpu", (2, 2)))
    whole = ShardLite(net(), stage=0)
    for model in (hybrid, whole):
        model(batch(0, dist.get_rank())).square().mean().backward()
    for name in ("0.weight", "5.weight"):
        torch.testing.assert_close(hybrid.full_grad(name), whole.full_grad(name))


def test_gradients_that_are_not_there(group: Any) -> None:
    module = net()
    model = ShardLite(module, units=nn.Linear, group=group, ignore=[module[5]])
    for name, error, why in [
        ("0.weight", PhaseError, "there are no gradients"),
        ("0.weigth", LayoutError, "there is no parameter '0.weigth': did you mean '0.weight'"),
        ("0.bias", LayoutError, "'0.bias' is frozen"),
        ("5.bias", LayoutError, "'5.bias' is ignored"),
    ]:
        with pytest.raises(error, match=why):
            model.full_grad(name)
    with model.no_sync():
        loss(model, 0).backward()
        with pytest.raises(PhaseError, match="accumulated and not reduced"):
            model.full_grad("0.weight")
    with pytest.raises(PhaseError, match="accumulated and not reduced"):
        model.full_grad("0.weight")
    loss(model, 0).backward()
    assert model.full_grad("0.weight") is not None
    with pytest.raises(LayoutError, match=r"different calls: rank 0 has full_grad.'0.weight'., rank 1 has"):
        model.full_grad("4.weight" if dist.get_rank() else "0.weight")


def test_gradients_of_steps_in_the_backward_are_not_kept(group: Any) -> None:
    model = ShardLite(net(), units=nn.Linear, group=group)
    optimizer = AdamW(model.parameters(), lr=0.1, in_backward=True)
    loss(model, 0).backward()
    with pytest.raises(PhaseError, match=r"full_grad.*in_backward=True"):
        model.full_grad("0.weight")
    optimizer.step()
