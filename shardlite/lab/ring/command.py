"""`shardlite ring` on the command line. The command simulates a schedule in this process alone."""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from shutil import get_terminal_size

from shardlite.cli import usage_errors

_MOST_RANKS = 64


def run(parser: ArgumentParser, options: Namespace, _: Sequence[str]) -> int:
    """Print the picture of a schedule."""
    node = 1 if options.node is None else options.node
    with usage_errors(parser):
        _check(options)
        from shardlite.comm import schedule as schedules
        from shardlite.lab.ring.picture import NARROW, WIDTH, text

        make = schedules.all_gather if options.operation == "all-gather" else schedules.reduce_scatter
        schedule = make(options.algorithm, options.ranks, node=node)
    columns = get_terminal_size((WIDTH, 0)).columns  # from COLUMNS or the terminal, or else `WIDTH`
    print(text(schedule, node, min(WIDTH, max(NARROW, columns))))
    return 0


def _check(options: Namespace) -> None:
    """Check the options as far as this is possible without PyTorch.

    Raises:
        ValueError: an option has an invalid value.
    """
    if not 1 <= options.ranks <= _MOST_RANKS:
        raise ValueError(f"--ranks is {options.ranks}; it must be from 1 to {_MOST_RANKS}")
    if options.algorithm == "hierarchical" and options.node is None:
        raise ValueError(f"--algorithm hierarchical needs --node: ranks per node, a divisor of {options.ranks}")
