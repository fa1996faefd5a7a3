"""Filling: a unit's full weights are made of the shards of all ranks.

    shard [S] -> cast into its place in the full weights [W*S] -> all-gather

Where the shard is a part of the full weights already there is nothing to cast, and on one rank nothing to gather.

Legend: `W` ranks, `S` elements per shard.
"""

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Protocol

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

from shardlite.lane import Lane
from shardlite.phase import Weights
from shardlite.ring import Operation, all_gather
from shardlite.shared import Shared
from shardlite.transport import Transport
from shardlite.unit import Flat, Unit


class Gathering(Protocol):
    """Who sees to it that full weights are there when they are used: `Gatherer` lends them, `Unsharded` keeps them."""

    def hold(self, unit: Unit, *, foreseen: bool = True) -> None:
        """Make the unit's full weights readable until `release`; holds count."""

    def release(self, unit: Unit) -> None:
        """End one hold."""

    def forget(self, units: Sequence[Unit]) -> None:
        """Let the next hold of each gather anew, because the full weights may have been written to."""

    def expire(self) -> None:
        """Take note that shards have changed."""

    def begin_pass(self, kind: Hashable) -> None:
        """Start a forward pass; those of one kind are expected to need the same units."""

    def begin_backward(self, *, final: bool) -> None:
        """Start the pass of a backward; a `final` one is followed by a step, after which all weights are stale."""

    def end_backward(self, *, final: bool) -> None:
        """End the pass of a backward."""


class Filler:
    """Starts all-gathers, one after the other on a lane of their own."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._lane: Lane | None = None  # made when needed: where weights never change hands it never is

    def start(self, unit: Unit) -> None:
        """Start filling the unit's memory with its weights of now."""
        unit.gathers += 1
        label = f"all-gather of unit {unit.name!r} {self._shared.label}"
        jobs = deque(
            partial(_fill, flat, full, self._transport_of(unit, flat), Operation(f"{label}, flat {i}", unit.gathers))
            for i, (flat, full) in enumerate(zip(unit.flats, unit.fulls(), strict=True))
        )

        def go_round() -> None:
            while jobs:  # emptied, so that nothing of ours views the memory once the flight is over
                jobs.popleft()()

        self._shared.trace.emit("gather", unit.name)
        unit.gathered_version, unit.stale = unit.version(), False
        unit.move(Weights.GATHERING)
        self._lane = self._lane or self._shared.lane("gather")
        unit.flight = self._lane.submit(go_round)

    def _transport_of(self, unit: Unit, flat: Flat) -> Transport | None:
        """Return what the flat is gathered by, if it is: every rank may have all of it."""
        if flat.rank is None or self._shared.transport.world_size == 1:
            return None
        return self._shared.traffic.counted(self._shared.transport, "gather", unit.name)

    def finish(self, unit: Unit) -> None:
        """Wait for the weights."""
        if unit.flight is not None:
            self._shared.trace.emit("wait", unit.name)
            unit.flight.wait()
            unit.flight = None


def is_fresh(unit: Unit) -> bool:
    """Whether the full weights are there, or on their way, and are those of now."""
    return unit.phase is not Weights.SHARDED and unit.gathered_version == unit.version() and not unit.stale


def _fill(flat: Flat, full: Tensor, transport: Transport | None, operation: Operation) -> None:
    if not flat.in_place:
        flat.own_part(full).copy_(flat.local)
    if transport is not None:
        all_gather(full, transport, operation=operation)


@contextmanager
def unseen_by_checkpoints() -> Iterator[None]:
    """Hide what a gather computes from selective checkpointing, which would replay it as a part of the forward."""
    modes = _get_current_dispatch_mode_stack()
    if any(isinstance(mode, _CachingTorchDispatchMode | _CachedTorchDispatchMode) for mode in modes):
        with _disable_current_modes():
            yield
    else:
        yield
