"""`shardlite ring` on the command line. Runs nothing and needs no other process."""

from argparse import ArgumentParser, Namespace
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any

from shardlite.apps.options import ALGORITHMS, check_file, usage_errors

if TYPE_CHECKING:
    from shardlite.comm import Schedule

_MOST_RANKS = 64  # in a picture


def add_ring(commands: Any) -> None:
    """Add `shardlite ring` to the commands."""
    parser: ArgumentParser = commands.add_parser(
        "ring",
        help="show step by step how the segments of a buffer go round the ranks",
        description="Print, step by step, what each rank holds and sends in a collective, and in which order sums are"
        " added. Runs nothing and needs no other process.",
    )
    parser.set_defaults(run=lambda options, _: run(parser, options))
    parser.add_argument("--ranks", type=int, default=4, metavar="N", help="from 1 to 64 (4)")
    parser.add_argument(
        "--operation", choices=("all-gather", "reduce-scatter"), default="reduce-scatter", help="(reduce-scatter)"
    )
    parser.add_argument("--algorithm", choices=ALGORITHMS, default="ring", help="(ring)")
    parser.add_argument("--node", type=int, metavar="N", help="ranks per node; for hierarchical, and needed there")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw it as an image, too; needs matplotlib")


def run(parser: ArgumentParser, options: Namespace) -> int:
    """Print the picture of a schedule, and write the image if a file is given."""
    node = 1 if options.node is None else options.node
    with usage_errors(parser, "--png"):
        _check(options)
        from shardlite.apps.ring.picture import NARROW, WIDTH, text

        schedule = _schedule(options, node)
        if options.png is not None:
            _write(schedule, options.png, node)
    columns = get_terminal_size((WIDTH, 0)).columns  # COLUMNS, or those of the terminal, or else `WIDTH`
    print(text(schedule, node, min(WIDTH, max(NARROW, columns))))
    if options.png is not None:
        print(f"\nwrote {options.png}")
    return 0


def _check(options: Namespace) -> None:
    """Raise a `ValueError` if there is no schedule, or none that can be shown."""
    if not 1 <= options.ranks <= _MOST_RANKS:
        raise ValueError(f"--ranks is {options.ranks}; pictures are made for 1 to {_MOST_RANKS} ranks")
    if options.algorithm == "hierarchical" and options.node is None:
        raise ValueError(f"--algorithm hierarchical needs --node: ranks per node, a divisor of {options.ranks}")
    check_file("--png", options.png)


def _write(schedule: "Schedule", path: Path, node: int) -> None:
    from shardlite.apps.ring.painting import paint

    try:
        paint(schedule, path, node)
    except OSError as error:
        raise OSError(f"--png {path} cannot be written ({error.strerror or error}): name a file elsewhere") from error


def _schedule(options: Namespace, node: int) -> "Schedule":
    """Return the schedule of a command line, or raise a `ValueError` where there is none."""
    from shardlite.comm import schedule as schedules

    make = schedules.all_gather if options.operation == "all-gather" else schedules.reduce_scatter
    return make(options.algorithm, options.ranks, node=node)
