"""`shardlite doctor` on the command line."""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from shardlite.cli import launch
from shardlite.cli.options import started_ranks


def run(parser: ArgumentParser, options: Namespace, arguments: Sequence[str]) -> int:
    """Start the ranks, or, as one of the started ranks, examine this machine. Return 1 if a trial failed, else 0."""
    if started_ranks(parser, options) is None:
        return launch.launch(options.ranks or launch.default_ranks(), arguments)
    from shardlite.cli.doctor.trials import run_trials

    return 0 if run_trials() else 1
