"""Reductions in two levels over collectives: order, bytes, memory, training, and selection.

Legend: `W` ranks in `N` nodes of `L`.
"""

from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch
from weakref import WeakKeyDictionary

import pytest
import torch
import torch.distributed as dist

from shardlite import LayoutError
from shardlite.comm.chunking import cut_up
from shardlite.comm.collectives import all_gather, all_reduce, staging_numel
from shardlite.comm.operation import Operation
from shardlite.comm.schedule import formula, order_of_addition
from shardlite.comm.schedule import reduce_scatter as schedule_of
from shardlite.comm.traffic import Tally
from shardlite.comm.transport import select
from shardlite.comm.transport.gloo import GlooTransport
from shardlite.comm.transport.group_collectives import GroupCollectives
from shardlite.comm.transport.messages import Message
from shardlite.comm.transport.select import connect
from shardlite.comm.transport.shared_memory import rendezvous
from shardlite.comm.transport.two_level import TwoLevelCollectives
from shardlite.config import Route
from tests.support.logs import logged
from tests.support.models.losses import MODELS, on_rows
from tests.support.models.small import MLP
from tests.support.patience import seconds
from tests.support.ranks.cluster import run_local
from tests.support.transports.calls import reduce_scatter
from tests.support.transports.ring_cases import FLOATS, Case, add, assert_equal_bits, cases_for, tensor_of
from tests.support.twins.plain import add_round
from tests.support.twins.sharded import STAGES, Pair, slow

CPU = torch.device("cpu")
AMPLE = timedelta(seconds=seconds(30))
LEVELS = Route(transport="collectives", algorithm="hierarchical")


@contextmanager
def hosts_of(node):
    """Let this process see hosts of `node` consecutive ranks each."""
    with (
        patch.object(rendezvous, "host_name", lambda: f"host {dist.get_rank() // node}"),
        patch.object(rendezvous, "_RENDEZVOUS", WeakKeyDictionary()),
    ):
        yield


# ---- order and bytes ------------------------------------------------------------------------------------------------


class Exchanging:
    """Collectives of some in-process ranks, made of messages. It counts the bytes sent to other ranks."""

    def __init__(self, transport, members):
        self._transport, self._members = transport, list(members)
        self.rank, self.world_size = self._members.index(transport.rank), len(self._members)
        self.first_row = (self.rank + 1) % self.world_size
        self.batched, self.blocking, self.holder, self.slice_nbytes = False, True, None, 64 << 20
        self.sent = 0

    all_to_all = GroupCollectives.all_to_all
    _group = SimpleNamespace(alltoall_base=None)

    def _run(self, _, __, tensors, received, given, ___):
        rows, sent = tensors
        equal = [len(rows) // self.world_size] * self.world_size
        received, given = received or equal, given or equal
        messages = [Message(each, peer, outgoing=False) for each, peer in self._parts(rows, received)]
        messages += [Message(each, peer, outgoing=True) for each, peer in self._parts(sent, given)]
        self.sent += sum(given) - given[self.rank]
        self._transport.exchange(messages, tag=0).wait()

    def _parts(self, memory, sizes):
        return zip(memory.split(sizes), self._members, strict=True)

    def all_gather(self, full, cut, operation):
        start, stop = cut.bounds[self.rank]
        operation.count_collective((self.world_size - 1) * (stop - start) * full.itemsize)
        parts = [full[start:stop] for start, stop in cut.bounds]
        own = parts[self.rank].clone()
        messages = [Message(each, peer, outgoing=False) for each, peer in zip(parts, self._members, strict=True)]
        messages += [Message(own, peer, outgoing=True) for peer in self._members]
        self._transport.exchange(messages, tag=1).wait()


def levels_of(transport, node):
    first, ranks = transport.rank - transport.rank % node, range(transport.world_size)
    inside, across = ranks[first : first + node], ranks[transport.rank % node :: node]
    return TwoLevelCollectives(*(Exchanging(transport, some) for some in (ranks, inside, across)))


def node_sum(parts, place, divisor, out):
    """Add the parts of a level in the order place+1, place+2, ..., place; the last addition divides and rounds."""
    order = [(place + 1 + i) % len(parts) for i in range(len(parts))]
    total = parts[order[0]]
    for i in order[1:]:
        last = i == place
        total = add(total, parts[i], divisor if last else 1, out if last else total.dtype)
    return total


def two_level_sum(size, node, case, k, divisor, out=None):
    """The specification: segment `m L + j` is added inside each node as for `j`, then over the nodes as for `m`."""
    start, stop = case.bounds(size)[k]
    ranks = [tensor_of(r, case.numel, case.dtype)[start:stop] for r in range(size)]
    if size == node:
        return node_sum(ranks, k, divisor, out or case.dtype)
    nodes = [node_sum(ranks[first : first + node], k % node, 1, case.dtype) for first in range(0, size, node)]
    return node_sum(nodes, k // node, divisor, out or case.dtype)


def reduce_all(transport, cases, divisor, out=None):
    results = []
    for i, case in enumerate(cases):
        start, stop = case.bounds(transport.world_size)[transport.rank]
        shard = torch.empty(stop - start, dtype=out or case.dtype)
        full = tensor_of(transport.rank, case.numel, case.dtype)
        given = {"divisor": divisor, "operation": Operation("reduce", i), "cuts": case.cuts}
        staging = torch.empty(staging_numel(case.numel, transport, case.dtype, cuts=case.cuts), dtype=case.dtype)
        results.append(reduce_scatter(full, transport, out=shard, staging=staging, **given))
    return results


def in_process(transport, node, cases, divisor, room):
    levels = levels_of(transport, node)
    levels.slice_nbytes = room
    return reduce_all(levels, cases, divisor)


WORLDS = [(4, 2), (6, 2), (6, 3), (8, 4), (9, 3)]


@pytest.mark.parametrize(("size", "node"), WORLDS)
@pytest.mark.parametrize("room", [64 << 20, 1000], ids=["whole", "slices"])
def test_nodes_are_added_up_first_in_the_documented_order(size, node, room):
    cases = cases_for(size, FLOATS)
    results = run_local(in_process, size, node, cases, size, room)
    for k, shards in enumerate(results):
        for case, shard in zip(cases, shards, strict=True):
            assert_equal_bits(shard, two_level_sum(size, node, case, k, size))


@pytest.mark.parametrize(("size", "node"), WORLDS)
def test_the_order_is_that_of_the_schedule(size, node):
    for k in range(size):
        inside = ["+".join(str(first + (k + 1 + i) % node) for i in range(node)) for first in range(0, size, node)]
        first, *others = [inside[(k // node + 1 + i) % len(inside)] for i in range(len(inside))]
        expected = "+".join([first, *(f"({each})" for each in others)])
        assert formula(order_of_addition(schedule_of("hierarchical", size, node=node), k)) == expected


def count_bytes(transport, node, numel, cuts):
    levels = levels_of(transport, node)
    tally = Tally()
    reduce_scatter(torch.zeros(numel), levels, cuts=cuts, operation=Operation("a trial", tally=tally))
    return tally, levels.inside.sent, levels.across.sent


@pytest.mark.parametrize(("size", "node"), WORLDS)
def test_bytes_inside_and_across_follow_their_formulas(size, node):
    numel, nodes = 40 * size, size // node
    for tally, inside, across in run_local(count_bytes, size, node, numel, None):
        assert across == tally.across == 4 * numel // node * (nodes - 1) // nodes
        assert inside == 4 * numel * (node - 1) // node
        assert tally == Tally(1, 4 * numel * (size - 1) // size, across), "in all as many as in one exchange"


def test_bytes_of_unequal_segments_are_counted_too():
    cuts = [0, 100, 100, 130, 400]
    for rank, (tally, inside, across) in enumerate(run_local(count_bytes, 4, 2, 400, cuts)):
        assert across == tally.across == 4 * (cuts[(rank ^ 2) + 1] - cuts[rank ^ 2])
        assert tally.nbytes == inside + across


def stage_in_slices(transport, node):
    levels = levels_of(transport, node)
    levels.slice_nbytes = 1000
    return staging_numel(8000, levels, torch.float32) * 4


def test_staging_is_bounded_as_in_one_exchange():
    assert all(nbytes <= 2000 for nbytes in run_local(stage_in_slices, 4, 2))


def sum_short(transport, node):
    """A sum of one number and a sum that is gathered."""
    levels = levels_of(transport, node)
    results = []
    for numel in (1, 9):
        full = tensor_of(transport.rank, numel, torch.float32)
        all_reduce(full, levels, divisor=3, operation=Operation("sum", numel))
        results.append(full)
    return results


def test_an_all_reduce_has_the_same_order():
    cases = [Case(numel, torch.float32, 1 << 20) for numel in (1, 9)]
    for results in run_local(sum_short, 4, 2):
        for case, got in zip(cases, results, strict=True):
            assert_equal_bits(got, torch.cat([two_level_sum(4, 2, case, k, 3) for k in range(4)]))


# ---- over gloo ------------------------------------------------------------------------------------------------------


def reduce_both_ways(group, node, cases):
    """Reduce by two levels of collectives and by messages of the same schedule."""
    with hosts_of(node):
        levels = connect(group, CPU, AMPLE, route=LEVELS, apart=True, reduces=True)
    messages = GlooTransport(group, AMPLE)
    messages.algorithm, messages.node = "hierarchical", node
    gathered = torch.zeros(10)
    start, stop = cut_up(10, torch.float32, levels, None, None).bounds[levels.rank]
    gathered[start:stop] = levels.rank + 1.0
    all_gather(gathered, levels)
    users = torch.ones(3, dtype=torch.int32)
    all_reduce(users, levels)
    sums = [reduce_all(each, cases, 4, out) for each in (levels, messages) for out in (None, torch.float32)]
    return type(levels).__name__, gathered, users, sums


@pytest.mark.parametrize(("node", "name"), [(2, "TwoLevelCollectives"), (1, "GlooCollectives"), (4, "GlooCollectives")])
def test_collectives_and_messages_have_the_same_bits(cluster, node, name):
    """With one rank per node, or one node, both are the ring."""
    cases = cases_for(4, [torch.float32, torch.bfloat16])
    for k, (kind, gathered, users, sums) in enumerate(cluster.run(reduce_both_ways, 4, node, cases)):
        assert kind == name
        assert gathered.tolist() == [1.0] * 3 + [2.0] * 3 + [3.0] * 3 + [4.0]
        assert users.tolist() == [4] * 3
        for by_levels, by_messages in (sums[::2], sums[1::2]):
            for case, one, other in zip(cases, by_levels, by_messages, strict=True):
                assert_equal_bits(one, other)
                assert_equal_bits(one, two_level_sum(4, node, case, k, 4, one.dtype))


def two_level_mean(node, of):
    """Mean of one flat, for a `Twin`: as `two_level_sum`, in the dtypes of a twin."""
    mean = torch.zeros(of.layout.full_numel, dtype=of.layout.dtype)
    for k in range(of.layout.world_size):
        own = slice(*of.layout.shard_range(k))
        ranks = [flat[own] for flat in of.flats]
        nodes = [
            add_round(ranks[first : first + node], k % node, 1, ranks[0].dtype) for first in range(0, len(ranks), node)
        ]
        mean[own] = add_round(nodes, k // node, len(ranks), mean.dtype)
    return mean


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("name", "recipe"), [("plain", "adamw"), ("mlp", "sgd"), slow("mixed", "adamw"), slow("frozen", "adamw")]
)
def test_every_stage_has_the_bits_of_the_written_out_order(group, name, recipe):
    make, loss = {**MODELS, "mlp": (partial(MLP, [7, 33, 5]), on_rows)}[name]
    for stage in STAGES:
        with hosts_of(2):
            pair = Pair(make, group, stage=stage, recipe=recipe, route=LEVELS)
        assert "transport=GlooCollectives, algorithm=hierarchical" in repr(pair.model)
        pair.twin._mean = partial(two_level_mean, 2)
        pair.step(loss)
        pair.step(loss, ("local", "step"), clip=0.01)


# ---- who gets them, and errors --------------------------------------------------------------------------------------


def warnings_of(group, node, route):
    """Connect twice; return the warnings that are logged."""
    with hosts_of(node), patch.object(select, "_reported", set()), logged() as messages:
        for _ in range(2):
            connect(group, CPU, AMPLE, route=route, apart=True, reduces=True)
    return messages


def test_one_exchange_across_nodes_is_logged_once_with_what_to_take_instead(cluster):
    first, *others = cluster.run(warnings_of, 4, 2, Route(transport="collectives"))
    assert first == [
        "gradients are reduced by one exchange among 4 ranks on 2 nodes, in which each rank sends 2/4 of its "
        "gradients to other nodes. Route(algorithm='hierarchical') sends only 1/4, but rounds differently "
        "(docs/rings.md, 'Several nodes')"
    ]
    assert others == [[]] * 3


@pytest.mark.parametrize(
    ("node", "route"),
    [
        (1, Route(transport="collectives")),
        (4, Route(transport="collectives")),
        (3, Route(transport="collectives")),  # hosts of 3 ranks and 1
        (2, Route(transport="collectives", reduce="fast")),
        (2, Route(transport="collectives", order="tree", parts=4)),
        (2, LEVELS),
    ],
)
def test_nothing_is_logged_where_two_levels_are_taken_or_save_nothing(cluster, node, route):
    assert cluster.run(warnings_of, 4, node, route) == [[]] * 4


@pytest.mark.ranks(4)
def test_over_nccl_only_reductions_know_nodes(group):
    """Which transports a route selects where the group has NCCL, and between which ranks it connects again."""
    made = []

    def communicator(group, device, timeout, route, some=None):
        made.append(None if some is None else list(some))
        return group

    with (
        hosts_of(2),
        patch("torch.distributed.get_backend_config", lambda _: "cpu:gloo,cuda:nccl"),
        patch.object(select, "communicator", communicator),
    ):
        route = Route(algorithm="hierarchical")
        kinds = [
            connect(group, torch.device("cuda:0"), AMPLE, route=route, apart=True, reduces=each)
            for each in (False, True)
        ]
    assert [type(each).__name__ for each in kinds] == ["NcclCollectives", "TwoLevelCollectives"]
    inside, across = [[0, 1], [2, 3]][dist.get_rank() // 2], [[0, 2], [1, 3]][dist.get_rank() % 2]
    assert made == [None, None, inside, across], "one for gathers, three for reductions"


@pytest.mark.ranks(4)
def test_hosts_of_different_size_are_refused(group):
    with (
        hosts_of(3),
        pytest.raises(LayoutError, match=r"^algorithm='hierarchical' requires the same number of ranks on"),
    ):
        connect(group, CPU, AMPLE, route=LEVELS, apart=True, reduces=True)


def test_the_order_of_two_levels_is_fixed():
    with pytest.raises(ValueError, match=r"algorithm='hierarchical' fixes the order .* reduce='fast' leaves it to"):
        Route(algorithm="hierarchical", reduce="fast")


def be_alone(group):
    """Ranks 2 and 3, a node, reduce; ranks 0 and 1 do nothing."""
    with hosts_of(2):
        levels = connect(group, CPU, AMPLE, route=LEVELS, apart=True, reduces=True)
    levels.across._timeout = timedelta(seconds=seconds(0.2))
    if levels.rank > 1:
        reduce_scatter(torch.zeros(8), levels, operation=Operation("reduce-scatter of unit 'head'", 3))


def test_a_silent_node_is_an_error_with_rank_and_level(throwaway):
    failures = throwaway.failures(be_alone, 4)
    assert failures[:2] == [None, None]
    for rank in (2, 3):
        kind, message = failures[rank]
        assert kind == "CommError"
        assert message.startswith(
            "reduce-scatter of unit 'head' (operation 3, 8 elements of torch.float32): "
            f"rank {rank}, in a reduction across nodes: rank 1 in all-to-all failed: "
        )
