"""Compare the memory of a rank with `memory_limit=` before anything is allocated, and suggest changes.

In: a module, its `Plan`, and the options. Out: nothing, or an error with a table of what would fit. A step is predicted
from the events of a chain of units without activations, so the program need not run.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import torch
from torch import nn

from shardlite.config import MemoryLimit
from shardlite.errors import LayoutError
from shardlite.plan.budget import Recipe, budget_of
from shardlite.plan.timeline import ACTIVATIONS, StepTimeline, plain_events, timeline_of
from shardlite.wrapping import Offload, Options, Plan, plan_units

MOST_RANKS = 4096
"""Maximum number of ranks that `check_memory_limit` tries."""


def check_memory_limit(module: nn.Module, plan: Plan, options: Options, world_size: int) -> None:
    """Compare the memory of a rank with `options.memory_limit`, if it is set. Call this before allocation.

    The memory is the peak of the sum of all purposes in a step, including the module's own buffers, plus the
    activations that the limit names.

    Raises:
        LayoutError: the memory exceeds the limit.
    """
    limit = options.memory_limit
    if limit is None:
        return
    asked = Recipe(
        options=options,
        world_size=world_size,
        device=plan.device,
        state=limit.state,
        in_backward=limit.in_backward,
    )
    timeline = _timeline(module, asked, plan)
    total = timeline.total + limit.activations
    if total <= limit.nbytes:
        return
    variants = [*_variants(asked), *_with_more_ranks(module, asked, limit)]
    rows = [("as asked", total)]
    for words, recipe in variants:
        with suppress(ValueError):  # `offload` may be less than the smallest unit in other formats
            rows.append((words, _timeline(module, recipe).total + limit.activations))
    width = max(len(words) for words, _ in rows)
    table = [f"  {words:<{width}}  {_gb(nbytes)}{', fits' * (nbytes <= limit.nbytes)}" for words, nbytes in rows]
    parts = ", ".join(f"{purpose} {_gb(nbytes)}" for purpose, nbytes in timeline.peak.items() if nbytes)
    raise LayoutError(
        f"memory_limit: a rank would hold {_gb(total)} of {_gb(limit.nbytes)}: {parts}"
        f"{f', {ACTIVATIONS} {_gb(limit.activations)}' if limit.activations else ''}. What to change:\n"
        + "\n".join(table)
    )


def _variants(asked: Recipe) -> Iterator[tuple[str, Recipe]]:
    """Yield each change of `asked` that saves memory, with a description. Yield all changes together at the end."""
    options = asked.options
    if options.stage < 3:
        yield "stage=3", replace(asked, options=replace(options, stage=3))
    if not asked.in_backward:
        yield "AdamW(in_backward=True)", replace(asked, in_backward=True)
    if asked.state != "int8":
        yield 'AdamW(state="int8")', replace(asked, state="int8")
    compact = replace(options.precision, compute=torch.bfloat16, master="split24")
    if options.precision.master != "split24":
        words = 'Precision(compute=torch.bfloat16, master="split24")'
        yield words, replace(asked, options=replace(options, precision=compact))
    if asked.on_gpu and options.offload != Offload():
        yield "offload=True", replace(asked, options=replace(options, offload=Offload()))
    all_options = replace(options, stage=3, precision=compact, offload=Offload() if asked.on_gpu else None)
    yield "all of these, at stage 3", replace(asked, options=all_options, state="int8", in_backward=True)


def _with_more_ranks(module: nn.Module, asked: Recipe, limit: MemoryLimit) -> Iterator[tuple[str, Recipe]]:
    """Double the number of ranks until the limit holds or the maximum is reached, and yield the resulting recipe."""
    recipe = asked
    while 2 * recipe.world_size <= MOST_RANKS:
        recipe = replace(recipe, world_size=2 * recipe.world_size)
        if _timeline(module, recipe).total + limit.activations <= limit.nbytes or 2 * recipe.world_size > MOST_RANKS:
            yield f"{recipe.world_size} ranks", recipe
            return


def _timeline(module: nn.Module, recipe: Recipe, plan: Plan | None = None) -> StepTimeline:
    """Return the timeline of a step without activations."""
    limit = recipe.options.memory_limit and replace(recipe.options.memory_limit, state=recipe.state)  # type: ignore[arg-type]
    options = replace(recipe.options, memory_limit=limit)  # offloaded units depend on the format of the moments
    plan = plan or plan_units(module, options, recipe.world_size, recipe.device)
    budget = budget_of(plan, recipe, buffers=sum(each.nbytes for each in module.buffers()))
    return timeline_of(budget, list(plain_events(budget)))


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.3g} GB"
