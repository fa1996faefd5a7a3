"""Wrong arguments of `WholeParameters` end in an error on every rank, and nothing hangs."""

from typing import Any

import pytest
import torch
from torch import nn, optim

from shardlite import AdamW, LayoutError, ShardLite, ShardWarning, WholeParameters
from tests.support.models.small import MLP
from tests.support.twins.whole import Norms


def model_of(group: Any) -> ShardLite:
    torch.manual_seed(0)
    return ShardLite(MLP([7, 33, 5]), group=group)


def refused(
    text: str, *arguments: Any, kind: type[Exception] | tuple[type[Exception], ...] = Exception, **options: Any
) -> None:
    with pytest.raises(kind, match=text):
        WholeParameters(*arguments, **options)


def test_wrong_arguments_are_refused_on_every_rank(group: Any) -> None:
    model = model_of(group)
    params = list(model.parameters())
    refused("must be a subclass of torch.optim.Optimizer, got 'Muon'", params, "Muon", kind=TypeError)
    refused("must be a subclass", params, nn.Linear, kind=TypeError)
    refused("AdamW steps shards itself", params, AdamW, kind=TypeError)
    refused("WholeParameters steps shards itself", params, WholeParameters, kind=TypeError)
    refused("unexpected keyword argument 'lrr'", params, Norms, lrr=0.1, kind=TypeError)
    refused("'2.weight' occurs twice", [*params, params[-2]], Norms, kind=ValueError)
    refused("occurs twice", [{"params": params}, {"params": params[:1]}], Norms, kind=ValueError)
    refused("group 1 has no parameters", [{"params": params}, {"params": []}], Norms, kind=ValueError)
    refused("the list of parameters is empty", [], Norms, kind=ValueError)
    refused("must have tensors, got str", ["weight"], Norms, kind=TypeError)
    refused("takes the options .* got 'momentum'", params, Norms, elementwise={"momentum": 1}, kind=TypeError)
    refused("'0.weight' is an unsharded parameter", model.module.parameters(), Norms, kind=LayoutError)
    refused("none of the parameters is a shard", MLP([3, 3]).parameters(), Norms, kind=LayoutError)
    refused("Muon only supports 2D parameters", params, optim.Muon, kind=ValueError)
    refused("lr must be at least 0", params, Norms, elementwise={"lr": -1.0}, kind=ValueError)


def test_optimizers_of_all_parameters_together_are_refused(group: Any) -> None:
    model = model_of(group)

    class GlobalNorm(optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
            norm = torch.stack([p.grad.norm() for p in params]).norm()
            for param in params:
                param.sub_(0.1 * param.grad / norm)

    refused("GlobalNorm does not step each parameter by itself.*Use stage=0", model.parameters(), GlobalNorm)
    refused(
        "LBFGS cannot be tried: .*missing 1 required positional argument: .closure", model.parameters(), optim.LBFGS
    )


def test_random_steps_are_warned_of(group: Any) -> None:
    class Noisy(optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for param in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
                param.sub_(torch.randn_like(param))

    with pytest.warns(ShardWarning, match="draws random numbers"):
        WholeParameters(model_of(group).parameters(), Noisy, lr=0.1)


def test_another_class_on_another_rank_is_an_error_on_all(group: Any) -> None:
    kind = Norms if group.rank() else optim.Adafactor
    refused(
        "ranks built different optimizers: rank 0 has .*Adafactor, rank 1 has .*Norms",
        model_of(group).parameters(),
        kind,
    )


def test_an_error_of_one_rank_reaches_all(group: Any) -> None:
    params = list(model_of(group).parameters())
    wrong = [*params, params[0]] if group.rank() == 1 else params
    refused("'0.weight' occurs twice", wrong, Norms, kind=(ValueError, LayoutError))


def test_other_parameters_on_another_rank_are_an_error_on_all(group: Any) -> None:
    params = list(model_of(group).parameters())
    refused("ranks built different optimizers", params[: 2 + group.rank()], Norms, kind=LayoutError)


def test_one_built_before_wrapping_is_refused(group: Any) -> None:
    module = MLP([7, 33, 5])
    refused("wrap the model first", module.parameters(), Norms, kind=LayoutError)


def test_it_cannot_be_copied(group: Any) -> None:
    import copy

    optimizer = WholeParameters(model_of(group).parameters(), Norms)
    with pytest.raises(LayoutError, match="cannot be copied or pickled"):
        copy.deepcopy(optimizer)
