"""The agenda of a pass: what all ranks gather, in one order. Integers only."""

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
    """Return an agenda after a first pass in which ranks wanted this."""
    agenda = GatherOrder()
    agenda.begin("forward")
    assert agenda.turn(ranks[0][0]) is None, "nothing is agreed on yet"
    agenda.extend("forward", ranks)
    agenda.begin("forward")
    return agenda


def test_a_rank_goes_down_its_copy():
    agenda = agreed([0, 1, 2, 3], [0, 3])
    assert agenda.coming() == 0
    assert agenda.turn(0) == []
    assert agenda.turn(2) == [1]  # it takes part in what it does not need
    assert agenda.turn(1) is None  # gone by
    assert agenda.coming() == 3
    assert agenda.rest() == [3]
    assert agenda.coming() is None


def test_a_unit_that_is_gathered_twice_has_two_turns():
    agenda = agreed([0, 1, 0])
    assert [agenda.turn(0), agenda.turn(0), agenda.turn(0)] == [[], [1], None]


def test_what_a_rank_wanted_is_what_was_gathered_and_used():
    agenda = agreed([0, 1, 2, 3])
    for unit in (0, 2):
        agenda.turn(unit)
        agenda.need(unit)
    agenda.turn(3)  # gathered ahead, and not needed
    agenda.add(7)
    agenda.need(7)
    agenda.need(5)  # it was there already
    assert agenda.wanted == [0, 2, 7]
    assert agenda.needed() == [1, 0, 1, 0]


def test_what_no_rank_has_needed_for_long_is_left_out():
    agenda = agreed([0, 1, 2])
    for number in range(1, MEMORY):
        agenda.turn(1)
        agenda.need(1)
        assert not agenda.is_due(), number
        agenda.begin("forward")
    assert agenda.is_due()
    agenda.shorten("forward", [agenda.needed(), [0, 0, 1]])
    assert agenda.items == [1, 2]
    assert agenda.needed() == [0, 0], "what comes now counts anew"


def test_kinds_of_passes_have_agendas_of_their_own():
    agenda = agreed([0, 1])
    agenda.begin("backward")
    assert agenda.items == []
    agenda.extend("backward", [[1, 0]])
    agenda.begin("forward")
    assert agenda.items == [0, 1]


def test_an_agenda_that_would_more_than_double_is_forgotten():
    agenda = agreed(list(range(6)))
    agenda.extend("forward", [[5, 4, 3, 2, 1, 0]])
    assert len(agenda.items) == 11
    agenda.begin("forward")
    agenda.extend("forward", [[8, 9]])
    assert agenda.items == [8, 9]


@pytest.mark.parametrize("seed", range(5))
def test_copies_stay_equal(seed):
    """Whatever each rank needs: all of them see the same lists."""
    draw = random.Random(seed)
    copies = [GatherOrder() for _ in range(3)]
    for _ in range(2 * MEMORY):
        lists = []
        for agenda in copies:
            agenda.begin("forward")
            for unit in draw.sample(range(6), 4):
                if agenda.turn(unit) is None:
                    agenda.rest()
                    agenda.add(unit)
                agenda.need(unit)
            agenda.rest()
            lists.append(agenda.wanted)
        for agenda in copies:
            agenda.extend("forward", lists)
        assert all(list(agenda.items) == list(copies[0].items) for agenda in copies)
        assert all(is_subsequence(list(wanted), list(copies[0].items)) for wanted in lists)
