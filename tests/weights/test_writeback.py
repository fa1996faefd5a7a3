"""Weights written by a forward are kept."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from shardlite import LayoutError, Precision, ShardLite
from tests.support.models.residual import WIDTH, Block
from tests.support.twins.sharded import same_bits, same_states, take_step


class ActNorm(nn.Module):
    """Begins with scales and shifts by which its first batch is normal (Kingma and Dhariwal 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(WIDTH))
        self.log_scale = nn.Parameter(torch.zeros(WIDTH))
        self.register_buffer("begun", torch.zeros((), dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        if not self.begun:
            self.begun.fill_(True)
            self.begin(x)
        return (x + self.shift) * self.log_scale.exp()

    def begin(self, x: Tensor) -> None:
        with torch.no_grad():
            self.shift.copy_(-x.mean(0))
            self.log_scale.copy_(-x.std(0).log())


class ByData(ActNorm):
    def begin(self, x: Tensor) -> None:
        self.shift.data.copy_(-x.mean(0))
        self.log_scale.data.copy_(-x.std(0).log())


class ByAssignment(ActNorm):
    def begin(self, x: Tensor) -> None:
        self.shift.data = -x.detach().mean(0)
        self.log_scale.data = -x.detach().std(0).log()


class Clamped(nn.Module):
    """Keeps its weights in bounds, whenever it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.clamp_(-0.2, 0.2)
        return x @ self.weight


class Codebook(nn.Module):
    """Moves its codes to the inputs that are nearest to them, without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(5, WIDTH), requires_grad=False)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        nearest = torch.cdist(x, self.codes).argmin(1)
        quantized = self.codes[nearest]
        moved = self.codes.clone()
        moved.index_add_(0, nearest, 0.1 * (x.detach() - quantized))
        self.codes.data = moved
        return self.out(x + (quantized - x).detach())


WRITERS = [ActNorm, ByData, ByAssignment, Clamped, Codebook]


@pytest.mark.stages(1, 3)
@pytest.mark.parametrize("kind", WRITERS)
def test_what_a_forward_writes_is_kept(group: Any, kind: type[nn.Module], stage: int) -> None:
    """All ranks have the same batches."""
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(nn.Sequential(kind(), Block()) for _ in range(3)))
    twin = copy.deepcopy(plain)
    model = ShardLite(plain, group=group, stage=stage, units=nn.Sequential)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05) for each in (model, twin)]
    for step in range(3):
        x = torch.randn(7, WIDTH, generator=torch.Generator().manual_seed(step))
        losses = []
        for each, optimizer in zip((model, twin), optimizers, strict=True):
            loss = each(x).square().mean()
            take_step(optimizer, loss)
            losses.append(loss.detach())
        same_bits(f"loss {step}", *losses)
        full = model.full_state_dict()
        same_states(f"after step {step}", full, twin.state_dict())


class Normalized(nn.Linear):
    """Normalizes its weight before each use."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.copy_(functional.normalize(self.weight, dim=1))
        return super().forward(x)


class Checkpointed(nn.Module):
    """A block of which checkpointing recomputes a part that writes its weights. It runs twice."""

    def __init__(self, kind: Any, *, reentrant: bool) -> None:
        super().__init__()
        self.before, self.writes, self.reentrant = nn.Linear(WIDTH, WIDTH), kind(), reentrant

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.writes, self.before(x).tanh(), use_reentrant=self.reentrant)
        return x


@pytest.mark.stages(2, 3)
@pytest.mark.parametrize("kind", [Normalized, Clamped])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.sample(2)
def test_what_a_recomputation_writes_is_used_and_kept(group: Any, reentrant: bool, kind: Any, stage: int) -> None:
    """As in a plain model, the backward uses the weights that the recomputation has written."""
    plain = nn.Sequential(*(Checkpointed(kind, reentrant=reentrant) for _ in range(3)))
    twin = copy.deepcopy(plain)
    model = ShardLite(plain, group=group, stage=stage, units=Checkpointed)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05) for each in (model, twin)]
    for step in range(3):
        x = torch.randn(7, WIDTH, generator=torch.Generator().manual_seed(step))
        for each, optimizer in zip((model, twin), optimizers, strict=True):
            take_step(optimizer, each(x).square().mean())
        same_states(f"after step {step}", model.full_state_dict(), twin.state_dict())


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_what_is_not_written_keeps_its_digits(group: Any, stage: int) -> None:
    """What was not written keeps the digits of its master."""
    model = ShardLite(Clamped(), group=group, stage=stage, precision=Precision(compute=torch.bfloat16))
    before = model.full_state_dict()["weight"]
    with torch.no_grad():
        model(torch.randn(2, WIDTH))
    after = model.full_state_dict()["weight"]
    inside = before.to(torch.bfloat16).abs() <= 0.2
    same_bits("inside", after[inside], before[inside])
    bound = torch.tensor(0.2).to(torch.bfloat16).float()
    same_bits("outside", after[~inside], before[~inside].sign() * bound)
    assert not inside.all()


@pytest.mark.stages(2, 3)
def test_what_is_assigned_inside_gathered_is_kept(group: Any, stage: int) -> None:
    model = ShardLite(Codebook(), group=group, stage=stage)
    with model.gathered():
        model.module.codes.data = torch.ones(5, WIDTH)
        model.module.out.bias.data.fill_(2.0)
    full = model.full_state_dict()
    assert torch.equal(full["codes"], torch.ones(5, WIDTH))
    assert torch.equal(full["out.bias"], torch.full((WIDTH,), 2.0))


class Scaled(nn.Module):
    """A frozen weight with a trained magnitude, as DoRA has them."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.scale = nn.Parameter(torch.linspace(1.0, 2.0, WIDTH)[:, None])

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.scale * self.base.weight).T

    def unmerge(self) -> None:
        self.base.weight.data = self.base.weight.data / self.scale

    def transpose(self) -> None:
        self.base.weight.data = self.base.weight.data.T

    def alias(self) -> None:
        weight = self.base.weight.data
        self.base.weight.data = weight.view(WIDTH, WIDTH)
        weight.add_(1.0)


@pytest.mark.stages(1, 3)
@pytest.mark.parametrize("change", [Scaled.unmerge, Scaled.transpose, Scaled.alias])
def test_what_was_computed_from_former_data_may_be_assigned(group: Any, change: Any, stage: int) -> None:
    """A module changes its weights in the same way, wrapped or not."""
    plain = nn.Sequential(*(Scaled() for _ in range(3)))
    twin = copy.deepcopy(plain)
    model = ShardLite(plain, group=group, stage=stage)
    with model.gathered():
        for layer in model.module:
            change(layer)
    for layer in twin:
        change(layer)
    x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1))
    same_bits("outputs", model(x), twin(x))
    full = model.full_state_dict()
    same_states("state", full, twin.state_dict())


def test_what_would_be_lost_is_refused(group: Any) -> None:
    """Where the shards are other memory, a write into full weights between passes would be lost."""
    for stage, precision in ((3, Precision()), (2, Precision(compute=torch.bfloat16))):
        model = ShardLite(nn.Linear(4, 4), group=group, stage=stage, precision=precision)
        with torch.no_grad():
            model(torch.ones(1, 4))
        with pytest.raises(LayoutError, match="parameter 'weight' is sharded"):
            model.module.weight.data.fill_(1.0)
