"""The shards of one wrapped model, for optimizers and for the module's own parameters.

The module's own parameters are placeholders while their unit is sharded. A placeholder gets values and gradients
through `_Owner`. A flat is a flat parameter: the parameters of one kind in a unit, in one buffer.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, not_
from weakref import ref

import torch
from torch import Tensor, nn

from shardlite.comm import Context
from shardlite.engine.backward import Backward
from shardlite.engine.module_hooks import ModuleHooks
from shardlite.engine.watch import Watch
from shardlite.errors import LayoutError
from shardlite.full import gather_param
from shardlite.params import Flat, Placeholder, ShardTensor, Slot, Unit, as_they_are, requires_grad_of
from shardlite.params.parameters import attach
from shardlite.telemetry import Trace

ShardRange = tuple[str, int, int, int]
"""A parameter's name, the first element of its shard, the end of the shard (exclusive), and the parameter's numel."""


_hooks_of = attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks")


@dataclass(eq=False, slots=True)
class _Entry:
    """A shard and its parameter, with facts from the latest check."""

    param: nn.Parameter
    shard: nn.Parameter
    unit: Unit
    flat: Flat
    index: int
    """Index of the parameter in its flat."""

    slot: Slot
    address: int
    """Address of the shard's memory at wrapping."""

    trainable: bool
    """`requires_grad` at the latest check."""

    def follow(self) -> None:
        """Copy `requires_grad` of the parameter to the shard."""
        if self.trainable != self.param.requires_grad:
            self.trainable = self.param.requires_grad
            self.shard.requires_grad_(self.trainable)

    def error(self, why: str) -> LayoutError:
        return LayoutError(f"the shard of parameter {self.slot.name!r} {why}")


class Shards:
    """This rank's shards of one wrapped model, one per parameter."""

    def __init__(self, units: Sequence[Unit], trace: Trace) -> None:
        self._trace = trace
        self.entries = [
            _Entry(param, shard, unit, flat, index, slot, shard.data_ptr(), shard.requires_grad)
            for unit in units
            for flat in unit.flats
            for index, (slot, param, shard) in enumerate(zip(flat.layout.slots, flat.params, flat.shards, strict=True))
        ]
        self._by_param: dict[Tensor, _Entry] = {each.param: each for each in self.entries}
        self._by_id = {id(each.shard): each for each in self.entries}  # hashing a tensor is slower: it runs in Python
        self._shards, self._params = ([*map(attrgetter(what), self.entries)] for what in ("shard", "param"))
        self._checked: list[Sequence[int]] = []  # what `check` has found correct
        self.flats = flats = [flat for unit in units for flat in unit.flats]
        self.are_parts = any(flat.layout.world_size > 1 and flat.rank is not None for flat in flats)
        """Whether a shard may be less than a full parameter."""

        self.are_split = any(flat.low is not None for flat in flats)
        """Whether a shard may be only the upper half of its weights (`master="split24"`)."""

        parts = [each for each in self.entries if self.are_parts and each.flat.rank is not None]
        self._watch = Watch((each.shard, each.flat, each.index) for each in parts)

    def attach(self, hooks: ModuleHooks, backward: Backward) -> None:
        """Connect the module's own parameters: `hooks` gather their values, and `backward` provides their gradients."""
        self.hooks, self.backward = hooks, backward
        for index, each in enumerate(self.entries):
            attach(each.param, _Owner(each.slot.name, ref(self), index))

    def __iter__(self) -> Iterator[nn.Parameter]:
        return iter(self._shards)

    def of(self, name: str, param: nn.Parameter) -> nn.Parameter:
        """Return the shard of one of the module's own parameters.

        Raises:
            LayoutError: the parameter was added to the module after wrapping.
        """
        if param not in self._by_param:
            raise LayoutError(f"parameter {name!r} was added or replaced after wrapping: change the module before it")
        self._by_param[param].follow()
        return self._by_param[param].shard

    def parameter_of(self, shard: Tensor) -> nn.Parameter | None:
        """Return the module's own parameter of a shard. Return `None` if `shard` is itself the module's parameter."""
        each = self._by_id.get(id(shard))
        return None if each is None or each.param is shard else each.param

    def by_param(self) -> dict[Tensor, nn.Parameter]:
        """Return the shard of each of the module's own parameters. Skip parameters that are their own shards."""
        return {each.param: each.shard for each in self.entries if each.param is not each.shard}

    def names(self) -> dict[Tensor, str]:
        """Return the name of each shard."""
        return {each.shard: each.slot.name for each in self.entries}

    def parts(self) -> dict[Tensor, ShardRange]:
        """Return each shard's position in its parameter."""
        entries = ((each, each.slot, each.flat.range_of(each.index)) for each in self.entries)
        return {each.shard: (slot.name, *own, slot.numel) for each, slot, own in entries}

    def shard_tensors(self, context: Context) -> dict[Tensor, Callable[..., ShardTensor]]:
        """Return a function for each shard. The function turns a tensor of the shard's shape into a `ShardTensor`.

        Return an empty dict if every shard is a full parameter.
        """
        return {
            each.shard: partial(
                ShardTensor,
                shape=each.slot.shape,
                start=each.flat.range_of(each.index)[0],
                gather=partial(gather_param, context, each.flat, each.index),
            )
            for each in self.entries
            if self.are_parts and each.flat.rank is not None
        }

    def all_params(self) -> list[nn.Parameter]:
        """Return all shards and all of the module's own parameters."""
        return [*self, *(each.param for each in self.entries)]

    def first_unsharded(self, params: Iterable[Tensor]) -> str | None:
        """Return the name of the first parameter in `params` that is the module's own and not a shard, or `None`."""
        found = (self._by_param.get(param) for param in params)
        return next((each.slot.name for each in found if each is not None and each.param is not each.shard), None)

    def are_parts_of(self, params: Iterable[Tensor]) -> bool:
        """Return whether any of `params` is a shard that may be less than a full parameter."""
        found = (self._by_id.get(id(param)) for param in params)
        return self.are_parts and any(each is not None and each.flat.rank is not None for each in found)

    def check(self) -> None:
        """Check that the program has not changed a shard in a way that would have no effect.

        Raises:
            LayoutError: a shard has new memory or a hook, or its `requires_grad` differs from that of its parameter.
        """
        if self._look() == self._checked:
            return
        with as_they_are():
            for each in self.entries:
                shard, param = each.shard, each.param
                if shard.data_ptr() != each.address:
                    raise each.error("was assigned other memory (`.data = ...`): copy into it")
                if param is shard:
                    continue
                if shard._backward_hooks or shard._post_accumulate_grad_hooks:
                    raise each.error(
                        "has a hook, which would never run because shards are not in autograd's graph: register it on "
                        "the module's own parameter"
                    )
                if shard.requires_grad not in (each.trainable, param.requires_grad):
                    raise each.error(
                        "was given a requires_grad that differs from the module's own parameter, which it must follow: "
                        "set it on that parameter, or call requires_grad_() of the model"
                    )
                if each.trainable != param.requires_grad:
                    each.follow()
        self._checked = self._look()

    def _look(self) -> list[Sequence[int]]:
        """Return all facts that `check` compares. `map` with these functions makes no Python call per shard."""
        with as_they_are():
            seen: list[Sequence[int]] = [list(map(Tensor.data_ptr, self._shards))]
            seen += [list(map(not_, map(hooks, self._shards))) for hooks in _hooks_of]
        return [*seen, requires_grad_of(self._shards), requires_grad_of(self._params)]

    def before_step(self, *, hooked: bool) -> None:
        """Check the shards, and stop watching them, because the class of the optimizer was checked.

        If the program has registered hooks for the step (`hooked`), keep watching, because hooks were not checked.
        """
        self.check()
        if not hooked:
            self._watch.stop()

    def after_step(self, stepped: Sequence[Tensor]) -> None:
        """Record a step. Increment the versions of stepped shards, because PyTorch's fused optimizers do not."""
        self._trace.emit(("step", ""))
        self._watch.after_step()
        self.mark_changed(stepped)

    def mark_changed(self, changed: Sequence[Tensor]) -> None:
        """Increment the versions of changed shards. Gathers and autograd detect changed weights by these versions."""
        ours = [entry for shard in changed if (entry := self._by_id.get(id(shard))) is not None]
        torch.autograd.graph.increment_version([each.shard for each in ours])
        # Autograd may have saved permanent full weights, and these change with their shards or soon after.
        full = [each.param for each in ours if each.flat.full is not None and each.param is not each.shard]
        if full:
            torch.autograd.graph.increment_version([param for param in full if not isinstance(param, Placeholder)])


@dataclass(frozen=True)
class _Owner:
    """The connection from one of the module's own parameters to the wrapped model, by weak references."""

    name: str
    shards: "ref[Shards]"
    index: int

    def use(self) -> None:
        """Gather the values of the parameter.

        Raises:
            LayoutError: neither a forward nor a backward is running, so other ranks would not take part.
        """
        shards = self.shards()
        if shards is None or not shards.hooks.use(shards.entries[self.index].unit):
            raise LayoutError(
                f"parameter {self.name!r} is sharded, so its values are not available: use it inside `gathered()` of "
                "the ShardLite model, or in the model's forward. (`parameters()` of the ShardLite model are the local "
                "shards, which optimizers step.) If a hook of `model.module` reads it, as those of `wandb.watch` do, "
                "call the ShardLite model instead of its modules, or remove the hook (`wandb.unwatch`)"
            )

    def gradient(self) -> Tensor | None:
        """Return this rank's gradient of the full parameter. After the reduction, return the gradient of the shard."""
        if (shards := self.shards()) is None:
            return None
        each = shards.entries[self.index]
        waiting = shards.backward.gradient(each.unit, each.param)
        return each.shard.grad if waiting is None else waiting

    def touch(self) -> None:
        """Record that the program gets access to the memory of the parameter's values, for example through `.data`.

        Raises:
            LayoutError: no forward or backward is running, so writes would be lost, or a hand-written step would be
                wrong.
        """
        if (shards := self.shards()) is None:
            return
        each = shards.entries[self.index]
        if shards.hooks.running() or each.unit.users or each.unit.replicated:
            each.unit.touch()
        elif each.unit.copied:
            self.use()
        elif each.param.numel() > each.shard.numel() and self.gradient() is not None:
            raise LayoutError(
                f"parameter {self.name!r} has a gradient on its shards only, so `.data` of the full parameter cannot "
                "be stepped: step the shards (`parameters()` of the ShardLite model), or be inside `gathered()`"
            )

    def drop_gradient(self) -> None:
        """Drop the parameter's gradient, whether or not the gradient has been reduced."""
        if (shards := self.shards()) is not None:
            each = shards.entries[self.index]
            shards.backward.drop_gradient(each.unit, each.param)
            each.shard.grad = None
