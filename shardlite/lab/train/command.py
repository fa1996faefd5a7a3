"""`shardlite train` on the command line, and the settings of a command that trains the GPT."""

import tomllib
from argparse import ArgumentError, ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

from shardlite.cli import launch, started_ranks, usage_errors
from shardlite.lab.train.settings import OPTIMIZERS, RATES, SIZES, Settings
from shardlite.plan import memory_of


def run(parser: ArgumentParser, options: Namespace, arguments: Sequence[str]) -> int:
    """Check the options. Then start the ranks, or train as one of the started ranks."""
    with usage_errors(parser):
        if options.config is not None:
            options = parser.parse_args([*arguments_in(options.config, parser), *arguments[1:]])
        started = started_ranks(parser, options)
        settings = settings_of(options)
        if settings.fit is not None:
            memory_of(settings.fit, "--fit")
        if settings.log == "tensorboard" and find_spec("tensorboard") is None:
            raise ValueError(
                "--log tensorboard needs tensorboard, which is not installed: pip install tensorboard, or use --log csv"
            )
        if settings.optimizer not in OPTIMIZERS:
            from shardlite.lab.train.optimizers import optimizer_class

            optimizer_class(settings.optimizer)
        from shardlite.lab.train.text import read_corpus

        corpus = read_corpus(settings.data, context=settings.gpt.context)
        _check_checkpoints(settings, options)
        settings.out.mkdir(parents=True, exist_ok=True)
    if started is None:
        return launch.launch(options.ranks or launch.default_ranks(), arguments, restarts=options.restarts)
    from shardlite.lab.train.train import train

    train(settings, corpus)
    return 0


def settings_of(options: Namespace) -> Settings:
    """Return the settings of a command line. Settings without an option keep their defaults.

    Raises:
        ValueError: a number is out of its range, or options cannot be combined.
    """
    given = {name: value for name, value in vars(options).items() if value is not None}
    size = SIZES[options.size]
    shape = {name: given[name] for name in vars(size) if name in given}
    chosen = {each.name: given[each.name] for each in fields(Settings) if each.name in given}
    chosen.setdefault("lr", RATES.get(options.optimizer, Settings.lr))
    if "checkpoints" not in chosen and ("save_every" in chosen or given.get("resume")):
        chosen["checkpoints"] = chosen["out"] / "checkpoints"
    return Settings(gpt=replace(size, **shape), **chosen)


def arguments_in(path: Path, parser: ArgumentParser) -> list[str]:
    """Return the options in a TOML file as command-line arguments. The keys of the file are the names of the options.

    Raises:
        ValueError: the file is not TOML, or has an unknown key or an invalid value.
        OSError: the file cannot be read.

    Example::

        steps = 500
        save-every = 50
        precision = "bf16"
        in-backward = true
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as wrong:
        raise ValueError(f"{path} is not TOML: {wrong}") from None
    options = [text[2:] for text in parser._option_string_actions if text.startswith("--")]
    known = [name for name in options if not name.startswith("no-") and name not in ("help", "config")]
    arguments = []
    for key, value in content.items():
        if key not in known:
            remedies = [f"; did you mean {name!r}?" for name in get_close_matches(key, known, n=1)] or [""]
            remedy = "; options must be at the top level" if isinstance(value, dict) else remedies[0]
            raise ValueError(f"{path}: unknown option {key!r}{remedy}")
        is_switch = isinstance(value, bool) and f"no-{key}" in options
        arguments.append(f"--{'' if value else 'no-'}{key}" if is_switch else f"--{key}={value}")
    parser.exit_on_error = False
    try:
        parser.parse_args(arguments)
    except ArgumentError as wrong:
        raise ValueError(f"{path}: {wrong}") from None
    return arguments


def _check_checkpoints(settings: Settings, options: Namespace) -> None:
    """Check that `--resume` finds a checkpoint, and that a new run does not overwrite the files of an earlier run.

    With `--checkpoints`, a run resumes from an existing checkpoint even without `--resume`. Ranks that torchrun
    restarts after a failure always resume.

    Raises:
        ValueError: a check failed. The message names the option to give or to omit.
    """
    if settings.checkpoints is None or launch.is_restart():
        return
    from shardlite.checkpoint import checkpoints_in

    newest = next(reversed(checkpoints_in(settings.checkpoints).values()), None)
    if options.resume and newest is None:
        raise ValueError(
            f"--resume: there is no checkpoint in {settings.checkpoints}; omit --resume to start a new run"
        )
    if newest is not None and not options.resume and options.checkpoints is None:
        raise ValueError(
            f"{newest} belongs to an earlier run: give --resume to resume that run, or another --out for a new run"
        )
