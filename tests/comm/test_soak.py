"""Thousands of collectives over shared memory: any sizes, dtypes, cuts, algorithms and delays, two queues at once."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from random import Random
from typing import NamedTuple
from zlib import crc32

import pytest
import torch

from shardlite.comm import schedule
from shardlite.comm.chunking import segment_bounds
from shardlite.comm.collectives import broadcast
from shardlite.comm.operation import Operation
from shardlite.comm.transport.select import connect
from shardlite.comm.transport.shared_memory.mailbox import PLACES
from shardlite.comm.transport.shared_memory.rendezvous import rendezvous
from shardlite.config import Route
from tests.support.patience import seconds
from tests.support.transports.calls import all_gather, all_reduce, reduce_scatter
from tests.support.transports.delays import Delayed

RANKS = 3
QUEUES = 2
MOST = 30_000  # elements
CALLS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.uint8)


class Turn(NamedTuple):
    """One collective, drawn alike on every rank."""

    call: str
    numel: int
    dtype: torch.dtype
    cuts: list[int]
    algorithm: str
    node: int
    chunk_bytes: int
    source: int
    place: int
    """Where its numbers begin among all numbers."""


def turns(queue, count):
    random = Random(f"queue {queue}")
    for _ in range(count):
        numel = random.choice([0, 1, random.randrange(200), random.randrange(MOST)])
        inner = sorted(random.choices(range(numel + 1), k=RANKS - 1))
        even = [stop for _, stop in segment_bounds(numel, RANKS)][:-1]
        algorithm = random.choice([each for each in schedule.ALGORITHMS if each != "halving"])  # RANKS is 3
        yield Turn(
            call=random.choice(CALLS),
            numel=numel,
            dtype=random.choice(DTYPES),
            cuts=[0, *random.choice([inner, even]), numel],
            algorithm=algorithm,
            node=random.choice([1, RANKS]) if algorithm == "hierarchical" else 1,
            # Now and then far more messages than may be left unread.
            chunk_bytes=64 if random.random() < 0.03 else random.choice([4096, 1 << 16, 8 << 20]),
            source=random.randrange(RANKS),
            place=random.randrange(MOST),
        )


class Numbers:
    """What ranks put in, which any of them can tell of all."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self._all = torch.randn(RANKS, 2 * MOST, generator=generator, dtype=torch.float64) * 40

    def of(self, rank, turn):
        numbers = self._all[rank, turn.place : turn.place + turn.numel]
        return numbers.to(turn.dtype) if turn.dtype.is_floating_point else numbers.abs().to(turn.dtype)

    def sum(self, turn, segment):
        """The sum of a segment, in the order of the schedule, rounded after each addition."""
        plan = schedule.reduce_scatter(turn.algorithm, RANKS, node=turn.node)
        start, stop = turn.cuts[segment : segment + 2]
        ranks = [self.of(r, turn)[start:stop] for r in range(RANKS)]
        length = -(-(stop - start) // plan.parts)
        parts = [
            _in_order(
                schedule.order_of_addition(plan, segment, part), [r[part * length : (part + 1) * length] for r in ranks]
            )
            for part in range(plan.parts)
        ]
        return torch.cat(parts)


def _in_order(order, ranks):
    if isinstance(order, int):
        return ranks[order]
    first, second = (_in_order(each, ranks) for each in order)
    wide = torch.float32 if first.dtype.itemsize == 2 else first.dtype
    return (first.to(wide) + second.to(wide)).to(first.dtype)


def take(turn, number, queue, transport, numbers):
    """Do one collective; return what all ranks have then, or their part of it, and what that should be."""
    rank = transport.rank
    transport.algorithm, transport.node = turn.algorithm, turn.node
    given = {"operation": Operation(f"{turn.call} of queue {queue}", number), "chunk_bytes": turn.chunk_bytes}
    if turn.call == "broadcast":
        full = numbers.of(rank, turn).clone()
        broadcast(full, transport, source=turn.source, **given)
        return full, numbers.of(turn.source, turn)
    given["cuts"] = turn.cuts
    start, stop = turn.cuts[rank : rank + 2]
    segments = range(RANKS)
    full = numbers.of(rank, turn).clone()
    if number % 2:  # as the buffers of units, which are where they are sent from
        full = transport.empty(full.nbytes, torch.device("cpu")).view(turn.dtype).copy_(full)
    if turn.call == "all_gather":
        full[:start].zero_()
        full[stop:].zero_()
        all_gather(full, transport, **given)
        return full, torch.cat([numbers.of(r, turn)[slice(*turn.cuts[r : r + 2])] for r in segments])
    if turn.call == "all_reduce":
        all_reduce(full, transport, **given)
        return full, torch.cat([numbers.sum(turn, k) for k in segments])
    return reduce_scatter(full, transport, **given), numbers.sum(turn, rank)


def queue_body(queue, count, transport, numbers):
    """Take all turns of a queue; return how many those were and a checksum of what all ranks should share."""
    checksum = 0
    for number, turn in enumerate(turns(queue, count)):
        # Mostly none to speak of: one in a hundred may bring the ranks far apart.
        delayed = Delayed(transport, number, longest=3e-3 if number % 100 == queue else 2e-5)
        got, expected = take(turn, number, queue, delayed, numbers)
        assert torch.equal(got, expected), f"{turn} (operation {number} of queue {queue})"
        if turn.call != "reduce_scatter":
            checksum = crc32(got.view(torch.uint8).numpy().tobytes(), checksum)
    return number + 1, checksum


def soak_body(group, count):
    numbers = Numbers()
    transport = connect(
        group, torch.device("cpu"), timedelta(seconds=seconds(60)), route=Route(transport="shared_memory")
    )
    with ThreadPoolExecutor(QUEUES) as pool:
        queues = list(pool.map(lambda queue: queue_body(queue, count, transport, numbers), range(QUEUES)))
    group.barrier().wait()
    ranks = rendezvous(group).neighbours
    held = [len(each) for each in (ranks._expected, ranks._early, ranks._untaken)]
    held += [len(each._unannounced) for each in ranks._controls]
    ranks.heap.trim(keep=0)
    return queues, held, len(list(ranks.heap._cold)), max(ranks._sent)


@pytest.mark.parametrize("count", [150, pytest.param(5000, marks=pytest.mark.slow)])
def test_hundreds_of_collectives_in_two_queues(doomed, count, tmp_path):
    """`count` in each queue."""
    ended = doomed.run(soak_body, RANKS, count, directory=tmp_path, limit=seconds(900))
    assert [(each.kind, each.text, each.status) for each in ended] == [("", "", 0)] * RANKS
    queues = [each.result[0] for each in ended]
    assert [steps for steps, _ in queues[0]] == [count] * QUEUES
    assert queues[1:] == queues[:1] * (RANKS - 1), "the same bits on every rank"
    for each in ended:
        _, held, pieces, sent = each.result
        assert not any(held), "nothing is open or kept"
        assert pieces == 1, "the heap is one free block"
        assert sent > count * PLACES / 125, "places were used again and again"
