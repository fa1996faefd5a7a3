"""The shards of one wrapped model: as optimizers see them, and as the module's own parameters reach them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from weakref import ref

import torch
from torch import Tensor, nn

from shardlite.comm import Context, all_gather, cut_up
from shardlite.engine.backward import Backward
from shardlite.engine.module_hooks import ModuleHooks
from shardlite.engine.watch import watch
from shardlite.errors import LayoutError
from shardlite.params import Flat, Placeholder, ShardTensor, Unit, as_they_are, attach
from shardlite.telemetry import Trace

ShardRange = tuple[str, int, int, int]
"""A parameter's name, the range of elements of a shard (first, one after the last), and the number of all elements."""


@dataclass(eq=False, slots=True)
class _Entry:
    """A shard, the parameter that it stands for, and both as they were at the latest check."""

    name: str
    param: nn.Parameter
    shard: nn.Parameter
    unit: Unit
    flat: Flat
    index: int
    address: int
    trainable: bool

    def follow(self) -> None:
        """Copy `requires_grad` from the parameter."""
        if self.trainable != self.param.requires_grad:
            self.trainable = self.param.requires_grad
            self.shard.requires_grad_(self.trainable)


class Shards:
    """This rank's shard of each parameter."""

    def __init__(self, units: Sequence[Unit], trace: Trace) -> None:
        self._trace = trace
        self.entries = [
            _Entry(slot.name, param, shard, unit, flat, index, shard.data_ptr(), shard.requires_grad)
            for unit in units
            for flat in unit.flats
            for index, (slot, param, shard) in enumerate(zip(flat.layout.slots, flat.params, flat.shards, strict=True))
        ]
        self._by_param: dict[Tensor, _Entry] = {each.param: each for each in self.entries}
        self._by_id = {id(each.shard): each for each in self.entries}  # the hash of a tensor is computed in Python
        flats = [flat for unit in units for flat in unit.flats]
        self._permanent = any(flat.full is not None for flat in flats)
        self.are_parts = any(flat.layout.world_size > 1 and flat.rank is not None for flat in flats)
        """Whether a shard may be less than a whole parameter."""

        self.are_split = any(flat.low is not None for flat in flats)
        """Whether a shard may be the upper part of weights only."""

        self._watch = watch((each.shard, each.flat, each.index) for each in self.entries if self.are_parts)

    def attach(self, hooks: ModuleHooks, backward: Backward) -> None:
        """Let the module's own parameters gather their values by `hooks`, and find their gradients in `backward`."""
        self.hooks, self.backward = hooks, backward
        for index, each in enumerate(self.entries):
            attach(each.param, _Owner(each.name, ref(self), index))

    def __iter__(self) -> Iterator[nn.Parameter]:
        return (each.shard for each in self.entries)

    def of(self, name: str, param: nn.Parameter) -> nn.Parameter:
        """Return the shard of one of the module's own parameters.

        Raises:
            LayoutError: the module did not have it when it was wrapped.
        """
        if param not in self._by_param:
            raise LayoutError(f"parameter {name!r} was added or replaced after wrapping: do it before")
        self._by_param[param].follow()
        return self._by_param[param].shard

    def by_param(self) -> dict[Tensor, nn.Parameter]:
        """Return the shard of each of the module's own parameters that is not its own shard."""
        return {each.param: each.shard for each in self.entries if each.param is not each.shard}

    def names(self) -> dict[Tensor, str]:
        """Return the name of each shard."""
        return {each.shard: each.name for each in self.entries}

    def parts(self) -> dict[Tensor, ShardRange]:
        """Return the part of a parameter that each shard is."""
        return {
            each.shard: (each.name, *each.flat.range_of(each.index), each.flat.layout.slots[each.index].numel)
            for each in self.entries
        }

    def shard_tensors(self, context: Context) -> dict[Tensor, Callable[..., ShardTensor]]:
        """Return for each shard a function that makes a `ShardTensor` of a tensor like it.

        Return an empty dict if no shard is partial.
        """
        return {
            each.shard: partial(
                ShardTensor,
                shape=each.flat.layout.slots[each.index].shape,
                start=each.flat.range_of(each.index)[0],
                gather=partial(gather_param, context, each.flat, each.index),
            )
            for each in self.entries
            if self.are_parts
        }

    def all_params(self) -> list[nn.Parameter]:
        """Return all shards, and the module's own parameters."""
        return [*self, *(each.param for each in self.entries)]

    def first_unsharded(self, params: Iterable[Tensor]) -> str | None:
        """Return the name of the first of `params` that is the module's own and not a shard, if there is one."""
        found = (self._by_param.get(param) for param in params)
        return next((each.name for each in found if each is not None and each.param is not each.shard), None)

    def check(self) -> None:
        """Raise if a change of a shard would have no effect.

        Raises:
            LayoutError: a shard was given other memory, a hook, or another `requires_grad`.
        """
        with as_they_are():
            for each in self.entries:
                shard, param = each.shard, each.param
                if shard.data_ptr() != each.address:
                    raise LayoutError(
                        f"the shard of parameter {each.name!r} was assigned other memory (`.data = ...`): copy into it"
                    )
                if param is shard:
                    continue
                if shard._backward_hooks or shard._post_accumulate_grad_hooks:
                    raise LayoutError(
                        f"the shard of parameter {each.name!r} has a hook, which would never run because shards are "
                        "not in autograd's graph. Register it on the module's own parameter"
                    )
                if shard.requires_grad not in (each.trainable, param.requires_grad):
                    raise LayoutError(
                        f"requires_grad of the shard of parameter {each.name!r} was set, but the module's own "
                        "parameters decide: set it on them, or call requires_grad_() of the model"
                    )
                if each.trainable != param.requires_grad:
                    each.follow()

    def after_step(self, stepped: Sequence[Tensor]) -> None:
        """Increment the versions of stepped shards, which PyTorch's fused optimizers do not."""
        self._trace.emit("step")
        self._watch.after_step()
        self.mark_changed(stepped)

    def mark_changed(self, changed: Sequence[Tensor]) -> None:
        """Increment the versions by which gathers and autograd detect changed weights."""
        ours = [entry for shard in changed if (entry := self._by_id.get(id(shard))) is not None]
        torch.autograd.graph.increment_version([each.shard for each in ours])
        if self._permanent:  # autograd may have saved the full weights, which change with their shards or later
            full = [each.param for each in ours if each.param is not each.shard]
            torch.autograd.graph.increment_version([param for param in full if not isinstance(param, Placeholder)])


@dataclass(frozen=True)
class _Owner:
    """What one of the module's own parameters asks of the wrapped model. It keeps nothing alive."""

    name: str
    shards: "ref[Shards]"
    index: int

    def use(self) -> None:
        """Gather the values.

        Raises:
            LayoutError: nothing is running that all ranks do alike.
        """
        shards = self.shards()
        if shards is None or not shards.hooks.use(shards.entries[self.index].unit):
            raise LayoutError(
                f"parameter {self.name!r} is sharded, so its values are not here: use it inside `gathered()` of the "
                "ShardLite model, or in the model's forward. (The local shards, which optimizers step, are in "
                "`parameters()` of the ShardLite model.) If a hook of `model.module` reads it, as those of "
                "`wandb.watch` do, call the ShardLite model instead of its modules, or remove the hook "
                "(`wandb.unwatch`)"
            )

    def gradient(self) -> Tensor | None:
        """Return the gradient: this rank's own one until it is reduced, then that of the shard."""
        if (shards := self.shards()) is None:
            return None
        each = shards.entries[self.index]
        waiting = shards.backward.gradient(each.unit, each.param)
        return each.shard.grad if waiting is None else waiting

    def touch(self) -> None:
        """Record that the program gets the memory of the values.

        Raises:
            LayoutError: nothing is running, and the shard is other memory, so that writes would be lost.
        """
        if (shards := self.shards()) is None:
            return
        each = shards.entries[self.index]
        if shards.hooks.running() or each.unit.users:
            each.unit.touch()
        elif each.unit.copied:
            self.use()
        elif each.param.numel() > each.shard.numel() and self.gradient() is not None:
            raise LayoutError(
                f"parameter {self.name!r} has a gradient on the shards only: `.data` of the whole parameter would be "
                "stepped by a part. Step the shards, which `parameters()` of the ShardLite model are, or be inside "
                "`gathered()`"
            )

    def drop_gradient(self) -> None:
        """Drop the gradient."""
        if (shards := self.shards()) is not None:
            each = shards.entries[self.index]
            shards.backward.drop_gradient(each.unit, each.param)
            each.shard.grad = None


def gather_param(context: Context, flat: Flat, index: int, local: Tensor) -> Tensor:
    """Gather a whole tensor like the parameter of a slot from the ranks' parts `local`, 1-D. Collective."""
    slot, cuts = flat.layout.slots[index], flat.cuts_of(index)
    if flat.rank is None or slot.numel == 0:
        return local.reshape(slot.shape).clone()
    whole = context.empty(slot.numel, local.dtype)
    context.ledger.track("staging", whole)
    whole[cuts[flat.rank] : cuts[flat.rank + 1]].copy_(local)
    operation = context.operation(f"the whole tensor of {slot.name!r}", "full state")
    transport = context.inline[0]
    all_gather(whole, transport, cut=cut_up(slot.numel, local.dtype, transport, cuts), operation=operation)
    return whole.view(slot.shape).clone()
