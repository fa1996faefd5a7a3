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
        help="show which transports this machine supports, which is selected, and why",
        description="Start some ranks, select each transport as the library does, test those that are available, and"
        " explain each choice. The exit status is 1 if a transport gave wrong results or an error.",
    )
    parser.set_defaults(run=lambda options, arguments: run(parser, options, arguments))
    parser.add_argument("--ranks", type=int, metavar="N", help="processes (one per GPU, 2 without any)")


def run(parser: ArgumentParser, options: Namespace, arguments: Sequence[str]) -> int:
    """Start the ranks, or examine this machine as one of them. Return 1 if a trial failed, else 0."""
    if started_ranks(parser, options) is None:
        return launch.launch(options.ranks or launch.default_ranks(), arguments)
    from shardlite.apps.doctor.trials import run_trials

    return 0 if run_trials() else 1
