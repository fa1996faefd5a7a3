"""Fits of the cost model to measured times find the link."""

import pytest

from bench.ring.fit import fit, predicted
from shardlite.comm.cost_model import LinkCost, plan_of, time
from shardlite.comm.schedule import IN_RING_ORDER

OPERATIONS = ["all-gather", "reduce-scatter"]
ALONE = LinkCost(alpha=20e-6, beta=0.5e-9, gamma=0.2e-9, overhead=7e-6, overlaps=False)
BESIDE = ALONE._replace(overlaps=True)
MIB = 1 << 20


def rows_of(link, worlds=(2, 4), chunk=MIB):
    """Times as the link would have them."""
    rows = [
        {"operation": operation, "algorithm": algorithm, "ranks": world_size, "nbytes": nbytes, "chunk_bytes": chunk}
        for operation in (*OPERATIONS, "all-reduce")
        for algorithm in IN_RING_ORDER
        for world_size in worlds
        for nbytes in (4096, 64 << 10, MIB, 16 * MIB)
    ]
    return [row | {"ms_p50": 1e3 * predicted(row, link)} for row in rows]


@pytest.mark.parametrize("link", [ALONE, BESIDE])
def test_a_fit_finds_the_link(link):
    found = fit(rows_of(link))
    assert found.overlaps == link.overlaps
    for name in ("alpha", "beta", "gamma", "overhead"):
        assert getattr(found, name) == pytest.approx(getattr(link, name), rel=1e-4)
    assert fit(rows_of(link), overlaps=link.overlaps) == found
    assert fit(rows_of(link), overlaps=not link.overlaps).overlaps != link.overlaps


def test_what_cannot_be_told_apart_is_one_number():
    """Two ranks send one message: its latency and its work always come together."""
    found = fit(rows_of(ALONE, worlds=(2,), chunk=64 * MIB))
    assert (found.alpha, found.overhead) == (pytest.approx(ALONE.alpha + ALONE.overhead, rel=1e-4), 0.0)


def test_a_fit_of_noisy_times_is_near_and_never_negative():
    factors = [0.8, 1.25, 1.0, 0.9, 1.1]
    rows = [row | {"ms_p50": row["ms_p50"] * factors[i % 5]} for i, row in enumerate(rows_of(ALONE))]
    found = fit(rows)
    assert min(found.alpha, found.beta, found.gamma, found.overhead) >= 0
    for row in rows_of(ALONE):
        assert predicted(row, found) == pytest.approx(row["ms_p50"] / 1e3, rel=0.25)


def test_a_fit_of_another_measure():
    rows = [row | {"cpu_ms_p50": row["ms_p50"] / 2} for row in rows_of(ALONE)]
    whole, half = fit(rows, overlaps=False), fit(rows, key="cpu_ms_p50", overlaps=False)
    assert half.beta == pytest.approx(whole.beta / 2)


def test_no_rows_no_link():
    with pytest.raises(ValueError, match="no rows"):
        fit([])


def test_an_all_reduce_is_a_sum_and_a_gather():
    row = {"operation": "all-reduce", "algorithm": "ring", "ranks": 4, "nbytes": MIB, "chunk_bytes": MIB}
    halves = [plan_of(operation, "ring", 4) for operation in OPERATIONS]
    assert predicted(row, ALONE) == sum(time(plan, MIB, MIB, ALONE) for plan in halves)
