"""The options of a wrapped model, checks of them and of its module, and the tying of parameters that share memory."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.utils.weak import WeakTensorKeyDictionary

from shardlite.build.init import Init
from shardlite.build.partition import UnitPolicy, UnitRule
from shardlite.comm import SUMMABLE, Ranks
from shardlite.config import MemoryLimit, Precision, Route, check_timeout
from shardlite.errors import LayoutError
from shardlite.params import Unit, is_dtensor, storage_key

STAGES = (0, 1, 2, 3)
"""The stages of ZeRO."""

_wrapped = WeakTensorKeyDictionary()
"""Parameters that were ever sharded: their values are elsewhere. Ranks that are threads share this table of the
process, which is safe: entries are set and looked up singly, by identity, and each parameter belongs to one rank.
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments of `ShardLite`, which documents them, as one record."""

    stage: int = 3
    units: UnitPolicy = None
    precision: Precision = field(default_factory=Precision)
    reshard_after_forward: UnitRule = True
    ignored: Collection[Tensor] = frozenset()
    """Parameters that are not sharded."""

    device: torch.device | str | None = None
    init: Init = None
    prefetch: int = 1
    route: Route = field(default_factory=Route)
    buffers: str = "rank0"
    diagnose: bool = False
    memory_limit: MemoryLimit | None = None
    timeout: timedelta = timedelta(minutes=10)

    def __post_init__(self) -> None:
        """Check the types.

        Raises:
            TypeError, ValueError: an option has a wrong type or an invalid value.
        """
        check_timeout(self.timeout)
        if self.init is not None and not callable(self.init):
            raise TypeError(f"init takes a function of a module, as nn.Module.apply does, got {self.init!r}")
        rule = self.reshard_after_forward
        if not isinstance(rule, bool) and not callable(rule):
            raise TypeError(f"reshard_after_forward must be a bool or callable(name, module) -> bool, got {rule!r}")


def mark_wrapped(units: Iterable[Unit]) -> None:
    """Record that the parameters of `units` belong to a wrapped model."""
    for unit in units:
        for param in unit.params():
            _wrapped[param] = True


def unmark_wrapped(units: Iterable[Unit]) -> None:
    """Undo `mark_wrapped`."""
    for unit in units:
        for param in unit.params():
            _wrapped.pop(param, None)  # type: ignore[no-untyped-call]


def split_ignored(ignore: Iterable[nn.Module | nn.Parameter]) -> tuple[list[nn.Module], set[Tensor]]:
    """Return the modules that `ignore` lists, and all parameters that it lists directly or by module.

    Raises:
        LayoutError: an entry is neither a module nor a parameter.
        TypeError: it is not iterable.
    """
    if not isinstance(ignore, Iterable):
        raise TypeError(f"ignore takes a list of modules and parameters, got {type(ignore).__name__}")
    entries = list(ignore)
    modules = [each for each in entries if isinstance(each, nn.Module)]
    params: set[Tensor] = {each for each in entries if isinstance(each, nn.Parameter)}
    if strange := [each for each in entries if not isinstance(each, nn.Module | nn.Parameter)]:
        raise LayoutError(f"ignore takes modules and parameters, got {type(strange[0]).__name__}")
    return modules, params.union(*(each.parameters() for each in modules))


def device_for(module: nn.Module, device: torch.device | str | None, default: torch.device) -> torch.device:
    """Return the device of shards: `device`, or that of the parameters, or `default` if all are on meta.

    Raises:
        LayoutError: it is neither the CPU nor CUDA, or no device.
    """
    if device is None:
        device = next((param.device for param in module.parameters() if not param.is_meta), default)
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise LayoutError(f"device must name the CPU or a CUDA device, got {device!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise LayoutError(f"device={device}: only the CPU and CUDA are supported")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def check_module(
    module: nn.Module, precision: Precision, ignored: Collection[Tensor] = (), *, wrapper: type[nn.Module]
) -> None:
    """Check a module before it is changed.

    Raises:
        TypeError: `module` is not an `nn.Module`.
        LayoutError: the module cannot be wrapped.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"ShardLite wraps an nn.Module, got {type(module).__name__}")
    lazy = [name for name, param in module.named_parameters() if isinstance(param, UninitializedParameter)]
    if lazy:
        raise LayoutError(f"parameter {lazy[0]!r} has no shape yet: run the lazy module once before wrapping")
    inner = [name or "(the module itself)" for name, each in module.named_modules() if isinstance(each, wrapper)]
    if inner:
        raise LayoutError(f"{inner[0]!r} is wrapped already: wrap the whole model once, and name its parts by `units`")
    for name, each in module.named_modules():
        if other := _other_wrapper(each):
            raise LayoutError(f"{name or '(the module itself)'!r} is wrapped by {other}: wrap the plain module instead")
    if torch.is_inference_mode_enabled():
        raise LayoutError("wrap the model outside of torch.inference_mode(): its tensors cannot be trained")
    for name, buffer in module.named_buffers():
        if buffer.layout is not torch.strided:
            raise LayoutError(f"buffer {name!r} is {buffer.layout}: only dense buffers can be sent to all ranks")
    named = [(name, param) for name, param in module.named_parameters() if param not in ignored]
    if not named:
        raise LayoutError(f"{type(module).__name__} has no parameters that are not ignored: there is nothing to shard")
    _check_params(named, precision)


def check_options(module: nn.Module, options: Options, groups: Ranks) -> None:
    """Check the options of a checked module against the module and the ranks.

    Raises:
        TypeError: an option has a wrong type.
        LayoutError: an option is invalid, or does not go with another one.
    """
    stage, prefetch, route = options.stage, options.prefetch, options.route
    quantized = options.precision.quantized_gather is not False
    if stage not in STAGES:
        raise LayoutError(f"stage must be one of {STAGES}, got {stage!r}")
    if not isinstance(prefetch, int):
        raise TypeError(f"prefetch counts units and must be an int, got {prefetch!r}")
    if prefetch < 0:
        raise LayoutError(f"prefetch counts units and must be at least 0, got {prefetch}")
    if isinstance(module, torch.jit.ScriptModule) and stage > 0:
        raise LayoutError(
            f"the model is one TorchScript module, which runs no hook before its forward, and stage {stage} needs one: "
            "script its blocks instead, or call it from the forward of a plain nn.Module, and wrap that"
        )
    if options.buffers not in ("rank0", "own"):
        raise LayoutError(f'buffers must be "rank0" or "own", got {options.buffers!r}')
    if quantized and stage != 3:
        raise LayoutError(
            f"Precision(quantized_gather=...) requires stage 3, got stage {stage}: at stages 0 to 2 this rank's shard "
            "is part of the full weights, so codes would replace the weights that the optimizer steps"
        )
    if not groups.single_rank:
        _check_embeddings(module, options.ignored)
    if route.parts is not None:
        _check_parts(route.parts, groups, quantized=quantized)


def _check_embeddings(module: nn.Module, ignored: Collection[Tensor]) -> None:
    """Refuse embeddings with `max_norm`: a forward scales the rows of this rank's batch only, so ranks would differ."""
    for name, each in module.named_modules():
        scales = isinstance(each, nn.Embedding | nn.EmbeddingBag) and each.max_norm is not None
        if scales and each.weight not in ignored:
            raise LayoutError(
                f"{name or 'the module'!r} has max_norm={each.max_norm}: its forward scales the rows that this rank's "
                "batch has, and other ranks scale others. Set max_norm to None, and scale rows inside `gathered()`"
            )


def _check_parts(parts: int, groups: Ranks, *, quantized: bool) -> None:
    """Check `Route(order="tree", parts=P)` against the ranks."""
    if groups.replicas is not None:
        raise LayoutError(
            "order='tree' adds over the ranks that share a model, and a two-dimensional group has replicas as well: "
            "pass a group or a mesh of one dimension"
        )
    if quantized:
        raise LayoutError(
            "order='tree' gives the same bits on any number of ranks, and quantized_gather does not: a single rank "
            "computes with the weights themselves. Leave it False"
        )
    if groups.shards.bit_count() != 1:
        raise LayoutError(f"order='tree' requires a power of two of ranks, got {groups.shards}")
    if parts < groups.shards:
        raise LayoutError(f"order='tree' requires at least as many parts as ranks, {groups.shards}; got parts={parts}")


def _other_wrapper(module: nn.Module) -> str:
    """Return which PyTorch wrapper a module already has, or `""`. (Found by name, without importing FSDP.)"""
    kinds = [f"{each.__module__}.{each.__qualname__}" for each in type(module).__mro__]
    if "torch.nn.parallel.distributed.DistributedDataParallel" in kinds:
        return "DistributedDataParallel"
    if any(kind.startswith("torch.distributed.fsdp.") for kind in kinds):
        return "FSDP (fully_shard)" if any(kind.endswith(".FSDPModule") for kind in kinds) else "FSDP"
    return ""


def _check_params(named: Sequence[tuple[str, nn.Parameter]], precision: Precision) -> None:
    for name, param in named:
        if param in _wrapped:
            raise LayoutError(
                f"parameter {name!r} belongs to a model that is wrapped already, or was: wrap one model that holds "
                "all modules that share parameters, once"
            )
        if is_dtensor(param):
            raise LayoutError(
                f"parameter {name!r} is a DTensor, so it is sharded or replicated already: wrap a model of plain "
                "tensors, and shard over a 2-D mesh by `group=` where replicas are to be"
            )
        if param.device.type not in ("cpu", "cuda", "meta"):
            raise LayoutError(f"parameter {name!r} is on {param.device}: only the CPU and CUDA are supported")
        if param.grad is not None:
            raise LayoutError(
                f"parameter {name!r} has a gradient, which would be lost: call zero_grad() before wrapping"
            )
        if param.requires_grad and param.dtype not in SUMMABLE:
            raise LayoutError(f"parameter {name!r} is {param.dtype}, and gradients of that dtype cannot be reduced")
        if param.dtype == torch.float64 and precision.compute is not None:
            raise LayoutError(
                f"parameter {name!r} is {param.dtype}, which Precision(compute={precision.compute}) would not keep: "
                "convert the model by .float() before wrapping it, or do not set `compute`"
            )


# ---- parameters that share memory -----------------------------------------------------------------------------------
#
# Identical ones are tied, and any other overlap is an error. Sharding gives each parameter new memory, which would
# separate overlapping tensors silently.


class _Extent(NamedTuple):
    """The range of a tensor in its storage, in bytes."""

    name: str
    tensor: Tensor
    start: int
    stop: int

    @staticmethod
    def of(name: str, tensor: Tensor) -> "_Extent":
        last: int = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        start = int(tensor.storage_offset()) * tensor.element_size()
        return _Extent(name, tensor, start, start + (last + 1) * tensor.element_size())


def tie(module: nn.Module, ignored: Collection[Tensor]) -> None:
    """Tie parameters that are the same memory, for example after `decoder.weight.data = embedding.weight.data`.

    Raises:
        LayoutError: a parameter shares memory with something else: a part of another parameter, a buffer, or a tensor
            attribute of a module.
    """
    others: dict[int, list[_Extent]] = defaultdict(list)
    for name, tensor in _others(module):
        others[storage_key(tensor)].append(_Extent.of(name, tensor))
    seen: dict[int, list[_Extent]] = defaultdict(list)
    twins: dict[Tensor, nn.Parameter] = {}
    for name, param in module.named_parameters():
        if param in ignored or not _has_memory(param):
            continue
        own = _Extent.of(name, param)
        for other in (*seen[storage_key(param)], *others[storage_key(param)]):
            if own.start < other.stop and other.start < own.stop:
                same = param.dtype == other.tensor.dtype and param.is_set_to(other.tensor)
                if not isinstance(other.tensor, nn.Parameter) or not same:
                    raise LayoutError(
                        f"parameter {name!r} and {other.name!r} share memory, but are not the same: they would part "
                        "when the parameter is sharded. Give one of them memory of its own (`.clone()`), or tie them "
                        "as one parameter before wrapping"
                    )
                twins[param] = other.tensor
                break
        else:
            seen[storage_key(param)].append(own)
    for each in module.modules() if twins else ():
        for attribute, own_param in each._parameters.items():
            if own_param in twins:
                each._parameters[attribute] = twins[own_param]


def _others(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield buffers, and tensors among the attributes of modules, which are not parameters.

    An attribute `name` beside a parameter `name_orig` is skipped: each forward recomputes it (`spectral_norm`).
    """
    for path, each in module.named_modules():
        attributes = [(name, value) for name, value in each.__dict__.items() if f"{name}_orig" not in each._parameters]
        for name, value in (*each._buffers.items(), *attributes):
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and _has_memory(value):
                yield f"{path}.{name}".lstrip("."), value


def _has_memory(tensor: Tensor) -> bool:
    """Return whether a tensor has a storage that another tensor may view."""
    return tensor.layout is torch.strided and not tensor.is_meta and tensor.numel() > 0
