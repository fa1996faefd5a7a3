"""The command line. Each subcommand is one function, with the parser of its options next to it.

Nothing heavy is imported before a subcommand runs, so `--help` answers at once.
"""

from __future__ import annotations

import sys
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
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
        formatter_class=ArgumentDefaultsHelpFormatter,
    )
    parser.set_defaults(run=lambda options, arguments: _train(parser, options, arguments))
    _add_run_options(parser)
    _add_model_options(parser)


def _add_run_options(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("run")
    group.add_argument("--ranks", type=int, metavar="N", help="processes; 2 unless torchrun started them")
    group.add_argument(
        "--stage", type=int, choices=(0, 3), default=Settings.stage, help="0 shards nothing, 3 shards all"
    )
    group.add_argument("--steps", type=int, default=Settings.steps, metavar="N", help="optimizer steps")
    group.add_argument(
        "--batch", type=int, default=Settings.batch, metavar="N", help="sequences per rank in one forward"
    )
    group.add_argument(
        "--accumulate", type=int, default=Settings.accumulate, metavar="N", help="backwards per optimizer step"
    )
    group.add_argument("--lr", type=float, default=Settings.lr, metavar="RATE", help="highest learning rate")
    group.add_argument("--seed", type=int, default=Settings.seed, metavar="N", help="decides weights and batches")
    group.add_argument("--data", type=Path, metavar="PATH", help="text file or folder; else Python's standard library")
    group.add_argument("--out", type=Path, default=Settings.out, metavar="FOLDER", help="where the loss curve goes")


def _add_model_options(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("model", "a size, of which each number can be changed")
    group.add_argument("--size", choices=SIZES, default="demo", help="where the numbers below come from")
    group.add_argument("--layers", type=int, metavar="N", help="blocks")
    group.add_argument("--width", type=int, metavar="N", help="numbers that stand for a byte between blocks")
    group.add_argument("--heads", type=int, metavar="N", help="attention heads")
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
