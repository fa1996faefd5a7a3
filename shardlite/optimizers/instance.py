"""An instance of the program's optimizer class, with its own parameters, as a part of `WholeParameters`.

Every instance has its own copies of the options. The program may change an option of `WholeParameters` (a schedule
changes the learning rate), and a step may change an option of an instance (a count of steps). Before and after a step,
changes are copied in both directions. Values may be changed in place.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardlite.optimizers.groups import Group, options_of
from shardlite.optimizers.probe import step_without_hooks

Marks: TypeAlias = dict[str, tuple[Any, Any]]
"""For each option of a group its value, and a mark that differs after the value was changed in place."""


def marks_of(group: Group) -> Marks:
    """Return marks of the current options of a group."""
    return {option: (value, _mark(value)) for option, value in options_of(group).items()}


def changed(group: Group, marks: Marks) -> list[str]:
    """Return the options of a group that were added or changed since `marks_of`."""
    return [option for option, value in options_of(group).items() if not _is_marked(value, marks.get(option))]


def copy_options(options: Sequence[str], source: Group, target: Group) -> None:
    """Copy options from one group to another. A tensor is overwritten, because other objects may refer to it."""
    for option in options:
        value, there = source[option], target.get(option)
        if isinstance(value, Tensor) and isinstance(there, Tensor) and value.shape == there.shape:
            with torch.no_grad():
                there.copy_(value)
        else:
            target[option] = _copied(value)


def _mark(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value._version
    return copy.deepcopy(value) if isinstance(value, list | dict | set) else None


def _is_marked(value: Any, mark: tuple[Any, Any] | None) -> bool:
    if mark is None or mark[0] is not value:
        return False
    try:
        return bool(_mark(value) == mark[1])
    except (RuntimeError, ValueError):  # a list with tensors of several elements
        return False


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.deepcopy(value) if isinstance(value, list | dict | set) else value


class Instance:
    """An instance of the program's class that steps some of the parameters of `WholeParameters`."""

    def __init__(self, make: Callable[[list[Group]], Optimizer], *, has_states: bool = True) -> None:
        """`has_states`: whether the states are those of the parameters of `WholeParameters`."""
        self._make, self._has_states = make, has_states
        self.optimizer: Optimizer | None = None
        """`None` as long as there are no parameters."""

        self.groups: dict[int, Group] = {}
        """Groups by the index of the group of `WholeParameters`."""

        self.params: dict[Tensor, nn.Parameter] = {}
        """The parameters, by the parameters of `WholeParameters`."""

        self._marks: dict[int, Marks] = {}

    def add(self, index: int, options: Group, params: Mapping[Tensor, nn.Parameter]) -> None:
        """Add a group, or parameters of a new group. `index` is the index of the group of `WholeParameters`."""
        if not params:
            return
        group = {**{option: _copied(value) for option, value in options.items()}, "params": list(params.values())}
        if self.optimizer is None:
            self.optimizer = self._make([group])
        else:
            self.optimizer.add_param_group(group)
        self.groups[index] = self.optimizer.param_groups[-1]
        self.params |= params

    def take_options(self, groups: Sequence[Group], changes: Sequence[Sequence[str]]) -> None:
        """Take over options that the program has changed."""
        for index, group in self.groups.items():
            copy_options(changes[index], groups[index], group)
            self._marks[index] = marks_of(group)

    def take_states(self, state: Mapping[Tensor, Any]) -> None:
        """Take over states that the program has replaced or removed."""
        for param, own in self.states().items():
            if (given := state.get(param)) is not own and self.optimizer is not None:
                mine = self.params[param]
                if given:
                    self.optimizer.state[mine] = given
                else:
                    del self.optimizer.state[mine]

    def give(self, groups: Sequence[Group]) -> None:
        """Copy the options that a step has changed, such as step counts, to the groups of `WholeParameters`."""
        for index, group in self.groups.items():
            copy_options(changed(group, self._marks[index]), group, groups[index])

    def states(self) -> dict[Tensor, dict[str, Any]]:
        """Return the state of each parameter that has one."""
        if self.optimizer is None or not self._has_states:
            return {}
        own = self.optimizer.state
        return {param: own[mine] for param, mine in self.params.items() if mine in own}

    def step(self) -> None:
        """Step the parameters that have a gradient.

        If there are none, the step counts only. A class that requires gradients may raise an error then.
        """
        if self.optimizer is None:
            return
        if any(mine.grad is not None for mine in self.params.values()):
            step_without_hooks(self.optimizer)
        else:
            with suppress(Exception):
                step_without_hooks(self.optimizer)

    def load(self, groups: Sequence[Group], states: Mapping[Tensor, dict[str, Any]]) -> None:
        """Replace options and states, in the way of the class."""
        if self.optimizer is None:
            return
        numbers = {id(own): number for number, own in enumerate(self.params.values())}
        own_groups = [
            {**options_of(groups[index]), "params": [numbers[id(own)] for own in group["params"]]}
            for index, group in self.groups.items()
        ]
        state = {numbers[id(own)]: states[param] for param, own in self.params.items() if param in states}
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state, "param_groups": own_groups})
        self.groups = dict(zip(self.groups, self.optimizer.param_groups, strict=True))
