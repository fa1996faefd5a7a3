"""The command line. Each subcommand is one function, with the parser of its options next to it.

Nothing heavy is imported before a subcommand runs, so `--help` answers at once.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from shardlite.demo.settings import SIZES, Settings


def main(argv: Sequence[str] | None = None) -> int:
    """Run `shardlite ARGV` and return its exit status; wrong usage exits with status 2, as argparse does."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = ArgumentParser(prog="shardlite", description="Sharded training for PyTorch, small enough to read.")
    parser.add_argument("--version", action="version", version=f"shardlite {_version()}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_train(commands)
    options = parser.parse_args(arguments)
    status: int = options.run(options, arguments)
    return status


def _add_train(commands: Any) -> None:
    parser: ArgumentParser = commands.add_parser(
        "train",
        help="train a small GPT on text, sharded over processes of this machine",
        description="Train a byte-level GPT on text, sharded over the ranks. Starts the ranks itself, or is started by"
        " torchrun. Prints the loss, the memory held beside that of plain data parallel, and some text by the model.",
    )
    parser.set_defaults(run=lambda options, arguments: _train(parser, options, arguments))
    _add_run_options(parser)
    _add_model_options(parser)


def _add_run_options(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("run")
    group.add_argument("--ranks", type=int, metavar="N", help="processes (2, or what torchrun started)")
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
    group.add_argument("--data", type=Path, metavar="PATH", help="text file or folder (the source of Python itself)")
    group.add_argument("--stage", type=int, choices=(0, 3), default=3, help="0 shards nothing, 3 shards all (3)")


def _add_model_options(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("model", "A size by name, of which each number can be changed.")
    group.add_argument("--size", choices=SIZES, default="demo", help="(demo)")
    group.add_argument("--layers", type=int, metavar="N", help="blocks")
    group.add_argument("--width", type=int, metavar="N", help="numbers that stand for one byte between the blocks")
    group.add_argument("--heads", type=int, metavar="N", help="parts of the width that attend separately")
    group.add_argument("--context", type=int, metavar="N", help="bytes that the model sees at once")


def _train(parser: ArgumentParser, options: Namespace, arguments: Sequence[str]) -> int:
    """Check everything once; then start the ranks, or be one of them."""
    from shardlite.launch import launch, world_size

    started = world_size()
    if options.ranks is not None and (options.ranks < 1 or started not in (None, options.ranks)):
        parser.error(f"--ranks is {options.ranks}; it must be at least 1, and what torchrun started ({started})")
    try:
        settings = _train_settings(options)
    except (ValueError, OSError) as wrong:
        parser.error(str(wrong))
    if started is None:
        return launch(options.ranks or 2, arguments)

    from shardlite.demo.train import train

    train(settings)
    return 0


def _train_settings(options: Namespace) -> Settings:
    """The settings that `options` describe, with text that can be read and a folder that can be written."""
    from shardlite.demo.text import read_corpus

    numbers = {name: getattr(options, name) for name in ("layers", "width", "heads", "context")}
    given = {name: value for name, value in numbers.items() if value is not None}
    settings = Settings(
        gpt=replace(SIZES[options.size], **given),
        stage=options.stage,
        steps=options.steps,
        batch=options.batch,
        accumulate=options.accumulate,
        lr=options.lr,
        seed=options.seed,
        data=options.data,
        out=options.out,
    )
    read_corpus(settings.data, context=settings.gpt.context)
    settings.out.mkdir(parents=True, exist_ok=True)
    return settings


def _version() -> str:
    try:
        return version("shardlite")
    except PackageNotFoundError:
        return "(not installed)"
