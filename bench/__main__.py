"""Run all benches that this machine supports, write their rows to one file, and regenerate the tables of the pages.

    python -m bench                     run all: under 20 minutes on two cores, 9 more with a GPU
    python -m bench --only step-mlp ring   run some of the benches
    python -m bench --regenerate        only regenerate tables and pictures, from existing rows
    python -m bench --dry --out FOLDER  run each bench at toy size, and change no page

Rows go to `bench/results/MACHINE-DATE.jsonl`. The exit status is 1 if a bench fails, or if the time budget is used up
before a bench starts.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from shardlite.lab import suite
from shardlite.lab.ranks import parser_of
from shardlite.lab.table import RESULTS, markdown_table

_COLUMNS = ("suite", "status", "seconds", "rows")

_PAGES = (
    ("-m", "bench.scale", "--figure", "docs/scale.svg"),
    ("-m", "bench.fit_picture"),
    ("-m", "tests.support.markdown"),
)
"""Commands that regenerate the pictures and the tables of the pages."""


def main(arguments: Sequence[str]) -> int:
    """Run the chosen benches, then regenerate the tables."""
    options = parser_of("bench").parse_args(arguments)
    if options.budget is None:
        options.budget = suite.BUDGET + sum(part.seconds for part in suite.parts() if part.on_gpu)
    if options.dry and options.out == RESULTS:
        options.out = Path(tempfile.mkdtemp(prefix="bench-"))
    if options.regenerate:
        return regenerate()
    # On SIGTERM, `sys.exit` raises an exception, so that `finally` ends the running bench.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    chosen = [part for part in suite.parts() if part.name in (options.only or [part.name])]
    file = options.out / suite.file_name()
    ended = suite.run(chosen, file, options.budget, dry=options.dry)
    print(markdown_table([["part", *_COLUMNS[1:]], *([str(row[key]) for key in _COLUMNS] for row in ended)], words=2))
    print(f"\nrows: {file}", flush=True)
    failed = any(row["status"] not in ("ok", suite.MISSING) for row in ended)
    is_for_pages = not options.dry and options.out.resolve() == RESULTS
    return int(failed or bool(is_for_pages and regenerate()))


def regenerate() -> int:
    """Regenerate the pictures and tables of the pages from the rows. Return 1 if a command fails."""
    paths = os.pathsep.join(filter(None, (str(suite.ROOT / "kernels"), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": paths}  # so that `shardlite_kernels` need not be installed
    statuses = [
        subprocess.run([sys.executable, *command], cwd=suite.ROOT, env=environment, check=False).returncode
        for command in _PAGES
    ]
    return int(any(statuses))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
