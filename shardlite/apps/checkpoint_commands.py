"""`shardlite inspect`, `shardlite export` and `shardlite import` on the command line."""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from shardlite.apps.options import add_command, dtype_of
from shardlite.errors import CheckpointError


def add_inspect(commands: Any) -> None:
    """Add `shardlite inspect` to the commands."""
    add_command(commands, "inspect", _inspect)


def add_export(commands: Any) -> None:
    """Add `shardlite export` to the commands."""
    add_command(commands, "export", _export)


def add_import(commands: Any) -> None:
    """Add `shardlite import` to the commands."""
    add_command(commands, "import", _import)


def _inspect(_: ArgumentParser, options: Namespace, __: Sequence[str]) -> int:
    from shardlite.apps.inspect_checkpoint import inspect

    return _print_lines(lambda: inspect(options.path, check=not options.no_check, every=options.all))


def _export(_: ArgumentParser, options: Namespace, __: Sequence[str]) -> int:
    from shardlite.checkpoint import export_weights

    dtype = None if options.dtype is None else dtype_of(options.dtype)
    return _print_lines(lambda: export_weights(options.path, options.out, dtype=dtype))


def _import(_: ArgumentParser, options: Namespace, __: Sequence[str]) -> int:
    from shardlite.checkpoint import import_weights

    return _print_lines(lambda: [import_weights(options.path, options.out)])


def _print_lines(make: Callable[[], Iterable[str | Path]]) -> int:
    """Print the lines that `make` returns. Print the error and return 1 if it raises a `CheckpointError`."""
    try:
        for line in make():
            print(line)
    except CheckpointError as error:
        print(f"shardlite: {error}", file=sys.stderr)
        return 1
    return 0
