"""Ranks of a ring: what they run, and what must come out.

In one process ranks take turns (`turns.py`). Processes, as a `Cluster` has them, meet in files that all of them map.
A rank knows the inputs of all ranks, so it can say what it should get.
"""

import time
import warnings
from contextlib import contextmanager
from functools import lru_cache

import torch
import torch.distributed as dist
from shardlite_kernels.device_ring import (
    ring_reduce_adamw,
    ring_reduce_adamw_reference,
    ring_reduce_scatter,
    ring_reduce_scatter_reference,
)
from shardlite_kernels.signals import FREED, Peers, flag_numel, ring_failure, slots_nbytes
from triton._C.libtriton.ir import ATOMIC_OP
from triton.runtime.interpreter import InterpreterBuilder

from tests.kernels.adamw_cases import assert_same_state, mixed_table, random_state
from tests.kernels.bits import assert_same_bits, pairs
from tests.kernels.interpreted.language import quicken
from tests.kernels.interpreted.turns import Turns

FEW = 100  # looks of a rank that takes turns: it looks in vain only where no other one can go on
PLENTY = 1 << 20  # looks of a process, which take minutes: one that hangs is found by the cluster
REST = 0.0005  # seconds between looks of a process
NUMEL = 40_000  # of a segment where it does not matter


def numbers(programs=2, depth=2, slot_nbytes=1 << 16, limit=FEW):
    """What `Peers` takes beside memory."""
    return {"programs": programs, "depth": depth, "slot_nbytes": slot_nbytes, "limit": limit}


def own_memory(world, given):
    """The slots of all ranks, as int64, and their flags."""
    return _memory(world, given, lambda name, numel: torch.zeros(numel, dtype=torch.int64))


def mapped_memory(folder, world, given):
    """The same in files of this folder, which are of zeros at first."""
    return _memory(
        world,
        given,
        lambda name, numel: torch.from_file(str(folder / name), shared=True, size=numel, dtype=torch.int64),
    )


def _memory(world, given, make):
    numels = {
        "slots": slots_nbytes(given["programs"], given["depth"], given["slot_nbytes"]) // 8,
        "flags": flag_numel(given["programs"]),
    }
    return [[make(f"{name}{rank}", numel) for rank in range(world)] for name, numel in numels.items()]


def peers_of(rank, memory, given):
    """The ring as `rank` sees it. `memory` has to be kept."""
    slots, flags = (torch.tensor([each.data_ptr() for each in tensors]) for tensors in memory)
    return Peers(
        rank=rank, world_size=len(slots), slots=slots, flags=flags, error=torch.zeros(1, dtype=torch.int64), **given
    )


@contextmanager
def interpreted():
    """What a launch needs around it in a process of a cluster.

    Numpy warns where a GPU just makes an infinity or a NaN. And who looks at a flag again and again has to leave the
    processor to those it waits for, of which there are more than processors.
    """
    look = InterpreterBuilder.create_atomic_rmw

    def look_and_rest(self, operation, *given):
        if operation == ATOMIC_OP.ADD:
            time.sleep(REST)
        return look(self, operation, *given)

    quicken()
    InterpreterBuilder.create_atomic_rmw = look_and_rest
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(overflow|invalid value|divide by zero)", RuntimeWarning)
            warnings.filterwarnings("ignore", "Conversion of an array", DeprecationWarning)  # Triton 3.6 on numpy 2.3
            yield
    finally:
        InterpreterBuilder.create_atomic_rmw = look


@lru_cache(maxsize=4)  # ranks that take turns share them, and are few launches apart
def parts(world, numel, dtype, seed):
    """`full` [W*S] of each rank: awkward numbers and random ones of many magnitudes."""
    return [pairs(world * numel, seed=1000 * seed + rank)[rank % 2].to(dtype) for rank in range(world)]


def scattered(peers, epoch, case):
    """One launch, against its reference."""
    numel, full, wire, out, divisor = case
    fulls = parts(peers.world_size, numel, full, seed=epoch)
    got, expected = torch.empty(2, numel, dtype=out)
    ring_reduce_scatter(got, fulls[peers.rank], peers, epoch=epoch, divisor=divisor, wire=wire)
    assert ring_failure(peers.error) is None, ring_failure(peers.error)
    ring_reduce_scatter_reference(expected, fulls, peers.rank, divisor=divisor, wire=wire)
    assert_same_bits(got, expected)


def scattered_or_stepped(peers, epoch, case):
    """A launch that steps, except on the last rank, which has the gradient written."""
    form, numel, full, wire = case
    if peers.rank == peers.world_size - 1:
        scattered(peers, epoch, (numel, full, wire, torch.float32, 3))
    else:
        stepped(peers, epoch, (form, numel, full, wire, False), parts(peers.world_size, numel, full, seed=epoch))


def stepped(peers, epoch, case, fulls=None):
    """One launch, against its reference; the last rank has an infinity in each of its segments."""
    form, numel, full, wire, bad = case
    fulls = fulls or [
        torch.randn(peers.world_size * numel, generator=torch.Generator().manual_seed(100 * epoch + rank)).to(full)
        for rank in range(peers.world_size)
    ]
    if bad:
        fulls[-1][1::numel] = float("inf")
    table = mixed_table(numel, seed=epoch)
    mine, theirs = (random_state(form, numel, seed=epoch) for _ in range(2))
    my_bad, their_bad = torch.zeros(2, dtype=torch.int32)
    ring_reduce_adamw(mine, fulls[peers.rank], table, peers, epoch=epoch, divisor=3, wire=wire, bad=my_bad)
    assert ring_failure(peers.error) is None, ring_failure(peers.error)
    ring_reduce_adamw_reference(theirs, fulls, table, peers.rank, divisor=3, wire=wire, bad=their_bad)
    assert_same_state(mine, theirs)
    assert_same_bits(my_bad, their_bad)


LAUNCH = {"scatter": scattered, "step": stepped, "either": scattered_or_stepped}


def launches(world, cases, late=(), seed=0, **shape):
    """Launch after launch through the same slots, of any kind: `cases` are pairs of a name and what it takes.

    Rank `late[i]` comes late to launch `i`: it begins once all others wait for it.
    """
    given = numbers(**shape)
    memory, turns = own_memory(world, given), Turns(world, seed)

    def body(rank):
        peers = peers_of(rank, memory, given)
        for epoch, (kind, case) in enumerate(cases, 1):
            turns.late(rank, bool(late) and late[epoch % len(late)] % world == rank)
            LAUNCH[kind](peers, 3 * epoch, case)

    turns.run(body)


def launches_without(world, absent, programs):
    """What error words say where rank `absent` does not come to the second launch, nor ever after; by rank and launch.

    And the last epoch that each rank was told of.
    """
    given = numbers(programs=programs)
    memory = own_memory(world, given)
    peers = [peers_of(rank, memory, given) for rank in range(world)]
    fulls = parts(world, NUMEL, torch.float32, seed=1)
    said = []
    for epoch in (1, 2, 3):

        def body(rank, epoch=epoch):
            if epoch == 1 or rank != absent:
                ring_reduce_scatter(torch.empty(NUMEL), fulls[rank], peers[rank], epoch=epoch)
            return ring_failure(peers[rank].error)

        said.append(Turns(world, epoch).run(body))
    return list(zip(*said, strict=True)), [int(flags.max() >> 32) for flags in memory[1]]


def launches_of_a_process(group, folder, cases, late):
    """`launches` as a body for `Cluster`. A rank that comes late waits until the rank after it has begun."""
    rank, world, given = dist.get_rank(group), dist.get_world_size(group), numbers(limit=PLENTY)
    memory = mapped_memory(folder, world, given)
    peers, freed = peers_of(rank, memory, given), memory[1][rank][FREED.value :]
    for epoch, (kind, case) in enumerate(cases, 1):
        while late[epoch % len(late)] % world == rank and freed[0] < 3 * epoch << 32:
            time.sleep(REST)
        with interpreted():
            LAUNCH[kind](peers, 3 * epoch, case)
    dist.barrier(group)  # no rank unmaps what another one still writes to
    del memory
