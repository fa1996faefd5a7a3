"""Problems reported by users of other libraries that no other test covers.

`docs/compared.md` lists all such complaints, with what they are about and the tests of each.
"""

import copy
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.lr_scheduler import LambdaLR

from shardlite import AdamW, LayoutError, ShardLite
from shardlite.telemetry.meter import Meter
from tests.support.models.losses import on_tokens
from tests.support.models.residual import WIDTH, net, square
from tests.support.models.small import LanguageModel, Residual
from tests.support.patience import passes_over
from tests.support.ranks.cluster import Cluster
from tests.support.ranks.forkserver import ForkServer
from tests.support.transports.pressure import late_messages, on_rows, short_messages, under_pressure
from tests.support.twins.sharded import WIDE, Pair, Turn, same_bits, same_states, slow, some_stages, take_step

# ---- order ----------------------------------------------------------------------------------------------------------


def ordered_body(group: Any) -> tuple[int, list[str]]:
    """Return what hashing gives on this rank, and what was gathered and reduced in which order."""
    keep = [torch.zeros(17 * i) for i in range(100 * dist.get_rank(group))]  # tensors have other addresses
    model = ShardLite(LanguageModel(blocks=6), group=group)
    optimizer = AdamW(model.parameters())
    model.trace.take()
    for step in range(3):
        take_step(optimizer, on_tokens(model, Turn(step, dist.get_rank(group), 0)))
    del keep
    return hash("a unit"), [event for event in model.trace.take() if event.split()[0] in ("gather", "reduce")]


@pytest.fixture
def ranks_that_hash_differently():
    servers = [ForkServer(PYTHONHASHSEED=str(seed)) for seed in (1, 2)]
    gloo = Cluster(*servers, sizes=[2])
    yield gloo
    gloo.close()
    for server in servers:
        server.close()


@pytest.mark.slow
def test_the_order_of_messages_does_not_follow_from_hashes(ranks_that_hash_differently):
    hashes, orders = zip(*ranks_that_hash_differently.run(ordered_body, 2), strict=True)
    assert len(set(hashes)) > 1, "all workers hash alike: this test shows nothing"
    assert all(order == orders[0] for order in orders)
    assert len(orders[0]) > 3 * 2 * 7


class Parallel(nn.Module):
    """Layers beside each other, computed in an order that the caller chooses. [B, WIDTH] -> [B, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])

    def forward(self, x: Tensor, first: int) -> Tensor:
        places = [(first + i) % len(self.layers) for i in range(len(self.layers))]
        computed = {place: torch.tanh(self.layers[place](x)) for place in places}
        return torch.stack([computed[place] for place in range(len(self.layers))]).sum(0)


class Parallels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Parallel() for _ in range(3)])

    def forward(self, x: Tensor, first: int) -> Tensor:
        for block in self.blocks:
            x = block(x, first)
        return x


def other_orders_body(group: Any, stage: int) -> list[list[int]]:
    """Train, and return in which order the gradients of the first block came in each step."""
    pair = Pair(Parallels, group, stage=stage, units=Parallel)
    orders: list[list[int]] = []
    for i, layer in enumerate(pair.model.module.blocks[0].layers):
        layer.weight.register_hook(lambda _, i=i: orders[-1].append(i))

    def loss(model: Callable[..., Any], turn: Turn) -> Tensor:
        x = torch.randn(3, WIDTH, generator=turn.generator())
        return model(x, turn.rank + turn.step).square().mean()

    for _ in range(3):
        orders.append([])
        pair.step(loss, clip=0.01)
    return orders


@pytest.mark.parametrize("world_size", [2, WIDE])
def test_gradients_may_come_in_another_order_on_each_rank(cluster, world_size):
    for stage in some_stages(1, 3):
        seen = cluster.run(other_orders_body, world_size, stage)
        for step in range(3):
            assert len({tuple(orders[step]) for orders in seen}) == world_size


class Choosing(nn.Module):
    """Blocks of which the data chooses some. [B, WIDTH] -> [B, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Residual(WIDTH, 9) for _ in range(5)])

    def forward(self, x: Tensor, chosen: Iterable[int]) -> Tensor:
        for place in chosen:
            x = self.blocks[place](x)
        return x


def test_training_and_evaluation_on_other_paths_by_turns(group: Any) -> None:
    """Training, evaluation and evaluation by parts by turns, each on another path in each step, alike on all ranks."""
    pair = Pair(Choosing, group)

    def loss(model: Callable[..., Any], turn: Turn) -> Tensor:
        path = torch.randperm(5, generator=torch.Generator().manual_seed(turn.step))[: 2 + turn.step % 3].tolist()
        return model(torch.randn(3, WIDTH, generator=turn.generator()), path).square().mean()

    for step in range(6):
        pair.step(loss)
        pair.twin.refresh()
        x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(step))
        with torch.no_grad() if step % 2 else torch.inference_mode():
            for path in ([4, 0], [1], [step % 5, 3, 3]):
                same_bits(f"step {step}, evaluated", pair.model(x, path), pair.twin(x, path))
            same_bits("a block", pair.model.module.blocks[2](x), pair.twin.module.blocks[2](x))


class Viewed(Residual):
    """Returns a view. [B, WIDTH] -> [B, WIDTH]."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:]


class InPlace(nn.Module):
    """Changes in place what its blocks return. [B, WIDTH] -> [B, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Viewed(WIDTH, 9) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x += 1
        return x


@pytest.mark.parametrize("stage", [0, 3])
def test_outputs_that_are_views_may_be_changed_in_place(group: Any, stage: int) -> None:
    """Nothing hangs on the outputs of units, so nothing is lost where they are replaced."""
    pair = Pair(InPlace, group, stage=stage)
    for _ in range(3):
        pair.step(lambda model, turn: model(torch.randn(3, WIDTH, generator=turn.generator())).square().mean())


# ---- races ----------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(4)
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.slow
def test_hybrid_sharding_survives_late_messages_and_reused_memory(group: Any, stage: int) -> None:
    """Large units, late messages and reused memory, where sums go over replicas as well."""
    del group
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("replicate", "shard"))

    def make(module: Callable[[], nn.Module]) -> Pair:
        return Pair(module, mesh, replicas=2, stage=stage, units=Residual)

    with under_pressure(make, 2, seed=10 + stage, blocks=2) as pair:
        pair.step(on_rows, clip=0.01)
        pair.step(on_rows, ("sharded", "local", "step"))


# ---- numbers --------------------------------------------------------------------------------------------------------


def test_an_optimizer_may_be_built_after_the_model_was_used(group: Any) -> None:
    """The model has run, forward and backward, before there is an optimizer."""
    for stage in some_stages(1, 3):
        for make in (lambda params: AdamW(params, lr=0.1), lambda params: optim.SGD(params, lr=0.1)):
            plain = net()
            twin = copy.deepcopy(plain)
            model = ShardLite(plain, group=group, stage=stage)
            for each in (model, twin):
                with torch.no_grad():
                    square(each)
                square(each).backward()
                each.zero_grad()
            optimizers = make(model.parameters()), make(twin.parameters())
            before = {name: value.clone() for name, value in twin.state_dict().items()}
            for _ in range(3):
                for each, optimizer in zip((model, twin), optimizers, strict=True):
                    take_step(optimizer, square(each))
            for name, value in model.full_state_dict().items():  # sizes are multiples of 16: no tail is rounded apart
                same_bits(name, value, twin.state_dict()[name])
                assert not torch.equal(value, before[name])


def test_small_updates_of_a_bf16_model_are_not_lost(group: Any) -> None:
    """Below 1 neighbours are 2^-8 apart in bf16, so steps of 1e-4 are lost there; in fp32 each is rounded by 2^-25."""
    moved = []
    for wrapped in (True, False):
        plain = nn.Linear(32, 32, bias=False, dtype=torch.bfloat16)
        nn.init.ones_(plain.weight)
        model = ShardLite(plain, group=group) if wrapped else plain
        optimizer = optim.SGD(model.parameters(), lr=1e-4)
        for _ in range(10):
            model(torch.full((1, 32), 1.0, dtype=torch.bfloat16)).sum().backward()
            take_step(optimizer)
        weight = model.full_state_dict()["weight"] if wrapped else plain.weight
        moved.append(1 - weight.flatten()[0].item())
    ours, plain = moved
    assert plain == 0
    assert abs(ours - 1e-3) <= 10 * 2**-24


@pytest.mark.ranks(2, WIDE)
def test_a_run_can_be_repeated_to_the_bit(group: Any) -> None:
    """Two runs, the second with late messages, shorter ones, and another number of buffers."""
    runs = []
    for prefetch, messages, delays in ((1, nullcontext(), nullcontext()), (3, short_messages(2048), late_messages(5))):
        torch.manual_seed(3)
        with messages, delays:
            model = ShardLite(LanguageModel(dropout=0.1), group=group, prefetch=prefetch)
            optimizer = AdamW(model.parameters(), lr=0.02)
            losses = []
            for step in range(3):
                turn = Turn(step, dist.get_rank(group), 0)
                torch.manual_seed(turn.generator().initial_seed())  # dropout
                loss = on_tokens(model, turn)
                loss.backward()
                norm = model.clip_grad_norm_(0.1)
                take_step(optimizer)
                losses += [loss.detach(), norm]
        runs.append((losses, model.full_state_dict()))
    (losses, weights), (again, weights_again) = runs
    for i, (one, other) in enumerate(zip(losses, again, strict=True)):
        same_bits(f"loss or norm {i}", other, one)
    same_states("state", weights_again, weights)


# ---- saving and going on --------------------------------------------------------------------------------------------


class Run:
    """A training run: model, optimizer with two groups, schedule."""

    def __init__(self, group: Any, seed: int) -> None:
        torch.manual_seed(seed)
        self.rank = dist.get_rank(group)
        self.model = ShardLite(LanguageModel(), group=group)
        params = list(self.model.parameters())
        decayed = {"params": [p for p in params if p.ndim >= 2], "weight_decay": 0.3}
        others = {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0, "lr": 0.05}
        self.optimizer = AdamW([decayed, others], lr=0.02)
        self.schedule = LambdaLR(self.optimizer, lambda step: 0.8**step)

    def train(self, steps: Iterable[int]) -> list[Tensor]:
        losses = []
        for step in steps:
            loss = on_tokens(self.model, Turn(step, self.rank, 0))
            loss.backward()
            self.model.clip_grad_norm_(0.1)
            take_step(self.optimizer)
            self.schedule.step()
            losses.append(loss.detach())
        return losses

    def cost(self) -> tuple[Any, Any]:
        """Return the bytes that this rank holds, and what another step sends."""
        passes_over(self.model)
        before = self.model.traffic()
        self.train([7])
        passes_over(self.model)
        sent = {
            (unit, purpose): (each.calls - before[unit][purpose].calls, each.nbytes - before[unit][purpose].nbytes)
            for unit, purposes in self.model.traffic().items()
            for purpose, each in purposes.items()
            if purpose in before.get(unit, {})
        }
        held = {purpose: each.now for purpose, each in self.model.memory().items() if each.now}
        del held["idle shared memory"]  # other models have some of it
        return held, {what: each for what, each in sent.items() if each != (0, 0)}


def saved(run: Run) -> dict[str, Any]:
    own = copy.deepcopy((run.optimizer.state_dict(), run.schedule.state_dict()))
    return {"weights": run.model.full_state_dict(rank=0), "optimizer": own[0], "schedule": own[1]}


def resumed(group: Any, state: dict[str, Any]) -> Run:
    run = Run(group, seed=1)
    run.model.load_full_state_dict(state["weights"])
    run.optimizer.load_state_dict(state["optimizer"])
    run.schedule.load_state_dict(state["schedule"])
    return run


@pytest.mark.parametrize(("group", "ranks"), [(2, None), slow(3, None), (4, [[0, 1], [2, 3]])], indirect=["group"])
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(group: Any, ranks: list[list[int]] | None) -> None:
    """It has the same bits, memory and traffic, also if the ranks of the model do not include rank 0."""
    if ranks is not None:
        group = DeviceMesh("cpu", ranks).get_group(1)
    uninterrupted, first = Run(group, seed=0), Run(group, seed=0)
    expected = uninterrupted.train(range(5))
    first.train(range(2))
    second = resumed(group, saved(first))
    for i, (got, loss) in enumerate(zip(second.train(range(2, 5)), expected[2:], strict=True)):
        same_bits(f"the loss of step {2 + i}", got, loss)
    weights = uninterrupted.model.full_state_dict()
    same_states("state", second.model.full_state_dict(), weights)
    assert [each["lr"] for each in second.optimizer.param_groups] == [0.02 * 0.8**5, 0.05 * 0.8**5]
    assert second.cost() == uninterrupted.cost()


def weights_body(group: Any, weights: dict[str, Tensor] | None) -> tuple[dict[str, Tensor], Tensor, Any]:
    """Train or load weights; return these, what an evaluation gives with them, and the optimizer's state."""
    run = Run(group, seed=dist.get_world_size(group))
    if weights is None:
        run.train(range(2))
    else:
        run.model.load_full_state_dict(weights)
    with torch.no_grad():
        output = run.model(torch.arange(6)[None])
    return run.model.full_state_dict(), output, run.optimizer.state_dict()


def wrong_size_body(group: Any, states: list[Any]) -> bool:
    """Load the optimizer's state of half as many ranks; return whether nothing was changed by it."""
    run = Run(group, seed=0)
    run.train(range(1))
    before = copy.deepcopy(run.optimizer.state_dict())
    with pytest.raises(LayoutError, match=r"of rank \d of 2 \(stage 3\), this is rank \d of 4"):
        run.optimizer.load_state_dict(states[dist.get_rank(group)])
    after = run.optimizer.state_dict()
    return all(
        torch.equal(*(getattr(each, "to_local", lambda each=each: each)() for each in (after["state"][i][name], value)))
        for i, each in before["state"].items()
        for name, value in each.items()
    )


def test_weights_go_to_any_number_of_ranks_and_optimizer_state_to_the_same_number_only(cluster):
    results = cluster.run(weights_body, 2, None)
    weights, output, _ = results[0]
    for world_size in (1, 3, 4):
        for loaded, evaluated, _ in cluster.run(weights_body, world_size, weights):
            assert loaded.keys() == weights.keys()
            same_states(f"{world_size} ranks", loaded, weights)
            same_bits(f"{world_size} ranks, evaluated", evaluated, output)
    states = [state for _, _, state in results]
    assert cluster.run(wrong_size_body, 4, [*states, *states]) == [True] * 4


def test_the_state_of_an_optimizer_is_saved_by_each_rank_alone(group: Any) -> None:
    """Only rank 0 saves its optimizer: no other rank is needed for that, and nothing is sent."""
    model = ShardLite(net(), group=group)
    optimizer = AdamW(model.parameters())
    square(model).backward()
    optimizer.step()
    passes_over(model)
    before = model.traffic()
    if dist.get_rank(group) == 0:
        state = copy.deepcopy(optimizer.state_dict())
        assert len(state["state"]) == len(list(model.parameters()))
    assert model.traffic() == before
    dist.barrier(group)
    optimizer.zero_grad()
    square(model).backward()
    optimizer.step()


# ---- memory ---------------------------------------------------------------------------------------------------------

SIDE, DEPTH = 64, 16
UNIT = 4 * SIDE * SIDE
SMALL = 1024  # bytes: flags and the like


def deep() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(SIDE, SIDE, bias=False) for _ in range(DEPTH)])


def peak_of(run: Callable[[], Any]) -> tuple[int, Any]:
    """Return how many bytes there were at most above those before, and what the run returned."""
    with Meter() as meter:
        before = meter.live
        result = run()
        return meter.peak - before, result


@pytest.mark.ranks(2, WIDE)
def test_saving_and_loading_go_unit_by_unit(group: Any) -> None:
    """Beside what rank 0 gets or gives. What an optimizer loads is copied into the memory that it has."""
    model = ShardLite(deep(), group=group)
    optimizer = AdamW(model.parameters())
    take_step(optimizer, model(torch.randn(2, SIDE)).sum())
    saving, state = peak_of(lambda: model.full_state_dict(rank=0))
    loading, _ = peak_of(lambda: model.load_full_state_dict(state or None))
    own = copy.deepcopy(optimizer.state_dict())
    stepping, _ = peak_of(lambda: optimizer.load_state_dict(own))
    assert saving <= ((DEPTH + 1) * UNIT if group.rank() == 0 else 2 * UNIT) + SMALL
    assert loading <= UNIT + SMALL
    assert stepping <= SMALL
