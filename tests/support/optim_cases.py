"""Cases of the optimizer tests: shards as `ShardLite` lays them out, plain parameters, gradients, and scenarios."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from shardlite_kernels import Hyper
from shardlite_kernels.adamw import adamw_reference
from shardlite_kernels.adamw_cpu import CpuStep, adamw_cpu
from torch import Tensor, nn

from shardlite import AdamW
from shardlite.params.layout import ShardInfo, mark_padded
from tests.kernels.adamw_cases import one_row, state_of

HYPER = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
NUMELS = [100, 32, 1, 0, 500, 33]


class ByHand(torch.optim.Optimizer):
    """Adam as programs write it: a count of its own name, as large as a scalar parameter, and moments in a list."""

    def __init__(self, params: Any, lr: float = 0.01, count: tuple[int, ...] = ()) -> None:
        super().__init__(params, {"lr": lr, "count": count})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Take a step."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                if param not in self.state:
                    moments = [torch.zeros_like(param), torch.zeros_like(param)]
                    self.state[param] = {"t": torch.zeros(group["count"]), "moments": moments}
                t, (first, second) = self.state[param]["t"], self.state[param]["moments"]
                t += 1
                first.lerp_(param.grad, 0.1)
                second.lerp_(param.grad.square(), 0.01)
                unbiased = first / (1 - 0.9 ** t.item()), second / (1 - 0.99 ** t.item())
                param.addcdiv_(unbiased[0], unbiased[1].sqrt() + 1e-8, value=-group["lr"])


@dataclass
class Arena:
    """Parameters in one padded buffer and their gradients in another, as `ShardLite` lays them out."""

    flat: Tensor
    flat_grad: Tensor
    params: list[nn.Parameter]

    def new_grads(self, seed: int) -> None:
        """Fresh gradients in a fresh buffer, with zeros between them, and NaN where nothing is ours."""
        self.flat_grad = torch.zeros_like(self.flat).masked_fill(self.flat.isnan(), float("nan"))
        generator = torch.Generator().manual_seed(seed)
        for param in self.params:
            here = slice(param.storage_offset(), param.storage_offset() + param.numel())
            self.flat_grad[here] = torch.randn(param.numel(), generator=generator)
            (param.grad,) = mark_padded([self.flat_grad[here].view(param.shape)])


def padded_numel(numel: int) -> int:
    return -(-numel // 32) * 32


def make_arena(numels=NUMELS, dtype=torch.float32, gaps=()) -> Arena:
    """`gaps` are how many elements that are not ours, all NaN, lie behind each parameter."""
    torch.manual_seed(0)
    offsets, gaps = [0], [*gaps, *[0] * len(numels)]
    for numel, gap in zip(numels, gaps, strict=False):
        offsets.append(offsets[-1] + padded_numel(numel) + gap)
    flat, params = torch.zeros(-(-offsets[-1] // 1024) * 1024, dtype=dtype), []
    for numel, gap, offset in zip(numels, gaps, offsets, strict=False):
        flat[offset : offset + numel].normal_()
        flat[offset + padded_numel(numel) :][:gap] = float("nan")
        # Through `.data` each parameter gets a version counter of its own.
        params.append(nn.Parameter(flat.data[offset : offset + numel].view(numel, 1)))
        ShardInfo(0, None).mark(params[-1])
    arena = Arena(flat, flat, params)
    arena.new_grads(seed=0)
    return arena


def fused_twin(arena):
    """PyTorch's fused optimizer on the whole padded buffer as one parameter."""
    twin = nn.Parameter(arena.flat.clone())
    return twin, torch.optim.AdamW([twin], **HYPER, fused=True)


class PaddedTwins:
    """PyTorch's fused optimizer on a flat, zero-padded copy of each parameter."""

    def __init__(self, params):
        self._params = params
        self.flats = [nn.Parameter(padded(param)) for param in params]
        self.optimizer = torch.optim.AdamW(self.flats, **HYPER, fused=True)

    def take_grads(self):
        for param, flat in zip(self._params, self.flats, strict=True):
            flat.grad = None if param.grad is None else padded(param.grad)

    def assert_same(self):
        for param, flat in zip(self._params, self.flats, strict=True):
            assert_same(param.data.flatten(), flat.data[: param.numel()])

    def assert_same_grads(self):
        for param, flat in zip(self._params, self.flats, strict=True):
            assert_same(param.grad.flatten(), flat.grad[: param.numel()])

    def assert_same_states(self, optimizer):
        """A parameter without a state has not been stepped."""
        for param, flat in zip(self._params, self.flats, strict=True):
            mine, theirs = optimizer.state.get(param), self.optimizer.state.get(flat)
            assert bool(mine) == bool(theirs)
            if mine:
                assert_same(mine["step"], theirs["step"])
                for name in ("exp_avg", "exp_avg_sq"):
                    assert_same(mine[name].flatten(), theirs[name][: param.numel()])


def padded(tensor):
    flat = torch.zeros(padded_numel(tensor.numel()), dtype=tensor.dtype)
    flat[: tensor.numel()] = tensor.detach().flatten()
    return flat


def run(arena, optimizer, steps, twin=None, twin_optimizer=None):
    for seed in range(steps):
        arena.new_grads(seed)
        optimizer.step()
        if twin is not None:
            twin.grad = arena.flat_grad.clone()
            twin_optimizer.step()


def plain_params():
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape)) for shape in [(5, 7), (33,), (), (0, 3), (4, 4, 4)]]


def place_shards(params):
    """Move parameters into one padded buffer and mark them, as wrapping does on one rank."""
    flat, offset = torch.zeros(sum(padded_numel(param.numel()) for param in params), device=params[0].device), 0
    for param in params:
        flat[offset : offset + param.numel()] = param.detach().flatten()
        param.data = flat.data[offset : offset + param.numel()].view(param.shape)
        ShardInfo(0, None).mark(param)
        offset += padded_numel(param.numel())
    return params


def shard_params():
    return place_shards(plain_params())


def set_grads(params, seed):
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)


def small_model():
    """A model as it is wrapped on one rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 3))
    place_shards(list(model.parameters()))
    return model


def loss_of(model, seed):
    return model(torch.randn(5, 7, generator=torch.Generator().manual_seed(seed))).square().sum()


def train(model, optimizer, seeds):
    for seed in seeds:
        optimizer.zero_grad()
        loss_of(model, seed).backward()
        optimizer.step()


def assert_same(got, expected):
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


# ---- each parameter alone -------------------------------------------------------------------------------------------


def by_cpu(state, grad, number, hyper, table, found_inf, grad_scale):
    """Update a state as on the CPU."""
    if not found_inf:
        adamw_cpu(state, grad, CpuStep(number=number, hyper=hyper, table=table, grad_scale=grad_scale))


def by_reference(state, grad, number, hyper, table, found_inf, grad_scale):
    """Update a state by the specification of the kernels."""
    scaled = one_row(len(grad), number, hyper, active=float(not found_inf), grad_scale=grad_scale).scalars
    adamw_reference(state, grad, table._replace(scalars=scaled), unscale=True)


class Alone:
    """Copies of parameters, each padded and updated by itself, with counts that the host keeps.

    `params` are those of the optimizer, in its order: random bits depend on the number of a parameter.
    """

    def __init__(self, params, moments="fp32", update=by_cpu):
        self._params, self._update = params, update
        self.states = [state_of(("whole", moments), padded(p), *[torch.zeros_like(padded(p))] * 2) for p in params]
        self.counts = [0 for _ in params]

    def step(self, found_inf=0.0, grad_scale=1.0, each=None, **changed):
        """Update with changed hyper-parameters, of all parameters or of `each`."""
        for index, param in enumerate(self._params):
            if param.grad is not None and param.requires_grad:
                given = {"max_update": float("inf")} | HYPER | changed | (each[index] if each else {})
                beta1, beta2 = given.pop("betas")
                hyper = Hyper(beta1=beta1, beta2=beta2, **given)
                grad, number = padded(param.grad), self.counts[index] + 1
                table = one_row(len(grad), number, number=index)
                self._update(self.states[index], grad, number, hyper, table, found_inf, grad_scale)
                self.counts[index] += found_inf == 0

    def assert_same(self, optimizer):
        for param, state, count in zip(self._params, self.states, self.counts, strict=True):
            assert_same(param.data.flatten(), state.param[: param.numel()])
            mine = optimizer.state.get(param) or {"step": torch.zeros(())}
            assert mine["step"].item() == count
            for name in ("exp_avg", "exp_avg_sq"):
                if count and name in mine:
                    assert_same(mine[name].flatten(), getattr(state, name)[: param.numel()])
            if count and "exp_avg_exponent" in mine:
                assert_same(mine["exp_avg_exponent"], state.avg_exponent)
                assert_same(mine["exp_avg_sq_exponent"], state.sq_exponent)


# ---- scenarios ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scenario:
    """What a program does before each of some steps, and how often each of four parameters has been stepped then."""

    act: Callable[[Arena, AdamW, Alone, int], dict[str, object]]
    """Changes something; returns what `Alone.step` takes."""

    steps: int
    counts: list[int]

    def run(self, moments, update):
        arena = make_arena([64, 33, 64, 64])
        alone, optimizer = Alone(arena.params, moments, update), AdamW(arena.params, **HYPER, state=moments)
        for seed in range(self.steps):
            arena.new_grads(seed)
            alone.step(**self.act(arena, optimizer, alone, seed))
            optimizer.step()
            alone.assert_same(optimizer)
        assert alone.counts == self.counts


def flags(optimizer, found_inf=None, grad_scale=None):
    optimizer.found_inf = None if found_inf is None else torch.tensor(found_inf)
    optimizer.grad_scale = None if grad_scale is None else torch.tensor(grad_scale)


def _unused(arena, optimizer, alone, seed):
    """What lies in the place of a missing gradient is not looked at."""
    for index in [[2], [3], [], [1, 2], [0], []][seed]:
        arena.params[index].grad.fill_(float("nan"))
        arena.params[index].grad = None
    return {}


def _skipped(arena, optimizer, alone, seed):
    """One parameter misses a step that counts, one a step that does not: only the first has another count after."""
    found_inf, unused = [(1.0, None), (0.0, None), (1.0, 0), (0.0, 1), (0.0, None), (0.0, None)][seed]
    if unused is not None:
        arena.params[unused].grad = None
    flags(optimizer, found_inf)
    return {"found_inf": found_inf}


def _scaled(arena, optimizer, alone, seed):
    found_inf = [0.0, 1.0, 0.0][seed]
    flags(optimizer, found_inf, 3.0)
    return {"found_inf": found_inf, "grad_scale": 3.0}


def _hyper(arena, optimizer, alone, seed):
    """A learning rate changes in place and is replaced."""
    (group,) = optimizer.param_groups
    if seed == 0:
        group["lr"] = torch.tensor(HYPER["lr"], dtype=torch.float64)
    elif seed < 3:
        group["lr"] *= 0.3
    else:
        group["lr"], group["weight_decay"] = 1e-4, 0.0 if seed == 4 else 0.1
    group["max_update"] = [None, 0.5, 0.1, None, None][seed]
    limit = float("inf") if group["max_update"] is None else group["max_update"]
    return {"lr": float(group["lr"]), "weight_decay": group["weight_decay"], "max_update": limit}


def _counted(arena, optimizer, alone, seed):
    """A count is set by hand."""
    if seed == 2:
        optimizer.state[arena.params[1]]["step"].fill_(7)
        alone.counts[1] = 7
    return {}


def _frozen(arena, optimizer, alone, seed):
    """One parameter is frozen from the start, one once it has a state."""
    arena.params[0].requires_grad_(seed not in (1, 2))
    arena.params[1].requires_grad_(seed not in (0, 1))
    return {}


SCENARIOS = {
    "unused": Scenario(_unused, 6, [5, 5, 4, 5]),
    "skipped": Scenario(_skipped, 6, [4, 3, 4, 4]),
    "scaled": Scenario(_scaled, 3, [2, 2, 2, 2]),
    "hyper": Scenario(_hyper, 5, [5, 5, 5, 5]),
    "counted": Scenario(_counted, 3, [3, 8, 3, 3]),
    "frozen": Scenario(_frozen, 4, [2, 2, 4, 4]),
}
