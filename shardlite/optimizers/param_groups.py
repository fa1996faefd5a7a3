"""Match the parameter groups of a saved state to those of an optimizer by the names of parameters.

PyTorch matches them by position, so states of equal shapes would be swapped if the groups list parameters in another
order. A state has names if its optimizer was built from `named_parameters()`, or if it was saved by names.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from shardlite.errors import LayoutError, some_of

Group = Mapping[str, Any]

_WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
"""Parts of names that modules around a model (DDP, `torch.compile`) add."""


def plain_name(name: str) -> str:
    """Return a name without the parts that modules around the model add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def names_in(groups: Sequence[Group]) -> list[list[str]] | None:
    """Return the names of the parameters in each group of a saved state, or `None` if a parameter has no name."""
    names = [group.get("param_names") or group["params"] for group in groups]
    keys = [len(group["params"]) for group in groups]
    named = all(isinstance(name, str) for name in chain(*names)) and keys == [*map(len, names)]
    return [[plain_name(name) for name in each] for each in names] if named and any(keys) else None


def same_names(saved: Sequence[Sequence[str]], own: Sequence[Sequence[str]]) -> bool:
    """Return whether two lists of groups have the same names, each once."""
    first, second = [*chain(*saved)], [*chain(*own)]
    return len(set(first)) == len(first) and sorted(first) == sorted(second)


def match_groups(
    saved: Sequence[Group],
    names: Sequence[Sequence[str]],
    own: Sequence[Group],
    own_names: Sequence[Sequence[str]],
    *,
    strict: bool = True,
) -> list[dict[str, Any]]:
    """Return the groups of a saved state, divided and ordered as the groups of an optimizer.

    A group takes the options of the saved group that has its parameters. An optimizer's group without parameters takes
    those of a saved one, or keeps its own options if the numbers of such groups differ.

    Args:
        saved: groups of the state. The result has their keys of parameters, `params`.
        names: the names of the parameters in each group of the state.
        own: groups of the optimizer.
        own_names: the names of the parameters in each group of the optimizer.
        strict: whether the state must have all parameters. If the state lacks a parameter, the parameter's key is its
            name.

    Raises:
        LayoutError: the state lacks a parameter and `strict` is set, or a group would take different options from
            several groups.
    """
    home = {
        name: (index, key)
        for index, (group, each) in enumerate(zip(saved, names, strict=True))
        for name, key in zip(each, group["params"], strict=True)
    }
    missing = [name for name in chain(*own_names) if name not in home]
    if missing and strict:
        raise LayoutError(f"the state has no parameters {some_of(map(repr, missing))} of the optimizer")
    empty = [group for group in saved if not group["params"]]
    spare = iter(empty if len(empty) == sum(not each for each in own_names) else ())
    matched = []
    for number, (group, each) in enumerate(zip(own, own_names, strict=True)):
        sources = [saved[index] for index in dict.fromkeys(home[name][0] for name in each if name in home)]
        if differing := {*_differing(sources)}:
            raise LayoutError(
                f"group {number} of the optimizer has parameters of {len(sources)} groups of the state, which have "
                f"different {some_of(differing)}: put parameters with different options into different groups"
            )
        source = sources[0] if sources else group if each else next(spare, group)
        options = {**source, "params": [home[name][1] if name in home else name for name in each]}
        options.pop("param_names", None)
        if "param_names" in source or "param_names" in group:
            options["param_names"] = list(group.get("param_names", each))
        matched.append(options)
    return matched


def _differing(groups: Sequence[Group]) -> Iterator[str]:
    """Yield the options that differ between groups."""
    for group in groups[1:]:
        keys = (groups[0].keys() | group.keys()) - {"params", "param_names"}
        yield from (key for key in keys if repr(groups[0].get(key)) != repr(group.get(key)))
