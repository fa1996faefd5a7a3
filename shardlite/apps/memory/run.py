"""`shardlite memory` as a function of one rank: train, record one step, compare it with the plan.

In: the options of the command line. Out: text on rank 0, and a picture.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from shardlite.apps.memory.recorder import Timeline, record
from shardlite.apps.memory.report import Comparison, heading, table
from shardlite.apps.memory.systems import build_fsdp2, build_shardlite
from shardlite.apps.options import precision_of, progress
from shardlite.apps.plan.plan import Planner, Setting
from shardlite.apps.plan.source import Source, find_source


def parse(options: Namespace) -> tuple[Source, Setting]:
    """Return the model of a command line, and the setting of its run on one rank.

    Raises:
        ValueError: an option has a value that it cannot have.
    """
    setting = Setting(
        stage=options.stage,
        precision=precision_of(options),
        state=options.state,
        in_backward=options.in_backward,
        prefetch=options.prefetch,
        on_gpu=False,
    )
    return find_source(options.model, options.batch, options.context, options.inputs), setting


def check(source: Source, setting: Setting, ranks: int) -> None:
    """Plan the run, to find errors of the model and of the setting before ranks are started.

    Raises:
        SourceError: the model cannot be made, called or traced.
        LayoutError: ShardLite does not accept the model or the setting.
    """
    Planner(source, progress=_say).plan(replace(setting, world_size=ranks))


def measure(source: Source, setting: Setting, picture: Path | None) -> None:
    """Measure as one of the ranks that a launcher has started, on the CPU. Rank 0 prints and draws.

    Raises:
        SourceError: the model cannot be made or traced.
        LayoutError: ShardLite does not accept the model or the setting.
        OSError: the picture cannot be written.
    """
    dist.init_process_group("gloo")
    try:
        setting = replace(setting, world_size=dist.get_world_size())
        rank = dist.get_rank()
        timelines = _record(source, setting, beside_fsdp2=picture is not None)
    finally:
        dist.destroy_process_group()
    if rank == 0:
        plan = Planner(source, progress=_say).plan(setting)
        print(table(source, Comparison(plan, timelines[0]), timelines[1:]), flush=True)
        if picture is not None:
            from shardlite.apps.memory.plots import paint  # optional, and slow to import

            paint(source, setting, timelines, picture)
            print(f"wrote {picture}", flush=True)


def _record(source: Source, setting: Setting, *, beside_fsdp2: bool) -> list[Timeline]:
    """Record a step of ShardLite, and for a picture one of FSDP2."""
    _say(f"ShardLite trains {heading(source, setting)}")
    timelines = [record("ShardLite", lambda: build_shardlite(source, setting), source)]
    if beside_fsdp2:
        _say("FSDP2 trains it")
        units = timelines[0].units
        timelines.append(record("FSDP2", lambda: build_fsdp2(source, setting, units), source))
    return timelines


def _say(words: str) -> None:
    """Report progress, on rank 0."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        progress(words)
