"""Options: precision, memory limit and route of messages. Environment variables are read in this file only."""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal, cast, get_args

import torch
from torch import nn

Algorithm = Literal["ring", "bidirectional", "direct", "hierarchical", "halving"]
"""The names of the schedules by which ranks exchange messages in a collective."""

ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)

COMPUTE = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""Dtypes in which forward and backward may run."""

WIRE = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes in which gradients may be summed. Gradients of fp64 weights are always summed in fp64."""

LONGEST = timedelta(days=36500)
"""The longest timeout. Clocks that count nanoseconds overflow after 292 years."""

QUANTIZABLE = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of weights that a gather can send as 8-bit codes."""

Keep = type[nn.Module] | str | Iterable[type[nn.Module] | str] | Callable[[str, nn.Module], torch.dtype | None] | None
"""What is not computed in `Precision.compute`."""


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Select the dtypes of computation, reduction and optimizer.

    The options apply to floating-point parameters only. The optimizer steps a trainable parameter in fp32 or fp64, even
    if the parameter was wrapped in a narrower dtype, because most updates are too small for a narrower dtype. Integer
    parameters and frozen parameters are stored in their own dtype.

    Raises:
        TypeError: `quantized_gather` is neither a bool nor callable, or `keep` has a wrong type.
        ValueError: a dtype is not supported for its purpose, `keep` was passed without `compute`, or
            `master="split24"` without `compute=torch.bfloat16`.

    Example:
        >>> ShardLite(model, precision=Precision(compute=torch.bfloat16))
    """

    compute: torch.dtype | None = None
    """Dtype of gathered weights, and so of forward and backward. Inputs are cast to this dtype. `None`: each parameter
    is gathered in its own dtype, and inputs are not cast.
    """

    keep: Keep = None
    """What keeps fp32 (or another dtype) beside `compute`: module classes, names, or `callable(name, module) -> dtype`.
    A name is a part of a parameter's name between dots, such as `"router"` or `"mlp.gate.weight"`, and may contain
    `*`. The function decides for each module, and for the modules inside it unless it decides for these too; `None`
    leaves the decision to the enclosing module. The name of the whole model is empty. Modules cast their inputs, see
    `docs/precision.md`. `None`: what the model declares in `_keep_in_fp32_modules`. Norms with running statistics
    always have the dtype of their statistics.
    """

    reduce: torch.dtype = torch.float32
    """Dtype in which gradients are accumulated and summed over the ranks. In bf16, each addition along the ring rounds,
    which causes an error of about `sqrt(W)` units in the last place of bf16 with `W` ranks. A single rank that casts no
    weights does not round gradients.
    """

    master: torch.dtype | Literal["split24"] = torch.float32
    """Dtype of the weights that the optimizer steps. fp64 parameters stay fp64. `"split24"` keeps the upper 24 bits of
    fp32 numbers in two parts: a bf16 part, which is gathered, and 8 further bits. The weights then take 3 bytes per
    element, and need no copy in the compute dtype. `"split24"` requires `compute=torch.bfloat16` and `shardlite.AdamW`.
    """

    output: torch.dtype | None = None
    """Dtype to which floating-point outputs of the model are cast. `None`: outputs are not cast."""

    quantized_gather: bool | Callable[[str, nn.Module], bool] = False
    """Whether all-gathers send weights as 8-bit codes, 33 bytes for 32 weights. Ranks compute with the decoded values.
    The optimizer steps weights of full precision. A function `callable(name, module) -> bool` decides for each unit.
    The name of the root unit is empty. Stage 3 only. See `docs/precision.md`.
    """

    diagnose: bool = False
    """Whether to warn if a gradient is not finite. The warning names the parameter and the rank. If `diagnose` is set,
    the host waits for the device in each backward.
    """

    def __post_init__(self) -> None:
        """Check the options. A class, a name or a list of them becomes a tuple."""
        object.__setattr__(self, "keep", _entries_of(self.keep))
        if self.keep is not None and self.compute is None:
            raise ValueError("Precision: keep says what is not computed in the dtype `compute`: pass compute too")
        if not isinstance(self.quantized_gather, bool) and not callable(self.quantized_gather):
            raise TypeError(
                "Precision: quantized_gather must be a bool or callable(name, module) -> bool, got "
                f"{self.quantized_gather!r}"
            )
        for name, dtype, allowed in (
            ("compute", self.compute, (None, *COMPUTE)),
            ("reduce", self.reduce, WIRE),
            ("master", self.master, (torch.float32, "split24")),
            ("output", self.output, (None, *COMPUTE)),
        ):
            if dtype not in allowed:
                choices = ", ".join(str(choice) for choice in allowed)
                raise ValueError(f"Precision: {name} must be one of {choices}; got {dtype!r}")
        if self.master == "split24" and self.compute != torch.bfloat16:
            raise ValueError(
                'Precision: master="split24" keeps weights as bf16 and 8 further bits, so it requires '
                f"compute=torch.bfloat16; got compute={self.compute}"
            )

    def master_of(self, dtype: torch.dtype, *, trainable: bool) -> torch.dtype:
        """Return the dtype in which a parameter of `dtype` is stepped, and stored unless it is split."""
        if not (trainable and dtype.to_real().is_floating_point):
            return dtype
        return torch.promote_types(dtype, torch.float32)

    def splits(self, master: torch.dtype, compute: torch.dtype, *, trainable: bool) -> bool:
        """Return whether a parameter is stored in two parts, given the dtypes in which it is stepped and gathered."""
        upper = (master, compute) == (torch.float32, torch.bfloat16)  # a kept parameter is not gathered in bf16
        return self.master == "split24" and trainable and upper

    def compute_of(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which a parameter of `dtype` is gathered."""
        return self.compute if self.compute is not None and dtype in COMPUTE else dtype

    def reduce_of(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients of weights stored in `dtype` are summed."""
        return torch.float64 if dtype.to_real() == torch.float64 else self.reduce


def _entries_of(keep: Any) -> Keep:
    """Return `keep` as `None`, a function, or a tuple of classes and names.

    Raises:
        TypeError: `keep` is none of these.
    """
    if keep is None or (callable(keep) and not isinstance(keep, type | nn.Module)):
        return cast(Keep, keep)
    entries = (keep,) if isinstance(keep, str | type) or not isinstance(keep, Iterable) else tuple(keep)
    for each in entries:
        if not ((each != "") if isinstance(each, str) else isinstance(each, type) and issubclass(each, nn.Module)):
            raise TypeError(
                "Precision: keep takes module classes, names, or callable(name, module) -> dtype; got "
                f"{type(each).__name__ if isinstance(each, nn.Module) else repr(each)}"
                f"{', a module: pass its class or its name' * isinstance(each, nn.Module)}"
            )
    return entries


STATES = ("fp32", "bf16", "int8")
"""Formats in which `AdamW` can store its moments."""


@dataclass(frozen=True, kw_only=True)
class MemoryLimit:
    """Limit the memory of a rank, and describe the memory that the rank needs besides the wrapped model.

    `ShardLite(..., memory_limit=nbytes)` is short for `MemoryLimit(nbytes=nbytes)`.

    Raises:
        ValueError: `nbytes` is not positive, `activations` is negative, or the format `state` is unknown.

    Example:
        >>> ShardLite(model, memory_limit=MemoryLimit(nbytes=80 * 10**9, state="int8", activations=12 * 10**9))
    """

    nbytes: int
    """Maximum number of bytes that a rank may hold."""

    state: Literal["fp32", "bf16", "int8"] = "fp32"
    """Format of the optimizer's moments. PyTorch's optimizers with two moments count as `"fp32"`."""

    in_backward: bool = False
    """Whether the program will use an optimizer that steps in the backward."""

    activations: int = 0
    """Peak number of bytes of the program's own tensors. `shardlite plan` predicts this number for a batch."""

    def __post_init__(self) -> None:
        """Check the options."""
        if self.nbytes <= 0 or self.activations < 0:
            raise ValueError(
                f"memory_limit must be above 0 and activations at least 0, in bytes; got {self.nbytes} and "
                f"{self.activations}"
            )
        if self.state not in STATES:
            raise ValueError(f"memory_limit: state must be one of {', '.join(STATES)}, got {self.state!r}")


def memory_limit_of(limit: "int | MemoryLimit | None") -> "MemoryLimit | None":
    """Return a memory limit as a `MemoryLimit`, or `None` if `limit` is `None`.

    Raises:
        TypeError: `limit` is neither a number of bytes nor a `MemoryLimit`.
    """
    if limit is None or isinstance(limit, MemoryLimit):
        return limit
    if isinstance(limit, bool) or not isinstance(limit, int):
        raise TypeError(f"memory_limit takes a number of bytes or a MemoryLimit, got {limit!r}")
    return MemoryLimit(nbytes=limit)


TransportName = Literal["auto", "shared_memory", "symmetric_memory", "p2p", "collectives"]
ReduceName = Literal["exact", "fast"]
AlgorithmName = Literal["auto"] | Algorithm
OrderName = Literal["ring", "tree"]


@dataclass(frozen=True, kw_only=True)
class Route:
    """Select how messages travel between ranks, and the order in which gradients are added.

    Raises:
        TypeError: an option has a wrong type.
        ValueError: an option is unknown, or options exclude each other.

    Example:
        >>> ShardLite(model, route=Route(transport="p2p", algorithm="bidirectional"))
        >>> ShardLite(model, route=Route(order="tree", parts=8))
    """

    transport: TransportName = "auto"
    """`"shared_memory"`: CPU tensors of processes on one host are exchanged through shared memory.
    `"symmetric_memory"`: CUDA tensors go through memory that all GPUs of one host can read (PyTorch's symmetric memory;
    64 MiB per rank and connection). This transport is experimental, and has not been tested between GPUs. `"p2p"`:
    point-to-point messages of the process group (NCCL, gloo). Gloo stages CUDA tensors in pinned memory.
    `"collectives"`: collectives of the process group (NCCL, or gloo for CPU tensors), with the same bits as the ring.
    `"auto"`: CPU tensors use shared memory if it is available, else `"p2p"`. Over NCCL, tensors use `"collectives"`, or
    `"p2p"` if `algorithm` is neither `"auto"` nor `"hierarchical"`. `"auto"` never selects symmetric memory.
    """

    algorithm: AlgorithmName = "auto"
    """Schedule of gathers and reductions, see `docs/rings.md`. `"auto"` selects `"ring"` or `"direct"`, which add in
    the same order. Other schedules add in a different order, so results differ in the last bits. `"hierarchical"` adds
    inside each node first and then across nodes, so the bits depend on the number of ranks per node.
    `transport="collectives"` accepts only `"auto"` and `"hierarchical"`; with `"hierarchical"`, each reduction is two
    exchanges. `transport="symmetric_memory"` accepts only `"auto"`.
    """

    reduce: ReduceName = "exact"
    """`"exact"`: ShardLite fixes the order in which gradients are added. `"fast"`: with the transport `"collectives"`,
    the process group's reduce-scatter adds the gradients. The order of additions and the roundings then depend on the
    backend, its version, the buffer's length and the number of ranks. So the guarantees of `docs/numerics.md` do not
    hold: results differ from those of other transports, stages and runs.
    """

    order: OrderName = "ring"
    """Order in which gradients are added. `"ring"`: in the order of the ranks. `"tree"`: as a balanced binary tree over
    the `parts` of a global batch, so that a run computes the same bits on any number of ranks. With `"tree"`,
    reductions use the algorithm `"halving"`. See `docs/elastic.md`.
    """

    parts: int | None = None
    """Number of parts of each global batch with `order="tree"`: a power of two, and at least the number of ranks.
    `ShardLite.parts()` yields the parts of this rank.
    """

    registered: bool = False
    """Whether gather buffers, gradient buckets and receive buffers of reductions come from NCCL's allocator and are
    registered with their communicator. NCCL can then read these buffers in place, with fewer SMs. Off by default,
    because the effect has not been measured between GPUs. See `docs/rings.md`.
    """

    max_ctas: int | None = None
    """Maximum number of thread blocks, and so of SMs, per NCCL kernel in gathers and reductions. `None`: the limit in
    the process group's options.
    """

    high_priority: bool = True
    """Whether gathers and reductions run on high-priority streams, so that a GPU schedules them before computation.
    These streams are ShardLite's own for collectives, and NCCL's for point-to-point messages.
    """

    def __post_init__(self) -> None:
        """Check the options."""
        self._check_nccl()
        for name, value, names in (
            ("transport", self.transport, get_args(TransportName)),
            ("algorithm", self.algorithm, ("auto", *ALGORITHMS)),
            ("reduce", self.reduce, get_args(ReduceName)),
            ("order", self.order, get_args(OrderName)),
        ):
            if value not in names:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, names))}; got {value!r}")
        whole = {"collectives": ("auto", "hierarchical"), "symmetric_memory": ("auto",)}
        if self.algorithm not in whole.get(self.transport, ("auto", *ALGORITHMS)):
            raise ValueError(
                f"algorithm={self.algorithm!r} is a schedule of messages, and transport={self.transport!r} has none: "
                "leave algorithm='auto', or pass transport='p2p'"
            )
        if self.reduce == "fast" and self.algorithm == "hierarchical":
            raise ValueError(
                "algorithm='hierarchical' fixes the order in which gradients are added, and reduce='fast' leaves it to "
                "the process group: leave algorithm='auto', or reduce='exact'"
            )
        if self.order == "ring" and self.parts is not None:
            raise ValueError(f"parts={self.parts!r} requires order='tree': pass both, or neither")
        if self.order == "tree" and (type(self.parts) is not int or self.parts.bit_count() != 1):
            raise ValueError(
                "order='tree' requires parts=P, the number of parts of each global batch: a power of two; got "
                f"parts={self.parts!r}"
            )
        if self.order == "tree" and (self.reduce != "exact" or self.algorithm not in ("auto", "halving")):
            raise ValueError(
                f"order='tree' fixes the order in which gradients are added, but reduce={self.reduce!r} with "
                f"algorithm={self.algorithm!r} adds in a different order: leave reduce='exact' and algorithm='auto'"
            )

    def _check_nccl(self) -> None:
        """Check the options for NCCL communicators."""
        for name, value in (("registered", self.registered), ("high_priority", self.high_priority)):
            if not isinstance(value, bool):
                raise TypeError(f"{name} must be True or False, got {value!r}")
        if self.max_ctas is None:
            return
        if isinstance(self.max_ctas, bool) or not isinstance(self.max_ctas, int):
            raise TypeError(f"max_ctas must be a number of thread blocks or None, got {self.max_ctas!r}")
        if self.max_ctas < 1:
            raise ValueError(f"max_ctas must be at least 1, got {self.max_ctas}")

    def of_nccl(self) -> str:
        """Return the options for NCCL communicators that differ from their defaults, written as arguments."""
        asked = {name: getattr(self, name) for name, default in _OF_NCCL.items() if getattr(self, name) != default}
        return ", ".join(f"{name}={value!r}" for name, value in asked.items())

    def without_nccl(self) -> "Route":
        """Return the route with default options for NCCL communicators, for tensors that NCCL does not send."""
        return replace(self, **_OF_NCCL)


_OF_NCCL: dict[str, Any] = {name: getattr(Route, name) for name in ("registered", "max_ctas", "high_priority")}
"""Defaults of the options for NCCL communicators."""


def check_records(route: Route, precision: Precision) -> None:
    """Raise `TypeError` if an argument of `ShardLite` is not the record that its name says."""
    for name, record, kind in (("precision", precision, Precision), ("route", route, Route)):
        if not isinstance(record, kind):
            raise TypeError(f"{name} takes a shardlite.{kind.__name__}, got {record!r}")


def with_environment(route: Route) -> Route:
    """Return `route`, in which the environment variable `SHARDLITE_TRANSPORT` replaces the transport `"auto"`.

    Raises:
        ValueError: the variable does not name a transport, or the transport excludes another option of the route.
    """
    named = os.environ.get("SHARDLITE_TRANSPORT", "auto")
    return route if route.transport != "auto" else replace(route, transport=cast(TransportName, named))


def check_timeout(timeout: timedelta) -> None:
    """Check a timeout.

    Raises:
        TypeError: `timeout` is not a `timedelta`.
        ValueError: `timeout` is not positive.
    """
    if not isinstance(timeout, timedelta):
        raise TypeError(f"timeout must be a datetime.timedelta, got {timeout!r}")
    if not timedelta(0) < timeout <= LONGEST:
        raise ValueError(
            f"timeout must be above zero, and at most {LONGEST.days} days, got {timeout}: this is how long ranks wait "
            "for each other"
        )


def devices_may_overlap() -> bool:
    """Return whether ranks on one GPU may use symmetric memory (`TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1`)."""
    return os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "0") == "1"


def streams_share_a_queue() -> bool:
    """Return whether all streams of a GPU share one hardware queue (`CUDA_DEVICE_MAX_CONNECTIONS=1`)."""
    return os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"


def launched_ranks() -> int:
    """Return the number of processes that a launcher has started (`WORLD_SIZE`), or 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def poison_evicted_buffers() -> bool:
    """Return whether buffers are filled with NaN when their unit is evicted (`SHARDLITE_POISON=1`).

    If the variable is set, code that reads an evicted buffer computes NaN instead of plausible numbers. All tests set
    the variable.
    """
    return os.environ.get("SHARDLITE_POISON", "0") not in ("", "0")
