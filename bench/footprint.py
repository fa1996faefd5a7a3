"""Measure the memory of a training step: ShardLite in all stages and formats, FSDP1, FSDP2, DDP, ZeRO, plain PyTorch.

    python -m bench.footprint --model gpt2 --ranks 1 2 4

makes the measurement of `shardlite memory --process` on the models of the other benches. The bench starts new
processes for each model, number of ranks and system. Rows go to `bench/results/footprint-MODEL-Nranks.jsonl`, one JSON
object per system; `shardlite/lab/memory/recorder.py` describes the keys of a row.

By default `malloc` returns large blocks to the system as soon as they are freed (`MALLOC_MMAP_THRESHOLD_`), so that
results do not depend on fragmentation by `malloc`. `--malloc default` leaves `malloc` unchanged. `--busy N` runs N
endless loops in other processes during the measurement.

DeepSpeed is optional, and skipped if it is not installed. DeepSpeed 0.19.8 runs ZeRO-1 to 3 on CPU ranks over gloo
with PyTorch 2.13. It requires a C++ compiler, because it builds its shared-memory communication on first use.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from shardlite.lab.compared.systems import MEASURED as SYSTEMS
from shardlite.lab.compared.workloads import WORKLOADS, Workload
from shardlite.lab.memory.plots import paint
from shardlite.lab.memory.recorder import measure
from shardlite.lab.memory.run import RETURNS, Program, be_rank, measure_all
from shardlite.lab.memory.text import as_markdown, run_stem
from shardlite.lab.ranks import parser_of
from shardlite.lab.table import Row, read_rows, write_rows
from shardlite.plan import Source


def source_of(workload: Workload) -> Source:
    """Return a workload as a model and one batch. The memory does not depend on the values in the batch."""
    return Source(workload.name, workload.make, lambda: workload.draw(0, 0), workload.words)


@contextmanager
def _busy(loops: int) -> Iterator[None]:
    """Run `loops` endless loops in other processes during the block."""
    programs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def main(arguments: Sequence[str]) -> int:
    """Measure one system as a rank, or start the ranks of each system. Return 1 if a system failed."""
    parser = parser_of("bench.footprint")
    options = parser.parse_args(arguments)
    if min(options.ranks) < 1 or options.busy < 0:
        parser.error("--ranks must be at least 1, and --busy at least 0")
    if options.row is not None:
        source, system = source_of(WORKLOADS[options.model[0]]), SYSTEMS[options.systems[0]]
        return be_rank(lambda group: measure(source, system, group, process=True), options.row)
    rows = read_rows(options.table) if options.table else _run_all(options)
    print(as_markdown(rows))
    if options.plots is not None:
        print(*(f"wrote {path}" for path in paint(rows, options.plots, kind="svg")), sep="\n")
    return int(any("error" in row for row in rows))


def _run_all(options: argparse.Namespace) -> list[Row]:
    """Measure the models one after the other, and write the rows of each number of ranks when they are complete."""
    rows = []
    systems = {name: SYSTEMS[name] for name in options.systems or SYSTEMS}
    for model in options.model:
        program = Program(
            module="bench.footprint",
            arguments=["--model", model],
            environment=RETURNS if options.malloc == "returns" else {},
            facts={"malloc": options.malloc, "busy": options.busy},
        )
        with _busy(options.busy):
            for run in measure_all(source_of(WORKLOADS[model]), program, systems, options.ranks):
                if run:  # at least one of the systems is installed
                    file = options.out / f"{run_stem(run[0])}.jsonl"
                    write_rows(run, file)
                    rows += run
    return rows


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
