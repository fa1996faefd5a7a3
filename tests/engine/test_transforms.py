"""Transforms of `torch.func` and forward-mode derivatives of the wrapped model, at any stage as without the wrapper.

Legend: `B` rows of a batch, `D` width.
"""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from shardlite import EscapedViewWarning, LayoutError, ShardLite
from tests.support.twins.sharded import same_bits

D = 8


def net() -> nn.Sequential:
    """A new model with a buffer, the same at each call. [B, D] -> [B, D]."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D), nn.Tanh()) for _ in range(3)))
    model.register_buffer("offset", torch.ones(D))
    return model


def wrapped(group: Any, stage: int) -> ShardLite:
    return ShardLite(net(), group=group, stage=stage)


def drawn() -> tuple[Tensor, Tensor]:
    """A point and a direction, each [B, D]."""
    return torch.randn(2, 4, D, generator=torch.Generator().manual_seed(1)).unbind()


def dual(model: Callable[..., Any]) -> Tensor:
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(*drawn()))).tangent
        assert tangent is not None
        return tangent


with warnings.catch_warnings():  # the first forward-mode derivative imports this module, which PyTorch has deprecated
    warnings.simplefilter("ignore", DeprecationWarning)
    import_module("torch._decomp.decompositions_for_jvp")

FORWARD = {
    "jvp": lambda model: jvp(model, drawn()[:1], drawn()[1:])[1],
    "jvp of jvp": lambda model: jvp(lambda x: jvp(model, (x,), drawn()[1:])[1], drawn()[:1], drawn()[1:])[1],
    "jacfwd": lambda model: jacfwd(model)(drawn()[0][0]),
    "vmap": lambda model: vmap(model)(drawn()[0]),
    "dual_level": dual,
    "functional.jvp": lambda model: torch.autograd.functional.jvp(model, *drawn())[1],
    "functional.hessian": lambda model: torch.autograd.functional.hessian(lambda x: model(x).sum(), drawn()[0][0]),
}
REVERSE = {
    "grad": lambda model: grad(lambda x: model(x).square().sum())(drawn()[0]),
    "vjp": lambda model: vjp(model, drawn()[0])[1](drawn()[1])[0],
    "jacrev": lambda model: jacrev(model)(drawn()[0][0]),
    "hessian": lambda model: hessian(lambda x: model(x).sum())(drawn()[0][0]),
}


@pytest.mark.stages(0, 3)
def test_forward_mode_derivatives(group: Any, stage: int) -> None:
    """The library's own tensors take no part in a transform, which would crash the process at stage 3."""
    model, twin = wrapped(group, stage), net()
    for name, derivative in FORWARD.items():
        same_bits(name, derivative(model).detach(), derivative(twin).detach())
        same_bits(f"a forward after {name}", model(drawn()[0]).detach(), twin(drawn()[0]).detach())


@pytest.mark.stages(2, 3)
def test_training_through_a_jvp(group: Any, stage: int) -> None:
    model, twin = wrapped(group, stage), net()
    for each in (model, twin):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for _ in range(2):
            y, slope = jvp(each, drawn()[:1], drawn()[1:])
            (y.square().mean() + slope.square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, value in model.full_state_dict().items():
        same_bits(name, value, twin.state_dict()[name])


@pytest.mark.stages(2, 3)
def test_reverse_mode_transforms(group: Any, stage: int) -> None:
    """At stage 3 they are refused, except inside `gathered()`."""
    model, twin = wrapped(group, stage), net()
    for name, derivative in REVERSE.items():
        if stage == 3:
            with pytest.raises(LayoutError, match=r"call them on every rank inside `with model\.gathered\(\):`"):
                derivative(model)
        with model.gathered() if stage == 3 else nullcontext():
            ours = derivative(model).detach()
        same_bits(name, ours, derivative(twin).detach())
        same_bits(f"a forward after {name}", model(drawn()[0]).detach(), twin(drawn()[0]).detach())


@pytest.mark.stages(3)
def test_gradients_per_sample_inside_gathered(group: Any, stage: int) -> None:
    def per_sample(module: nn.Module) -> dict[str, Tensor]:
        params = {name: param.detach() for name, param in module.named_parameters()}
        return vmap(grad(lambda p, x: functional_call(module, p, (x[None],)).sum()), (None, 0))(params, drawn()[0])

    model = wrapped(group, stage)
    with model.gathered():
        ours = per_sample(model.module)
    for name, expected in per_sample(net()).items():
        same_bits(name, ours[name], expected)


def test_a_backward_after_gathered_of_what_it_saved(group: Any) -> None:
    """What was saved without handles needs weights that are gone."""
    model = wrapped(group, 3)

    def slope() -> Tensor:
        with model.gathered():
            grad(lambda x: model(x).sum())(drawn()[0]).sum().backward()  # inside it is right
            return grad(lambda x: model(x).sum())(drawn()[0])

    with pytest.warns(EscapedViewWarning):
        later = slope()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        later.sum().backward()


@pytest.mark.stages(2, 3)
def test_a_function_of_vjp_that_is_called_after_gathered(group: Any, stage: int) -> None:
    """It has saved the weights themselves, which are then placeholders."""
    model, twin = wrapped(group, stage), net()
    point, direction = drawn()
    own = dict(model.module.named_parameters())
    with pytest.warns(EscapedViewWarning) if stage == 3 else nullcontext(), model.gathered():
        whole = {name: param.detach() for name, param in own.items()}
        backwards = {
            "inputs": vjp(model, point)[1],
            "inner": vjp(lambda x: vjp(model, x)[1](direction)[0], point)[1],
            "parameters": vjp(lambda params: functional_call(model.module, params, (point,)), own)[1],
        }
        kept = vjp(lambda params: functional_call(model.module, params, (point,)), whole)[1]
        expected = vjp(twin, point)[1](direction)[0]
        same_bits("inside", backwards["inputs"](direction)[0], expected)
    for backward in (*backwards.values(), vmap(backwards["inputs"])):
        several = direction.expand(2, *direction.shape) if backward not in backwards.values() else direction
        if stage == 3:
            with pytest.raises(LayoutError, match=r"torch\.func\.vjp returned inside .*: call it inside"):
                backward(several)
        else:
            backward(several)
    with model.gathered():
        same_bits("inside again", backwards["inputs"](direction)[0], expected)
    twins = dict(twin.named_parameters())
    for name, value in vjp(lambda params: functional_call(twin, params, (point,)), twins)[1](direction)[0].items():
        same_bits(f"{name}, of detached weights", kept(direction)[0][name], value)


@pytest.mark.stages(0, 3)
def test_recorded_graphs(group: Any, stage: int) -> None:
    """The remedies: `jvp` (above), `torch.export` (`test_export.py`), and `unwrap()`."""
    model = wrapped(group, stage)
    for record in (lambda: linearize(model, drawn()[0]), lambda: make_fx(model)(drawn()[0])):
        with pytest.raises(LayoutError, match=r"use torch\.func\.jvp in place of linearize.* after `unwrap\(\)`"):
            record()
    same_bits("recorded", make_fx(model.unwrap())(drawn()[0])(drawn()[0]).detach(), net()(drawn()[0]).detach())
