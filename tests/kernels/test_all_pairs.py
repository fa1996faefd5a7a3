"""`all_pairs`: what of a product of parameters is not slow."""

from itertools import combinations, product

from tests.kernels.all_pairs import all_pairs

FACTORS = ("whole", "split"), ("fp32", "bf16", "int8"), (False, True), (1, 3, 4)


def test_each_two_values_meet_in_a_case_that_is_not_slow():
    cases = all_pairs(*FACTORS)
    assert sorted(map(str, (case.values for case in cases))) == sorted(map(str, product(*FACTORS)))
    fast = [case.values for case in cases if not case.marks]
    assert len(fast) == 9
    for (i, one), (j, other) in combinations(enumerate(FACTORS), 2):
        assert {(values[i], values[j]) for values in fast} == set(product(one, other))
