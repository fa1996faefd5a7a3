"""`shardlite memory` on the command line."""

from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardlite.apps.launch import world_size
from shardlite.apps.memory import OWN
from shardlite.apps.options import add_model, add_training, check_file, check_folder, check_numbers, usage_errors
from shardlite.apps.plan.presets import check_model

SYSTEMS = (
    *("activations", "activations, bf16", "plain", "ddp", "zero", "fsdp1", "fsdp2"),
    *("deepspeed1", "deepspeed2", "deepspeed3", "stage0", "stage1", "stage2", "stage3"),
    *("in_backward", "in_backward, prefetch 0", "bf16", "bf16, split24", "bf16, int8", "compact"),
)
"""Names in `systems.py`, which imports PyTorch."""

DEFAULT = ("ddp", "zero", "fsdp1", "fsdp2", "stage0", "stage1", "stage2", "stage3", "in_backward", "compact")
"""Systems of a run in which none are named."""


def add_memory(commands: Any) -> None:
    """Add `shardlite memory` to the commands."""
    parser: ArgumentParser = commands.add_parser(
        "memory",
        help="measure the memory of a training step of your model in ShardLite, FSDP2, DDP and others",
        description="Train a model for a few steps on CPU ranks of this machine, in one system after the other, and"
        " print the peak tensor bytes of a rank, predicted and measured. With --process, also measure what processes"
        " hold. With --timeline, show one step by purpose instead, beside FSDP2's. If a system fails, its error is"
        " printed, the others are still measured, and the exit status is 1.",
    )
    parser.set_defaults(run=lambda options, arguments: run(parser, options, arguments))
    add_model(parser, example="gpt2", batch=1)
    group = parser.add_argument_group("run")
    group.add_argument("--ranks", type=int, nargs="+", default=[2], metavar="N", help="numbers of processes (2)")
    group.add_argument(
        "--systems",
        nargs="+",
        default=list(DEFAULT),
        metavar="NAME",
        help=f"({' '.join(DEFAULT)}); `all` for all whose packages are installed",
    )
    group = parser.add_argument_group(
        "ShardLite", f"The system `{OWN}`. It is added to the others if one of these options is given."
    )
    group.add_argument("--stage", type=int, choices=(0, 1, 2, 3), default=3, help="(3)")
    add_training(group)
    group = parser.add_argument_group("output")
    group.add_argument("--process", action="store_true", help="also measure what processes hold; requires Linux")
    group.add_argument("--steps", type=int, default=3, metavar="N", help="steps in which processes are sampled (3)")
    group.add_argument("--json", type=Path, metavar="FILE", help="write the rows, one JSON object a line")
    group.add_argument("--plots", type=Path, metavar="FOLDER", help="draw plots; needs matplotlib")
    group.add_argument(
        "--timeline",
        type=Path,
        metavar="FILE",
        help=f"print one step of `{OWN}` by purpose, and draw it as a PNG beside FSDP2's; needs matplotlib",
    )
    parser.add_argument("--row", type=Path, help=SUPPRESS)  # what a rank writes


def run(parser: ArgumentParser, options: Namespace, arguments: Sequence[str]) -> int:
    """Measure all systems and return 1 if one failed, or measure one as one of its ranks."""
    if options.row is not None and world_size() is not None:  # the command that has started it has checked the options
        from shardlite.apps.memory.run import run_rank

        return run_rank(options)
    with usage_errors(parser, "--plots" if options.timeline is None else "--timeline"):
        _check(options)
        from shardlite.apps.memory.run import run_all

        return run_all(options, arguments)
    raise AssertionError("usage errors exit")


def _check(options: Namespace) -> None:
    """Check what can be checked without PyTorch.

    Raises:
        ValueError: an option has a value that it cannot have.
        OSError: rows, plots or a picture cannot be written to their path.
    """
    if world_size() is not None:
        raise ValueError("it starts its ranks itself; run it without torchrun")
    if options.process and not Path("/proc/self/smaps_rollup").exists():
        raise ValueError("--process reads /proc/PID/smaps_rollup, which is not available; requires Linux")
    check_numbers(options, batch=1, context=1, steps=1, prefetch=0)
    check_model(options.model)
    if min(options.ranks) < 1:
        raise ValueError(f"--ranks must be at least 1, got {min(options.ranks)}")
    if options.timeline is not None and len(options.ranks) > 1:
        raise ValueError(f"--timeline takes one number of --ranks, got {len(options.ranks)}")
    check_file("--json", options.json)
    check_file("--timeline", options.timeline)
    check_folder("--plots", options.plots)
    known = (*SYSTEMS, OWN)
    for system in options.systems:
        if system not in known and options.systems != ["all"]:
            raise ValueError(f"--systems {system!r} is not one of {', '.join(map(repr, known))}, or `all`")
