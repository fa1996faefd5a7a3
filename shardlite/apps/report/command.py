"""`shardlite report` on the command line."""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardlite.apps.options import add_command, progress, usage_errors


def add_report(commands: Any) -> None:
    """Add `shardlite report` to the commands."""
    add_command(commands, "report", run, rows=[Path("bench/results")])


def run(parser: ArgumentParser, options: Namespace, _: Sequence[str]) -> int:
    """Write the page."""
    from shardlite.apps.report.page import write_report

    with usage_errors(parser, "report"):
        count = write_report(options.rows, options.out, progress=progress)
    print(f"wrote {options.out}: {count} rows")
    return 0
