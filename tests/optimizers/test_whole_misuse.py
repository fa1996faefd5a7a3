"""Wrong arguments of `WholeParameters` end in an error on every rank, and nothing hangs."""

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

from shardlite import AdamW, LayoutError, ShardLite, ShardWarning, WholeParameters
from shardlite.optimizers import is_hidden_matrix
from tests.support.models.small import MLP
from tests.support.twins.whole import Norms


def model_of(group: Any) -> ShardLite:
    torch.manual_seed(0)
    _models[:] = [ShardLite(MLP([7, 33, 5]), group=group)]
    return _models[0]


_models: list[ShardLite] = []
"""The latest model, which an expression would free before its parameters are looked up."""


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
    refused("none of the parameters is a shard", MLP([3, 3]).parameters(), Norms, kind=LayoutError)
    refused("Muon only supports 2D parameters", params, optim.Muon, kind=ValueError)
    refused("lr must be at least 0", params, Norms, elementwise={"lr": -1.0}, kind=ValueError)


def test_parameters_of_the_module_stand_for_their_shards(group: Any) -> None:
    model = model_of(group)
    optimizer = WholeParameters(model.module.named_parameters(), Norms)
    held = [param for each in optimizer.param_groups for param in each["params"]]
    assert list(map(id, held)) == list(map(id, model.parameters()))


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
    model = model_of(group)
    params = list(model.parameters())
    wrong = [*params, params[0]] if group.rank() == 1 else params
    refused("'0.weight' occurs twice", wrong, Norms, kind=(ValueError, LayoutError))


def test_other_parameters_on_another_rank_are_an_error_on_all(group: Any) -> None:
    model = model_of(group)
    params = list(model.parameters())
    refused("ranks built different optimizers", params[: 2 + group.rank()], Norms, kind=LayoutError)


def test_one_built_before_wrapping_is_refused(group: Any) -> None:
    module = MLP([7, 33, 5])
    refused("wrap the model first", module.parameters(), Norms, kind=LayoutError)


def test_it_cannot_be_copied(group: Any) -> None:
    import copy

    optimizer = WholeParameters(model_of(group).parameters(), Norms)
    with pytest.raises(LayoutError, match="cannot be copied or pickled"):
        copy.deepcopy(optimizer)


def test_a_group_whose_options_have_no_effect_is_refused(group: Any) -> None:
    model = model_of(group)
    params = list(model.parameters())
    groups = [{"params": [p for p in params if p.ndim == 2]}, {"params": [p for p in params if p.ndim < 2], "lr": 0.1}]
    refused("AdamW steps all of its parameters", groups, optim.Muon, elementwise={}, kind=ValueError)
    refused("also pass elementwise", [{"params": params, "elementwise": {"lr": 0.1}}], Norms, kind=TypeError)
    with pytest.warns(ShardWarning, match="Norms steps no parameter"):
        WholeParameters(params, Norms, whole=lambda *_: False)


def test_a_model_and_its_optimizer_are_freed_together(group: Any) -> None:
    for kind, options in ((Norms, {}), (optim.Muon, {"elementwise": {}})):
        model = model_of(group)
        optimizer = WholeParameters(model.parameters(), kind, **options)
        model(torch.ones(2, 7)).sum().backward()
        optimizer.step()
        there = weakref.ref(optimizer)
        gc.disable()
        try:
            _models.clear()
            del optimizer
            assert there() is None
        finally:
            gc.enable()


def test_groups_that_are_changed_by_hand_are_refused(group: Any) -> None:
    model = model_of(group)
    optimizer = WholeParameters(model.parameters(), Norms)
    optimizer.param_groups[0]["params"].pop()
    model(torch.ones(2, 7)).sum().backward()
    with pytest.raises(LayoutError, match="changed by hand"):
        optimizer.step()


def test_a_class_that_uses_its_closure_otherwise_is_refused(group: Any) -> None:
    """Such as one that moves the parameters before it evaluates the closure."""

    class Moves(optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            params = [p for each in self.param_groups for p in each["params"] if p.grad is not None]
            if closure is not None:
                for param in params:
                    param.add_(0.1 * param.grad)
                with torch.enable_grad():
                    closure()
            for param in params:
                param.sub_(0.1 * param.grad)

    model = model_of(group)
    optimizer = WholeParameters(model.parameters(), Moves, lr=0.1)
    with pytest.raises(LayoutError, match="does not call the closure once"):
        optimizer.step(lambda: model(torch.ones(2, 7)).sum())


def test_a_class_with_collectives_of_its_own_is_refused_without_a_trial(group: Any) -> None:
    class Gathers(optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            raise AssertionError("no trial, which could wait for other ranks")

        def share(self, param: torch.Tensor) -> None:
            dist.all_reduce(param)

    model = model_of(group)
    refused("communicates with other ranks itself", model.parameters(), Gathers, lr=0.1, kind=LayoutError)
    optimizer = Gathers(model.parameters(), lr=0.1)
    model(torch.ones(2, 7)).sum().backward()
    with pytest.raises(LayoutError, match="communicates with other ranks itself"):
        optimizer.step()


def test_entries_that_a_class_adds_to_its_state_dict_are_warned_of(group: Any) -> None:
    class Counts(Norms):
        calls = 0

        def state_dict(self) -> Any:
            return {**super().state_dict(), "calls": self.calls}

        def load_state_dict(self, state_dict: Any) -> None:
            self.calls = state_dict.pop("calls")
            super().load_state_dict(state_dict)

    with pytest.warns(ShardWarning, match="lack calls, which Counts keeps"):
        optimizer = WholeParameters(model_of(group).parameters(), Counts)
    optimizer.load_state_dict(optimizer.state_dict())


def test_muon_without_elementwise_says_how_to_step_the_rest(group: Any) -> None:
    refused(r"only supports 2D parameters.*pass elementwise=\{", model_of(group).parameters(), optim.Muon)
    refused("elementwise must be a dict of options, got bool", model_of(group).parameters(), Norms, elementwise=True)


def test_at_stage_0_an_optimizer_of_all_parameters_needs_no_help(group: Any) -> None:
    torch.manual_seed(0)
    model = ShardLite(MLP([7, 33, 5]), group=group, stage=0)
    refused("build LBFGS itself", model.parameters(), optim.LBFGS)


def test_other_options_on_another_rank_are_an_error_on_all(group: Any) -> None:
    model = model_of(group)
    params = model.parameters()
    refused("ranks built different optimizers: .*'lr': 0.1", params, Norms, lr=0.1 + group.rank(), kind=LayoutError)


def test_the_default_rule_leaves_embeddings_and_heads_out() -> None:
    matrices = ["h.0.attn.c_attn.weight", "multihead.0.weight", "layers.1.mlp.up.weight", "block.0.out.weight"]
    matrices += ["layers.0.shared_expert.gate_proj.weight", "blocks.0.attention.output.weight", "decomposition.weight"]
    others = ["wte.weight", "shared.weight", "lm_head.weight", "head.weight", "tok_embeddings.weight", "output.weight"]
    others += ["encoder.0.relative_attention_bias.weight", "pos_emb.weight", "model.score.weight"]
    assert [name for name in (*matrices, *others) if is_hidden_matrix(name, (4, 4))] == matrices
    assert not is_hidden_matrix("mlp.up.bias", (4,))
