"""Moving averages have the bits of PyTorch's function on a plain twin, and can be swapped in and out."""

import gc
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.swa_utils import get_ema_multi_avg_fn

from shardlite import EMA, AdamW, Precision, ShardLite, ema
from shardlite.telemetry.meter import Meter
from tests.support.internals import context
from tests.support.models.losses import on_rows, on_tokens
from tests.support.models.residual import WIDTH, net, square
from tests.support.models.small import LanguageModel, MixedDtypes
from tests.support.transports.played_symmetric import Launches
from tests.support.twins.sharded import Loss, Pair, Turn, local_parts, same_bits, same_states, slow, with_twin

BF16 = Precision(compute=torch.bfloat16)


def language_model() -> LanguageModel:
    return LanguageModel(blocks=2)


class Averaged:
    """An average of a pair's model beside that of all of its twin's parameters, frozen ones too, by PyTorch."""

    def __init__(self, pair: Pair, loss: Loss, decay: float = 0.9) -> None:
        self.pair, self.loss, self.decay = pair, loss, decay
        self.ema = EMA(pair.model, decay)
        self.expected = {name: master.detach().clone() for name, master in pair.twin.masters.items()}

    def step(self, *modes: str, decay: float | None = None) -> None:
        """Train both for a step, update the averages, and compare them."""
        self.pair.step(self.loss, modes or ("step",))
        self.ema.update()
        average = get_ema_multi_avg_fn(self.decay if decay is None else decay)
        for name, master in self.pair.twin.masters.items():
            average([self.expected[name]], [master.detach()], None)
        self.compare()

    def compare(self) -> None:
        """Compare this rank's averages."""
        parts = local_parts(self.pair.model, self.expected)
        averages = self.ema.state_dict()["averages"]
        same_states("averages", averages, {name: parts[name] for name in averages})

    @torch.no_grad()
    def evaluate(self) -> None:
        """Compare what the averaged models compute, and all that is in them; then the trained one must be as before."""
        model, turn = self.pair.model, Turn(99, self.pair.rank, 0)
        before = {name: shard.clone() for name, shard in model.named_parameters()}
        with self.ema.swapped():
            ours, full = self.loss(model, turn), model.full_state_dict()
        same_states("trained weights", dict(model.named_parameters()), before)
        for name, param in self.pair.twin.module.named_parameters():
            param.copy_(self.expected[name])
            same_bits(f"whole average of {name!r}", full[name], self.expected[name])
        same_bits("output of the averaged model", ours, self.loss(self.pair.twin, turn))
        self.pair.twin.refresh()
        same_bits("output of the trained model", self.loss(model, turn), self.loss(self.pair.twin, turn))


def follow(make: Callable[[], nn.Module], loss: Loss, group: Any, **options: Any) -> Averaged:
    """Train for some steps, with evaluations of the average between."""
    both = Averaged(Pair(make, group, **options), loss)
    both.evaluate()
    both.step()
    both.evaluate()
    both.step("local", "step")
    both.step()
    both.evaluate()
    both.step("sharded", "step")
    return both


# ---- the same bits --------------------------------------------------------------------------------------------------

CASES = {
    "tied": (language_model, on_tokens, Precision()),
    "bf16": (language_model, on_tokens, BF16),
    "dtypes": (MixedDtypes, on_rows, Precision()),
}


@pytest.mark.parametrize(("group", "stages"), [(1, (0, 3)), (2, (0, 3)), slow(4, (1, 2, 3))], indirect=["group"])
@pytest.mark.parametrize("name", CASES)
def test_averages_are_those_of_the_plain_twin(group, stages, name):
    make, loss, precision = CASES[name]
    for stage in stages:
        follow(make, loss, group, stage=stage, precision=precision)


@pytest.mark.ranks(4)
def test_averages_of_hybrid_sharding(group):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for stage in (1, 3):
        follow(language_model, on_tokens, mesh, stage=stage, replicas=2)


def test_decay_may_warm_up(group):
    """`decay` is asked for with the number of updates before this one."""
    asked = []

    def warm_up(updates: int) -> float:
        asked.append(updates)
        return min(0.6, (1 + updates) / (4 + updates))

    both = Averaged(Pair(language_model, group), on_tokens)
    both.ema = EMA(both.pair.model, warm_up)
    for updates in range(3):
        both.step(decay=min(0.6, (1 + updates) / (4 + updates)))
    assert asked == [0, 1, 2]
    assert both.ema.updates == 3


# ---- what it costs --------------------------------------------------------------------------------------------------


@pytest.mark.stages(0, 3)
@pytest.mark.ranks(1, 2)
def test_an_update_is_one_call_on_the_arena(group, stage):
    """Of each unit's, where the averages are those of a part of the parameters."""
    model = ShardLite(LanguageModel(), group=group, stage=stage)
    average = EMA(model)
    with Launches() as found:
        average.update()
    parts = group.size() if stage in (1, 2) else 1
    averages, parameters = (model.memory()[name] for name in ("averages", "parameters"))
    assert found.names == ["lerp_"] * (len(model.unit_names) if parts > 1 else 1)
    assert averages.now == averages.peak == parameters.now // parts
    del average
    gc.collect()
    assert model.memory()["averages"].now == 0
    model.zero_grad()
    AdamW(model.parameters()).step()  # there is no average to update any more


def test_an_exchange_needs_little_memory(group):
    model = ShardLite(nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4))), group=group)
    average = EMA(model)
    with Meter() as meter:
        before = meter.live
        with average.swapped():
            pass
        assert meter.peak - before <= ema._CHUNK * 4 + 1024
    assert model.memory()["averages"].now == 2 * 2**20 * 4


# ---- inside ---------------------------------------------------------------------------------------------------------


class Talker(LanguageModel):
    """Has a method other than forward, which calls the model again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def generate(self, tokens: Tensor, count: int) -> Tensor:
        for _ in range(count):
            self.calls += 1
            tokens = torch.cat([tokens, self(tokens)[:, -1:].argmax(-1)], 1)
        return tokens


@pytest.mark.parametrize(("group", "stage"), [(1, 3), (2, 2), (2, 3), slow(2, 0), slow(2, 1)], indirect=["group"])
def test_whatever_is_done_inside_has_the_averages(group, stage):
    """Whatever reads weights inside has the averages: forwards in any mode, methods, `gathered()`."""
    plain = Talker()
    model, twin = with_twin(plain, group, stage=stage)
    with torch.inference_mode():
        average = EMA(model, 0.0)
    optimizer = AdamW(model.parameters(), lr=0.1)
    tokens = torch.tensor([[1, 4, 2], [8, 0, 4]])
    model(tokens).square().mean().backward()
    optimizer.step()
    average.update()  # the weights of now; another step makes them other ones
    twin.load_state_dict(average.full_state_dict())
    model(tokens).square().mean().backward()
    optimizer.step()
    trained = model.full_state_dict()
    assert not torch.equal(trained["embed.weight"], twin.embed.weight)
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode(), average.swapped() as same:
            assert same is model
            same_bits(f"forward under {mode.__name__}", model(tokens).detach(), twin(tokens).detach())
        with average.swapped(), mode():
            same_bits(f"forward in {mode.__name__}", model(tokens).detach(), twin(tokens).detach())
            assert torch.equal(plain.generate(tokens, 3), twin.generate(tokens, 3))
            with model.gathered(), torch.no_grad():
                same_bits("gathered", plain.embed.weight.detach(), twin.embed.weight.detach())
    assert model.full_state_dict()["calls"] == 9  # the buffer is the model's, not the average's
    twin.load_state_dict(trained)
    same_bits("forward outside", model(tokens).detach(), twin(tokens).detach())


@pytest.mark.stages(1, 3)
def test_trained_weights_are_back_after_an_exception(group, stage):
    """After an exception, in a forward or elsewhere, the trained weights are there."""
    model = ShardLite(net(), group=group, stage=stage)
    optimizer, average = AdamW(model.parameters(), lr=0.1), EMA(model)
    square(model).backward()
    optimizer.step()
    before = square(model).detach()

    def fail(width: int) -> None:
        with average.swapped():
            assert not torch.equal(square(model), before)
            model(torch.zeros(1, width))
            raise KeyboardInterrupt

    for width, error in ((WIDTH + 1, RuntimeError), (WIDTH, KeyboardInterrupt)):
        with pytest.raises(error):
            fail(width)
        assert torch.equal(square(model), before)
    average.update()
    optimizer.step()
    with average.swapped():
        pass


@pytest.mark.parametrize(("group", "stage"), [(2, 3), (2, 0), slow(1, 2), slow(4, 1), slow(2, 2)], indirect=["group"])
def test_gradients_that_wait_are_not_touched(group, stage):
    """An evaluation between a backward that accumulates and the one that steps changes no bit of the step."""
    both = Averaged(Pair(language_model, group, stage=stage), on_tokens)
    both.step()

    def loss(model: Callable[..., Any], turn: Turn) -> Tensor:
        if model is both.pair.model and turn.micro > 0:
            with torch.no_grad(), both.ema.swapped():
                on_tokens(model, turn)
        return on_tokens(model, turn)

    both.loss = loss
    both.step("local", "local", "step")
    both.step("sharded", "sharded", "step")


class Skipping(nn.Module):
    """Skips what a rank does not need, and takes its time before the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = net(4)

    def forward(self, x: Tensor, count: int) -> Tensor:
        for block in self.blocks[:count]:
            x = block(x)
            time.sleep(0.05)
        return x


@pytest.mark.parametrize("stage", [slow(1), 3])
@torch.no_grad()
def test_a_rank_that_is_done_early_waits(group, stage):
    """A rank that is done early must not change places while others gather: its part is theirs, too."""
    model, twin = with_twin(Skipping(), group, stage=stage, prefetch=0)
    average, x = EMA(model), torch.ones(2, WIDTH)
    for shard in model.parameters():
        shard.mul_(2)
    count = 4 if group.rank() else 1
    for _ in range(2):
        with average.swapped():
            same_bits("averaged", model(x, count), twin(x, count))
        for param in twin.parameters():
            param.mul_(2)
        same_bits("trained", model(x, count), twin(x, count))
        for param in twin.parameters():
            param.div_(2)


CHANGED = r"modified by an inplace operation|was changed between its forward and its backward"


@pytest.mark.stages(0, 3)
@pytest.mark.ranks(1, 2)
def test_a_backward_across_is_an_error(group, stage):
    """A backward on the other side than its forward would use the wrong weights."""
    model = ShardLite(net(), group=group, stage=stage)
    average = EMA(model)
    loss = square(model)
    with average.swapped(), pytest.raises(RuntimeError, match=CHANGED):
        loss.backward()
    model.zero_grad()
    with average.swapped():
        loss = square(model)
    with pytest.raises(RuntimeError, match=CHANGED):
        loss.backward()
    model.zero_grad()
    with average.swapped():
        square(model).backward()
    assert all(shard.grad is not None for shard in model.parameters())


@pytest.mark.ranks(1)
def test_both_ways_count_as_changes(group):
    """Ranks of which one has averaged weights must not hear each other's messages."""
    model = ShardLite(net(), group=group)
    average, version = EMA(model), context(model).version
    changes = [version.number]
    with average.swapped():
        changes.append(version.number)
    changes.append(version.number)
    assert len(set(changes)) == 3


# ---- what is frozen -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("group", "stage"), [(2, 3), (2, 0), slow(1, 3), slow(4, 2)], indirect=["group"])
def test_what_is_unfrozen_is_averaged_from_its_first_step_on(group, stage):
    """Blocks are unfrozen, and frozen again, between steps: the averages are those of all parameters."""

    def make() -> nn.Module:
        model = LanguageModel(blocks=3)
        model.blocks[:2].requires_grad_(False)
        return model

    both = Averaged(Pair(make, group, stage=stage), on_tokens)
    held = both.pair.model.memory
    few = held()["averages"].now

    def freeze(block: int, frozen: bool) -> None:
        for module in (both.pair.model.module, both.pair.twin.module):
            module.blocks[block].requires_grad_(not frozen)

    both.step()
    freeze(1, False)
    assert held()["averages"].now == few
    both.step()
    assert held()["averages"].now > few
    both.evaluate()
    freeze(2, True)
    both.step()
    freeze(0, False)
    freeze(1, True)
    both.evaluate()
    both.step()
    both.evaluate()
    assert set(both.ema.state_dict()["averages"]) == set(both.expected)
