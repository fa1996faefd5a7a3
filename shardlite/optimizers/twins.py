"""Twins: optimizers with the class and the options of another optimizer, for other parameters.

A twin starts without a state, so it must not get what the steps of the original have added to its options, such as
counts. In: an optimizer. Out: its `Original`, which builds twins.
"""

import copy
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dis import get_instructions
from enum import Enum
from inspect import Parameter, signature, unwrap
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

LR = 0.01
"""Learning rate of twins if the original's is less than 1 % of this, as at the start of a warm-up. The steps of a twin
change its parameters."""

CANNOT_BUILD = "cannot be built from its options"

_NOT_OPTIONS = {"defaults", "state", "param_groups", "step", "grad_scale", "found_inf"}
"""Attributes of an optimizer that PyTorch, its schedulers and its gradient scalers set."""


_ANY = "**kwargs"
"""In a list of a constructor's arguments, this name stands for all further arguments."""


class Group(NamedTuple):
    """One or more parameter groups that differ at most in the learning rate."""

    options: dict[str, Any]
    flags: dict[int, dict[str, Any]]
    """By number of dimensions: the flags in the state of the first such parameter, which say how to step it."""


class Original:
    """An optimizer, and what its twins need to know."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._kind = type(optimizer)
        self._defaults = optimizer.defaults
        self._attributes = {
            name: value
            for name, value in vars(optimizer).items()
            if name not in _NOT_OPTIONS and not name.startswith(("_optimizer_", "_shardlite", "_zero_grad_"))
        }
        self._plain = {name: value for name, value in self._attributes.items() if _is_plain(value)}
        inner = {name: type(value) for name, value in self._attributes.items() if isinstance(value, Optimizer)}
        self._records: dict[str, Any] = {}
        for value in self._attributes.values():
            self._records.update(_record(value))
        self._kept = {**self._records, **self._plain, **inner}  # constructors take the class of an inner optimizer
        groups: dict[str, Group] = {}
        for given in optimizer.param_groups:
            options = {name: value for name, value in given.items() if name not in ("params", "param_names")}
            if "lr" in options:
                options["lr"] = _visible(options["lr"])
            group = groups.setdefault(repr(sorted((options | {"lr": None}).items())), Group(options, {}))
            for param in given["params"]:
                group.flags.setdefault(param.ndim, _flags(optimizer.state.get(param)))
        self.groups = [each for each in groups.values() if each.flags]
        params = [param for given in optimizer.param_groups for param in given["params"]]
        first = next((param for param in params if param.is_complex()), params[0])
        self.device, self.dtype = first.device, first.dtype

    def key(self) -> str:
        """Return a text that is the same for optimizers of one class whose twins are the same."""
        return repr((self.device, self.dtype, self._defaults, self.groups, self._plain, self._records))

    def integers(self) -> list[int]:
        """Return all options that are integers, and the integers in the code of the class.

        A class may step in another way after so many steps, or for tensors of at least this size.
        """
        options = [*self._attributes.values(), *(value for group in self.groups for value in group.options.values())]
        codes = [code for each in _functions_of(self._kind) if (code := getattr(each, "__code__", None)) is not None]
        constants = (each.argval for code in codes for each in get_instructions(code) if each.opname.startswith("LOAD"))
        return [value for value in (*options, *constants) if type(value) is int]

    def twin(self, params: Sequence[Sequence[nn.Parameter]]) -> Optimizer:
        """Return a twin for the given parameters of each group.

        Raises:
            ValueError: the constructor requires arguments that the optimizer has not kept.
        """
        names = _arguments(self._kind)
        groups = [
            {"params": [*tensors], **copy.deepcopy(_known_to(names, group.options))}
            for tensors, group in zip(params, self.groups, strict=True)
        ]
        arguments = {name: value for name, value in {**self._kept, **self._defaults}.items() if name in names}
        try:
            twin = self._built(groups, [arguments | self._defaults, arguments] if _ANY in names else [arguments])
        except Exception as error:
            if len(self._plain) < len(self._attributes):
                raise ValueError(f"{self._kind.__name__} {CANNOT_BUILD}: {error}") from error
            twin = self._without_constructor(groups)
        if len(twin.param_groups) == len(self.groups):
            for fresh, group in zip(twin.param_groups, self.groups, strict=True):
                _overlay(fresh, group.options)
        _overlay(vars(twin), self._plain)
        if callable(
            train := getattr(twin, "train", None)
        ):  # of schedule-free optimizers, which step in train mode only
            train()
        return twin

    def _built(self, groups: list[dict[str, Any]], attempts: Sequence[dict[str, Any]]) -> Optimizer:
        """Return an instance that was built with the first arguments that the constructor takes."""
        for arguments in attempts[:-1]:
            with suppress(Exception):
                return self._kind(copy.copy(groups), **copy.deepcopy(arguments))
        return self._kind(groups, **copy.deepcopy(attempts[-1]))

    def _without_constructor(self, groups: list[dict[str, Any]]) -> Optimizer:
        twin = self._kind.__new__(self._kind)
        vars(twin).update(copy.deepcopy(self._attributes))
        Optimizer.__init__(twin, groups, copy.deepcopy(self._defaults))
        for given, group in zip(twin.param_groups, self.groups, strict=True):
            for param in given["params"]:
                twin.state[param].update(group.flags[param.ndim])
        return twin


def _visible(lr: Any) -> Any:
    """Return a learning rate that changes parameters."""
    if not isinstance(lr, int | float | Tensor) or float(lr) >= LR / 100:
        return lr
    return torch.full_like(lr, LR) if isinstance(lr, Tensor) else LR


def _flags(state: Any) -> dict[str, Any]:
    """Return the flags in the state of a parameter, which a constructor may set there."""
    return {name: value for name, value in state.items() if _is_flag(value)} if isinstance(state, Mapping) else {}


def _arguments(kind: type) -> set[str]:
    """Return the names of a constructor's arguments after the first, with those that it passes on as `**kwargs`."""
    names: set[str] = set()
    for each in kind.__mro__[: kind.__mro__.index(Optimizer)]:
        if "__init__" in vars(each):
            own = [*signature(vars(each)["__init__"]).parameters.values()][2:]
            names.update(param.name for param in own)
            if all(param.kind is not Parameter.VAR_KEYWORD for param in own):
                return names
    return names | {_ANY}


def _known_to(names: set[str], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group that its constructor has got. Numbers that it lacks come from steps."""
    return {name: value for name, value in options.items() if name in names or _is_flag(value)}


def _overlay(fresh: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Copy options into a new optimizer, whose constructor may not have got all options. Copy no counts of steps."""
    for name, value in given.items():
        counts = type(value) is int and fresh.get(name) == 0
        if _is_flag(value) or (name in fresh and _is_plain(value) and not counts):
            fresh[name] = copy.deepcopy(value)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool | str)


def _is_plain(value: Any) -> bool:
    """Return whether a value is an option, and not a state."""
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain, value))
    plain = (bool, int, float, str, type, FunctionType, torch.dtype, torch.device, Enum)
    return value is None or isinstance(value, plain)


def _record(value: Any) -> dict[str, Any]:
    """Return the options in an attribute that only groups options, such as `args` of bitsandbytes' optimizers."""
    options = {} if _is_plain(value) or callable(value) else getattr(value, "__dict__", {})
    return options if _is_plain(options) else {}


_COLLECTIVES = ("all_", "broadcast", "reduce_scatter", "isend", "irecv", "send", "recv", "batch_isend", "barrier")


def communicates(kind: type) -> bool:
    """Return whether the code of an optimizer class calls collectives of `torch.distributed`."""
    return any(map(_uses_distributed, _functions_of(kind)))


def _functions_of(kind: type) -> list[Any]:
    """Return the functions of an optimizer class and of its bases."""
    values = (value for each in kind.__mro__[: kind.__mro__.index(Optimizer)] for value in vars(each).values())
    return [unwrap(each) for each in values if callable(each)]


def _uses_distributed(function: Any) -> bool:
    names = set(getattr(getattr(function, "__code__", None), "co_names", ()))
    values = [getattr(function, "__globals__", {}).get(name) for name in names]
    modules = [getattr(each, "__module__", None) or getattr(each, "__name__", "") for each in values]
    knows = "distributed" in names or any(str(each).startswith("torch.distributed") for each in modules)
    return knows and any(name.startswith(_COLLECTIVES) for name in names)
