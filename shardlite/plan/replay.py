"""Replay which units have full weights in a step at stage 3, with buffers on the meta device.

In: a `Budget`, and the uses of units in their order. Out: the bytes of buffers, and the units to gather.
"""

from collections.abc import Iterable, Sequence

import torch

from shardlite.params import Buffer
from shardlite.plan.budget import Budget
from shardlite.weights.gather_order import GatherOrder
from shardlite.weights.policy import NO_ROOM, BufferPolicy, UnitSize


class Weights:
    """The units with full weights at stage 3. They follow the library's own `BufferPolicy`."""

    def __init__(self, budget: Budget) -> None:
        recipe, order = budget.recipe, GatherOrder()
        sizes = [UnitSize(unit.full, unit.is_root, unit.keep_unsharded) for unit in budget.units]
        prefetch = recipe.options.prefetch
        self._policy = BufferPolicy(sizes, order, _without_memory, prefetch=prefetch, keeps=recipe.on_gpu)
        self._order = order
        self._saves_memory = recipe.saves_memory
        self._users = [0] * len(sizes)
        self._full = [size.nbytes for size in sizes]
        self._fresh: set[int] = set()
        """Units that are unsharded since the previous micro-batch. Ranks gather them again, into memory that is freed
        at once, because the gather order of a forward is the same in each micro-batch."""

        self._again: list[int] = []  # units whose gathers in the order precede the next gather
        self._taking = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, including spare buffers."""
        held = sum(buffer.nbytes for buffer in (*self._policy.buffers.values(), *self._policy.spare()))
        return held + self._taking

    def begin_pass(self, *, backward: bool, final: bool = False) -> Sequence[int]:
        """Begin a pass, after which a step follows if it is `final`. Return units that the previous pass gathers again.

        Units that were gathered ahead and never used become idle.
        """
        gathered = self._take_part()
        self._fresh = set() if backward else set(self._policy.buffers)
        self._policy.begin_pass()
        kind = f"backward{' before a step' if final else ''}" if backward else "forward"
        self._order.begin_pass(kind, final=final)
        for unit in [each for each in self._policy.buffers if each not in self._policy.idle]:
            if self._users[unit] == 0:
                self._end_use(unit)
        if backward and self._saves_memory:
            self._evict_all(self._policy.stop_prefetching())
        return gathered

    def enter(self, unit: int) -> list[int]:
        """Begin a use of a unit. Return the units to gather: this unit if necessary, and units to prefetch."""
        gathered: list[int] = []
        self._taking = 0
        if unit in self._fresh:
            self._fresh.remove(unit)
            self._again.append(unit)
        if self._users[unit] == 0:
            if unit not in self._policy.buffers:
                gathered.append(self._gather(unit, self._policy.victim_for(unit)))
            upcoming = self._policy.begin_use(unit)
            for each in upcoming:
                if each not in self._policy.buffers and (victim := self._policy.victim_for(each, upcoming)) != NO_ROOM:
                    gathered.append(self._gather(each, victim))
        self._users[unit] += 1
        return [*self._take_part(), *gathered] if gathered else gathered

    def _take_part(self) -> list[int]:
        """Return units that were to be gathered again, and count the memory for the largest of them."""
        again, self._again = self._again, []
        self._taking = max((self._full[unit] for unit in again), default=0)
        return again

    def leave(self, unit: int) -> None:
        """End a use of a unit."""
        self._taking = 0
        self._users[unit] -= 1
        if self._users[unit] == 0:
            self._end_use(unit)

    def end_backward(self, *, final: bool) -> None:
        """End a backward. If it is `final`, evict all units, because the optimizer changes the weights."""
        self._order.end_path()
        if final:
            self._evict_all(list(self._policy.buffers))

    def _end_use(self, unit: int) -> None:
        self._evict_all(self._policy.end_use(unit, is_done=self._policy.is_done(unit)))

    def _gather(self, unit: int, victim: int | None) -> int:
        if victim is not None:
            self._evict_all([victim])
        self._policy.acquire(unit)
        return unit

    def _evict_all(self, units: Iterable[int]) -> None:
        for unit in units:
            self._policy.give_back(unit, self._policy.evict(unit))


def _without_memory(nbytes: int, kept: bool) -> Buffer:
    return Buffer(torch.empty(nbytes, dtype=torch.uint8, device="meta"), kept=kept)
