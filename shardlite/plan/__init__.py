"""Predict the memory of a training step before anything is allocated, and its traffic and time.

In: the plan of a model (`shardlite.wrapping`), the options of a run, and the events of a step. Out: the bytes of a rank
by purpose, their peak, and the order of operations. `memory_limit=` and `shardlite plan` use this room. Read
`budget.py` first, then `timeline.py`.

    budget.py     bytes of a plan, for one setting   timeline.py  when temporary memory exists in a step
    limit.py      `memory_limit=`                    trace.py     activations and operations of a step, as events
    source.py     a model and its batch              planner.py   one model in many settings
    clusters.py   cards and links by name            step_time.py step time, from events and the cost model
    fitting.py    the cheapest runs that fit         fit_model.py `shardlite.fit`, the search for a model
    fit_text.py   describes runs that fit            replay.py    buffers for full weights in a step

A name is imported when it is first used, because `clusters.py` needs no PyTorch, and a limit needs no fake tensors.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardlite.plan.budget import HELD, UnitBudget
    from shardlite.plan.clusters import CARDS, CLUSTERS, LINKS, Card, Cluster, LinkCost, Operation, memory_of, nbytes_of
    from shardlite.plan.fit_model import fit
    from shardlite.plan.fitting import NAMES, Fit, search
    from shardlite.plan.limit import MOST_RANKS, check_memory_limit
    from shardlite.plan.planner import Planner, RankPlan, Setting
    from shardlite.plan.source import Source, SourceError, units_of
    from shardlite.plan.step_time import Scaling, scaling, simulate
    from shardlite.plan.timeline import ACTIVATIONS, Event, Kind


def _import_late(name: str) -> Any:
    """Import and return a name of this room. This is the module's `__getattr__` (PEP 562)."""
    files = ("clusters", "limit", "budget", "timeline", "planner", "step_time", "source", "fitting", "fit_model") * (
        name[0] != "_"
    )
    for module in (import_module(f"{__name__}.{file}") for file in files):
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if not TYPE_CHECKING:  # with a module-level `__getattr__`, a type checker would accept any name
    __getattr__ = _import_late
