"""Schedules of collectives: simulated, up to 64 ranks, and broken on purpose."""

from collections import Counter
from dataclasses import replace
from itertools import chain, combinations, pairwise
from random import Random

import pytest

from shardlite.comm.schedule import (
    ALGORITHMS,
    IN_RING_ORDER,
    Arrival,
    Departure,
    Program,
    Schedule,
    Transfer,
    all_gather,
    broadcast,
    formula,
    order_of_addition,
    reduce_scatter,
)
from shardlite.errors import LayoutError
from tests.support.simulated import MAKERS, Race, WrongError, add, by_steps, cases, every

# ---- what is documented, in other words -----------------------------------------------------------------------------


def documented_steps(algorithm, world_size, node):
    return {
        "ring": world_size - 1,
        "direct": min(1, world_size - 1),
        "bidirectional": -(-(world_size - 1) // 2),
        "hierarchical": (node - 1) + (world_size // node - 1),
    }[algorithm]


def documented_order(algorithm, world_size, node, k, part):
    """Return the order in which segment `k` is added."""

    def ranks(*numbers):
        return add([number % world_size for number in numbers])

    if algorithm in ("ring", "direct") or world_size == 1:
        return ranks(*range(k + 1, k + world_size + 1))
    half = world_size // 2
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


def documented_sends(operation, algorithm, world_size, node, r):
    """Return how often rank `r` sends each `(segment, part)`."""
    if operation == "reduce-scatter":
        parts = 2 if algorithm == "bidirectional" and world_size % 2 == 0 and world_size > 2 else 1
        return Counter((k, part) for k in range(world_size) if k != r for part in range(parts))
    if algorithm == "direct":
        return Counter({(r, 0): world_size - 1})
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
    """Everybody ends with everything, each sum holds each rank once, in the order and the steps that are documented."""
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


# ---- orders, programs, turns ----------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("world_size", [2, 3, 4, 7, 16])
def test_the_orders_that_are_the_rings(world_size):
    """At two ranks all are, up to the sides of one addition; beyond, those that say so and no others."""
    orders = {
        algorithm: [order_of_addition(reduce_scatter(algorithm, world_size), k) for k in range(world_size)]
        for algorithm in ALGORITHMS
        if algorithm != "hierarchical"  # which is a ring where all ranks are one node, and otherwise as its nodes are
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


def test_what_one_rank_of_a_ring_does():
    assert reduce_scatter("ring", 3).program(1) == Program(
        (Departure(0, 0, (2,)),), (Arrival(0, 2, 0, (0,), (2,)), Arrival(1, 1, 0, (0,), ()))
    )
    assert all_gather("ring", 3).program(1) == Program(
        (Departure(1, 0, (2,)),), (Arrival(0, 0, 0, (0,), (2,)), Arrival(1, 2, 0, (0,), ()))
    )


def test_what_one_rank_does_with_direct_links():
    assert reduce_scatter("direct", 4).program(2) == Program(
        tuple(Departure(k, 0, (k,)) for k in (1, 0, 3)), (Arrival(0, 2, 0, (3, 0, 1), ()),)
    )
    assert all_gather("direct", 4).program(2) == Program(
        (Departure(2, 0, (3, 0, 1)),), tuple(Arrival(0, k, 0, (k,), ()) for k in (1, 0, 3))
    )


def test_what_one_rank_does_between_nodes():
    """Node 0 is ranks 0 and 1: inside first, then across, and back."""
    assert reduce_scatter("hierarchical", 4, node=2).program(0) == Program(
        (Departure(3, 0, (1,)), Departure(1, 0, (1,))),
        (Arrival(0, 2, 0, (1,), (2,)), Arrival(0, 0, 0, (1,), ()), Arrival(1, 0, 0, (2,), ())),
    )
    assert all_gather("hierarchical", 4, node=2).program(0) == Program(
        (Departure(0, 0, (2, 1)),),
        (Arrival(0, 2, 0, (2,), (1,)), Arrival(1, 1, 0, (1,), ()), Arrival(1, 3, 0, (1,), ())),
    )


def test_schedules_and_programs_are_made_once():
    assert all_gather("ring", 5) is all_gather("ring", 5, node=1)
    assert reduce_scatter("hierarchical", 6, node=2) is reduce_scatter("hierarchical", 6, node=2)
    assert broadcast(4, 1) is broadcast(4, 1)
    assert all_gather("ring", 5).program(3) is all_gather("ring", 5).program(3)


@every(1, 2, 3, 4, 5, 6, 8, 12, 16)
def test_each_link_carries_pieces_in_the_order_in_which_they_are_taken(operation, algorithm, world_size, node):
    schedule = MAKERS[operation](algorithm, world_size, node=node)
    sent, taken = {}, {}
    for r in range(world_size):
        program = schedule.program(r)
        for each in (*program.departures, *program.arrivals):
            for target in each.targets:
                sent.setdefault((r, target), []).append((each.segment, each.part))
        for each in program.arrivals:
            for source in each.sources:
                taken.setdefault((source, r), []).append((each.segment, each.part))
    assert sent == taken


@every(2, 3, 4, 5, 6, 8, 12, 16)
def test_what_is_sent_in_a_turn_is_received_in_that_turn(operation, algorithm, world_size, node):
    """And in every turn of a step every rank sends one piece and receives one."""
    schedule = MAKERS[operation](algorithm, world_size, node=node)
    turns = [list(schedule.turns(r)) for r in range(world_size)]
    for at_once in zip(*turns, strict=True):
        steps, sent, received = (list(column) for column in zip(*at_once, strict=True))
        assert len(set(steps)) == 1
        assert {each.target: each for each in sent} == dict(enumerate(received))
    assert sum(len(step) for step in schedule.steps) == sum(map(len, turns))


# ---- each rank by itself, over links with few slots -----------------------------------------------------------------


def race(schedule, chunks, slots, *, blocking, turns, seed=0):
    """Return the sums or owners of all pieces of all ranks, each chunk of which must have got the same."""
    held = Race(schedule, chunks=chunks, slots=slots, blocking=blocking, turns=turns, seed=seed).run()
    for values in held:
        for segment, part, chunk in values:
            assert values[segment, part, chunk] == values[segment, part, 0]
    return [{place[:2]: value for place, value in values.items()} for values in held]


def same_end(schedule, held):
    """Return whether ranks end as they do in step: in a reduction with the same sums of their own, else with all."""
    own = [
        {piece: value for piece, value in each.items() if schedule.operation != "reduce-scatter" or piece[0] == r}
        for r, each in enumerate(held)
    ]
    return own == by_steps(schedule)


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("chunks", [1, 2, 5])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 6, 8])
def test_ranks_that_run_by_themselves(world_size, chunks, slots):
    """Sends that are queued, with ranks that take what comes; and ranks that take turns, with both kinds of sends."""
    schedules = [schedule for _, schedule in cases(world_size)]
    chains = [broadcast(world_size, k, parts=1 + k % 3) for k in range(world_size)]
    for seed, schedule in enumerate([*schedules, *chains]):
        assert same_end(schedule, race(schedule, chunks, slots, blocking=False, turns=False, seed=seed))
        assert same_end(schedule, race(schedule, chunks, slots, blocking=True, turns=True, seed=seed))
        assert same_end(schedule, race(schedule, chunks, slots, blocking=False, turns=True, seed=seed))


@pytest.mark.parametrize("world_size", [12, 16, 64])
def test_many_ranks_that_run_by_themselves(world_size):
    for param, schedule in cases(world_size):
        if param.values[-1] in (1, 8):
            assert same_end(schedule, race(schedule, 1, 1, blocking=False, turns=False))
            assert same_end(schedule, race(schedule, 1, 1, blocking=True, turns=True))


@every(2, 3, 4, 6)
def test_sends_that_block_out_of_turn_wait_in_a_circle(operation, algorithm, world_size, node):
    """All ranks begin with a send of two chunks to a rank with one slot that does the same."""
    schedule = MAKERS[operation](algorithm, world_size, node=node)
    with pytest.raises(WrongError, match="everybody waits"):
        race(schedule, 2, 1, blocking=True, turns=False)
    enough = 2 * max(Counter((each.source, each.target) for each in chain(*schedule.steps)).values())
    race(schedule, 2, enough, blocking=True, turns=False)


# ---- broken on purpose ----------------------------------------------------------------------------------------------


def flat(schedule):
    return [(t, i) for t, step in enumerate(schedule.steps) for i in range(len(step))]


def changed(schedule, changes):
    """Return the schedule with other transfers at some places `(step, index)`: a tuple of any number of them."""
    steps = [
        tuple(chain(*(changes.get((t, i), (each,)) for i, each in enumerate(step))))
        for t, step in enumerate(schedule.steps)
    ]
    return replace(schedule, steps=tuple(steps))


def noticed(schedule, original):
    """Return whether the steps, and two races, fail or end otherwise than those of the schedule that was changed."""
    found = []
    for simulate in (
        lambda: by_steps(schedule) == by_steps(original),
        lambda: same_end(original, race(schedule, 2, 1, blocking=False, turns=False)),
        lambda: same_end(original, race(schedule, 2, 1, blocking=True, turns=True)),
    ):
        try:
            found.append(not simulate())
        except WrongError:
            found.append(True)
    return found


BREAKABLE = [
    pytest.param(operation, algorithm, world_size, node, id=f"{operation}-{algorithm}-{world_size}-{node}")
    for operation in MAKERS
    for algorithm, world_size, node in [
        ("ring", 4, 1),
        ("direct", 4, 1),
        ("bidirectional", 4, 1),
        ("bidirectional", 5, 1),
        ("hierarchical", 6, 2),
        ("hierarchical", 6, 3),
    ]
]
breakable = pytest.mark.parametrize(("operation", "algorithm", "world_size", "node"), BREAKABLE)


@breakable
def test_a_transfer_that_is_missing_is_noticed(operation, algorithm, world_size, node):
    schedule = MAKERS[operation](algorithm, world_size, node=node)
    for place in flat(schedule):
        assert all(noticed(changed(schedule, {place: ()}), schedule))


@breakable
def test_a_transfer_that_happens_twice_is_noticed(operation, algorithm, world_size, node):
    schedule = MAKERS[operation](algorithm, world_size, node=node)
    for t, i in flat(schedule):
        each = schedule.steps[t][i]
        assert all(noticed(changed(schedule, {(t, i): (each, each)}), schedule))


@breakable
def test_a_transfer_to_another_rank_is_noticed(operation, algorithm, world_size, node):
    """Step by step; a race may by chance bring a part that takes another way in the same order."""
    schedule = MAKERS[operation](algorithm, world_size, node=node)
    for t, i in flat(schedule):
        each = schedule.steps[t][i]
        for target in set(range(world_size)) - {each.target}:
            assert noticed(changed(schedule, {(t, i): (replace(each, target=target),)}), schedule)[0]


@breakable
def test_a_transfer_of_another_segment_is_noticed(operation, algorithm, world_size, node):
    schedule = MAKERS[operation](algorithm, world_size, node=node)
    for t, i in flat(schedule):
        each = schedule.steps[t][i]
        for segment in set(range(world_size)) - {each.segment}:
            assert all(noticed(changed(schedule, {(t, i): (replace(each, segment=segment),)}), schedule))


@breakable
def test_transfers_that_change_places_are_noticed(operation, algorithm, world_size, node):
    """Two of one piece, of which the second sends what the first has brought."""
    schedule = MAKERS[operation](algorithm, world_size, node=node)
    swapped = 0
    for (t, i), (u, j) in combinations(flat(schedule), 2):
        first, second = schedule.steps[t][i], schedule.steps[u][j]
        one_piece = (first.segment, first.part) == (second.segment, second.part)
        if one_piece and first.target == second.source and t < u:
            swapped += 1
            assert all(noticed(changed(schedule, {(t, i): (second,), (u, j): (first,)}), schedule))
    assert swapped or len(schedule.steps) == 1


def test_another_order_of_sources_is_another_sum():
    """No data are lost then, only the promise about bits: the order is compared."""
    schedule = reduce_scatter("direct", 4)
    swapped = replace(schedule, steps=(schedule.steps[0][::-1],))
    by_steps(swapped)
    assert order_of_addition(schedule, 0) == (((1, 2), 3), 0)
    assert order_of_addition(swapped, 0) == (((3, 2), 1), 0)


def test_a_link_out_of_order_is_noticed():
    """Two pieces that travel together change places in one step only: their receiver passes them on in that order."""
    schedule = reduce_scatter("hierarchical", 6, node=3)
    places = [i for i, each in enumerate(schedule.steps[1]) if each.target == 0]
    first, second = (schedule.steps[1][i] for i in places)
    swapped = changed(schedule, {(1, places[0]): (second,), (1, places[1]): (first,)})
    by_steps(swapped)
    with pytest.raises(WrongError, match=r"rank 0 takes .* from 2 for "):
        race(swapped, 1, 1, blocking=False, turns=False)


def test_what_is_changed_while_it_waits_to_be_sent_is_noticed():
    """Rank 1 sends its part of segment 0 while rank 2's is added to it: with queued sends that may go wrong."""
    steps = ((Transfer(1, 0, 0, 0), Transfer(2, 1, 0, 0)), (Transfer(1, 0, 1, 0),))
    wrong = Schedule("reduce-scatter", "ring", 3, 1, steps)
    messages = set()
    for seed in range(20):
        with pytest.raises(WrongError) as found:
            race(wrong, 1, 1, blocking=False, turns=False, seed=seed)
        messages.add(str(found.value)[:28])
    assert "rank 1 changed (0, 0, 0) bef" in messages


# ---- wrong calls ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", MAKERS.values())
@pytest.mark.parametrize(
    ("algorithm", "world_size", "node", "message"),
    [
        ("tree", 4, 1, "no algorithm 'tree'; there are ring, bidirectional, direct, hierarchical"),
        ("ring", 0, 1, "ring: a world of 0 ranks; at least 1 is needed"),
        ("hierarchical", -2, 1, "hierarchical: a world of -2 ranks; at least 1 is needed"),
        ("ring", 4, 2, "ring: nodes of 2 ranks; only 'hierarchical' knows nodes"),
        ("hierarchical", 4, 3, "hierarchical: nodes of 3 ranks do not divide a world of 4"),
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
