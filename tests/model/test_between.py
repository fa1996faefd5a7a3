"""Actions between a forward, its backward and a step are right or raise a clear error, at every stage."""

import math
from contextlib import nullcontext
from itertools import product

import pytest
import torch
from torch import nn, optim
from torch.utils.checkpoint import checkpoint

from shardlite import AdamW, LayoutError, PhaseError, Precision, ShardLite
from tests.support.twins.sharded import some_stages, take_step, with_twin, without_warnings


def net() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(*[nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6)) for _ in range(2)])


def ones(rows: int = 3) -> torch.Tensor:
    return torch.ones(rows, 6)


class Scaled(nn.Module):
    """Has a parameter of one element, which PyTorch allows to be written even while it is a placeholder."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) * self.scale


def test_a_write_into_a_placeholder_of_one_element_is_refused(group):
    for stage, compute in ((1, None), (2, None), (3, None), (0, torch.bfloat16)):
        precision = Precision(compute=compute)
        model = ShardLite(Scaled(), group=group, stage=stage, precision=precision)
        optimizer = AdamW(model.parameters())
        model(ones()).float().sum().backward()
        optimizer.step()
        with torch.no_grad(), pytest.raises(LayoutError, match="parameter 'scale' is sharded"):
            model.module.scale.fill_(4.0)
        model(ones())


def test_an_unfrozen_parameter_trains_however_it_is_used(group):
    """A forward without gradients may be that of reentrant checkpointing, and `gathered()` is no forward at all."""
    runs = {
        "checkpointed": lambda model, module: checkpoint(model, ones().requires_grad_(), use_reentrant=True).sum(),
        "gathered": lambda model, module: module[0][0].weight.square().sum(),
    }
    for stage, (name, run) in product(some_stages(0, 3), runs.items()):
        module = net()
        module[0].requires_grad_(False)
        model = ShardLite(module, group=group, stage=stage)
        module[0].requires_grad_(True)
        with model.gathered(writeback=False):
            run(model, module).backward()
        grad = dict(model.named_parameters())["0.0.weight"].grad
        assert grad is not None, f"stage {stage}, {name}"
        assert grad.any() or not grad.numel()


def test_freezing_for_an_evaluation_between_micro_batches(group):
    """Freezing everything for an evaluation in the middle of an accumulation does no harm."""
    model, twin = with_twin(net(), group)
    with model.no_sync():
        model(ones()).sum().backward()
    model.requires_grad_(False)
    with torch.no_grad():
        model(ones(5))
    model.requires_grad_(True)
    model(ones()).sum().backward()
    for _ in range(2):
        twin(ones()).sum().backward()
    for (name, shard), whole in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.isin(shard.grad, whole.grad).all(), name


@pytest.mark.stages(2, 3)
def test_a_step_between_forward_and_backward_is_right_or_an_error(group, stage):
    """Step a part of a unit between another part's forward and backward: an error, or as in plain PyTorch."""
    module = nn.ModuleDict({"actor": nn.Linear(6, 6), "critic": nn.Linear(6, 6)})
    model, twin = with_twin(module, group, stage=stage, units=lambda name, _: False)
    results = []
    for each, params in ((twin, dict(twin.named_parameters())), (module, dict(model.named_parameters()))):
        critic = optim.SGD([params["critic.weight"], params["critic.bias"]], lr=0.1)
        x = ones().requires_grad_()
        actor, value = (each[part](x * 1.5).square().sum() for part in ("actor", "critic"))
        value.backward()
        critic.step()
        try:
            actor.backward()
            results.append(x.grad)
        except RuntimeError as error:
            if each is twin or stage == 0 or "modified by an inplace operation" not in str(error):
                raise
    assert torch.equal(results[0], results[-1])


def test_a_step_inside_gathered_is_kept(group):
    """Steps inside `gathered()` are never undone in silence: writing back is an error."""
    for stage, writeback in (*((stage, False) for stage in some_stages(0, 3)), (3, True)):
        model = ShardLite(net(), group=group, stage=stage)
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        model(ones()).sum().backward()
        before = model.full_state_dict()
        refused = pytest.raises(PhaseError, match="changed inside it") if writeback else nullcontext()
        with refused, model.gathered(writeback=writeback):
            optimizer.step()
            if stage and not writeback:
                with pytest.raises((PhaseError, RuntimeError)):
                    model(ones()).sum().backward()
        after = model.full_state_dict()
        assert any(not torch.equal(before[name], after[name]) for name in before), f"stage {stage}"


def test_a_step_without_any_reduced_gradient_is_an_error(group):
    for stage in some_stages(1, 3):
        model = ShardLite(net(), group=group, stage=stage)
        optimizer = AdamW(model.parameters())
        with model.no_sync():
            model(ones()).sum().backward()
        with pytest.raises(PhaseError, match=r"run the last backward before a step outside of no_sync\(\)"):
            optimizer.step()
        model.zero_grad()
        optimizer.step()


@pytest.mark.ranks(1, 2)
@without_warnings
def test_a_flag_goes_with_its_gradients(group):
    """A bad gradient that is gone has no say any more, also over what shares an optimizer."""
    first, second = ShardLite(net(), group=group), ShardLite(net(), group=group)
    optimizer = optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    take_step(optimizer, first(ones()).sum() * math.nan)
    before = second.full_state_dict()
    second(ones()).sum().backward()
    optimizer.step()
    after = second.full_state_dict()
    assert not torch.equal(before["0.0.weight"], after["0.0.weight"])
    assert (first.skipped_steps, second.skipped_steps) == (1, 0)


def test_a_scaler_agrees_on_ignored_parameters_too(group):
    """An ignored parameter overflows on one rank only: all skip, and the scales stay equal."""
    for stage in some_stages(0, 3):
        module = Scaled()
        model = ShardLite(module, group=group, stage=stage, ignore=[module.scale])
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(model(ones()).sum()).backward()
        if group.rank() == 1:
            module.scale.grad.fill_(math.inf)
        before = model.full_state_dict()["body.weight"]
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(before, model.full_state_dict()["body.weight"])
        assert scaler.get_scale() == 2.0


def test_what_lists_the_wrong_parameters_is_right_or_told_so(group):
    """A module around a wrapped one lists the module's own parameters: they are clipped, but cannot be stepped."""
    model, twin = with_twin(net(), group)
    outer = nn.Sequential(model)
    outer(ones()).sum().backward()
    twin(ones()).sum().backward()
    norm = nn.utils.clip_grad_norm_(outer.parameters(), 0.1)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(twin.parameters(), 0.1))
    torch.testing.assert_close(model.clip_grad_norm_(1.0), torch.tensor(0.1))
    with pytest.raises(LayoutError, match=r"of the ShardLite model"):
        AdamW(outer.parameters()).step()
