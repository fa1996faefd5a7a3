"""`ShardLite`: a model whose parameters, gradients and optimizer state are sharded over ranks."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardlite import build, checks, guard, materialise
from shardlite.backward import Backward, Mode
from shardlite.build import FlatPlan, Memory
from shardlite.casts import cast_floats
from shardlite.census import SoloCensus
from shardlite.clip import clip_gradients, total_norm
from shardlite.config import Precision
from shardlite.errors import LayoutError, PhaseError
from shardlite.full import FullParameters
from shardlite.gather import Gatherer
from shardlite.handles import Calls
from shardlite.hooks import ModuleHooks
from shardlite.ledger import Held, Ledger
from shardlite.materialise import Init, Initialiser
from shardlite.optim import adopt
from shardlite.partition import ROOT, UnitPlan, UnitPolicy, cut
from shardlite.reduce import Reducer
from shardlite.replicas import Replicas
from shardlite.ring import Operation
from shardlite.shards import Shards
from shardlite.sites import needs, sites
from shardlite.skips import Skips
from shardlite.stepping import Stepping
from shardlite.trace import Trace
from shardlite.traffic import Sent, Traffic
from shardlite.transport import Ranks, connect, groups_of
from shardlite.unit import Shared

ReshardRule = bool | Callable[[str, nn.Module], bool]


class ShardLite(nn.Module):
    """Wrap `module` so that each rank keeps `1/W` of its parameters, gradients and optimizer state.

    Every rank calls this with the same module; rank 0's values are used, and other ranks' may be missing: on the meta
    device. Afterwards train as before, with an optimizer on `parameters()` of the wrapped model, each rank on its own
    part of the batch: gradients are means over the ranks.

    Args:
        module: is changed in place; its forward, and any of its submodules', may be called.
        stage: 1 shards the optimizer state, 2 gradients too, 3 parameters too, 0 nothing (plain data parallel). The
            stages are those of ZeRO (Rajbhandari et al. 2020), and all give the same bits.
        units: what is gathered together: a module class, a tuple of classes, or `callable(name, module) -> bool`.
            `None` takes the repeated blocks of the model, and embeddings and heads that are large beside them.
        precision: which dtype is used where.
        reshard_after_forward: `False`: units stay gathered from their forward to the end of the backward, which saves
            one all-gather each and costs the memory of the weights; or `callable(name, module) -> bool` for each unit.
            Stage 3 only.
        group: the ranks to shard over, `None` is the default group; or a `DeviceMesh` with one dimension, or with two,
            (replicate, shard): hybrid sharding. The model is then sharded within each group of the second dimension.
        ignore: modules and parameters that are left alone: each rank trains its own, and nothing is averaged.
        device: where shards and buffers are; by default where the parameters are, and if all of them are on the meta
            device, on the current CUDA device if there is one that the group can use, else on the CPU.
        init: gives values to what rank 0 has on the meta device too: what one would give to `nn.Module.apply`. It is
            called on rank 0 with each module, children first, but for those whose own parameters and buffers all have
            values, which they keep. It must write to all others of the module's own, and to nothing outside of its
            unit: a unit's memory goes when its values are sent, so that the model is whole on no rank. `None` calls
            the `reset_parameters()` of modules that own something. A tied parameter gets its values with the first
            module that owns it. Rank 0's generator for `device` draws the same numbers at any stage, with any units
            and any number of ranks; a model whose constructors draw in the order of registration, children first, as
            those of `torch.nn` do, is born with the same weights on meta and off. Other ranks' generators stay as they
            are.
        prefetch: how many units are gathered ahead, each in a buffer of its own.
        diagnose: warn of gradients that are not finite by parameter and rank. The host then waits in each backward.
        timeout: how long a rank waits for a message of another one. (That ranks agree on what they wrap is checked
            under the process group's own timeout; over NCCL that one counts always.)

    Raises:
        LayoutError: there is no process group, nothing to train, a wrapped model inside, another model on another
            rank, or a parameter or buffer on the meta device that was not initialised.
        CommError: a peer failed or is late.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        stage: int = 3,
        units: UnitPolicy = None,
        precision: Precision = Precision(),  # noqa: B008 (frozen)
        reshard_after_forward: ReshardRule = True,
        group: Ranks = None,
        ignore: Iterable[nn.Module | nn.Parameter] = (),
        device: torch.device | str | None = None,
        init: Init = None,
        prefetch: int = 1,
        diagnose: bool = False,
        timeout: timedelta = timedelta(minutes=10),
    ) -> None:
        super().__init__()
        self.stage = stage
        self.precision = precision
        self.ledger = Ledger()
        self.trace = Trace()
        self._groups = groups_of(group)
        self._ignored = checks.ignored_params(ignore)
        self._collectives = count()
        plans = self._agree(module, units, device, init, prefetch)
        self._shared = self._share(timeout)
        self.module = module
        self._build(plans, reshard_after_forward, init)
        self._connect(plans, prefetch, diagnose)

    # ---- what a module does -------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, with inputs and outputs cast as `precision` says."""
        self._hooks.reset()
        self._backward.repair()
        self._stepping.shards.check()
        if self.precision.compute is not None:
            args, kwargs = cast_floats((args, kwargs), self.precision.compute)
        outputs = self.module(*args, **kwargs)
        return outputs if self.precision.output is None else cast_floats(outputs, self.precision.output)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's shards under the original names, as views of the arena.

        A shard has the original shape if this rank has all of the parameter, else `[k, 1, ...]`; `k` may be 0.
        Ignored parameters are yielded as they are.

        Raises:
            LayoutError: the module has a parameter that it did not have when it was wrapped.
        """
        for name, param in self.module.named_parameters(prefix, recurse, remove_duplicate):
            yield name, param if param in self._ignored else self._stepping.shards.of(name, param)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the module's buffers under the original names. They are not sharded."""
        yield from self.module.named_buffers(prefix, recurse, remove_duplicate)

    def requires_grad_(self, requires_grad: bool = True) -> "ShardLite":
        """Set it on the module's own parameters, which decide. It may change between steps."""
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
        return f"stage={self.stage}, ranks={self._shared.world_size}, units={self.unit_names}"

    @property
    def unit_names(self) -> list[str]:
        """The names of the units, in the order of registration; what no other unit holds is in `(root)`."""
        return [unit.name for unit in self._units]

    # ---- training -----------------------------------------------------------------------------------------------

    def no_sync(self, *, sharded: bool = False) -> AbstractContextManager[None]:
        """Accumulate: what backwards inside bring is added to what comes later.

        Without `sharded` they keep their full gradients on this rank, and the next backward outside reduces the sum:
        the fewest messages. With it each reduces its gradients into the shards: the least memory.
        """
        return self._backward.accumulating(Mode.SHARDED if sharded else Mode.LOCAL)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients of all ranks to a global norm of at most `max_norm`, and return what the norm was, [].

        The factor is that of `torch.nn.utils.clip_grad_norm_`, which gives the same on `parameters()`. Norms are those
        with a positive exponent, and `inf`. Ignored parameters are left out (PyTorch's function refuses them beside
        others). The host does not wait. To be called by every rank.
        """
        norm = self._norm(norm_type)
        clip_gradients(list(self._stepping.shards), max_norm, norm)
        return norm

    @property
    def skipped_steps(self) -> int:
        """How many steps were left out because a gradient on some rank had a NaN or an infinity. The host waits.

        Those that a gradient scaler leaves out are its own.
        """
        return self._stepping.skips.total()

    # ---- what it takes --------------------------------------------------------------------------------------------

    def memory(self) -> dict[str, Held]:
        """Return what this rank holds for the model, in bytes by purpose: now, and at most since the last reset.

        Every storage is counted from its allocation to its end, once, whole, under one purpose: `parameters` (the
        shards, or what of them is not in the full weights, and full weights that are always there), `gather buffers`,
        `gradient buckets` (before they are reduced), `gradients`, `staging` (where partial sums arrive), `optimizer
        state` of the optimizers that have stepped the model, and `buffers`. `model.ledger.reset_peak()` resets.
        """
        for shard in self._stepping.shards:
            if shard.grad is not None:
                self.ledger.track("gradients", shard.grad)  # on one rank they are autograd's own
        for optimizer in guard.optimizers_of(self._stepping):
            for value in tree_leaves(list(optimizer.state.values())):
                if isinstance(value, Tensor):
                    self.ledger.track("optimizer state", value)
        return self.ledger.held()

    def traffic(self) -> Mapping[str, Mapping[str, Sent]]:
        """Return what this rank has sent since it was wrapped: calls, messages and bytes by unit and purpose.

        Purposes are `gather`, `reduce`, with hybrid sharding `reduce over replicas`, and `full state`. What
        concerns the whole model is under `"(no unit)"`. Control messages, by which ranks compare what they
        wrap, are not counted.
        """
        return self._shared.traffic.by_unit()

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
        build.agree(self._groups, [], self._full.misfit(state_dict or {}) if self._shared.rank == 0 else None)
        entries = self._full.entries()
        source = {entry: (state_dict or {}).get(name, entry) for name, entry in entries.items()}
        for unit in self._units:
            build.spread_values(unit, self._shared.counted("values"), lambda param: source[param])
        with torch.no_grad():
            for entry, value in source.items():
                if not isinstance(entry, nn.Parameter) and self._shared.rank == 0:
                    entry.copy_(value)
        build.spread_buffers(self.module, self._shared.counted("buffers"))
        self._stepping.mark_changed()

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

    def _agree(
        self, module: nn.Module, units: UnitPolicy, device: torch.device | str | None, init: Init, prefetch: int
    ) -> list[UnitPlan]:
        """Cut the model and make sure that every rank cuts the same."""
        problem, plans, facts = None, [], []
        try:
            checks.check(module, self.stage, prefetch, self.precision, self._ignored, wrapper=ShardLite)
            materialise.check(module, init, self._ignored, first=build.is_first(self._groups))
            self._device = checks.device_for(module, device, build.default_device(self._groups))
            plans = cut(module, units, self._ignored)
            world_size = dist.get_world_size(self._groups.shard)
            self._flat_plans = [build.plan_flats(plan, world_size, self.precision) for plan in plans]
            facts = [f"stage {self.stage}", f"prefetch {prefetch}", f"{self.precision}"]
            facts.append(f"shards on {self._device.type}")
            facts += _describe(plans, self._flat_plans)
        except Exception as error:  # whatever it is: the other ranks are waiting
            problem = error
        build.agree(self._groups, facts, problem)
        return plans

    def _share(self, timeout: timedelta) -> Shared:
        groups, device = self._groups, self._device
        (shard, replicas), reducing = (
            (
                connect(groups.shard, device, timeout, apart=apart),
                None if groups.replicas is None else connect(groups.replicas, device, timeout, apart=apart),
            )
            for apart in (False, True)
        )
        build.open_connections((shard, replicas, *reducing), device)
        return Shared(
            instance=build.number(groups),
            transport=shard,
            replicas=replicas,
            reducing=reducing,
            device=device,
            trace=self.trace,
            ledger=self.ledger,
            traffic=Traffic(),
        )

    def _build(self, plans: list[UnitPlan], reshard: ReshardRule, init: Init) -> None:
        """Move the parameters into arenas, and let those on the meta device have values.

        Raises:
            LayoutError: on every rank, if some have none; the module is of no more use then.
        """
        shared = self._shared
        casts = any(flat.compute != flat.layout.dtype for mine in self._flat_plans for flat in mine)
        self._alone = shared.world_size == 1 and not casts
        memory = Memory(
            rank=None if self.stage == 0 or self._alone else shared.transport.rank,
            permanent=self.stage < 3 or self._alone,
            alone=self._alone,
            resident=lambda plan: plan.name == "" or not _reshards(reshard, plan),
        )
        self._units = build.build_units(plans, self._flat_plans, memory, self._device)
        initialiser = Initialiser(self.module, init, self._device, first=shared.rank == 0)
        build.spread(plans, self._units, self.module, shared, initialiser)
        checks.mark_wrapped(self._units)
        build.agree(self._groups, [], initialiser.trouble())
        build.spread_buffers(self.module, shared.counted("buffers"))
        for flat in build.flats_of(self._units):
            self.ledger.track("parameters", flat.local)
            if flat.full is not None:
                self.ledger.track("parameters", flat.full)
        for buffer in self.module.buffers():
            self.ledger.track("buffers", buffer)

    def _connect(self, plans: list[UnitPlan], prefetch: int, diagnose: bool) -> None:
        """Let hooks drive the units."""
        shared, units = self._shared, self._units
        calls = None
        gatherer: Gatherer | Replicas
        if self.stage < 3 or self._alone:
            gatherer = Replicas(units, shared)
        else:
            gatherer = Gatherer(units, shared, prefetch=prefetch)
            calls = Calls(gatherer, units)
        self._reducer = Reducer([] if self._alone else units, shared, stage=self.stage, diagnose=diagnose)
        self._backward = Backward(self._reducer, gatherer, calls)
        self._full = FullParameters(self.module, units, shared, gatherer, calls)
        self._hooks = ModuleHooks(self._backward, gatherer, calls)
        if not self._alone:
            modules = needs(self.module, plans, units)
            self._hooks.install(modules, sites(self.module, units), [plan.module for plan in plans])
        self._backward.catch_gradients()
        shards = Shards(build.flats_of(units), self.trace)
        self._solo = SoloCensus(build.flats_of(units), self._device, diagnose=diagnose)
        skips = Skips(self._nonfinite, self._device)
        self._stepping = Stepping(shards, skips, gatherer, self._ready_for_step, self._nonfinite, self._norm)
        guard.watch(self._stepping)
        adopt(shards.by_param(), build.part_of(units))

    def _ready_for_step(self) -> None:
        self._hooks.reset()
        if self._backward.died():
            raise PhaseError(
                "the last backward ended in an exception, so its gradients are incomplete: call zero_grad() and run "
                "forward and backward again before the step"
            )
        self._backward.forget_forwards()

    def _nonfinite(self) -> Tensor | None:
        """Return whether any rank has a gradient that is not finite, [], or `None` if there are no gradients."""
        return self._solo.nonfinite() if self._alone else self._reducer.nonfinite

    def _norm(self, norm_type: float, only: Collection[Tensor] | None = None) -> Tensor:
        """Return the norm of the gradients of all ranks, or of those of some shards, []."""
        flats = [flat for flat in build.flats_of(self._units) if flat.layout.dtype.is_floating_point]
        operation = Operation(f"the norm of gradients {self._shared.label}", next(self._collectives))
        return total_norm(flats, self._shared, norm_type, operation, only)


def _reshards(rule: ReshardRule, plan: UnitPlan) -> bool:
    return rule if isinstance(rule, bool) else bool(rule(plan.name, plan.module))


def _describe(plans: Iterable[UnitPlan], flats: Iterable[Iterable[FlatPlan]]) -> list[str]:
    return [
        f"parameter {line} in unit {plan.name or ROOT!r}"
        for plan, mine in zip(plans, flats, strict=True)
        for flat in mine
        for line in flat.layout.describe()
    ]
