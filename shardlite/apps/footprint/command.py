"""`shardlite footprint` as a function: its options, and what is measured, printed and written.

In: the command line. Out: an exit status; 1 if a system failed.
"""

import json
import os
import sys
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardlite.apps.options import add_model, check_file, check_folder, check_numbers, usage_errors
from shardlite.apps.plan.presets import check_model

SYSTEMS = (
    *("activations", "activations, bf16", "plain", "ddp", "zero", "fsdp1", "fsdp2"),
    *("deepspeed1", "deepspeed2", "deepspeed3", "stage0", "stage1", "stage2", "stage3"),
    *("in_backward", "in_backward, prefetch 0", "bf16", "bf16, split24", "bf16, int8", "compact"),
)
"""Names in `systems.py`, which imports PyTorch."""

DEFAULT = ("ddp", "zero", "fsdp1", "fsdp2", "stage0", "stage1", "stage2", "stage3", "in_backward", "compact")
"""Systems of a run in which none are named."""


def add_footprint(commands: Any) -> None:
    """Add `shardlite footprint` to the commands."""
    parser: ArgumentParser = commands.add_parser(
        "footprint",
        help="measure the memory of a step of your model in ShardLite, FSDP2, DDP and others",
        description="Train a model for a few steps on processes of this machine, one system and one number of ranks"
        " after the other, and print what a rank held at the peak of a step beside what arithmetic predicts. A system"
        " that fails is reported, and the others go on; the exit status is 1 then. Needs Linux, runs on the CPU.",
    )
    parser.set_defaults(run=lambda options, arguments: run(parser, options, arguments))
    add_model(parser, example="gpt2", batch=1)
    group = parser.add_argument_group("run")
    group.add_argument("--ranks", type=int, nargs="+", default=[2], metavar="N", help="processes, one or more (2)")
    group.add_argument(
        "--systems",
        nargs="+",
        default=list(DEFAULT),
        metavar="NAME",
        help=f"({' '.join(DEFAULT)}); `all` for all whose packages are installed",
    )
    group.add_argument("--steps", type=int, default=3, metavar="N", help="steps that are sampled, after 3 others (3)")
    group = parser.add_argument_group("output")
    group.add_argument("--json", type=Path, metavar="FILE", help="write the rows, one JSON object a line")
    group.add_argument("--plots", type=Path, metavar="FOLDER", help="draw plots, too; needs matplotlib")
    parser.add_argument("--row", type=Path, help=SUPPRESS)  # what a rank writes


def run(parser: ArgumentParser, options: Namespace, arguments: Sequence[str]) -> int:
    """Measure one system as a rank, or all by starting the ranks of each."""
    if options.row is not None and "RANK" in os.environ:
        from shardlite.apps.footprint.run import be_rank

        return be_rank(lambda: _source(options), options.systems[0], options.row, steps=options.steps)
    status = 0
    with usage_errors(parser, "--plots"):
        _check(options)
        systems = _systems(options)
        status = _run_all(_source(options), systems, options, _of_model(options))
    return status


def _source(options: Namespace) -> Any:
    from shardlite.apps.plan.source import find_source

    source = find_source(options.model, options.batch, options.context, options.inputs)
    return replace(source, words=f"{source.name}, {source.words.removesuffix(' per rank')}")


def _run_all(source: Any, systems: Sequence[str], options: Namespace, arguments: Sequence[str]) -> int:
    """Measure all, print tables, and write rows and plots. Return 1 if a system failed."""
    from shardlite.apps.footprint.plots import paint
    from shardlite.apps.footprint.run import Program, measure_all
    from shardlite.apps.footprint.table import text

    if options.plots is not None:
        import matplotlib  # noqa: F401  # optional: fail before anything is measured
    program = Program(module="shardlite", arguments=["footprint", *arguments])
    rows = []
    for measured in measure_all(source, program, systems, sorted(set(options.ranks)), progress=_say):
        rows += measured
        print(text(measured), end="\n\n", flush=True)
        if options.json is not None:  # as they come: a run of many ranks may be ended early
            options.json.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    if options.json is not None:
        print(f"wrote {options.json}")
    if options.plots is not None:
        print(*(f"wrote {path}" for path in paint(rows, options.plots)), sep="\n")
    return int(any("error" in row for row in rows))


def _check(options: Namespace) -> None:
    """Check what can be checked without PyTorch.

    Raises:
        ValueError: an option has a value that it cannot have.
        OSError: there cannot be rows or plots at their path.
    """
    if not Path("/proc/self/smaps_rollup").exists():
        raise ValueError("the memory of processes is read from /proc/PID/smaps_rollup, which this system does not have")
    check_numbers(options, batch=1, context=1, steps=1)
    check_model(options.model)
    if min(options.ranks) < 1:
        raise ValueError(f"--ranks must be at least 1, got {min(options.ranks)}")
    check_file("--json", options.json)
    check_folder("--plots", options.plots)
    for system in options.systems:
        if system not in SYSTEMS and options.systems != ["all"]:
            raise ValueError(f"--systems {system!r} is not one of {', '.join(map(repr, SYSTEMS))}, or `all`")


def _systems(options: Namespace) -> list[str]:
    """Return the names of the systems.

    Raises:
        ValueError: one is not installed.
    """
    from shardlite.apps.footprint.systems import SYSTEMS

    if options.systems == ["all"]:
        return list(SYSTEMS)
    for system in options.systems:
        if missing := SYSTEMS[system].missing:
            raise ValueError(f"--systems {system!r}: {missing}")
    return list(dict.fromkeys(options.systems))


def _of_model(options: Namespace) -> list[str]:
    """Return the options that a rank needs beside its system."""
    names = ("model", "batch", "context", "inputs", "steps")
    given = {name: getattr(options, name) for name in names}
    return [part for name, value in given.items() if value is not None for part in (f"--{name}", str(value))]


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)
