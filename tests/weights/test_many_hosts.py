"""With many ranks, hosts agree by one collective, and exchange their lists only if they differ."""

from unittest import mock

import pytest
import torch
from torch import nn

from shardlite import AdamW, Route, ShardLite
from shardlite.comm import context
from shardlite.comm.transport.gloo import GlooTransport
from shardlite.weights.negotiation import Negotiation
from tests.support.internals import context as context_of
from tests.support.internals import gatherer
from tests.support.models.branching import WIDTH, Branching
from tests.support.twins.sharded import take_step


def train(group, many, parts):
    """Return weights after some steps, and the exchanges of each; `parts`: in one the last rank skips a block."""
    exchanges, in_step = [], []
    exchange = Negotiation._exchange

    def counted(*arguments):
        exchanges[-1] += 1
        return exchange(*arguments)

    with mock.patch.object(context, "MANY", many), mock.patch.object(Negotiation, "_exchange", counted):
        torch.manual_seed(0)
        model = ShardLite(Branching(), group=group, route=Route(transport="p2p"))
        assert isinstance(context_of(model).hosts[0], GlooTransport)
        assert (context_of(model).rounds is None) == (many > group.size())
        optimizer = AdamW(model.parameters(), lr=0.1)
        for step in range(5):
            exchanges.append(0)
            leaves_out = parts and step == 3 and group.rank() == group.size() - 1
            route = [0, 1, 3] if leaves_out else [0, 1, 2, 3]
            loss = model(torch.full((2, WIDTH), 0.1 * (1 + group.rank())), route, False).square().mean()
            in_step.append(gatherer(model).passes.in_step())
            take_step(optimizer, loss)
        return {name: value.clone() for name, value in model.full_state_dict().items()}, exchanges, in_step


@pytest.mark.parametrize("parts", [False, True])
def test_hosts_that_say_the_same_exchange_nothing(cluster, parts):
    few = cluster.run(train, 3, 100, parts)
    many = cluster.run(train, 3, 2, parts)
    for (weights, before, known), (same, exchanges, in_step) in zip(few, many, strict=True):
        assert known == in_step
        assert all(torch.equal(value, same[name]) for name, value in weights.items())
        assert all(before)
        assert exchanges[2] == 0
        assert bool(sum(exchanges[3:])) == parts  # hosts agree beside the step
        assert in_step[:4] == [False, False, True, not parts]  # the first step has no order, which the second hears of


@pytest.mark.ranks(3)
def test_numbers_are_equal_on_all_ranks_or_on_none(group):
    with mock.patch.object(context, "MANY", 2):
        model = ShardLite(nn.Linear(2, 2), group=group, route=Route(transport="p2p"))
    rounds = context_of(model).rounds
    rank = group.rank()
    equal = [rounds.are_equal(numbers) for numbers in ([7, -3], [rank], [5, 1 << 40], [1, -rank])]
    assert equal == [True, False, True, False]
