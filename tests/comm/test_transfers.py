"""Transfers of one rank: programs, ranks that run independently, and schedules broken on purpose."""

from dataclasses import replace
from itertools import chain

import pytest

from shardlite.comm.schedule import broadcast, order_of_addition, reduce_scatter
from tests.support.simulated import MAKERS, Race, WrongError, by_steps, cases, every

# ---- programs ---------------------------------------------------------------------------------------------


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


# ---- each rank by itself, over links with few slots -----------------------------------------------------------------


def race(schedule, chunks, slots, *, seed=0):
    """Return the sums or owners of all pieces of all ranks, each chunk of which must have got the same."""
    held = Race(schedule, chunks=chunks, slots=slots, seed=seed).run()
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
    schedules = [schedule for _, schedule in cases(world_size)]
    chains = [broadcast(world_size, k, parts=1 + k % 3) for k in range(world_size)]
    for seed, schedule in enumerate([*schedules, *chains]):
        assert same_end(schedule, race(schedule, chunks, slots, seed=seed))


@pytest.mark.parametrize("world_size", [12, 16, 64])
def test_many_ranks_that_run_by_themselves(world_size):
    for param, schedule in cases(world_size):
        if param.values[-1] in (1, 8):
            assert same_end(schedule, race(schedule, 1, 1))


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
    """Return whether the steps, and a race, fail or end otherwise than those of the schedule that was changed."""
    found = []
    for simulate in (
        lambda: by_steps(schedule) == by_steps(original),
        lambda: same_end(original, race(schedule, 2, 1)),
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
        race(swapped, 1, 1)
