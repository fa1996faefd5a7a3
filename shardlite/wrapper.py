"""`ShardLite`: a model whose parameters, gradients and optimizer state are sharded over ranks."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.utils.weak import WeakTensorKeyDictionary

from shardlite import build, guard
from shardlite.backward import Backward
from shardlite.clip import clip_grad_norm
from shardlite.errors import LayoutError, PhaseError
from shardlite.full import FullParameters
from shardlite.gather import Gatherer
from shardlite.handles import Calls
from shardlite.hooks import ModuleHooks
from shardlite.ledger import Ledger
from shardlite.partition import ROOT, UnitPlan, UnitPolicy, cut
from shardlite.reduce import Reducer
from shardlite.ring import SUMMABLE, Operation
from shardlite.shards import Shards
from shardlite.sites import needs, sites
from shardlite.trace import Trace
from shardlite.transport import GroupTransport
from shardlite.unit import Shared, Unit

STAGES = (0, 3)
"""0: plain data parallel, nothing is sharded. 3: parameters, gradients and optimizer state are."""


_wrapped = WeakTensorKeyDictionary()  # parameters that were ever sharded: they hold nothing by themselves

_Deliver = Callable[[], Callable[[Unit, int, int, Tensor], None] | None]


class ShardLite(nn.Module):
    """Wrap `module` so that each rank keeps `1/W` of its parameters, gradients and optimizer state.

    Every rank calls this with the same module; rank 0's values are used. Afterwards train as before, with an optimizer
    on `parameters()` of the wrapped model, each rank on its own part of the batch: gradients are means over the ranks.

    Args:
        module: on the CPU. It is changed in place; its forward, and any of its submodules', may be called.
        stage: 3 shards everything, 0 nothing (plain data parallel, for comparison).
        units: what is gathered together: a module class, a tuple of classes, or `callable(name, module) -> bool`.
            `None` takes the repeated blocks of the model, and embeddings and heads that are large beside them.
        group: the ranks to shard over; `None` is the default group.
        prefetch: how many units are gathered ahead, each in a buffer of its own.
        timeout: how long a rank waits for a message of another one. (That ranks agree on what they wrap is checked
            under the process group's own timeout.)

    Raises:
        LayoutError: there is no process group, nothing to train, a wrapped model inside, or another model on another
            rank.
        CommError: a peer failed or is late.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        stage: int = 3,
        units: UnitPolicy = None,
        group: dist.ProcessGroup | None = None,
        prefetch: int = 1,
        timeout: timedelta = timedelta(minutes=10),
    ) -> None:
        super().__init__()
        _check_process_group()
        self.stage = stage
        self.ledger = Ledger()
        self.trace = Trace()
        self._group = group
        self._transport = GroupTransport(group, timeout)
        self._collectives = count()
        plans = self._agree(module, units, prefetch)
        self.module = module
        self._build(plans)
        self._connect(plans, prefetch)
        guard.watch(self._shards)

    # ---- what a module does -------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        self._hooks.reset()
        self._backward.repair()
        self._shards.check()
        return self.module(*args, **kwargs)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's shards under the original names, as views of the arena.

        A shard has the original shape if this rank has all of the parameter, else `[k, 1, ...]`; `k` may be 0.

        Raises:
            LayoutError: the module has a parameter that it did not have when it was wrapped.
        """
        for name, param in self.module.named_parameters(prefix, recurse, remove_duplicate):
            yield name, self._shards.of(name, param)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the module's buffers under the original names. They are not sharded."""
        yield from self.module.named_buffers(prefix, recurse, remove_duplicate)

    def requires_grad_(self, requires_grad: bool = True) -> "ShardLite":
        """Set it on the module's own parameters, which decide. Those that were frozen when wrapped must stay so."""
        self.module.requires_grad_(requires_grad)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, and those that were accumulated under `no_sync()` and not yet reduced.

        (`optimizer.zero_grad()` does not know of the latter.)
        """
        super().zero_grad(set_to_none)
        self._reducer.discard()

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped module where this one has none."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    def __reduce_ex__(self, _: Any) -> Any:
        """Raise: a process group cannot be copied or written."""
        raise LayoutError("a wrapped model cannot be copied or pickled: use full_state_dict()")

    def __deepcopy__(self, _: Any) -> Any:
        """Raise: a process group cannot be copied."""
        raise LayoutError("a wrapped model cannot be copied: use full_state_dict()")

    def extra_repr(self) -> str:
        """Say how the model is cut."""
        return f"stage={self.stage}, ranks={self._transport.world_size}, units={self.unit_names}"

    @property
    def unit_names(self) -> list[str]:
        """The names of the units, in the order of registration; what no other unit holds is in `(root)`."""
        return [unit.name for unit in self._units]

    # ---- training -----------------------------------------------------------------------------------------------

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate: backwards inside keep their full gradients on this rank, the next one outside reduces the sum."""
        return self._backward.no_sync()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients of all ranks to a global norm of at most `max_norm`, and return what the norm was, [].

        To be called by every rank.
        """
        flats = [flat for unit in self._units for flat in unit.trainable]
        operation = Operation(f"the norm of gradients {self._shared.label}", next(self._collectives))
        return clip_grad_norm(flats, self._transport, max_norm, norm_type, operation)

    # ---- full parameters ----------------------------------------------------------------------------------------

    def gathered(self, *names: str, writeback: bool = True) -> AbstractContextManager[None]:
        """Let the module's own parameters be full inside: those of the units that hold `names`, or all.

        They can be read, used in computations with gradients and, with `writeback`, changed in place under
        `torch.no_grad()`. Every rank must make the same changes: of the full parameters each writes its own shard back.
        After an exception inside nothing is written. To be called by every rank.

        Raises:
            LayoutError: there is no parameter of such a name.
        """
        return self._full.gathered(names, writeback=writeback)

    def full_state_dict(self, *, rank: int | None = None) -> dict[str, Tensor]:
        """Return copies of all parameters and persistent buffers, with original names and shapes.

        Units are gathered one after the other. To be called by every rank.

        Args:
            rank: the only rank that gets them; the others get an empty dict. `None`: every rank.
        """
        return self._full.state_dict(rank)

    def load_full_state_dict(self, state_dict: Mapping[str, Tensor] | None) -> None:
        """Take over rank 0's `state_dict`, as `full_state_dict` or an unsharded model gives it.

        What other ranks pass is ignored.
        To be called by every rank. The optimizer state stays as it is.

        Raises:
            LayoutError: on every rank, if names or shapes do not fit; nothing is changed then.
        """
        build.agree(self._group, [], self._full.misfit(state_dict or {}) if self._transport.rank == 0 else None)
        entries = self._full.entries()
        source = {entry: (state_dict or {}).get(name, entry) for name, entry in entries.items()}
        for unit in self._units:
            build.broadcast_values(unit, self._transport, lambda param: source[param])
        with torch.no_grad():
            for entry, value in source.items():
                if not isinstance(entry, nn.Parameter) and self._transport.rank == 0:
                    entry.copy_(value)
        build.broadcast_buffers(self.module, self._transport)
        self._shards.mark_changed(list(self._shards))

    def state_dict(self, *_: Any, **__: Any) -> Any:
        """Raise: the module's own parameters are placeholders. Use `full_state_dict()`."""
        raise LayoutError("state_dict() would hold placeholders: use full_state_dict(), which gathers the parameters")

    def load_state_dict(self, *_: Any, **__: Any) -> Any:
        """Raise: the module's own parameters are placeholders. Use `load_full_state_dict()`."""
        raise LayoutError("load_state_dict() would fill placeholders: use load_full_state_dict()")

    def _apply(self, *_: Any, **__: Any) -> Any:
        raise LayoutError(
            "a wrapped model cannot be moved or converted: call .to(), .half() and the like before wrapping"
        )

    # ---- construction -------------------------------------------------------------------------------------------

    def _agree(self, module: nn.Module, units: UnitPolicy, prefetch: int) -> list[UnitPlan]:
        """Cut the model and make sure that every rank cuts the same."""
        problem, plans, facts = None, [], []
        try:
            _check(module, self.stage, prefetch)
            plans = cut(module, units)
            self._layouts = build.plan_layouts(plans, self._transport.world_size)
            facts = [f"stage {self.stage}", f"prefetch {prefetch}", *_describe(plans, self._layouts)]
        except Exception as error:  # whatever it is: the other ranks are waiting
            problem = error
        build.agree(self._group, facts, problem)
        self._shared = Shared(build.number(self._group), self._transport, self.trace, self.ledger)
        return plans

    def _build(self, plans: list[UnitPlan]) -> None:
        """Move the parameters into arenas."""
        self._units = build.build_units(plans, self._layouts, self._transport, sharded=self.stage == 3)
        build.broadcast_buffers(self.module, self._transport)
        flats = build.flats_of(self._units)
        self._shards = Shards(self.module, flats, self.trace, self._ready_for_step)
        for flat in flats:
            self.ledger.track("parameters", flat.local)
            for param in flat.params:
                _wrapped[param] = True
        for buffer in self.module.buffers():
            self.ledger.track("buffers", buffer)

    def _connect(self, plans: list[UnitPlan], prefetch: int) -> None:
        """Let hooks drive the units."""
        sharded = self.stage == 3
        gatherer = Gatherer(self._units, self._shared, prefetch=prefetch) if sharded else None
        calls = Calls(gatherer, self._units) if gatherer is not None else None
        self._reducer = Reducer(self._units, self._shared, sharded=sharded)
        self._backward = Backward(self._reducer, calls)
        self._full = FullParameters(self.module, self._units, self._shared, calls)
        self._hooks = ModuleHooks(self._backward, calls)
        self._hooks.install(
            needs(self.module, plans, self._units), sites(self.module, self._units), [plan.module for plan in plans]
        )
        self._catch_gradients()

    def _ready_for_step(self) -> None:
        self._hooks.reset()
        if self._backward.died():
            raise PhaseError(
                "the last backward ended in an exception, so its gradients are incomplete: call zero_grad() and run "
                "forward and backward again before the step"
            )

    def _catch_gradients(self) -> None:
        """Send each gradient to its unit.

        The hooks hold everything weakly, for the garbage collector cannot look into those of a tensor.
        """
        deliver = weakref.WeakMethod(self._backward.take_gradient)
        for unit in self._units:
            for i, flat in enumerate(unit.trainable):
                for j, param in enumerate(flat.params):
                    param.grad = None
                    hook = partial(_deliver, deliver, weakref.ref(unit), (i, j))
                    param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def _deliver(deliver: _Deliver, unit: "weakref.ref[Unit]", place: tuple[int, int], param: Tensor) -> None:
    take, home = deliver(), unit()
    if take is not None and home is not None:
        take(home, *place, param)


def _check_process_group() -> None:
    if not dist.is_available() or not dist.is_initialized():
        raise LayoutError(
            "there is no process group: call torch.distributed.init_process_group() first, and start the ranks with "
            "`torchrun --nproc-per-node N script.py`"
        )


def _check(module: nn.Module, stage: int, prefetch: int) -> None:
    """Raise what is wrong with a module before anything is done to it."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"ShardLite wraps an nn.Module, got {type(module).__name__}")
    if stage not in STAGES:
        raise LayoutError(f"stage must be one of {STAGES}, got {stage!r}")
    if prefetch < 0:
        raise LayoutError(f"prefetch counts units and must be at least 0, got {prefetch}")
    lazy = [name for name, param in module.named_parameters() if isinstance(param, UninitializedParameter)]
    if lazy:
        raise LayoutError(f"parameter {lazy[0]!r} has no shape yet: run the lazy module once before wrapping")
    inner = [name or "(the module itself)" for name, each in module.named_modules() if isinstance(each, ShardLite)]
    if inner:
        raise LayoutError(f"{inner[0]!r} is wrapped already: wrap the whole model once, and name its parts by `units`")
    if not any(param.requires_grad for param in module.parameters()):
        raise LayoutError(f"{type(module).__name__} has no parameter with requires_grad: there is nothing to train")
    if torch.is_inference_mode_enabled():
        raise LayoutError("wrap the model outside of torch.inference_mode(): its tensors cannot be trained")
    for name, buffer in module.named_buffers():
        if buffer.layout is not torch.strided:
            raise LayoutError(f"buffer {name!r} is {buffer.layout}: only dense buffers can be sent to all ranks")
    for name, param in module.named_parameters():
        if param in _wrapped:
            raise LayoutError(
                f"parameter {name!r} belongs to a model that is wrapped already, or was: wrap one model that holds "
                "all modules that share parameters, once"
            )
        if param.device.type != "cpu":
            raise LayoutError(f"parameter {name!r} is on {param.device}: this version shards models on the CPU")
        if param.requires_grad and param.dtype not in SUMMABLE:
            raise LayoutError(f"parameter {name!r} is {param.dtype}, and gradients of that dtype cannot be reduced")


def _describe(plans: Iterable[UnitPlan], layouts: Iterable[Iterable[Any]]) -> list[str]:
    return [
        f"parameter {line} in unit {plan.name or ROOT!r}"
        for plan, mine in zip(plans, layouts, strict=True)
        for layout in mine
        for line in layout.describe()
    ]
