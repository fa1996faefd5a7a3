"""Conversions of a wrapped model are refused at every stage; a conversion without effect is allowed."""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardlite import AdamW, LayoutError, Precision, ShardLite
from tests.support.twins.sharded import same_bits, same_states


class Net(nn.Module):
    """A model with a buffer in front of its parameters, a recurrent and an ignored module."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.BatchNorm1d(6, affine=False)
        self.layer = nn.Linear(6, 6)
        self.recurrent = nn.GRU(6, 6)
        self.own = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, affine=False))

    def forward(self, features: Tensor, scale: float = 1.0) -> Tensor:
        return self.recurrent(self.layer(self.first(features)))[0] * scale


CONVERSIONS: dict[str, Callable[[nn.Module], object]] = {
    "bf16": lambda module: module.to(torch.bfloat16),
    "half": lambda module: module.half(),
    "meta": lambda module: module.to("meta"),
    "empty": lambda module: module.to_empty(device="cpu"),
    "type": lambda module: module.type(torch.float64),
    "shared": lambda module: module.share_memory(),
}
NOTHING: dict[str, Callable[[nn.Module], object]] = {
    "device": lambda module: module.to("cpu"),
    "cpu": lambda module: module.cpu(),
    "index": lambda module: module.to("cpu:0"),  # as Accelerate calls it
    "dtype": lambda module: module.float(),
    "both": lambda module: module.to(device=torch.device("cpu"), dtype=torch.float32),
}


def facts(model: ShardLite) -> dict[str, Any]:
    tensors = {**dict(model.module.named_parameters()), **dict(model.module.named_buffers())}
    return {name: (tensor.dtype, tensor.device) for name, tensor in tensors.items()}


@pytest.mark.parametrize("after", ["wrapping", "step", "evaluation"])
@pytest.mark.parametrize("stage", [3, 2, 0])
def test_a_conversion_is_refused_and_changes_nothing(group: Any, stage: int, after: str) -> None:
    net = Net()
    model = ShardLite(net, group=group, stage=stage, ignore=[net.own])
    optimizer = AdamW(model.parameters(), lr=0.1)
    x = torch.randn(3, 6)
    if after == "step":
        model(x).sum().backward()
        optimizer.step()
    if after == "evaluation":
        with torch.no_grad():
            model(x)
    before, weights = facts(model), model.full_state_dict()
    for module in (model, net, net.layer, net.recurrent, net.first):
        for kind, convert in CONVERSIONS.items():
            with pytest.raises(LayoutError, match="cannot be moved or converted"):
                convert(module)
            assert facts(model) == before, f"{kind} of {type(module).__name__} has changed something"
        for convert in NOTHING.values():
            assert convert(module) is module
    same_states("state", model.full_state_dict(), weights)
    net.own.to(torch.bfloat16)
    assert {net.own[0].weight.dtype, net.own[1].running_mean.dtype} == {torch.bfloat16}, "the program has ignored them"


@pytest.mark.ranks(1)
def test_on_one_rank(group: Any) -> None:
    net = Net()
    model = ShardLite(net, group=group)
    copied = copy.deepcopy(net.layer)
    with pytest.raises(LayoutError, match=r"this would convert 'weight'"):
        net.layer.double()
    assert copied.double().weight.dtype == torch.float64, "a copy is a module like any other"
    assert model.to("cpu") is model


def test_other_dtypes_and_memory_formats(group: Any) -> None:
    """What counts is the dtype that the module's own parameters have. Memory formats cannot be changed either."""
    model = ShardLite(Net(), group=group, precision=Precision(compute=torch.bfloat16))
    assert model.module.layer.to(torch.bfloat16) is model.module.layer
    with pytest.raises(LayoutError, match=r"Precision\(compute=\.\.\.\)"):
        model.module.float()
    model = ShardLite(nn.Sequential(nn.Conv2d(2, 2, 3), nn.Conv2d(2, 2, 3)), group=group)
    with pytest.raises(LayoutError, match="cannot be moved or converted"):
        model.to(memory_format=torch.channels_last)


@pytest.mark.stages(1, 3)
def test_the_signature_is_the_modules(group: Any, stage: int) -> None:
    """Trainers choose the inputs that they pass on by the signature of `forward`."""
    model = ShardLite(Net(), group=group, stage=stage)
    assert inspect.signature(model.forward) == inspect.signature(model.module.forward)
    assert list(inspect.signature(model.forward).parameters) == ["features", "scale"]
    x = torch.randn(3, 6)
    with torch.no_grad():
        same_bits("by keyword", model.forward(features=x, scale=2.0), model(x, 2.0))
    forward = model.forward
    model.forward = lambda *args: forward(*args) + 1  # as Accelerate does
    with torch.no_grad():
        same_bits("replaced", model(x), forward(x) + 1)
