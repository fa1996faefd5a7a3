"""`shardlite plan` on the command line."""

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from shardlite.apps.options import MOST_RANKS, add_model, add_training, check_numbers, usage_errors
from shardlite.apps.plan.cards import memory_of
from shardlite.apps.plan.clusters import CLUSTERS
from shardlite.apps.plan.presets import check_model


def add_plan(commands: Any) -> None:
    """Add `shardlite plan` to the commands."""
    parser: ArgumentParser = commands.add_parser(
        "plan",
        help="predict what each rank of a training run holds and sends",
        description="Print the bytes that each rank will hold at the peak of a step, by purpose, and the bytes that it"
        " will send, for any number of ranks. With --cluster, also predict the step time. The model is created with"
        " fake tensors: nothing is allocated, downloaded or trained, and no other process is started.",
    )
    parser.set_defaults(run=lambda options, _: run(parser, options))
    add_model(parser, example="gpt2-xl", batch=8)
    group = parser.add_argument_group("run", "As the arguments of ShardLite, Precision and AdamW.")
    group.add_argument(
        "--ranks", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64], metavar="N", help=f"1 to {MOST_RANKS}"
    )
    group.add_argument("--stage", type=int, nargs="+", choices=(0, 1, 2, 3), default=[3], help="(3)")
    add_training(group)
    group.add_argument("--keep-unsharded", action="store_true", help="keep weights gathered until the backward")
    group.add_argument(
        "--algorithm",
        choices=("auto", "hierarchical"),
        default="auto",
        help="algorithm of reductions, for the step time (auto)",
    )
    group.add_argument(
        "--checkpoint", choices=("both", "with", "without"), default="both", help="activation checkpointing (both)"
    )
    group = parser.add_argument_group("output")
    group.add_argument("--card", metavar="CARD", help="H100 or 80GB: also find the fewest ranks that fit")
    group.add_argument("--cluster", metavar="NAME", help="dgx-h100, pcie-a100, ...: also predict the step time")
    group.add_argument("--json", type=Path, metavar="FILE", help="write everything as JSON")
    group.add_argument("--plots", type=Path, metavar="FOLDER", help="draw plots; needs matplotlib")


def run(parser: ArgumentParser, options: Namespace) -> int:
    """Check the options, print the plan, and write the files."""
    with usage_errors(parser, "--plots"):
        _check(options)
        from shardlite.apps.plan.run import plan

        print(plan(options))
    return 0


def _check(options: Namespace) -> None:
    """Check what can be checked without PyTorch.

    Raises:
        ValueError: an option has a value that it cannot have.
    """
    check_numbers(options, batch=1, context=1, prefetch=0)
    check_model(options.model)
    if not all(1 <= ranks <= MOST_RANKS for ranks in options.ranks):
        raise ValueError(f"--ranks takes 1 to {MOST_RANKS} ranks, got {' '.join(map(str, options.ranks))}")
    if options.cluster not in (None, *CLUSTERS):
        raise ValueError(f"--cluster {options.cluster!r} is not one of {', '.join(CLUSTERS)}")
    if options.card is not None:
        memory_of(options.card)
