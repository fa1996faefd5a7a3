"""Errors in a model on the meta device are named on every rank."""

import re

import pytest
import torch
from torch import nn

from shardlite import LayoutError, ShardLite
from tests.support.models.meta import Bare, on_meta


class Forgetful(Bare):
    """A rotary embedding as it is often written: the constructor computes what meta cannot keep."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inverse", torch.ones(5), persistent=False)
        self.register_buffer("empty", torch.ones(0))

    def reset_parameters(self) -> None:
        self.weight.data.normal_()


class Two(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(Forgetful(), Forgetful())


class Counting(Forgetful):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inverse", torch.zeros(5, dtype=torch.int64), persistent=False)


class Attribute(Bare):
    def __init__(self) -> None:
        super().__init__()
        self.speeds = torch.ones(3)

    reset_parameters = Forgetful.reset_parameters


class Nest(nn.Sequential):
    """A unit inside, which has been sent when the outer module is initialized."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4))
        self.weight = nn.Parameter(torch.empty(4, 4))


def write_half(module: nn.Module) -> None:
    module.weight[:2] = 1


def fail(module: nn.Module) -> None:
    raise OSError("no such file")


def other_shape(module: nn.Module) -> None:
    module.weight = nn.Parameter(torch.zeros(3, 4))


def other_dtype(module: nn.Module) -> None:
    module.weight.data = torch.zeros(4, 4, dtype=torch.float16)


def still_on_meta(module: nn.Module) -> None:
    module.weight = nn.Parameter(torch.zeros(4, 4, device="meta"))


def add_buffer(module: nn.Module) -> None:
    module.weight.zero_()
    module.register_buffer("extra", torch.zeros(2))


def remove(module: nn.Module) -> None:
    module.weight = None


def save_buffer(module: nn.Module) -> None:
    module.weight.zero_()
    module.register_buffer("inverse", torch.zeros(5))


def reach_inside(module: nn.Module) -> None:
    module.weight.zero_() if isinstance(module, Nest) else module.reset_parameters()
    if isinstance(module, Nest):
        module[0].bias.zero_()


def draw_inside(module: nn.Module) -> None:
    nn.init.normal_(module.weight)
    if isinstance(module, Nest):
        nn.init.normal_(module[0].weight)
    else:
        module.bias.zero_()


def hook(module: nn.Module) -> nn.Module:
    module.weight.register_hook(lambda gradient: gradient)
    return module


def wrap_body(group, make, init, options):
    options = {"units": nn.Linear, **options} if make is Nest else options
    ShardLite(on_meta(make), group=group, init=init, **options)


def hook_body(group):
    ShardLite(hook(on_meta(Forgetful)), group=group)


def ignore_body(group):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    ShardLite(model, ignore=[model[1]], group=group)


@pytest.mark.parametrize(
    ("body", "arguments", "words"),
    [
        (wrap_body, (Bare, None, {}), "parameter 'weight' is on the meta device, and Bare has no reset_parameters()"),
        (wrap_body, (Forgetful, None, {}), "left buffer 'inverse' with 5 of 5 elements uninitialized"),
        (wrap_body, (Forgetful, None, {"stage": 0}), "reset_parameters() of module '(the model itself)' (Forgetful)"),
        (wrap_body, (Two, None, {}), "of module '0' (Forgetful) left buffer '0.inverse' with 5 of 5 elements"),
        (wrap_body, (Counting, None, {}), "left buffer 'inverse' with 5 of 5 elements uninitialized"),
        (wrap_body, (Attribute, None, {}), "'speeds' is on the meta device but neither a parameter nor a buffer"),
        (wrap_body, (Bare, write_half, {}), "left parameter 'weight' with 8 of 16 elements uninitialized"),
        (wrap_body, (Bare, fail, {}), "(Bare) failed: OSError: no such file"),
        (wrap_body, (Bare, other_shape, {}), "'weight' as [3, 4] torch.float32, it was [4, 4] torch.float32"),
        (wrap_body, (Bare, other_dtype, {}), "'weight' as [4, 4] torch.float16, it was [4, 4] torch.float32"),
        (wrap_body, (Bare, still_on_meta, {}), "left parameter 'weight' on the meta device"),
        (wrap_body, (Bare, add_buffer, {}), "from ['parameter weight'] to ['parameter weight', 'buffer extra']"),
        (wrap_body, (Bare, remove, {}), "from ['parameter weight'] to []"),
        (wrap_body, (Forgetful, save_buffer, {}), "buffer inverse (not saved)"),
        (
            wrap_body,
            (Nest, reach_inside, {}),
            "parameter '0.bias' was initialized again by a module outside of its unit",
        ),
        (wrap_body, (Nest, draw_inside, {}), "init of module '(the model itself)' (Nest) failed: RuntimeError"),
        (wrap_body, (Forgetful, None, {"device": "meta"}), "device=meta: only the CPU and CUDA are supported"),
        (hook_body, (), "parameter 'weight' is on the meta device and has a hook"),
        (ignore_body, (), "parameter '1.weight' is on the meta device and ignored"),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_every_rank_hears_what_is_wrong(group, body, arguments, words):
    with pytest.raises(LayoutError, match=re.escape(words)):
        body(group, *arguments)


def test_a_model_that_failed_is_not_wrapped_again(group):
    """What was not initialized stays unusable."""
    model = on_meta(Forgetful)
    with pytest.raises(LayoutError, match="uninitialized"):
        ShardLite(model, group=group)
    with pytest.raises(LayoutError, match="belongs or belonged to another wrapped model"):
        ShardLite(model, group=group)
