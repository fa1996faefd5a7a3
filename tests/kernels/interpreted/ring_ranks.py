"""Ranks of a ring that are processes and meet in files that all of them map: what they run, and what must come out.

Bodies for `tests.cluster.Cluster`. A rank makes the inputs of all ranks for itself, so it can say what it should get.
"""

import time
import warnings
from contextlib import contextmanager

import torch
import torch.distributed as dist
from shardlite_kernels import (
    Peers,
    flag_numel,
    ring_all_gather,
    ring_all_gather_reference,
    ring_failure,
    ring_reduce_adamw,
    ring_reduce_adamw_reference,
    ring_reduce_scatter,
    ring_reduce_scatter_reference,
    slots_nbytes,
)
from triton._C.libtriton.ir import ATOMIC_OP
from triton.runtime.interpreter import InterpreterBuilder

from tests.kernels.adamw_cases import assert_same_state, mixed_table, random_state
from tests.kernels.bits import assert_same_bits, pairs

PLENTY = 1 << 20  # looks, which take minutes: a rank that hangs is found by the cluster
LATE = 0.2  # seconds
NUMEL = 40_000  # of a segment where it does not matter


def peers_of(folder, rank, world, *, programs=2, depth=2, slot_nbytes=1 << 16, limit=PLENTY):
    """The ring as `rank` sees it, in files of this folder, which are of zeros at first; and what keeps them mapped.

    That is the slots of all ranks, as int64, and their flags.
    """
    numels = {"slots": slots_nbytes(programs, depth, slot_nbytes) // 8, "flags": flag_numel(programs)}
    mapped = {
        name: [
            torch.from_file(str(folder / f"{name}{each}"), shared=True, size=numel, dtype=torch.int64)
            for each in range(world)
        ]
        for name, numel in numels.items()
    }
    peers = Peers(
        rank=rank,
        world_size=world,
        slots=torch.tensor([each.data_ptr() for each in mapped["slots"]]),
        flags=torch.tensor([each.data_ptr() for each in mapped["flags"]]),
        error=torch.zeros(1, dtype=torch.int64),
        programs=programs,
        depth=depth,
        slot_nbytes=slot_nbytes,
        limit=limit,
    )
    return peers, mapped


@contextmanager
def interpreted():
    """What a launch needs around it in the interpreter.

    Numpy warns where a GPU just makes an infinity or a NaN. And who looks at a flag again and again has to leave the
    processor to those it waits for, of which there are more than processors.
    """
    look = InterpreterBuilder.create_atomic_rmw

    def look_and_rest(self, operation, *given):
        if operation == ATOMIC_OP.ADD:
            time.sleep(0.0002)
        return look(self, operation, *given)

    InterpreterBuilder.create_atomic_rmw = look_and_rest
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(overflow|invalid value|divide by zero)", RuntimeWarning)
            yield
    finally:
        InterpreterBuilder.create_atomic_rmw = look


def parts(world, numel, dtype, seed):
    """`full` [W*S] of each rank: awkward numbers and random ones of many magnitudes."""
    return [pairs(world * numel, seed=1000 * seed + rank)[rank % 2].to(dtype) for rank in range(world)]


def scattered(peers, epoch, case):
    """One launch, against its reference."""
    numel, full, wire, out, divisor = case
    fulls = parts(peers.world_size, numel, full, seed=epoch)
    got, expected = torch.empty(2, numel, dtype=out)
    with interpreted():
        ring_reduce_scatter(got, fulls[peers.rank], peers, epoch=epoch, divisor=divisor, wire=wire)
    assert ring_failure(peers.error) is None, ring_failure(peers.error)
    ring_reduce_scatter_reference(expected, fulls, peers.rank, divisor=divisor, wire=wire)
    assert_same_bits(got, expected)


def gathered(peers, epoch, case):
    """One launch, against its reference."""
    numel, dtype, offset = case
    generator = torch.Generator().manual_seed(epoch)
    shards = [torch.randint(-100, 100, (numel,), generator=generator).to(dtype) for _ in range(peers.world_size)]
    expected = torch.empty(peers.world_size * numel, dtype=dtype)
    ring_all_gather_reference(expected, shards)
    got = torch.zeros(offset + len(expected) + 1, dtype=dtype)
    full = got[offset:-1]
    full[peers.rank * numel :][:numel] = shards[peers.rank]
    with interpreted():
        ring_all_gather(full, peers, epoch=epoch)
    assert ring_failure(peers.error) is None, ring_failure(peers.error)
    assert_same_bits(full, expected)
    assert not got[:offset].any()
    assert got[-1] == 0


def stepped(peers, epoch, case):
    """One launch, against its reference; the last rank has an infinity in each of its segments."""
    form, numel, full, wire, bad = case
    fulls = [
        torch.randn(peers.world_size * numel, generator=torch.Generator().manual_seed(100 * epoch + rank)).to(full)
        for rank in range(peers.world_size)
    ]
    if bad:
        fulls[-1][1::numel] = float("inf")
    table = mixed_table(numel, seed=epoch)
    mine, theirs = (random_state(form, numel, seed=epoch) for _ in range(2))
    my_bad, their_bad = torch.zeros(2, dtype=torch.int32)
    with interpreted():
        ring_reduce_adamw(mine, fulls[peers.rank], table, peers, epoch=epoch, divisor=3, wire=wire, bad=my_bad)
    assert ring_failure(peers.error) is None, ring_failure(peers.error)
    ring_reduce_adamw_reference(theirs, fulls, table, peers.rank, divisor=3, wire=wire, bad=their_bad)
    assert_same_state(mine, theirs)
    assert_same_bits(my_bad, their_bad)


def launches(group, folder, cases, late=(), **shape):
    """Launch after launch through the same slots, of any kind: `cases` are pairs of a name and what it takes.

    Rank `late[i]` comes late to launch `i`, and the others are then ahead of it.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    peers, mapped = peers_of(folder, rank, world, **shape)
    for epoch, (kind, case) in enumerate(cases, 1):
        if late and late[epoch % len(late)] % world == rank:
            time.sleep(LATE)
        {"scatter": scattered, "gather": gathered, "step": stepped}[kind](peers, 3 * epoch, case)
    dist.barrier(group)  # nobody unmaps what another one still writes to
    del mapped


def launches_without(group, folder, absent, programs):
    """What the error words say where rank `absent` does not come to the second launch, nor ever after; by launch."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    peers, mapped = peers_of(folder, rank, world, limit=1000, programs=programs)
    fulls = parts(world, NUMEL, torch.float32, seed=1)
    said = []
    for epoch in (1, 2, 3):
        dist.barrier(group)  # so that patience is spent on the absent rank alone
        if epoch == 1 or rank != absent:
            with interpreted():
                ring_reduce_scatter(torch.empty(NUMEL), fulls[rank], peers, epoch=epoch)
        said.append(ring_failure(peers.error))
    flags = mapped["flags"][rank].clone()
    dist.barrier(group)
    return said, int(flags.max() >> 32)
