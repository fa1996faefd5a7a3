"""What tests look at inside a sharded model. Only this file knows where it is kept."""

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
    """Return what connects the model with optimizers."""
    return model._bridge


def context(model: ShardLite) -> Any:
    """Return what the units of the model share: ranks, device and books."""
    return model._bridge.context


def gatherer(model: ShardLite) -> Any:
    """Return what gathers weights at stage 3."""
    return model._hooks._calls.gatherer
