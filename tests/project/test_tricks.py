"""The programs of docs/tricks.md: each is run with a sharded model and with a plain one whose gradients are averaged.

Legend: `B` rows of a batch, `D` width, `K` codes of a codebook.
"""

import copy
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_, prune

from shardlite import ShardLite
from tests.support.models.residual import WIDTH, Chain, net, rows
from tests.support.twins.sharded import Turn, same_states, take_step

TOKENS = 11
STEPS = 3


class Side:
    """A model as a program sees it: sharded, or plain and then averaged by hand."""

    def __init__(self, module: nn.Module, group: Any, stage: int | None) -> None:
        self.group = group
        self.model: Any = module if stage is None else ShardLite(module, group=group, stage=stage)
        self.sharded = stage is not None
        self.module = self.model.module if self.sharded else module

    def turn(self, step: int) -> Turn:
        return Turn(step, dist.get_rank(self.group), 0)

    def sgd(self, **options: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9, **options)

    def backward(self, *losses: Callable[[], Tensor]) -> None:
        """Add the gradient of the sum of the losses, averaged over the ranks, to what is there."""
        if self.sharded:
            for loss in losses[:-1]:
                with self.model.no_sync():
                    loss().backward()
            losses[-1]().backward()
            return
        params = list(self.model.parameters())
        before = [param.grad for param in params]
        self.model.zero_grad()
        for loss in losses:
            loss().backward()
        for param, earlier in zip(params, before, strict=True):
            if param.grad is not None:
                dist.all_reduce(param.grad, group=self.group)
                param.grad.div_(self.group.size())
                param.grad = param.grad if earlier is None else earlier + param.grad

    def gathered(self, *names: str) -> AbstractContextManager[None]:
        return self.model.gathered(*names) if self.sharded else nullcontext()

    def full_grad(self, name: str) -> Tensor:
        return self.model.full_grad(name) if self.sharded else self.model.get_parameter(name).grad

    def state(self) -> dict[str, Tensor]:
        return self.model.full_state_dict() if self.sharded else self.model.state_dict()


def states(make: Callable[[], nn.Module], program: Callable[[Side], None], group: Any, stage: int) -> list[Any]:
    """Return the state after a program, of the sharded model and of its twin."""
    sides = []
    for each in (stage, None):
        torch.manual_seed(0)
        side = Side(make(), group, each)
        program(side)
        sides.append(side.state())
    return sides


def compare(make: Callable[[], nn.Module], program: Callable[[Side], None], group: Any, stage: int) -> None:
    same_states(f"stage {stage}", *states(make, program, group, stage))


def score(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return model(x).square().mean()


def pairwise(embeddings: Tensor) -> Tensor:
    """Contrastive loss of [B, D], whose positive is the next row."""
    return functional.cross_entropy(embeddings @ embeddings.T, torch.arange(len(embeddings)).roll(1))


# ---- gradients ------------------------------------------------------------------------------------------------------


def cached(side: Side) -> None:
    """GradCache (Gao et al. 2021): a large batch, whose forwards with gradients are of small ones."""
    optimizer = side.sgd()
    for step in range(STEPS):
        parts = rows(side.turn(step), 6).split(2)
        with torch.no_grad():
            embeddings = [side.model(part) for part in parts]
        leaves = [each.requires_grad_() for each in embeddings]
        pairwise(torch.cat(leaves)).backward()
        side.backward(*(lambda p=p, e=e: (side.model(p) * e.grad).sum() for p, e in zip(parts, leaves, strict=True)))
        take_step(optimizer)


def clipped_per_sample(side: Side) -> None:
    """DP-SGD (Abadi et al. 2016) without its noise: the gradient of each sample is clipped to a norm of 0.1."""
    optimizer = side.sgd()

    def loss(x: Tensor) -> Tensor:
        each = side.model(x).square().mean(1)
        params = list(side.module.parameters())
        norms = [
            torch.cat([g.flatten() for g in torch.autograd.grad(one, params, retain_graph=True)]).norm() for one in each
        ]
        return sum(one * (0.1 / norm).clamp(max=1) for one, norm in zip(each, norms, strict=True)) / len(x)

    for step in range(STEPS):
        side.backward(partial(loss, rows(side.turn(step))))
        take_step(optimizer)


def flat_minimum(side: Side) -> None:
    """Penalize the gradient itself (Zhao et al. 2022): its derivative takes a double backward through the weights."""
    optimizer = side.sgd()

    def loss(x: Tensor) -> Tensor:
        value = score(side.model, x)
        grads = torch.autograd.grad(value, list(side.module.parameters()), create_graph=True)
        return value + 0.1 * sum(grad.square().sum() for grad in grads)

    for step in range(STEPS):
        side.backward(partial(loss, rows(side.turn(step))))
        take_step(optimizer)


def tangents(side: Side) -> None:
    """A loss with a forward-mode derivative of the model by its input (Lu and Song 2024)."""
    optimizer = side.sgd()

    def loss(x: Tensor) -> Tensor:
        value, slope = torch.func.jvp(side.model, (x,), (torch.ones_like(x),))
        return (value - x + 0.1 * slope.detach()).square().mean()

    for step in range(STEPS):
        side.backward(partial(loss, rows(side.turn(step))))
        take_step(optimizer)


def sharpness(side: Side) -> None:
    """SAM (Foret et al. 2021): the gradient at the weights that are worst nearby."""
    optimizer, params = side.sgd(), list(side.model.parameters())
    for step in range(STEPS):
        loss = partial(score, side.model, rows(side.turn(step)).double())
        side.backward(loss)
        norm = clip_grad_norm_(params, float("inf"))
        kept = [param.detach().clone() for param in params]
        with torch.no_grad():
            for param in params:
                param.add_(param.grad, alpha=0.05 / norm.item())
        optimizer.zero_grad()
        side.backward(loss)
        with torch.no_grad():
            for param, before in zip(params, kept, strict=True):
                param.copy_(before)
        take_step(optimizer)


def words() -> nn.Module:
    return Chain(net(2), first=nn.Embedding(TOKENS, WIDTH), head=nn.Linear(WIDTH, TOKENS))


def tokens(turn: Turn) -> Tensor:
    return torch.randint(0, TOKENS, (2, 5), generator=turn.generator())


def next_token(side: Side, step: int) -> Tensor:
    batch = tokens(side.turn(step))
    return functional.cross_entropy(side.model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def adversarial_table(side: Side) -> None:
    """FGM (Miyato et al. 2017): a second backward with embeddings that were moved along their gradient."""
    optimizer = side.sgd()
    for step in range(STEPS):
        loss = partial(next_token, side, step)
        side.backward(loss)
        grad = side.full_grad("first.weight")
        with side.gathered("first.weight"), torch.no_grad():
            kept = side.module.first.weight.clone()
            side.module.first.weight.add_(0.5 * grad / grad.norm())
        side.backward(loss)
        with side.gathered("first.weight"), torch.no_grad():
            side.module.first.weight.copy_(kept)
        take_step(optimizer)


# ---- parts of a model -----------------------------------------------------------------------------------------------


def one_word() -> nn.Module:
    model = words().requires_grad_(False)
    model.first.requires_grad_(True)
    return model


def inverted(side: Side) -> None:
    """Textual inversion (Gal et al. 2022): of all parameters, the last row of the embeddings is trained."""
    optimizer = side.sgd()
    with side.gathered("first.weight"):
        kept = side.module.first.weight[:-1].detach().clone()
    for step in range(STEPS):
        side.backward(partial(next_token, side, step))
        take_step(optimizer)
        with side.gathered("first.weight"), torch.no_grad():
            side.module.first.weight[:-1] = kept


def pruned() -> nn.Module:
    model = net(2)
    for block in model:
        prune.l1_unstructured(block.inner, "weight", 0.5)
    return model


def plainly(side: Side) -> None:
    optimizer = side.sgd()
    for step in range(STEPS):
        side.backward(partial(score, side.model, rows(side.turn(step))))
        take_step(optimizer)


def masked(side: Side) -> None:
    """Prune by magnitude while the model is sharded: zeros of the weights stay zeros."""
    optimizer = side.sgd()
    with side.gathered(), torch.no_grad():
        for block in side.module:
            weight = block.inner.weight
            weight[weight.abs() < weight.abs().median()] = 0
    masks = [(param != 0).detach() for param in side.model.parameters()]
    for step in range(STEPS):
        side.backward(partial(score, side.model, rows(side.turn(step))))
        take_step(optimizer)
        with torch.no_grad():
            for param, mask in zip(side.model.parameters(), masks, strict=True):
                param.mul_(mask)


def wide_and_narrow() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3))


def rates_by_width(side: Side) -> None:
    """muP (Yang et al. 2021, table 8): Adam's rate of a matrix is divided by its number of inputs."""
    inputs = {name: param.shape[-1] if param.ndim > 1 else 1 for name, param in wide_and_narrow().named_parameters()}
    groups = [{"params": [param], "lr": 0.1 / inputs[name]} for name, param in side.model.named_parameters()]
    optimizer = torch.optim.Adam(groups)
    for step in range(STEPS):
        side.backward(partial(score, side.model, rows(side.turn(step))))
        take_step(optimizer)


# ---- models with a memory -------------------------------------------------------------------------------------------


class Codebook(nn.Module):
    """VQ-VAE (van den Oord et al. 2017, appendix A.1): codes that are averages over all ranks, [B, D] -> loss, []."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.encoder, self.decoder, self.group = nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH), group
        self.register_buffer("codes", torch.randn(5, 4))
        self.register_buffer("counts", torch.ones(5))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, x: Tensor) -> Tensor:
        z = self.encoder(x)
        chosen = functional.one_hot(torch.cdist(z, self.codes).argmin(1), 5).float()
        quantized = chosen @ self.codes
        with torch.no_grad():
            count, total = chosen.sum(0), chosen.T @ z
            for value in (count, total):
                dist.all_reduce(value, group=self.group)
            self.counts.lerp_(count, 0.1)
            self.sums.lerp_(total, 0.1)
            self.codes.copy_(self.sums / self.counts.clamp(min=1e-3)[:, None])
        straight = z + (quantized - z).detach()
        return (self.decoder(straight) - x).square().mean() + 0.25 * (z - quantized.detach()).square().mean()


def quantized(side: Side) -> None:
    optimizer = side.sgd()
    for step in range(STEPS):
        side.backward(partial(side.model, rows(side.turn(step), 6)))
        take_step(optimizer)


def contrasted(side: Side) -> None:
    """MoCo (He et al. 2020): the keys come from a moving average of the model, and a queue of all ranks' keys."""
    stage = side.model.stage if side.sharded else None
    key = Side(copy.deepcopy(side.module) if stage is None else net(), side.group, stage)
    key.model.load_state_dict(side.model.state_dict())
    key.model.requires_grad_(False)
    optimizer, queue = side.sgd(), torch.ones(4, WIDTH)
    for step in range(STEPS):
        x = rows(side.turn(step), 4)
        with torch.no_grad():
            keys = functional.normalize(key.model(x + 0.1), dim=1)

        def loss(x: Tensor = x, keys: Tensor = keys, queue: Tensor = queue) -> Tensor:
            queries = functional.normalize(side.model(x), dim=1)
            logits = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ queue.T], dim=1)
            return functional.cross_entropy(logits / 0.2, torch.zeros(len(x), dtype=torch.long))

        side.backward(loss)
        take_step(optimizer)
        with torch.no_grad():
            torch._foreach_lerp_(list(key.model.parameters()), list(side.model.parameters()), 0.1)
        new = [torch.empty_like(keys) for _ in range(side.group.size())]
        dist.all_gather(new, keys, group=side.group)
        queue = torch.cat([*new, queue])[:12]


class ScheduleFree(torch.optim.Optimizer):
    """SGD of Defazio et al. 2024, as their package has it: `eval` and `train` swap averages and iterates."""

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "training": True})

    @torch.no_grad()
    def move(self, training: bool) -> None:
        for group in self.param_groups:
            if group["training"] != training:
                weight = 1 - 1 / group["beta"] if not training else 1 - group["beta"]
                for param in group["params"]:
                    if "z" in self.state[param]:
                        param.lerp_(self.state[param]["z"], weight)
                group["training"] = training

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            share = 1 / (group["k"] + 1)
            for param in group["params"]:
                if param.grad is not None:
                    z = self.state[param].setdefault("z", param.detach().clone())
                    param.lerp_(z, share)
                    param.add_(param.grad, alpha=group["lr"] * (group["beta"] * (1 - share) - 1))
                    z.sub_(param.grad, alpha=group["lr"])
            group["k"] += 1


def schedule_free(side: Side) -> None:
    optimizer = ScheduleFree(side.model.parameters())
    for step in range(STEPS):
        optimizer.move(training=True)
        side.backward(partial(score, side.model, rows(side.turn(step))))
        take_step(optimizer)
        optimizer.move(training=False)
        with torch.no_grad():
            score(side.model, rows(side.turn(step)))


TRICKS: dict[str, tuple[Callable[[], nn.Module], Callable[[Side], None]]] = {
    "GradCache": (net, cached),
    "DP-SGD": (net, clipped_per_sample),
    "double backward": (net, flat_minimum),
    "FGM": (words, adversarial_table),
    "textual inversion": (one_word, inverted),
    "masks by prune": (pruned, plainly),
    "masks of shards": (net, masked),
    "muP": (wide_and_narrow, rates_by_width),
    "MoCo": (net, contrasted),
    "schedule-free": (net, schedule_free),
}


@pytest.mark.parametrize("name", TRICKS)
@pytest.mark.stages(0, 3)
def test_a_trick_gives_the_bits_of_its_twin(group: Any, name: str, stage: int) -> None:
    compare(*TRICKS[name], group, stage)


@pytest.mark.stages(0, 3)
def test_forward_mode_derivatives(group: Any, stage: int) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`torch.jit")  # PyTorch's own, where it makes tables for `jvp`
        compare(net, tangents, group, stage)


@pytest.mark.stages(0, 3)
def test_a_codebook_of_averages(group: Any, stage: int) -> None:
    compare(partial(Codebook, group), quantized, group, stage)


@pytest.mark.stages(0, 3)
def test_sharpness_aware_minimization(group: Any, stage: int) -> None:
    """The norm is added in another order: relative errors are those of sums of 816 elements in fp64."""
    ours, theirs = states(lambda: net().double(), sharpness, group, stage)
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, rtol=1e-12, atol=1e-12)
