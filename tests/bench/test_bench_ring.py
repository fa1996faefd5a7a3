"""The bench of collectives runs, its rows are complete, and a wrong result is not timed."""

import pytest
import torch

from bench.ring import cases as ring_systems
from bench.ring.cases import GLOO, OPERATIONS, System
from bench.ring.fit import fit, predicted
from bench.ring.run import main, measure, size_words, systems_on
from shardlite.comm import collectives
from shardlite.comm.transport.loans import SHORT
from shardlite.lab.table import differences, read_rows
from shardlite.plan import LINKS, LinkCost
from tests.support.ranks.scripts import run_command

SYSTEMS = systems_on(torch.device("cpu"), ["ring", "direct", "bidirectional"])
KEYS = set(
    """
    bench operation transport algorithm ranks threads nbytes chunk_bytes rounds ms_p20 ms_p50 ms_p80 cpu_ms_p50
    algbw_gbps busbw_gbps speedup cpu_speedup messages sent_bytes predicted_ms prediction_error goal reached load
    machine torch python date
    """.split()  # noqa: SIM905
)
FIT_KEYS = set(
    """
    bench key transport ranks threads alpha beta gamma overhead overlaps error_p50 error_max load
    machine torch python date
    """.split()  # noqa: SIM905
)


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_row_for_each_system_operation_and_size_and_for_each_link(cluster, world_size):
    rows = cluster.run(_measure, world_size)[0]
    times, links = rows[:-4], rows[-4:]
    assert [(row["operation"], row["transport"], row["algorithm"]) for row in times] == [
        (operation, system.transport, system.algorithm)
        for operation in OPERATIONS
        for _ in range(2)
        for system in SYSTEMS
    ]
    assert all(set(row) == KEYS for row in times)
    assert all(set(row) == FIT_KEYS for row in links)
    for row in times:
        moved = (world_size - 1) / world_size * (2 if row["operation"] == "all-reduce" else 1)
        assert row["nbytes"] % (4 * world_size) == 0
        assert row["busbw_gbps"] == pytest.approx(row["nbytes"] / row["ms_p50"] / 1e6 * moved, rel=1e-2)
        is_lent = row["transport"] == "shared_memory" and row["algorithm"] in ("ring", "direct")
        at_once = is_lent and row["operation"] == "all-reduce" and row["nbytes"] <= SHORT
        goes_out = world_size - 1 if at_once else moved
        assert row["sent_bytes"] == (None if row["transport"] == GLOO else goes_out * row["nbytes"])
        assert (row["messages"] is None) == (row["transport"] == GLOO)
        assert row["transport"] != GLOO or row["speedup"] == row["cpu_speedup"] == 1
        is_fitted = row["transport"] in LINKS and row["algorithm"] in ("ring", "direct")
        assert (row["predicted_ms"] is None) == (not is_fitted)
    for link in links:
        ours = [row for row in times if row["transport"] == link["transport"] and row["predicted_ms"]]
        fitted = LinkCost(**{key: link[key] for key in ("alpha", "beta", "gamma", "overhead", "overlaps")})
        assert fitted == fit(ours, key=link["key"], overlaps=LINKS[link["transport"]].overlaps)
        if link["key"] == "ms_p50":
            assert all(row["predicted_ms"] == pytest.approx(1e3 * predicted(row, fitted), rel=1e-3) for row in ours)


def _measure(group):
    return measure([100, 4096], SYSTEMS, 2, group)


@pytest.mark.parametrize("wrong", ["gathered", "order", "gloo", "one rank"])
def test_a_wrong_result_stops_the_bench_on_every_rank(cluster, wrong):
    failures = cluster.failures(_measure_wrong, 2 if wrong != "order" else 4, wrong)
    assert {kind for kind, _ in failures} == {"ResultError"}
    if wrong == "one rank":
        assert "wrong on another rank" in failures[0][1]
        assert "order of the ring" in failures[1][1]


def _measure_wrong(group, wrong):
    mine, gloos = System("p2p", "ring"), System(GLOO)
    with pytest.MonkeyPatch.context() as patch:
        if wrong == "gathered":
            patch.setattr(collectives, "all_gather", _after(collectives.all_gather, lambda full: full.neg_()))
        elif wrong == "order":  # a schedule that adds in another order, under the name of the ring
            real = ring_systems.connect
            patch.setattr(ring_systems, "connect", lambda *args, **route: _bidirectional(real(*args, **route)))
        elif wrong == "gloo":
            real_of_peer = ring_systems._of_peer
            patch.setattr(ring_systems, "_of_peer", lambda *args: _twice(real_of_peer(*args), args[2]))
        elif group.rank() == 1:
            nudge = torch.tensor(float("inf"))
            patch.setattr(
                collectives, "all_reduce", _after(collectives.all_reduce, lambda full: full[:1].nextafter_(nudge))
            )
        measure([4096], [gloos, mine], 1, group)


def _after(collective, spoil):
    def spoiled(full, *args, **kwargs):
        collective(full, *args, **kwargs)
        spoil(full)

    return spoiled


def _bidirectional(transport):
    transport.algorithm = "bidirectional"
    return transport


def _twice(call, shard):
    def spoiled():
        call()
        shard.mul_(1 + 1e-6)

    return spoiled


def assert_prints_what_it_writes(out, folder, ranks):
    rows = read_rows(folder.glob("ring-cpu.jsonl"))
    assert {row["ranks"] for row in rows} == ranks
    assert differences([row for row in rows if row["ranks"] == 2]) in out
    assert "goal 2: " in out


OPTIONS = ["--sizes", "4096", "--rounds", "1", "--out"]


def test_the_command_writes_rows(cluster, tmp_path):
    first, second = run_command(cluster, main, "--ranks", 2, *OPTIONS, tmp_path)
    assert first.status == second.status == 0
    assert second.out == ""
    assert_prints_what_it_writes(first.out, tmp_path, {2})


def test_a_world_of_one_is_refused(refusal):
    assert "one rank sends nothing" in refusal(main, ["--ranks", "2", "1"])


def test_sizes_in_words():
    assert [size_words(n) for n in (100, 4096, 3 << 20)] == ["100 B", "4 KiB", "3 MiB"]
