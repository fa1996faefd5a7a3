"""Check the options and the module of a wrapped model, and tie parameters that share memory."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import WeakTensorKeyDictionary

from shardlite.comm import Ranks
from shardlite.comm.collectives import SUMMABLE
from shardlite.config import MemoryLimit, Precision, Route, check_timeout
from shardlite.errors import LayoutError
from shardlite.params import Unit, is_dtensor, storage_key
from shardlite.wrapping.init import Init
from shardlite.wrapping.offload import Offload
from shardlite.wrapping.partition import UnitPolicy, UnitRule

STAGES = (0, 1, 2, 3)
"""The stages of ZeRO."""

_wrapped = WeakTensorKeyDictionary()
"""Parameters of models that are wrapped, or were dropped without being unwrapped. Their values are in shards.

If ranks are threads, they share this table. Sharing it is safe, because each parameter belongs to one rank, and each
access reads or writes one entry by identity.
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments of `ShardLite`, whose docstring documents them."""

    stage: int = 3
    units: UnitPolicy = None
    precision: Precision = field(default_factory=Precision)
    reshard_after_forward: UnitRule = True
    ignore: Iterable[nn.Module | nn.Parameter] = ()
    replicate: Iterable[nn.Module | nn.Parameter] = ()
    device: torch.device | str | None = None
    init: Init = None
    prefetch: int = 1
    route: Route = field(default_factory=Route)
    buffers: str = "rank0"
    memory_limit: MemoryLimit | None = None
    offload: Offload | None = None
    timeout: timedelta = timedelta(minutes=10)

    ignored: Collection[Tensor] = field(init=False)
    """Parameters that are not sharded."""

    ignored_modules: Sequence[nn.Module] = field(init=False)
    replicated: Collection[Tensor] = field(init=False)
    """Parameters that every rank keeps, with averaged gradients."""

    compound: Collection[Tensor] = field(init=False)
    """Frozen parameters in `replicate` that consist of other tensors (quantized weights). They are ignored, too."""

    def __post_init__(self) -> None:
        """Check the options that can be checked without a module and without ranks.

        Raises:
            TypeError: an option has a wrong type.
            ValueError: an option has an invalid value.
        """
        check_timeout(self.timeout)
        if self.init is not None and not callable(self.init):
            raise TypeError(f"init must be callable(module), as for nn.Module.apply, got {self.init!r}")
        rule = self.reshard_after_forward
        if not isinstance(rule, bool) and not callable(rule):
            raise TypeError(f"reshard_after_forward must be a bool or callable(name, module) -> bool, got {rule!r}")
        for name in ("ignore", "replicate"):
            if isinstance(entries := getattr(self, name), Iterator):  # a copy of the options reads it again
                vars(self)[name] = tuple(entries)
        modules, ignored = _split_entries("ignore", self.ignore)
        _, replicated = _split_entries("replicate", self.replicate)
        compound = {each for each in replicated if is_traceable_wrapper_subclass(each) and not each.requires_grad}
        vars(self).update(  # of a frozen instance
            ignored=ignored | compound,
            ignored_modules=modules,
            replicated=replicated - compound,
            compound=compound - ignored,
        )


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


def _split_entries(keyword: str, given: Iterable[nn.Module | nn.Parameter]) -> tuple[list[nn.Module], set[Tensor]]:
    """Return the modules in `given`, and the parameters in `given` or in its modules. Errors name the `keyword`.

    Raises:
        LayoutError: an entry is neither a module nor a parameter.
        TypeError: `given` is not iterable.
    """
    if not isinstance(given, Iterable):
        raise TypeError(f"{keyword} must be a list of modules and parameters, got {type(given).__name__}")
    entries = list(given)
    modules = [each for each in entries if isinstance(each, nn.Module)]
    params: set[Tensor] = {each for each in entries if isinstance(each, nn.Parameter)}
    if strange := [each for each in entries if not isinstance(each, nn.Module | nn.Parameter)]:
        raise LayoutError(f"{keyword} must contain modules and parameters only, got {type(strange[0]).__name__}")
    return modules, params.union(*(each.parameters() for each in modules))


def device_for(module: nn.Module, device: torch.device | str | None, default: torch.device) -> torch.device:
    """Return the device of shards: the argument `device` or, if it is `None`, the device of the parameters.

    If `device` is `None` and all parameters are on the meta device, return `default`.

    Raises:
        LayoutError: `device` is not a device, or is neither the CPU nor a CUDA device.
    """
    if device is None:
        device = next((param.device for param in module.parameters() if not param.is_meta), default)
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise LayoutError(f"device must be the CPU or a CUDA device, got {device!r}") from error
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
        raise LayoutError(f"parameter {lazy[0]!r} has no shape yet: run the lazy module once before wrapping the model")
    for name, each in module.named_modules():
        name = name or "(the module itself)"
        if isinstance(each, wrapper):
            raise LayoutError(
                f"{name!r} is already wrapped: wrap the whole model once, and select its parts with `units`"
            )
        if other := _other_wrapper(each):
            raise LayoutError(f"{name!r} is wrapped by {other}: wrap the plain module instead")
    if torch.is_inference_mode_enabled():
        raise LayoutError(
            "wrap the model outside of torch.inference_mode(), because tensors created in it cannot be trained"
        )
    for name, buffer in module.named_buffers():
        if buffer.layout is not torch.strided:
            raise LayoutError(f"buffer {name!r} is {buffer.layout}: only dense buffers can be sent to all ranks")
    named = [(name, param) for name, param in module.named_parameters() if param not in ignored]
    if not named:
        raise LayoutError(f"{type(module).__name__} has no parameters to shard: all are ignored, or there are none")
    _check_params(named, precision)


def check_replicated(module: nn.Module, options: Options) -> None:
    """Check the parameters that every rank keeps in full, after identical parameters were tied.

    Raises:
        LayoutError: such a parameter is ignored too, or the model does not contain it, or no other parameter is left.
    """
    names: dict[Tensor, str] = {param: name for name, param in module.named_parameters()}
    for param in options.replicated:
        if param in options.ignored:
            raise LayoutError(
                f"parameter {names.get(param, '(outside of the model)')!r} is in `ignore` and in `replicate`: each "
                "rank trains its own copy of an ignored parameter, and the gradients of a replicated one are averaged"
            )
        if param not in names:
            raise LayoutError(
                f"replicate contains a parameter of shape {list(param.shape)} that the model does not contain: pass "
                "modules and parameters of the model. If it shares memory with another parameter, pass that one"
            )
    if options.stage and all(param in options.replicated or param in options.ignored for param in names):
        raise LayoutError(
            f"{type(module).__name__} has no parameters to shard, because all are in `replicate` or `ignore`: pass "
            "stage=0, at which every rank keeps all parameters"
        )


def check_options(module: nn.Module, options: Options, groups: Ranks) -> None:
    """Check the options of a checked module against the module and the ranks.

    Raises:
        TypeError: an option has a wrong type.
        LayoutError: an option is invalid, or contradicts another option.
    """
    stage, prefetch, route = options.stage, options.prefetch, options.route
    quantized = options.precision.quantized_gather is not False
    if not isinstance(stage, int) or isinstance(stage, bool) or stage not in STAGES:
        raise LayoutError(f"stage must be one of {STAGES}, got {stage!r}")
    if not isinstance(prefetch, int) or isinstance(prefetch, bool):
        raise TypeError(f"prefetch is a number of units and must be an int, got {prefetch!r}")
    if prefetch < 0:
        raise LayoutError(f"prefetch is a number of units and must be at least 0, got {prefetch}")
    if isinstance(module, torch.jit.ScriptModule) and stage > 0:
        raise LayoutError(
            f"stage {stage} needs a hook before the model's forward, which a TorchScript module does not run: script "
            "the model's blocks instead, or wrap a plain nn.Module that calls the model"
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
    """Refuse embeddings with `max_norm`, because each rank's forward would scale only the rows in its own batch."""
    for name, each in module.named_modules():
        scales = isinstance(each, nn.Embedding | nn.EmbeddingBag) and each.max_norm is not None
        if scales and each.weight not in ignored:
            raise LayoutError(
                f"{name or 'the module'!r} has max_norm={each.max_norm}: its forward would scale only the rows in this "
                "rank's batch, so ranks would differ. Set max_norm to None, and scale rows inside `gathered()`"
            )


def _check_parts(parts: int, groups: Ranks, *, quantized: bool) -> None:
    """Check `Route(order="tree", parts=P)` against the ranks."""
    if groups.replicas is not None:
        raise LayoutError(
            "order='tree' sums over the ranks that share a model, but a two-dimensional mesh has replicas too: pass a "
            "process group or a one-dimensional mesh"
        )
    if quantized:
        raise LayoutError(
            "order='tree' gives the same bits on any number of ranks, but quantized_gather does not, because a single "
            "rank computes with exact weights: set quantized_gather to False"
        )
    if groups.shards.bit_count() != 1:
        raise LayoutError(f"order='tree' requires that the number of ranks is a power of two, got {groups.shards}")
    if parts < groups.shards:
        raise LayoutError(f"order='tree' requires at least as many parts as ranks, {groups.shards}; got parts={parts}")


def _other_wrapper(module: nn.Module) -> str:
    """Return the name of PyTorch's wrapper of a module, or `""`. Names are compared, so FSDP is not imported."""
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
                f"parameter {name!r} belongs or belonged to another wrapped model: wrap once, with one model that "
                "contains all modules that share parameters"
            )
        if is_dtensor(param):
            raise LayoutError(
                f"parameter {name!r} is a DTensor, so it is already sharded or replicated: wrap a model of plain "
                "tensors. For replicas, pass a two-dimensional mesh as `group`"
            )
        if is_traceable_wrapper_subclass(param):
            raise LayoutError(
                f"parameter {name!r} is a {type(param).__name__}, which consists of other tensors, so it cannot be cut "
                "into shards: pass its module in `ignore`, so that each rank keeps its own values, or, if it is "
                "frozen, in `replicate`, so that every rank gets rank 0's values"
            )
        if param.device.type not in ("cpu", "cuda", "meta"):
            raise LayoutError(f"parameter {name!r} is on {param.device}: only the CPU and CUDA are supported")
        if param.grad is not None:
            raise LayoutError(
                f"parameter {name!r} has a gradient, which would be lost: call zero_grad() before wrapping"
            )
        if param.requires_grad and param.dtype.to_real() not in SUMMABLE:
            raise LayoutError(f"parameter {name!r} is {param.dtype}, and gradients of that dtype cannot be reduced")
        if param.dtype == torch.float64 and precision.compute is not None:
            raise LayoutError(
                f"parameter {name!r} is {param.dtype}, but Precision(compute={precision.compute}) would lose its "
                "precision: convert the model with .float() before wrapping it, or do not set `compute`"
            )


# ---- parameters that share memory -----------------------------------------------------------------------------------
#
# Identical parameters are tied, and any other overlap is an error. Sharding allocates new memory for each parameter,
# which would silently separate overlapping tensors.


class _Extent(NamedTuple):
    """The byte range of a tensor in its storage."""

    name: str
    tensor: Tensor
    start: int
    stop: int


def _extent(name: str, tensor: Tensor) -> _Extent:
    last: int = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset()) * tensor.element_size()
    return _Extent(name, tensor, start, start + (last + 1) * tensor.element_size())


def tie(module: nn.Module, ignored: Collection[Tensor]) -> None:
    """Tie parameters that have the same memory, for example after `decoder.weight.data = embedding.weight.data`.

    Raises:
        LayoutError: a parameter shares memory with a part of another parameter, a buffer, or a tensor attribute of a
            module.
    """
    others: dict[int, list[_Extent]] = defaultdict(list)
    for name, tensor in _others(module):
        others[storage_key(tensor)].append(_extent(name, tensor))
    seen: dict[int, list[_Extent]] = defaultdict(list)
    twins: dict[Tensor, nn.Parameter] = {}
    for name, param in module.named_parameters():
        if param in ignored or not _has_memory(param):
            continue
        own = _extent(name, param)
        for other in (*seen[storage_key(param)], *others[storage_key(param)]):
            if own.start < other.stop and other.start < own.stop:
                same = param.dtype == other.tensor.dtype and param.is_set_to(other.tensor)
                if not isinstance(other.tensor, nn.Parameter) or not same:
                    raise LayoutError(
                        f"parameter {name!r} and {other.name!r} share memory, but are not the same tensor, so sharding "
                        "would separate them. Copy one of them (`.clone()`), or tie them as one parameter before "
                        "wrapping"
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
    """Yield the tensors of a module that are not parameters: buffers, and attributes of modules.

    An attribute `name` is skipped if there is a parameter `name_orig`, because each forward recomputes the attribute
    from the parameter (`spectral_norm`).
    """
    for path, each in module.named_modules():
        attributes = [(name, value) for name, value in each.__dict__.items() if f"{name}_orig" not in each._parameters]
        for name, value in (*each._buffers.items(), *attributes):
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and _has_memory(value):
                yield f"{path}.{name}".lstrip("."), value


def _has_memory(tensor: Tensor) -> bool:
    """Return whether a tensor has memory that another tensor may view."""
    return tensor.layout is torch.strided and not tensor.is_meta and tensor.numel() > 0
