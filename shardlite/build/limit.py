"""`memory_limit`: refuse a model before anything is allocated if states and buffers cannot fit, and say what would.

In: a plan that all ranks agree on, and the options. Out: nothing, or an error, the same on every rank.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from shardlite.build.budget import Recipe, budget_of
from shardlite.build.partition import UnitRule
from shardlite.build.plan import Options, Plan, plan_units
from shardlite.build.timeline import ACTIVATIONS, Course, course_of, plain_events
from shardlite.config import MemoryLimit, Precision
from shardlite.errors import LayoutError

MOST_RANKS = 4096
"""Up to which more ranks are tried."""

_COMPACT = Precision(compute=torch.bfloat16, master="split24")


@dataclass(frozen=True)
class Variant:
    """What is planned, or could be instead."""

    words: str
    options: Options
    limit: MemoryLimit
    world_size: int
    device: torch.device


def check_memory_limit(
    module: nn.Module, plan: Plan, options: Options, world_size: int, reshard: UnitRule = True
) -> None:
    """Compare what a rank will hold with the limit in `options`, if there is one. To be called before allocation.

    Counted are states and buffers at their largest together, the module's own buffers, and the activations that the
    limit names.

    Raises:
        LayoutError: they do not fit.
    """
    limit = options.memory_limit
    if limit is None:
        return
    asked = Variant("as asked", options, limit, world_size, plan.device)
    course = _course(module, asked, reshard, plan)
    total = course.total + limit.activations
    if total <= limit.nbytes:
        return
    rows = [("as asked", total), *_what_would_do(module, asked, reshard)]
    width = max(len(words) for words, _ in rows)
    table = [f"  {words:<{width}}  {_gb(nbytes)}{_fits(nbytes, limit)}" for words, nbytes in rows]
    parts = ", ".join(f"{purpose} {_gb(nbytes)}" for purpose, nbytes in course.peak.items() if nbytes)
    raise LayoutError(
        f"memory_limit: a rank would hold {_gb(total)} of {_gb(limit.nbytes)}: {parts}"
        f"{f', {ACTIVATIONS} {_gb(limit.activations)}' if limit.activations else ''}. What to change:\n"
        + "\n".join(table)
    )


def _what_would_do(module: nn.Module, asked: Variant, reshard: UnitRule) -> Iterator[tuple[str, int]]:
    for variant in _variants(asked):
        nbytes = _course(module, variant, reshard).total + variant.limit.activations
        yield variant.words, nbytes
    ranks = asked.world_size
    while 2 * ranks <= MOST_RANKS:
        ranks *= 2
        nbytes = _course(module, replace(asked, world_size=ranks), reshard).total + asked.limit.activations
        if nbytes <= asked.limit.nbytes or 2 * ranks > MOST_RANKS:
            yield f"{ranks} ranks", nbytes
            return


def _variants(asked: Variant) -> Iterator[Variant]:
    """Yield one change after the other, and all together."""
    options, limit = asked.options, asked.limit
    sharded = replace(options, stage=3)
    compact = replace(sharded, precision=_COMPACT)
    small = replace(limit, state="int8", in_backward=True)
    if options.stage < 3:
        yield replace(asked, words="stage=3", options=sharded)
    if not limit.in_backward:
        yield replace(asked, words="AdamW(in_backward=True)", limit=replace(limit, in_backward=True))
    if limit.state != "int8":
        yield replace(asked, words='AdamW(state="int8")', limit=replace(limit, state="int8"))
    if options.precision.master != "split24":
        words = 'Precision(compute=torch.bfloat16, master="split24")'
        yield replace(asked, words=words, options=replace(options, precision=_COMPACT))
    yield replace(asked, words="all of these, at stage 3", options=compact, limit=small)


def _course(module: nn.Module, variant: Variant, reshard: UnitRule, plan: Plan | None = None) -> Course:
    """Return the course of a step without activations."""
    plan = plan or plan_units(module, variant.options, variant.world_size, variant.device)
    recipe = Recipe(
        stage=variant.options.stage,
        world_size=variant.world_size,
        prefetch=variant.options.prefetch,
        state=variant.limit.state,
        in_backward=variant.limit.in_backward,
        on_gpu=variant.device.type == "cuda",
    )
    budget = budget_of(plan, recipe, reshard=reshard, buffers=sum(each.nbytes for each in module.buffers()))
    return course_of(budget, list(plain_events(budget)))


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.3g} GB"


def _fits(nbytes: int, limit: MemoryLimit) -> str:
    return ", fits" if nbytes <= limit.nbytes else ""
