"""The cost model: schedules take the time of the closed formulas, choices are those of the least time.

Closed formulas: Thakur, Rabenseifner, Gropp (2005) for ring and direct, `W` ranks, `M` bytes, and for a chain of `c`
chunks `(W-2+c) (a + M b / c)`.
"""

import pytest

from shardlite.comm import schedule
from shardlite.comm.cost_model import (
    LEAST_CHUNK,
    LINKS,
    LinkCost,
    best_algorithm,
    best_chunk,
    plan_of,
    time,
)
from shardlite.comm.schedule import ALGORITHMS, IN_RING_ORDER
from shardlite.errors import LayoutError

WORLDS = [2, 3, 4, 8, 64]
OPERATIONS = ["all-gather", "reduce-scatter"]
ALONE = LinkCost(alpha=20e-6, beta=0.5e-9, gamma=0.2e-9, overhead=7e-6, overlaps=False)
BESIDE = ALONE._replace(overlaps=True)
LATENCY = LinkCost(alpha=1.0, beta=0, gamma=0)
MIB = 1 << 20


def seconds(operation, algorithm, world_size, nbytes, link, chunk=None, node=1):
    return time(plan_of(operation, algorithm, world_size, node), nbytes, chunk or nbytes, link)


def moved(world_size, nbytes):
    return nbytes * (world_size - 1) / world_size


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_ring_takes_a_latency_and_a_message_per_step(operation, world_size):
    nbytes = 960 * world_size
    per_byte = ALONE.beta + (ALONE.gamma if operation == "reduce-scatter" else 0)
    expected = (world_size - 1) * (ALONE.alpha + ALONE.overhead) + moved(world_size, nbytes) * per_byte
    for link in (ALONE, BESIDE):
        assert seconds(operation, "ring", world_size, nbytes, link) == pytest.approx(expected)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_direct_takes_one_latency_and_all_messages(operation, world_size):
    nbytes = 960 * world_size
    per_byte = ALONE.beta + (ALONE.gamma if operation == "reduce-scatter" else 0)
    expected = ALONE.alpha + (world_size - 1) * ALONE.overhead + moved(world_size, nbytes) * per_byte
    assert seconds(operation, "direct", world_size, nbytes, ALONE) == pytest.approx(expected)


@pytest.mark.parametrize("world_size", WORLDS)
def test_direct_adds_while_it_receives_if_that_is_possible(world_size):
    """All messages, and after the last one its addition: or, if that is slower, the first and all additions."""
    nbytes = 960 * world_size
    for link in (BESIDE, BESIDE._replace(gamma=1e-6)):
        message, addition = link.overhead + 960 * link.beta, 960 * link.gamma
        slower, once = max(message, addition), min(message, addition)
        expected = link.alpha + (world_size - 1) * slower + once
        assert seconds("reduce-scatter", "direct", world_size, nbytes, link) == pytest.approx(expected)


@pytest.mark.parametrize("world_size", [2, 3, 4, 6, 7, 8, 12])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_step_is_a_latency(operation, world_size):
    """What the table of `schedule.py` says about steps."""
    expected = {"ring": world_size - 1, "direct": 1, "bidirectional": world_size // 2}
    for algorithm, steps in expected.items():
        assert seconds(operation, algorithm, world_size, 64 * world_size, LATENCY) == steps
    if world_size.bit_count() == 1:
        steps = world_size.bit_length() - 1
        assert seconds(operation, "halving", world_size, 64 * world_size, LATENCY) == steps
    for node in (g for g in range(1, world_size + 1) if world_size % g == 0):
        steps = node - 1 + world_size // node - 1
        assert seconds(operation, "hierarchical", world_size, 64 * world_size, LATENCY, node=node) == steps


@pytest.mark.parametrize("chunk", [1 << 10, 1 << 20])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_nothing_is_faster_than_its_bytes(operation, algorithm, chunk):
    for world_size in (2, 5, 8) if algorithm != "halving" else (2, 4, 8):
        nbytes = world_size << 15
        taken = seconds(operation, algorithm, world_size, nbytes, LinkCost(0, 1e-9, 0), chunk)
        assert taken >= moved(world_size, nbytes) * 1e-9 * (1 - 1e-9)
        if algorithm in IN_RING_ORDER:
            assert taken == pytest.approx(moved(world_size, nbytes) * 1e-9)


@pytest.mark.parametrize("world_size", [3, 8])
def test_chunks_of_a_ring_hide_additions_and_cost_messages(world_size):
    """Links are never idle then, and one addition is left at the end: of a chunk."""
    nbytes, chunks = world_size << 20, 16
    link = BESIDE._replace(alpha=1e-6)
    messages = (world_size - 1) * (chunks * link.overhead + MIB * link.beta)
    expected = link.alpha + messages + MIB // chunks * link.gamma
    assert seconds("reduce-scatter", "ring", world_size, nbytes, link, MIB // chunks) == pytest.approx(expected)


@pytest.mark.parametrize("world_size", [2, 3, 8, 16])
@pytest.mark.parametrize("chunks", [1, 2, 5, 32])
def test_a_chain_is_a_pipeline(world_size, chunks):
    link = LinkCost(alpha=0, beta=1e-9, gamma=0, overhead=30e-6)
    plan = schedule.broadcast(world_size, 0, parts=chunks)
    message = link.overhead + MIB * link.beta
    assert time(plan, chunks * MIB, chunks * MIB, link) == pytest.approx((world_size - 2 + chunks) * message)


@pytest.mark.parametrize("world_size", [3, 8, 16])
def test_the_best_chunk_of_a_chain_is_that_of_the_formula(world_size):
    """`c* = sqrt((W-2) M b / a)` minimises `(W-2+c) (a + M b / c)`; pieces are halved, so a factor 2 is near."""
    link = LinkCost(alpha=0, beta=1e-9, gamma=0, overhead=400e-6)
    nbytes = 64 * MIB
    best = ((world_size - 2) * nbytes * link.beta / link.overhead) ** 0.5
    found = nbytes / best_chunk(schedule.broadcast(world_size, 0), nbytes, link)
    assert best / 2 <= found <= best * 2


@pytest.mark.parametrize("algorithm", sorted(IN_RING_ORDER))
@pytest.mark.parametrize("link", [ALONE, BESIDE, BESIDE._replace(overhead=0)])
def test_no_other_chunk_is_much_better(algorithm, link):
    for operation in OPERATIONS:
        plan = plan_of(operation, algorithm, 4)
        chosen = best_chunk(plan, 16 * MIB, link)
        assert LEAST_CHUNK <= chosen <= 4 * MIB
        least = time(plan, 16 * MIB, chosen, link)
        for halvings in range(7):
            assert least <= 1.02 * time(plan, 16 * MIB, 4 * MIB >> halvings, link)


def test_pieces_are_cut_for_a_reason_only():
    ring = plan_of("reduce-scatter", "ring", 4)
    assert best_chunk(ring, 16 * MIB, ALONE) == 4 * MIB
    assert best_chunk(ring, 16 * MIB, BESIDE) < 4 * MIB
    assert best_chunk(ring, 2 * LEAST_CHUNK, BESIDE) == LEAST_CHUNK // 2
    assert best_chunk(ring, 0, BESIDE) == 1
    assert best_chunk(ring, 16 * MIB, ALONE, most=MIB) == MIB
    assert best_chunk(ring, 16 * MIB, ALONE, most=3 * MIB) == 2 * MIB
    assert best_chunk(ring, 16 * MIB, BESIDE, most=64 * MIB) == best_chunk(ring, 16 * MIB, BESIDE)
    assert best_chunk(plan_of("all-gather", "ring", 1), MIB, BESIDE) == MIB


def test_the_algorithm_with_the_least_time_is_chosen():
    fast = ALONE._replace(alpha=0, overhead=0)
    for nbytes in (4096, MIB, 64 * MIB):
        assert best_algorithm(nbytes, 8, ALONE) == "direct"
        assert best_algorithm(nbytes, 2, ALONE) == "ring", "they are the same then"
        assert best_algorithm(nbytes, 8, fast) == "ring", "they take the same time then"


def test_a_choice_has_the_order_of_the_ring():
    for link in (*LINKS.values(), LATENCY):
        for world_size in (1, 2, 4, 8, 200):
            assert best_algorithm(MIB, world_size, link) in IN_RING_ORDER


def test_wrong_worlds_are_refused():
    with pytest.raises(LayoutError, match="at least 1 is needed"):
        best_algorithm(MIB, 0, ALONE)
