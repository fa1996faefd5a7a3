"""Run `shardlite plan`.

In: the options of the command line. Out: text and files.
"""

import json
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace

from shardlite.cli import precision_of, progress
from shardlite.lab.plan.report import Group, as_json, fit_json, text
from shardlite.lab.plan.source import find_source
from shardlite.plan import CLUSTERS, NAMES, Cluster, Planner, Setting, memory_of, scaling, search
from shardlite.wrapping import offload_of


def plan(options: Namespace) -> str:
    """Plan the runs of a command line, write the requested files, and return the text.

    Raises:
        ValueError: an option has an invalid value.
        SourceError: the model cannot be created or traced.
        LayoutError: the model cannot be sharded.
        ModuleNotFoundError: `--plots` is given and matplotlib is not installed.
        OSError: a file cannot be written.
    """
    cluster = None if options.cluster is None else CLUSTERS[options.cluster]
    if options.fit is not None:
        return _fit(options, cluster)
    card = None if options.card is None else memory_of(options.card)
    settings = list(_settings(options, on_gpu=cluster is None or cluster.on_gpu))
    planner = Planner(find_source(options.model, options.batch, options.context, options.inputs), progress=progress)
    groups = [_group(planner, setting, sorted(set(options.ranks)), cluster, card) for setting in settings]
    written = []
    if options.json is not None:
        options.json.write_text(json.dumps(as_json(planner, groups, cluster, card), indent=1) + "\n")
        written.append(options.json)
    if options.plots is not None:
        from shardlite.lab.plan.plots import paint

        written += paint(planner, groups, cluster, card, options.plots)
    told = "".join(f"\nwrote {path}" for path in written)
    return text(planner, groups, cluster, card, owners=options.owners) + (f"\n{told}" if told else "")


def _fit(options: Namespace, cluster: Cluster | None) -> str:
    """Search the cheapest runs that fit, and return their text."""
    keep, modules = _split_keep(options)
    (ranks,) = options.ranks
    batch = options.batch if options.global_batch is None else options.global_batch // ranks
    start = replace(
        setting_of(options, keep=modules),
        stage=options.stage[0],
        world_size=ranks,
        reshard_after_forward=not options.keep_unsharded,
        checkpoint=options.checkpoint == "with",
        offload=offload_of(options.offload),
        on_gpu=cluster is None or cluster.on_gpu,
        hierarchical=options.algorithm == "hierarchical",
    )
    planner = Planner(find_source(options.model, batch, options.context, options.inputs), progress=progress)
    found = search(planner, start, memory_of(options.fit, "--fit"), keep=keep, cluster=cluster)
    if options.json is None:
        return repr(found)
    options.json.write_text(json.dumps([fit_json(each) for each in (found, *found.alternatives)], indent=1) + "\n")
    return f"{found!r}\n\nwrote {options.json}"


def _split_keep(options: Namespace) -> tuple[list[str], Sequence[str] | None]:
    """Divide `--keep` into names of what a search must not change, and names of modules that keep fp32.

    Raises:
        ValueError: a name is neither, or modules are named without `--compute`.
    """
    given = options.keep if options.keep is not None else ()
    keep = [name for name in given if name in NAMES]
    modules = [name for name in given if name not in NAMES]
    if modules and options.compute is None:
        raise ValueError(
            f"--keep {','.join(modules)}: with --fit, these names forbid a change: {', '.join(NAMES)}. Other names are "
            "modules that keep fp32, and require --compute"
        )
    if options.checkpoint == "without":
        keep.append("checkpointing")
    return keep, modules if modules or options.keep == () else None


def _settings(options: Namespace, *, on_gpu: bool) -> Iterator[Setting]:
    """Yield the setting of each stage, without and with checkpointing."""
    for stage in options.stage:
        for recomputes in {"both": (False, True), "with": (True,), "without": (False,)}[options.checkpoint]:
            yield replace(
                setting_of(options),
                stage=stage,
                reshard_after_forward=not options.keep_unsharded,
                checkpoint=recomputes,
                offload=offload_of(options.offload),
                on_gpu=on_gpu,
                hierarchical=options.algorithm == "hierarchical",
            )


def _group(planner: Planner, setting: Setting, ranks: list[int], cluster: Cluster | None, card: int | None) -> Group:
    plans = [planner.plan(replace(setting, world_size=each)) for each in ranks]
    curve, fewest = [], None
    if cluster is not None:
        curve = scaling(planner.plan(replace(setting, world_size=1)), plans, cluster)
    if card is not None:
        progress("looking for the fewest ranks that fit")
        fewest = planner.smallest_world(setting, card)
    return Group(plans=plans, curve=curve, fewest=fewest)


def setting_of(options: Namespace, *, keep: Sequence[str] | None = None) -> Setting:
    """Return the setting of a command line, from the shared options `training` in `options.json`.

    With `--fit`, `keep` has the names of `--keep` that are modules.

    Raises:
        ValueError: the dtypes cannot be combined.
    """
    named = options.keep if getattr(options, "fit", None) is None else keep
    return Setting(
        precision=precision_of(options.compute, options.reduce, options.master, named),
        state=options.state,
        in_backward=options.in_backward,
        prefetch=options.prefetch,
    )
