"""Full parameters of a sharded model: reading, writing, and state dicts in the format of the unsharded model.

All functions are collective: every rank calls them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from shardlite.errors import LayoutError
from shardlite.gather import Gatherer
from shardlite.handles import Promises, pop_hooks, push_hooks
from shardlite.ring import Operation, all_reduce
from shardlite.transport import Transport
from shardlite.unit import Unit


class FullParameters:
    """Access to the full parameters of one wrapped model; without a gatherer they are always there."""

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[Unit],
        transport: Transport,
        gatherer: Gatherer | None,
        promises: Promises | None,
    ) -> None:
        self._module = module
        self._units = units
        self._transport = transport
        self._gatherer = gatherer
        self._promises = promises
        self._uses = count()
        self._reading = False
        if gatherer is not None:
            for each in module.modules():
                each.register_state_dict_pre_hook(self._refuse)  # type: ignore[no-untyped-call]

    @contextmanager
    def gathered(self, names: Sequence[str], *, writeback: bool) -> Iterator[None]:
        """Hold the units of the named parameters, or all; in the end write this rank's rows back, or forget them.

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
                if not written and self._gatherer is not None:
                    self._gatherer.forget(units)  # the next forward must not see what was written either

    @contextmanager
    def _held(self, units: Sequence[Unit]) -> Iterator[None]:
        """Let the units' parameters be full, and computations with them have handles."""
        with ExitStack() as undo:
            if self._gatherer is not None and self._promises is not None:
                for unit in units:
                    self._gatherer.hold(unit)
                    undo.callback(self._gatherer.let_go, unit)
                if push_hooks(self._promises):
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
        """Copy this rank's rows of changed full buffers into its shards.

        A unit counts as changed if it is on any rank: all must agree on whether it has to be gathered again.
        """
        if self._gatherer is None:
            return  # the full parameters are the shards
        rows = {
            flat: full[slice(*flat.layout.shard_range(self._transport.rank))]
            for unit in units
            if unit.buffer is not None
            for flat, full in zip(unit.flats, unit.parts(unit.buffer), strict=True)
        }
        changed = torch.tensor([any(not torch.equal(rows[f], f.local) for f in unit.flats) for unit in units]).int()
        all_reduce(changed, self._transport, operation=Operation("what was changed", next(self._uses)))
        with torch.no_grad():
            for unit in (unit for unit, ranks in zip(units, changed.tolist(), strict=True) if ranks):
                for flat in unit.flats:
                    flat.local.copy_(rows[flat])
