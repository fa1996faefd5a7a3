"""`shardlite memory` on the command line."""

import importlib.util
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardlite.apps import launch
from shardlite.apps.options import add_model, add_training, check_file, check_numbers, started_ranks, usage_errors
from shardlite.apps.plan.presets import check_model


def add_memory(commands: Any) -> None:
    """Add `shardlite memory` to the commands."""
    parser: ArgumentParser = commands.add_parser(
        "memory",
        help="measure what a training step holds, by purpose, and compare it with the plan",
        description="Train a model for some steps on CPU ranks of this machine, and print the live tensor bytes of one"
        " step on rank 0, by purpose, predicted and measured. With --timeline, draw them over the step, beside FSDP2's."
        " Starts the ranks itself, or is started by torchrun.",
    )
    parser.set_defaults(run=lambda options, arguments: run(parser, options, arguments))
    add_model(parser, example="demo-demo", batch=1)
    group = parser.add_argument_group("run", "As the arguments of ShardLite, Precision and AdamW.")
    group.add_argument("--ranks", type=int, metavar="N", help="processes (2)")
    group.add_argument("--stage", type=int, choices=(0, 1, 2, 3), default=3, help="(3)")
    add_training(group)
    group = parser.add_argument_group("output")
    group.add_argument(
        "--timeline", type=Path, metavar="FILE", help="draw the step as a PNG, beside FSDP2's; needs matplotlib"
    )


def run(parser: ArgumentParser, options: Namespace, arguments: Sequence[str]) -> int:
    """Check the options, then start the ranks, or run as one of them."""
    started, ranks = started_ranks(parser, options), options.ranks or 2
    with usage_errors(parser, "--timeline"):
        _check(options)
        from shardlite.apps.memory.run import check, measure, parse

        source, setting = parse(options)
        if started is None:
            check(source, setting, ranks)
    if started is None:
        return launch.launch(ranks, arguments)
    measure(source, setting, options.timeline)
    return 0


def _check(options: Namespace) -> None:
    """Check what can be checked without PyTorch.

    Raises:
        ValueError: an option has a value that it cannot have.
        OSError: there cannot be a picture at its path.
        ModuleNotFoundError: a picture needs matplotlib.
    """
    check_numbers(options, batch=1, context=1, prefetch=0)
    check_model(options.model)
    if options.timeline is not None:
        check_file("--timeline", options.timeline)
        if importlib.util.find_spec("matplotlib") is None:
            raise ModuleNotFoundError("matplotlib is not installed", name="matplotlib")
