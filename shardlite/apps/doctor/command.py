"""`shardlite doctor` on the command line."""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import Any

from shardlite.apps import launch
from shardlite.apps.options import started_ranks


def add_doctor(commands: Any) -> None:
    """Add `shardlite doctor` to the commands."""
    parser: ArgumentParser = commands.add_parser(
        "doctor",
        help="say what this machine offers, which way messages take here, and why",
        description="Starts some ranks, asks for each transport as the library would, tries those that can be had, and"
        " says why each choice was made. The exit status is 1 if one gave wrong results or an error.",
    )
    parser.set_defaults(run=lambda options, arguments: run(parser, options, arguments))
    parser.add_argument("--ranks", type=int, metavar="N", help="processes (one per GPU, 2 without any)")


def run(parser: ArgumentParser, options: Namespace, arguments: Sequence[str]) -> int:
    """Start the ranks, or examine this machine as one of them. Return 1 if a trial failed, else 0."""
    if started_ranks(parser, options) is None:
        return launch.launch(options.ranks or launch.default_ranks(), arguments)
    from shardlite.apps.doctor.trials import run_trials

    return 0 if run_trials() else 1
