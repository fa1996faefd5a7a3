"""What a training step holds in memory, by system: ShardLite in all stages and formats, FSDP1, FSDP2, DDP, ZeRO, plain.

    python -m bench.footprint --model gpt2 --ranks 1 2 4

starts new processes for each model, number of ranks and system. Rows go to
`bench/results/footprint-MODEL-Nranks.jsonl`, one JSON object a system; `shardlite/apps/footprint/measure.py` says what
their keys are.

By default `malloc` returns large blocks to the system as soon as they are freed (`MALLOC_MMAP_THRESHOLD_`), so that
what is measured is what systems hold, and not how `malloc` cuts it up. `--malloc default` leaves it as it is.
`--busy N` runs N loops beside.

DeepSpeed is optional, and left out where it is not installed. DeepSpeed 0.19.8 runs ZeRO-1 to 3 on CPU ranks over gloo
with PyTorch 2.13. It needs a C++ compiler: it builds its messages in shared memory when it is first used.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench.support.table import RESULTS, Row, markdown_table, read_rows
from bench.support.workloads import WORKLOADS, Workload
from shardlite.apps.footprint.measure import STEPS
from shardlite.apps.footprint.plots import paint
from shardlite.apps.footprint.run import RETURNS, Program, be_rank, measure_all
from shardlite.apps.footprint.systems import SYSTEMS
from shardlite.apps.footprint.table import cells, failures, heading, run_stem, runs
from shardlite.apps.plan.source import Source


def source_of(workload: Workload) -> Source:
    """Return a workload as a model and one batch. What is in the batch does not matter to memory."""
    return Source(workload.name, workload.make, lambda: workload.draw(0, 0), workload.words)


def render(rows: Sequence[Row]) -> str:
    """Return one table for each run, in Markdown."""
    return "\n\n".join(_render_run(run) for run in runs(rows))


def _render_run(run: Sequence[Row]) -> str:
    if "error" in run[0]:  # then no system was measured
        return "\n".join(failures(run))
    failed = "".join(f"\n\n{line}" for line in failures(run))
    return f"{heading(run[0])}\n\n{markdown_table(cells(run))}{failed}"


@contextmanager
def _busy(loops: int) -> Iterator[None]:
    """Run `loops` endless loops in processes beside the block."""
    programs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.footprint", description="memory of a step, by system")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="processes on this machine (2)")
    parser.add_argument("--model", nargs="+", choices=list(WORKLOADS), default=["gpt2"], help="(gpt2)")
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS), help="(all)")
    parser.add_argument("--malloc", choices=["returns", "default"], default="returns", help="(%(default)s)")
    parser.add_argument("--busy", type=int, default=0, help="loops that run beside (%(default)s)")
    parser.add_argument("--table", nargs="+", type=Path, metavar="FILE", help="only print the tables of these rows")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="draw the rows, too; needs matplotlib")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the rows (%(default)s)")
    parser.add_argument("--row", type=Path, help=argparse.SUPPRESS)  # what a rank writes
    options = parser.parse_args(arguments)
    if min(options.ranks) < 1 or options.busy < 0:
        parser.error("--ranks must be at least 1, and --busy at least 0")
    return options


def main(arguments: Sequence[str]) -> int:
    """Measure one system as a rank, or all by starting the ranks of each. Return 1 if a system failed."""
    options = _options(arguments)
    if options.row is not None:
        workload = WORKLOADS[options.model[0]]
        return be_rank(lambda: source_of(workload), options.systems[0], options.row, steps=STEPS)
    rows = read_rows(options.table) if options.table else _run_all(options)
    print(render(rows))
    if options.plots is not None:
        print(*(f"wrote {path}" for path in paint(rows, options.plots, kind="svg")), sep="\n")
    return int(any("error" in row for row in rows))


def _run_all(options: argparse.Namespace) -> list[Row]:
    """Measure the models one after the other, and write the rows of each number of ranks when they are complete."""
    options.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for model in options.model:
        program = Program(
            module="bench.footprint",
            arguments=["--model", model],
            environment=RETURNS if options.malloc == "returns" else {},
            facts={"malloc": options.malloc, "busy": options.busy},
        )
        source = source_of(WORKLOADS[model])
        with _busy(options.busy):
            for run in measure_all(source, program, options.systems, options.ranks, progress=_say):
                if run:  # some systems are installed
                    file = options.out / f"{run_stem(run[0])}.jsonl"
                    file.write_text("".join(f"{json.dumps(row)}\n" for row in run))
                    rows += run
    return rows


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)
