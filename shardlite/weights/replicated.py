"""Replicated units (`replicate=`): every rank keeps and steps all weights, so nothing is gathered.

The module's parameters are never placeholders. If weights are stored in another dtype than that of the computation,
each change of the stored weights is cast at once.
"""

from collections.abc import Iterable

import torch
from shardlite_kernels import cast

from shardlite.params import Unit
from shardlite.weights.all_gather import isolated, take_over_all


class ReplicatedWeights:
    """Keeps the full weights of replicated units equal to the stored weights."""

    def __init__(self, units: Iterable[Unit]) -> None:
        self._units = [unit for unit in units if unit.replicated and unit.copied]
        self._writes: dict[Unit, int] = {}
        self.refresh()

    def refresh(self) -> None:
        """Cast stored weights that have changed. If the program has written to full weights, store those."""
        for unit in self._units:
            with isolated(), torch.no_grad():
                if not unit.is_fresh:
                    self._cast(unit)
                elif unit.was_touched() | (unit.writes() != self._writes[unit]):
                    take_over_all(unit)
                self._writes[unit] = unit.writes()

    def _cast(self, unit: Unit) -> None:
        for flat, full in zip(unit.flats, unit.fulls(), strict=True):
            if not flat.in_place:
                cast(full, flat.local)
        torch.autograd.graph.increment_version(unit.params())  # or a backward would use newer weights than its forward
        unit.was_touched()
        unit.validate()
