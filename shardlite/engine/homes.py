"""Link the parameters of a wrapped model to it: what gathers their values, and where their gradients are."""

from collections.abc import Iterable
from dataclasses import dataclass
from weakref import ref

from torch import Tensor, nn

from shardlite.engine.backward import Backward
from shardlite.engine.module_hooks import ModuleHooks
from shardlite.errors import LayoutError
from shardlite.params import Unit, attach


@dataclass(frozen=True)
class _Owner:
    """The record of one parameter. It keeps nothing alive."""

    name: str
    hooks: "ref[ModuleHooks]"
    backward: "ref[Backward]"
    unit: "ref[Unit]"
    param: "ref[nn.Parameter]"
    shard: "ref[nn.Parameter]"

    def use(self) -> None:
        """Gather the values.

        Raises:
            LayoutError: nothing is running that all ranks do alike.
        """
        hooks, unit = self.hooks(), self.unit()
        if hooks is None or unit is None or not hooks.use(unit):
            raise LayoutError(
                f"parameter {self.name!r} is sharded, so its values are not here: use it inside `gathered()` of the "
                "ShardLite model, or in the model's forward. (The local shards, which optimizers step, are in "
                "`parameters()` of the ShardLite model.) If a hook of `model.module` reads it, as those of "
                "`wandb.watch` do, call the ShardLite model instead of its modules, or remove the hook "
                "(`wandb.unwatch`)"
            )

    def gradient(self) -> Tensor | None:
        """Return the gradient: this rank's own one until it is reduced, then that of the shard."""
        backward, unit, param, shard = self.backward(), self.unit(), self.param(), self.shard()
        waiting = None if backward is None or unit is None or param is None else backward.gradient(unit, param)
        if waiting is not None or shard is None:
            return waiting
        return shard.grad

    def touch(self) -> None:
        """Record that the program gets the memory of the values.

        Raises:
            LayoutError: nothing is running, and the shard is other memory, so that writes would be lost.
        """
        hooks, unit = self.hooks(), self.unit()
        if hooks is None or unit is None:
            return
        if hooks.running() or unit.users:
            unit.touch()
        elif unit.copied:
            self.use()
        elif self._is_cut() and self.gradient() is not None:
            raise LayoutError(
                f"parameter {self.name!r} has a gradient on the shards only: `.data` of the whole parameter would be "
                "stepped by a part. Step the shards, which `parameters()` of the ShardLite model are, or be inside "
                "`gathered()`"
            )

    def _is_cut(self) -> bool:
        param, shard = self.param(), self.shard()
        return param is not None and shard is not None and param.numel() > shard.numel()

    def drop_gradient(self) -> None:
        """Drop the gradient."""
        backward, unit, param, shard = self.backward(), self.unit(), self.param(), self.shard()
        if backward is not None and unit is not None and param is not None:
            backward.drop_gradient(unit, param)
        if shard is not None:
            shard.grad = None


def attach_all(units: Iterable[Unit], hooks: ModuleHooks, backward: Backward) -> None:
    """Attach its record to every parameter."""
    for unit in units:
        for flat in unit.flats:
            for slot, param, shard in zip(flat.layout.slots, flat.params, flat.shards, strict=True):
                attach(param, _Owner(slot.name, ref(hooks), ref(backward), ref(unit), ref(param), ref(shard)))
