"""The number of buckets at once: the root's and two more in the recorded order, more only if ranks diverge.

Where shards are stepped in the backward there is one.

Reductions are as slow as they can be: each starts when the host waits for it (or, where ranks diverge, for anything: a
reduction that was started needs nothing more of its host). So what is counted follows from the order, from no clock.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

from shardlite import AdamW, ShardLite
from shardlite.comm import streams
from shardlite.grads.bucket import Bucket, Memory, Spares
from shardlite.params.unit import Gradients
from tests.support.internals import reducer
from tests.support.models.residual import Chain
from tests.support.patience import seconds
from tests.support.twins.sharded import take_step

WIDTH = 16
BLOCKS = 6


class Block(nn.Module):
    """A residual block with two experts. A rank may skip all of it, or the second expert."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.skipped = False
        self.both = True
        self.between: Callable[[Tensor], Tensor] = lambda x: x

    def forward(self, x: Tensor) -> Tensor:
        if self.skipped:
            return x
        x = self.between(x)
        return torch.tanh(x + self.experts[0](x) + (self.experts[1](x) if self.both else 0))


@contextmanager
def reductions_that_wait(*, for_anything: bool = False) -> Iterator[None]:
    """Let each reduction begin when the host waits for it or for a later one, or `for_anything`."""
    submit, wait, wait_unless = streams.ThreadQueue.submit, streams.HostWork.wait, streams.HostWork.wait_unless
    gates: dict[int, threading.Event] = {}
    order: list[int] = []

    def gated(self: Any, operation: Callable[[], None], *others: Callable[[], None], **options: Any) -> Any:
        if getattr(operation, "func", None) is None or operation.func.__qualname__ != "ReduceQueue.reduce_unit":
            return submit(self, operation, *others, **options)
        gate = threading.Event()
        work = submit(self, lambda: (gate.wait(seconds(60)), operation())[1])
        gates[id(work)] = gate
        order.append(id(work))
        return work

    def open_up_to(work: Any) -> None:
        if for_anything or id(work) in gates:
            for each in order if for_anything else order[: order.index(id(work)) + 1]:
                gates[each].set()

    def asked(self: Any, meanwhile: Any = None) -> None:
        open_up_to(self)
        wait(self, meanwhile)

    def asked_unless(self: Any, obsolete: Callable[[], bool]) -> bool:
        open_up_to(self)
        return wait_unless(self, obsolete)

    streams.ThreadQueue.submit, streams.HostWork.wait, streams.HostWork.wait_unless = gated, asked, asked_unless
    try:
        yield
    finally:
        streams.ThreadQueue.submit, streams.HostWork.wait, streams.HostWork.wait_unless = submit, wait, wait_unless


@contextmanager
def counted(model: ShardLite) -> Iterator[list[int]]:
    """Note after each bucket that is filled beside the root's how many there are."""
    counts: list[int] = []
    fill = Bucket.fill

    def counting(self: Bucket) -> None:
        fill(self)
        buckets = reducer(model).buckets.values()
        if not self.unit.is_root:
            counts.append(sum(b.phase is not Gradients.EMPTY for b in buckets if not b.unit.is_root))

    Bucket.fill = counting
    try:
        yield counts
    finally:
        Bucket.fill = fill


def wrap(group: Any, **options: Any) -> ShardLite:
    torch.manual_seed(0)
    blocks = [Block() for _ in range(BLOCKS)]
    module = Chain(blocks, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1), end=torch.sum)  # the root is first and last
    return ShardLite(module, units=Block, group=group, **options)


RECIPES: dict[str, Callable[[ShardLite], tuple[Any, Any]]] = {
    "SGD": lambda model: (optim.SGD(model.parameters(), lr=0.1), nullcontext()),
    "in_backward": lambda model: (AdamW(model.parameters(), in_backward=True), nullcontext()),
    "no_sync(sharded=True)": lambda model: (optim.SGD(model.parameters(), lr=0.1), model.no_sync(sharded=True)),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.sample(2)
def test_so_many_buckets_exist_beside_the_roots_however_slow_reductions_are(group, stage, recipe):
    model = wrap(group, stage=stage)
    optimizer, first = RECIPES[recipe](model)
    passes = []
    with reductions_that_wait():
        for step in range(4):
            with counted(model) as counts, first if step == 0 else nullcontext():
                model(torch.ones(2, WIDTH)).backward()
            passes.append(counts)
            if step or recipe != "no_sync(sharded=True)":
                take_step(optimizer)
    assert passes == [[1, 1, 1, 1, 1, 1] if recipe == "in_backward" else [1, 2, 2, 2, 2, 2]] * 4


def test_what_is_accumulated_has_its_buckets_and_the_limit_is_back_afterwards(group: Any) -> None:
    model = wrap(group, stage=0)
    passes = []
    with reductions_that_wait():
        for step in range(4):
            with counted(model) as counts, model.no_sync() if step == 1 else nullcontext():
                model(torch.ones(2, WIDTH)).backward()
            passes.append(counts)
    assert passes == [[1, 2, 2, 2, 2, 2], [1, 2, 3, 4, 5, 6], [], [1, 2, 2, 2, 2, 2]]


def divergent_body(
    group: Any, stage: int, skipped: dict[int, tuple[int, ...]], recipe: str, diverges: tuple[int, ...]
) -> list[int]:
    """Run backwards in which ranks skip blocks; return the maximum number of buckets per backward."""
    model = wrap(group, stage=stage)
    optimizer, _ = RECIPES[recipe](model)
    most = []
    with reductions_that_wait(for_anything=True):
        for step in range(max(diverges) + 2):
            for i, block in enumerate(model.module.blocks):
                block.skipped = step in diverges and i in skipped.get(group.rank(), ())
            with counted(model) as counts:
                model(torch.ones(2, WIDTH)).backward()
            most.append(max(counts, default=0))
            take_step(optimizer)
    return most


@pytest.mark.parametrize("recipe", ["SGD", "in_backward"])
@pytest.mark.parametrize("skipped", [(4,), (5, 4), (5, 4, 3, 2), (1, 3, 5), (0, 1, 2, 3, 4, 5)], ids=str)
@pytest.mark.sample(2)
def test_more_buckets_are_there_only_in_the_backward_that_diverges(cluster, skipped, recipe):
    stage = 3 if len(skipped) < 4 else 1 if recipe == "SGD" else len(skipped) % 4
    first, second = cluster.run(divergent_body, 2, stage, {1: skipped}, recipe, (2,))
    for most in (first, second):
        assert [most[0], most[1], most[3]] == ([1, 1, 1] if recipe == "in_backward" else [2, 2, 2])
        assert most[2] <= max(2, max(skipped) + 1)  # what rank 1 skipped it reduces last, and others after it


class Together(torch.autograd.Function):
    """A collective of the program's own, in the forward and in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        dist.all_reduce(x.clone(), group=group)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        dist.all_reduce(grad.clone(), group=ctx.group)
        return grad, None


@pytest.mark.parametrize("stage", [2, 3])
def test_a_rank_that_the_program_waits_for_does_not_wait_for_buckets(group: Any, stage: int) -> None:
    """Rank 1 leaves out an expert of each block, so its units are complete at the end only; all communicate between."""
    model = wrap(group, stage=stage)
    most = []
    with reductions_that_wait(for_anything=True):
        for step in range(4):
            for block in model.module.blocks:
                block.both = step in (0, 3) or group.rank() == 0
                block.between = lambda x: Together.apply(x, group)
            with counted(model) as counts:
                model(torch.ones(2, WIDTH)).backward()
            most.append(max(counts))
    assert [most[0], most[3]] == [2, 2]
    assert most[1:3] == [BLOCKS, BLOCKS] if group.rank() else 2 < most[1] <= BLOCKS


def test_four_ranks_that_diverge_in_different_ways_wait_for_each_other_no_more_than_they_can(cluster):
    skipped = {0: (5,), 1: (4, 3), 2: (0, 1, 2, 3, 4, 5), 3: ()}
    for most in cluster.run(divergent_body, 4, 3, skipped, "SGD", (1, 3, 5)):
        assert most[::2] == [2, 2, 2, 2]


# ---- memory of small buckets ----------------------------------------------------------------------------------------


def after_steps(group: Any, stage: int) -> tuple[dict[str, Tensor], list[list[str]], int]:
    """Take steps with buckets that are dirty when they are filled.

    Return the weights, the blocks in each step whose bucket was allocated, and the bytes of buckets after the last one.
    """
    model, allocated = wrap(group, stage=stage), []
    optimizer, fill, allocate = optim.SGD(model.parameters(), lr=0.1), Bucket.fill, Bucket.allocate

    def allocating(self: Bucket, *given: Any) -> None:
        allocate(self, *given)
        allocated[-1] += [] if self.unit.is_root else [self.unit.name]

    def filling(self: Bucket) -> None:
        fill(self)
        if not self.unit.is_root:  # the root's bucket has gradients now
            for full in self.full:
                full.fill_(float("nan"))

    with mock.patch.object(Bucket, "fill", filling), mock.patch.object(Bucket, "allocate", allocating):
        for _ in range(3):
            allocated.append([])
            take_step(optimizer, model(torch.ones(2, WIDTH)))
    return model.full_state_dict(), allocated, model.memory()["gradient buckets"].now


@pytest.mark.parametrize("stage", [1, 3])
def test_equal_small_buckets_use_the_same_memory_in_a_backward(group, stage):
    weights, allocated, left = after_steps(group, stage)
    assert left == 0
    for blocks in allocated:
        # At stage 1 the memory becomes the gradient, so no other bucket may have it.
        assert len(blocks) == BLOCKS if stage == 1 else 1 <= len(blocks) <= 2
    with mock.patch.object(Spares, "take", return_value=None):
        expected, _, _ = after_steps(group, stage)
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)


def test_memory_of_a_bucket_is_kept_only_for_an_equal_one_and_while_nobody_views_it():
    full, spares, key = torch.zeros(64), Spares(), object()
    memory = Memory(key, [full], [full[:32]], [], [])
    memory.uses.extend(memory.uses_now())
    spares.keep(memory)
    assert spares.take(key) is memory
    assert spares.take(key) is None
    view = full[:8]
    spares.keep(memory)
    assert spares.take(key) is None
    del view
    spares.keep(memory)
    assert spares.take(object()) is None
    assert spares.take(key) is None, "memory of another kind of bucket was not freed"


@pytest.mark.parametrize("stage", [3, 2])
def test_a_gradient_that_a_hook_keeps_is_not_overwritten(group, stage):
    model, kept, copies = wrap(group, stage=stage), {}, {}

    def keep(param: Tensor, *, name: str) -> None:
        kept[name] = param.grad
        copies[name] = None if param.grad is None else param.grad.clone()

    for name, param in model.module.named_parameters():
        param.register_post_accumulate_grad_hook(partial(keep, name=name))
    for _ in range(2):
        model(torch.ones(2, WIDTH)).sum().backward()
    kept_ones = {name: grad for name, grad in kept.items() if copies[name] is not None}
    assert len(kept_ones) > BLOCKS
    for name, grad in kept_ones.items():
        assert torch.equal(grad, copies[name]), name
