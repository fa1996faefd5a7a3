"""`shardlite train` on the command line, and the options of a GPT that `shardlite verify` has, too."""

from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from collections.abc import Sequence
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shardlite.apps import launch
from shardlite.apps.demo.config_file import read_options
from shardlite.apps.demo.settings import LOGS, OPTIMIZERS, PRECISIONS, SIZES, TRANSPORTS, Settings
from shardlite.apps.options import DTYPES, STATES, started_ranks, usage_errors


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
    group.add_argument(
        "--config", type=Path, metavar="FILE", help="TOML file whose keys are names of options; those given here win"
    )
    for name, kind, metavar, meaning in (
        ("steps", int, "N", "optimizer steps"),
        ("batch", int, "N", "sequences per rank in one forward"),
        ("accumulate", int, "N", "forwards and backwards per optimizer step"),
        ("lr", float, "RATE", "highest learning rate"),
        ("seed", int, "N", "decides the first weights and the batches"),
        ("out", Path, "FOLDER", "where the loss curve, the log and the checkpoints go"),
    ):
        default = getattr(Settings, name)
        group.add_argument(f"--{name}", type=kind, default=default, metavar=metavar, help=f"{meaning} ({default})")
    group.add_argument("--data", type=Path, metavar="PATH", help="text file or folder (the source of Python itself)")
    group.add_argument("--log", choices=LOGS, help="write the values of each step to OUT/log.csv or OUT/tensorboard")
    _add_saving(parser.add_argument_group("checkpoints"))
    _add_training(parser.add_argument_group("training"))
    add_gpt(parser, size="demo")


def _add_saving(group: Any) -> None:
    group.add_argument(
        "--save-every",
        type=int,
        metavar="N",
        help=f"save the run into OUT/checkpoints each N steps ({Settings.save_every}, where a run is saved)",
    )
    group.add_argument(
        "--resume",
        action=BooleanOptionalAction,
        default=False,
        help="go on from the newest checkpoint of the run in OUT",
    )
    group.add_argument(
        "--checkpoints",
        type=Path,
        metavar="FOLDER",
        help="save the run there instead, and go on from the newest checkpoint if there is one",
    )
    group.add_argument(
        "--redundancy",
        choices=("neighbour",),
        help="copy the run into memory after each step, for ranks that start again (no copies)",
    )
    group.add_argument("--restarts", type=int, default=0, metavar="N", help="how often failed ranks start again (0)")


def _add_training(group: Any) -> None:
    group.add_argument(
        "--stage", type=int, choices=(0, 1, 2, 3), default=3, help="of ZeRO: 0 shards nothing, 3 all (3)"
    )
    for name, choices, meaning in (
        ("precision", PRECISIONS, "what forward and backward run in"),
        ("reduce", tuple(DTYPES), "what gradients are summed in"),
        ("master", ("fp32", "split24"), "format of the weights that are stepped"),
        ("state", STATES, "format of the moments of adamw"),
    ):
        default = getattr(Settings, name)
        group.add_argument(f"--{name}", choices=choices, default=default, help=f"{meaning} ({default})")
    for name, names, meaning in (
        ("optimizer", OPTIMIZERS, "adamw is ShardLite's"),
        ("transport", TRANSPORTS, "how messages travel"),
    ):
        default, told = getattr(Settings, name), f"{meaning}: {', '.join(names)}"
        group.add_argument(f"--{name}", choices=names, default=default, metavar="NAME", help=f"{told} ({default})")
    for name, meaning in (
        ("in-backward", "adamw steps in the backward, without clipping"),
        ("activation-checkpointing", "recompute blocks in the backward"),
    ):
        group.add_argument(f"--{name}", action=BooleanOptionalAction, default=False, help=meaning)


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
    told = {each.name: given[each.name] for each in fields(Settings) if given.get(each.name) is not None}
    if "checkpoints" not in told and ("save_every" in told or given.get("resume")):
        told["checkpoints"] = told["out"] / "checkpoints"
    return Settings(gpt=replace(size, **shape), **told)


def run(parser: ArgumentParser, options: Namespace, arguments: Sequence[str]) -> int:
    """Check the options, then start the ranks, or run as one of them."""
    with usage_errors(parser):
        options = with_config(parser, options, arguments)
        started = started_ranks(parser, options)
        settings = settings_of(options)
        check_log(settings.log)
        from shardlite.apps.demo.text import read_corpus

        corpus = read_corpus(settings.data, context=settings.gpt.context)
        check_begin(settings, options)
        settings.out.mkdir(parents=True, exist_ok=True)
    if started is None:
        return launch.launch(options.ranks or launch.default_ranks(), arguments, restarts=options.restarts)
    from shardlite.apps.demo.train import train

    train(settings, corpus)
    return 0


def with_config(parser: ArgumentParser, options: Namespace, arguments: Sequence[str]) -> Namespace:
    """Return the options, with those of `--config` instead of defaults.

    Raises:
        ValueError: the file has an option that there is not, or a value that it does not take.
        OSError: the file cannot be read.
    """
    if options.config is None:
        return options
    parser.set_defaults(**read_options(options.config, parser, without=("config",)))
    return parser.parse_args(arguments[1:])


def check_log(kind: str | None) -> None:
    """Check that what writes a log is installed.

    Raises:
        ValueError: the message says what to install.
    """
    if kind == "tensorboard" and find_spec("tensorboard") is None:
        raise ValueError(
            "--log tensorboard needs tensorboard, which is not installed: pip install tensorboard, or take --log csv"
        )


def check_begin(settings: Settings, options: Namespace) -> None:
    """Check that `--resume` finds a checkpoint, and that a new run does not begin where another one is saved.

    A folder that `--checkpoints` names may be empty or not. Ranks that torchrun starts again after a failure go on in
    any case.

    Raises:
        ValueError: the message says which option to give or to leave out.
    """
    if settings.checkpoints is None or launch.is_restart():
        return
    from shardlite.checkpoint import checkpoints_in

    newest = next(reversed(checkpoints_in(settings.checkpoints).values()), None)
    if options.resume and newest is None:
        raise ValueError(f"--resume: there is no checkpoint in {settings.checkpoints}; leave it out to begin a run")
    if newest is not None and not options.resume and options.checkpoints is None:
        raise ValueError(
            f"{newest} is of an earlier run: give --resume to go on from it, or another --out to begin a run"
        )
