"""The schedules of all algorithms, simulated in step for up to 64 ranks: bytes, steps and sums are as documented."""

from collections import Counter
from itertools import chain, pairwise
from random import Random

import pytest

from shardlite.comm.schedule import (
    ALGORITHMS,
    IN_RING_ORDER,
    all_gather,
    broadcast,
    formula,
    order_of_addition,
    reduce_scatter,
)
from shardlite.errors import LayoutError
from tests.support.simulated import MAKERS, add, by_steps, cases, every, nodes

# ---- what is documented, in other words -----------------------------------------------------------------------------


def documented_steps(algorithm, world_size, node):
    return {
        "ring": world_size - 1,
        "direct": min(1, world_size - 1),
        "bidirectional": -(-(world_size - 1) // 2),
        "hierarchical": (node - 1) + (world_size // node - 1),
        "halving": world_size.bit_length() - 1,
    }[algorithm]


def documented_order(algorithm, world_size, node, k, part):
    """Return the order in which segment `k` is added."""

    def ranks(*numbers):
        return add([number % world_size for number in numbers])

    if algorithm in ("ring", "direct") or world_size == 1:
        return ranks(*range(k + 1, k + world_size + 1))
    half = world_size // 2
    if algorithm == "halving":
        return balanced(k, world_size)
    if algorithm == "bidirectional" and world_size % 2:
        sides = [range(k - half, k), range(k + half, k, -1)]
        return add([*[ranks(*side) for side in sides], k])
    if algorithm == "bidirectional":
        longer = range(k - half, k) if part == 0 else range(k + half, k, -1)
        shorter = range(k + half - 1, k - 1, -1) if part == 0 else range(k - half + 1, k + 1)
        return add([ranks(*longer), ranks(*shorter)])
    own_node, place = divmod(k, node)
    count = world_size // node
    in_nodes = [
        add([a * node + (place + i) % node for i in range(1, node + 1)])
        for a in ((own_node + i) % count for i in range(1, count + 1))
    ]
    return add(in_nodes)


def balanced(k, count):
    """Return the balanced tree over `count` ranks, of which `k` is one: the branch with `k` comes last everywhere."""
    if count == 1:
        return k
    half = count // 2
    return (balanced(k ^ half, half), balanced(k, half))


def documented_sends(operation, algorithm, world_size, node, r):
    """Return how often rank `r` sends each `(segment, part)`."""
    if operation == "reduce-scatter":
        parts = 2 if algorithm == "bidirectional" and world_size % 2 == 0 and world_size > 2 else 1
        return Counter((k, part) for k in range(world_size) if k != r for part in range(parts))
    if algorithm == "direct":
        return Counter({(r, 0): world_size - 1})
    if algorithm == "halving":  # with each rank that differs in one digit: what came from ranks alike in lower ones
        digits = [1 << place for place in range(world_size.bit_length() - 1)]
        return Counter((k, 0) for digit in digits for k in range(r % (2 * digit), world_size, 2 * digit))
    if algorithm == "hierarchical":
        own_node, place = divmod(r, node)
        count = world_size // node
        across = [a * node + place for a in range(count) if a != (own_node + 1) % count]
        inside = [k for k in range(world_size) if k % node != (place + 1) % node]
        return Counter((k, 0) for k in chain(across, inside))
    if algorithm == "bidirectional":
        # What came from the left goes on to the right, and the other way round; the own segment goes both ways.
        half, less = world_size // 2, (world_size - 1) // 2
        right, left = [r - t for t in range(half)], [r + t for t in range(half)]
        pieces = [(k, 0) for k in right + left[:less]]
        pieces += [(k, 1) for k in right[:less] + left] if half != less and world_size > 2 else []
        return Counter((k % world_size, part) for k, part in pieces)
    return Counter((k, 0) for k in range(world_size) if k != (r + 1) % world_size)


# ---- all ranks in step ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "world_size",
    [pytest.param(n, marks=() if n <= 12 or n in (16, 33, 64) else pytest.mark.slow) for n in range(1, 65)],
)
def test_up_to_64_ranks(world_size):
    """Every rank ends with everything; each sum holds each rank once, in the documented order and number of steps."""
    for param, schedule in cases(world_size):
        operation, algorithm, _, node = param.values
        held = by_steps(schedule)
        assert len(schedule.steps) == documented_steps(algorithm, world_size, node)
        if operation == "reduce-scatter":
            for k in range(world_size):
                for part in range(schedule.parts):
                    assert held[k][k, part] == documented_order(algorithm, world_size, node, k, part)
        sent = Counter(each.source for each in chain(*schedule.steps))
        received = Counter(each.target for each in chain(*schedule.steps))
        share = schedule.parts * (world_size - 1)  # of `schedule.parts * world_size` pieces: (W-1)/W of the buffer
        assert all(sent[r] == received[r] == share for r in range(world_size))


@every(1, 2, 3, 4, 6, 8, 12)
def test_bytes_of_uneven_segments(operation, algorithm, world_size, node):
    schedule = MAKERS[operation](algorithm, world_size, node=node)
    lengths = [Random(k).choice([0, 2, 10, 64]) for k in range(world_size)]  # elements; even, so that halves are whole
    pieces = [(each.source, each.target, (each.segment, each.part)) for each in chain(*schedule.steps)]
    for r in range(world_size):
        sent = [piece for source, _, piece in pieces if source == r]
        received = [piece for _, target, piece in pieces if target == r]
        assert Counter(sent) == documented_sends(operation, algorithm, world_size, node, r)
        passing = sent if operation == "reduce-scatter" else received
        assert sum(lengths[k] // schedule.parts for k, _ in passing) == sum(lengths) - lengths[r]


@pytest.mark.parametrize("parts", [0, 1, 2, 5])
@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 64])
def test_a_broadcast_is_a_chain(world_size, parts):
    for source in {0, 1 % world_size, world_size - 1}:
        schedule = broadcast(world_size, source, parts=parts)
        assert by_steps(schedule) == [{(0, part): source for part in range(parts)}] * world_size
        assert len(schedule.steps) == (world_size - 2 + parts if world_size > 1 and parts else 0)
        links = {(each.source, each.target) for each in chain(*schedule.steps)}
        ranks = [(source + d) % world_size for d in range(world_size)]
        assert links == (set(pairwise(ranks)) if parts else set())


# ---- orders of addition, and what is made once ----------------------------------------------------------------------


@every(1, 2, 3, 4, 6, 8, 9)
def test_the_order_of_addition_is_told(operation, algorithm, world_size, node):
    schedule = MAKERS[operation](algorithm, world_size, node=node)
    for k in range(world_size):
        for part in range(schedule.parts):
            if operation == "reduce-scatter":
                assert order_of_addition(schedule, k, part) == documented_order(algorithm, world_size, node, k, part)
            else:
                with pytest.raises(LayoutError, match="all-gather: only a reduce-scatter has an order of addition"):
                    order_of_addition(schedule, k, part)


@pytest.mark.parametrize("world_size", [2, 4, 8, 64])
def test_halving_adds_the_same_tree_for_every_segment(world_size):
    """Up to the sides of additions, which change no bit: neighbours first, then pairs, and so on."""

    def unordered(order):
        return order if isinstance(order, int) else frozenset(map(unordered, order))

    tree = [*range(world_size)]
    while len(tree) > 1:
        tree = [frozenset(pair) for pair in zip(tree[::2], tree[1::2], strict=True)]
    schedule = reduce_scatter("halving", world_size)
    assert all([unordered(order_of_addition(schedule, k))] == tree for k in range(world_size))


@pytest.mark.parametrize("world_size", [2, 3, 4, 7, 16])
def test_the_orders_that_are_the_rings(world_size):
    """At two ranks all are, up to the sides of one addition; beyond, those that say so and no others."""
    orders = {
        algorithm: [order_of_addition(reduce_scatter(algorithm, world_size), k) for k in range(world_size)]
        for algorithm in ALGORITHMS
        if nodes(algorithm, world_size) == [1]  # hierarchical is a ring in one node, and otherwise as its nodes are
    }
    for algorithm, order in orders.items():
        assert (order == orders["ring"]) == (algorithm in IN_RING_ORDER or world_size == 2)
    assert {"ring", "direct"} == IN_RING_ORDER


@pytest.mark.parametrize(
    ("order", "text"),
    [
        (3, "3"),
        ((((1, 2), 3), 0), "1+2+3+0"),
        ((((4, 5), 3), ((1, 2), 0)), "4+5+3+(1+2+0)"),
        ((1, ((2, 3), (4, 0))), "1+(2+3+(4+0))"),
    ],
)
def test_an_order_as_text(order, text):
    assert formula(order) == text


def test_schedules_and_programs_are_made_once():
    assert all_gather("ring", 5) is all_gather("ring", 5, node=1)
    assert reduce_scatter("hierarchical", 6, node=2) is reduce_scatter("hierarchical", 6, node=2)
    assert broadcast(4, 1) is broadcast(4, 1)
    assert all_gather("ring", 5).program(3) is all_gather("ring", 5).program(3)


# ---- wrong calls ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", MAKERS.values())
@pytest.mark.parametrize(
    ("algorithm", "world_size", "node", "message"),
    [
        ("tree", 4, 1, "unknown algorithm 'tree'; choose one of ring, bidirectional, direct, hierarchical, halving"),
        ("ring", 0, 1, "ring: a world of 0 ranks; at least 1 is needed"),
        ("hierarchical", -2, 1, "hierarchical: a world of -2 ranks; at least 1 is needed"),
        ("ring", 4, 2, "ring: nodes of 2 ranks; only 'hierarchical' supports nodes"),
        ("hierarchical", 4, 3, "hierarchical: nodes of 3 ranks do not divide a world of 4"),
        ("halving", 6, 1, "halving: a world of 6 ranks; it must be a power of two"),
        ("hierarchical", 4, 0, "hierarchical: nodes of 0 ranks do not divide a world of 4"),
    ],
)
def test_what_cannot_be_scheduled_is_refused(make, algorithm, world_size, node, message):
    with pytest.raises(LayoutError, match=f"^(all-gather|reduce-scatter)(, |: ){message}$"):
        make(algorithm, world_size, node=node)


def test_ranks_that_are_not_there_are_refused():
    with pytest.raises(LayoutError, match="broadcast: no rank 3 in a world of 3"):
        broadcast(3, 3)
    with pytest.raises(LayoutError, match="broadcast: no rank 0 in a world of 0"):
        broadcast(0, 0)
    with pytest.raises(LayoutError, match="broadcast: a buffer cannot be cut into -1 parts"):
        broadcast(2, 0, parts=-1)
    with pytest.raises(LayoutError, match="all-gather: no rank -1 in a world of 2"):
        all_gather("ring", 2).program(-1)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_rank_among_thousands_writes_out_its_own_transfers_only(make, algorithm):
    schedule = make(algorithm, 4096)
    sent, received = (sum(len(each[way]) for each in schedule.steps_of(5)) for way in range(2))
    assert sent == received == 4095 * schedule.parts
    assert sum(len(each.sources) for each in schedule.program(5).arrivals) == received
    assert not schedule.steps._written
