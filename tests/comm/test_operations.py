"""The names of operations, and what is counted under them."""

from datetime import timedelta

import torch

from shardlite.comm import ranks_of
from shardlite.comm.context import share
from shardlite.config import Route


def test_operations_of_one_kind_are_counted_by_their_units(group):
    context = share(ranks_of(group), torch.device("cpu"), timedelta(seconds=60), Route())
    operations = [context.operation("a trial", "gather", unit) for unit in ("first", "second", "second")]
    for sent, operation in enumerate(operations):
        operation.tally.count(torch.zeros(sent))
    counted = context.traffic.by_unit()
    assert {unit: (each["gather"].calls, each["gather"].nbytes) for unit, each in counted.items()} == {
        "first": (1, 0),
        "second": (2, 4 + 8),
    }
    assert [operation.sequence for operation in operations] == [1, 2, 3], "ranks number all operations of a kind"
