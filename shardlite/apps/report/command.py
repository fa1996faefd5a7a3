"""`shardlite report` on the command line."""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from shardlite.apps.options import progress, usage_errors


def run(parser: ArgumentParser, options: Namespace, _: Sequence[str]) -> int:
    """Write the page."""
    from shardlite.apps.report.page import write_report

    with usage_errors(parser, "report"):
        count = write_report([Path(each) for each in options.rows], options.out, progress=progress)
    print(f"wrote {options.out}: {count} rows")
    return 0
