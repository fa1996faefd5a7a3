"""The gather order of a pass: what all ranks gather, in one order. Integers only."""

import random

import pytest

from shardlite.weights.gather_order import MEMORY, GatherOrder, merged


def is_subsequence(short: list[int], long: list[int]) -> bool:
    rest = iter(long)
    return all(item in rest for item in short)


def test_merging_keeps_both_orders():
    draw = random.Random(0)
    for _ in range(200):
        first, second = ([draw.randrange(6) for _ in range(draw.randrange(9))] for _ in range(2))
        both = list(merged(first, second))
        assert is_subsequence(first, both)
        assert is_subsequence(second, both)
        assert len(both) <= len(first) + len(second)


def test_merging_equal_or_shorter_sequences_adds_nothing():
    assert merged([1, 2, 3], [1, 2, 3]) == [1, 2, 3]
    assert merged([1, 2, 3, 4], [1, 3]) == [1, 2, 3, 4]
    assert merged([1, 3], [1, 2, 3, 4]) == [1, 2, 3, 4]
    assert merged([0, 1, 4], [0, 2, 4]) == [0, 1, 2, 4]


def agreed(*ranks: list[int]) -> GatherOrder:
    """Return an order after a first pass in which ranks wanted this."""
    order = GatherOrder()
    order.begin_pass("forward")
    assert order.turn(ranks[0][0]) is None, "nothing is agreed on yet"
    order.extend("forward", ranks)
    order.begin_pass("forward")
    return order


def test_a_rank_goes_down_its_copy():
    order = agreed([0, 1, 2, 3], [0, 3])
    assert order.next_gather() == 0
    assert order.turn(0) == []
    assert order.turn(2) == [1]  # it takes part in what it does not need
    assert order.turn(1) is None  # gone by
    assert order.next_gather() == 3
    assert order.rest() == [3]
    assert order.next_gather() is None


def test_a_unit_that_is_gathered_twice_has_two_turns():
    order = agreed([0, 1, 0])
    assert [order.turn(0), order.turn(0), order.turn(0)] == [[], [1], None]


def test_what_a_rank_wanted_is_what_was_gathered_and_used():
    order = agreed([0, 1, 2, 3])
    for unit in (0, 2):
        order.turn(unit)
        order.use(unit)
    order.turn(3)  # gathered ahead, and not needed
    order.append(7)
    order.use(7)
    order.use(5)  # it was there already
    assert order.wanted == [0, 2, 7]
    assert order.needed() == [1, 0, 1, 0]


def test_what_no_rank_has_needed_for_long_is_left_out():
    order = agreed([0, 1, 2])
    for number in range(1, MEMORY):
        order.turn(1)
        order.use(1)
        assert not order.is_due(), number
        order.begin_pass("forward")
    assert order.is_due()
    order.shorten("forward", [order.needed(), [0, 0, 1]])
    assert order._now.gathers == [1, 2]
    assert order.needed() == [0, 0], "what comes now counts anew"


def test_kinds_of_passes_have_orders_of_their_own():
    order = agreed([0, 1])
    order.begin_pass("backward")
    assert order._now.gathers == []
    order.extend("backward", [[1, 0]])
    order.begin_pass("forward")
    assert order._now.gathers == [0, 1]


def test_an_order_that_would_more_than_double_is_forgotten():
    order = agreed(list(range(6)))
    order.extend("forward", [[5, 4, 3, 2, 1, 0]])
    assert len(order._now.gathers) == 11
    order.begin_pass("forward")
    order.extend("forward", [[8, 9]])
    assert order._now.gathers == [8, 9]


@pytest.mark.parametrize("seed", range(5))
def test_copies_stay_equal(seed):
    """Whatever each rank needs: all of them see the same lists."""
    draw = random.Random(seed)
    copies = [GatherOrder() for _ in range(3)]
    for _ in range(2 * MEMORY):
        lists = []
        for order in copies:
            order.begin_pass("forward")
            for unit in draw.sample(range(6), 4):
                if order.turn(unit) is None:
                    order.rest()
                    order.append(unit)
                order.use(unit)
            order.rest()
            lists.append(order.wanted)
        for order in copies:
            order.extend("forward", lists)
        assert all(list(order._now.gathers) == list(copies[0]._now.gathers) for order in copies)
        assert all(is_subsequence(list(wanted), list(copies[0]._now.gathers)) for wanted in lists)


def test_order_predicts_only_on_the_recorded_path():
    order = GatherOrder()
    order.begin_pass("forward")
    assert order.upcoming(1) == []
    for unit in (0, 1, 2):
        order.use(unit)
    order.begin_pass("backward")
    order.use(2)
    order.begin_pass("forward")
    order.use(0)
    assert order.upcoming(2) == [1, 2]
    order.use(2)  # leaves the path
    assert order.upcoming(2) == []
    order.begin_pass("forward")  # one pass that left it is forgotten
    order.use(0)
    assert order.upcoming(2) == [1, 2]
    order.use(1)  # it is shorter
    order.begin_pass("forward")  # after two in a row the last one is expected
    order.use(0)
    assert order.upcoming(2) == [1]
    order.end_path()
    order.use(1)  # outside of any pass
    assert order.upcoming(1) == []


def test_a_pass_that_is_not_expected_to_repeat_has_no_path():
    order = GatherOrder()
    for _ in range(2):
        order.begin_pass("gathered()", repeats=False)
        for unit in (0, 1):
            order.use(unit)
            assert order.upcoming(2) == []
