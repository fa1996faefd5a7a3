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
class _Entry:
    """A parameter and its shard, as they were at the latest check."""

    flat: Flat
    index: int
    name: str
    param: nn.Parameter
    shard: nn.Parameter
    address: int
    trainable: bool

    @property
    def range(self) -> tuple[int, int]:
        """The elements of the parameter that the shard holds: the first, and one after the last."""
        return self.flat.range_of(self.index)

    def __str__(self) -> str:
        return f"the shard of parameter {self.name!r}"

    def follow(self) -> None:
        """Copy `requires_grad` from the parameter that the shard stands for."""
        if self.trainable != self.param.requires_grad:
            self.trainable = self.param.requires_grad
            self.shard.requires_grad_(self.trainable)


class Shards:
    """This rank's shard of each parameter."""

    def __init__(self, units: Sequence[Unit], trace: Trace) -> None:
        flats = [flat for unit in units for flat in unit.flats]
        self._trace = trace
        self._of: dict[Tensor, _Entry] = {
            param: _Entry(flat, index, slot.name, param, shard, shard.data_ptr(), shard.requires_grad)
            for flat in flats
            for index, (slot, param, shard) in enumerate(zip(flat.layout.slots, flat.params, flat.shards, strict=True))
        }
        self._entries = list(self._of.values())
        self._by_shard = {id(each.shard): each for each in self._entries}  # the hash of a tensor is computed in Python
        self._permanent = any(flat.full is not None for flat in flats)
        self.are_parts = any(flat.layout.world_size > 1 and flat.rank is not None for flat in flats)
        """Whether a shard may be less than a whole parameter."""

        self._watch = watch(flats if self.are_parts else [])
        self.are_split = any(flat.low is not None for flat in flats)
        """Whether a shard may be the upper part of weights only."""

    def __iter__(self) -> Iterator[nn.Parameter]:
        return (each.shard for each in self._entries)

    def of(self, name: str, param: nn.Parameter) -> nn.Parameter:
        """Return the shard of one of the module's own parameters.

        Raises:
            LayoutError: the module did not have it when it was wrapped.
        """
        if param not in self._of:
            raise LayoutError(f"parameter {name!r} was added or replaced after wrapping: do it before")
        self._of[param].follow()
        return self._of[param].shard

    def by_param(self) -> dict[Tensor, nn.Parameter]:
        """Return the shard of each of the module's own parameters that is not its own shard."""
        return {each.param: each.shard for each in self._entries if each.param is not each.shard}

    def names(self) -> dict[Tensor, str]:
        """Return the name of each shard."""
        return {each.shard: each.name for each in self._entries}

    def parts(self) -> dict[Tensor, ShardRange]:
        """Return the part of a parameter that each shard is."""
        return {each.shard: (each.name, *each.range, each.param.numel()) for each in self._entries}

    def shard_tensors(self, context: Context) -> dict[Tensor, Callable[..., ShardTensor]]:
        """Return for each shard a function that makes a `ShardTensor` of a tensor like it.

        Return an empty dict if no shard is partial.
        """
        return {
            each.shard: partial(
                ShardTensor,
                shape=each.flat.layout.slots[each.index].shape,
                start=each.range[0],
                gather=partial(gather_param, context, each.flat, each.index),
            )
            for each in (self._entries if self.are_parts else ())
        }

    def all_params(self) -> list[nn.Parameter]:
        """Return all shards, and the module's own parameters."""
        return [*self, *(each.param for each in self._entries)]

    def first_unsharded(self, params: Iterable[Tensor]) -> str | None:
        """Return the name of the first of `params` that is the module's own and not a shard, if there is one."""
        found = (self._of.get(param) for param in params)
        return next((each.name for each in found if each is not None and each.param is not each.shard), None)

    def check(self) -> None:
        """Raise if a change of a shard would have no effect.

        Raises:
            LayoutError: a shard was given other memory, a hook, or another `requires_grad`.
        """
        with as_they_are():
            for seen in self._entries:
                shard, param = seen.shard, seen.param
                if shard.data_ptr() != seen.address:
                    raise LayoutError(f"{seen} was assigned other memory (`.data = ...`): copy into it")
                if param is shard:
                    continue
                if shard._backward_hooks or shard._post_accumulate_grad_hooks:
                    raise LayoutError(
                        f"{seen} has a hook, which would never run because shards are not in "
                        "autograd's graph. Register it on the module's own parameter"
                    )
                own, wanted = shard.requires_grad, param.requires_grad
                if own is seen.trainable is wanted:
                    continue
                if own not in (seen.trainable, wanted):
                    raise LayoutError(
                        f"requires_grad of {seen} was set, but the module's own parameters decide: set "
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
        ours = [each for shard in changed if (each := self._by_shard.get(id(shard))) is not None]
        torch.autograd.graph.increment_version([each.shard for each in ours])
        if self._permanent:  # autograd may have saved the full weights, which change with their shards or later
            shown = [each.param for each in ours if each.param is not each.shard]
            torch.autograd.graph.increment_version([param for param in shown if not isinstance(param, Placeholder)])


def gather_param(context: Context, flat: Flat, index: int, local: Tensor) -> Tensor:
    """Gather a whole tensor like the parameter of a slot from the ranks' parts `local`, 1-D. Collective."""
    slot, cuts = flat.layout.slots[index], flat.cuts_of(index)
    if flat.rank is None or slot.numel == 0:
        return local.reshape(slot.shape).clone()
    whole = context.empty(slot.numel, local.dtype)
    context.ledger.track("staging", whole)
    whole[cuts[flat.rank] : cuts[flat.rank + 1]].copy_(local)
    operation = context.operation(f"the whole tensor of {slot.name!r}", "full state")
    all_gather(whole, context.inline[0], cuts=cuts, operation=operation)
    return whole.view(slot.shape).clone()
