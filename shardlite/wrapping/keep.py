"""Decide in which dtype each parameter is gathered, and which modules cast their inputs (`Precision.keep`).

In: a module and a `Precision`. Out: `Dtypes`. A module has the dtype that the option gives to it, or else that of the
module around it. A parameter has the dtype of its module, unless its own name is kept.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from shardlite.config import COMPUTE, Keep, Precision
from shardlite.errors import LayoutError, some_of
from shardlite.params import scripts

DECLARED = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
"""Attributes in which models of Transformers and Diffusers list names of modules and parameters that need fp32."""

Rule = Callable[[str, nn.Module], torch.dtype | None]
"""A function that returns the dtype of a module, or `None` if the module has the dtype of the module around it."""


class Dtypes(NamedTuple):
    """The dtypes of a model. Without a compute dtype, nothing is kept and nothing is cast."""

    model: torch.dtype | None = None
    """Dtype to which the model casts its floating-point inputs."""

    kept: Mapping[Tensor, torch.dtype] = {}
    """Dtypes of the parameters that are not gathered in the compute dtype."""

    inputs: Mapping[nn.Module, torch.dtype] = {}
    """Dtypes to which modules inside the model cast their inputs. Other modules take what they get."""

    outside: Collection[nn.Module] = ()
    """The modules among these that leave `torch.autocast`, which would compute in its own dtype."""


def dtypes_of(
    model: nn.Module, precision: Precision, roots: Collection[nn.Module] = (), ignored: Collection[Tensor] = ()
) -> Dtypes:
    """Return the dtypes that `precision` selects. Units start at the modules in `roots`.

    Raises:
        LayoutError: `keep` has a class or a name that is not in the model, or a tied parameter or a layer of PyTorch
            would have two dtypes.
        TypeError: the function `keep` has not returned a dtype.
    """
    if precision.compute is None:
        return Dtypes()
    modules, borders = _modules(model, precision.compute, _rule(model, precision.keep))
    params = _params(model, precision, modules)
    own_dtype = {each: dtype for each, dtype in params.items() if dtype != precision.compute_of(each.dtype)}
    kept = {each: dtype for each, dtype in own_dtype.items() if each not in ignored}
    inputs, never = {}, scripts(model) | {model}
    for module, dtype in modules.items():
        own = [each.dtype if each in ignored else params[each] for each in _floats(module).values()]
        if precision.keep:
            casts = bool(own) or module in borders or module in roots
        else:  # a model that declares something casts in its own forward
            casts = bool(own) and _is_strict(module) and (bool(kept) or module in roots)
        if casts and module not in never and _statistics(module) is None:
            inputs[module] = own[0] if own else dtype
    outside = [each for each, dtype in inputs.items() if precision.keep and dtype != precision.compute]
    return Dtypes(modules[model], kept, inputs, outside)


def _modules(model: nn.Module, compute: torch.dtype, rule: Rule) -> tuple[dict[nn.Module, torch.dtype], set[nn.Module]]:
    """Return the dtypes of modules, and the modules whose dtype is not that of the module around them.

    A module that occurs in several places is kept if it is kept in one of them.
    """
    at: dict[str, torch.dtype] = {}
    found: dict[nn.Module, torch.dtype] = {}
    borders = set()
    for path, module in model.named_modules(remove_duplicate=False):
        outer = at[path.rpartition(".")[0]] if path else compute
        at[path] = rule(path, module) or outer
        if found.get(module, compute) == compute:
            found[module] = at[path]
        if at[path] != outer:
            borders.add(module)
    return found, borders


def _params(
    model: nn.Module, precision: Precision, modules: Mapping[nn.Module, torch.dtype]
) -> dict[Tensor, torch.dtype]:
    """Return the dtype in which each floating-point parameter is gathered.

    Raises:
        LayoutError: a tied parameter or a layer of PyTorch would have two dtypes.
    """
    named = _named_params(model, precision.keep)
    found: dict[Tensor, dict[torch.dtype, str]] = {}
    for path, module in model.named_modules():
        own = _floats(module)
        kept = [attribute for attribute in own if modules[module] == torch.float32 or (module, attribute) in named]
        if 0 < len(kept) < len(own) and _is_strict(module):
            raise LayoutError(
                f"Precision: {type(module).__name__} {path!r} computes in one dtype, but of its parameters only "
                f"{some_of(kept)} would be kept: keep the whole layer, with its name in keep=..."
            )
        for attribute, param in own.items():
            dtype = torch.float32 if attribute in kept else modules[module]
            if dtype == precision.compute:
                dtype = precision.compute_of(param.dtype)  # some dtypes are never cast
            dtype = _statistics(module) or dtype
            found.setdefault(param, {}).setdefault(dtype, f"{path}.{attribute}".lstrip("."))
    for dtypes in found.values():
        if len(dtypes) > 1:
            places = " and ".join(f"{name!r} in {dtype}" for dtype, name in dtypes.items())
            raise LayoutError(
                f"Precision: a tied parameter is computed in one dtype, but this would be {places}: pass "
                "keep=... with the names of all modules that share it, or of none"
            )
    return {param: next(iter(dtypes)) for param, dtypes in found.items()}


def _rule(model: nn.Module, keep: Keep) -> Rule:
    """Return the option as a function.

    Raises:
        LayoutError: the option has a class or a name that is not in the model.
    """
    if keep is None:
        return lambda *_: None
    if not isinstance(keep, tuple):
        return lambda name, module: _dtype(keep, name, module)  # type: ignore[arg-type]
    classes = tuple(each for each in keep if isinstance(each, type))
    pattern = _pattern(keep)
    names = [name for name, _ in (*model.named_modules(remove_duplicate=False), *_all_params(model))]
    for each in keep:
        if isinstance(each, type):
            there = any(isinstance(module, each) for module in model.modules())
        else:
            there = any(map(_pattern([each]).search, names))
        if not there:
            raise LayoutError(f"Precision: keep has {each!r}, but the model has no module or parameter like it")

    def rule(name: str, module: nn.Module) -> torch.dtype | None:
        return torch.float32 if isinstance(module, classes) or pattern.search(name) else None

    return rule


def _dtype(keep: Rule, name: str, module: nn.Module) -> torch.dtype | None:
    """Return the result of the function `keep`.

    Raises:
        TypeError: the result is neither `None` nor a dtype in which modules may compute.
    """
    dtype = keep(name, module)
    if dtype is not None and dtype not in COMPUTE:
        choices = ", ".join(map(str, COMPUTE))
        raise TypeError(f"Precision: keep({name!r}, module) must return {choices} or None, got {dtype!r}")
    return dtype


def _named_params(model: nn.Module, keep: Keep) -> set[tuple[nn.Module, str]]:
    """Return the parameters that the option or, without an option, the model keeps by name."""
    if keep is not None:
        pattern = _pattern(keep if isinstance(keep, tuple) else ())
        return {place for name, place in _all_params(model) if pattern.search(name)}
    found = set()
    for module in model.modules():
        if names := [name for each in DECLARED for name in _names(getattr(module, each, None))]:
            pattern = _pattern(names, inside=True)
            found |= {place for name, place in _all_params(module) if pattern.search(name)}
    return found


def _names(declared: Any) -> list[str]:
    """Return the names in an attribute of a model, which may be missing, or be anything."""
    entries = [declared] if isinstance(declared, str) else declared
    return [each for each in entries if isinstance(each, str)] if isinstance(entries, Iterable) else []


def _pattern(entries: Iterable[object], *, inside: bool = False) -> re.Pattern[str]:
    """Return a pattern of the names that end with one of the names in `entries` or, with `inside`, contain one."""
    names = "|".join(re.escape(each).replace(r"\*", ".*") for each in entries if isinstance(each, str))
    end = r"(?:\.|$)" if inside else "$"
    return re.compile(rf"(?:^|\.)(?:{names}){end}" if names else "(?!)")


def _all_params(model: nn.Module) -> Iterator[tuple[str, tuple[nn.Module, str]]]:
    """Yield each name of each floating-point parameter, and its place: a module, and the name of an attribute."""
    for path, module in model.named_modules(remove_duplicate=False):
        for attribute in _floats(module):
            yield f"{path}.{attribute}".lstrip("."), (module, attribute)


def _floats(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the floating-point parameters that the module itself owns."""
    own = module._parameters.items()
    return {name: param for name, param in own if param is not None and param.is_floating_point()}


def _statistics(module: nn.Module) -> torch.dtype | None:
    """Return the dtype of a norm's running statistics, in which PyTorch computes the norm of inputs of any dtype."""
    statistics = module.running_mean if isinstance(module, _NormBase) else None
    return None if statistics is None else statistics.dtype


def _is_strict(module: nn.Module) -> bool:
    """Return whether a module is a layer of PyTorch that takes inputs in the dtype of its weights only."""
    mixes = isinstance(module, nn.RMSNorm | nn.MultiheadAttention)  # attention adds an fp32 mask as it is
    return type(module).forward.__module__.startswith("torch.nn.") and not mixes
