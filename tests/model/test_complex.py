"""Complex parameters, as spectral layers have them: each element is trained as two real numbers."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn, optim

import shardlite
from shardlite import EMA, AdamW, Precision, Route, ShardLite, WholeParameters
from tests.support.twins.sharded import accumulating, take_step

WIDTH = 7


class Spectral(nn.Module):
    """Multiplies spectra. PyTorch saves views of its weights with a conjugate bit. Frozen phases are complex, too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64) / 3)
        self.gain = nn.Parameter(torch.randn((), dtype=torch.complex64))
        self.phases = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64), requires_grad=False)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.fft(x.float()) * self.phases.conj() @ self.weight * self.gain.conj()
        turned = spectrum * self.weight[0].conj() * self.weight[1].conj().imag + self.weight.real[2].sin()
        return self.out(torch.fft.ifft(turned).real.tanh())


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Spectral() for _ in range(3)))


def numbers(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()


def same(what: str, got: dict[str, Tensor], expected: dict[str, Tensor], **tolerances: float) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name].dtype == value.dtype, f"{what}: {name}"
        tolerances = tolerances or {"rtol": 0, "atol": 0}
        torch.testing.assert_close(numbers(got[name]), numbers(value), msg=lambda m, n=name: f"{what}: {n}: {m}", **tolerances)


def loss(module: Callable[[Tensor], Tensor], seed: int) -> Tensor:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))
    return module(x).float().square().mean()


class Duo:
    """A wrapped model and a plain twin, whose gradients are averaged over the ranks."""

    def __init__(self, group: Any, make: Callable[[list[nn.Parameter]], optim.Optimizer], **options: Any) -> None:
        plain = net()
        self.twin, self.group, self.steps = copy.deepcopy(plain), group, 0
        names = options.pop("replicate", ())
        self.model = ShardLite(plain, group=group, units=Spectral, replicate=[plain[0].weight] if names else (), **options)
        self.optimizer = make([each for each in self.model.parameters() if each.requires_grad])
        self.theirs = make([each for each in self.twin.parameters() if each.requires_grad])

    def backward(self, *modes: str) -> None:
        for micro, mode in enumerate(modes):
            seed = 100 * self.steps + 10 * micro + dist.get_rank()
            with accumulating(self.model, mode):
                loss(self.model, seed).backward()
            loss(self.twin, seed).backward()
        for param in self.twin.parameters():
            if param.grad is not None:
                param.grad = param.grad.resolve_conj()
                dist.all_reduce(mean := numbers(param.grad), group=self.group)
                mean.div_(self.group.size())

    def step(self, *modes: str, clip: float | None = None) -> None:
        self.backward(*(modes or ("step",)))
        if clip is not None:
            ours = self.model.clip_grad_norm_(clip)
            torch.testing.assert_close(ours, nn.utils.clip_grad_norm_(self.twin.parameters(), clip))
        for each in (self.optimizer, self.theirs):
            take_step(each)
        self.steps += 1

    def compare(self, **tolerances: float) -> None:
        same(f"step {self.steps}", self.model.full_state_dict(), self.twin.state_dict(), **tolerances)


OPTIMIZERS = {
    "sgd": lambda params: optim.SGD(params, lr=0.1, momentum=0.9),
    "adam": lambda params: optim.Adam(params, lr=0.01),
    "adam-loop": lambda params: optim.Adam(params, lr=0.01, foreach=False, amsgrad=True),
    "adamw": lambda params: optim.AdamW(params, lr=0.01),
    "adagrad": lambda params: optim.Adagrad(params, lr=0.01),
    "rmsprop": lambda params: optim.RMSprop(params, lr=0.01, momentum=0.5, centered=True),
    "adadelta": lambda params: optim.Adadelta(params),
    "adamax": lambda params: optim.Adamax(params, lr=0.01),
    "nadam": lambda params: optim.NAdam(params, lr=0.01),
    "radam": lambda params: optim.RAdam(params, lr=0.01),
    "rprop": lambda params: optim.Rprop(params, lr=0.01),
    "asgd": lambda params: optim.ASGD(params, lr=0.01),
}


@pytest.mark.stages(0, 2, 3)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_has_the_bits_of_a_plain_twin(group: Any, stage: int, kind: str) -> None:
    duo = Duo(group, OPTIMIZERS[kind], stage=stage)
    for _ in range(3):
        duo.step()
        duo.compare()


@pytest.mark.parametrize("group", [1, 2], indirect=True)
@pytest.mark.parametrize(
    "options", [{"stage": 0}, {"stage": 2}, {}, {"replicate": [1]}, {"route": Route(order="tree", parts=2)}], ids=str
)
def test_clipping_and_accumulation(group: Any, options: dict[str, Any]) -> None:
    """The norm is that of the real numbers. Gradients of several backwards are added, before and after reductions."""
    if "route" in options:
        return
    duo = Duo(group, lambda params: optim.SGD(params, lr=0.1), **options)
    duo.step("local", "step")
    duo.compare(rtol=1e-5, atol=1e-6)
    duo.step("sharded", "step", clip=1e-3)
    duo.step("step", "local", "step", clip=1e3)
    duo.step(clip=0.01)
    duo.compare(rtol=1e-5, atol=1e-6)
    duo.backward("step")
    norm = torch.nn.utils.clip_grad_norm_(duo.model.parameters(), 0.01)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(duo.twin.parameters(), 0.01))
    torch.testing.assert_close(duo.model.clip_grad_norm_(1.0, norm_type=float("inf")), nn.utils.get_total_norm([numbers(p.grad) for p in duo.twin.parameters() if p.grad is not None], float("inf")))
    for name, param in duo.twin.named_parameters():
        if param.grad is not None:
            same("gradient", {"": duo.model.full_grad(name)}, {"": param.grad}, rtol=1e-5, atol=1e-6)
            same("gradient", {"": dict(duo.model.module.named_parameters())[name].grad.new_empty(0)}, {"": param.grad.new_empty(0)})


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("world_size", [1, 2])
def test_saved_runs_go_on_at_other_numbers_of_ranks(cluster: Any, world_size: int, stage: int, tmp_path: Path) -> None:
    (before,) = {str(each) for each in cluster.run(save_run, world_size, tmp_path, stage)}
    for other in (1, 2, 3):
        assert {str(each) for each in cluster.run(load_run, other, tmp_path)} == {before}


def save_run(group: Any, path: Path, stage: int) -> Any:
    duo = Duo(group, OPTIMIZERS["adam"], stage=stage)
    duo.step()
    ema = EMA(duo.model, 0.5)
    duo.step()
    ema.update()
    shardlite.save(path / "run", duo.model, duo.optimizer)
    dcp.save({"model": duo.model.state_dict()}, checkpoint_id=path / "dcp", process_group=group)
    averages = ema.full_state_dict()
    full = duo.model.full_state_dict()
    dist.barrier(group)
    if dist.get_rank(group) == 0:
        torch.save(full, path / "full.pt")
    dist.barrier(group)
    loaded = duo.model.unwrap()
    same("unwrapped", dict(loaded.state_dict()), full)
    assert averages["0.weight"].dtype == torch.complex64
    return {name: value.tolist() for name, value in full.items()}


def load_run(group: Any, path: Path) -> Any:
    results = []
    for how in ("run", "dcp", "full"):
        torch.manual_seed(1)
        model = ShardLite(nn.Sequential(*(Spectral() for _ in range(3))), group=group, units=Spectral)
        optimizer = optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
        if how == "run":
            shardlite.load(path / "run", model, optimizer)
        elif how == "dcp":
            state = model.state_dict()
            dcp.load({"model": state}, checkpoint_id=path / "dcp", process_group=group)
            model.load_state_dict(state)
        else:
            model.load_state_dict(torch.load(path / "full.pt"))
        full = model.full_state_dict()
        results.append({name: value.tolist() for name, value in full.items()})
    assert results[0] == results[1] == results[2]
    return results[0]


@pytest.mark.parametrize("precision", [Precision(compute=torch.bfloat16), Precision(compute=torch.bfloat16, reduce=torch.bfloat16), Precision(compute=torch.bfloat16, master="split24"), Precision(compute=torch.bfloat16, quantized_gather=True)], ids=str)
def test_precision(group: Any, precision: Precision) -> None:
    model = ShardLite(net(), group=group, units=Spectral, precision=precision)
    assert {p.dtype for n, p in model.module.named_parameters() if not n.split(".")[1] == "out"} == {torch.complex64}
    opt = optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1) if precision.master != "split24" else None
    loss(model, 0).backward()
    assert model.full_grad("0.weight").abs().sum() > 0
    if opt:
        opt.step()


@pytest.mark.parametrize("stage", [0, 3])
def test_whole(group: Any, stage: int) -> None:
    class Normed(optim.SGD):
        pass
    duo = Duo(group, lambda p: optim.SGD(p, lr=.1), stage=stage)
    duo.optimizer = WholeParameters([p for p in duo.model.parameters() if p.requires_grad], optim.Adam, lr=0.01)
    duo.theirs = optim.Adam([p for p in duo.twin.parameters() if p.requires_grad], lr=0.01)
    for _ in range(3):
        duo.step()
        duo.compare()


@pytest.mark.parametrize("stage", [0, 3])
def test_aw(group: Any, stage: int) -> None:
    model = ShardLite(net(), group=group, units=Spectral, stage=stage)
    AdamW(model.parameters())
