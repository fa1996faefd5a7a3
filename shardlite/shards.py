"""The shards of one wrapped model, as optimizers see them, and what must not be done to them."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from shardlite.errors import LayoutError
from shardlite.trace import Trace
from shardlite.unit import Flat


class Shards:
    """This rank's shard of each parameter. `ready` is called before a step, and raises if it would be a wrong one."""

    def __init__(self, module: nn.Module, flats: Sequence[Flat], trace: Trace, ready: Callable[[], None]) -> None:
        self._module = module
        self._trace = trace
        self._ready = ready
        self._of = {param: shard for flat in flats for _, param, shard in flat.slots()}
        self._param: dict[Tensor, nn.Parameter] = {shard: param for param, shard in self._of.items()}
        self._kept = [(s, s.data_ptr(), flat.layout.trainable) for flat in flats for s in flat.shards]
        self._resident = any(flat.sharded_range is None for flat in flats)
        self.are_parts = any(flat.layout.world_size > 1 and flat.sharded_range is not None for flat in flats)
        """Whether a shard may be less than a whole parameter."""

    def __iter__(self) -> Iterator[nn.Parameter]:
        return iter(self._of.values())

    def of(self, name: str, param: nn.Parameter) -> nn.Parameter:
        """Return the shard of one of the module's own parameters.

        Raises:
            LayoutError: the module did not have it when it was wrapped.
        """
        if param not in self._of:
            raise LayoutError(f"parameter {name!r} was added or replaced after wrapping: do it before")
        return self._of[param]

    def names_of_unsharded(self) -> dict[int, str]:
        """Return the names of the module's own parameters, by id."""
        return {id(param): name for name, param in self._module.named_parameters()}

    def check(self) -> None:
        """Raise if somebody did something to a shard that has no effect, and so would be lost in silence.

        Raises:
            LayoutError: a shard was given other memory, a hook, or another `requires_grad`.
        """
        for shard, address, trainable in self._kept:
            if shard.data_ptr() != address:
                raise LayoutError(f"{self._words(shard)} was given other memory (`.data = ...`): copy into it")
            if shard._backward_hooks or getattr(shard, "_post_accumulate_grad_hooks", None):
                raise LayoutError(
                    f"{self._words(shard)} has a hook, which would never run: shards are not in autograd's graph. "
                    "Register it on the module's own parameter"
                )
            if trainable and not shard.requires_grad:
                raise LayoutError(
                    f"{self._words(shard)} was frozen, but the module's own parameters decide: set requires_grad on "
                    "those, or call requires_grad_() of the model"
                )

    def before_step(self) -> None:
        """Raise if a step would be a wrong one."""
        self._ready()
        self.check()

    def after_step(self, stepped: Sequence[Tensor]) -> None:
        """Take note of what an optimizer has changed: the fused ones of PyTorch do not."""
        self._trace.emit("step")
        self.mark_changed(stepped)

    def mark_changed(self, changed: Sequence[Tensor]) -> None:
        """Raise the versions by which gathers and autograd recognise weights that are no longer what they were."""
        ours = [shard for shard in changed if shard in self._param]
        torch.autograd.graph.increment_version(ours)
        if self._resident:  # autograd knows the same memory by the module's parameters
            torch.autograd.graph.increment_version([self._param[shard] for shard in ours])

    def _words(self, shard: nn.Parameter) -> str:
        return f"the shard of parameter {self.names_of_unsharded()[id(self._param[shard])]!r}"
