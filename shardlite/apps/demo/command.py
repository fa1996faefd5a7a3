"""`shardlite train` on the command line, and the options of a GPT, which `shardlite verify` shares."""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import fields, replace
from importlib.util import find_spec
from typing import Any

from shardlite.apps import launch
from shardlite.apps.demo.config_file import read_options
from shardlite.apps.demo.settings import SIZES, Settings
from shardlite.apps.options import add_command, add_options, started_ranks, usage_errors


def add_train(commands: Any) -> None:
    """Add `shardlite train` to the commands."""
    defaults = {each.name: each.default for each in fields(Settings) if each.name not in ("gpt", "save_every")}
    add_command(commands, "train", run, size="demo", **defaults)


def add_gpt(parser: ArgumentParser, size: str) -> None:
    """Add the options of the model, of which `size` is the default."""
    add_options(
        parser.add_argument_group("model", "A size by name; the other options change single numbers of it."),
        {"@gpt": {}},
    )
    parser.set_defaults(size=size)


def settings_of(options: Namespace) -> Settings:
    """Return the settings of a command line. Settings without an option keep their defaults.

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
    """Return the options, with the values of `--config` as defaults.

    Raises:
        ValueError: the file has an unknown option or an invalid value.
        OSError: the file cannot be read.
    """
    if options.config is None:
        return options
    parser.set_defaults(**read_options(options.config, parser, without=("config",)))
    return parser.parse_args(arguments[1:])


def check_log(kind: str | None) -> None:
    """Check that the package that writes the log is installed.

    Raises:
        ValueError: the message says what to install.
    """
    if kind == "tensorboard" and find_spec("tensorboard") is None:
        raise ValueError(
            "--log tensorboard needs tensorboard, which is not installed: pip install tensorboard, or take --log csv"
        )


def check_begin(settings: Settings, options: Namespace) -> None:
    """Check that `--resume` finds a checkpoint, and that a new run does not overwrite another one.

    With `--checkpoints` the folder may be empty or not. Ranks that torchrun restarts after a failure always resume.

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
