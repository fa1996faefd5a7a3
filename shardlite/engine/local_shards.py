"""The shards of one wrapped model, as optimizers see them, and checks of what programs do to them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from shardlite.comm import Context, all_gather
from shardlite.engine.watch import watch
from shardlite.errors import LayoutError
from shardlite.params import Flat, Placeholder, ShardTensor, Unit, as_they_are
from shardlite.telemetry import Trace

ShardRange = tuple[str, int, int, int]
"""A parameter's name, the range of elements of a shard (first, one after the last), and the number of all elements."""


@dataclass(eq=False, slots=True)
class _Seen:
    """A shard at the latest check."""

    shard: nn.Parameter
    param: nn.Parameter
    address: int
    trainable: bool

    def follow(self) -> None:
        """Copy `requires_grad` from the parameter that the shard stands for."""
        if self.trainable != self.param.requires_grad:
            self.trainable = self.param.requires_grad
            self.shard.requires_grad_(self.trainable)


class Shards:
    """This rank's shard of each parameter."""

    def __init__(self, units: Sequence[Unit], trace: Trace) -> None:
        self._flats = flats = [flat for unit in units for flat in unit.flats]
        self._trace = trace
        self._names = {
            param: slot.name for flat in flats for param, slot in zip(flat.params, flat.layout.slots, strict=True)
        }
        self._of = {param: shard for flat in flats for param, shard in zip(flat.params, flat.shards, strict=True)}
        self._param: dict[Tensor, nn.Parameter] = {shard: param for param, shard in self._of.items()}
        self._ids = set(map(id, self._param))  # the hash of a tensor is computed in Python
        self._unsharded: dict[Tensor, str] = {
            param: self._names[param] for param, shard in self._of.items() if param is not shard
        }
        self._seen = {
            param: _Seen(shard, param, shard.data_ptr(), shard.requires_grad) for param, shard in self._of.items()
        }
        self._permanent = any(flat.full is not None for flat in flats)
        self.are_parts = any(flat.layout.world_size > 1 and flat.rank is not None for flat in flats)
        """Whether a shard may be less than a whole parameter."""

        self._watch = watch(flats if self.are_parts else [])
        self.are_split = any(flat.low is not None for flat in flats)
        """Whether a shard may be the upper part of weights only."""

    def __iter__(self) -> Iterator[nn.Parameter]:
        return iter(self._of.values())

    def of(self, name: str, param: nn.Parameter) -> nn.Parameter:
        """Return the shard of one of the module's own parameters.

        Raises:
            LayoutError: the module did not have it when it was wrapped.
        """
        if param not in self._of:
            raise LayoutError(f"parameter {name!r} was added or replaced after wrapping: do it before")
        self._seen[param].follow()
        return self._of[param]

    def by_param(self) -> dict[Tensor, nn.Parameter]:
        """Return the shard of each of the module's own parameters that is not its own shard."""
        return {param: shard for param, shard in self._of.items() if param is not shard}

    def names(self) -> dict[Tensor, str]:
        """Return the name of each shard."""
        return {shard: self._names[param] for shard, param in self._param.items()}

    def parts(self) -> dict[Tensor, ShardRange]:
        """Return the part of a parameter that each shard is."""
        return {
            shard: (slot.name, *flat.range_of(row), slot.numel)
            for flat in self._flats
            for row, (slot, shard) in enumerate(zip(flat.layout.slots, flat.shards, strict=True))
        }

    def shard_tensors(self, context: Context) -> dict[Tensor, Callable[..., ShardTensor]]:
        """Return for each shard a function that makes a `ShardTensor` of a tensor like it.

        Return an empty dict if no shard is partial.
        """
        if not self.are_parts:
            return {}
        return {
            shard: partial(
                ShardTensor,
                shape=slot.shape,
                start=flat.range_of(row)[0],
                gather=partial(gather_row, context, flat, row),
            )
            for flat in self._flats
            for row, (slot, shard) in enumerate(zip(flat.layout.slots, flat.shards, strict=True))
        }

    def all_params(self) -> list[nn.Parameter]:
        """Return all shards, and the module's own parameters."""
        return [*self._of.values(), *self._of]

    def first_unsharded(self, params: Iterable[Tensor]) -> str | None:
        """Return the name of the first of `params` that is the module's own and not a shard, if there is one."""
        return next((name for param in params if (name := self._unsharded.get(param)) is not None), None)

    def check(self) -> None:
        """Raise if a change of a shard would have no effect.

        Raises:
            LayoutError: a shard was given other memory, a hook, or another `requires_grad`.
        """
        with as_they_are():
            for seen in self._seen.values():
                shard, param = seen.shard, seen.param
                if shard.data_ptr() != seen.address:
                    raise LayoutError(f"{self._words(shard)} was assigned other memory (`.data = ...`): copy into it")
                if param is shard:
                    continue
                if shard._backward_hooks or shard._post_accumulate_grad_hooks:
                    raise LayoutError(
                        f"{self._words(shard)} has a hook, which would never run because shards are not in "
                        "autograd's graph. Register it on the module's own parameter"
                    )
                own, wanted = shard.requires_grad, param.requires_grad
                if own is seen.trainable is wanted:
                    continue
                if own not in (seen.trainable, wanted):
                    raise LayoutError(
                        f"requires_grad of {self._words(shard)} was set, but the module's own parameters decide: set "
                        "it on them, or call requires_grad_() of the model"
                    )
                seen.follow()

    def after_step(self, stepped: Sequence[Tensor]) -> None:
        """Increment the versions of stepped shards, which PyTorch's fused optimizers do not."""
        self._trace.emit("step")
        self._watch.after_step()
        self.mark_changed(stepped)

    def mark_changed(self, changed: Sequence[Tensor]) -> None:
        """Increment the versions by which gathers and autograd detect changed weights."""
        ours = [shard for shard in changed if id(shard) in self._ids]
        torch.autograd.graph.increment_version(ours)
        if self._permanent:  # autograd may have saved the full weights, which change with their shards or later
            params = [self._param[shard] for shard in ours]
            torch.autograd.graph.increment_version([param for param in params if self._shows_weights(param)])

    def _shows_weights(self, param: nn.Parameter) -> bool:
        """Whether a parameter is neither its own shard nor a placeholder."""
        return param not in self._param and not isinstance(param, Placeholder)

    def _words(self, shard: Tensor) -> str:
        return f"the shard of parameter {self._names[self._param[shard]]!r}"


def gather_row(context: Context, flat: Flat, row: int, local: Tensor) -> Tensor:
    """Gather a whole tensor like the parameter of a slot from the ranks' parts `local`, 1-D. Collective."""
    slot, cuts = flat.layout.slots[row], flat.cuts_of(row)
    if flat.rank is None or slot.numel == 0:
        return local.reshape(slot.shape).clone()
    whole = context.empty(slot.numel, local.dtype)
    context.ledger.track("staging", whole)
    whole[cuts[flat.rank] : cuts[flat.rank + 1]].copy_(local)
    operation = context.operation(f"the whole tensor of {slot.name!r}", "full state")
    all_gather(whole, context.inline[0], cuts=cuts, operation=operation)
    return whole.view(slot.shape).clone()
