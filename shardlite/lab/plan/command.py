"""`shardlite plan` on the command line."""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from shardlite.cli import MOST_RANKS, check_numbers, usage_errors
from shardlite.lab.plan.presets import check_model
from shardlite.plan import CLUSTERS, memory_of


def run(parser: ArgumentParser, options: Namespace, _: Sequence[str]) -> int:
    """Check the options, print the plan, and write the files."""
    with usage_errors(parser, "--plots"):
        _check(options)
        from shardlite.lab.plan.run import plan

        print(plan(options))
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
