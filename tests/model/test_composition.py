"""Training programs with more than one forward and one backward have the bits of plain data parallel.

Legend: `B` rows of a batch, `T` items of a row, `D` width.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.nn import functional
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from shardlite import EscapedViewWarning, ShardLite
from tests.support.internals import users
from tests.support.models.residual import WIDTH, Block, Chain, Nested, net, on_rows, rows
from tests.support.models.small import VOCABULARY, LanguageModel, run_all
from tests.support.twins.sharded import Pair, Turn, accumulating, gathers, same_states, slow, trained

Model = Callable[..., Any]


def inner(model: Any) -> nn.Module:
    """Return the module in a sharded model or in its twin."""
    return model.module


# ---- activation checkpointing -------------------------------------------------------------------------------------


class Layer(Block):
    """Checkpoints its own call, as the layers of Hugging Face's models do."""

    reentrant = False

    def __call__(self, x: Tensor) -> Tensor:
        return checkpoint(super().__call__, x, use_reentrant=self.reentrant)


class Sequence(nn.Sequential):
    """Checkpoints segments of several blocks."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint_sequential(list(self), 2, x.requires_grad_(), use_reentrant=self.reentrant)


def wrapped(reentrant: bool) -> nn.Module:
    """Use PyTorch's wrapper around each block."""
    kind = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(checkpoint_wrapper(Block(), kind) for _ in range(3)))


def layers(reentrant: bool) -> nn.Module:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Layer() for _ in range(3)))
    for layer in model[1:]:
        layer.reentrant = reentrant
    return model


def segments(reentrant: bool) -> nn.Module:
    model = Sequence(*net(4))
    model.reentrant = reentrant
    return model


CHECKPOINTED: dict[str, tuple[Callable[[], nn.Module], list[int]]] = {
    "layers-nonreentrant": (partial(layers, False), [1, 2, 2, 1]),
    "layers-reentrant": (partial(layers, True), [1, 2, 2, 1]),
    "checkpoint_sequential-nonreentrant": (partial(segments, False), [2, 2, 2, 1]),
    "checkpoint_sequential-reentrant": (partial(segments, True), [2, 2, 2, 1]),
    "checkpoint_wrapper-nonreentrant": (partial(wrapped, False), [1, 2, 2, 1]),
    "checkpoint_wrapper-reentrant": (partial(wrapped, True), [1, 2, 2, 1]),
    "nested": (Nested, [3, 2, 2]),
}
"""With how often each unit is gathered in a step.

That is once for its forward, and once for its recomputation and backward together. A first layer that is not recomputed
needs no weights in the backward; the last block is still there; what is recomputed twice is gathered once more.
"""


@pytest.mark.parametrize("name", CHECKPOINTED)
@pytest.mark.ways((2, 3))
def test_ways_of_activation_checkpointing(group: Any, name: str, stage: int) -> None:
    make, counts = CHECKPOINTED[name]
    options = {"prefetch": 0} if stage == 3 else {}
    pair = trained(make, on_rows, group, stage=stage, **options)
    for _ in range(2):
        pair.model.trace.take()
        pair.step(on_rows)
    assert stage < 3 or gathers(pair.model) == dict(zip(pair.model.unit_names, counts, strict=True))


SAVED: dict[str, Callable[[Any], bool]] = {
    "products": lambda op: op == torch.ops.aten.addmm.default,
    "activations": lambda op: op in (torch.ops.aten.tanh.default, torch.ops.aten.add.Tensor),
    "everything": lambda op: True,
}


class Selective(nn.Module):
    """Recomputes `span` blocks together, but for those operators that are saved. [B, D] -> [B, D]."""

    def __init__(self, span: int, saved: str) -> None:
        super().__init__()
        self.blocks = net(4)
        self.span = span
        self.saved = SAVED[saved]
        self.asked: Counter[str] = Counter()

    def forward(self, x: Tensor) -> Tensor:
        contexts = partial(create_selective_checkpoint_contexts, self._policy)
        for start in range(0, len(self.blocks), self.span):
            part = self.blocks[start : start + self.span]
            x = checkpoint(run_all, part, x, use_reentrant=False, context_fn=contexts)
        return x

    def _policy(self, ctx: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if not ctx.is_recompute:
            self.asked[str(op)] += 1
        return CheckpointPolicy.MUST_SAVE if self.saved(op) else CheckpointPolicy.MUST_RECOMPUTE


@pytest.mark.parametrize("span", [1, 2])
@pytest.mark.parametrize("saved", SAVED)
@pytest.mark.ways((2, 3))
@pytest.mark.sample(2)
def test_selective_checkpointing(group: Any, span: int, saved: str, stage: int) -> None:
    """Gathers are hidden from a policy, which is asked about the same operators as without us.

    To save everything is to save views of weights too, which is right at stage 3, and reported. (Activations have the
    shape of weights here, so taking the one for the other would not be an error.)
    """

    def on_square(model: Model, turn: Turn) -> Tensor:
        return model(rows(turn, WIDTH)).square().mean()

    escapes = saved == "everything" and stage == 3
    with pytest.warns(EscapedViewWarning) if escapes else nullcontext():
        pair = trained(partial(Selective, span, saved), on_square, group, stage=stage)
    ours, theirs = inner(pair.model).asked, inner(pair.twin).asked
    assert ours["aten.addmm.default"] > 0
    assert ours == theirs


# ---- saved tensors on the CPU -------------------------------------------------------------------------------------


class Offloading(nn.Module):
    """Saves what its second block and half of its third one need on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = net(3)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        with save_on_cpu():
            x = self.blocks[1](x)
        x = self.blocks[2](x)
        with save_on_cpu():
            return self.head(x)


@contextmanager
def counted_offloads() -> Iterator[list[torch.Size]]:
    """Yield the shapes of what `save_on_cpu` copies, as they come."""
    shapes: list[torch.Size] = []
    with pytest.MonkeyPatch.context() as patch:
        original = save_on_cpu.__init__

        def counting(self: save_on_cpu, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            pack = self.pack_hook

            def counted(tensor: Tensor) -> Any:
                shapes.append(tensor.shape)
                return pack(tensor)

            self.pack_hook = counted

        patch.setattr(save_on_cpu, "__init__", counting)
        yield shapes


@pytest.mark.ways((4, 3), (2, 2))
def test_save_on_cpu_inside_and_around(group: Any, stage: int) -> None:
    """Inside the model, around it, and both. At stage 3 no weight is copied."""

    def around(model: Model, turn: Turn) -> Tensor:
        with save_on_cpu():
            return on_rows(model, turn)

    pair = Pair(Offloading, group, stage=stage)
    with counted_offloads() as shapes:
        for loss in (on_rows, around):
            pair.step(loss, ("local", "step"))
            shapes.clear()
            loss(pair.model, Turn(0, 0, 0))
            assert ((WIDTH, WIDTH) in shapes) == (stage < 3)
            assert (3, WIDTH) in shapes


# ---- several forwards, several backwards --------------------------------------------------------------------------


def two_forwards(model: Model, turn: Turn) -> Tensor:
    """Compare two answers by one loss."""
    return -functional.logsigmoid(model(rows(turn)).sum(-1) - model(rows(turn).flip(0)).sum(-1)).mean()


def one_forward(model: Model, turn: Turn) -> Tensor:
    """The same loss, with both batches in one."""
    first, second = model(torch.cat([rows(turn), rows(turn).flip(0)])).sum(-1).chunk(2)
    return -functional.logsigmoid(first - second).mean()


@pytest.mark.ways((2, 3), (2, 2))
def test_two_forwards_before_one_backward(group: Any, stage: int) -> None:
    """Each forward and each backward gathers, but the last unit is still there when the backward begins.

    The backward of the first layer needs no weights: its input requires no gradient.
    """
    counts = []
    for loss in (one_forward, two_forwards):
        pair = Pair(partial(net, 4), group, stage=stage, **({"prefetch": 0} if stage == 3 else {}))
        for _ in range(3):
            pair.model.trace.take()
            pair.step(loss)
        counts.append(gathers(pair.model))
    once, twice = counts
    if stage == 3:
        assert once == {"0": 1, "1": 2, "2": 2, "3": 1}
        assert twice == {"0": 2, "1": 4, "2": 4, "3": 3}
    else:
        assert once == twice


class Headed(nn.Module):
    """A model that may leave its head to the program, as one whose loss is computed in chunks of tokens does."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor, *, skip_head: bool = False) -> Tensor:
        hidden = self.body(x).tanh()
        return hidden if skip_head else self.head(hidden)


def chunked(model: Model, head: nn.Module, x: Tensor, after_backward: Callable[[], object]) -> None:
    """Run a backward for each chunk of rows, and then the backward of what comes before the head."""
    hidden = model(x, skip_head=True)
    leaf = hidden.detach().requires_grad_()
    for chunk in leaf.split(2):
        functional.softplus(head(chunk)).square().sum().backward()
        after_backward()
    hidden.backward(leaf.grad)
    after_backward()


@pytest.mark.parametrize("stage", [3, slow(2), slow(0)])
def test_a_backward_per_chunk_adds_means(group: Any, stage: int) -> None:
    """Each backward is reduced and rounded by itself, as by FSDP2: `(m1 + m2) + m3`, not the mean of sums."""
    torch.manual_seed(0)
    module = Headed()
    twins = [copy.deepcopy(module) for _ in range(group.size())]
    model = ShardLite(module, group=group, stage=stage, units=nn.Linear)
    inputs = [torch.randn(8, WIDTH) for _ in twins]
    chunked(model, model.module.head, inputs[group.rank()], lambda: None)
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    each: list[list[list[Tensor | None]]] = []  # gradients of each parameter, of each backward, of each twin
    for twin, x in zip(twins, inputs, strict=True):
        each.append([])

        def take(twin: nn.Module = twin, to: list[Any] = each[-1]) -> None:
            to.append([param.grad for param in twin.parameters()])
            twin.zero_grad()

        chunked(twin, twin.head, x, take)
    for param, of_twins in zip(
        twins[0].parameters(), zip(*(zip(*of, strict=True) for of in each), strict=True), strict=True
    ):
        means = [sum(parts) / len(twins) for parts in zip(*of_twins, strict=True) if parts[0] is not None]
        param.data -= sum(means[1:], means[0])
    same_states("weights", model.full_state_dict(rank=None), twins[0].state_dict())


class Preference(nn.Module):
    """A language model, and a frozen copy of it as it was. Two batches of tokens [B, T] -> DPO's loss, [].

    The loss is that of Rafailov et al. 2023, eq. 7.
    """

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.policy = LanguageModel(reentrant=reentrant)
        self.reference = copy.deepcopy(self.policy).requires_grad_(False).eval()
        self.reference.reentrant = None

    def forward(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        with torch.no_grad():
            base = likelihood(self.reference, chosen) - likelihood(self.reference, rejected)
        margin = likelihood(self.policy, chosen) - likelihood(self.policy, rejected)
        return -functional.logsigmoid(0.1 * (margin - base)).mean()


def likelihood(model: nn.Module, tokens: Tensor) -> Tensor:
    """[B, T] -> [B]"""
    scores = model(tokens[:, :-1]).log_softmax(-1)
    return scores.gather(-1, tokens[:, 1:, None]).squeeze(-1).sum(-1)


def preferences(model: Model, turn: Turn) -> Tensor:
    chosen, rejected = torch.randint(0, VOCABULARY, (2, 2, 6), generator=turn.generator())
    return model(chosen, rejected)


@pytest.mark.parametrize("reentrant", [None, False, slow(True)], ids=["plain", "nonreentrant", "reentrant"])
@pytest.mark.ways((2, 3))
def test_dpo_with_a_frozen_reference(group: Any, reentrant: bool | None, stage: int) -> None:
    """Compare, and count how often units are gathered for a step."""
    options = {"prefetch": 0} if stage == 3 else {}
    pair = Pair(partial(Preference, reentrant), group, stage=stage, **options)
    pair.step(preferences, ("local", "step"))
    pair.step(preferences, clip=0.01)
    pair.model.trace.take()
    pair.step(preferences)
    if stage == 3:
        policy = {"policy.blocks.0": 4, "policy.blocks.1": 3}
        reference = {"reference.blocks.0": 2, "reference.blocks.1": 2}
        counts = gathers(pair.model)
        assert {name: count for name, count in counts.items() if name != "(root)"} == policy | reference


def layers_then_head() -> nn.Module:
    return Chain(net(3), head=nn.Linear(WIDTH, 1))


@pytest.mark.parametrize("first_mode", ["local", "sharded", "step"])
@pytest.mark.ways((2, 3))
def test_two_losses_with_retain_graph(group: Any, first_mode: str, stage: int) -> None:
    """Two losses of one output with a backward each; the first is reduced, or accumulated."""

    def separate(turn: Turn, parts: tuple[Callable[[Tensor], Tensor], ...]) -> None:
        for part in parts:
            part(pair.twin(rows(turn))).mean().backward()

    pair = Pair(layers_then_head, group, stage=stage)
    for step in range(2):
        for parts in [(torch.square, torch.sin)] if first_mode == "local" else [(torch.square,), (torch.sin,)]:
            pair.twin.backward(lambda _, rank, p=parts, s=step: separate(Turn(s, rank, 0), p))
        y = pair.model(rows(Turn(step, pair.rank, 0)))
        with accumulating(pair.model, first_mode):
            torch.square(y).mean().backward(retain_graph=True)
        assert set(users(pair.model)) == {0}
        torch.sin(y).mean().backward()
        pair.finish(clip=0.01)


# ---- gradients by hand --------------------------------------------------------------------------------------------


def adversarial(model: Model, turn: Turn) -> Tensor:
    """Learn from inputs that were changed for the worse (Goodfellow et al. 2015, section 5)."""
    x = rows(turn).requires_grad_()
    (slope,) = torch.autograd.grad(on_rows(lambda _: model(x), turn), x)
    return model(x.detach() + 0.1 * slope.sign()).square().mean()


def by_inputs(model: Model, turn: Turn) -> Tensor:
    """The same by `backward(inputs=...)`, and with respect to an activation too."""
    x = rows(turn).requires_grad_()
    hidden = run_all(inner(model).blocks, x)
    hidden.retain_grad()
    inner(model).head(hidden).square().mean().backward(inputs=[x, hidden])
    return model(x.detach() + 0.1 * x.grad.sign()).square().mean() + hidden.grad.sum()


def balanced(model: Model, turn: Turn) -> Tensor:
    """Weigh two losses by their gradients with respect to the last layer (Esser et al. 2021, eq. 7)."""
    y = model(rows(turn))
    losses = [y.square().mean(), y.sin().mean()]
    weight = inner(model).head.weight
    norms = [torch.autograd.grad(loss, weight, retain_graph=True)[0].norm() for loss in losses]
    return losses[0] + losses[1] * (norms[0] / (norms[1] + 1e-4)).detach()


LOSSES_BY_HAND = {"adversarial": adversarial, "backward-inputs": by_inputs, "weighed-by-gradients": balanced}


@pytest.mark.parametrize("name", LOSSES_BY_HAND)
@pytest.mark.ways((2, 3))
def test_autograd_grad_of_inputs_within_a_step(group: Any, name: str, stage: int) -> None:
    """What is differentiated by hand is not reduced, so every unit is reduced once per step."""
    pair = trained(layers_then_head, LOSSES_BY_HAND[name], group, stage=stage)
    pair.model.trace.take()
    pair.step(LOSSES_BY_HAND[name])
    reductions = [event for event in pair.model.trace.take() if event.startswith("reduce ")]
    assert sorted(reductions) == ["reduce (root)", *(f"reduce blocks.{i}" for i in range(3))]
    assert set(users(pair.model)) == {0}


def critic(recomputed: bool) -> nn.Module:
    """[B, D] -> [B, 1], recomputed or not."""
    return nn.Sequential(*((Layer if recomputed else Block)() for _ in range(3)), nn.Linear(WIDTH, 1))


def penalised(model: Model, turn: Turn) -> Tensor:
    """A critic's loss with a penalty of its slope between real and false rows (WGAN-GP, Gulrajani et al. 2017)."""
    real, fake = rows(turn), rows(turn).flip(0).cos()
    share = torch.rand(3, 1, generator=turn.generator())
    between = (share * real + (1 - share) * fake).requires_grad_()
    (slope,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
    return model(fake).mean() - model(real).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()


@pytest.mark.parametrize("recomputed", [False, True], ids=["plain", "nonreentrant"])
@pytest.mark.ways((2, 3), (2, 2))
def test_gradient_penalty_with_create_graph(group: Any, recomputed: bool, stage: int) -> None:
    pair = trained(partial(critic, recomputed), penalised, group, stage=stage)
    assert set(users(pair.model)) == {0}
