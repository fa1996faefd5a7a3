"""Predict the memory of a training step before anything is allocated.

In: the plan of a model (`shardlite.wrapping`), the options of a run, and the events of a step. Out: the bytes of a rank
by purpose, their peak, and the order of operations. `memory_limit=` and `shardlite plan` ask this room. Read
`budget.py` first, then `timeline.py`.
"""

from shardlite.plan.budget import HELD, Budget, Recipe, UnitBudget, budget_of
from shardlite.plan.timeline import ACTIVATIONS, MOST_RANKS, Event, Kind, StepTimeline, check_memory_limit, timeline_of
