"""Agreement of a model's ranks before and after each phase of a save or a load, through the process group's store."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any, TypeVar

from shardlite.comm import all_gather_json
from shardlite.errors import CheckpointError
from shardlite.model import ModelState, ShardLite

T = TypeVar("T")


class Peers:
    """The ranks of one model. The ranks of the first replica have the lowest numbers.

    Raises:
        TypeError: the model is not wrapped.
    """

    def __init__(self, model: ShardLite) -> None:
        if not isinstance(model, ShardLite):
            raise TypeError(f"expected a ShardLite model, got {type(model).__name__}: wrap it first")
        state = ModelState(model)
        context = state.context
        self.rank, self.size = context.rank, context.world_size
        self.shard, self.shards = context.transport.rank, context.transport.world_size
        self.timeout = context.timeout
        self._groups = state.ranks.all
        self._watch = context.reports.watching
        self._thread = ""

    def on_thread(self, name: str) -> Peers:
        """Return the same ranks, for calls from another thread. `name` must be the same on all ranks."""
        other = copy(self)
        other._thread = name
        return other

    def agree(self, act: Callable[[], T], what: str) -> T:
        """Call `act` on every rank and return this rank's result. Collective.

        Raises:
            CheckpointError: `act` raised on a rank. Raised on every rank.
        """
        return self.share(act, what, lambda _: None)[0]

    def share(self, act: Callable[[], T], what: str, facts: Callable[[T], Any]) -> tuple[T, list[Any]]:
        """Call `act` on every rank. Return this rank's result, and `facts` of all ranks' results. Collective.

        Args:
            act: the action of each rank.
            what: name of the call, for errors.
            facts: function that converts a result to facts for all ranks, in JSON types.

        Raises:
            CheckpointError: `act` raised on a rank. Raised on every rank.
        """
        error, gathered = None, list[list[Any]]()
        try:
            result = act()
            gathered.append([None, facts(result)])
        except Exception as caught:
            error, named = caught, isinstance(caught, CheckpointError)
            gathered.append([str(error) if named else f"{type(error).__name__}: {error}", None])
        for group in self._groups:
            parts = all_gather_json(group, gathered, what, self.timeout, thread=self._thread, watch=self._watch)
            gathered = [each for part in parts for each in part]
        if isinstance(error, CheckpointError):
            raise error
        for rank, (failure, _) in enumerate(gathered):
            if failure is not None:
                raise CheckpointError(f"{what}: rank {rank}: {failure}") from error
        return result, [each for _, each in gathered]
