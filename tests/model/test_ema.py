"""Moving averages: to the bit those that PyTorch's own function makes of a plain twin, and the way there and back."""

import copy
import gc
import io
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torch.utils._python_dispatch import TorchDispatchMode

from shardlite import EMA, AdamW, LayoutError, PhaseError, Precision, ShardLite, ema
from shardlite.telemetry.meter import Meter
from tests.support.checkpoints import same_state
from tests.support.internals import context
from tests.support.models.losses import on_rows, on_tokens
from tests.support.models.residual import WIDTH, net, square
from tests.support.models.small import LanguageModel, MixedDtypes, with_lora
from tests.support.twins.sharded import Loss, Pair, Turn, local_parts, same_bits, slow, some_stages

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
        for name, average in self.ema.state_dict()["averages"].items():
            same_bits(f"average of {name!r}", average, parts[name])

    @torch.no_grad()
    def evaluate(self) -> None:
        """Compare what the averaged models compute, and all that is in them; then the trained one must be as before."""
        model, turn = self.pair.model, Turn(99, self.pair.rank, 0)
        before = {name: shard.clone() for name, shard in model.named_parameters()}
        with self.ema.swapped():
            ours, full = self.loss(model, turn), model.full_state_dict()
        for name, shard in model.named_parameters():
            same_bits(f"trained weight {name!r}", shard.detach(), before[name])
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


def follows_body(group, stages, name):
    make, loss, precision = CASES[name]
    for stage in stages:
        follow(make, loss, group, stage=stage, precision=precision)


@pytest.mark.parametrize(
    ("world_size", "stages"), [(1, (0, 3)), (2, (0, 3)), pytest.param(4, (1, 2, 3), marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", CASES)
def test_averages_are_those_of_the_plain_twin(cluster, world_size, stages, name):
    cluster.check(follows_body, world_size, stages, name)


def hybrid_body(group):
    del group
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for stage in (1, 3):
        follow(language_model, on_tokens, mesh, stage=stage, replicas=2)


def test_averages_of_hybrid_sharding(cluster):
    cluster.check(hybrid_body, 4)


def warm_up_body(group):
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


def test_decay_may_warm_up(cluster):
    cluster.check(warm_up_body, 2)


# ---- what it costs --------------------------------------------------------------------------------------------------


class Count(TorchDispatchMode):
    """Counts the calls of operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def cost_body(group, stage):
    """Return how many operators an update runs, and how many bytes averages and parameters take."""
    model = ShardLite(LanguageModel(), group=group, stage=stage)
    average = EMA(model)
    with Count() as count:
        average.update()
    held = model.memory()
    assert held["averages"].now == held["averages"].peak
    result = count.calls, len(model.unit_names), held["averages"].now, held["parameters"].now
    del average
    gc.collect()
    assert model.memory()["averages"].now == 0
    model.zero_grad()
    AdamW(model.parameters()).step()  # there is no average to update any more
    return result


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.stages(0, 3)
def test_an_update_is_one_call_on_the_arena(cluster, world_size, stage):
    parts = stage in (1, 2) and world_size > 1
    for calls, units, averages, parameters in cluster.run(cost_body, world_size, stage):
        assert calls == {"lerp_": units if parts else 1}
        assert averages == (parameters // world_size if parts else parameters)


def exchange_body(group):
    """Return how many bytes an exchange adds, and how many it exchanges."""
    model = ShardLite(nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4))), group=group)
    average = EMA(model)
    with Meter() as meter:
        before = meter.live
        with average.swapped():
            pass
        return meter.peak - before, model.memory()["averages"].now


def test_an_exchange_needs_little_memory(cluster):
    for extra, averages in cluster.run(exchange_body, 2):
        assert averages == 2 * 2**20 * 4
        assert extra <= ema._CHUNK * 4 + 1024


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


def uses_body(group, stage):
    """Whatever reads weights inside has the averages: forwards in any mode, methods, `gathered()`."""
    plain = Talker()
    twin = copy.deepcopy(plain)
    model = ShardLite(plain, group=group, stage=stage)
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


@pytest.mark.parametrize(("world_size", "stage"), [(1, 3), (2, 3), slow(2, 2)])
def test_whatever_is_done_inside_has_the_averages(cluster, world_size, stage):
    cluster.check(uses_body, world_size, stage)


def exception_body(group, stage):
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


@pytest.mark.stages(1, 3)
def test_trained_weights_are_back_after_an_exception(cluster, stage):
    cluster.check(exception_body, 2, stage)


def interrupted_body(group, stage):
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


@pytest.mark.parametrize(("world_size", "stage"), [(2, 3), (2, 0), slow(1, 2), slow(4, 1), slow(2, 2)])
def test_gradients_that_wait_are_not_touched(cluster, world_size, stage):
    cluster.check(interrupted_body, world_size, stage)


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


@torch.no_grad()
def early_body(group, stage):
    """A rank that is done early must not change places while others gather: its part is theirs, too."""
    plain = Skipping()
    twin = copy.deepcopy(plain)
    model = ShardLite(plain, group=group, stage=stage, prefetch=0)
    average, x = EMA(model), torch.ones(2, WIDTH)
    for shard in model.parameters():
        shard.mul_(2)
    count = 4 if group.rank() else 1
    for _ in range(2):
        with average.swapped():
            same_bits("averaged", model(x, count), twin(x, count))
        torch._foreach_mul_(list(twin.parameters()), 2)
        same_bits("trained", model(x, count), twin(x, count))
        torch._foreach_div_(list(twin.parameters()), 2)


@pytest.mark.parametrize("stage", [slow(1), 3])
def test_a_rank_that_is_done_early_waits(cluster, stage):
    cluster.check(early_body, 2, stage)


CHANGED = r"modified by an inplace operation|was changed between its forward and its backward"


def across_body(group, stage):
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


@pytest.mark.stages(0, 3)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_backward_across_is_an_error(cluster, world_size, stage):
    cluster.check(across_body, world_size, stage)


def one_rank_body(group):
    """Ranks of which one has averaged weights must not hear each other's messages."""
    model = ShardLite(net(), group=group)
    average, version = EMA(model), context(model).version
    changes = [version.number]
    with average.swapped():
        changes.append(version.number)
    changes.append(version.number)
    assert len(set(changes)) == 3


def test_both_ways_count_as_changes(cluster):
    cluster.check(one_rank_body, 1)


def load_body(group, stage):
    """What is loaded inside are the averages."""
    model = ShardLite(net(), group=group, stage=stage)
    average = EMA(model, 0.5)
    square(model).backward()
    optim.SGD(model.parameters(), lr=1.0).step()
    average.update()
    saved, trained = average.full_state_dict(rank=0), model.full_state_dict()
    assert bool(saved) == (group.rank() == 0)
    with average.swapped():
        for state in (model.full_state_dict(), average.full_state_dict()):
            assert not any(torch.equal(value, trained[name]) for name, value in state.items())
            same_state(saved, state)
    average.update()
    with average.swapped():
        model.load_full_state_dict(saved)
    for rank, whole in enumerate((saved, None)):
        if group.rank() == rank:
            again, now = average.full_state_dict(rank=0), model.full_state_dict()
            same_state(trained, now)
            if whole:
                same_state(whole, again)


@pytest.mark.parametrize("stage", [1, 3])
def test_averages_are_saved_and_loaded_as_whole_tensors(cluster, stage):
    cluster.check(load_body, 2, stage)


# ---- what is frozen -------------------------------------------------------------------------------------------------


def lora_body(group, stage):
    both = follow(lambda: with_lora(LanguageModel()), on_tokens, group, stage=stage)
    names = {name for name, param in both.pair.twin.module.named_parameters() if param.requires_grad}
    assert set(both.ema.state_dict()["averages"]) == names
    return both.pair.model.memory()["averages"].now


def test_frozen_parameters_have_no_averages(cluster):
    """All adapters are smaller than the shortest arena."""
    assert cluster.run(lora_body, 2, 3) == [4096, 4096]
    assert cluster.run(lora_body, 2, 1) == [4096, 4096]


def unfreezing_body(group, stage):
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


@pytest.mark.parametrize(("world_size", "stage"), [(2, 3), (2, 0), slow(1, 3), slow(4, 2)])
def test_what_is_unfrozen_is_averaged_from_its_first_step_on(cluster, world_size, stage):
    cluster.check(unfreezing_body, world_size, stage)


# ---- states ---------------------------------------------------------------------------------------------------------


def resume_body(group, stage):
    """Return what two runs end with: one that was interrupted after some steps, and one that was not."""

    def begin() -> tuple[ShardLite, optim.Optimizer, EMA]:
        torch.manual_seed(3)
        module = net()
        module[0].requires_grad_(False)
        model = ShardLite(module, group=group, stage=stage)
        return model, AdamW(model.parameters(), lr=0.1), EMA(model, lambda n: n / (n + 1))

    def train(model: ShardLite, optimizer: optim.Optimizer, average: EMA) -> None:
        for _ in range(2):
            square(model).backward()
            optimizer.step()
            optimizer.zero_grad()
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
    for each, saved in zip(second[1:], states, strict=True):
        each.load_state_dict(saved)  # there are averages of what is frozen here
    second[0].module[0].requires_grad_(True)
    for run in (first, second):
        train(*run)
    assert first[2].updates == second[2].updates == 6
    theirs = second[2].full_state_dict()
    same_state(first[2].full_state_dict(), theirs)


@pytest.mark.stages(1, 3)
def test_a_run_that_is_resumed_has_the_same_averages(cluster, stage):
    cluster.check(resume_body, 2, stage)


def misfit_body(group):
    model = ShardLite(net(), group=group)
    average = EMA(model)
    state = average.state_dict()
    before = {name: value.clone() for name, value in state["averages"].items()}
    names = sorted(before)
    lacking = {name: torch.zeros_like(value) for name, value in before.items() if name != names[0]}
    longer = {name: torch.zeros(len(value) + 32, *value.shape[1:]) for name, value in before.items()}
    for wrong, words in (
        (model.full_state_dict(), "the state is of something else, this rank keeps part"),
        ({**state, "part": "part 7 of 9"}, "the state is of part 7 of 9, this rank keeps part"),
        ({**state, "averages": lacking}, rf"state lacks {names[0]}: was"),
        ({**state, "averages": {**before, "extra": torch.zeros(1)}}, "state has unknown extra: was"),
        ({**state, "averages": longer}, r"'0\.inner\.\w+' has shape .*, this rank's is"),
    ):
        with pytest.raises(LayoutError, match=words):
            average.load_state_dict(wrong)
    same_state(average.state_dict()["averages"], before)


def test_a_state_that_does_not_fit_changes_nothing(cluster):
    cluster.check(misfit_body, 2)


# ---- errors ---------------------------------------------------------------------------------------------------------


def arguments_body(group):
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


def inside_body(group):
    """What needs the trained weights is an error inside, of another average of the same model too."""
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
            with pytest.raises(PhaseError, match=r"the model has averaged weights now: .* outside of EMA\.swapped\(\)"):
                attempt()
        for name, shard in model.named_parameters():
            same_bits(name, shard.detach(), before[name].detach())
    optimizer.step()
    other.update()
    with other.swapped():
        pass


def in_use_body(group):
    for stage in some_stages(2, 3):
        model = ShardLite(net(), group=group, stage=stage)
        average = EMA(model)
        with model.gathered(), pytest.raises(PhaseError, match="the weights are in use: enter swapped"):
            average.swapped().__enter__()
        with average.swapped():
            square(model)


@pytest.mark.parametrize("body", [arguments_body, inside_body, in_use_body], ids=lambda body: body.__name__)
@pytest.mark.parametrize("world_size", [1, 2])
def test_mistakes_are_errors(cluster, world_size, body):
    cluster.check(body, world_size)
