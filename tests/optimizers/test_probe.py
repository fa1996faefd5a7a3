"""Probes find out by trial steps whether an optimizer is elementwise, and leave no trace."""

import random
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardlite.optimizers import probe
from shardlite.optimizers.probe import Verdict, probe_shards, probe_whole

SHAPES = ((5,), (6, 4), (2, 3, 4, 5), ())


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_verdicts", type(probe._verdicts)())


def parameters(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in shapes or SHAPES]


class Own(Optimizer):
    """Base of the optimizers of these tests: steps by `update` of each gradient."""

    def __init__(self, params: Any, lr: float | Tensor = 0.1, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    def update(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        return param.grad

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            group["counted"] = group.get("counted", 0) + 1
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(group["lr"] * self.update(param, self.state[param], group))


class Cautious(Own):
    def update(self, param, state, group):
        agrees = (state.setdefault("average", param.grad.clone()).lerp_(param.grad, 0.3) * param.grad > 0).float()
        return param.grad * agrees / agrees.mean().clamp(min=1e-3)


class LAMB(Own):
    def update(self, param, state, group):
        update = param.grad.sign()
        return update * (param.norm() / update.norm()).clamp(max=10)


class GlobalNorm(Own):
    def step(self, closure=None):
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)
        super().step()


class Lookahead(Own):
    """Returns every 5 steps to the slow weights: elementwise if `scaled` is not set."""

    scaled = False

    def update(self, param, state, group):
        slow = state.setdefault("slow", param.clone())
        state["steps"] = state.get("steps", 0) + 1
        if state["steps"] % 5:
            return param.grad.clamp(-1, 1)
        ratio = (param - slow).norm() if self.scaled else 0.5
        return (param - slow) * ratio


class ScaledLookahead(Lookahead):
    scaled = True


class Random(Own):
    def update(self, param, state, group):
        return param.grad + torch.randn_like(param)


class PythonRandom(Own):
    def update(self, param, state, group):
        return param.grad * random.random()


class LargeOnly(Own):
    """Factors only matrices of at least 128 rows."""

    def update(self, param, state, group):
        return param.grad / param.grad.norm() if min(param.shape, default=0) >= 128 else param.grad


class LargeQuantized(LargeOnly):
    """Needs blocks of 256 elements in parameters of at least 4096."""

    def update(self, param, state, group):
        blocks = param.numel() >= 4096 and param.numel() % 256 == 0
        return (
            (param.grad.view(-1, 256) / param.grad.view(-1, 256).abs().amax(1, keepdim=True)).view(param.shape)
            if blocks
            else param.grad
        )


class Largest(Own):
    """Fails for an empty shard."""

    def update(self, param, state, group):
        return param.grad / param.grad.abs().max()


class Rows(Own):
    """Elementwise, but refuses the shape of shards."""

    def update(self, param, state, group):
        if param.ndim == 2 and param.shape[1] == 1:
            raise ValueError("expected a matrix")
        return param.grad


class Late(Own):
    """Needs its sums only later."""

    def update(self, param, state, group):
        state["sum"] = state.get("sum", torch.zeros(1)) + param.grad.sum()
        return param.grad + (state["sum"] if len(state) > 100 else 0)


class After(Own):
    """Divides by the norm after 100 steps."""

    def update(self, param, state, group):
        state["step"] = state.get("step", 0) + 1
        return param.grad / param.grad.norm() if state["step"] > 100 else param.grad


class NeedsGradients(Own):
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                param.data.sub_(param.grad.data)


class NeedsClosure(Own):
    def step(self, closure):
        closure()
        super().step()


class NeedsBackward(Own):
    def step(self, closure):
        with torch.enable_grad():
            closure().backward()
        super().step()


class SAM(Own):
    """Moves parameters by the global norm, and steps with the gradients that it gets there."""

    def __init__(self, params, base_optimizer, **options):
        super().__init__(params, **options)
        self.base_optimizer = base_optimizer(self.param_groups, **options)

    def step(self, closure):
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in params]).norm() + 1e-12
        moves = [p.grad / norm for p in params]
        for param, move in zip(params, moves, strict=True):
            param.data.add_(move)
            param.grad = None
        closure()
        for param, move in zip(params, moves, strict=True):
            param.data.sub_(move)
        self.base_optimizer.step()


class Flag(Own):
    """Its option is no default, but an attribute, which may be changed later."""

    def __init__(self, params, trust: bool = False):
        super().__init__(params)
        self.trust = trust

    def update(self, param, state, group):
        return LAMB.update(self, param, state, group) if self.trust else param.grad


class Grouped(Own):
    """Keeps its option in a record only, and does not let it be changed, as optimizers of bitsandbytes do."""

    def __init__(self, params, trust: bool = False):
        super().__init__(params)
        self.args = SimpleNamespace(trust=trust)

    def update(self, param, state, group):
        return LAMB.update(self, param, state, group) if self.args.trust else param.grad


class NotKept(Flag):
    """Takes an argument that it does not keep, so a twin is a copy."""

    def __init__(self, params, factor):
        super().__init__(params, factor > 1)


class KeepsModule(NotKept):
    """A copy would share the module."""

    def __init__(self, params, factor):
        super().__init__(params, factor)
        self.module = nn.Linear(1, 1)


class OtherArguments(Own):
    """Takes parameters in its own way, and keeps in their states how to step them."""

    def __init__(self, lr, scaled, others):
        super().__init__([*scaled, *others], lr)
        for param in [*scaled, *others]:
            self.state[param]["scaled"] = any(param is each for each in scaled)

    def update(self, param, state, group):
        return LAMB.update(self, param, state, group) if state["scaled"] else param.grad


class Data(Own):
    """Gives parameters other memory."""

    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                param.data = param.data - param.grad


class Constructed(Own):
    """Reads values when it is built."""

    def __init__(self, params):
        super().__init__(params)
        self.first = [param.detach().clone() for param in self.param_groups[0]["params"]]

    def step(self, closure=None):
        super().step()
        for param, first in zip(self.param_groups[0]["params"], self.first, strict=True):
            param.data.lerp_(first, 0.1)


# ---- PyTorch's optimizers -------------------------------------------------------------------------------------------

THEIRS = [kind for name in optim.__all__ if isinstance(kind := getattr(optim, name), type) and kind is not Optimizer]
VERDICTS = {"Muon": (False, True), "Adafactor": (False, True), "LBFGS": (False, False), "SparseAdam": (False, False)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", THEIRS, ids=lambda kind: kind.__name__)
def test_optimizers_of_torch(kind: type, dtype: torch.dtype) -> None:
    optimizer = kind(parameters((6, 4), dtype=dtype) if kind is optim.Muon else parameters(dtype=dtype))
    assert (probe_shards(optimizer).same, probe_whole(optimizer).same) == VERDICTS.get(kind.__name__, (True, True))


OPTIONS: dict[str, Callable[[Any], Optimizer]] = {
    "foreach": lambda p: optim.AdamW(p, foreach=True, amsgrad=True),
    "loop": lambda p: optim.AdamW(p, foreach=False, maximize=True),
    "fused": lambda p: optim.AdamW(p, fused=True),
    "nesterov": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "rate is a tensor": lambda p: optim.AdamW(p, lr=torch.tensor(0.0), capturable=False, foreach=False),
}


@pytest.mark.parametrize("make", OPTIONS.values(), ids=OPTIONS)
def test_options_of_elementwise_optimizers(make: Callable[[Any], Optimizer]) -> None:
    optimizer = make(parameters())
    assert probe_shards(optimizer) == probe_whole(optimizer) == Verdict(True)


# ---- other optimizers -----------------------------------------------------------------------------------------------

OTHERS: dict[str, tuple[Callable[[Any], Optimizer], bool | None, bool | None]] = {
    "elementwise": (Own, True, True),
    "cautious": (Cautious, False, True),
    "LAMB": (LAMB, False, True),
    "global norm": (GlobalNorm, False, False),
    "lookahead": (Lookahead, True, True),
    "scaled lookahead": (ScaledLookahead, False, True),
    "random": (Random, False, None),
    "random of Python": (PythonRandom, False, None),
    "large matrices": (LargeOnly, False, True),
    "blocks of large matrices": (LargeQuantized, False, True),
    "fails for empty shards": (Largest, False, True),
    "fails for shapes of shards": (Rows, False, True),
    "sums for later": (Late, False, True),
    "norms after 100 steps": (After, False, True),
    "all gradients": (NeedsGradients, True, True),
    "closure": (NeedsClosure, True, False),
    "closure with a backward": (NeedsBackward, False, False),
    "SAM": (lambda p: SAM(p, optim.SGD, lr=0.1, momentum=0.9), False, False),
    "no flag": (Flag, True, True),
    "flag": (lambda p: Flag(p, trust=True), False, True),
    "option in a record": (lambda p: Grouped(p, trust=True), False, True),
    "no option in a record": (Grouped, True, True),
    "argument that is not kept": (lambda p: NotKept(p, 2), False, True),
    "other argument that is not kept": (lambda p: NotKept(p, 0), True, True),
    "module": (lambda p: KeepsModule(p, 2), None, None),
    "other arguments": (lambda p: OtherArguments(0.1, p[1:2], [p[0], *p[2:]]), False, True),
    "other arguments, elementwise": (lambda p: OtherArguments(0.1, [], p), True, True),
    "assigns data": (Data, True, True),
    "reads values when it is built": (Constructed, True, False),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_optimizers(name: str) -> None:
    make, on_shards, on_whole = OTHERS[name]
    optimizer = make(parameters())
    shards, whole = probe_shards(optimizer), probe_whole(optimizer)
    assert (shards.same, whole.same) == (on_shards, on_whole), (shards, whole)
    assert all(verdict.draws == name.startswith("random") for verdict in (shards, whole))
    assert all(bool(verdict.why) == (not verdict.same) for verdict in (shards, whole))


def test_reasons() -> None:
    whys = {kind: probe_shards(kind(parameters())).why for kind in (LAMB, Largest, Late, Random, NeedsBackward)}
    assert whys == {
        LAMB: "a trial with shards differs from a trial with all whole parameters",
        Largest: "a trial with shards raises RuntimeError: max(): Expected reduction dim to be specified for "
        "input.numel() == 0. Specify the reduction dim with the 'dim' argument",
        Late: "a trial shows that it computes 'sum' from several elements",
        Random: "it draws random numbers",
        NeedsBackward: "a trial with whole parameters raises RuntimeError: element 0 of tensors does not require grad "
        "and does not have a grad_fn",
    }


def test_a_flag_that_was_set_later() -> None:
    optimizer = Flag(parameters())
    assert probe_shards(optimizer).same
    optimizer.trust = True
    assert probe_shards(optimizer).same is False


class OnlyMatrices(Own):
    def __init__(self, params, scaled: bool = False):
        super().__init__(params, scaled=scaled)

    def update(self, param, state, group):
        return LAMB.update(self, param, state, group) if group["scaled"] or group.get("by_norm") else param.grad


@pytest.mark.parametrize(("options", "same"), [({}, True), ({"scaled": True}, False), ({"by_norm": True}, False)])
def test_groups_with_different_options(options: dict[str, Any], same: bool) -> None:
    """Options of any group count, those that the constructor does not know too."""
    first, second = parameters((5,)), parameters((6, 4))
    optimizer = OnlyMatrices([{"params": first, "lr": 0.2}, {"params": second, **options}])
    assert (probe_shards(optimizer).same, probe_whole(optimizer).same) == (same, True)


@pytest.mark.parametrize("make", [Cautious, LAMB], ids=lambda kind: kind.__name__)
def test_a_rate_of_zero_hides_nothing(make: type[Own]) -> None:
    """A schedule may begin with 0, and rates may be tensors."""
    optimizer = make(parameters(), lr=0.0)
    LambdaLR(optimizer, lambda step: step / 10)
    assert probe_shards(optimizer).same is False
    assert probe_shards(make(parameters(), lr=torch.tensor(0.0))).same is False


class Resumed(Own):
    """Initialises its state in the first of its steps, which it counts in several places."""

    def __init__(self, params, warmup: int = 3):
        super().__init__(params, warmup=warmup, k=0)
        self.steps = 0

    def step(self, closure=None):
        self.steps += 1
        for group in self.param_groups:
            group["k"] += 1
            group["step"] = group.get("step", 0) + 1
            if self.steps == group["k"] == group["step"] == 1:
                for param in group["params"]:
                    self.state[param]["average"] = torch.zeros_like(param)
        super().step()

    def update(self, param, state, group):
        return state["average"].lerp_(param.grad, min(1.0, group["k"] / group["warmup"]))


def test_counts_of_a_resumed_optimizer_are_not_options() -> None:
    optimizer = Resumed(params := parameters())
    for _ in range(100):
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
    assert probe_shards(optimizer) == probe_whole(optimizer) == Verdict(True)


def test_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the optimizer nor random numbers change, and hooks and warnings of twins reach nobody."""
    seen: list[Any] = []

    class Loud(Random):
        def update(self, param, state, group):
            warnings.warn("loud", UserWarning, stacklevel=2)
            return super().update(param, state, group)

    params = parameters()
    optimizer = Loud(params, lr=torch.tensor(0.1))
    for param in params:
        param.grad = torch.ones_like(param)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.step()
    before = torch.get_rng_state(), random.getstate(), [param.detach().clone() for param in params]
    groups, states = repr(optimizer.param_groups), repr(optimizer.state)
    hook = register_optimizer_step_pre_hook(lambda optimizer, *_: seen.append(optimizer))
    optimizer.register_step_pre_hook(lambda optimizer, *_: seen.append(optimizer))
    probe_shards(optimizer)
    probe_whole(optimizer)
    hook.remove()
    assert not seen
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert all(torch.equal(param, was) for param, was in zip(params, before[2], strict=True))
    assert (repr(optimizer.param_groups), repr(optimizer.state)) == (groups, states)


class Counted(Own):
    built = 0

    def __init__(self, params, **options):
        Counted.built += 1
        super().__init__(params, **options)


def test_verdicts_are_kept_per_class_and_options() -> None:
    def twins(*shapes: tuple[int, ...], **options: Any) -> int:
        optimizer = Counted(parameters(*shapes), **options)
        before = Counted.built
        probe_shards(optimizer)
        return Counted.built - before

    assert twins(weight=1.0) > 0
    assert twins(weight=1.0) == twins((7,), (8, 9), (1, 1, 1, 1), (), weight=1.0) == 0
    assert twins(weight=2.0) > 0
    assert twins((7,), weight=1.0) > 0


@pytest.mark.parametrize(
    "around",
    [torch.no_grad, torch.inference_mode, lambda: torch.device("meta"), lambda: torch.autocast("cpu", torch.bfloat16)],
    ids=["no_grad", "inference_mode", "default device", "autocast"],
)
def test_the_state_of_the_program_does_not_matter(around: Callable[[], Any]) -> None:
    optimizers = [kind(parameters()) for kind in (optim.SGD, Lookahead, LAMB)]
    with around():
        assert [probe_shards(each).same for each in optimizers] == [True, True, False]


class TrainsOnly(Own):
    """Steps in train mode only, as schedule-free optimizers do."""

    training = False

    def train(self) -> None:
        self.training = True

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        assert self.training
        super().step(closure)


def test_trials_step_in_train_mode():
    optimizer = TrainsOnly(parameters())
    assert probe_shards(optimizer).same
    assert not optimizer.training
