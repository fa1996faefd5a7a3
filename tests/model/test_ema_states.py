"""Moving averages: saving, loading, and errors."""

import io

import pytest
import torch
from torch import optim

from shardlite import EMA, AdamW, LayoutError, PhaseError, ShardLite
from tests.support.models.residual import net, square
from tests.support.twins.sharded import same_states, some_stages, take_step


@pytest.mark.parametrize("stage", [1, 3])
def test_averages_are_saved_and_loaded_as_full_tensors(group, stage):
    """What is loaded inside are the averages."""
    model = ShardLite(net(), group=group, stage=stage)
    average = EMA(model, 0.5)
    square(model).backward()
    optim.SGD(model.parameters(), lr=1.0).step()
    average.update()
    saved, trained = average.full_state_dict(), model.full_state_dict()
    same_states("averages of rank 0", average.full_state_dict(rank=0), {} if group.rank() else saved)
    with average.swapped():
        for state in (model.full_state_dict(), average.full_state_dict()):
            assert not any(torch.equal(value, trained[name]) for name, value in state.items())
            same_states("averages", state, saved)
    average.update()
    with average.swapped():
        model.load_full_state_dict(saved)
    same_states("trained weights", model.full_state_dict(), trained)
    same_states("averages", average.full_state_dict(), saved)


@pytest.mark.stages(1, 3)
def test_a_run_that_is_resumed_has_the_same_averages(group, stage):
    """Compare a run that was interrupted after some steps with one that was not."""

    def begin() -> tuple[ShardLite, optim.Optimizer, EMA]:
        torch.manual_seed(3)
        module = net()
        module[0].requires_grad_(False)
        model = ShardLite(module, group=group, stage=stage)
        return model, AdamW(model.parameters(), lr=0.1), EMA(model, lambda n: n / (n + 1))

    def train(model: ShardLite, optimizer: optim.Optimizer, average: EMA) -> None:
        for _ in range(2):
            take_step(optimizer, square(model))
            average.update()

    first = begin()
    train(*first)
    first[0].module[0].requires_grad_(True)
    train(*first)
    file = io.BytesIO()
    torch.save([first[0].full_state_dict(), *(each.state_dict() for each in first[1:])], file)
    second = begin()
    weights, *states = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    second[0].load_full_state_dict(weights)
    for each, state in zip(second[1:], states, strict=True):
        each.load_state_dict(state)  # the average has averages of what is frozen here
    second[0].module[0].requires_grad_(True)
    for run in (first, second):
        train(*run)
    assert first[2].updates == second[2].updates == 6
    same_states("averages", second[2].full_state_dict(), first[2].full_state_dict())


def test_a_state_that_does_not_fit_changes_nothing(group):
    model = ShardLite(net(), group=group)
    average = EMA(model)
    state = average.state_dict()
    before = {name: value.clone() for name, value in state["averages"].items()}
    names = sorted(before)
    lacking = {name: torch.zeros_like(value) for name, value in before.items() if name != names[0]}
    longer = {name: torch.zeros(len(value) + 32, *value.shape[1:]) for name, value in before.items()}
    for wrong, words in (
        (model.full_state_dict(), "the state is of something else, but this rank keeps part"),
        ({**state, "part": "part 7 of 9"}, "the state is of part 7 of 9, but this rank keeps part"),
        ({**state, "averages": lacking}, rf"state lacks {names[0]}: was"),
        ({**state, "averages": {**before, "extra": torch.zeros(1)}}, "state has unknown extra: was"),
        ({**state, "averages": longer}, r"'0\.inner\.\w+' has shape .*, but this rank's has"),
    ):
        with pytest.raises(LayoutError, match=words):
            average.load_state_dict(wrong)
    same_states("state", average.state_dict()["averages"], before)


def test_arguments_are_checked(group):
    model = ShardLite(net(), group=group)
    with pytest.raises(TypeError, match="averages a ShardLite model, got Sequential: wrap it first"):
        EMA(net())
    for decay in (1.5, -0.1, float("nan")):
        with pytest.raises(ValueError, match=f"decay must be from 0 to 1, got {decay}"):
            EMA(model, decay)
    for decay in ("0.9", None, True, torch.tensor(0.9)):
        with pytest.raises(TypeError, match="decay must be a number or callable, got"):
            EMA(model, decay)
    average = EMA(model, lambda updates: 1.0 + updates)
    average.update()
    with pytest.raises(ValueError, match=r"from 0 to 1, got 2\.0 for update 1"):
        average.update()
    with pytest.raises(TypeError, match=r"decay must be a number, got tensor\(1\) for update 0"):
        EMA(model, lambda updates: torch.tensor(1)).update()
    assert repr(EMA(model, 0.5)) == f"EMA(decay=0.5, updates=0, elements={sum(p.numel() for p in model.parameters())})"


@pytest.mark.ranks(1, 2)
def test_what_needs_trained_weights_is_an_error_inside(group):
    """Also of another average of the same model."""
    model = ShardLite(net(), group=group)
    optimizer, average, other = AdamW(model.parameters()), EMA(model), EMA(model, 0.5)
    square(model).backward()
    with average.swapped():
        before = {name: shard.clone() for name, shard in model.named_parameters()}
        for attempt in (
            optimizer.step,
            average.update,
            other.update,
            average.swapped().__enter__,
            other.swapped().__enter__,
            lambda: EMA(model),
            average.state_dict,
            lambda: average.load_state_dict({}),
        ):
            with pytest.raises(PhaseError, match=r"EMA\.swapped\(\) is active: leave it before you step"):
                attempt()
        same_states("averaged weights", dict(model.named_parameters()), before)
    optimizer.step()
    other.update()
    with other.swapped():
        pass


@pytest.mark.ranks(1, 2)
def test_weights_in_use_are_not_swapped(group):
    for stage in some_stages(2, 3):
        model = ShardLite(net(), group=group, stage=stage)
        average = EMA(model)
        with model.gathered(), pytest.raises(PhaseError, match="the weights are in use: enter swapped"):
            average.swapped().__enter__()
        with average.swapped():
            square(model)
