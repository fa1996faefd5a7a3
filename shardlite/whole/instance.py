"""An instance of the program's optimizer class, with its own parameters, as a part of `WholeParameters`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from shardlite.whole.groups import Group, options_of


class Instance:
    """An instance of the program's class that steps some of the parameters of `WholeParameters`."""

    def __init__(self, make: Callable[[list[Group]], Optimizer]) -> None:
        self._make = make
        self.optimizer: Optimizer | None = None
        """`None` as long as there are no parameters."""

        self.groups: dict[int, Group] = {}
        """Groups by the index of the group of `WholeParameters`."""

        self.params: dict[Tensor, nn.Parameter] = {}
        """The parameters, by the parameters of `WholeParameters`."""

    def add(self, index: int, options: Group, params: Mapping[Tensor, nn.Parameter]) -> None:
        """Add a group, or parameters of a new group. `index` is the index of the group of `WholeParameters`."""
        if not params:
            return
        group = {**options, "params": list(params.values())}
        if self.optimizer is None:
            self.optimizer = self._make([group])
        else:
            self.optimizer.add_param_group(group)
        self.groups[index] = self.optimizer.param_groups[-1]
        self.params |= params

    def set_options(self, changes: Sequence[Group]) -> None:
        """Set changed options, given for each group of `WholeParameters`."""
        for index, group in self.groups.items():
            group.update(changes[index])

    def give_options(self, groups: Sequence[Group]) -> None:
        """Copy the options that a step has changed, such as step counts, to the groups of `WholeParameters`."""
        for index, group in self.groups.items():
            for option, value in options_of(group).items():
                if groups[index].get(option, groups) is not value:
                    groups[index][option] = value

    def states(self) -> dict[Tensor, dict[str, Any]]:
        """Return the state of each parameter that has one."""
        if self.optimizer is None:
            return {}
        own = self.optimizer.state
        return {param: own[mine] for param, mine in self.params.items() if mine in own}

    def step(self) -> None:
        """Step the parameters that have a gradient."""
        if self.optimizer is not None:
            self.optimizer.step()

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
        self.optimizer.load_state_dict({"state": state, "param_groups": own_groups})
        self.groups = dict(zip(self.groups, self.optimizer.param_groups, strict=True))
