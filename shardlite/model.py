"""`ShardLite`: a model whose parameters, gradients and optimizer state are sharded over ranks."""

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial, wraps
from inspect import ismethod
from typing import Any, TypeVar, cast

import torch
from shardlite_kernels import chunk_memory
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from shardlite.build import (
    Init,
    Initializer,
    Options,
    Plan,
    agree_on_plan,
    broadcast_buffers,
    broadcast_init,
    broadcast_values,
    build_units,
    check_memory_limit,
    flats_of,
    part_of,
    placement_of,
    validate,
)
from shardlite.comm import Context, GroupLike, Ranks, Sent, Transport, agree, all_gather_json, ranks_of, share
from shardlite.config import (
    AlgorithmName,
    MemoryLimit,
    OrderName,
    Precision,
    ReduceName,
    Route,
    TransportName,
    check_timeout,
    memory_limit_of,
    route_of,
)
from shardlite.engine import (
    NO_COPY,
    NO_GRAPH,
    Backward,
    Batch,
    Buffers,
    FullParameters,
    InBackwardOptimizer,
    Join,
    Mode,
    ModuleHooks,
    OptimizerBridge,
    PartLoop,
    Shards,
    allow_conversions,
    attach_all,
    cast_floats,
    in_backward,
    needs,
    param_locations,
    refuse_conversions,
    torch_patches,
)
from shardlite.errors import LayoutError, PhaseError
from shardlite.grads import Clipper, Reducer, Skips, SoloGradientFlags
from shardlite.optim import accumulating, adopt
from shardlite.params import ShardTensor, Unit, UnitPolicy, UnitRule
from shardlite.telemetry import Held, not_on, process_memory
from shardlite.weights import Gatherer, ResidentWeights

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _uncompiled(function: _Function) -> _Function:
    """Keep a compiler from tracing a function, which looks at placeholders or at the state of autograd.

    As PyTorch's optimizers do it: `torch.compiler.disable` would import the compiler here, not at the first call.
    """
    return torch._disable_dynamo(function)  # type: ignore[return-value]


def _give_back(transports: Iterable[Transport]) -> None:
    """Give the memory of a model that is gone back to the system, what is freed from now on included."""
    for transport in transports:
        transport.trim(keep=0)


class _Uncompiled:
    """The same for a context manager."""

    def __init__(self, manager: AbstractContextManager[None]) -> None:
        self._manager = manager

    @_uncompiled
    def __enter__(self) -> None:
        self._manager.__enter__()

    @_uncompiled
    def __exit__(self, *raised: Any) -> bool | None:
        return self._manager.__exit__(*raised)


class _UnwrappedError(PhaseError, AttributeError):
    """The model was unwrapped. (`hasattr` takes an `AttributeError` for an answer.)"""


class _SignatureOfModule:
    """A method whose signature is that of the wrapped module's `forward`: trainers choose inputs by it."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method

    def __get__(self, model: "ShardLite | None", _: object = None) -> Callable[..., Any]:
        """Bind the method. (`inspect.signature` follows `__wrapped__`.)"""
        if model is None:
            return self._method
        bound: Any = partial(self._method, model)
        bound.__wrapped__ = model.module.forward
        return cast(Callable[..., Any], bound)


class ShardLite(nn.Module):
    """Wrap `module` so that each of `W` ranks keeps `1/W` of what the stage says: at stage 3, of everything.

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
        quantized_gather: `True`: gathers send weights as 8-bit codes, 33 bytes for 32 of them, and ranks compute with
            what these mean, while weights that are trained keep all their digits; or `callable(name, module) -> bool`
            for each unit (the root's name is empty). Stage 3 only. See `docs/precision.md`.
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
        transport, algorithm, reduce: how messages travel, see `shardlite.Route`; what `"auto"` has chosen is in `repr`
            and logged once.
        order: in which gradients are added: `"ring"`, in that of the ranks, or `"tree"`, as a balanced binary tree over
            the `parts` of each global batch. A run then has the same bits on any number of ranks; see
            `docs/elastic.md`.
        route: these four and options of NCCL's communicators in one record, instead of the four.
        parts: with `order="tree"`, into how many parts each global batch is divided: a power of two, and at least the
            number of ranks. `parts()` yields those of this rank.
        buffers: `"rank0"`: buffers that a forward has changed on some rank (running statistics) become rank 0's on all
            when the next forward begins, as in `DistributedDataParallel`: after one that is not inside `no_sync()` or
            `torch.no_grad()`. `"own"`: each rank keeps its own.
        diagnose: warn of gradients that are not finite by parameter and rank. The host then waits in each backward.
        memory_limit: bytes that a rank may hold, or a `MemoryLimit`, which names the optimizer and activations, too. A
            model whose states and buffers need more is refused here, before memory is taken, with what would fit.
        timeout: how long a rank waits for another one, from the first call on: to come to the same call, or for a
            message. (Over NCCL the process group's own timeout counts for messages.)

    Raises:
        LayoutError: there is no process group, nothing to shard, a wrapped model inside, another model on another
            rank, more memory needed than the limit, or a parameter or buffer on the meta device that was not
            initialised.
        CommError: a peer failed or is late.
        TypeError: an option is of another type than it has to be.
        ValueError: an option has a value that it cannot have.
    """

    _unwrapped = False

    def __init__(
        self,
        module: nn.Module,
        *,
        stage: int = 3,
        units: UnitPolicy = None,
        precision: Precision = Precision(),  # noqa: B008 (frozen)
        reshard_after_forward: UnitRule = True,
        quantized_gather: UnitRule = False,
        group: GroupLike = None,
        ignore: Iterable[nn.Module | nn.Parameter] = (),
        device: torch.device | str | None = None,
        init: Init = None,
        prefetch: int = 1,
        transport: TransportName = "auto",
        algorithm: AlgorithmName = "auto",
        reduce: ReduceName = "exact",
        order: OrderName = "ring",
        route: Route | None = None,
        parts: int | None = None,
        buffers: str = "rank0",
        diagnose: bool = False,
        memory_limit: int | MemoryLimit | None = None,
        timeout: timedelta = timedelta(minutes=10),
    ) -> None:
        super().__init__()
        check_timeout(timeout)
        limit = memory_limit_of(memory_limit)
        self.stage = stage
        self.precision = precision
        self._groups = ranks_of(group)
        validate.check_functions(
            init=init, reshard_after_forward=reshard_after_forward, quantized_gather=quantized_gather
        )
        ignore = validate.listed(ignore)
        self._ignored = validate.ignored_params(ignore)
        self._forwards = 0  # that are running
        self._unsynced: ExitStack | None = None
        options = Options(
            stage=stage,
            units=units,
            precision=precision,
            ignored=self._ignored,
            device=device,
            init=init,
            prefetch=prefetch,
            quantized_gather=quantized_gather,
            buffers=buffers,
            route=route_of(route, Route(transport=transport, algorithm=algorithm, reduce=reduce, order=order)),
            parts=parts,
            memory_limit=limit,
        )
        plan = agree_on_plan(module, options, self._groups, ShardLite, timeout)
        check_memory_limit(module, plan, options, self._groups.shards, reshard_after_forward)
        self._context = context = share(self._groups, plan.device, timeout, options.route)
        self.ledger, self.trace = context.ledger, context.trace
        self._join = Join(context, self._groups)
        self._parts = None if parts is None else PartLoop(parts, context)
        self._placement = placement_of(plan, stage, context.transport.rank, context.world_size, reshard_after_forward)
        self.module = module
        self._units = self._build(plan, init)
        left_alone = [each for each in ignore if isinstance(each, nn.Module)]
        self._first_ranks = Buffers(module, context, left_alone) if buffers == "rank0" else None
        refuse_conversions(module, left_alone, self._ignored)
        self._connect(plan, prefetch, diagnose)

    # ---- what a module does -------------------------------------------------------------------------------------

    @torch._disable_dynamo(recursive=False)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward, between the hooks that were registered on the wrapper: they may use weights, too."""
        if not (self._forward_pre_hooks or self._forward_hooks):
            return super().__call__(*args, **kwargs)
        self._ready_for_forward()
        with self._running():
            return super().__call__(*args, **kwargs)

    @_SignatureOfModule
    @torch._disable_dynamo(recursive=False)  # the module's own is compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, with inputs and outputs cast as `precision` says."""
        self._ready_for_forward()
        self._share_buffers()
        if self.precision.compute is not None:
            args, kwargs = cast_floats((args, kwargs), self.precision.compute)
        with self._running():
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
            yield name, param if param in self._ignored else self._bridge.shards.of(name, param)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the module's buffers under the original names. They are not sharded."""
        yield from self.module.named_buffers(prefix, recurse, remove_duplicate)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Yield the modules as ever. Raise where `torch.export` looks for them: it was given the wrapper."""
        if torch.compiler.is_exporting():
            raise LayoutError(NO_GRAPH)
        yield from super().named_modules(*args, **kwargs)

    def requires_grad_(self, requires_grad: bool = True) -> "ShardLite":
        """Set it on the module's own parameters, which decide. It may change between steps."""
        self.module.requires_grad_(requires_grad)
        return self

    def numel(self) -> int:
        """Return the number of elements of all parameters, of which `parameters()` has this rank's part."""
        return sum(param.numel() for param in self.module.parameters())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, and those that were accumulated under `no_sync()` and not yet reduced.

        (`optimizer.zero_grad()` does not know of the latter.)
        """
        self._recover()
        super().zero_grad(set_to_none)
        self._reducer.discard()

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped module where this one has none. Its methods may use weights."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if self._unwrapped:
                raise _UnwrappedError(
                    "this ShardLite model was unwrapped: use the module that unwrap() returned"
                ) from None
            if name == "module":
                raise
            value = getattr(self.module, name)
        return self._method(value) if ismethod(value) and value.__self__ is self.module else value

    def _method(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._running():
                results = method(*args, **kwargs)
            for each in tree_leaves(results):
                if isinstance(each, Optimizer):  # it can know the module's own parameters only
                    torch_patches.give_shards(each, self._bridge)
            return results

        return call

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Run the module: code inside may use its weights, by every rank alike."""
        self._forwards += 1
        try:
            with self._context.reporting_failures(), _Uncompiled(self._hooks.around()):
                yield
        finally:
            self._forwards -= 1

    def __reduce_ex__(self, _: Any) -> Any:
        """Raise, for `copy.copy` and `pickle`: connections to other ranks cannot be copied or written."""
        raise LayoutError(NO_COPY)

    def __deepcopy__(self, _: Any) -> Any:
        """Raise, even if the module itself has such a method: connections to other ranks cannot be copied."""
        raise LayoutError(NO_COPY)

    def extra_repr(self) -> str:
        """Say how the model is cut."""
        if self._unwrapped:
            return "unwrapped"
        algorithm = self._context.reducing[0].algorithm
        route = f"transport={type(self._context.transport).__name__}, {algorithm=!s}"
        tree = "" if self._parts is None else f", order=tree, parts={self._parts.total}"
        return f"stage={self.stage}, ranks={self._context.world_size}, {route}{tree}, units={self.unit_names}"

    @property
    def unit_names(self) -> list[str]:
        """The names of the units, in the order of registration; what no other unit holds is in `(root)`."""
        return [unit.name for unit in self._units]

    # ---- training -----------------------------------------------------------------------------------------------

    def parts(self, step: int | None = None, *, seed: int = 0) -> Iterator[int]:
        """Yield the numbers of this rank's parts of a global batch, in ascending order, for `order="tree"`.

        Each is to have one forward and one backward on that part; the last backward reduces. All parts have as many
        samples, and gradients are the means over the parts:

            for part in model.parts():
                loss = model(*batch_of(part))
                loss.backward()

        PyTorch's generators, those of the CPU and of the model's device, are seeded for each part by `seed`, `step` and
        the part, so that dropout does not depend on the number of ranks. After the loop they are as they were before.

        Args:
            step: number of the step; by default that of the loops that were finished, which `shardlite.save` keeps.
            seed: of the run.

        Raises:
            LayoutError: the model adds in the order of the ring.
            PhaseError: while the loop runs: another one is running, or a part had no backward, or several.
        """
        if self._parts is None:
            raise LayoutError("parts(): this model adds in the order of the ring: wrap it with order='tree', parts=P")
        self._recover()
        self._reducer.discard()  # of a loop that was left early
        return self._over_parts(self._parts, step, seed)

    def _over_parts(self, parts: PartLoop, step: int | None, seed: int) -> Iterator[int]:
        for part in parts.over(step, seed):
            with self._accumulating(Mode.STEP if part == parts.own[-1] else Mode.PART):
                yield part

    def _refuse_with_parts(self, what: str) -> None:
        if self._parts is not None:
            raise LayoutError(
                f"{what}: order='tree' adds by parts of the global batch, which a rank runs one after the other in "
                "`for part in model.parts(): ...`; there is nothing else to accumulate, and no rank has fewer"
            )

    def no_sync(self, *, sharded: bool = False) -> AbstractContextManager[None]:
        """Accumulate: what backwards inside bring is added to what comes later.

        Without `sharded` they keep their full gradients on this rank, and the next backward outside reduces the sum:
        the fewest messages. With it each reduces its gradients into the shards: the least memory.
        """
        self._refuse_with_parts("no_sync()")
        if sharded:
            self._in_backward.refuse("no_sync(sharded=True)")
        return self._accumulating(Mode.SHARDED if sharded else Mode.LOCAL)

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether backwards reduce their gradients. `False` is as `no_sync()`, until it is `True` again.

        It has the name and the meaning that it has in `DistributedDataParallel`.
        """
        return self._unsynced is None

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        if value and self._unsynced is not None:
            self._unsynced.close()
            self._unsynced = None
        elif not value and self._unsynced is None:
            unsynced = ExitStack()
            unsynced.enter_context(self.no_sync())
            self._unsynced = unsynced

    @contextmanager
    def _accumulating(self, mode: Mode) -> Iterator[None]:
        own = (param for param in self.module.parameters() if param in self._ignored or self._placement.single_rank)
        with accumulating(own), self._backward.accumulating(mode):
            yield

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients of all ranks to a global norm of at most `max_norm`, and return what the norm was, [].

        The factor is that of `torch.nn.utils.clip_grad_norm_`, which gives the same on `parameters()`. Norms are those
        with a positive exponent, and `inf`. Ignored parameters are left out (PyTorch's function refuses them beside
        others). The host does not wait. To be called by every rank.

        Raises:
            PhaseError: the optimizer has stepped in the backward.
        """
        self._in_backward.refuse("clip_grad_norm_")
        clipper = self._bridge.clipper
        norm = clipper.norm(norm_type)
        clipper.clip(self._bridge.shards, max_norm, norm)
        return norm

    def join(self, batches: Iterable[Batch], *, also: Iterable["ShardLite"] = ()) -> Iterator[Batch]:
        """Yield this rank's `batches`; once it has run out its last one, until no rank has any more.

        So ranks with different numbers of batches finish together: `for batch in model.join(loader)`. A rank that has
        run out (`model.joined`) computes with the others, but its gradients do not count: means are those of the ranks
        that have a batch. Its running statistics (batch norm) see the last batch again. A rank that had none at all is
        lent one: tensors, numbers and strings in lists, tuples and dicts. Every rank calls this, and none leaves the
        loop alone. The host waits once per batch.

        Args:
            batches: this rank's.
            also: further wrapped models over the same ranks that are trained in the loop.

        Raises:
            LayoutError: a rank has no batch at all, and cannot be lent one; on every rank.
        """
        models = [self, *also]
        for model in models:
            model._refuse_with_parts("join()")
        return self._join.over(batches, [model._reducer for model in models], [model._recover for model in models])

    @property
    def joined(self) -> bool:
        """Whether this rank has run out of batches in `join`, so that what it computes does not count."""
        return self._join.joined

    @property
    def skipped_steps(self) -> int:
        """How many steps were left out because a gradient on some rank had a NaN or an infinity. The host waits.

        Those that a gradient scaler leaves out are its own.
        """
        return self._bridge.skips.total()

    # ---- what it takes --------------------------------------------------------------------------------------------

    def memory(self, *, process: bool = False) -> dict[str, Held]:
        """Return the bytes that this rank holds for the model, by purpose: now, and at most since the last reset.

        Each storage is counted once, whole, from its allocation to its end:

        - `parameters`: shards, and full weights that are always there
        - `gather buffers`: full weights while they are needed
        - `gradient buckets`: gradients of this rank before they are reduced
        - `gradients`: gradient shards, or full gradients at stages 0 and 1
        - `optimizer state`: that of the optimizers that have stepped the model
        - `averages`: those of `EMA`
        - `buffers`: the module's
        - `staging`: where partial sums, 8-bit codes and values for all ranks arrive
        - `copies`: shards as they were before `gathered(writeback=True)`
        - `chunks of a step`: intermediate values of a CPU step; of all models in the process
        - `messages`, `mailboxes`, `pinned memory`: what a transport takes; of all models over the same ranks
        - `idle shared memory`: pages that are kept for the next block

        `model.ledger.reset_peak()` resets the peaks, but not those of messages, mailboxes and pinned memory.

        Args:
            process: also return `process`, what the operating system or the CUDA allocator says that this process
                holds, and `unexplained`, the part of it that has no purpose above: the interpreter, libraries,
                activations, memory that `malloc` keeps. On a CPU `process` is the proportional set size; its peak is
                the largest resident set of the process so far, in which shared pages count in full. On CUDA both are
                the bytes that PyTorch's allocator has reserved.
        """
        for shard in self._bridge.shards:
            if shard.grad is not None:
                self.ledger.track("gradients", shard.grad)  # on one rank they are autograd's own
        for tensor in torch_patches.state_of_optimizers(self._bridge):
            self.ledger.track("optimizer state", tensor)
        for tensor in chunk_memory():
            self.ledger.track("chunks of a step", tensor)
        held = self._context.held()
        if process:
            whole = process_memory(self._context.device)
            explained = sum(each.now for purpose, each in held.items() if purpose not in not_on(self._context.device))
            held |= {"process": whole, "unexplained": Held(whole.now - explained, whole.now - explained)}
        return held

    def traffic(self) -> Mapping[str, Mapping[str, Sent]]:
        """Return what this rank has sent since it was wrapped: calls, messages and bytes by unit and purpose.

        Gathers and reductions also have how long they ran, and how long computation waited for them; on a GPU since the
        first call of this method, because timing takes events. Purposes of a unit are `gather`, `take part` (a gather
        that only other ranks need), `reduce`, `reduce over replicas` (hybrid sharding), `used` (in-backward steps) and
        `full state`. `"(no unit)"` has those of the whole model: `order negotiation`, `gradient flags`, `norm` and
        others. `across` counts bytes to other nodes, of reductions in two levels. Control messages, by which ranks
        compare what they wrap, are not counted.
        """
        return self._context.traffic.by_unit()

    # ---- full parameters ----------------------------------------------------------------------------------------

    def gathered(self, *names: str, writeback: bool = True) -> AbstractContextManager[None]:
        """Unshard the module's own parameters inside: those of the units that have `names`, or all.

        They can be read, used in computations with gradients and, with `writeback`, changed in place under
        `torch.no_grad()`. Every rank must make the same changes: of the full parameters each writes its own shard back.
        After an exception inside nothing is written. To be called by every rank.

        `torch.export` and `torch.jit.trace` record the wrapped module here. Use and save what they return here, too:
        its weights are those of the model.

        Raises:
            LayoutError: there is no parameter of such a name.
        """
        self._recover()
        self._backward.follow_requires_grad()
        return self._full.gathered(names, writeback=writeback)

    def full_state_dict(self, *, rank: int | None = None) -> dict[str, Tensor]:
        """Return copies of all parameters and persistent buffers, with original names and shapes.

        They are on the CPU, and in the precision in which they are kept. Units are gathered one after the other.
        Ignored parameters are this rank's. To be called by every rank.

        Args:
            rank: the only rank that gets them; the others get an empty dict. `None`: every rank.

        Raises:
            NonFiniteError: `AdamW(in_backward=True)` has left NaNs in a step.
        """
        self._recover()
        self._in_backward.check()
        return self._full.state_dict(rank)

    def load_full_state_dict(self, state_dict: Mapping[str, Tensor] | None, strict: bool = True) -> Any:
        """Load rank 0's `state_dict`, as `full_state_dict` or an unsharded model returns it.

        What other ranks pass is not used. Ignored parameters, which are each rank's own, and the optimizer state stay
        as they are. Collective: every rank must call it.

        Args:
            state_dict: whole tensors by the names of the model.
            strict: whether names must be those of the model. If `False`, what `state_dict` lacks keeps its values, and
                unknown names are ignored.

        Returns:
            What `nn.Module.load_state_dict` returns, on every rank: the names that are missing and unexpected.

        Raises:
            LayoutError: on every rank, if names or shapes do not fit; nothing is changed then.
        """
        self._recover()
        given = state_dict or {}
        misfit = self._full.misfit(given, strict=strict, whole=True) if self._context.rank == 0 else None
        agree(self._groups, [], misfit, what="load_full_state_dict", timeout=self._context.timeout)
        self._bridge.gatherer.settle()
        entries = self._full.entries()
        missing, unexpected = self._from_first_rank(self._full.other_names(given))
        kept = self._full.state_dict(0, missing) if missing else {}
        source = {entry: kept.get(name, entry) for name, entry in entries.items()}
        source.update({entry: given[name] for name, entry in entries.items() if name in given})  # by any of tied names
        for unit in self._units:
            broadcast_values(unit, self._context, lambda param: source[param])
        with torch.no_grad():
            for entry, value in source.items():
                if not isinstance(entry, nn.Parameter) and self._context.rank == 0:
                    entry.copy_(value)
        broadcast_buffers(self.module, self._context)
        self._context.trim(keep=0)
        self._bridge.mark_changed()
        return _IncompatibleKeys(missing, unexpected)

    def _from_first_rank(self, names: tuple[list[str], list[str]]) -> tuple[list[str], list[str]]:
        """Return what rank 0 passes. Collective."""
        for group in self._groups.all:
            names = all_gather_json(group, names, "load_full_state_dict", self._context.timeout)[0]
        return names

    def unwrap(self) -> nn.Module:
        """Return the wrapped module as a plain one, with whole weights on every rank. Collective.

        This is the way to another wrapper or trainer, `torch.optim.swa_utils.AveragedModel` or `save_pretrained()`.
        The module and its parameters are those that were wrapped; weights have the precision in which they are kept,
        and no gradients. Afterwards this model raises, as do steps of optimizers that were built from its parameters.

        Raises:
            PhaseError: on every rank, if some rank is inside a forward, a backward, `gathered()` or `EMA.swapped()`, or
                has gradients that are not reduced (`no_sync()`, `parts()`).
        """
        self._recover()
        try:
            self._check_idle()
            problem = None
        except PhaseError as error:
            problem = error
        agree(self._groups, [], problem, what="unwrap", timeout=self._context.timeout)
        self._bridge.gatherer.settle()
        module = self.module
        self._full.make_plain()
        validate.unmark_wrapped(self._units)
        self._hooks.uninstall()
        allow_conversions(module)
        torch_patches.retire(self._bridge)
        for name in vars(self).keys() - vars(nn.Module()).keys():
            delattr(self, name)
        self._modules.clear()
        self._unwrapped = True
        return module

    def _check_idle(self) -> None:
        """Raise inside a forward, a backward, `gathered()`, `EMA.swapped()`, or while gradients are accumulated."""
        if self._hooks.running() or any(unit.users for unit in self._units):
            raise PhaseError("unwrap(): call it outside of forwards, backwards and `gathered()`")
        if self._backward.accumulates() or self._reducer.accumulates:
            raise PhaseError(
                "unwrap(): gradients are accumulated, and not reduced: call it outside of no_sync() and parts(), after "
                "a step or zero_grad() of the model"
            )
        self._in_backward.announce_change()

    def state_dict(  # type: ignore[override]
        self, *, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """Return the sharded state: original names and shapes, of which this rank holds a part. Nothing is gathered.

        Each parameter is a `ShardTensor`, which `torch.distributed.checkpoint` saves and loads at any world size; what
        this rank keeps whole (buffers, all parameters at stage 0) is a plain tensor. As in PyTorch, they are no copies:
        what DCP loads into them is in the model, and `load_state_dict()` makes it known. Pickling (`torch.save`) writes
        this rank's elements only. For whole tensors call `full_state_dict()`; to save a run, `shardlite.save`.

        Args:
            destination, prefix: as in `nn.Module.state_dict`, which passes them if this model is inside another module.
            keep_vars: has no effect, because shards have no history.
        """
        self._recover()
        entries = {f"{prefix}{name}": value for name, value in self._full.sharded_state_dict().items()}
        if destination is None:
            return entries
        destination.update(entries)
        return destination

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a sharded state. To be called by every rank.

        Args:
            state_dict: what `state_dict()` of a model with the same ranks, stage and units returned; or, on each rank,
                whole tensors, of which the rank takes its part.
            strict: whether names must be those of the model.
            assign: must be `False`: shards are views of arenas.

        Returns:
            What `nn.Module.load_state_dict` returns: the names that are missing and unexpected.

        Raises:
            LayoutError: on every rank, if names, shapes or shards do not fit; nothing is changed then.
        """
        self._recover()
        problem = self._full.misfit(state_dict, strict=strict) or self._full.shard_misfit(state_dict)
        if assign:
            problem = LayoutError("load_state_dict(assign=True): shards are views of arenas, which keep their place")
        agree(self._groups, [], problem, what="load_state_dict", timeout=self._context.timeout)
        self._bridge.gatherer.settle()
        self._full.take_sharded(state_dict)
        self._bridge.mark_changed()
        return _IncompatibleKeys(*self._full.other_names(state_dict))

    def _load_from_state_dict(self, _: Any, prefix: str, *__: Any) -> None:
        """Raise: PyTorch calls this where the model is inside the module whose `load_state_dict()` was called."""
        raise LayoutError(
            f"load_state_dict() of a module with a ShardLite model inside, {prefix.removesuffix('.')!r}: load the "
            "ShardLite model by its own load_state_dict() or load_full_state_dict(), and the rest by itself"
        )

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> Any:
        """Raise: `DistributedDataParallel` looks here before it gives all ranks the first one's parameters."""
        raise LayoutError(
            "a ShardLite model averages gradients itself, and DistributedDataParallel would overwrite the shards of "
            f"all ranks with the first rank's: call the model itself. If a tracer was given the model: {NO_GRAPH}"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "ShardLite":
        """Refuse to move or convert the model, unless that changes nothing."""
        self.module._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    # ---- construction -------------------------------------------------------------------------------------------

    def _build(self, plan: Plan, init: Init) -> list[Unit]:
        """Move the parameters into arenas, and let those on the meta device have values.

        Raises:
            LayoutError: on every rank, if some have none; the module is of no more use then.
        """
        context = self._context
        units = build_units(plan, self._placement)
        initializer = Initializer(self.module, init, plan.device, first=context.rank == 0)
        broadcast_init(plan.units, units, self.module, context, initializer)
        validate.mark_wrapped(units)
        agree(self._groups, [], initializer.trouble(), what="initial values", timeout=context.timeout)
        broadcast_buffers(self.module, context)
        for flat in flats_of(units):
            for memory in (flat.local, flat.low, flat.full):
                if memory is not None:
                    self.ledger.track("parameters", memory)
        for buffer in self.module.buffers():
            self.ledger.track("buffers", buffer)
        context.trim(keep=0)
        weakref.finalize(self, _give_back, context.transports).atexit = False
        return units

    def _connect(self, plan: Plan, prefetch: int, diagnose: bool) -> None:
        """Build what drives the units from the bottom up: weights, gradients, hooks, and the bridge to optimizers."""
        context, units, single_rank = self._context, self._units, self._placement.single_rank
        flats = flats_of(units)
        gatherer: Gatherer | ResidentWeights
        if self._placement.permanent:
            gatherer = ResidentWeights(units, context)
        else:
            gatherer = Gatherer(units, context, prefetch=prefetch)
        shards = Shards(units, self.trace)
        self._in_backward = InBackwardOptimizer(shards, gatherer)
        reduced = [] if single_rank else units
        total = None if self._parts is None else self._parts.total
        self._reducer = Reducer(reduced, context, self._in_backward, stage=self.stage, diagnose=diagnose, parts=total)
        self._backward = Backward(self._reducer, gatherer, units, context.streams, self._parts)
        self._full = FullParameters(self.module, units, context, gatherer, self._backward.calls)
        self._hooks = ModuleHooks(self._backward, gatherer)
        solo = SoloGradientFlags(flats, context.device, diagnose=diagnose) if single_rank else None
        nonfinite = solo.nonfinite if solo else self._reducer.results.nonfinite
        self._bridge = OptimizerBridge(
            shards=shards,
            skips=Skips(nonfinite, context.device, context.rank, warns=not diagnose),
            clipper=Clipper(flats, context, self._reducer.results.reduced_norm, by_blocks=self._parts is not None),
            context=context,
            in_backward=self._in_backward,
            backward=self._backward,
            hooks=self._hooks,
            gatherer=gatherer,
            place=f"rank {context.rank} of {context.world_size} (stage {self.stage})",
        )
        if not single_rank:
            modules = needs(self.module, plan.units, units)
            roots = [unit.module for unit in plan.units]
            self._hooks.install(modules, param_locations(self.module, units), roots, keeps=self._bridge)
            attach_all(units, self._hooks, self._reducer)
        self._backward.catch_gradients()
        torch_patches.watch(self._bridge)
        adopt(shards.by_param(), part_of(units))

    def _recover(self) -> None:
        """End what an exception has left unfinished: other ranks may not have come to theirs, and wait in it."""
        if self._forwards == 0:
            self._hooks.reset()
        self._backward.repair()

    @_uncompiled
    def _share_buffers(self) -> None:
        if self._first_ranks is not None and not in_backward():
            self._first_ranks.before_forward(trains=torch.is_grad_enabled() and not self._backward.accumulates())

    @_uncompiled
    def _ready_for_forward(self) -> None:
        self._recover()
        self._bridge.shards.check()


# ---- access for checkpoints, averages and measurements --------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ModelState:
    """The parts of a wrapped model that checkpoints and averages read and change."""

    ranks: Ranks
    context: Context
    units: Sequence[Unit]
    ignored: Collection[Tensor]
    """Parameters that each rank trains by itself."""

    shard: int | None
    """Index of the shard of each flat that this rank keeps; `None` if it keeps all of it."""

    loops: PartLoop | None
    """Loops over parts, with `order="tree"`."""

    bridge: OptimizerBridge

    def shard_tensors(self) -> dict[Tensor, Callable[..., ShardTensor]]:
        """Return for each shard a function that makes a `ShardTensor` of a tensor like it; none if none is partial."""
        return self.bridge.shards.shard_tensors(self.context)

    def settle(self) -> None:
        """Wait until no rank needs the current weights."""
        self.bridge.gatherer.end_pass()
        self.bridge.gatherer.settle()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Overwrite weights and optimizer state inside.

        Raises:
            PhaseError: the model has averaged weights now.
        """
        self.bridge.in_backward.announce_change()
        self.settle()
        try:
            yield
        finally:
            self.bridge.mark_changed()


def state_of(model: ShardLite) -> ModelState:
    """Return access to the state of a wrapped model. No other module reads private attributes of `ShardLite`."""
    return ModelState(
        ranks=model._groups,
        context=model._context,
        units=model._units,
        ignored=model._ignored,
        shard=model._placement.rank,
        loops=model._parts,
        bridge=model._bridge,
    )
