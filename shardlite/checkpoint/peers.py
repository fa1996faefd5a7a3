"""Agreement of a model's ranks before and after each phase of a save or a load, through the process group's store."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any, TypeVar

from shardlite.comm import all_gather_json, problem_in
from shardlite.comm.consensus import WeightVersion, check_versions
from shardlite.errors import CheckpointError
from shardlite.model import ModelState, ShardLite

T = TypeVar("T")


class Peers:
    """The ranks of one model. The ranks of the first replica have the lowest numbers.

    Args:
        model: the model.
        loads: whether the ranks replace the weights, whose versions may then differ.

    Raises:
        TypeError: the model is not wrapped.
    """

    def __init__(self, model: ShardLite, *, loads: bool = False) -> None:
        state = ModelState(model)
        context = state.context
        self.rank, self.size = context.rank, context.world_size
        self.shard, self.shards = context.transport.rank, context.transport.world_size
        self.timeout = context.timeout
        self._groups = state.ranks.all
        self._watch = context.reports.watching
        self._thread = ""
        self._version = context.version
        self._loads = loads
        self.newest = 0
        """The highest version of the weights of any rank, after `share`."""

    def on_thread(self, name: str) -> Peers:
        """Return the same ranks, for calls from another thread. `name` must be the same on all ranks."""
        other = copy(self)
        other._thread, other._version = name, WeightVersion()  # the training continues meanwhile
        return other

    def agree(self, act: Callable[[], T], what: str) -> T:
        """Call `act` on every rank and return this rank's result. Collective.

        Raises:
            CheckpointError: `act` raised on a rank. Raised on every rank.
        """
        return self.share(act, what, lambda _: None)[0]

    def share(
        self, act: Callable[[], T], what: str, facts: Callable[[T], Any], *, check: Callable[[], object] = lambda: None
    ) -> tuple[T, list[Any]]:
        """Call `act` on every rank. Return this rank's result, and `facts` of all ranks' results. Collective.

        Args:
            act: the action of each rank.
            what: name of the call, for errors.
            facts: function that converts a result to facts for all ranks, in JSON types.
            check: checks the arguments of the call before `act`.

        Raises:
            CheckpointError: `check` or `act` raised on a rank. Raised on every rank.
            DesyncError: the weights of the ranks have different versions. Raised on every rank.
            TypeError, ValueError: `check` raised it on this rank.
        """
        version = self._version.number
        checks = [check] if self._loads else [check, self._version.check]
        gathered, error = list[list[Any]](), problem_in(*checks)
        is_named = error is not None
        try:
            if error is None:
                result = act()
                gathered.append([None, facts(result), version])
        except Exception as caught:
            error, is_named = caught, isinstance(caught, CheckpointError)
        if error is not None:
            text = str(error).removeprefix(f"{what}: ") if is_named else f"{type(error).__name__}: {error}"
            gathered.append([text, None, version])
        for group in self._groups:
            parts = all_gather_json(group, gathered, what, self.timeout, thread=self._thread, watch=self._watch)
            gathered = [each for part in parts for each in part]
        if error is not None and is_named:
            raise error
        for rank, (failure, *_) in enumerate(gathered):
            if failure is not None:
                raise CheckpointError(f"{what}: rank {rank}: {failure}") from error
        versions = [each for *_, each in gathered]
        if not self._loads:
            check_versions(what, versions)
        self.newest = max(versions)
        return result, [each for _, each, _ in gathered]
