"""`shardlite train` on the command line, and the options of a GPT that `shardlite verify` has, too."""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from shardlite.apps import launch
from shardlite.apps.demo.settings import SIZES, Settings
from shardlite.apps.options import started_ranks, usage_errors


def add_train(commands: Any) -> None:
    """Add `shardlite train` to the commands."""
    parser: ArgumentParser = commands.add_parser(
        "train",
        help="train a small GPT on text, sharded over processes of this machine",
        description="Train a byte-level GPT on text, sharded over the ranks. Starts the ranks itself, or is started by"
        " torchrun. Prints the loss, the memory held beside that of plain data parallel, and some text by the model.",
    )
    parser.set_defaults(run=lambda options, arguments: run(parser, options, arguments))
    group = parser.add_argument_group("run")
    group.add_argument("--ranks", type=int, metavar="N", help="processes (one per GPU, 2 without any)")
    for name, kind, metavar, meaning in (
        ("steps", int, "N", "optimizer steps"),
        ("batch", int, "N", "sequences per rank in one forward"),
        ("accumulate", int, "N", "forwards and backwards per optimizer step"),
        ("lr", float, "RATE", "highest learning rate"),
        ("seed", int, "N", "decides the first weights and the batches"),
        ("out", Path, "FOLDER", "where the loss curve goes"),
    ):
        default = getattr(Settings, name)
        group.add_argument(f"--{name}", type=kind, default=default, metavar=metavar, help=f"{meaning} ({default})")
    _add_saving(group)
    group.add_argument("--data", type=Path, metavar="PATH", help="text file or folder (the source of Python itself)")
    group.add_argument(
        "--stage", type=int, choices=(0, 1, 2, 3), default=3, help="of ZeRO: 0 shards nothing, 3 all (3)"
    )
    add_gpt(parser, size="demo")


def _add_saving(group: Any) -> None:
    group.add_argument(
        "--checkpoints", type=Path, metavar="FOLDER", help="save the run there, and go on from the newest checkpoint"
    )
    group.add_argument(
        "--save-every", type=int, default=Settings.save_every, metavar="N", help=f"steps ({Settings.save_every})"
    )
    group.add_argument(
        "--redundancy",
        choices=("neighbour",),
        help="copy the run into memory after each step, for ranks that start again (no copies)",
    )
    group.add_argument("--restarts", type=int, default=0, metavar="N", help="how often failed ranks start again (0)")


def add_gpt(parser: ArgumentParser, size: str) -> None:
    """Add the options of the model, of which `size` is the default."""
    group = parser.add_argument_group("model", "A size by name, of which each number can be changed.")
    group.add_argument("--size", choices=SIZES, default=size, help=f"({size})")
    group.add_argument("--layers", type=int, metavar="N", help="blocks")
    group.add_argument("--width", type=int, metavar="N", help="numbers that stand for one byte between the blocks")
    group.add_argument("--heads", type=int, metavar="N", help="parts of the width that attend separately")
    group.add_argument("--context", type=int, metavar="N", help="bytes that the model sees at once")


def settings_of(options: Namespace) -> Settings:
    """Return the settings of a command line. What the command has no option for keeps its default.

    Raises:
        ValueError: a number is out of its range.
    """
    given = vars(options)
    size = SIZES[options.size]
    shape = {name: given[name] for name in vars(size) if given[name] is not None}
    numbers = {each.name: given[each.name] for each in fields(Settings) if each.name in given}
    return Settings(gpt=replace(size, **shape), **numbers)


def run(parser: ArgumentParser, options: Namespace, arguments: Sequence[str]) -> int:
    """Check the options, then start the ranks, or run as one of them."""
    started = started_ranks(parser, options)
    with usage_errors(parser):
        settings = settings_of(options)
        from shardlite.apps.demo.text import read_corpus

        corpus = read_corpus(settings.data, context=settings.gpt.context)
        settings.out.mkdir(parents=True, exist_ok=True)
    if started is None:
        return launch.launch(options.ranks or launch.default_ranks(), arguments, restarts=options.restarts)
    from shardlite.apps.demo.train import train

    train(settings, corpus)
    return 0
