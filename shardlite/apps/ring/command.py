"""`shardlite ring` on the command line. The command simulates a schedule in this process alone."""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING

from shardlite.apps.options import check_file, usage_errors

if TYPE_CHECKING:
    from shardlite.comm import Schedule

_MOST_RANKS = 64


def run(parser: ArgumentParser, options: Namespace, _: Sequence[str]) -> int:
    """Print the picture of a schedule, and write the image if a file is given."""
    node = 1 if options.node is None else options.node
    with usage_errors(parser, "--png"):
        _check(options)
        from shardlite.apps.ring.picture import NARROW, WIDTH, text
        from shardlite.comm import schedule as schedules

        make = schedules.all_gather if options.operation == "all-gather" else schedules.reduce_scatter
        schedule = make(options.algorithm, options.ranks, node=node)
        if options.png is not None:
            _write(schedule, options.png, node)
    columns = get_terminal_size((WIDTH, 0)).columns  # from COLUMNS or the terminal, or else `WIDTH`
    print(text(schedule, node, min(WIDTH, max(NARROW, columns))))
    if options.png is not None:
        print(f"\nwrote {options.png}")
    return 0


def _check(options: Namespace) -> None:
    """Check the options as far as this is possible without PyTorch.

    Raises:
        ValueError: an option has an invalid value.
        OSError: the path of the image cannot be written.
    """
    if not 1 <= options.ranks <= _MOST_RANKS:
        raise ValueError(f"--ranks is {options.ranks}; it must be from 1 to {_MOST_RANKS}")
    if options.algorithm == "hierarchical" and options.node is None:
        raise ValueError(f"--algorithm hierarchical needs --node: ranks per node, a divisor of {options.ranks}")
    check_file("--png", options.png)


def _write(schedule: "Schedule", path: Path, node: int) -> None:
    from shardlite.apps.ring.painting import paint

    try:
        paint(schedule, path, node)
    except OSError as error:
        raise OSError(f"--png {path} cannot be written ({error.strerror or error}): name a file elsewhere") from error
