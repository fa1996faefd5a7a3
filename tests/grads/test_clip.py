"""Gradient norms are over all ranks, with the same bits at every stage and from every function."""

import copy
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grad, clip_grad_norm_, clip_grad_value_

from shardlite import LayoutError, PhaseError, ShardLite
from tests.support.models.small import LanguageModel, MixedDtypes, frozen
from tests.support.twins.sharded import WIDE, Turn, same_bits, same_states, some_stages

STAGES = (0, 1, 2, 3)
NORMS = (1.0, 2.0, 3.5, math.inf)


def tiny() -> nn.Module:
    """Two slots of 32 elements: of four ranks two have nothing."""
    return nn.Linear(7, 2)


def tied() -> nn.Module:
    return frozen(LanguageModel(blocks=2), lambda name: "qkv" in name)


MODELS: dict[str, Callable[[], nn.Module]] = {"tied": tied, "mixed": MixedDtypes, "tiny": tiny}


def loss(model: nn.Module, turn: Turn) -> Tensor:
    if hasattr(model, "embed"):
        return model(torch.randint(0, 37, (2, 5), generator=turn.generator())).square().mean()
    return model(torch.randn(4, 7, generator=turn.generator())).square().sum()


def made(name: str, group: Any, stage: int) -> ShardLite:
    """Return a model with gradients."""
    torch.manual_seed(2)
    model = ShardLite(MODELS[name](), stage=stage, group=group)
    loss(model, Turn(0, dist.get_rank(group), 0)).backward()
    return model


def grads_of(model: ShardLite) -> dict[str, Tensor]:
    return {name: shard.grad.clone() for name, shard in model.named_parameters() if shard.grad is not None}


def whole_grads(name: str, group: Any) -> dict[str, Tensor]:
    """Stage 0 has all of them on every rank."""
    return grads_of(made(name, group, 0))


def assert_close_to_exact(norm: Tensor, grads: Sequence[Tensor], norm_type: float) -> None:
    """The bound: `n` additions and, for each element, a power of at most 4 ulps, of numbers that are not negative.

    So the sum of powers is off by a factor of at most `(1 + u)**(n + 4)`, its root by less (Higham 2002, 4.2). A
    maximum is exact.
    """
    exact = torch.linalg.vector_norm(torch.cat([grad.reshape(-1).double() for grad in grads]), norm_type)
    roundings = 0 if norm_type == math.inf else (sum(grad.numel() for grad in grads) + 4) * 2**-24
    torch.testing.assert_close(norm.double(), exact, rtol=roundings / (1 - roundings), atol=0)


def norms_body(group: Any, name: str) -> list[float]:
    """Return the norms."""
    whole = whole_grads(name, group)
    if name == "tied":
        assert "embed.weight" in whole
        assert "head.weight" not in whole
        assert not [each for each in whole if "qkv" in each]
    norms = []
    for norm_type in NORMS:
        got = [made(name, group, stage).clip_grad_norm_(math.inf, norm_type) for stage in STAGES]
        assert_close_to_exact(got[0], list(whole.values()), norm_type)
        for stage, each in zip(STAGES, got, strict=True):
            same_bits(f"stage {stage}: the {norm_type}-norm", each, got[0])
        norms.append(got[0].item())
    return norms


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("world_size", [2, WIDE])
def test_norms_are_right_and_the_same_at_all_stages(cluster, world_size, name):
    tables = cluster.run(norms_body, world_size, name)
    assert all(table == tables[0] for table in tables)
    assert len(set(tables[0])) == len(NORMS)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_scaled_by_torchs_factor(group: Any, name: str) -> None:
    for stage in some_stages(2, 3):
        model, clipped = (made(name, group, stage) for _ in range(2))
        norm = clipped.clip_grad_norm_(0.25)
        factor = 0.25 / (norm + 1e-6)
        assert factor < 1
        for key, grad in grads_of(clipped).items():
            same_bits(f"stage {stage}: {key}", grad, grads_of(model)[key] * factor.to(grad.dtype))
        before = grads_of(model)
        same_bits("the norm", model.clip_grad_norm_(norm.item() * 2), norm)
        same_states(f"stage {stage}, small enough", grads_of(model), before)


def test_the_norm_of_double_gradients_is_taken_in_double(group: Any) -> None:
    """Norms of fp64 gradients are fp64: these would overflow."""
    for stage in (0, 3):
        model = ShardLite(nn.Linear(4, 4, dtype=torch.float64), stage=stage, group=group)
        assert model.clip_grad_norm_(1.0).item() == clip_grad_norm_(model.parameters(), 1.0).item() == 0, "no gradients"
        (model(torch.full((1, 4), 1e50, dtype=torch.float64)).sum() * 1e9).backward()
        norm = model.clip_grad_norm_(1.0)
        torch.testing.assert_close(norm.item(), 4e59, rtol=1e-15, atol=0)  # 16 gradients of 1e59, and 4 of 1e9
        assert all((shard.grad.abs() <= 1).all() for shard in model.parameters())


@pytest.mark.ranks(4)
def test_norms_that_cannot_be_put_together_are_refused(group: Any) -> None:
    model = made("tiny", group, 3)
    before = grads_of(model)
    for norm_type in (0, 0.0, -1.0, -math.inf, math.nan):
        with pytest.raises(LayoutError, match="must be a positive number or inf, got"):
            model.clip_grad_norm_(1e-3, norm_type)
        with pytest.raises(LayoutError, match="must be a positive number or inf, got"):
            clip_grad_norm_(model.parameters(), 1e-3, norm_type)
    same_states("state", grads_of(model), before)


# ---- torch.nn.utils -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("group", "name"), [(1, "tiny"), (2, "tied"), (4, "tiny")], indirect=["group"])
def test_torchs_functions_give_the_same(group: Any, name: str) -> None:
    for stage in some_stages(2, 3):
        for norm_type in NORMS:
            ours, theirs = (made(name, group, stage) for _ in range(2))
            foreach = (None, True, False)[stage % 3]
            expected = ours.clip_grad_norm_(0.25, norm_type)
            grads = [shard.grad for shard in theirs.parameters() if shard.grad is not None]
            total = nn.utils.get_total_norm(grads, norm_type, foreach=foreach)
            same_bits("get_total_norm", total, expected)
            same_bits(
                "clip_grad_norm_",
                clip_grad_norm_(theirs.parameters(), 0.25, norm_type, error_if_nonfinite=True, foreach=foreach),
                expected,
            )
            same_states(f"stage {stage}, {norm_type}-norm", grads_of(theirs), grads_of(ours))


@pytest.mark.ranks(2, WIDE)
def test_torchs_function_on_some_of_the_parameters(group: Any) -> None:
    """Clip some parameters only, of which many ranks have nothing."""
    whole = whole_grads("tied", group)
    for norm_type in NORMS:
        norms = []
        for stage in some_stages(1, 3):
            model = made("tied", group, stage)
            before = grads_of(model)
            chosen = {name: p for name, p in model.named_parameters() if "blocks.1" in name and p.grad is not None}
            norms.append(clip_grad_norm_(list(chosen.values()), 1e-3, norm_type))
            factor = 1e-3 / (norms[0] + 1e-6)
            for name, grad in grads_of(model).items():
                same_bits(name, grad, before[name] * factor if name in chosen else before[name])
            same_bits(f"stage {stage}: {norm_type}-norm", norms[-1], norms[0])
            one = [next(iter(chosen.values()))]
            alone = clip_grad_norm_(one, math.inf, norm_type)
            assert 0 < alone < norms[0]
        assert_close_to_exact(norms[0], [whole[name] for name in chosen], norm_type)


@pytest.mark.ranks(4)
def test_error_if_nonfinite(group: Any) -> None:
    """A NaN on one rank raises on all, and nothing is scaled."""
    for stage in (0, 3):
        torch.manual_seed(2)
        model = ShardLite(tiny(), stage=stage, group=group)
        scale = math.nan if dist.get_rank(group) == 1 else 1.0
        (loss(model, Turn(0, 0, 0)) * scale).backward()
        before = {name: grad.nan_to_num(7.0) for name, grad in grads_of(model).items()}
        with pytest.raises(RuntimeError, match=r"The total norm of order 2.0 .* of all ranks is nan"):
            clip_grad_norm_(model.parameters(), 1e-3, error_if_nonfinite=True)
        for name, grad in grads_of(model).items():
            same_bits(name, grad.nan_to_num(7.0), before[name])
        assert clip_grad_norm_(model.parameters(), 1e-3).isnan()


def test_gradients_of_something_else_cannot_be_mixed_in(group: Any) -> None:
    """What is not one model has no norm: it would be counted once per rank, or in two ways."""
    model, other, plain = made("tiny", group, 3), made("tiny", group, 3), nn.Linear(2, 2)
    plain(torch.ones(1, 2)).sum().backward()
    for foreign in (plain, other):
        params = [*model.parameters(), *foreign.parameters()]
        before = [param.grad.clone() for param in params]
        for mixture in (params, params[::-1], params[1:3]):
            with pytest.raises(LayoutError, match=r"2 of 4 gradients|1 of 2 gradients"):
                clip_grad_norm_(mixture, 1e-3)
        for param, grad in zip(params, before, strict=True):
            same_bits("untouched", param.grad, grad)


def test_ignored_parameters_are_left_out(group: Any) -> None:
    """Ignored parameters are no part of the norm."""
    module = nn.Sequential(nn.Linear(7, 2), nn.Linear(2, 2))
    model = ShardLite(module, ignore=[module[1]], group=group)
    loss(model, Turn(0, 0, 0)).backward()
    own = [shard for name, shard in model.named_parameters() if name.startswith("0.")]
    with pytest.raises(LayoutError, match="`clip_grad_norm_` of the wrapped model leaves out its ignored parameters"):
        clip_grad_norm_(model.parameters(), 1e-3)
    before = module[1].weight.grad.clone()
    same_bits("the norm", clip_grad_norm_(own, math.inf), model.clip_grad_norm_(1e-3))
    same_bits("ignored", module[1].weight.grad, before)


def test_other_models_are_clipped_as_ever(group: Any) -> None:
    """A model that is not wrapped has the norms and gradients that it had before there was ShardLite."""
    model = made("tied", group, 3)
    before = grads_of(model)
    torch.manual_seed(3)
    plain = LanguageModel(blocks=1)
    loss(plain, Turn(0, 1, 0)).backward()
    original = clip_grad._get_total_norm.__wrapped__
    assert original.__module__ == "torch.nn.utils.clip_grad"
    for norm_type in (*NORMS, 0.0):
        for foreach in (None, True, False):
            ours, theirs = copy.deepcopy(plain), copy.deepcopy(plain)
            for each, params in zip((ours, theirs), (plain, plain), strict=True):
                for mine, param in zip(each.parameters(), params.parameters(), strict=True):
                    mine.grad = param.grad.clone()
            norm = original([p.grad for p in theirs.parameters()], norm_type, False, foreach)
            nn.utils.clip_grads_with_norm_(theirs.parameters(), 0.1, norm, foreach)
            same_bits("the norm", clip_grad_norm_(ours.parameters(), 0.1, norm_type, foreach=foreach), norm)
            for mine, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
                same_bits("a gradient", mine.grad, expected.grad)
    one = next(iter(plain.parameters()))
    same_bits("one tensor", nn.utils.get_total_norm(one.grad), one.grad.norm())
    assert clip_grad_norm_([], 1.0).item() == 0
    same_states("state", grads_of(model), before)


@pytest.mark.parametrize("group", [1, 2], indirect=True)
def test_gradients_that_are_not_reduced_cannot_be_clipped(group: Any) -> None:
    """On a single rank there is no reduction. Without any gradient the norm is 0, as in PyTorch."""
    for stage in (0, 3):
        model = ShardLite(tiny(), group=group, stage=stage)
        clips: list[Callable[[], Any]] = [
            lambda model=model: model.clip_grad_norm_(0.1),
            lambda model=model: clip_grad_norm_(model.parameters(), 0.1),
            lambda model=model: clip_grad_value_(model.parameters(), 0.1),
        ]
        assert [clip() for clip in clips] == [0, 0, None]
        scaler, optimizer = GradScaler("cpu"), torch.optim.SGD(model.parameters())
        scaler.scale(torch.zeros(()))
        unscale = partial(scaler.unscale_, optimizer)
        with model.no_sync():
            loss(model, Turn(0, 0, 0)).backward()
            if group.size() > 1:
                for clip in (*clips, unscale):
                    with pytest.raises(PhaseError, match="accumulated and not reduced yet: call it after the last"):
                        clip()
            with pytest.raises(PhaseError, match="accumulated and not reduced yet: call it after the last"):
                model.full_grad("weight")
        loss(model, Turn(0, 0, 1)).backward()
        for clip in (*clips, unscale):
            clip()
        assert model.full_grad("weight") is not None
