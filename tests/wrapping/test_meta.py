"""Models on the meta device: their values, errors about missing values, and memory."""

import copy
import gc

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardlite import AdamW, Precision, ShardLite
from shardlite.telemetry.meter import Meter
from tests.support.models.meta import Bare, on_meta
from tests.support.models.small import run_all

WIDTH = 12
BATCH = torch.arange(6 * WIDTH, dtype=torch.float32).view(6, WIDTH).sin()


class Rotation(nn.Module):
    """Buffers that a constructor computes, and meta forgets: one is not saved, one has integers, one is tied."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("speeds", torch.empty(WIDTH), persistent=False)
        self.register_buffer("positions", torch.empty(3, dtype=torch.int64))
        self.register_buffer("mask", mask)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.speeds = torch.arange(WIDTH).float().cos()
        self.positions.fill_(-1)
        self.mask.data.copy_(torch.arange(WIDTH).float().sin())

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.speeds * self.mask + self.positions.sum()).to(x.dtype)


class Scale(nn.Module):
    """A parameter of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, dtype=torch.bfloat16))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.weight.data.normal_()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Statistics(nn.BatchNorm1d):
    """In fp32 whatever the weights are in: with bf16 weights and fp32 statistics PyTorch refuses."""

    def forward(self, x: Tensor) -> Tensor:
        self.num_batches_tracked += 1
        norm = nn.functional.batch_norm
        weight, bias = self.weight.float(), self.bias.float()
        return norm(x.float(), self.running_mean, self.running_var, weight, bias, training=True).to(x.dtype)


class Block(nn.Module):
    def __init__(self, mask: Tensor, scale: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2)
        self.rotation = Rotation(mask)
        self.scale = scale
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.inner.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.rotation(self.norm(x))
        y = self.attention(y, y, y, need_weights=False)[0]
        return x + torch.tanh(self.inner(self.scale(y).to(x.dtype)))


class Zoo(nn.Module):
    """All that is easily lost on meta: ties, shared modules, frozen weights, several dtypes, buffers of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH, bias=False)
        self.statistics = Statistics(WIDTH)
        mask = torch.empty(WIDTH)
        self.scale = Scale()  # before the blocks, which share it: constructed in the order of registration
        self.blocks = nn.ModuleList(Block(mask, self.scale) for _ in range(3))
        self.leave = nn.Linear(WIDTH, WIDTH)
        self.leave.weight = self.enter.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(run_all(self.blocks, self.statistics(self.enter(x)))).square().mean()


def seeded(make: type[nn.Module]) -> nn.Module:
    torch.manual_seed(7)
    return make()


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(got) == list(expected)
    for name, value in expected.items():
        value = value.to(got[name].dtype)  # a trainable bf16 weight is kept in fp32
        torch.testing.assert_close(got[name], value, rtol=0, atol=0, msg=lambda m, n=name: f"{n}: {m}")


def train(model: ShardLite) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(3):
        loss = model(BATCH)
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("group", "compute"), [(2, None), (2, torch.bfloat16), (1, None), (3, None)], ids=str, indirect=["group"]
)
@pytest.mark.stages(1, 3)
def test_a_model_on_meta_becomes_the_plain_one(group, stage, compute):
    """A model on meta gets the values of a plain construction, and trains like a model with these values."""
    options = {"group": group, "stage": stage, "units": Block, "precision": Precision(compute=compute)}
    twin = seeded(Zoo)
    model = on_meta(Zoo)
    torch.manual_seed(7)
    model = ShardLite(model, **options)
    assert_same(model.full_state_dict(), twin.state_dict())
    inner = model.module
    assert inner.leave.weight is inner.enter.weight
    assert inner.blocks[0].rotation.mask is inner.blocks[1].rotation.mask
    assert not inner.blocks[0].inner.bias.requires_grad
    plain = ShardLite(Zoo(), **options)
    plain.load_full_state_dict(twin.state_dict())
    assert [each.dtype for each in model.buffers()] == [each.dtype for each in plain.buffers()]
    assert train(model) == train(plain)
    assert_same(model.full_state_dict(), plain.full_state_dict())


class Layers(nn.Sequential):
    """Layers of PyTorch's own; `nn.LSTM` keeps its parameters in lists, and weak references to them."""

    def __init__(self) -> None:
        super().__init__(nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0), nn.LSTM(WIDTH, WIDTH, 2))


def test_layers_of_pytorch(group):
    twin = seeded(Layers)
    model = on_meta(Layers)
    torch.manual_seed(7)
    model = ShardLite(model, group=group, units=nn.LSTM)
    assert_same(model.full_state_dict(), twin.state_dict())
    assert all(torch.equal(got, wanted) for got, wanted in zip(model(BATCH)[1], twin(BATCH)[1], strict=True))


def own_init(module: nn.Module) -> None:
    """Write to parameters and buffers in all possible ways."""
    match module:
        case nn.Linear():
            module.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
            if module.bias is not None:
                nn.init.uniform_(module.bias)
        case Rotation():
            module.register_buffer("speeds", torch.randn(WIDTH), persistent=False)
            module.positions.data.copy_(torch.randint(9, (3,)))
            module.mask.data = torch.randn(WIDTH)
        case Scale():
            module.weight.data.copy_(torch.randn(WIDTH))
        case _:
            reset = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", lambda: None))
            reset()


def own_init_body(group, mesh, policy):
    called = []

    def init(module: nn.Module) -> None:
        if [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            called.append(type(module).__name__)
        own_init(module)

    model = on_meta(Zoo)
    torch.manual_seed(7)
    before = torch.get_rng_state()
    ranks = DeviceMesh("cpu", [[0, 1], [2, 3]]) if mesh else group
    optimizer = AdamW(model.parameters())
    model = ShardLite(model, group=ranks, units=policy, init=init)
    model(BATCH).backward()
    optimizer.step()  # it was built on what was on meta then
    state = model.full_state_dict()
    return called, torch.equal(before, torch.get_rng_state()), state


@pytest.mark.parametrize("mesh", [False, True], ids=["ranks", "replicas"])
def test_init_is_called_on_rank_0_for_each_module_that_owns_something(cluster, mesh):
    (first, *others) = cluster.run(own_init_body, 4 if mesh else 2, mesh, Block)
    block = ["LayerNorm", "NonDynamicallyQuantizableLinear", "MultiheadAttention", "Rotation"]
    rest = [*block, "Linear"]
    expected = ["Linear", "Statistics", "Scale", *rest, *rest, *rest, "Linear"]
    assert first[:2] == (expected, False)
    for other in others:
        assert other[:2] == ([], True)
        assert_same(other[2], first[2])


def test_values_do_not_depend_on_the_units(cluster):
    states = [cluster.run(own_init_body, 2, False, policy)[0][2] for policy in (Block, None, nn.LayerNorm)]
    assert_same(states[0], states[1])
    assert_same(states[0], states[2])


def test_a_module_may_write_to_its_children(group):
    """A block scales the values of its children, as GPT-2 does with layers that write to the residual stream."""

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Sequential) and isinstance(module[0], nn.Linear):
            module[1].weight.mul_(0.5)

    def make() -> nn.Sequential:
        return nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(3)])

    state = ShardLite(on_meta(make), group=group, init=init).full_state_dict()
    for i in range(3):
        assert (state[f"{i}.0.weight"] == 1).all()
        assert (state[f"{i}.1.weight"] == 0.5).all()


def test_init_draws_what_apply_draws(group):
    """The numbers are those of `apply` on a plain model."""
    twin = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3))

    def init(module: nn.Module) -> None:
        for param in module.parameters(recurse=False):
            nn.init.normal_(param)

    model = copy.deepcopy(twin).to("meta")
    torch.manual_seed(3)
    model = ShardLite(model, group=group, units=nn.Linear, init=init)
    torch.manual_seed(3)
    twin.apply(init)
    assert_same(model.full_state_dict(), twin.state_dict())


def must_not_run(module: nn.Module) -> None:
    raise AssertionError(f"{type(module).__name__} was initialized")


@pytest.mark.parametrize("init", [None, must_not_run])
@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_on_meta_receive_what_rank_0_has(group, stage, init):
    """Rank 0 has values, the others have none: no rank initializes."""
    twin = seeded(Zoo)
    model = copy.deepcopy(twin) if dist.get_rank(group) == 0 else on_meta(Zoo)
    model = ShardLite(model, group=group, stage=stage, units=Block, init=init)
    assert_same(model.full_state_dict(), twin.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), twin.buffers(), strict=True))
    train(model)
    assert all(value.isfinite().all() for value in model.full_state_dict().values())
    bare = Bare()  # ranks that receive values need no way to initialize them
    bare.weight.data.fill_(3)
    ShardLite(bare if dist.get_rank(group) == 0 else bare.to("meta"), group=group, init=init)


def test_what_has_values_keeps_them(group):
    """What has values on rank 0 keeps them, whatever initializes the rest of its module."""
    twin = seeded(Zoo)
    model = copy.deepcopy(twin)
    for block in model.blocks:
        block.inner.bias = nn.Parameter(torch.empty(WIDTH, device="meta"), requires_grad=False)
        block.rotation.speeds = block.rotation.speeds.to("meta")
    model.statistics.running_mean.fill_(5)
    model.statistics.weight = nn.Parameter(torch.empty(WIDTH, device="meta"))
    model = ShardLite(model, group=group, units=Block)
    state, expected = model.full_state_dict(), twin.state_dict()
    for i in range(3):
        bias = state.pop(f"blocks.{i}.inner.bias")
        assert not torch.equal(bias, expected.pop(f"blocks.{i}.inner.bias"))
        assert bias.abs().max() <= WIDTH**-0.5
    expected["statistics.running_mean"].fill_(5)
    assert_same(state, expected)
    assert torch.equal(model.module.blocks[2].rotation.speeds, twin.blocks[2].rotation.speeds)


# ---- memory -------------------------------------------------------------------------------------------------------

SIDE, DEPTH = 64, 32
UNIT = 4 * SIDE * SIDE
FULL = (1 + DEPTH) * UNIT
SMALL = 8192  # bytes: the rounding of an arena, one element for each placeholder, and the like


class Deep(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Embedding(SIDE, SIDE), *(nn.Linear(SIDE, SIDE, bias=False) for _ in range(DEPTH)))


@pytest.mark.parametrize("real_on_0", [False, True], ids=["meta", "rank 0 has it"])
@pytest.mark.ranks(2, 4)
def test_no_rank_ever_has_the_full_model(group, real_on_0):
    real = real_on_0 and dist.get_rank(group) == 0
    model = Deep() if real else on_meta(Deep)
    gc.collect()
    with Meter() as meter:
        before = meter.live
        model = ShardLite(model, group=group, units=nn.Linear)
        after = meter.live - before
    if not real:
        shards = FULL // group.size()
        assert shards <= after <= shards + SMALL
        # All hold one unit while it is sent. Rank 0 also has it as it was initialized, and the root around it, of
        # which only the embedding has values by then.
        assert shards + UNIT <= meter.peak - before <= shards + (1 if group.rank() else 3) * UNIT + SMALL
