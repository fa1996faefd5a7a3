"""`unwrap()` returns the module as if it had never been wrapped, with the weights of now."""

import copy
import gc
import io
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel

from shardlite import EMA, AdamW, PhaseError, Precision, ShardLite
from shardlite.params import ShardInfo
from shardlite.params.parameters import Sharded
from tests.support.internals import bridge as bridge_of
from tests.support.internals import units
from tests.support.twins.sharded import same_bits, same_states, take_step


class Scale(nn.Parameter):
    """A parameter of a class of its own."""


class Net(nn.Module):
    """Tied, frozen, scripted, recurrent, listed and scalar parameters, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self.norm = nn.BatchNorm1d(6)
        self.recurrent = nn.LSTM(6, 6)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of TorchScript as a whole
            self.scripted = torch.jit.script(nn.Linear(6, 6))
        self.listed = nn.ParameterList([nn.Parameter(torch.ones(6))])
        self.scale = Scale(torch.tensor(1.5))
        self.scale.no_decay = True
        self.head = nn.Linear(6, 9)
        self.head.weight = self.embedding.weight
        self.head.bias.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        x = self.recurrent(self.norm(self.scripted(x)))[0] * self.listed[0] * self.scale
        return self.head(x)


def tokens() -> Tensor:
    """The same on each rank, so that a module by itself has the same bits."""
    return torch.arange(5) % 9


def train(model: nn.Module, optimizer: optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        take_step(optimizer, model(tokens()).square().mean())


def wrapped(group: Any, **options: Any) -> ShardLite:
    torch.manual_seed(0)
    return ShardLite(Net(), group=group, **options)


@pytest.mark.parametrize(("group", "stage"), [(2, 3), (2, 2), (2, 0), (1, 3)], indirect=["group"])
def test_a_plain_module_comes_back(group: Any, stage: int) -> None:
    model = wrapped(group, stage=stage)
    inner, seen = model.module, []
    inner.norm.register_forward_hook(lambda *_: seen.append("a hook of the program"))
    train(model, AdamW(model.parameters(), lr=0.1), 2)
    expected = model.full_state_dict()
    module = model.unwrap()
    assert module is inner
    same_states("state", module.state_dict(), expected)
    assert module.head.weight is module.embedding.weight
    assert not module.head.bias.requires_grad
    assert (type(module.scale), module.scale.no_decay) == (Scale, True)
    for name, param in module.named_parameters():
        assert not isinstance(param, Sharded), name
        assert param.grad is None, name
        assert not vars(param).keys() - {"no_decay"}, name
    for each in module.modules():
        if each is not module.norm and not isinstance(each, torch.jit.ScriptModule):
            assert not {**each._forward_pre_hooks, **each._forward_hooks, **each._state_dict_pre_hooks}, each
    seen.clear()
    module(tokens())
    assert seen == ["a hook of the program"]


@pytest.mark.parametrize("stage", [3, 1])
def test_what_follows(group: Any, stage: int) -> None:
    """What people do with the module next; training goes on as that of a module that was loaded."""
    model = wrapped(group, stage=stage)
    train(model, AdamW(model.parameters(), lr=0.1), 2)
    twin = Net()
    twin.load_state_dict(model.full_state_dict())
    twin.head.bias.requires_grad_(False)
    module = model.unwrap()
    for each in (twin, module):
        train(each, optim.AdamW(each.parameters(), lr=0.1), 2)
    same_states("state", module.state_dict(), twin.state_dict())
    averaged = optim.swa_utils.AveragedModel(module.blocks)
    averaged.update_parameters(module.blocks)
    torch.save(module.blocks, file := io.BytesIO())
    file.seek(0)
    read = torch.load(file, weights_only=False)
    same_bits("read", read[0][0].weight, module.blocks[0][0].weight)
    assert copy.deepcopy(module.blocks).to(torch.float64)[0][0].weight.dtype == torch.float64
    exported = torch.export.export(module.blocks[0], (torch.ones(2, 6),)).module()
    same_bits("exported", exported(torch.ones(2, 6)), module.blocks[0](torch.ones(2, 6)))
    DistributedDataParallel(module.blocks[0], process_group=group)(torch.ones(2, 6)).sum().backward()
    module.zero_grad()
    again = ShardLite(module, group=group, stage=3 - stage)
    train(again, AdamW(again.parameters(), lr=0.1), 1)
    train(twin, AdamW(twin.parameters(), lr=0.1), 1)
    same_states("state", again.full_state_dict(), twin.state_dict())
    again.unwrap().double()


@pytest.mark.ranks(3)
def test_split_weights(group: Any) -> None:
    """Weights come back with all digits in which they are kept."""
    precision = Precision(compute=torch.bfloat16, master="split24")
    model = ShardLite(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), group=group, precision=precision)
    optimizer = AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    expected = model.full_state_dict()
    for name, value in model.unwrap().state_dict().items():
        assert value.dtype == torch.float32
        same_bits(name, value, expected[name])


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("ours", [False, True])
def test_optimizers_of_before_are_refused(group: Any, ours: bool, stepped: bool) -> None:
    """An optimizer of before would train nothing: its step is an error, and it keeps nothing alive."""
    model = wrapped(group)
    optimizer = (AdamW if ours else optim.AdamW)(model.parameters(), lr=0.1)
    if stepped:
        train(model, optimizer, 1)
    bridge = weakref.ref(bridge_of(model))
    module = model.unwrap()
    module(tokens()).sum().backward()
    with pytest.raises(PhaseError, match="AdamW holds shards of a ShardLite model that was unwrapped"):
        optimizer.step()
    gc.collect()
    assert bridge() is None
    assert not hasattr(model, "anything")


class Listed(nn.Module):
    """A module that keeps its parameters in a plain list, too, and refuses new attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        object.__setattr__(self, "weights", [self.layer.weight])

    def __setattr__(self, name: str, value: Any) -> None:
        if "weights" in vars(self):
            raise AttributeError("frozen")
        super().__setattr__(name, value)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weights[0] + self.layer.bias


@pytest.mark.parametrize("stage", [3, 2, 0])
@pytest.mark.ranks(1, 2)
def test_parameters_are_the_same_objects(group: Any, stage: int) -> None:
    """Parameters are the same objects with the hooks of the program, whoever has references to them."""
    inner, seen = Listed(), []
    before = dict(inner.named_parameters())
    before["layer.weight"].register_hook(lambda grad: grad * 0)
    before["layer.bias"].register_post_accumulate_grad_hook(lambda _: seen.append("bias"))
    model = ShardLite(inner, group=group, stage=stage)
    module = model.unwrap()
    assert all(param is before[name] for name, param in module.named_parameters())
    seen.clear()
    weight = before["layer.weight"].detach().clone()
    optimizer = AdamW(module.parameters(), lr=0.1, weight_decay=0.0)
    module(torch.ones(2, 6)).sum().backward()
    assert seen == ["bias"]
    optimizer.step()
    same_bits("masked", before["layer.weight"].detach(), weight)
    assert not any(ShardInfo.is_of(param) for param in module.parameters())


def test_accumulated_gradients_are_not_lost(group: Any) -> None:
    """Gradients that would be lost are not, and the model goes on."""
    model = wrapped(group)
    optimizer = AdamW(model.parameters(), lr=0.1)
    with model.no_sync():
        with pytest.raises(PhaseError, match="gradients are accumulated, and not reduced"):
            model.unwrap()
        model(tokens()).sum().backward()
    with pytest.raises(PhaseError, match="gradients are accumulated, and not reduced"):
        model.unwrap()
    train(model, optimizer, 1)
    model.unwrap()


def test_the_wrapper_is_spent(group: Any) -> None:
    model = wrapped(group)
    ema = EMA(model)
    with pytest.raises(PhaseError, match=r"EMA\.swapped\(\) is active"), ema.swapped():
        model.unwrap()
    with pytest.raises(PhaseError, match="gathered"), model.gathered():
        model.unwrap()
    if dist.get_rank(group) == 0:
        units(model)[0].users += 1  # as an unfinished forward on this rank alone
    with pytest.raises((PhaseError, Exception), match="outside of forwards"):
        model.unwrap()
    if dist.get_rank(group) == 0:
        units(model)[0].users -= 1
    train(model, AdamW(model.parameters(), lr=0.1), 1)
    bridge = weakref.ref(bridge_of(model))
    del ema
    module = model.unwrap()
    for call in (model.parameters, model.state_dict, model.full_state_dict, model.unwrap, model.memory, model.gathered):
        with pytest.raises(PhaseError, match=r"was unwrapped: use the module that unwrap\(\) returned"):
            list(call())
    with pytest.raises(PhaseError, match="was unwrapped"):
        model(tokens())
    assert repr(model) == "ShardLite(unwrapped)"
    gc.collect()
    assert bridge() is None, "shards are freed even while the program keeps the wrapper"
    module(tokens())
