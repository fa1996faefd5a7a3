"""Complex parameters, as spectral layers have them: each element is trained as two real numbers."""

import copy
from collections.abc import Callable, Mapping
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import shardlite
from shardlite import EMA, AdamW, Precision, Route, ShardLite, WholeParameters
from shardlite.params import as_real
from tests.support.twins.sharded import accumulating, same_bits, same_states, slow, take_step

WIDTH = 7


class Spectral(nn.Module):
    """Multiplies spectra. Autograd saves conjugate views of weights. Frozen phases are complex, too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64) / 3)
        self.gain = nn.Parameter(torch.randn((), dtype=torch.complex64))
        self.phases = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64), requires_grad=False)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.fft(x.float()) * self.phases.conj() @ self.weight * self.gain.conj()
        spectrum = spectrum * self.weight[1].conj().imag + self.weight.real[2].sin()
        return self.out(torch.fft.ifft(spectrum).real.tanh().to(self.out.weight.dtype))


Make = Callable[..., optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": partial(optim.SGD, lr=0.1, momentum=0.9),
    "adam": partial(optim.Adam, lr=0.01, amsgrad=True, foreach=False),
    "adamw": partial(optim.AdamW, lr=0.01),
    "adagrad": partial(optim.Adagrad, lr=0.01),
    "rmsprop": partial(optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "adadelta": optim.Adadelta,
    "adamax": partial(optim.Adamax, lr=0.01),
    "radam": partial(optim.RAdam, lr=0.01),
}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Spectral() for _ in range(3)))


def trainable(module: nn.Module) -> list[nn.Parameter]:
    return [param for param in module.parameters() if param.requires_grad]


def loss(module: Callable[[Tensor], Tensor], seed: int) -> Tensor:
    return module(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))).float().square().mean()


def resolve(module: nn.Module) -> list[Tensor]:
    """Resolve conjugate gradients, which PyTorch's optimizers refuse, and return all gradients."""
    for param in trainable(module):
        if param.grad is not None:
            param.grad = param.grad.resolve_conj()
    return [param.grad for param in trainable(module) if param.grad is not None]


class Duo:
    """A wrapped model and a plain twin, whose gradients are averaged over the ranks as real numbers."""

    def __init__(self, group: Any, make: Make, *, twin: Make | None = None, **options: Any) -> None:
        plain = net()
        self.twin, self.group, self.steps = copy.deepcopy(plain), group, 0
        chosen = [plain[0].weight] if options.pop("replicates", False) else ()
        self.model = ShardLite(plain, group=group, units=Spectral, replicate=chosen, **options)
        self.optimizer, self.theirs = make(trainable(self.model)), (twin or make)(trainable(self.twin))

    def backward(self, *modes: str) -> None:
        for micro, mode in enumerate(modes):
            seed = 100 * self.steps + 10 * micro + dist.get_rank(self.group)
            with accumulating(self.model, mode):
                loss(self.model, seed).backward()
            loss(self.twin, seed).backward()
        for grad in resolve(self.twin):
            dist.all_reduce(as_real(grad), group=self.group)
            grad.div_(self.group.size())

    def step(self, *modes: str) -> None:
        self.backward(*(modes or ("step",)))
        for each in (self.optimizer, self.theirs):
            take_step(each)
        self.steps += 1

    def compare(self, same: Callable[[str, Mapping[str, Tensor], Mapping[str, Tensor]], None] = same_states) -> None:
        same(f"step {self.steps}", self.model.full_state_dict(), self.twin.state_dict())


def close(_: str, got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    torch.testing.assert_close(dict(got), dict(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.stages(0, 3)
def test_training_has_the_bits_of_a_plain_twin(group: Any, stage: int) -> None:
    for make in OPTIMIZERS.values():
        duo = Duo(group, make, stage=stage)
        for modes in (("step",), ("local", "step"), ("step",)):
            duo.step(*modes)
        duo.compare()
    module = duo.model.unwrap()
    same_states("unwrapped", module.state_dict(), duo.twin.state_dict())
    assert type(module[0].weight) is nn.Parameter


@pytest.mark.stages(0, 3)
def test_parameters_show_their_own_gradients_before_the_reduction(group: Any, stage: int) -> None:
    """They are complex while they wait for the reduction, and when they have been copied to its buffer."""
    duo = Duo(group, partial(optim.SGD, lr=0.1), stage=stage)
    for _ in range(2):
        with duo.model.no_sync():
            loss(duo.model, 0).backward()
        loss(duo.twin, 0).backward()
        resolve(duo.twin)
        for ours, theirs in zip(trainable(duo.model.module), trainable(duo.twin), strict=True):
            assert ours.grad is not None
            assert theirs.grad is not None
            same_bits("own gradient", ours.grad, theirs.grad)


def test_optimizers_of_whole_parameters_and_replicated_parameters(group: Any) -> None:
    make = partial(WholeParameters, optimizer_class=optim.Adam, lr=0.01)
    for options in ({"stage": 0}, {"stage": 3}, {"stage": 3, "replicates": True}):
        duo = Duo(group, make, twin=partial(optim.Adam, lr=0.01), **options)
        for _ in range(2):
            duo.step()
        duo.compare()


def test_ignored_parameters_are_stepped_by_our_adamw(group: Any) -> None:
    module, twin = net(), net()
    model = ShardLite(module, group=group, units=Spectral, ignore=[module[0].weight, module[1].gain])
    optimizers = [make(trainable(each)) for make, each in ((AdamW, model), (optim.AdamW, twin))]
    for step in range(2):
        for each in (model, twin):
            loss(each, step).backward()
        resolve(twin)
        for optimizer in optimizers:
            take_step(optimizer)
    close("ignored", model.full_state_dict(), twin.state_dict())


@pytest.mark.parametrize("group", [1, 2, 3], indirect=True)
@pytest.mark.parametrize(
    "options", [{"stage": 0}, {"stage": 2}, {"stage": 3}, {"stage": 3, "replicates": True}], ids=str
)
@pytest.mark.sample(2)
def test_norms_are_those_of_absolute_values(group: Any, options: dict[str, Any]) -> None:
    """With gradients of one reduction, of several, and after writes. All ways to clip give the same."""
    duo = Duo(group, partial(optim.SGD, lr=0.1), **options)
    for modes in (("step",), ("sharded", "step"), ("step", "local", "step")):
        duo.backward(*modes)
        ours, theirs = trainable(duo.model), trainable(duo.twin)
        for kind in (1.0, 2.0, 3.0, inf):
            norm = nn.utils.get_total_norm(resolve(duo.twin), kind)
            torch.testing.assert_close(duo.model.clip_grad_norm_(1e9, kind), norm)
        norm = nn.utils.clip_grad_norm_(theirs, 0.01)
        torch.testing.assert_close(duo.model.clip_grad_norm_(0.01), norm)
        torch.testing.assert_close(nn.utils.clip_grad_norm_(ours, 0.005), nn.utils.clip_grad_norm_(theirs, 0.005))
        for name, param in duo.twin.named_parameters():
            if param.grad is not None:
                torch.testing.assert_close(duo.model.full_grad(name), param.grad)
        duo.steps += 1
        duo.model.zero_grad()
        duo.twin.zero_grad()


@pytest.mark.parametrize("group", [1, 2], indirect=True)
def test_parts_are_summed_in_a_tree(group: Any) -> None:
    """Two parts in an order that does not depend on the number of ranks, with a norm and counted items."""
    model = ShardLite(net(), group=group, units=Spectral, route=Route(order="tree", parts=2))
    optimizer = AdamW(trainable(model), lr=0.01, max_norm=0.01)
    norms = []
    for _ in range(2):
        for part in model.parts():
            model.count_items(part + 1)
            loss(model, part).backward()
        norms.append(model.clip_grad_norm_(inf, 1.0))
        take_step(optimizer)
    twin = net()
    theirs = optim.AdamW(trainable(twin), lr=0.01)
    for _ in range(2):
        (loss(twin, 0) + loss(twin, 1)).div(3).backward()
        torch.testing.assert_close(norms.pop(0), nn.utils.get_total_norm(resolve(twin), 1.0))
        nn.utils.clip_grad_norm_(twin.parameters(), 0.01)
        take_step(theirs)
    close("tree", model.full_state_dict(), twin.state_dict())


@pytest.mark.parametrize("group", [1, 2, 3], indirect=True)
@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.sample(2)
def test_our_adamw_steps_real_numbers(group: Any, in_backward: bool) -> None:
    theirs = partial(optim.AdamW, lr=0.01)
    for stage in (0, 2, 3):
        duo = Duo(group, partial(AdamW, lr=0.01, in_backward=in_backward), twin=theirs, stage=stage)
        for modes in (("step",), ("local", "step")):
            duo.step(*modes)
        duo.compare(close)
        duo.optimizer.load_state_dict(duo.optimizer.state_dict())
        moments = {param.dtype for state in duo.optimizer.state.values() for param in state.values()}
        assert moments == {torch.float32, torch.complex64}
        duo.step()
        duo.compare(close)


@pytest.mark.parametrize(
    "options", [{"quantized_gather": True}, {"reduce": torch.bfloat16}, {"master": "split24"}], ids=str
)
def test_complex_parameters_are_not_rounded(group: Any, options: dict[str, Any]) -> None:
    precision = Precision(compute=torch.bfloat16, **options)
    model = ShardLite(net(), group=group, units=Spectral, precision=precision)
    optimizer = AdamW(trainable(model), lr=0.01)
    take_step(optimizer, loss(model, 0))
    with model.gathered():
        assert {param.dtype for param in model.module.parameters()} == {torch.complex64, torch.bfloat16}
        inside = model.module[0].weight.detach().clone()
    same_bits("weight", inside, model.full_state_dict()["0.weight"])


@pytest.mark.parametrize(("world_size", "stage"), [slow(1, 3), slow(2, 0), (2, 3)])
def test_saved_runs_go_on_at_other_numbers_of_ranks(cluster: Any, world_size: int, stage: int, tmp_path: Path) -> None:
    cluster.check(_save, world_size, tmp_path, stage)
    for other in (1, 2, 3):
        cluster.check(_load, other, tmp_path)


def _save(group: Any, path: Path, stage: int) -> None:
    """Save a run in this library's format, sharded and plain states by DCP, and a file with all that is expected."""
    duo = Duo(group, OPTIMIZERS["adamw"], stage=stage)
    average = EMA(duo.model, 0.5)
    duo.step()
    average.update()
    initial, full = net().state_dict(), duo.model.full_state_dict()
    close("average", average.full_state_dict(), {name: (initial[name] + full[name]) / 2 for name in full})
    shardlite.save(path / "run", duo.model, duo.optimizer)
    states = {"model": duo.model.state_dict(), "optimizer": get_optimizer_state_dict(duo.model, duo.optimizer)}
    dcp.save(states, checkpoint_id=path / "sharded", process_group=group)
    plain = {"model": duo.twin.state_dict(), "optimizer": get_optimizer_state_dict(duo.twin, duo.theirs)}
    dcp.save(plain, checkpoint_id=path / "plain", process_group=group)
    duo.step()
    if dist.get_rank(group) == 0:
        torch.save((full, duo.twin.state_dict(), group.size()), path / "full.pt")
    dist.barrier(group)


def _load(group: Any, path: Path) -> None:
    """Whole states are complex. After each kind of load, training goes on as if it had not stopped."""
    before, after, world_size = torch.load(path / "full.pt")
    for how in ("run", "sharded", "plain", "full"):
        duo = Duo(group, OPTIMIZERS["adamw"])
        take_step(duo.optimizer, loss(duo.model, 50))
        if how == "run":
            shardlite.load(path / "run", duo.model, duo.optimizer)
        elif how == "full":
            duo.model.load_state_dict(before)
        else:
            states = {"model": duo.model.state_dict(), "optimizer": get_optimizer_state_dict(duo.model, duo.optimizer)}
            dcp.load(states, checkpoint_id=path / how, process_group=group)
            duo.model.load_state_dict(states["model"])
            set_optimizer_state_dict(duo.model, duo.optimizer, states["optimizer"])
        same_states(how, duo.model.full_state_dict(), before)
        state = duo.optimizer.state_dict()["state"]
        assert {value.dtype for each in state.values() for value in each.values()} == {torch.complex64, torch.float32}
        if how != "full":
            seeds = range(100, 100 + world_size)
            (sum(loss(duo.model, seed) for seed in seeds) / world_size).backward()  # on all ranks the whole batch
            duo.optimizer.step()
            close(how, duo.model.full_state_dict(), after)
