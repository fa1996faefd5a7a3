"""`shardlite plan` on the command line."""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from shardlite.cli import MOST_RANKS, check_numbers, usage_errors
from shardlite.errors import LayoutError
from shardlite.lab.plan.presets import check_model
from shardlite.plan import CLUSTERS, memory_of


def run(parser: ArgumentParser, options: Namespace, _: Sequence[str]) -> int:
    """Check the options, print the plan, and write the files. Return 1 if nothing fits."""
    with usage_errors(parser, "--plots"):
        _check(options)
        from shardlite.lab.plan.run import plan

        try:
            print(plan(options))
        except LayoutError as nothing:
            if options.fit is None:
                raise
            print(nothing)
            return 1
    return 0


def _check(options: Namespace) -> None:
    """Check the options as far as this is possible without PyTorch.

    Raises:
        ValueError: an option has an invalid value.
    """
    check_numbers(options, batch=1, context=1, prefetch=0)
    check_model(options.model)
    if not all(1 <= ranks <= MOST_RANKS for ranks in options.ranks):
        raise ValueError(f"--ranks takes 1 to {MOST_RANKS} ranks, got {' '.join(map(str, options.ranks))}")
    if options.cluster not in (None, *CLUSTERS):
        raise ValueError(f"--cluster {options.cluster!r} is not one of {', '.join(CLUSTERS)}")
    if options.offload and options.cluster is not None and not CLUSTERS[options.cluster].on_gpu:
        raise ValueError(f"--offload needs GPUs, and the cluster {options.cluster} has none")
    if options.card is not None:
        memory_of(options.card)
    if options.fit is not None:
        _check_fit(options)
    elif options.global_batch is not None:
        raise ValueError("--global-batch requires --fit: without a search, --batch is the batch of a rank")


def _check_fit(options: Namespace) -> None:
    memory_of(options.fit, "--fit")
    if len(options.ranks) > 1:
        raise ValueError("--fit takes one number of ranks: give --ranks N")
    if len(options.stage) > 1:
        raise ValueError("--fit searches all stages, and --keep stage keeps one: give --stage one number")
    for name in ("owners", "card", "plots"):
        if getattr(options, name):
            raise ValueError(f"--{name} cannot be combined with --fit")
    if options.global_batch is not None and (options.global_batch < 1 or options.global_batch % options.ranks[0]):
        raise ValueError(f"--global-batch must be a multiple of --ranks {options.ranks[0]}, got {options.global_batch}")
