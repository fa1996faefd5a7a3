"""`AdamW(in_backward=True)` on shards of one rank: the same steps, taken as soon as a gradient is there."""

import copy

import pytest
import torch
from shardlite_kernels import FORMATS
from torch import nn

from shardlite.errors import NonFiniteError, PhaseError
from shardlite.optim import AdamW, accumulating
from tests.support.optim_cases import HYPER, assert_same, loss_of, place_shards, small_model, train
from tests.support.twins.sharded import take_step

by_state = pytest.mark.parametrize("state", FORMATS)


def pair(**options):
    """A model with an ordinary optimizer, and its twin with one that steps in the backward."""
    models = small_model(), small_model()
    optimizers = [
        AdamW(model.parameters(), **HYPER, in_backward=in_backward, **options)
        for model, in_backward in zip(models, (False, True), strict=True)
    ]
    return tuple(zip(models, optimizers, strict=True))


def compared(act, **options):
    """Run `act(model, optimizer)` with either kind of optimizer, and compare; return both runs."""
    runs = pair(**options)
    for model, optimizer in runs:
        act(model, optimizer)
    assert_same_runs(*runs)
    return runs


def assert_same_runs(*runs):
    (model, optimizer), (twin, twin_optimizer) = runs
    assert_same(list(twin.parameters()), list(model.parameters()))
    mine, theirs = (o.state_dict()["state"] for o in (optimizer, twin_optimizer))
    assert mine.keys() == theirs.keys()
    for key in mine:
        assert_same(theirs[key], mine[key])


@pytest.mark.parametrize("max_update", [None, 0.5])
@by_state
def test_the_bits_are_those_of_ordinary_steps(state, max_update):
    runs = compared(lambda *run: train(*run, range(5)), state=state, max_update=max_update)
    assert all(param.grad is None for param in runs[1][0].parameters())


def test_weights_are_new_and_gradients_gone_before_step():
    model = small_model()
    optimizer = AdamW(model.parameters(), **HYPER, in_backward=True)
    before = copy.deepcopy(list(model.parameters()))
    loss_of(model, 0).backward()
    assert all(param.grad is None for param in model.parameters())
    assert all((param != old).any() for param, old in zip(model.parameters(), before, strict=True))
    after = copy.deepcopy(list(model.parameters()))
    assert {entry["step"].item() for entry in optimizer.state.values()} == {0.0}
    optimizer.step()
    assert {entry["step"].item() for entry in optimizer.state.values()} == {1.0}
    assert_same(list(model.parameters()), after)


def test_a_second_backward_before_step_is_refused():
    model = small_model()
    optimizer = AdamW(model.parameters(), **HYPER, in_backward=True)
    loss_of(model, 0).backward()
    with pytest.raises(PhaseError, match=r"call step\(\) of the optimizer .* inside no_sync\(\)"):
        loss_of(model, 1).backward()
    take_step(optimizer)
    train(model, optimizer, [2])
    assert {entry["step"].item() for entry in optimizer.state.values()} == {2.0}


def test_gradients_are_summed_inside_accumulating_and_stepped_by_behind_it():
    def act(model, optimizer):
        for seed in range(0, 6, 2):
            with accumulating(model.parameters()):
                loss_of(model, seed).backward()
            assert all(param.grad is not None for param in model.parameters())
            take_step(optimizer, loss_of(model, seed + 1))

    compared(act)


def test_two_backwards_of_different_parameters_are_one_step():
    """Each of two heads in a backward of its own, as after a forward of both."""

    def act(heads, optimizer):
        for seed in range(3):
            x = torch.randn(4, 7, generator=torch.Generator().manual_seed(seed))
            heads[0](x).square().sum().backward()
            take_step(optimizer, heads[2](torch.ones(4, 33)).square().sum())

    compared(act)


@pytest.mark.parametrize("worst", [float("nan"), float("inf")])
@by_state
def test_what_is_not_finite_is_an_error_of_step(state, worst):
    model = small_model()
    optimizer = AdamW(model.parameters(), **HYPER, state=state, in_backward=True)
    train(model, optimizer, [0])
    (loss_of(model, 1) * worst).backward()
    with pytest.raises(NonFiniteError, match="continue from a checkpoint"):
        optimizer.step()
    assert {entry["step"].item() for entry in optimizer.state.values()} == {2.0}
    optimizer.step()  # said once


def test_a_closure_has_its_backward_inside():
    def act(model, optimizer):
        for seed in range(3):

            def closure(seed=seed):
                optimizer.zero_grad()
                loss = loss_of(model, seed)
                loss.backward()
                return loss

            assert optimizer.step(closure).item() > 0

    compared(act)


def test_a_group_that_is_added_later_is_stepped_too():
    runs = []
    for in_backward in (False, True):
        model = small_model()
        optimizer = AdamW(model[0].parameters(), **HYPER, in_backward=in_backward)
        train(model, optimizer, [0])
        optimizer.add_param_group({"params": model[2].parameters()})
        model.zero_grad()
        train(model, optimizer, [1, 2])
        runs.append((model, optimizer))
    assert_same_runs(*runs)
    assert all(param.grad is None for param in runs[1][0].parameters())


class Tied(nn.Module):
    """One weight twice in the graph, and one that is not used at all."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 7, generator=torch.Generator().manual_seed(0)))
        self.unused = nn.Parameter(torch.ones(5))

    def forward(self, x):
        return torch.tanh(x @ self.weight) @ self.weight.T


@by_state
def test_a_parameter_that_is_used_twice_is_stepped_once_by_the_sum(state):
    models = Tied(), Tied()
    for model in models:
        place_shards(list(model.parameters()))
    for model, in_backward in zip(models, (False, True), strict=True):
        optimizer = AdamW(model.parameters(), **HYPER, state=state, in_backward=in_backward)
        train(model, optimizer, range(3))
        assert optimizer.state[model.weight]["step"].item() == 3.0
        assert_same(model.unused.data, torch.ones(5))
    assert_same(models[1].weight, models[0].weight)
    # It has a state, of zeros: what a backward brings is not known when the step begins.
    assert optimizer.state[models[1].unused]["step"].item() == 0.0


def test_frozen_parameters_are_left_alone_until_they_are_trained():
    def act(model, optimizer):
        model[0].requires_grad_(False)
        frozen = copy.deepcopy(model[0].weight)
        train(model, optimizer, range(2))
        assert_same(model[0].weight.data, frozen.data)
        model[0].requires_grad_(True)
        train(model, optimizer, range(2, 4))

    runs = compared(act)
    assert runs[1][1].state[runs[1][0][0].weight]["step"].item() == 2.0


@by_state
def test_a_state_dict_goes_on_in_another_optimizer_of_either_kind(state):
    expected, _ = pair(state=state)
    train(*expected, range(6))
    for first, second in ((True, False), (False, True)):
        model = small_model()
        optimizer = AdamW(model.parameters(), **HYPER, state=state, in_backward=first)
        train(model, optimizer, range(3))
        other = small_model()
        other.load_state_dict(model.state_dict())
        continued = AdamW(other.parameters(), state=state, in_backward=second)
        continued.load_state_dict(optimizer.state_dict())
        train(other, continued, range(3, 6))
        assert_same(list(other.parameters()), list(expected[0].parameters()))
