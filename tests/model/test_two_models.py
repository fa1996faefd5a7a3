"""Several wrapped models in one program (GANs, teacher and student), and a copy of one.

Each is beside a plain twin, and all have the twins' bits. A loss is a function of all models at once. For the twins it
is computed once per rank and pair, since a twin catches only its own gradients.
"""

import copy
import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from shardlite import EMA, AdamW, LayoutError, Precision, ShardLite
from tests.support.models.residual import net, square
from tests.support.models.small import MLP, VOCABULARY, LanguageModel, Residual
from tests.support.twins.plain import PaddedAdamW
from tests.support.twins.sharded import Pair, Turn, local_parts, same_bits, same_states, slow, take_step

Models = Mapping[str, Callable[..., Any]]
Loss = Callable[[Models, Turn], Tensor]

WAYS = pytest.mark.parametrize(("group", "stages"), [slow(4, (3, 3)), (2, (3, 1)), slow(2, (2, 0))], indirect=["group"])
"""World sizes, and the stages of the two models."""


class Program:
    """Some pairs, trained together."""

    def __init__(self, **pairs: Pair) -> None:
        self.pairs = pairs
        self.models: Models = {name: pair.model for name, pair in pairs.items()}
        self._twins: Models = {name: pair.twin for name, pair in pairs.items()}
        self._rank = next(iter(pairs.values())).rank

    def backward(self, step: int, loss: Loss, expected: Loss | None = None) -> None:
        """Run a loss backward, and for the twins the same one or another that must have the same value."""
        ours = loss(self.models, Turn(step, self._rank, 0))
        ours.backward()
        for pair in self.pairs.values():
            pair.twin.refresh()
        for pair in self.pairs.values():
            theirs = pair.twin.backward(lambda _, rank: self._run(expected or loss, Turn(step, rank, 0)))
            same_bits(f"step {step}: loss", ours.detach(), theirs[self._rank])
            for each in self.pairs.values():
                each.twin.module.zero_grad()

    def _run(self, loss: Loss, turn: Turn) -> Tensor:
        value = loss(self._twins, turn)
        value.backward()
        return value.detach()

    def step(self, step: int, name: str, loss: Loss, expected: Loss | None = None) -> None:
        """Train one of the models; gradients that the others got are compared, and dropped."""
        self.backward(step, loss, expected)
        self.pairs[name].finish()
        for each in self.pairs.values():
            each._compare("gradient", lambda tensor: tensor.grad)
            each.model.zero_grad()
            each.twin.zero_grad()

    @contextmanager
    def frozen(self, name: str) -> Iterator[None]:
        """Freeze a model inside."""
        pair = self.pairs[name]
        for module in (pair.model, pair.twin.module):
            module.requires_grad_(False)
        yield
        for module in (pair.model, pair.twin.module):
            module.requires_grad_(True)


# ---- generator and discriminator ------------------------------------------------------------------------------------


def generator() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 20), Residual(20, 33), Residual(20, 33), nn.Linear(20, 7))


def discriminator() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 20), Residual(20, 30), nn.Tanh(), Residual(20, 30), nn.Linear(20, 1))


def noise(turn: Turn) -> Tensor:
    return torch.randn(4, 5, generator=turn.generator())


def judge(models: Models, turn: Turn, fake: Tensor) -> Tensor:
    """The discriminator's loss, with a penalty on its slope at real samples (Mescheder et al. 2018)."""
    real = torch.randn(4, 7, generator=turn.generator()).requires_grad_()
    score = models["judge"](real)
    (slope,) = torch.autograd.grad(score.sum(), real, create_graph=True)
    losses = functional.softplus(-score).mean() + functional.softplus(models["judge"](fake)).mean()
    return losses + slope.square().sum(1).mean()


def judge_alone(models: Models, turn: Turn) -> Tensor:
    with torch.no_grad():
        fake = models["maker"](noise(turn))
    return judge(models, turn, fake)


def make(models: Models, turn: Turn) -> Tensor:
    """The generator's loss goes through the discriminator."""
    return functional.softplus(-models["judge"](models["maker"](noise(turn)))).mean()


@WAYS
@pytest.mark.parametrize("frozen", [False, True])
def test_generator_and_discriminator(group, stages, frozen):
    program = Program(maker=Pair(generator, group, stage=stages[0]), judge=Pair(discriminator, group, stage=stages[1]))
    for step in range(3):
        program.step(step, "judge", judge_alone)
        if frozen:
            with program.frozen("judge"):
                program.step(step, "maker", make)
        else:
            program.step(step, "maker", make)


@WAYS
def test_one_forward_of_the_generator_for_both_losses(group, stages):
    """The generator runs once for both losses; the discriminator steps between its forward and its backward."""
    program = Program(maker=Pair(generator, group, stage=stages[0]), judge=Pair(discriminator, group, stage=stages[1]))
    for step in range(3):
        fake = program.models["maker"](noise(Turn(step, program._rank, 0)))
        program.step(step, "judge", lambda models, turn, fake=fake: judge(models, turn, fake.detach()), judge_alone)
        loss = lambda models, _, fake=fake: functional.softplus(-models["judge"](fake)).mean()  # noqa: E731
        program.step(step, "maker", loss, make)


@WAYS
def test_two_models_with_one_loss_and_one_optimizer(group, stages):
    """Both models are trained by one loss and one optimizer."""
    program = Program(maker=Pair(generator, group, stage=stages[0]), judge=Pair(discriminator, group, stage=stages[1]))
    ours = AdamW(chain(*(pair.model.parameters() for pair in program.pairs.values())), lr=0.02)
    theirs = PaddedAdamW(list(chain(*(pair.twin.masters.values() for pair in program.pairs.values()))), lr=0.02)
    for step in range(3):
        program.backward(step, make)
        for optimizer in (ours, theirs):
            take_step(optimizer)
        for pair in program.pairs.values():
            pair._compare("weight", lambda tensor: tensor.detach())


# ---- teacher and student --------------------------------------------------------------------------------------------


def distil(models: Models, turn: Turn) -> Tensor:
    """Return the loss of the student on the teacher's logits."""
    tokens = torch.randint(0, VOCABULARY, (2, 6), generator=turn.generator())
    with torch.no_grad():
        target = models["teacher"](tokens).float().softmax(-1)
    return functional.cross_entropy(models["student"](tokens).flatten(0, 1), target.flatten(0, 1))


def frozen_teacher() -> nn.Module:
    return LanguageModel(blocks=3, tied=False).requires_grad_(False).bfloat16()


@WAYS
def test_student_of_a_frozen_teacher(group, stages):
    """A teacher that is frozen when it is wrapped stays in the dtype that it has, and takes no gradients."""
    precision = Precision(output=torch.float32)
    teacher = Pair(frozen_teacher, group, stage=stages[0], precision=precision)
    student = Pair(partial(LanguageModel, blocks=1), group, stage=stages[1])
    program = Program(teacher=teacher, student=student)
    assert {shard.dtype for shard in teacher.model.parameters()} == {torch.bfloat16}
    for step in range(3):
        program.step(step, "student", distil)
    assert "gradients" not in teacher.model.memory()
    assert all(not sent.keys() & {"reduce"} for sent in teacher.model.traffic().values())


@WAYS
def test_teacher_that_is_the_average_of_its_student(group, stages):
    """The teacher is the average of the student: as a second model whose shards are averaged by hand, or by `EMA`."""
    make = partial(LanguageModel, blocks=2)
    program = Program(teacher=Pair(make, group, stage=stages[0]), student=Pair(make, group, stage=stages[0]))
    teacher, student = program.pairs.values()
    average = EMA(student.model, 0.7)
    for module in (teacher.model, teacher.twin.module):
        module.requires_grad_(False)

    def by_swapping(models: Models, turn: Turn) -> Tensor:
        tokens = torch.randint(0, VOCABULARY, (2, 6), generator=turn.generator())
        with torch.no_grad(), average.swapped():
            target = models["student"](tokens).softmax(-1)
        return functional.cross_entropy(models["student"](tokens).flatten(0, 1), target.flatten(0, 1))

    for step in range(4):
        program.step(step, "student", by_swapping if step % 2 else distil, distil)
        average.update()
        with torch.no_grad():
            torch._foreach_lerp_(list(teacher.model.parameters()), list(student.model.parameters()), 1 - 0.7)
            torch._foreach_lerp_(list(teacher.twin.masters.values()), list(student.twin.masters.values()), 1 - 0.7)
    expected = local_parts(teacher.model, teacher.twin.masters)
    same_states("averages", average.state_dict()["averages"], expected)
    same_states("teacher", dict(teacher.model.named_parameters()), expected)


# ---- frozen models, and copies --------------------------------------------------------------------------------------


@pytest.mark.ranks(1, 2)
def test_a_model_that_was_frozen_can_be_unfrozen(group):
    """A model that was frozen when it was wrapped trains like any other once it is not."""
    for stage in (0, 1, 2, 3):
        pair = Pair(lambda: MLP((6, 9, 9, 3)).requires_grad_(False), group, stage=stage)
        loss = lambda model, turn: model(torch.randn(4, 6, generator=turn.generator())).square().mean()  # noqa: E731
        x = torch.ones(1, 6, requires_grad=True)
        pair.model(x).sum().backward()
        assert x.grad is not None
        for module in (pair.model, pair.twin.module):
            module.requires_grad_(True)
        for _ in range(2):
            pair.step(loss)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_copy_is_a_second_instance(group, stage):
    """What the error says is done, to the letter; then both have the same bits, and go their own ways."""
    model = ShardLite(net(), group=group, stage=stage)
    optimizer = AdamW(model.parameters(), lr=0.1)
    square(model).backward()
    optimizer.step()
    names: dict[str, Any] = {"ShardLite": partial(ShardLite, group=group, stage=stage), "make_model": net}
    for attempt in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(LayoutError, match="cannot be copied or pickled") as error:
            attempt(model)
    exec(re.search("`(twin = .*)`", str(error.value))[1], names | {"model": model}, names)
    twin = names["twin"]
    for (name, ours), theirs in zip(twin.named_parameters(), model.parameters(), strict=True):
        same_bits(name, ours.detach(), theirs.detach())
    same_bits("output", square(twin).detach(), square(model).detach())
    square(twin).backward()
    AdamW(twin.parameters(), lr=0.1).step()
    assert not torch.equal(square(twin), square(model))
