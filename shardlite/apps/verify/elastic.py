"""Runs with order="tree" on different numbers of ranks, and one whose number of ranks changes on the way.

Judging is done elsewhere. The ranks of a smaller run are the first ones; the others wait for them.

Legend: `W` ranks, `P` parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import torch.distributed as dist
from torch import Tensor

from shardlite.apps.verify.task import Task
from shardlite.checkpoint import load, save
from shardlite.comm import all_gather_json
from shardlite.config import Route
from shardlite.errors import LayoutError
from shardlite.model import ShardLite
from shardlite.optim import AdamW

_CLIP = 1.0

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Runs:
    """Whole parameters after the last step. Only rank 0 has them."""

    parts: int
    fixed: Mapping[int, Weights]
    """By number of ranks; the last one has all."""

    changing: Weights
    """Of the run whose number of ranks changed."""

    path: Sequence[int]
    """The numbers of ranks of that run, one after the other."""


def check(task: Task) -> None:
    """Check that there is a tree over the ranks, and that some of them can make a group.

    Raises:
        LayoutError: their number is no power of two, or they are not all of the program.
    """
    if task.world_size.bit_count() != 1:
        raise LayoutError(f"verify(elastic=True) compares powers of two of ranks, got {task.world_size} ranks")
    if task.world_size != dist.get_world_size():
        raise LayoutError(
            f"verify(elastic=True) makes groups of ranks, for which PyTorch calls all {dist.get_world_size()} of the "
            f"program: leave group=None, instead of a group of {task.world_size}"
        )


def train(task: Task) -> Runs:
    """Train on 1, 2, 4, ... ranks, and on fewer and fewer of them. Collective."""
    counts = [1 << i for i in range(task.world_size.bit_length())]
    made = {count: dist.new_group(range(count)) for count in counts}  # to be called by ranks outside, too
    groups = {count: group if task.rank < count else None for count, group in made.items()}
    path = counts[::-1][: task.steps]
    edges = [i * task.steps // len(path) for i in range(len(path) + 1)]
    fixed = {count: _run(task, groups[count], range(task.steps), None) for count in counts}
    changing: Weights = {}
    with TemporaryDirectory() as own:
        folder = Path(all_gather_json(task.group, own, "a folder")[0])
        for count, (start, stop) in zip(path, pairwise(edges), strict=True):
            changing = _run(task, groups[count], range(start, stop), folder)
            all_gather_json(task.group, None, "a run on fewer ranks")  # the folder is of use until here
    return Runs(2 * task.world_size, fixed, changing, path)


def _run(task: Task, group: dist.ProcessGroup | None, steps: range, folder: Path | None) -> Weights:
    """Train on the ranks of a group from what is in a folder, and save there. Return the parameters, on rank 0."""
    if group is None:
        return {}
    model = ShardLite(
        task.model(),
        units=task.units,
        precision=task.precision,
        group=group,
        route=Route(order="tree", parts=2 * task.world_size),
        buffers="own",
    )
    optimizer = AdamW(model.parameters(), lr=task.lr, weight_decay=task.weight_decay)
    if folder is not None and steps.start:
        load(folder, model, optimizer)
    for step in steps:
        for part in model.parts(step, seed=task.seed):
            model(*task.make_batch(step, part)).backward()
        model.clip_grad_norm_(_CLIP)
        optimizer.step()
        optimizer.zero_grad()
    if folder is not None:
        save(folder, model, optimizer)
    names = {name for name, _ in model.named_parameters()}
    return {name: value for name, value in model.full_state_dict(rank=0).items() if name in names}
