"""Combinations of parameters: every two values together in some case, all the others in cases that are slow."""

from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def all_pairs(*factors: Iterable[Any]) -> list[Any]:
    """Return all combinations of values of `factors`, as `pytest.mark.parametrize` takes them.

    Those in which each value of one factor meets each of another one come first. The rest is marked `slow`. Two factors
    of 3 and 2 values still take 6 cases, but four of 2, 3, 2 and 3 values take 9 and not 36.

        @pytest.mark.parametrize(("form", "reduce", "dtype"), all_pairs(FORMS, [False, True], DTYPES))
    """
    left = list(product(*factors))
    uncovered = set().union(*map(_pairs, left))
    params = []
    while uncovered:
        best = max(left, key=lambda values: len(uncovered & _pairs(values)))  # the first of equals
        left.remove(best)
        uncovered -= _pairs(best)
        params.append(_param(best))
    return params + [_param(values, pytest.mark.slow) for values in left]


def _pairs(values: Sequence[Any]) -> set[Any]:
    """Which value of which factor meets which one of which other."""
    return set(combinations(enumerate(values), 2))


def _param(values: Sequence[Any], *marks: Any) -> Any:
    return pytest.param(*values, marks=marks, id="-".join(map(_id, values)))


def _id(value: Any) -> str:
    return "-".join(map(_id, value)) if isinstance(value, tuple) else str(value).removeprefix("torch.")
