"""Partition a model into units: find the modules that start a unit, and assign each parameter to a unit.

A unit that starts at a module holds the parameters inside this module, unless an inner unit holds them. The parameters
of a unit are gathered together, so they should be used together. Typical units are the model's repeated blocks.

In: a module and the `units` option. Out: `UnitPlan`s, and the units that each module needs.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from shardlite.errors import LayoutError
from shardlite.params import ROOT, Unit, scripts

UnitPolicy = type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[str, nn.Module], bool] | None
"""A module class, a tuple of classes, a predicate of `(name, module)`, or `None` to select units automatically."""

UnitRule = bool | Callable[[str, nn.Module], bool]
"""A value for all units, or a predicate of a unit's `(name, module)`."""

BLOCKS_SHARE = 0.1
"""Children of one class in a list are blocks if they have, together, at least this share of the model's parameters."""

LARGE_SHARE = 0.5
"""An embedding, a head, or a child of another class than the blocks beside it becomes a unit if it has at least this
share of the largest block's parameters. Otherwise it stays in the root.
"""


REPLICATED = "(replicated)"
"""Name of the unit of all parameters that every rank keeps in full."""

NEVER_CALLED = (nn.ParameterList, nn.ParameterDict, NonDynamicallyQuantizableLinear)
"""Classes of modules that are not called, because the enclosing module reads their parameters. The last class is the
output layer of attention."""


@dataclass(eq=False)
class UnitPlan:
    """A planned unit: its module and its parameters."""

    name: str
    module: nn.Module
    params: dict[nn.Parameter, str] = field(default_factory=dict)
    """Parameters in registration order, each with its first name."""

    replicated: bool = False
    """Whether every rank keeps all weights of the unit, at any stage."""


def applies(rule: UnitRule, unit: UnitPlan) -> bool:
    """Return whether `rule` applies to `unit`. The name of the root is empty."""
    return rule if isinstance(rule, bool) else bool(rule(unit.name, unit.module))


def partition_module(
    model: nn.Module, policy: UnitPolicy, ignored: Collection[Tensor] = (), replicated: Collection[Tensor] = ()
) -> list[UnitPlan]:
    """Return the planned units. Each parameter that is not ignored belongs to one unit.

    The first unit is the root, and the last has all parameters in `replicated`. Units may be empty. Any other parameter
    belongs to the innermost unit around it. If a parameter occurs in several modules, it belongs to the innermost unit
    around all of these. So tied weights need no option.

    Raises:
        LayoutError: `policy` has an invalid type, or is a class that the model does not contain.
    """
    never = scripts(model)
    starts = {each for each in _starts(model, policy) if not isinstance(each, NEVER_CALLED) and each not in never}
    plans = {model: UnitPlan("", model)}
    chains: dict[nn.Parameter, list[UnitPlan]] = {}
    names: dict[nn.Parameter, str] = {}
    for path, chain, module in _walk("", [plans[model]], model, starts - {model}, plans):
        for attribute, param in module._parameters.items():
            if param is not None and param not in ignored:
                names.setdefault(param, f"{path}.{attribute}".lstrip("."))
                chains[param] = _common(chains.get(param, chain), chain)
    kept = UnitPlan(REPLICATED, model, replicated=True)
    for param, name in names.items():
        (kept if param in replicated else chains[param][-1]).params[param] = name
    return [*plans.values(), *([kept] if kept.params else [])]


def needs(module: nn.Module, plans: Sequence[UnitPlan], units: Sequence[Unit]) -> dict[nn.Module, list[Unit]]:
    """Return the units that each module's forward needs, without replicated units, which are always available.

    A module needs the unit that starts at this module, and the units of the parameters that the module reads. The
    result always has an entry for the whole model, because a pass starts with that model's forward.
    """
    by_name = {unit.name: unit for unit in units}
    home = {param: unit for unit in units if not unit.replicated for param in unit.params()}
    sharded = [plan for plan in plans if not plan.replicated]
    starts = {plan.module: by_name[plan.name or ROOT] for plan in sharded if (plan.name or ROOT) in by_name}
    wanted, never = {}, scripts(module)
    for each in module.modules():
        if each in never:
            continue
        own = [home[param] for param in _read_by(each) if param in home]
        start = [starts[each]] if each in starts else []
        if start or own or each is module:
            wanted[each] = list(dict.fromkeys(start + own))
    return wanted


def _walk(
    path: str, chain: list[UnitPlan], module: nn.Module, starts: set[nn.Module], plans: dict[nn.Module, UnitPlan]
) -> Iterator[tuple[str, list[UnitPlan], nn.Module]]:
    """Yield each path to a module inside `module`, the units around that module (outermost first), and that module.

    Units that start at the modules in `starts` are added to `plans`.
    """
    if module in starts:
        plan = plans.setdefault(module, UnitPlan(path, module))
        chain = [*chain, plan] if plan not in chain else chain
    yield path, chain, module
    for name, child in module.named_children():
        yield from _walk(f"{path}.{name}".lstrip("."), chain, child, starts, plans)


def _common(first: list[UnitPlan], second: list[UnitPlan]) -> list[UnitPlan]:
    """Return the common prefix of two chains of units."""
    same = [a is b for a, b in zip(first, second, strict=False)]
    return first[: same.index(False) if False in same else len(same)]


def _starts(model: nn.Module, policy: UnitPolicy) -> set[nn.Module]:
    if policy is None:
        return _automatic(model)
    classes = policy if isinstance(policy, tuple) else (policy,)
    if all(isinstance(each, type) and issubclass(each, nn.Module) for each in classes):
        found = {module for module in model.modules() if isinstance(module, classes)}  # type: ignore[arg-type]
        if not found - {model}:
            raise LayoutError(f"units={policy!r}: the model contains no module of this class")
        return found
    if not callable(policy):
        raise LayoutError(
            f"units must be a module class, a tuple of them, callable(name, module) or None, got {policy!r}"
        )
    predicate: Callable[[str, nn.Module], bool] = policy  # type: ignore[assignment]
    return {module for name, module in model.named_modules() if predicate(name, module)}


def _automatic(model: nn.Module) -> set[nn.Module]:
    """Return the repeated blocks, and the embeddings and heads that are large compared with the blocks."""
    total = _numel(model.parameters())
    blocks = list(_blocks(model, total))
    enough = LARGE_SHARE * max((_numel(block.parameters()) for block in blocks), default=total)
    return {*blocks, *(table for table in _tables(model, blocks) if _numel(table.parameters()) >= enough)}


def _blocks(module: nn.Module, total: int) -> Iterator[nn.Module]:
    """Yield the outermost repeated blocks."""
    repeated = _repeated(module, total)
    yield from repeated
    for child in module.children():
        if child not in repeated:
            yield from _blocks(child, total)


def _repeated(module: nn.Module, total: int) -> Sequence[nn.Module]:
    """Return those children of a list or sequence whose class occurs more than once among the children.

    In a list, a large child of a different class is also a block. If it were not, the search would continue inside that
    child and select, for example, its experts, although ranks may call different experts.
    """
    if not isinstance(module, nn.ModuleList | nn.Sequential):
        return []
    # A place of a list may have no module (`None`).
    children = [child for child in module._modules.values() if child is not None and _numel(child.parameters())]
    classes = [type(child) for child in children]
    alike = [child for child in children if classes.count(type(child)) > 1]
    share = _numel({param for child in alike for param in child.parameters()})
    if share < BLOCKS_SHARE * total:
        return []
    if isinstance(module, nn.Sequential):
        return alike
    enough = LARGE_SHARE * max(_numel(child.parameters()) for child in alike)
    return [child for child in children if child in alike or _numel(child.parameters()) >= enough]


def _tables(model: nn.Module, blocks: Sequence[nn.Module]) -> Iterator[nn.Module]:
    """Yield the embeddings and linear layers that lie outside of blocks and share no parameter with another module."""
    inside = {module for block in blocks for module in block.modules()}
    uses = Counter(param for _, param in model.named_parameters(remove_duplicate=False))
    shared = {param for param, times in uses.items() if times > 1}
    for module in model.modules():
        is_table = isinstance(module, nn.Embedding | nn.Linear) and module not in inside and module is not model
        if is_table and not shared.intersection(module.parameters()):
            yield module


def _numel(params: Iterable[nn.Parameter]) -> int:
    return sum(param.numel() for param in params)


def _read_by(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the module's own parameters, and those of modules inside it that are never called."""
    yield from (param for param in module._parameters.values() if param is not None)
    if isinstance(module, nn.TransformerEncoder):  # the forward of this class inspects the weights of its first layer
        yield from module.layers[0].parameters()
    for child in module.children():
        if isinstance(child, torch.jit.ScriptModule):
            yield from child.parameters()
        elif isinstance(child, NEVER_CALLED) or type(child).forward is nn.Module.forward:
            yield from _read_by(child)
