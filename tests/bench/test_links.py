"""Compare the formulas of `docs/rings.md` for bytes per link with counted messages."""

from collections import Counter
from fractions import Fraction

import pytest
import torch

from shardlite.comm.schedule import reduce_scatter
from shardlite.config import Precision
from shardlite.lab import links
from shardlite.lab.links import MODEL, NODE, ROWS, Sent, numel_of
from shardlite.lab.plan.presets import PRESETS
from shardlite.lab.plan.source import find_source
from shardlite.plan import CLUSTERS, Planner, Setting

SHAPES = [(1, 8), (2, 4), (8, 8), (3, 2)]


def counted(messages, nodes, node):
    """Return what each rank sends inside its node and across: the same for all. Messages are (source, target, part)."""
    sent = Counter()
    for source, target, part in messages:
        sent[source, source // node == target // node] += part
    found = {Sent(Fraction(sent[rank, True]), Fraction(sent[rank, False])) for rank in range(nodes * node)}
    assert len(found) == 1
    return found.pop()


def rings(nodes, node):
    """A ring for each network card: in ring `c` node after node, and in each the ranks from place `c` on."""
    ranks = nodes * node
    for card in range(node):
        order = [first + (card + i) % node for first in range(0, ranks, node) for i in range(node)]
        for i, source in enumerate(order):
            yield source, order[(i + 1) % ranks], Fraction(ranks - 1, ranks) / node


def exchange(nodes, node):
    ranks = range(nodes * node)
    yield from ((a, b, Fraction(1, len(ranks))) for a in ranks for b in ranks if a != b)


def two_levels(nodes, node):
    """The schedule of messages."""
    ranks = nodes * node
    for transfers in reduce_scatter("hierarchical", ranks, node=node).steps:
        yield from ((each.source, each.target, Fraction(1, ranks)) for each in transfers)


def inside_only(nodes, node):
    for first in range(0, nodes * node, node):
        yield from ((first + a, first + b, part) for a, b, part in exchange(1, node))


def over_replicas(nodes, node):
    """A reduction inside, then a reduce-scatter and an all-gather of the own segment over the replicas."""
    yield from inside_only(nodes, node)
    for place in range(node):
        for a, b, part in exchange(nodes, 1):
            yield a * node + place, b * node + place, 2 * part / node


@pytest.mark.parametrize(("nodes", "node"), SHAPES)
@pytest.mark.parametrize("messages", [rings, exchange, two_levels, inside_only, over_replicas])
def test_formulas_are_the_bytes_of_messages(messages, nodes, node):
    formula = {rings: links.ring}.get(messages) or getattr(links, messages.__name__)
    assert formula(nodes, node) == counted(messages(nodes, node), nodes, node)


@pytest.fixture(scope="module")
def model():
    return Planner(find_source(MODEL, 1, 16))


def test_the_parameters_are_those_of_the_model(model):
    block, numel = numel_of(PRESETS[MODEL])
    assert model.numel == numel
    shape = PRESETS[MODEL]
    assert numel - shape.layers * block == 2 * shape.vocabulary * shape.width + shape.width


@pytest.mark.parametrize(("master", "state"), [(torch.float32, "fp32"), ("split24", "int8")])
def test_the_state_is_that_of_the_plan(model, master, state):
    each = next(each for _, some in ROWS for each in some if (each.state == links.COMPACT) == (state == "int8"))
    precision = Precision(compute=torch.bfloat16, master=master)
    held = model._budget(Setting(world_size=8, precision=precision, state=state, on_gpu=True)).held
    expected = held["parameters"] + held["optimizer state"]
    assert float(each.state) * model.numel / 8 == pytest.approx(expected, rel=0.01)


def test_a_hybrid_holds_the_share_of_a_node():
    held = [links.HYBRID.held(64, ranks) for ranks in (1, NODE, 64, 512)]
    assert held == [12 * 64, 12 * 8, 12 * 8, 12 * 8]


def test_every_row_is_in_the_table():
    rows = [line.split(" | ") for line in links.table().splitlines()[4:]]
    assert [(int(row[0].strip("| ")), row[1].strip("*")) for row in rows] == [
        (ranks, each.take) for ranks, some in ROWS for each in some
    ]


def test_the_time_of_two_levels_is_that_of_their_bytes():
    cluster, nbytes = CLUSTERS["dgx-h100"], 64 << 20
    flat, levels = (cluster.seconds("reduce-scatter", nbytes, 64, hierarchical=flag) for flag in (False, True))
    assert levels < flat / 3
    sent = links.two_levels(8, 8)
    least = nbytes * (float(sent.inside) * cluster.inside.beta + float(sent.across) * cluster.nic.beta)
    assert least < levels < 1.5 * least
    flat = cluster.seconds("reduce-scatter", nbytes, 8)
    assert cluster.seconds("reduce-scatter", nbytes, 8, hierarchical=True) == flat


def test_the_step_of_a_plan_is_shorter_with_two_levels(model):
    from shardlite.plan import simulate

    cluster = CLUSTERS["dgx-h100"]
    plans = [model.plan(Setting(world_size=64, hierarchical=flag)) for flag in (False, True)]
    flat, levels = (simulate(each, cluster).communication for each in plans)
    assert levels < flat
    assert plans[0].sent_by_reductions == plans[1].sent_by_reductions
