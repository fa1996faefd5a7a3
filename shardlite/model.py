"""`ShardLite`: a model whose parameters, gradients and optimizer state are sharded over ranks."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from inspect import ismethod
from typing import Any
from warnings import warn

import torch
from shardlite_kernels import chunk_memory
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys
from torch.optim import Optimizer

from shardlite.comm import GroupLike, Ranks, Transport, problem_in, ranks_of
from shardlite.comm.context import share
from shardlite.comm.traffic import Sent
from shardlite.config import (
    MemoryLimit,
    Precision,
    Route,
    check_records,
    memory_limit_of,
    with_environment,
)
from shardlite.engine import cast_floats, in_backward
from shardlite.engine.capture import capture
from shardlite.engine.connect import connect, disconnect, method_of_module, running, uncompiled
from shardlite.engine.module_hooks import NO_GRAPH
from shardlite.engine.part_loop import PartLoop
from shardlite.engine.patches import install_patches
from shardlite.engine.uneven_inputs import Batch
from shardlite.errors import LayoutError, PhaseError, ShardWarning, check_rank, some_of
from shardlite.full import NO_COPY
from shardlite.grads import Mode
from shardlite.optim import accumulating, living
from shardlite.optimizers import hand_over, judge
from shardlite.telemetry import Held, not_on, process_memory
from shardlite.weights import outside_transforms
from shardlite.wrapping import Options, UnitPolicy, can_offload, offload_of
from shardlite.wrapping.allocate import wrap
from shardlite.wrapping.init import Init, broadcast_full
from shardlite.wrapping.partition import UnitRule
from shardlite.wrapping.plan import agree_on_plan
from shardlite.wrapping.validate import unmark_wrapped


def _trim(transports: Iterable[Transport]) -> None:
    """Return a deleted model's memory to the operating system: idle memory now, other memory when it is freed."""
    for transport in transports:
        transport.trim(keep=0)


_OF_DDP = {
    "register_comm_hook": "for gradients that travel in another dtype use Precision(reduce=...)",
    "_set_static_graph": "remove the call, because any graph may change from step to step",
}
"""Methods of `DistributedDataParallel` with another equivalent here."""


class _UnwrappedError(PhaseError, AttributeError):
    """The model was unwrapped. The class is also an `AttributeError`, so that `hasattr` returns `False`."""


class _SignatureOfModule:
    """A method with the signature of the wrapped module's `forward`. Trainers choose inputs by this signature."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method

    def __get__(self, model: "ShardLite | None", _: object = None) -> Any:
        """Bind the method. `inspect.signature` follows `__wrapped__`."""
        if model is None:
            return self._method
        bound: Any = partial(self._method, model)
        bound.__wrapped__ = model.module.forward
        return bound


class ShardLite(nn.Module):
    """Shard a module's parameters, gradients and optimizer state over ranks.

    Wrap the same module on every rank. All ranks start from rank 0's values, so on other ranks the parameters may be on
    the meta device. Build an optimizer from `parameters()` of the wrapped model, and train each rank on its own part of
    the batch. Gradients are averaged over the ranks.

    Args:
        module: the model. It is modified in place. The module and its submodules may still be called.
        stage: ZeRO stage (Rajbhandari et al. 2020). Stage 0 shards nothing (plain data parallelism). Stage 1 shards the
            optimizer state, stage 2 also gradients, and stage 3 also parameters. All stages compute the same bits.
        units: the modules that are gathered as a whole: a module class, a tuple of classes, or `callable(name, module)
            -> bool`. `None` selects the repeated blocks of the model, and large embeddings and heads.
        precision: dtypes of computation, reduction and optimizer, see `shardlite.Precision`.
        reshard_after_forward: whether to free a unit's full parameters after its forward. `False` keeps them until the
            backward, which saves one all-gather per unit. `callable(name, module) -> bool` decides for each unit. Stage
            3 only.
        group: the ranks to shard over. `None` is the default group. A `DeviceMesh` of one dimension is also accepted. A
            mesh of two dimensions (replicate, shard) selects hybrid sharding: the model is sharded within each group of
            the second dimension.
        ignore: modules and parameters that are not sharded. Each rank trains its own copies of them, and the gradients
            of these copies are not averaged.
        replicate: modules and parameters that every rank keeps in full at any stage, for example a router or a module
            that is called outside of the model's forward. Their gradients are averaged, at the end of the backward, and
            every rank steps them, as at stage 0. The module's own parameters can be read at any time. Quantized weights
            of torchao may be here, if they are frozen, or in `ignore`.
        device: device of shards and buffers. Defaults to the device of the parameters. If all parameters are on the
            meta device, the default is the current CUDA device if the group supports CUDA, else the CPU.
        init: function that initializes tensors on the meta device. Rank 0 calls it with each module that owns such
            parameters or buffers, children first, as `nn.Module.apply` does. The function must write all parameters and
            buffers that the module owns, and nothing outside the module's unit, because memory is allocated unit by
            unit. `None` calls `reset_parameters()`. A tied parameter is initialized with the first module that owns
            the parameter. The random numbers do not depend on stage, units or ranks. If constructors draw random
            numbers in the order of registration, as in `torch.nn`, the weights equal those of a model that was not
            built on the meta device. Only rank 0's random number generators advance.
        prefetch: number of units that are gathered ahead of the unit in use. Each of these units takes a buffer.
        route: how messages travel and the order in which gradients are added, see `shardlite.Route`. `repr` shows the
            transport and algorithm that `"auto"` has selected.
        buffers: `"rank0"` broadcasts rank 0's buffers (running statistics) before a forward, as
            `DistributedDataParallel` does. A broadcast happens only if an earlier forward outside `no_sync()` and
            `torch.no_grad()` has changed the buffers on some rank. `"own"` lets each rank keep its own buffers.
        memory_limit: maximum number of bytes per rank, or a `MemoryLimit`. A model that needs more is refused before
            memory is allocated. The error suggests options that fit.
        offload: which states of `AdamW` are kept in host memory: `True` (all), at least a share of their bytes
            (`0.5`), or all but a number of bytes that may stay on the GPU (`4 * 10**9`). The states are moments and the
            low bits of split weights. Weights and gradients stay on the GPU, and the step runs there, in chunks, with
            the same bits. The option has no effect on a CPU. See `docs/offload.md`.
        timeout: how long a rank waits for another rank to make the same call, or for a message. Over NCCL the process
            group's timeout applies to messages.

    Raises:
        LayoutError: there is no process group, the module has nothing to shard, ranks wrap different models, `module`
            contains a wrapped model or an uninitialized parameter or buffer, or there is not enough memory.
        CommError: another rank failed or timed out.
        TypeError: an option has a wrong type, or is unknown.
        ValueError: an option has an invalid value.

    Example:
        >>> model = ShardLite(model, precision=Precision(compute=torch.bfloat16))
        >>> optimizer = AdamW(model.parameters(), lr=3e-4)
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
        group: GroupLike = None,
        ignore: Iterable[nn.Module | nn.Parameter] = (),
        replicate: Iterable[nn.Module | nn.Parameter] = (),
        device: torch.device | str | None = None,
        init: Init = None,
        prefetch: int = 1,
        route: Route = Route(),  # noqa: B008 (frozen)
        buffers: str = "rank0",
        memory_limit: int | MemoryLimit | None = None,
        offload: bool | float | None = None,
        timeout: timedelta = timedelta(minutes=10),
    ) -> None:
        super().__init__()
        install_patches()
        check_records(route, precision)
        options = Options(
            stage=stage,
            units=units,
            precision=precision,
            reshard_after_forward=reshard_after_forward,
            ignore=ignore,
            replicate=replicate,
            device=device,
            init=init,
            prefetch=prefetch,
            route=with_environment(route),
            buffers=buffers,
            memory_limit=memory_limit_of(memory_limit),
            offload=offload_of(offload),
            timeout=timeout,
        )
        self.stage, self.precision, self.module = stage, precision, module
        self._unsynced: ExitStack | None = None
        self._wrap(options, ranks_of(group))

    # ---- behavior of a module ---------------------------------------------------------------------------------------

    @torch._disable_dynamo(recursive=False)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward and the hooks that are registered on this model. The hooks may use weights too."""
        if not (self._forward_pre_hooks or self._forward_hooks):
            return super().__call__(*args, **kwargs)
        self._ready_for_forward()
        with self._running():
            return super().__call__(*args, **kwargs)

    @_SignatureOfModule
    @torch._disable_dynamo(recursive=False)  # the module's forward is compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module. Every rank must call it.

        Args:
            args, kwargs: inputs of the module. Floating-point tensors are cast to `precision.compute`, or to the dtype
                that `precision.keep` gives to the whole module.

        Returns:
            The module's outputs. Floating-point tensors are cast to `precision.output`.

        Raises:
            CommError: another rank failed, timed out, or runs a different module.

        Example:
            >>> loss = model(inputs).sum()
        """
        self._ready_for_forward()
        self._share_buffers()
        if self._dtypes.model is not None:
            args, kwargs = cast_floats((args, kwargs), self._dtypes.model)
        with self._running():
            outputs = self.module(*args, **kwargs)
        return outputs if self.precision.output is None else cast_floats(outputs, self.precision.output)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's shards under the original names.

        A shard is a view of the memory that the optimizer steps. If this rank keeps the full parameter, the shard has
        the original shape. Otherwise the shard has shape `[k, 1, ...]`, with the original number of dimensions and `k`
        elements, which may be 0.
        Ignored parameters are yielded unchanged.

        Args:
            prefix, recurse, remove_duplicate: as for `nn.Module.named_parameters`.

        Returns:
            An iterator over names and shards.

        Raises:
            LayoutError: the module has a parameter that was added after wrapping.
        """
        for name, param in self.module.named_parameters(prefix, recurse, remove_duplicate):
            yield name, param if param in self._ignored else self._bridge.shards.of(name, param)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the module's buffers under the original names. Buffers are not sharded.

        Args:
            prefix, recurse, remove_duplicate: as for `nn.Module.named_buffers`.

        Returns:
            An iterator over names and buffers.
        """
        yield from self.module.named_buffers(prefix, recurse, remove_duplicate)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Yield this model and all modules inside it, as `nn.Module.named_modules` does.

        Args:
            args, kwargs: as for `nn.Module.named_modules`.

        Returns:
            An iterator over names and modules.

        Raises:
            LayoutError: `torch.export` is the caller. A wrapped model cannot be exported.
        """
        if torch.compiler.is_exporting():
            raise LayoutError(NO_GRAPH)
        yield from super().named_modules(*args, **kwargs)

    def requires_grad_(self, requires_grad: bool = True) -> "ShardLite":
        """Set `requires_grad` of the module's own parameters. A program may call this between steps.

        Args:
            requires_grad: whether the parameters are trained.

        Returns:
            This model.
        """
        self.module.requires_grad_(requires_grad)
        return self

    def numel(self) -> int:
        """Return the total number of elements of all parameters, over all ranks."""
        return sum(param.numel() for param in self.module.parameters())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients. Unlike `optimizer.zero_grad()`, this also drops gradients accumulated in `no_sync()`.

        Args:
            set_to_none: whether to set gradients to `None` instead of zero.
        """
        self._bridge.hooks.recover()
        super().zero_grad(set_to_none)
        self._reducer.discard()
        self._bridge.forget_counts()

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped module. A method of the module may use weights."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if self._unwrapped:
                raise _UnwrappedError(
                    "this ShardLite model was unwrapped: use the module that unwrap() returned"
                ) from None
            if name in _OF_DDP:
                raise AttributeError(f"ShardLite has no {name}(): {_OF_DDP[name]}") from None
            if name == "module":
                raise
            value = getattr(self.module, name)
        if ismethod(value) and value.__self__ is self.module:
            running = lambda: self._running()  # noqa: E731 (a method that was taken before `unwrap()` must raise)
            return method_of_module(value, running, partial(hand_over, model=self._bridge))
        return value

    def __reduce_ex__(self, _: Any) -> Any:
        """Raise `LayoutError` for `copy.copy` and `pickle`, because connections to other ranks cannot be copied."""
        raise LayoutError(NO_COPY)

    def __deepcopy__(self, _: Any) -> Any:
        """Raise `LayoutError`, because connections to other ranks cannot be copied."""
        raise LayoutError(NO_COPY)

    def extra_repr(self) -> str:
        """Return the stage, number of ranks, route, units, and the parameters that are kept in another dtype."""
        if self._unwrapped:
            return "unwrapped"
        algorithm = self._context.reducing[0].algorithm
        route = f"transport={type(self._context.transport).__name__}, {algorithm=!s}"
        tree = "" if self._parts is None else f", order=tree, parts={self._parts.total}"
        host = sum(any(flat.states is not None for flat in unit.flats) for unit in self._units)
        states = f", states of {host} units in host memory" if host else ""
        kept = f", not in {self.precision.compute}: {some_of(self.kept_names)}" if self.kept_names else ""
        facts = f"stage={self.stage}, ranks={self._context.world_size}, {route}{tree}, units={self.unit_names}"
        return facts + states + kept

    @property
    def unit_names(self) -> list[str]:
        """Names of the units in the order of registration. The unit `(root)` has the parameters of no other unit."""
        return [unit.name for unit in self._units]

    @property
    def kept_names(self) -> list[str]:
        """Names of the parameters that are not gathered in `precision.compute`, see `Precision.keep`."""
        return [name for name, param in self.module.named_parameters() if param in self._dtypes.kept]

    # ---- training ---------------------------------------------------------------------------------------------------

    def adopt(self, optimizer: Optimizer) -> None:
        """Hand shards to an optimizer that was built from the module's parameters before wrapping. Collective.

        Each parameter of this model is replaced by its shard, in the same groups and order. States are cut to shards,
        so each rank must have the same state. Other parameters stay. A second call has no effect. `AdamW` of ShardLite
        is adopted when the model is wrapped.

        Args:
            optimizer: an elementwise optimizer, or a wrapper with such an optimizer as its attribute `optimizer`.

        Raises:
            TypeError: `optimizer` is not an optimizer. Ranks with an optimizer raise `LayoutError` instead.
            LayoutError: the optimizer holds no parameter of this model, is not elementwise, or has other parameters or
                states than on another rank. Raised on every rank; nothing was changed.

        Example:
            >>> optimizer = torch.optim.AdamW(module.parameters())
            >>> model = ShardLite(module)
            >>> model.adopt(optimizer)
        """
        self._bridge.hooks.recover()
        agree = partial(self._context.agree, "adopt", subject="optimizers", loads=False)
        hand_over(optimizer, self._bridge, agree)

    def parts(self, step: int | None = None, *, seed: int = 0) -> Iterator[int]:
        """Iterate over this rank's parts of a global batch. The model must be wrapped with `Route(order="tree")`.

        Run one forward and one backward on each part. The backward of the last part reduces the gradients. All parts
        must have the same number of samples. Gradients are averaged over the parts.

        For each part, PyTorch's random number generators of the CPU and of the model's device are seeded from `seed`,
        `step` and the part's number. So dropout does not depend on the number of ranks. The generators are restored
        after the loop.

        Args:
            step: number of the step. Defaults to the number of finished loops, which `shardlite.save` stores.
            seed: seed of the run.

        Returns:
            An iterator over the numbers of this rank's parts, in ascending order.

        Raises:
            LayoutError: the model was not wrapped with `Route(order="tree")`.
            PhaseError: another loop is running, or a part did not have exactly one backward. Raised inside the loop.

        Example:
            >>> for part in model.parts():
            ...     loss = model(*batch_of(part))
            ...     loss.backward()
        """
        if self._parts is None:
            raise LayoutError(
                "parts(): this model adds in the order of the ring: wrap it with route=Route(order='tree', parts=P)"
            )
        self._bridge.hooks.recover()
        self._reducer.discard()  # drops the gradients of a loop that was left early
        return self._over_parts(self._parts, step, seed)

    def _over_parts(self, parts: PartLoop, step: int | None, seed: int) -> Iterator[int]:
        for part in parts.over(step, seed):
            with self._accumulating(Mode.STEP if part == parts.own[-1] else Mode.PART):
                yield part

    def _refuse_with_parts(self, what: str) -> None:
        if self._parts is not None:
            raise LayoutError(
                f"{what}: order='tree' adds by parts of the global batch: use `for part in model.parts(): ...`, which "
                "has the same number of parts on every rank"
            )

    def no_sync(self, *, sharded: bool = False) -> AbstractContextManager[None]:
        """Accumulate gradients without reducing them.

        Args:
            sharded: `False` keeps full gradients on this rank, and the next backward outside of the context reduces
                their sum. This choice sends the fewest messages. `True` reduces the gradients of each backward into the
                shards. This choice takes the least memory. With replicas (hybrid sharding), it reduces inside a replica
                only, and the next backward outside of the context adds the replicas.

        Returns:
            A context manager. Backwards inside accumulate gradients.

        Raises:
            LayoutError: the model was wrapped with `Route(order="tree")`.

        Example:
            >>> with model.no_sync():
            ...     model(first).backward()
            >>> model(second).backward()
        """
        self._refuse_with_parts("no_sync()")
        if not sharded:
            return self._accumulating(Mode.LOCAL)
        keeps = self._context.replicas is not None or self._bridge.in_backward.steps() is not None
        return self._accumulating(Mode.KEPT if keeps else Mode.SHARDED)

    def count_items(self, items: float | Tensor) -> None:
        """Divide gradients by the number of items of all ranks, for example tokens, instead of averaging over ranks.

        Call this before each backward, with the number of this rank's items in that backward. The loss must be the sum
        over these items. The counts of all backwards before a step are added, inside and outside of `no_sync()`, and
        the sum of their gradients is divided by the total count of all ranks. A step or `zero_grad()` of an optimizer,
        or `zero_grad()` of the model, starts a new total. A second call before the same backward replaces the count. If
        the total is 0, the sum is not divided.

        Args:
            items: the number of items, or a tensor with this number. The host does not wait for a tensor on a GPU. The
                number may have a fraction, which is rounded down to a multiple of 2^-36.

        Raises:
            TypeError: `items` is not a number or a tensor with one number.
            ValueError: `items` is negative, too large or not finite. For a tensor on a GPU, the step is skipped
                instead.
            LayoutError: gradients are reduced in fp16, in which sums of losses overflow.
            PhaseError: `set_gradient_reduction("sum")` was called. If some ranks or some accumulated backwards have no
                count, the backward raises `PhaseError` on every rank, or on a GPU a later backward does.

        Example:
            >>> loss = cross_entropy(model(tokens), labels, ignore_index=-100, reduction="sum")
            >>> model.count_items((labels != -100).sum())
            >>> loss.backward()
        """
        if self.precision.reduce == torch.float16:
            raise LayoutError(
                "count_items(): gradients are reduced in fp16, in which sums of losses over items overflow: use "
                "Precision(reduce=torch.bfloat16) or torch.float32"
            )
        self._bridge.scale.count(items)

    def set_gradient_reduction(self, reduction: str) -> None:
        """Choose whether gradients are averaged or summed over the ranks. All ranks must make the same choice.

        Args:
            reduction: `"mean"` divides the sum of gradients by the number of ranks, or by the counts of `count_items`.
                `"sum"` does not divide. With `Route(order="tree")`, the parts of the global batch take the place of
                ranks.

        Raises:
            ValueError: `reduction` is neither `"mean"` nor `"sum"`.
            PhaseError: gradients are accumulated, and not reduced, or `count_items` was called for the next backward.
                If ranks make different choices, the next backward raises `PhaseError` on every rank, or on a GPU a
                later backward does.

        Example:
            >>> model.set_gradient_reduction("sum")
        """
        if reduction not in ("mean", "sum"):
            raise ValueError(f"set_gradient_reduction() takes 'mean' or 'sum', got {reduction!r}")
        self._bridge.hooks.recover()
        scale, divides = self._bridge.scale, reduction == "mean"
        if not divides and scale.is_next_counted:
            raise PhaseError(
                "set_gradient_reduction('sum'): count_items() was called for the next backward, whose gradients it "
                "divides: run that backward first"
            )
        if self._reducer.accumulates or (scale.accumulates and divides != scale.divides):
            raise PhaseError(
                "set_gradient_reduction(): gradients are accumulated, and not reduced: call it after a step, or call "
                "zero_grad() of the model first"
            )
        scale.divides = divides

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether backwards reduce gradients, as in `DistributedDataParallel`.

        `False` is equivalent to entering `no_sync()`. `True` is equivalent to leaving `no_sync()`.
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
        with accumulating(own), self._bridge.backward.accumulating(mode):
            yield

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the global norm of all gradients. Collective. The host does not wait for the device.

        `torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)` gives the same result. Ignored parameters are not
        included.

        Args:
            max_norm: maximum norm.
            norm_type: exponent of the norm: positive, or `inf`.

        Returns:
            The norm before clipping, [].

        Raises:
            PhaseError: the optimizer steps in the backward, or gradients are accumulated and not reduced.

        Example:
            >>> norm = model.clip_grad_norm_(1.0)
            >>> optimizer.step()
        """
        self._bridge.in_backward.refuse("clip_grad_norm_")
        self._bridge.check_reduced("clip_grad_norm_")
        clipper = self._bridge.clipper
        norm = clipper.norm(norm_type)
        clipper.clip(self._bridge.shards, max_norm, norm)
        return norm

    def capture(self, step: Callable[..., Any], warmup: int = 3) -> Callable[..., Any]:
        """Return a function that takes the same training steps as `step`, on a GPU by replaying a CUDA graph.

        `step` takes one training step: forward, backward, clipping and `optimizer.step()`. The first `warmup` calls run
        `step`. The next call captures `step` in a graph. This call and all later calls replay the graph, which costs
        the host a few calls. Each call trains its own batch, once. Every rank must call the function equally often.

        Inputs are copied to fixed addresses. Outputs are detached tensors that the next call overwrites: clone an
        output to keep it. A replay runs no Python code: prints and hooks do not run, and numbers that are not inputs
        keep their values from the capture. New shapes or constants among the inputs need another capture. After a
        change on all ranks (`gathered()`, loaded weights, a step without the function, `requires_grad`, an optimizer's
        options), the next `warmup` calls run the step again before the next capture. So pass a learning rate that
        changes often as a tensor on the GPU.

        On a CPU, the result is `step` itself, with a warning. `docs/gpu.md` lists the rules for `step`.

        Args:
            step: function of tensors on the model's device, and of numbers and strings, alone or in lists, tuples and
                dicts. It returns a loss, or tensors in such containers.
            warmup: number of steps before a capture.

        Returns:
            A function with the arguments of `step`.

        Raises:
            TypeError: `step` is not a function, or the returned function gets an input whose changes a graph would not
                see.
            ValueError: `warmup` is less than 1, or an input is not on the GPU or requires a gradient.
            LayoutError: the model has a transport or an option that needs the host in each step, or another rank could
                not capture the step.
            PhaseError: the step cannot be captured. The error of PyTorch is its cause. The state is as before the call.

        Example:
            >>> step = model.capture(step)
            >>> for inputs, labels in batches:
            ...     loss = step(inputs, labels)
        """
        return capture(step, warmup, self._bridge, self._reducer, self.module)

    def join(self, batches: Iterable[Batch] | None = None, *, also: Iterable["ShardLite"] = ()) -> Iterator[Batch]:
        """Iterate over this rank's `batches`, and repeat the final batch until all ranks have run out.

        So ranks with different numbers of batches finish together. A rank that has run out (`model.joined`) still
        computes, because other ranks need its shards. The gradients of that rank do not count: gradients are averaged
        over the ranks that have a batch. Running statistics (batch norm) of that rank see the final batch again. Every
        rank must call `join` with at least one batch, and must not leave the loop early. The host waits for the other
        ranks once per batch.

        Args:
            batches: this rank's batches.
            also: other wrapped models over the same ranks that are trained in the loop.

        Returns:
            An iterator over batches, of the same length on every rank.

        Raises:
            LayoutError: a rank has no batch, or a model was wrapped with `Route(order="tree")`. Raised on every rank.
            TypeError: `batches` is missing.

        Example:
            >>> for batch in model.join(loader):
            ...     model(batch).backward()
            ...     optimizer.step()
        """
        if batches is None:
            raise TypeError("join() is a loop here, and no context as in DDP: `for batch in model.join(batches):`")
        models = [self, *also]
        for model in models:
            model._refuse_with_parts("join()")
        return self._join.over(
            batches, [model._reducer for model in models], [model._bridge.hooks.recover for model in models]
        )

    @property
    def joined(self) -> bool:
        """Whether this rank has run out of batches in `join`. If so, its losses and gradients do not count."""
        return self._join.joined

    @property
    def skipped_steps(self) -> int:
        """Number of steps skipped because a gradient on any rank had a NaN or Inf. The host waits for the device.

        Steps that a gradient scaler skips are not counted.
        """
        return self._bridge.skips.total()

    # ---- memory and traffic -----------------------------------------------------------------------------------------

    def memory(self, *, process: bool = False) -> dict[str, Held]:
        """Return the number of bytes that this rank holds for the model, by purpose.

        Each storage is counted once, from its allocation until it is freed:

        - `parameters`: shards, and permanent full weights
        - `gather buffers`: full weights while they are needed
        - `gradient buckets`: gradients of this rank before they are reduced
        - `gradients`: gradient shards, or full gradients at stages 0 and 1
        - `optimizer state`: the state of all optimizers that have stepped the model
        - `offloaded state`: with `offload`, moments and low bits of split weights in pinned host memory
        - `offload buffers`: with `offload`, memory on the GPU through which offloaded states are copied
        - `whole parameters`: weights, gradients and updates that this rank owns, during a step of `WholeParameters`
        - `averages`: the averages of `EMA`
        - `buffers`: the module's buffers
        - `staging`: memory for partial sums, 8-bit codes, broadcast values and, in `full_state_dict()` and
          `full_parameters()`, full weights that arrive from other ranks
        - `copies`: copies of the shards, made by `gathered(writeback=True)` before the program changes weights
        - `chunks of a step`: intermediate values of an optimizer's step on a CPU, for all models in the process
        - `messages`, `mailboxes`, `pinned memory`: memory of the transport, for all models over the same ranks
        - `idle shared memory`: freed pages that the next allocation reuses

        `model.ledger.reset_peak()` resets the peaks, except those of messages, mailboxes and pinned memory.

        Any thread may call this. On a thread that does not run the model, `optimizer state` and, on a single rank,
        `gradients` are not current: they are updated by the next step after each call.

        Args:
            process: also return `process`, the memory of this process, and `unexplained`, the part outside the purposes
                above: interpreter, libraries, activations, memory that `malloc` caches. On a CPU, `process` is the
                proportional set size, and its peak is the largest resident set size, which counts shared pages in full.
                On CUDA, `process` and its peak are the bytes that PyTorch's allocator has reserved.

        Returns:
            For each purpose the bytes held `now`, and their `peak` since the latest reset.

        Example:
            >>> model.memory()["gather buffers"].peak
        """
        if self._bridge.hooks.is_thread_of_model:
            self._bridge.track_memory()
        else:
            self.ledger.awaits_step = True
        for tensor in chunk_memory():
            self.ledger.track("chunks of a step", tensor)
        held = self._context.held()
        if process:
            every = process_memory(self._context.device)
            explained = sum(each.now for purpose, each in held.items() if purpose not in not_on(self._context.device))
            held |= {"process": every, "unexplained": Held(every.now - explained, every.now - explained)}
        return held

    def traffic(self) -> Mapping[str, Mapping[str, Sent]]:
        """Return this rank's traffic since the model was wrapped, by unit and purpose.

        Purposes of a unit are `gather`, `take part` (a gather that only other ranks need), `reduce`, `reduce over
        replicas` (hybrid sharding), `used` (in-backward steps), `full state`, and `to owners` and `from owners`
        (`WholeParameters`). The unit `"(no unit)"` stands for the whole model, with purposes such as `order
        negotiation`, `gradient flags` and `norm`. Control messages, by which ranks compare the models that they wrap,
        are not counted.

        Returns:
            For each unit and purpose, the numbers of calls, messages and bytes. The field `across` is the number of
            bytes that hierarchical reductions send to other nodes. Gathers and reductions also have their duration,
            and the time that computation waited for them (`exposed`). On a GPU, times are measured only after the first
            call of this method.

        Example:
            >>> model.traffic()["blocks.0"]["gather"].nbytes
        """
        return self._context.traffic.by_unit()

    # ---- full parameters --------------------------------------------------------------------------------------------

    def gathered(self, *names: str, writeback: bool = True) -> AbstractContextManager[None]:
        """Unshard the module's own parameters inside the context. Collective.

        Inside the context, the parameters can be read and used in computations with gradients. With `writeback` they
        can also be changed in place under `torch.no_grad()`. Every rank must make the same changes, because each rank
        writes back its own shard only. After an exception inside the context, nothing is written back.

        Inside the context, `torch.export` and `torch.jit.trace` work on `model.module`. Use and save the results of
        these functions inside the context as well, because the results refer to the model's weights.

        Args:
            names: names of parameters. The units of these parameters are unsharded. Defaults to all parameters.
            writeback: whether changes of the parameters are kept.

        Returns:
            A context manager.

        Raises:
            LayoutError: the model has no parameter with one of the names in `names`.

        Example:
            >>> with model.gathered("head.weight"), torch.no_grad():
            ...     model.module.head.weight.zero_()
        """
        self._bridge.hooks.recover()
        self._bridge.backward.follow_requires_grad()
        return self._full.gathered(names, self._bridge.backward.calls, writeback=writeback)

    def full_state_dict(self, *, rank: int | None = None) -> dict[str, Tensor]:
        """Return copies of all parameters and persistent buffers, with original names and shapes. Collective.

        The copies are on the CPU, in the precision in which the model stores them. Units are gathered one after the
        other. Each rank returns its own ignored parameters.

        Args:
            rank: the only rank that returns the copies. Other ranks return an empty dict. `None`: every rank returns
                the copies.

        Returns:
            Full tensors by name.

        Raises:
            NonFiniteError: an in-backward step had gradients that were not finite.
            TypeError: `rank` is neither an int nor `None`.
            ValueError: there is no such rank. Ranks with a valid `rank` raise `LayoutError` instead.
            DesyncError: a rank has skipped a step. Raised on every rank.

        Example:
            >>> torch.save(model.full_state_dict(rank=0), "model.pt")
        """
        self._bridge.hooks.recover()
        check = partial(check_rank, "full_state_dict", rank, self._context.world_size)
        self._context.agree("full_state_dict", problem_in(check, self._bridge.in_backward.check), loads=False)
        return self._full.state_dict(rank)

    def full_parameters(
        self, dtype: torch.dtype | None = None, max_bytes: int | None = None, trainable: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        """Iterate over full parameters on the model's device, for example to send them to an inference engine.

        Collective: every rank must run the whole loop. One unit is gathered at a time, while the next is on its way.
        Parameters come in the order of units, under their original names. A tied parameter comes under each of its
        names, as in `full_state_dict()`. Each rank gets its own ignored parameters, at the end.

        Each tensor is a copy that belongs to the program. To save memory, drop each copy before you request the next.

        If a rank leaves its loop early (by `break` or an exception), the loops of the other ranks raise an error,
        unless these ranks leave early too. Inside the loop, the model and its optimizer cannot be called.

        Args:
            dtype: dtype of floating-point parameters. Each rank casts its shards before they are sent, so a narrow
                dtype takes fewer bytes. Defaults to the dtype in which the model stores the parameters.
            max_bytes: bound on the bytes of gathered weights that this rank holds at once: gathered parameters, and
                the latest copy. Large units are gathered in pieces. `None` means two units and a copy.
            trainable: whether to leave out frozen parameters, for example to get adapters (LoRA) only.

        Returns:
            An iterator over names and tensors.

        Raises:
            TypeError: `dtype` is not a floating-point dtype, or `max_bytes` is not a number. Raised in the loop; ranks
                with valid arguments raise `LayoutError` instead.
            LayoutError: a parameter is too large for `max_bytes`, or ranks pass different arguments. Raised in the
                loop, on every rank.
            PhaseError: a rank is inside a forward, a backward, or `gathered()`, or another rank has left its loop.
                Raised in the loop.
            DesyncError: a rank has skipped a step. Raised in the loop, on every rank.
            CommError: another rank failed, or did not start the loop.

        Example:
            >>> inference_model.load_weights(model.full_parameters(dtype=torch.bfloat16))
        """
        self._bridge.hooks.recover()

        def check() -> None:
            self._bridge.in_backward.check()
            self._bridge.hooks.check_outside("full_parameters()")

        yield from self._full.parameters(dtype, max_bytes, check, trainable=trainable)

    def full_grad(self, name: str) -> Tensor | None:
        """Return a copy of the full gradient of one parameter, as `.grad` has it in a plain model. Collective.

        Call this between the backward and `zero_grad()`. The gradient is the one that the optimizer sees: averaged over
        ranks, divided by counts, or summed. If it was clipped or multiplied by the scale of a gradient scaler, so is
        the copy.

        Args:
            name: original name of the parameter.

        Returns:
            The gradient in the shape of the parameter, or `None` if no rank has used the parameter.

        Raises:
            LayoutError: the model has no parameter of this name, or the parameter is frozen or ignored.
            PhaseError: there are no gradients, they are not reduced (`no_sync()`, `parts()`), or the optimizer steps in
                the backward, so gradients are not kept. All errors are raised on every rank.
            CommError: a rank did not call `full_grad`.

        Example:
            >>> loss.backward()
            >>> model.full_grad("head.weight").norm()
        """
        return self._full.gradient(name, self._check_gradients)

    def _check_gradients(self) -> None:
        """Raise unless gradients can be gathered."""
        self._bridge.hooks.recover()
        if in_backward():
            raise PhaseError("full_grad(): a backward is running: call it after the backward")
        self._bridge.in_backward.refuse("full_grad()")
        self._bridge.check_reduced(
            "full_grad()", local=self._placement.single_rank and self._bridge.backward.accumulates()
        )
        if all(shard.grad is None for shard in self._bridge.shards):
            raise PhaseError("full_grad(): there are no gradients: call it between a backward and zero_grad()")

    def load_full_state_dict(self, state_dict: Mapping[str, Tensor] | None, strict: bool = True) -> Any:
        """Load full tensors from rank 0: the state dict of a plain model, or the result of `full_state_dict()`.

        Collective.

        Ignored parameters and the optimizer state are not changed.

        Args:
            state_dict: full tensors by name. Used on rank 0 only.
            strict: whether names must match those of the model. If `False`, parameters and buffers that `state_dict`
                lacks keep their values, and names that the model lacks are ignored.

        Returns:
            `missing_keys` and `unexpected_keys` on every rank, in the form that `nn.Module.load_state_dict` returns.

        Raises:
            LayoutError: names or shapes do not match those of the model. Raised on every rank; nothing was changed.

        Example:
            >>> model.load_full_state_dict(plain.state_dict())
        """
        self._bridge.hooks.recover()
        given = state_dict or {}
        misfit = self._full.misfit(given, strict=strict, full=True) if self._context.rank == 0 else None
        self._context.agree("load_full_state_dict", misfit, loads=strict)
        self._bridge.gatherer.settle()
        missing, unexpected, source = self._full.source_of(given)
        broadcast_full(self.module, self._units, self._context, source)
        self._bridge.mark_changed()
        return _IncompatibleKeys(missing, unexpected)

    def unwrap(self) -> nn.Module:
        """Return the wrapped module as a plain module, with full weights on every rank. Collective.

        Call this before you use another wrapper or trainer, `torch.optim.swa_utils.AveragedModel` or
        `save_pretrained()`. The parameters are the same objects that were wrapped, in the precision in which the model
        stores them, without gradients. Afterwards any use of this model or of its optimizers raises an error.

        Returns:
            The module that was wrapped.

        Raises:
            PhaseError: a rank is inside a forward, a backward, `gathered()` or `EMA.swapped()`, or has gradients that
                are not reduced (`no_sync()`, `parts()`). Raised on every rank.
            DesyncError: a rank has skipped a step. Raised on every rank.

        Example:
            >>> module = model.unwrap()
            >>> module.save_pretrained("weights")
        """
        self._bridge.hooks.recover()
        self._context.agree("unwrap", problem_in(self._check_idle), loads=False)
        self._bridge.gatherer.settle()
        module = self.module
        self._full.make_plain()
        unmark_wrapped(self._units)
        disconnect(self._bridge, module, self._dtypes.inputs)
        for name in vars(self).keys() - vars(nn.Module()).keys():
            delattr(self, name)
        self._modules.clear()
        self._unwrapped = True
        return module

    def _check_idle(self) -> None:
        """Raise inside a forward, a backward, `gathered()` or `EMA.swapped()`, or if gradients are accumulated."""
        self._bridge.hooks.check_outside("unwrap()")
        if self._bridge.backward.accumulates() or self._reducer.accumulates:
            raise PhaseError(
                "unwrap(): gradients are accumulated, and not reduced: call it outside of no_sync() and parts(), after "
                "a step or zero_grad() of the model"
            )
        self._bridge.in_backward.announce_change()

    def state_dict(  # type: ignore[override]
        self, *, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """Return the sharded state under the original names. Nothing is gathered.

        Each parameter is a `ShardTensor`, which `torch.distributed.checkpoint` (DCP) saves and loads at any world size.
        Buffers, and all parameters at stage 0, are plain tensors. The tensors share memory with the model, so DCP loads
        into the model. Call `load_state_dict()` after `dcp.load`. `torch.save` writes this rank's elements only. For
        full tensors call `full_state_dict()`. To save a run call `shardlite.save`.

        Args:
            destination, prefix: as for `nn.Module.state_dict`. The state dict of an enclosing module passes them.
            keep_vars: ignored, because shards have no autograd history.

        Returns:
            Shards by name.

        Example:
            >>> state = {"model": model.state_dict()}
            >>> torch.distributed.checkpoint.load(state, checkpoint_id="checkpoint")
            >>> model.load_state_dict(state["model"])
        """
        self._bridge.hooks.recover()
        entries = {f"{prefix}{name}": value for name, value in self._full.sharded_state_dict().items()}
        if destination is None:
            return entries
        destination.update(entries)
        return destination

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a sharded state. Collective.

        Args:
            state_dict: either the `state_dict()` of a model with the same ranks, stage and units, or a dictionary of
                full tensors. From each full tensor, a rank loads the part that it keeps.
            strict: whether names must match those of the model.
            assign: must be `False`, because shards are views of one block of memory.

        Returns:
            `missing_keys` and `unexpected_keys`, in the form that `nn.Module.load_state_dict` returns.

        Raises:
            LayoutError: names, shapes or shards do not match those of the model. Raised on every rank; nothing was
                changed.

        Example:
            >>> model.load_state_dict(other.state_dict())
        """
        self._bridge.hooks.recover()
        problem = self._full.misfit(state_dict, strict=strict)
        if assign:
            problem = LayoutError(
                "load_state_dict(assign=True): shards are views of one block of memory: leave assign=False"
            )
        self._context.agree("load_state_dict", problem, loads=strict)
        self._bridge.gatherer.settle()
        self._full.take_sharded(state_dict)
        self._bridge.mark_changed()
        return _IncompatibleKeys(*self._full.other_names(state_dict))

    def _load_from_state_dict(self, _: Any, prefix: str, *__: Any) -> None:
        """Raise `LayoutError`. PyTorch calls this for a model inside a module whose `load_state_dict()` is called."""
        raise LayoutError(
            f"load_state_dict() of a module with a ShardLite model inside, {prefix.removesuffix('.')!r}: load the "
            "ShardLite model with its own load_state_dict() or load_full_state_dict(), and the other modules separately"
        )

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> Any:
        """Raise `LayoutError`. `DistributedDataParallel` reads this property before it broadcasts parameters."""
        raise LayoutError(
            "a ShardLite model averages gradients itself, and DistributedDataParallel would overwrite the shards of "
            f"all ranks with the first rank's: call the model itself. If a tracer was given the model: {NO_GRAPH}"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "ShardLite":
        """Refuse to move or convert the model, unless nothing changes."""
        self.module._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    # ---- construction -----------------------------------------------------------------------------------------------

    def _wrap(self, options: Options, ranks: Ranks) -> None:
        """Plan the units with all ranks, allocate them, and build and install their engine."""
        plan = agree_on_plan(self.module, options, ranks, ShardLite)
        if options.memory_limit is not None:
            from shardlite.plan import check_memory_limit  # late: few programs set a limit

            check_memory_limit(self.module, plan, options, ranks.shards)
        if options.offload is not None and not can_offload(plan.device) and ranks.is_first:
            warn(f"offload has no effect: the model is on the {plan.device.type}", ShardWarning, stacklevel=3)
        self._context = share(ranks, plan.device, options.timeout, options.route)
        self.ledger, self.trace = self._context.ledger, self._context.trace
        wrapped = wrap(self.module, plan, options, self._context)
        weakref.finalize(self, _trim, self._context.transports).atexit = False
        self._units, self._placement = wrapped.units, wrapped.placement
        self._ignored, self._dtypes = options.ignored, plan.dtypes
        self._bridge, self._reducer, self._full, self._join, self._parts, self._first_ranks = connect(
            wrapped, weakref.ref(self), judge
        )
        self._running = partial(running, self._context, self._bridge.hooks)
        for optimizer in living():
            hand_over(optimizer, self._bridge)

    @uncompiled
    def _share_buffers(self) -> None:
        if self._first_ranks is not None and not in_backward():
            with outside_transforms():
                self._first_ranks.before_forward(
                    trains=torch.is_grad_enabled() and not self._bridge.backward.accumulates()
                )

    @uncompiled
    def _ready_for_forward(self) -> None:
        self._bridge.hooks.recover()
        self._bridge.shards.check()


# ---- access for checkpoints, extensions and measurements -------------------------------------------------------------


class ModelState:
    """The parts of a wrapped model that checkpoints and `shardlite.extend` use.

    With this class, the code of checkpoints and of `shardlite.extend` reads no private attribute of `ShardLite`.

    Args:
        model: the model.
    """

    def __init__(self, model: ShardLite) -> None:
        if not isinstance(model, ShardLite):
            raise TypeError(f"expected a ShardLite model, got {type(model).__name__}: wrap it first")
        self.ranks, self.context, self.units = model._context.ranks, model._context, model._units
        self.bridge, self.full = model._bridge, model._full
        self.ignored = model._ignored
        """Parameters that each rank trains by itself."""

        self.shard = model._placement.rank
        """Index of this rank's shard of each flat (flat parameter); `None` if this rank keeps all shards."""

        self.loops = model._parts
        """The loops over parts of a global batch. `None` unless `order="tree"`."""

    def settle(self) -> None:
        """Wait until no rank needs the current weights."""
        self.bridge.gatherer.passes.end_pass()
        self.bridge.gatherer.settle()

    @contextmanager
    def changing(self, version: int) -> Iterator[None]:
        """Allow code inside the context to overwrite weights and optimizer state. All ranks pass the same `version`.

        Raises:
            PhaseError: `EMA.swapped()` is active.
        """
        self.bridge.in_backward.announce_change()
        self.settle()
        self.context.version.number = version
        try:
            yield
        finally:
            self.bridge.mark_changed()
