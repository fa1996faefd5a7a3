"""`shardlite inspect`, `shardlite export` and `shardlite import` on the command line."""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from shardlite.cli.options import dtype_of
from shardlite.errors import CheckpointError


def run_inspect(_: ArgumentParser, options: Namespace, __: Sequence[str]) -> int:
    """Print a summary of a checkpoint, and check its files."""
    from shardlite.cli.inspect_checkpoint import inspect

    return _print_lines(lambda: inspect(options.path, check=not options.no_check, every=options.all))


def run_export(_: ArgumentParser, options: Namespace, __: Sequence[str]) -> int:
    """Write the weights of a checkpoint as safetensors files, and print the paths of the files."""
    from shardlite.checkpoint import export_weights

    dtype = None if options.dtype is None else dtype_of(options.dtype)
    return _print_lines(lambda: export_weights(options.path, options.out, dtype=dtype))


def run_import(_: ArgumentParser, options: Namespace, __: Sequence[str]) -> int:
    """Write a checkpoint with the weights of safetensors files, and print the path of the checkpoint."""
    from shardlite.checkpoint import import_weights

    return _print_lines(lambda: [import_weights(options.path, options.out)])


def _print_lines(make: Callable[[], Iterable[str | Path]]) -> int:
    """Print the lines that `make` returns, and return 0. On a `CheckpointError`, print the error and return 1."""
    try:
        for line in make():
            print(line)
    except CheckpointError as error:
        print(f"shardlite: {error}", file=sys.stderr)
        return 1
    return 0
