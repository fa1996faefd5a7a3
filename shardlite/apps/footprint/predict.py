"""The bytes of a step by arithmetic: what `tensor_bytes` of a row should be.

In: a model. Out: for a system and a number of ranks the most bytes in tensors, or `None` where no rules are known
(DeepSpeed). ShardLite's rules are those of `shardlite plan`; those of PyTorch's systems are in `peers.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from shardlite.apps.footprint import peers
from shardlite.apps.footprint.systems import SYSTEMS
from shardlite.apps.plan.plan import Planner, RankPlan, Setting
from shardlite.apps.plan.source import Source
from shardlite.build import Event, UnitBudget


class Predictor:
    """Predicts one model in any system."""

    def __init__(self, source: Source, *, progress: Callable[[str], None]) -> None:
        """Make the model of fake tensors.

        Raises:
            SourceError: it cannot be made so.
        """
        self._planner = Planner(source, progress=progress)
        self._rules: dict[str, Callable[[int], int]] = {
            "activations": lambda _: self._activations(None),
            "activations, bf16": lambda _: self._activations(torch.bfloat16),
            "plain": lambda _: self._plain(),
            "ddp": lambda _: self._replicated(self._planner.trainable),
            "zero": lambda ranks: self._replicated(peers.largest_part(self._planner.trained_numels, ranks)),
            "fsdp1": lambda ranks: self._sharded(ranks, peers.fsdp1_peak),
            "fsdp2": lambda ranks: self._sharded(ranks, peers.fsdp2_peak),
        }

    def bounds(self, system: str, ranks: int) -> tuple[int, int] | None:
        """Return between which numbers the most bytes in tensors of one rank during a step are.

        ShardLite's depend on when reductions end: before the next gradient, or as late as they can.

        Raises:
            SourceError: the model cannot be traced with fake tensors.
        """
        setting = SYSTEMS[system].setting
        if setting is not None:
            plan = self._planner.plan(replace(setting, world_size=ranks))
            return plan.at_least, plan.peak
        rule = self._rules.get(system)
        return None if rule is None else (rule(ranks),) * 2

    def _plan(self, ranks: int) -> RankPlan:
        """Return ShardLite's plan at stage 3, of which the units and the events are taken."""
        return self._planner.plan(Setting(world_size=ranks, on_gpu=False))

    def _weights(self, dtype: torch.dtype | None = None) -> int:
        """Return the bytes of all weights and buffers of the module."""
        weights = self._planner.weight_nbytes if dtype is None else self._planner.numel * dtype.itemsize
        return weights + self._plan(1).budget.held["buffers"]

    def _bytes(self, numel: int) -> int:
        """Return the bytes of as many elements of weights, gradients or one moment."""
        return numel * self._planner.weight_nbytes // self._planner.numel

    def _activations(self, dtype: torch.dtype | None) -> int:
        return self._weights(dtype) + peers.activation_peak(self._planner.events(dtype, False))

    def _plain(self) -> int:
        moments = self._bytes(2 * self._planner.trainable)
        return self._weights() + moments + peers.plain_peak(self._planner.events(None, False))

    def _replicated(self, stepped: int) -> int:
        """Return the bytes of DDP in which a rank has the moments of `stepped` elements."""
        buckets, moments = self._bytes(self._planner.trainable), self._bytes(2 * stepped)
        return self._weights() + buckets + moments + peers.activation_peak(self._planner.events(None, False))

    def _sharded(self, ranks: int, peak: Callable[[Sequence[UnitBudget], Sequence[Event], int], int]) -> int:
        plan = self._plan(ranks)
        shards = self._bytes(self._planner.numel + 2 * self._planner.trainable) // ranks
        return shards + plan.budget.held["buffers"] + peak(plan.budget.units, plan.events, ranks)
