"""`WholeParameters` has the bits of the same optimizer on a plain twin with the same averaged gradients.

Legend: `W` ranks.
"""

import copy
from collections import defaultdict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.lr_scheduler import LambdaLR, StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook

from shardlite import Precision, Route, ShardLite, WholeParameters
from tests.support.models.experts import Model as Experts
from tests.support.models.experts import loss as on_experts
from tests.support.models.losses import on_rows, on_tokens
from tests.support.models.small import MLP, LanguageModel, frozen
from tests.support.twins.plain import Twin
from tests.support.twins.sharded import (
    WIDE,
    Pair,
    Turn,
    local_parts,
    same_bits,
    same_states,
    some_stages,
    take_step,
    without_warnings,
)
from tests.support.twins.split import SPLIT, SplitPair
from tests.support.twins.whole import WHOLE, CutNorms, Norms

KINDS = list(WHOLE)


@pytest.mark.ranks(1, 2, 3, WIDE)
@pytest.mark.parametrize("kind", KINDS)
def test_training_follows_the_twin(group: Any, kind: str) -> None:
    """Parameters are tied, and cut anywhere. With accumulation of both kinds, and clipping."""
    for stage in (0, 1, 2, 3) if group.size() == 2 else some_stages(3):
        pair = Pair(LanguageModel, group, recipe=WHOLE[kind], stage=stage)
        pair.step(on_tokens)
        pair.step(on_tokens, ("local", "step"), clip=0.01)
        pair.step(on_tokens, ("local", "sharded", "step"), clip=0.01)
        pair.step(on_tokens)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("kind", KINDS)
def test_parameters_that_no_rank_used_are_left_alone(group: Any, kind: str) -> None:
    for stage in some_stages(2, 3):
        pair = Pair(Experts, group, recipe=WHOLE[kind], stage=stage)
        for _ in range(5):
            pair.step(on_experts)


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_may_be_frozen_for_a_while(group: Any, kind: str) -> None:
    for stage in some_stages(2, 3):
        pair = Pair(LanguageModel, group, recipe=WHOLE[kind], stage=stage)
        for step in range(4):
            for name, param in pair.model.module.named_parameters():
                param.requires_grad_(step in (0, 3) or "blocks.1" in name or "norm" in name)
            for name, param in pair.twin.module.named_parameters():
                param.requires_grad_(step in (0, 3) or "blocks.1" in name or "norm" in name)
            pair.step(on_tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_parameters_need_no_owner(group: Any, kind: str) -> None:
    def make() -> nn.Module:
        return frozen(LanguageModel(), lambda name: "qkv" in name or "blocks.1" in name)

    pair = Pair(make, group, recipe=WHOLE[kind], stage=3)
    for _ in range(3):
        pair.step(on_tokens)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("kind", KINDS)
def test_hybrid_sharding(group: Any, kind: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for stage in (0, 3):
        twin = Twin(make_mlp(), 4, replicas=2)
        model = ShardLite(make_mlp(), group=mesh, stage=stage)
        recipe = WHOLE[kind]
        ours, theirs = recipe.make(model.parameters()), (recipe.twin or recipe.make)(twin.masters.values())
        for step in range(3):
            twin.backward(lambda plain, rank, s=step: on_rows(plain, Turn(s, rank, 0)).backward())
            on_rows(model, Turn(step, dist.get_rank(), 0)).backward()
            for each in (ours, theirs):
                take_step(each)
        same_states(f"stage {stage}", model.full_state_dict(), twin.masters)


def make_mlp() -> nn.Module:
    torch.manual_seed(0)
    return MLP([7, 33, 19, 5])


@pytest.mark.ranks(1, 2, WIDE)
def test_order_tree_has_the_same_bits_on_any_number_of_ranks(group: Any) -> None:
    weights = []
    groups = [None, group] if group.size() > 1 else [group]
    for each in groups:
        if each is None:  # a run of one rank on each rank
            each = [dist.new_group([rank]) for rank in range(group.size())][dist.get_rank()]
        model = ShardLite(make_mlp(), group=each, route=Route(order="tree", parts=4))
        optimizer = WholeParameters(model.parameters(), Norms, lr=0.02)
        for step in range(3):
            for part in model.parts(step):
                on_rows(model, Turn(step, part, 0)).backward()
            take_step(optimizer)
        weights.append(model.full_state_dict())
    same_states("weights", weights[0], weights[-1])


@pytest.mark.ranks(2, 3)
def test_split_weights_are_stepped_in_24_bits(group: Any) -> None:
    for stage in some_stages(3):
        pair = SplitPair(LanguageModel, group, stage=stage)
        pair.optimizer = WholeParameters(pair.model.parameters(), Norms, lr=0.02)  # type: ignore[assignment]
        pair._theirs = CutNorms(pair.twin.masters.values(), lr=0.02)  # type: ignore[assignment]
        for _ in range(3):
            pair.step(on_tokens)


@without_warnings
def test_muon_steps_split_weights_as_any_class_does(group: Any) -> None:
    """Both ways, with updates in bf16 and with whole weights, are equal."""

    class SameMuon(optim.Muon):
        pass

    weights = []
    for kind in (optim.Muon, SameMuon):
        torch.manual_seed(0)
        model = ShardLite(LanguageModel(), group=group, precision=SPLIT)
        optimizer = WholeParameters(model.named_parameters(), kind, lr=0.02, elementwise={"lr": 0.01})
        for step in range(3):
            take_step(optimizer, on_tokens(model, Turn(step, dist.get_rank(), 0)))
        weights.append(model.full_state_dict())
    same_states("weights", *weights)


# ---- what PyTorch's optimizers do -----------------------------------------------------------------------------------


def trained_twins(group: Any, make: Any, steps: int = 4, **options: Any) -> tuple[ShardLite, Twin, Any, Any]:
    """Wrap an MLP, and build an optimizer for shards and another for its twin by `make(params, is_ours)`."""
    twin = Twin(make_mlp(), group.size())
    model = ShardLite(make_mlp(), group=group, **options)
    return model, twin, make(model.named_parameters(), True), make(twin.masters.items(), False)


def backward(model: ShardLite, twin: Twin, step: int) -> None:
    twin.backward(lambda plain, rank: on_rows(plain, Turn(step, rank, 0)).backward())
    on_rows(model, Turn(step, dist.get_rank(), 0)).backward()


def compare(model: ShardLite, twin: Twin) -> None:
    shards = dict(model.named_parameters())
    for name, part in local_parts(model, twin.masters).items():
        same_bits(name, shards[name].detach(), part)


def train_by_schedules(model: ShardLite, twin: Twin, *both: tuple[optim.Optimizer, Any], steps: int) -> None:
    """Train both, step the schedulers, and compare after every step."""
    for step in range(steps):
        backward(model, twin, step)
        for optimizer, scheduler in both:
            take_step(optimizer)
            scheduler.step()
        compare(model, twin)


def norms(params: Any, ours: bool, **options: Any) -> optim.Optimizer:
    return WholeParameters(params, Norms, **options) if ours else Norms(params, **options)


@pytest.mark.ranks(2, 3)
def test_groups_and_schedulers(group: Any) -> None:
    def make(params: Any, ours: bool) -> tuple[optim.Optimizer, Any]:
        params = list(params)
        groups = [
            {"params": [p for n, p in params if "bias" in n], "lr": 0.05},
            {"params": [p for n, p in params if "bias" not in n], "momentum": 0.5},
        ]
        optimizer = norms(groups, ours, lr=0.02)
        return optimizer, StepLR(optimizer, 2, gamma=0.3)

    model, twin, ours, theirs = trained_twins(group, make)
    train_by_schedules(model, twin, ours, theirs, steps=5)
    assert [each["lr"] for each in ours[0].param_groups] == [each["lr"] for each in theirs[0].param_groups]
    assert [each["steps"] for each in ours[0].param_groups] == [5, 5]  # also where a rank owns no parameter of a group


def test_a_group_of_one_parameter_counts_its_steps_on_all_ranks(group: Any) -> None:
    def make(params: Any, ours: bool) -> optim.Optimizer:
        (_, first), *others = list(params)
        return norms([{"params": [first]}, {"params": [each for _, each in others]}], ours)

    model, twin, ours, theirs = trained_twins(group, make)
    for step in range(3):
        backward(model, twin, step)
        take_step(ours)
        take_step(theirs)
    compare(model, twin)
    assert [each["steps"] for each in ours.param_groups] == [3, 3]


def test_a_tensor_as_learning_rate(group: Any) -> None:
    def make(params: Any, ours: bool) -> tuple[optim.Optimizer, Any]:
        optimizer = norms(params, ours, lr=torch.tensor(0.02))
        return optimizer, LambdaLR(optimizer, lambda step: 0.5**step)

    model, twin, ours, theirs = trained_twins(group, make)
    train_by_schedules(model, twin, ours, theirs, steps=4)


def test_groups_can_be_added(group: Any) -> None:
    later: dict[bool, list[Any]] = {}

    def make(params: Any, ours: bool) -> optim.Optimizer:
        first, *later[ours] = list(params)
        return norms([first], ours, lr=0.02)

    model, twin, ours, theirs = trained_twins(group, make)
    for step in range(4):
        backward(model, twin, step)
        take_step(ours)
        take_step(theirs)
        model.zero_grad()
        twin.zero_grad()
        if step == 1:
            for each, optimizer in ((True, ours), (False, theirs)):
                optimizer.add_param_group({"params": later[each], "lr": 0.03})
        compare(model, twin)


def test_hooks_and_closures(group: Any) -> None:
    called = []

    def make(params: Any, ours: bool) -> optim.Optimizer:
        optimizer = norms(params, ours)
        if ours:
            optimizer.register_step_pre_hook(lambda *_: called.append("before"))
            optimizer.register_step_post_hook(lambda *_: called.append("after"))
        return optimizer

    model, twin, ours, theirs = trained_twins(group, make)

    def closure() -> Any:
        called.append("closure")
        loss = on_rows(model, Turn(0, dist.get_rank(), 0))
        loss.backward()
        return loss

    twin.backward(lambda plain, rank: on_rows(plain, Turn(0, rank, 0)).backward())
    loss = ours.step(closure)
    take_step(theirs)
    assert called == ["before", "closure", "after"]
    assert loss.ndim == 0
    compare(model, twin)


@without_warnings
@pytest.mark.parametrize("kind", KINDS)
def test_steps_with_a_nan_are_skipped(group: Any, kind: str) -> None:
    """A skipped step changes nothing, the counts of a group included."""
    pair = Pair(LanguageModel, group, recipe=WHOLE[kind])
    pair.step(on_tokens)
    before = pair.model.full_state_dict()
    loss = on_tokens(pair.model, Turn(9, pair.rank, 0))
    (loss * (float("nan") if pair.rank == 1 else 1)).backward()
    take_step(pair.optimizer)
    same_states("after a NaN", pair.model.full_state_dict(), before)
    assert pair.model.skipped_steps == 1
    pair.step(on_tokens)


def test_a_gradient_scaler_may_skip_steps(group: Any) -> None:
    model, twin, ours, theirs = trained_twins(group, norms)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(3):
        twin.backward(lambda plain, rank, s=step: on_rows(plain, Turn(s, rank, 0)).backward())
        scaler.scale(on_rows(model, Turn(step, dist.get_rank(), 0))).backward()
        scaler.step(ours)
        scaler.update()
        ours.zero_grad()
        take_step(theirs)
    compare(model, twin)  # 1024 and 2 ranks are powers of two


def test_ignored_parameters_are_stepped_on_each_rank(group: Any) -> None:
    module = make_mlp()
    last = [each for each in module if isinstance(each, nn.Linear)][-1]
    plain = copy.deepcopy(last)
    model = ShardLite(module, group=group, ignore=[last])
    optimizer = WholeParameters(model.parameters(), Norms, lr=0.02)
    theirs = Norms(plain.parameters(), lr=0.02)
    for step in range(3):
        on_rows(model, Turn(step, dist.get_rank(), 0)).backward()
        for own, other in zip(last.parameters(), plain.parameters(), strict=True):
            other.grad = own.grad.clone()
        take_step(optimizer)
        take_step(theirs)
    same_states("ignored", dict(last.named_parameters()), dict(plain.named_parameters()))


def test_matrices_whole_and_the_rest_elementwise_by_name(group: Any) -> None:
    """The default rule leaves embeddings and heads to AdamW, and `repr` names what it has left."""
    torch.manual_seed(0)
    model = ShardLite(LanguageModel(tied=False), group=group)
    optimizer = WholeParameters(model.named_parameters(), optim.Muon, elementwise={"lr": 0.01, "state": "bf16"})
    whole_names, rest = (set(each["param_names"]) for each in optimizer.param_groups)
    assert {"embed.weight", "head.weight", "norm.weight", "blocks.0.qkv.bias"} <= rest
    assert {"blocks.0.qkv.weight", "blocks.1.down.weight"} <= whole_names
    assert "embed.weight" in repr(optimizer)
    take_step(optimizer, on_tokens(model, Turn(0, dist.get_rank(), 0)))
    moments = [state["exp_avg"].dtype for state in optimizer.state.values() if "exp_avg" in state]
    assert set(moments) == {torch.bfloat16}


def test_two_models_in_one_optimizer(group: Any) -> None:
    models = [ShardLite(make_mlp(), group=group) for _ in range(2)]
    twins = [Twin(make_mlp(), group.size()) for _ in range(2)]
    both = [param for model in models for param in model.parameters()]
    theirs = Norms([param for twin in twins for param in twin.masters.values()], lr=0.02)
    optimizer = WholeParameters(both, Norms, lr=0.02)
    for step in range(3):
        for i, (model, twin) in enumerate(zip(models, twins, strict=True)):
            backward(model, twin, 10 * i + step)
        take_step(optimizer)
        take_step(theirs)
    for model, twin in zip(models, twins, strict=True):
        compare(model, twin)


def test_bf16_gradients_and_computation(group: Any) -> None:
    pair = Pair(LanguageModel, group, recipe=WHOLE["muon"], precision=Precision(compute=torch.bfloat16))
    for _ in range(3):
        pair.step(on_tokens)


def test_a_group_may_be_added_after_the_schedule_has_changed_the_rate(group: Any) -> None:
    later: dict[bool, list[Any]] = {}

    def make(params: Any, ours: bool) -> tuple[optim.Optimizer, Any]:
        first, second, *later[ours] = list(params)
        optimizer = norms([first, second], ours, lr=0.1)
        return optimizer, StepLR(optimizer, 1, gamma=0.5)

    model, twin, ours, theirs = trained_twins(group, make)
    for step in range(4):
        backward(model, twin, step)
        for (optimizer, scheduler), is_ours in ((ours, True), (theirs, False)):
            take_step(optimizer)
            scheduler.step()
            if step == 1:
                optimizer.add_param_group({"params": later[is_ours]})
        model.zero_grad()
        twin.zero_grad()
        compare(model, twin)


class Counting(Norms):
    """Keeps a tensor, a list and its learning rate in the group, changes them in place, and keeps the last gradient."""

    def __init__(self, params: Any, lr: Any = 0.02) -> None:
        optim.Optimizer.__init__(
            self, params, {"lr": lr, "momentum": 0.9, "count": torch.zeros(()), "kept": [], "rate": torch.tensor(0.5)}
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] += 1
            group["kept"].append(1)
            group["rate"].mul_(0.9)
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    change = param.grad - state.get("last", 0)
                    state["last"] = param.grad
                    param.sub_(change / change.norm(), alpha=float(group["rate"] * group["lr"] * len(group["kept"])))


@pytest.mark.ranks(2, 3)
def test_options_and_states_that_a_class_changes_in_place(group: Any) -> None:
    def make(params: Any, ours: bool) -> tuple[optim.Optimizer, Any]:
        lr = torch.tensor(0.02)
        optimizer = WholeParameters(params, Counting, lr=lr) if ours else Counting(params, lr=lr)
        return optimizer, LambdaLR(optimizer, lambda step: 0.5**step)

    for stage in some_stages(0, 3):
        model, twin, ours, theirs = trained_twins(group, make, stage=stage)
        for step in range(4):
            backward(model, twin, step)
            for optimizer, scheduler in (ours, theirs):
                take_step(optimizer)
                scheduler.step()
            if stage:
                compare(model, twin)
            if step == 1:
                for optimizer, _ in (ours, theirs):
                    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        same_states(f"stage {stage}", model.full_state_dict(), twin.masters)
        counts = [[(float(each["count"]), len(each["kept"])) for each in o.param_groups] for o, _ in (ours, theirs)]
        assert counts[0] == counts[1] == [(4.0, 4)]


def test_muon_with_a_tensor_as_learning_rate(group: Any) -> None:
    def make(params: Any, ours: bool) -> optim.Optimizer:
        matrices = [param for _, param in params if param.ndim == 2]
        options: dict[str, Any] = {"lr": torch.tensor(0.02), "adjust_lr_fn": "match_rms_adamw"}
        return WholeParameters(matrices, optim.Muon, **options) if ours else optim.Muon(matrices, **options)

    model, twin, ours, theirs = trained_twins(group, make)
    for step in range(3):
        backward(model, twin, step)
        take_step(ours)
        take_step(theirs)
        model.zero_grad()
        twin.zero_grad()
        compare(model, twin)


def test_a_group_of_ignored_parameters(group: Any) -> None:
    module = make_mlp()
    last = [each for each in module if isinstance(each, nn.Linear)][-1]
    model = ShardLite(module, group=group, ignore=[last])
    ours = [param for name, param in model.named_parameters() if not name.startswith("4.")]
    optimizer = WholeParameters([{"params": ours}, {"params": list(last.parameters())}], Norms, lr=0.02)
    before = [param.detach().clone() for param in last.parameters()]
    take_step(optimizer, on_rows(model, Turn(0, dist.get_rank(), 0)))
    assert not any(map(torch.equal, before, last.parameters()))


def test_states_may_be_reset(group: Any) -> None:
    model, twin, ours, theirs = trained_twins(group, norms)
    for step in range(4):
        backward(model, twin, step)
        for optimizer in (ours, theirs):
            if step == 1:
                optimizer.state.clear()
            if step == 3:
                optimizer.state = defaultdict(dict)
            take_step(optimizer)
        compare(model, twin)


def test_global_hooks_see_one_step(group: Any) -> None:
    seen: list[Any] = []
    model, twin, ours, _ = trained_twins(group, norms)
    backward(model, twin, 0)
    hook = register_optimizer_step_post_hook(lambda optimizer, *_: seen.append(optimizer))
    try:
        ours.step()
    finally:
        hook.remove()
    assert seen == [ours]
