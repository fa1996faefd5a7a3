"""`memory_limit`: refuse a model before anything is allocated if states and buffers cannot fit, and say what would.

In: a plan that all ranks agree on, and the options. Out: nothing, or an error, the same on every rank.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from shardlite.build.budget import Recipe, budget_of
from shardlite.build.plan import Options, Plan, plan_units
from shardlite.build.timeline import ACTIVATIONS, Course, course_of, plain_events
from shardlite.config import MemoryLimit
from shardlite.errors import LayoutError

MOST_RANKS = 4096
"""Up to which more ranks are tried."""


def check_memory_limit(module: nn.Module, plan: Plan, options: Options, world_size: int) -> None:
    """Compare the memory of a rank with `options.memory_limit`, if there is one. Call it before allocation.

    Counted are states and buffers at their joint peak, the module's own buffers, and the activations that the limit
    names.

    Raises:
        LayoutError: they exceed the limit.
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
    course = _course(module, asked, plan)
    total = course.total + limit.activations
    if total <= limit.nbytes:
        return
    variants = [*_variants(asked), *_with_more_ranks(module, asked, limit)]
    rows = [(words, _course(module, recipe).total + limit.activations) for words, recipe in variants]
    rows.insert(0, ("as asked", total))
    width = max(len(words) for words, _ in rows)
    table = [f"  {words:<{width}}  {_gb(nbytes)}{', fits' * (nbytes <= limit.nbytes)}" for words, nbytes in rows]
    parts = ", ".join(f"{purpose} {_gb(nbytes)}" for purpose, nbytes in course.peak.items() if nbytes)
    raise LayoutError(
        f"memory_limit: a rank would hold {_gb(total)} of {_gb(limit.nbytes)}: {parts}"
        f"{f', {ACTIVATIONS} {_gb(limit.activations)}' if limit.activations else ''}. What to change:\n"
        + "\n".join(table)
    )


def _variants(asked: Recipe) -> Iterator[tuple[str, Recipe]]:
    """Yield one change after the other, and all together."""
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
    all_options = replace(options, stage=3, precision=compact)
    yield "all of these, at stage 3", replace(asked, options=all_options, state="int8", in_backward=True)


def _with_more_ranks(module: nn.Module, asked: Recipe, limit: MemoryLimit) -> Iterator[tuple[str, Recipe]]:
    """Yield the recipe with the smallest number of ranks that fits, or with the largest that is tried."""
    recipe = asked
    while 2 * recipe.world_size <= MOST_RANKS:
        recipe = replace(recipe, world_size=2 * recipe.world_size)
        if _course(module, recipe).total + limit.activations <= limit.nbytes or 2 * recipe.world_size > MOST_RANKS:
            yield f"{recipe.world_size} ranks", recipe
            return


def _course(module: nn.Module, recipe: Recipe, plan: Plan | None = None) -> Course:
    """Return the course of a step without activations."""
    plan = plan or plan_units(module, recipe.options, recipe.world_size, recipe.device)
    budget = budget_of(plan, recipe, buffers=sum(each.nbytes for each in module.buffers()))
    return course_of(budget, list(plain_events(budget)))


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.3g} GB"
