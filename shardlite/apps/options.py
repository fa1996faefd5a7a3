"""Checks of the options of a command, made before it begins to work, and how wrong usage ends it."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def usage_errors(parser: ArgumentParser, plots: str) -> Iterator[None]:
    """End the program with status 2 and one line where the block raises an error of its options.

    Args:
        parser: prints the usage and the line.
        plots: the option that needs matplotlib.
    """
    try:
        yield
    except ModuleNotFoundError as missing:
        if missing.name != "matplotlib":
            raise
        parser.error(f"{plots} needs matplotlib, which is not installed; pip install 'shardlite[demo]'")
    except (ValueError, OSError) as wrong:
        parser.error(str(wrong))


def check_numbers(options: Namespace, **least: int) -> None:
    """Raise an error if a number of a command line is too small. `None`: the option was not given.

    Raises:
        ValueError: the message names the option.
    """
    for name, smallest in least.items():
        value = getattr(options, name)
        if value is not None and value < smallest:
            raise ValueError(f"--{name} must be at least {smallest}, got {value}")


def check_file(option: str, path: Path | None) -> None:
    """Raise an error if a file cannot be where an option says. `None`: the option was not given.

    Raises:
        OSError: the folder of `path` does not exist, or `path` is a folder.
    """
    if path is None:
        return
    if path.is_dir():
        raise IsADirectoryError(f"{option} {path} is a folder; a file is needed")
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(f"{option} {path}: there is no folder {path.absolute().parent}")


def check_folder(option: str, path: Path | None) -> None:
    """Raise an error if `path` is a file. A folder that does not exist is made later. `None`: it was not given.

    Raises:
        OSError: `path` is a file.
    """
    if path is not None and path.exists() and not path.is_dir():
        raise NotADirectoryError(f"{option} {path} is a file; a folder is needed")
