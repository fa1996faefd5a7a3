"""`shardlite report` on the command line."""

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from shardlite.apps.options import progress, usage_errors


def add_report(commands: Any) -> None:
    """Add `shardlite report` to the commands."""
    parser: ArgumentParser = commands.add_parser(
        "report",
        help="write one HTML page of measured rows",
        description="Write one HTML page of files (or folders) of JSON rows. Needs Jinja2 and matplotlib.",
    )
    parser.set_defaults(run=lambda options, _: run(parser, options))
    parser.add_argument("rows", nargs="*", type=Path, default=[Path("bench/results")], help="(bench/results)")
    parser.add_argument("--out", type=Path, default=Path("report.html"), metavar="FILE", help="(report.html)")


def run(parser: ArgumentParser, options: Namespace) -> int:
    """Write the page."""
    from shardlite.apps.report.page import write_report

    with usage_errors(parser, "report"):
        count = write_report(options.rows, options.out, progress=progress)
    print(f"wrote {options.out}: {count} rows")
    return 0
