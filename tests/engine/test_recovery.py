"""After an exception on all ranks the failed step leaves no trace: training continues with the twin's bits."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support.models.small import LanguageModel
from tests.support.models.trapped import AnyError, Trapped, loss_of
from tests.support.twins.sharded import WIDE, Pair, Turn, accumulating


def recovery_body(group, stage, error, backwards, places, mode="step"):
    """Train, fail in each place, and go on; `places` says which trap is armed on a rank, for each failure."""
    pair = Pair(Trapped, group, stage=stage)
    pair.step(loss_of)
    for place in places:
        trap = pair.model.module.traps[place[group.rank() % len(place)]]
        trap.error, trap.backwards = error, backwards
        with pytest.raises(type(error)), accumulating(pair.model, mode):
            loss_of(pair.model, Turn(0, pair.rank, 0)).backward()
        trap.error = None
        pair.model.zero_grad()
        pair.step(loss_of)
        pair.step(loss_of, clip=0.01)


ERRORS = {
    "exception": AnyError("on all ranks"),
    "out-of-memory": torch.OutOfMemoryError("no more memory"),
    "interrupt": KeyboardInterrupt(),
}
SAME_PLACE = [(0,), (2,)]
OTHER_PLACES = [(1, 3), (3, 0), (0, 2, 1, 3)]
"""Ctrl-C does not come at the same line everywhere."""


@pytest.mark.parametrize("world_size", [2, WIDE])
@pytest.mark.parametrize("backwards", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("error", ERRORS)
def test_the_next_step_is_as_if_nothing_had_been(cluster, error, backwards, world_size):
    cluster.check(recovery_body, world_size, 3, ERRORS[error], backwards, SAME_PLACE)


@pytest.mark.parametrize("error", ["exception", "interrupt"])
@pytest.mark.parametrize("backwards", [False, True], ids=["forward", "backward"])
@pytest.mark.stages(2, 3)
def test_ranks_may_fail_in_different_places(cluster, stage, backwards, error):
    cluster.check(recovery_body, 2, stage, ERRORS[error], backwards, OTHER_PLACES)


@pytest.mark.parametrize("stage", [2, 3])
def test_while_gradients_are_accumulated(cluster, stage):
    cluster.check(recovery_body, 2, stage, ERRORS["exception"], True, OTHER_PLACES, "local")


def load(model):
    model.load_full_state_dict(model.full_state_dict(rank=0))


def look(model):
    with model.gathered(writeback=False):
        pass


def loop(model):
    for _ in model.join([None]):
        pass


FIRST = {"full-state": lambda model: model.full_state_dict(), "load": load, "gathered": look, "join": loop}
"""What a program may do first after an exception."""


def first_thing_body(group, error, backwards, first):
    """Rank 0 fails early and calls something else, while rank 1 still waits for it."""
    pair = Pair(Trapped, group)
    pair.step(loss_of)
    trap = pair.model.module.traps[3 if (pair.rank == 0) == backwards else 0]
    trap.error, trap.backwards = error, backwards
    with pytest.raises(type(error)):
        loss_of(pair.model, Turn(0, pair.rank, 0)).backward()
    trap.error = None
    FIRST[first](pair.model)
    pair.step(loss_of)
    pair.step(loss_of)


@pytest.mark.parametrize(
    ("first", "backwards", "error"),
    [
        pytest.param(first, place % 2 == 1, error, marks=() if place in (i % 4, 3 - i % 4) else pytest.mark.slow)
        for i, first in enumerate(FIRST)
        for place, error in enumerate(["exception", "exception", "interrupt", "interrupt"])
    ],
    ids=lambda value: {False: "forward", True: "backward"}.get(value),
)
def test_whatever_comes_first_ends_what_was_left(cluster, first, backwards, error):
    cluster.check(first_thing_body, 2, ERRORS[error], backwards, first)


def test_hooks_of_the_user_may_raise(group):
    """A user's own hooks raise: before a block, after it, and when a gradient has come."""
    pair = Pair(Trapped, group)
    pair.step(loss_of)
    block = pair.model.module.blocks[1]

    def fail(*_: object) -> None:
        raise AnyError("in a hook")

    for register in (
        block.register_forward_pre_hook,
        block.register_forward_hook,
        block.register_full_backward_hook,
        block.up.weight.register_hook,
    ):
        hook = register(fail)
        with pytest.raises(AnyError):
            loss_of(pair.model, Turn(0, pair.rank, 0)).backward()
        hook.remove()
        pair.step(loss_of)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputation_may_raise(group, reentrant):
    """A recomputation fails, in the middle of a backward."""

    def make() -> nn.Module:
        return LanguageModel(reentrant=reentrant)

    def loss(model, turn: Turn) -> Tensor:
        tokens = torch.randint(37, (2, 6), generator=turn.generator())
        return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    pair = Pair(make, group)
    pair.step(loss)
    value = loss(pair.model, Turn(0, pair.rank, 0))
    attend = pair.model.module.blocks[1].attend
    pair.model.module.blocks[1].attend = None  # so that calling it fails
    with pytest.raises(TypeError):
        value.backward()
    pair.model.module.blocks[1].attend = attend
    pair.step(loss)
    pair.step(loss)
