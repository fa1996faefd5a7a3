"""`gathered()`: unshard units for code outside of the model's forward and backward, and copy its writes to shards.

A flat is a flat parameter: the parameters of one kind in a unit, in one buffer.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from shardlite.comm import Context
from shardlite.errors import PhaseError
from shardlite.params import Flat, Unit
from shardlite.weights import Calls, Gathering
from shardlite.weights.all_gather import differs, take_over


@contextmanager
def gathered(
    units: Sequence[Unit], context: Context, gatherer: Gathering, calls: Calls | None, *, writeback: bool
) -> Iterator[None]:
    """Unshard units inside the context. With `calls`, autograd saves handles of their parameters.

    At exit, copy changed weights to the shards. If `writeback` is false, undo the changes instead.
    """
    context.version.gathered += 1
    flats = [flat for unit in units for flat in unit.flats if flat.in_place]
    with _unsharded(units, gatherer, calls), ExitStack() as undo:
        undo.callback(gatherer.forget, units)  # the next forward must not see undone writes
        before = {flat: _Before(flat, flat.local.clone(), flat.local._version) for flat in flats}
        for each in before.values():
            context.ledger.track("copies", each.copy)
            undo.callback(each.restore)
        yield
        if writeback:
            gatherer.settle()
            _write_back(units, before, context)
            undo.pop_all()


@contextmanager
def _unsharded(units: Sequence[Unit], gatherer: Gathering, calls: Calls | None) -> Iterator[None]:
    with ExitStack() as undo:
        with gatherer.passes.inside_pass(f"gathered() of {[unit.name for unit in units]}"):
            for unit in units:
                if unit.replicated:
                    continue
                gatherer.unshard(unit)
                undo.callback(gatherer.reshard, unit)
        if calls is not None:
            undo.enter_context(calls.inside_gathered())
        yield


def _write_back(units: Sequence[Unit], before: "Mapping[Flat, _Before]", context: Context) -> None:
    """Copy this rank's part of changed full weights into this rank's shards.

    A unit that has changed on any rank counts as changed on all ranks, because a gather needs all ranks.

    Raises:
        PhaseError: shards were changed inside `gathered()`, and writing back full weights would undo this change.
            Raised on every rank.
    """
    changed = {flat for flat, each in before.items() if each.changed()}
    fulls = [list(zip(unit.flats, unit.fulls(), strict=True)) for unit in units]
    written = [any(flat in changed or differs(flat, full) for flat, full in pairs) for pairs in fulls]
    overtaken = any(unit.needs_gather and unit.gathered_version != unit.version() for unit in units)
    ranks = torch.tensor([*written, overtaken], dtype=torch.int32, device=context.device)
    context.all_reduce_numbers(ranks, context.operation("units changed in gathered()", "writeback"))
    if ranks[-1] > 0:
        raise PhaseError(
            "gathered(): shards were changed inside it, by a step or a load, which writing back would undo: change "
            "them outside of gathered(), or pass writeback=False"
        )
    with torch.no_grad():
        for pairs, writers in zip(fulls, ranks.tolist(), strict=False):
            for flat, full in pairs if writers else ():
                if flat.in_place:
                    before[flat].take_over()
                else:
                    take_over(flat, full)


@dataclass(frozen=True)
class _Before:
    """A copy of a flat's shard, made to detect and undo writes. The flat's full weights share the shard's memory."""

    flat: Flat
    copy: Tensor
    version: int
    """Version of the shard when the shard was copied. A step increments the version. Writes into full weights do not.

    A step is not undone.
    """

    def changed(self) -> bool:
        return not torch.equal(self.flat.local, self.copy)

    def take_over(self) -> None:
        """Keep the writes: increment the version, so that ranks gather the shard again.

        If the weights are split into two halves, only the upper halves were written. The lower half of each changed
        element becomes zero.
        """
        if self.flat.low is not None:
            self.flat.settle()
            self.flat.low.masked_fill_((self.flat.local != self.copy).to(self.flat.low.device), 0)
        torch.autograd.graph.increment_version(self.flat.local)

    def restore(self) -> None:
        if self.flat.local._version == self.version and self.changed():
            with torch.no_grad():
                self.flat.local.copy_(self.copy)
