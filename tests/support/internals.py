"""Access to private parts of a sharded model. No other test file uses private attributes of the model."""

from collections.abc import Iterator
from typing import Any

from shardlite import ShardLite
from shardlite.params import Flat, Unit


def units(model: ShardLite) -> list[Unit]:
    """Return the units, in the order in which they were made."""
    return list(model._units)


def flats(model: ShardLite) -> Iterator[Flat]:
    """Yield the flats of all units."""
    for unit in units(model):
        yield from unit.flats


def users(model: ShardLite) -> list[int]:
    """Return how many uses of each unit's weights have not ended."""
    return [unit.users for unit in units(model)]


def bridge(model: ShardLite) -> Any:
    """Return the object that connects the model with optimizers."""
    return model._bridge


def context(model: ShardLite) -> Any:
    """Return the context of the model: ranks, device, ledger and traffic."""
    return model._context


def gatherer(model: ShardLite) -> Any:
    """Return the object that gathers weights."""
    return model._bridge.gatherer


def reducer(model: ShardLite) -> Any:
    """Return the object that reduces gradients."""
    return model._reducer


def backward_run(model: ShardLite) -> Any:
    """Return the backward that is running."""
    return model._bridge.backward._run


def shard_group(model: ShardLite) -> Any:
    """Return the process group whose ranks hold one copy of the model."""
    return model._context.ranks.shard
