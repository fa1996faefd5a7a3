"""Full parameters of a sharded model: reading, writing, and state dicts in the format of the unsharded model.

`gathered` and `state_dict` are collective: every rank calls them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from shardlite.errors import LayoutError, PhaseError
from shardlite.handles import Calls, pop_hooks, push_hooks
from shardlite.ring import Operation, all_reduce
from shardlite.unit import Flat, Shared, Unit


class FullParameters:
    """Access to the full parameters of one wrapped model; without calls they are always there."""

    def __init__(self, module: nn.Module, units: Sequence[Unit], shared: Shared, calls: Calls | None) -> None:
        self._module = module
        self._units = units
        self._label = shared.label
        self._transport = shared.transport
        self._calls = calls
        self._uses = count()
        self._reading = False
        if calls is not None:
            for each in module.modules():
                each.register_state_dict_pre_hook(self._refuse)  # type: ignore[no-untyped-call]

    @contextmanager
    def gathered(self, names: Sequence[str], *, writeback: bool) -> Iterator[None]:
        """Hold the units of the named parameters, or all; in the end write this rank's part back, or forget them.

        Raises:
            LayoutError: there is no parameter of such a name.
        """
        units = self._units_with(names)
        written = False
        with self._held(units):
            try:
                yield
                if writeback:
                    self._write_back(units)
                    written = True
            finally:
                if not written and self._calls is not None:
                    self._calls.gatherer.forget(units)  # the next forward must not see what was written either

    @contextmanager
    def _held(self, units: Sequence[Unit]) -> Iterator[None]:
        """Let the units' parameters be full, and computations with them have handles."""
        with ExitStack() as undo:
            if self._calls is not None:
                for unit in units:
                    self._calls.gatherer.hold(unit, foreseen=False)
                    undo.callback(self._calls.gatherer.release, unit)
                if push_hooks(self._calls):
                    undo.callback(pop_hooks)
            yield

    def state_dict(self, rank: int | None) -> dict[str, Tensor]:
        """Return copies of all parameters and persistent buffers on `rank`, or everywhere; elsewhere nothing."""
        wanted = rank is None or rank == self._transport.rank
        full: dict[Tensor, Tensor] = {}
        for unit in self._units:
            with self._held([unit]):
                if wanted:
                    full.update({param: param.detach().clone() for param in unit.params()})
        if not wanted:
            return {}
        return {name: full[entry] if entry in full else entry.clone() for name, entry in self.entries().items()}

    def entries(self) -> dict[str, Tensor]:
        """Return the module's own parameters and persistent buffers, by all of their names."""
        self._reading = True
        try:
            entries = self._module.state_dict(keep_vars=True)
        finally:
            self._reading = False
        return {name: entry for name, entry in entries.items() if isinstance(entry, Tensor)}

    def misfit(self, state_dict: Mapping[str, Tensor]) -> LayoutError | None:
        """Return what is wrong with a state dict for this model."""
        entries = self.entries()
        missing, unknown = entries.keys() - state_dict.keys(), state_dict.keys() - entries.keys()
        if missing or unknown:
            return LayoutError(f"the state dict lacks {sorted(missing)} and has unknown {sorted(unknown)}")
        for name, entry in entries.items():
            shape = state_dict[name].shape
            if entry.shape != shape:
                return LayoutError(f"{name!r} has shape {list(shape)}, the model's is {list(entry.shape)}")
        return None

    def _refuse(self, *_: Any) -> None:
        """Let `state_dict()` of the module itself raise: it would write placeholders into a file."""
        if not self._reading:
            raise LayoutError("the module's parameters are sharded: use full_state_dict() of the ShardLite model")

    def _units_with(self, names: Iterable[str]) -> list[Unit]:
        homes = {param: unit for unit in self._units for param in unit.params()}
        known = {name: homes[param] for name, param in self._module.named_parameters(remove_duplicate=False)}
        for name in names:
            if name not in known:
                raise LayoutError(f"there is no parameter {name!r}; there are {', '.join(known)}")
        return [unit for unit in self._units if not names or unit in {known[name] for name in names}]

    def _write_back(self, units: Sequence[Unit]) -> None:
        """Copy this rank's part of changed full buffers into its shards.

        A unit counts as changed if it is on any rank: all must agree on whether it has to be gathered again.

        Raises:
            PhaseError: on every rank, if the shards were changed meanwhile; writing back would undo that.
        """
        if self._calls is None:
            return  # the full parameters are the shards
        written = [any(not torch.equal(ours, flat.local) for flat, ours in self._own_parts(unit)) for unit in units]
        overtaken = any(unit.gathered_version != unit.version() for unit in units)
        ranks = torch.tensor([*written, overtaken], dtype=torch.int32)
        all_reduce(ranks, self._transport, operation=Operation(f"what was written {self._label}", next(self._uses)))
        if ranks[-1] > 0:
            raise PhaseError(
                "gathered(): the shards were changed inside it (a step, a load), which writing back would undo. "
                "Do that outside, or pass writeback=False"
            )
        with torch.no_grad():
            for unit, writers in zip(units, ranks.tolist(), strict=False):
                for flat, ours in self._own_parts(unit) if writers else ():
                    flat.local.copy_(ours)

    def _own_parts(self, unit: Unit) -> Iterator[tuple[Flat, Tensor]]:
        """Yield each flat of a held unit with what this rank's shard is in the full buffer [S]."""
        assert unit.buffer is not None, "a held unit has a buffer"
        for flat, full in zip(unit.flats, unit.full_views(unit.buffer), strict=True):
            yield flat, flat.own_part(full)
