"""Where a model keeps its parameters, and which units each of its modules needs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from shardlite.params import NEVER_CALLED, ROOT, Unit, UnitPlan, scripts


@dataclass(frozen=True)
class ParamLocation:
    """Where the model keeps a parameter: `module._parameters[attribute]`."""

    name: str
    module: nn.Module
    attribute: str
    param: nn.Parameter


def param_locations(module: nn.Module, units: Sequence[Unit]) -> dict[Unit, list[ParamLocation]]:
    """Return where the model keeps each unit's parameters; a tied one is kept in several places.

    What TorchScript modules keep is left out: it cannot be replaced.
    """
    never = scripts(module)
    home = {param: unit for unit in units for param in unit.params()}
    found: dict[Unit, list[ParamLocation]] = {unit: [] for unit in units}
    for path, owner in module.named_modules():
        for attribute, param in owner._parameters.items() if owner not in never else ():
            if param is not None and param in home:
                location = ParamLocation(f"{path}.{attribute}".lstrip("."), owner, attribute, param)
                found[home[param]].append(location)
    return found


def needs(module: nn.Module, plans: Sequence[UnitPlan], units: Sequence[Unit]) -> dict[nn.Module, list[Unit]]:
    """Return which units each module's forward needs: the one that starts at it, and those of parameters that it reads.

    The whole model is always among them: a pass starts with it.
    """
    by_name = {unit.name: unit for unit in units}
    home = {param: unit for unit in units for param in unit.params()}
    starts = {plan.module: by_name[plan.name or ROOT] for plan in plans if (plan.name or ROOT) in by_name}
    wanted, never = {}, scripts(module)
    for each in module.modules():
        if each in never:
            continue
        own = [home[param] for param in _read_by(each) if param in home]
        start = [starts[each]] if each in starts else []
        if start or own or each is module:
            wanted[each] = list(dict.fromkeys(start + own))
    return wanted


def _read_by(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield a module's own parameters, and those of modules in it that are never called."""
    yield from (param for param in module._parameters.values() if param is not None)
    if isinstance(module, nn.TransformerEncoder):  # chooses its path by what the weights of its first layer are
        yield from module.layers[0].parameters()
    for child in module.children():
        if isinstance(child, torch.jit.ScriptModule):
            yield from child.parameters()
        elif isinstance(child, NEVER_CALLED) or type(child).forward is nn.Module.forward:
            yield from _read_by(child)
