"""Hand shards to optimizers, and step whole parameters.

In: optimizers of the program, and wrapped models. Out: optimizers that hold shards with their part of the state, or an
error that tells what to use instead: `WholeParameters`. Read `hand_over.py` first, which decides.

    hand_over.py     replaces parameters by shards       states.py        saves and loads the states of shards
    probe.py         tries an optimizer on shards        param_groups.py  matches groups of a saved state by names
    twins.py         the optimizers of a trial

In `WholeParameters`, each parameter has one owner, a rank that steps the whole parameter, with the bits of the same
optimizer on unsharded parameters. Read `whole_parameters.py` first.

    members.py       describes one parameter             instance.py      an instance of the program's class
    groups.py        whole and elementwise parameters    steps.py         steps the parameters of one unit
    assignment.py    chooses owners                      pipeline.py      moves pieces to the owners and back
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardlite.optimizers.hand_over import hand_over, judge
from shardlite.optimizers.param_groups import Group, match_groups, names_in, plain_name
from shardlite.optimizers.states import init_states, load_states, member_of, name_of_value, numbers_among

if TYPE_CHECKING:
    from shardlite.optimizers.assignment import Owned, assign, describe, ranges_of
    from shardlite.optimizers.groups import is_hidden_matrix
    from shardlite.optimizers.probe import probe_shards
    from shardlite.optimizers.whole_parameters import WholeParameters

_LATE = {
    **dict.fromkeys(("Owned", "assign", "describe", "ranges_of"), "assignment"),
    "is_hidden_matrix": "groups",
    "probe_shards": "probe",
    "WholeParameters": "whole_parameters",
}
"""Names that few programs use, and the files that they are imported from at their first use."""


def _import_late(name: str) -> Any:
    """Import and return a name in `_LATE`. This is the module's `__getattr__` (PEP 562)."""
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LATE[name]}"), name)


if not TYPE_CHECKING:  # with a module-level `__getattr__`, a type checker would accept any name
    __getattr__ = _import_late
