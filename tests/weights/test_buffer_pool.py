"""Buffers for full weights: who views them, which are kept, and which unit has one when."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardlite.params import Buffer
from shardlite.weights.gather_order import GatherOrder
from shardlite.weights.policy import NO_ROOM, BufferPolicy, BufferPool, UnitSize


def test_own_views_are_made_once_and_are_no_escape():
    buffer, made = Buffer(torch.empty(64, dtype=torch.uint8)), []

    def halves(memory):
        made.append(memory)
        return [memory[:32], memory[32:]]

    kept = buffer.views("a unit", halves)
    assert buffer.views("a unit", halves) is kept
    assert buffer.views("another unit", halves) is not kept
    assert len(made) == 2
    assert not buffer.escaped()
    outside = kept[0].view(torch.float32)
    assert buffer.escaped()
    del outside
    assert not buffer.escaped()


def test_views_of_saved_weights_are_made_once_if_they_are_not_too_many():
    buffer = Buffer(torch.arange(4096, dtype=torch.float32).view(torch.uint8))
    place = torch.float32, torch.Size([2, 3]), (1, 2), 5
    assert buffer.kept_view(place) is None
    view = buffer.view(place)
    assert buffer.kept_view(place) is view
    assert view.tolist() == [[5, 7, 9], [6, 8, 10]]
    assert not buffer.escaped()
    for first in range(1000):
        assert buffer.view((torch.float32, torch.Size([1]), (1,), first)).item() == first
    assert buffer.kept_view((torch.float32, torch.Size([1]), (1,), 999)) is None
    assert not buffer.escaped()


class Mode(TorchDispatchMode):
    """A mode of the program."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("what", ["a mode", "a transform"])
def test_views_that_may_be_of_another_kind_are_not_kept(what):
    buffer = Buffer(torch.zeros(64, dtype=torch.uint8))

    def whole(memory):
        return [memory.view(torch.float32)]

    if what == "a mode":
        with Mode():
            inside = buffer.views("a unit", whole)
    else:
        inside = []
        torch.func.vmap(lambda x: inside.extend(buffer.views("a unit", whole)) or x)(torch.zeros(2))
    later = buffer.views("a unit", whole)
    assert later is not inside
    assert type(later[0]) is torch.Tensor
    assert buffer.views("a unit", whole) is later


def meta(nbytes, kept=False):
    """A buffer without memory."""
    return Buffer(torch.empty(nbytes, dtype=torch.uint8, device="meta"), kept=kept)


def pool_of(most):
    """A pool, and the sizes that it has allocated."""
    allocated = []

    def make(nbytes, kept):
        allocated.append(nbytes)
        return meta(nbytes, kept)

    return BufferPool(make, most), allocated


def test_an_owner_gets_the_buffer_that_it_had_last():
    pool, allocated = pool_of(2)
    first, second = pool.acquire("first", 64), pool.acquire("second", 64)
    pool.give_back(first)
    pool.give_back(second)
    assert pool.acquire("second", 64) is second
    assert pool.acquire("second", 64) is first  # it had the other one last, which is in use
    pool.give_back(second)
    assert pool.acquire("first", 64) is second
    assert allocated == [64, 64]


def test_a_new_owner_gets_the_smallest_that_is_large_enough():
    pool, allocated = pool_of(3)
    for buffer in [pool.acquire(size, size) for size in (96, 32, 64)]:
        pool.give_back(buffer)
    assert pool.acquire("new", 48).nbytes == 64
    assert pool.acquire("newer", 48).nbytes == 96
    assert allocated == [96, 32, 64]


def test_the_smallest_gives_way_to_a_larger_one():
    alive = weakref.WeakSet()

    def make(nbytes, kept):
        assert sum(each.nbytes for each in alive) + nbytes <= 64 + 128  # never all three
        alive.add(space := meta(nbytes, kept))
        return space

    pool = BufferPool(make, 2)
    for buffer in [pool.acquire(size, size) for size in (32, 64)]:
        pool.give_back(buffer)
    del buffer
    pool.give_back(pool.acquire("large", 128))
    assert pool.acquire(32, 32).nbytes == 64


def test_a_buffer_that_is_given_up_makes_place_for_another_one():
    pool, allocated = pool_of(1)
    buffer = pool.acquire("a unit", 64)
    del buffer  # not given back, because others view it
    assert pool.last("a unit") is None
    assert pool.acquire("a unit", 64).kept
    assert allocated == [64, 64]


# ---- the policy -----------------------------------------------------------------------------------------------------


def policy_of(*nbytes, prefetch=1, keeps=False, root=False):
    """A policy over units of these sizes, the first of which may be the root, and the order that it follows."""
    units = [UnitSize(size, root and i == 0, root and i == 0) for i, size in enumerate(nbytes)]
    order = GatherOrder()
    return BufferPolicy(units, order, meta, prefetch=prefetch, keeps=keeps), order


def use(policy, unit):
    """Use a unit, and return what is evicted for it, gathered for it or ahead, and evicted after it."""
    done = []

    def gather(unit, victim):
        if victim is not None:
            done.append(("evict", victim))
            policy.give_back(victim, policy.evict(victim))
        done.append(("gather", unit))
        policy.acquire(unit)

    if unit not in policy.buffers:
        gather(unit, policy.victim_for(unit))
    upcoming = policy.begin_use(unit)
    for ahead in upcoming:
        if ahead not in policy.buffers and (victim := policy.victim_for(ahead, upcoming)) != NO_ROOM:
            gather(ahead, victim)
    for victim in policy.end_use(unit, is_done=policy.is_done(unit)):
        done.append(("evict", victim))
        policy.give_back(victim, policy.evict(victim))
    return done


def test_a_unit_is_gathered_ahead_on_the_recorded_path():
    policy, order = policy_of(8, 8, 8)
    order.begin_pass("forward")
    assert [use(policy, unit) for unit in (0, 1, 2)] == [  # nothing is expected yet
        [("gather", 0)],
        [("gather", 1)],
        [("evict", 0), ("gather", 2)],
    ]
    order.begin_pass("forward")
    assert [use(policy, unit) for unit in (0, 1, 2)] == [
        [("evict", 1), ("gather", 0), ("evict", 2), ("gather", 1)],
        [("evict", 0), ("gather", 2)],
        [],
    ]


def test_the_last_use_before_a_step_frees_the_buffer():
    policy, order = policy_of(8, 8)
    for _ in range(2):
        order.begin_pass("backward", final=True)
        done = [use(policy, unit) for unit in (1, 0)]
        order.end_path()
    assert done[-1][-1] == ("evict", 0)
    assert not policy.buffers


def test_nothing_is_gathered_ahead_after_prefetching_stopped():
    policy, order = policy_of(8, 8, 8)
    for _ in range(2):
        order.begin_pass("forward")
        for victim in policy.stop_prefetching():
            policy.evict(victim)
        assert len(policy.buffers) <= 1
        gathered = [use(policy, unit) for unit in (0, 1, 2)]
    assert all([name for name, _ in done].count("gather") == 1 for done in gathered)
