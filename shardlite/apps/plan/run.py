"""`shardlite plan` as a function: what is asked for, and what is returned and written.

In: the options of the command line. Out: text, and files.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardlite.apps.options import precision_of
from shardlite.apps.plan.cards import memory_of
from shardlite.apps.plan.clusters import CLUSTERS, Cluster
from shardlite.apps.plan.plan import Planner, Setting
from shardlite.apps.plan.report import Group, as_json, text
from shardlite.apps.plan.simulate import scaling
from shardlite.apps.plan.source import Source, find_source


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be planned."""

    source: Source
    settings: Sequence[Setting]
    """For one rank each."""

    ranks: Sequence[int]
    card: int | None = None
    """Bytes that a rank may hold."""

    cluster: Cluster | None = None
    json: Path | None = None
    plots: Path | None = None

    @staticmethod
    def of(options: Namespace) -> Request:
        """Return the request of a command line.

        Raises:
            ValueError: an option has a value that it cannot have.
        """
        cluster = None if options.cluster is None else CLUSTERS[options.cluster]
        return Request(
            source=find_source(options.model, options.batch, options.context, options.inputs),
            settings=list(_settings(options, on_gpu=cluster is None or cluster.on_gpu)),
            ranks=sorted(set(options.ranks)),
            card=None if options.card is None else memory_of(options.card),
            cluster=cluster,
            json=options.json,
            plots=options.plots,
        )


def plan(request: Request, *, progress: Callable[[str], None]) -> str:
    """Plan, write the files that were asked for, and return the text.

    Raises:
        SourceError: the model cannot be made or traced.
        LayoutError: a setting is invalid.
        ModuleNotFoundError: plots need matplotlib.
        OSError: a file cannot be written.
    """
    planner = Planner(request.source, progress=progress)
    groups = [_group(planner, setting, request, progress) for setting in request.settings]
    shown = text(planner, groups, request.cluster, request.card)
    if request.json is not None:
        data = as_json(planner, groups, request.cluster, request.card)
        request.json.write_text(json.dumps(data, indent=1) + "\n")
        shown += f"\n\nwrote {request.json}"
    if request.plots is not None:
        from shardlite.apps.plan.plots import paint

        written = paint(planner, groups, request.cluster, request.card, request.plots)
        shown += "\n\n" + "\n".join(f"wrote {path}" for path in written)
    return shown


def _settings(options: Namespace, *, on_gpu: bool) -> Iterator[Setting]:
    """Yield each stage, without and with checkpointing."""
    precision = precision_of(options)
    for stage in options.stage:
        for recomputes in {"both": (False, True), "with": (True,), "without": (False,)}[options.checkpoint]:
            yield Setting(
                stage=stage,
                precision=precision,
                state=options.state,
                in_backward=options.in_backward,
                prefetch=options.prefetch,
                reshard_after_forward=not options.keep_unsharded,
                checkpoint=recomputes,
                on_gpu=on_gpu,
                hierarchical=options.algorithm == "hierarchical",
            )


def _group(planner: Planner, setting: Setting, request: Request, progress: Callable[[str], None]) -> Group:
    plans = [planner.plan(replace(setting, world_size=ranks)) for ranks in request.ranks]
    curve, fewest = [], None
    if request.cluster is not None:
        alone = planner.plan(replace(setting, world_size=1))
        curve = scaling(alone, plans, request.cluster)
    if request.card is not None:
        progress("looking for the fewest ranks that fit")
        fewest = planner.smallest_world(setting, request.card)
    return Group(plans=plans, curve=curve, fewest=fewest)
