"""Simulated schedules take the time of the closed formulas, and fits to measured times find the link.

Closed formulas: Thakur, Rabenseifner, Gropp (2005), and for a chain of `c` chunks `(W-2+c) (a + M b / c)`.
"""

import pytest

from bench.ring.fit import fit, plan_of, predicted, time
from shardlite.comm.schedule import IN_RING_ORDER
from shardlite.plan import LINKS, LinkCost, collective_seconds

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


def test_a_fit_of_noisy_times_is_near_and_never_negative():
    factors = [0.8, 1.25, 1.0, 0.9, 1.1]
    rows = [row | {"ms_p50": row["ms_p50"] * factors[i % 5]} for i, row in enumerate(rows_of(ALONE))]
    found = fit(rows)
    assert min(found.alpha, found.beta, found.gamma, found.overhead) >= 0
    for row in rows_of(ALONE):
        assert predicted(row, found) == pytest.approx(row["ms_p50"] / 1e3, rel=0.25)


def test_an_all_reduce_is_a_sum_and_a_gather():
    row = {"operation": "all-reduce", "algorithm": "ring", "ranks": 4, "nbytes": MIB, "chunk_bytes": MIB}
    halves = [plan_of(operation, "ring", 4) for operation in OPERATIONS]
    assert predicted(row, ALONE) == sum(time(plan, MIB, MIB, ALONE) for plan in halves)


@pytest.mark.parametrize("link", [ALONE, BESIDE, BESIDE._replace(gamma=1e-6), *LINKS.values()])
@pytest.mark.parametrize("algorithm", ["ring", "direct"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_formulas_are_the_times_of_simulated_schedules(operation, algorithm, link):
    for ranks in (1, 2, 3, 8, 17):
        nbytes = ranks * 10_000
        simulated = time(plan_of(operation, algorithm, ranks), nbytes, nbytes, link)
        assert collective_seconds(operation, algorithm, nbytes, ranks, link) == pytest.approx(simulated, rel=1e-9)


@pytest.mark.parametrize("world_size", [3, 8])
def test_chunks_of_a_ring_hide_additions_and_cost_messages(world_size):
    """Links are never idle then, and one addition is left at the end: of a chunk."""
    nbytes, chunks = world_size << 20, 16
    link = BESIDE._replace(alpha=1e-6)
    messages = (world_size - 1) * (chunks * link.overhead + MIB * link.beta)
    expected = link.alpha + messages + MIB // chunks * link.gamma
    simulated = time(plan_of("reduce-scatter", "ring", world_size), nbytes, MIB // chunks, link)
    assert simulated == pytest.approx(expected)
