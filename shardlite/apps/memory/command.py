"""`shardlite memory` as a function of one rank: train, record one step, compare it with the plan.

In: the options of the command line. Out: text on rank 0, and a picture.
"""

from __future__ import annotations

import importlib.util
import sys
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from shardlite.apps.memory.recorder import Timeline, record
from shardlite.apps.memory.report import Comparison, heading, table
from shardlite.apps.memory.systems import build_fsdp2, build_shardlite
from shardlite.apps.options import check_file, check_numbers
from shardlite.apps.plan.command import precision_of
from shardlite.apps.plan.plan import Planner, Setting
from shardlite.apps.plan.source import Source, find_source


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be measured."""

    source: Source
    setting: Setting
    """For one rank."""

    picture: Path | None = None

    @staticmethod
    def of(options: Namespace, dtypes: Mapping[str, torch.dtype]) -> Request:
        """Return the request of a command line.

        Raises:
            ValueError: an option has a value that it cannot have.
            OSError: there cannot be a picture at its path.
            ModuleNotFoundError: a picture needs matplotlib.
        """
        check_numbers(options, batch=1, context=1, prefetch=0)
        if options.timeline is not None:
            check_file("--timeline", options.timeline)
            if importlib.util.find_spec("matplotlib") is None:
                raise ModuleNotFoundError("matplotlib is not installed", name="matplotlib")
        setting = Setting(
            stage=options.stage,
            precision=precision_of(options, dtypes),
            state=options.state,
            in_backward=options.in_backward,
            prefetch=options.prefetch,
            on_gpu=False,
        )
        source = find_source(options.model, options.batch, options.context, options.inputs)
        return Request(source=source, setting=setting, picture=options.timeline)


def check(request: Request, ranks: int) -> None:
    """Plan the run, to find errors of the model and of the setting before ranks are started.

    Raises:
        SourceError: the model cannot be made, called or traced.
        LayoutError: ShardLite does not accept the model or the setting.
    """
    Planner(request.source, progress=_say).plan(replace(request.setting, world_size=ranks))


def run(request: Request) -> None:
    """Measure as one of the ranks that a launcher has started, on the CPU. Rank 0 prints and draws.

    Raises:
        SourceError: the model cannot be made or traced.
        LayoutError: ShardLite does not accept the model or the setting.
        OSError: the picture cannot be written.
    """
    dist.init_process_group("gloo")
    try:
        setting = replace(request.setting, world_size=dist.get_world_size())
        rank = dist.get_rank()
        timelines = _measure(request, setting)
    finally:
        dist.destroy_process_group()
    if rank == 0:
        _show(request, setting, timelines)


def _measure(request: Request, setting: Setting) -> list[Timeline]:
    """Record a step of ShardLite, and for a picture one of FSDP2."""
    source = request.source
    _say(f"ShardLite trains {heading(source, setting)}")
    timelines = [record("ShardLite", lambda: build_shardlite(source, setting), source)]
    if request.picture is not None:
        _say("FSDP2 trains it")
        units = timelines[0].units
        timelines.append(record("FSDP2", lambda: build_fsdp2(source, setting, units), source))
    return timelines


def _show(request: Request, setting: Setting, timelines: list[Timeline]) -> None:
    plan = Planner(request.source, progress=_say).plan(setting)
    print(table(request.source, Comparison(plan, timelines[0]), timelines[1:]))
    if request.picture is not None:
        from shardlite.apps.memory.plots import paint  # optional, and slow to import

        paint(request.source, setting, timelines, request.picture)
        print(f"wrote {request.picture}")
    sys.stdout.flush()


def _say(words: str) -> None:
    """Report progress, on rank 0."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"{words} ...", file=sys.stderr, flush=True)
