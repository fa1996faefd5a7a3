"""`shardlite inspect`, `shardlite export` and `shardlite import` on the command line."""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shardlite.apps.options import DTYPES, dtype_of
from shardlite.errors import CheckpointError


def add_inspect(commands: Any) -> None:
    """Add `shardlite inspect` to the commands."""
    parser: ArgumentParser = commands.add_parser(
        "inspect",
        help="summarize what a checkpoint holds, and check its files",
        description="Print the step, the number of ranks, the parts of the model and the groups of the optimizer of a"
        " checkpoint, and compare all files with their checksums. Equal blocks share a line. The exit status is 1 if a"
        " file is missing or damaged. Executes no code of the checkpoint.",
    )
    parser.set_defaults(run=lambda options, _: _inspect(options))
    parser.add_argument("path", type=Path, metavar="PATH", help="folder of a run, or of one checkpoint")
    parser.add_argument("--all", action="store_true", help="list each tensor instead of the parts of the model")
    parser.add_argument("--no-check", action="store_true", help="do not compare the files with their checksums")


def add_export(commands: Any) -> None:
    """Add `shardlite export` to the commands."""
    parser: ArgumentParser = commands.add_parser(
        "export",
        help="write the weights of a checkpoint as safetensors",
        description="Write the weights of a checkpoint into safetensors files with an index, as from_pretrained of"
        " Hugging Face reads them. Needs the package safetensors.",
    )
    parser.set_defaults(run=lambda options, _: _export(options))
    parser.add_argument("path", type=Path, metavar="PATH", help="folder of a run, or of one checkpoint")
    parser.add_argument("out", type=Path, metavar="FOLDER", help="where the files go")
    parser.add_argument("--dtype", choices=DTYPES, help="convert weights to it (as they are kept)")


def add_import(commands: Any) -> None:
    """Add `shardlite import` to the commands."""
    parser: ArgumentParser = commands.add_parser(
        "import",
        help="make a checkpoint of weights in safetensors files",
        description="Write a checkpoint with the weights of a folder of safetensors files, as save_pretrained of"
        " Hugging Face writes them. Needs the package safetensors.",
    )
    parser.set_defaults(run=lambda options, _: _import(options))
    parser.add_argument("path", type=Path, metavar="FOLDER", help="with the files")
    parser.add_argument("out", type=Path, metavar="PATH", help="folder of a run: the checkpoint becomes its newest")


def _inspect(options: Namespace) -> int:
    from shardlite.apps.inspect_checkpoint import inspect

    try:
        for line in inspect(options.path, check=not options.no_check, every=options.all):
            print(line)
    except CheckpointError as error:
        print(f"shardlite: {error}", file=sys.stderr)
        return 1
    return 0


def _export(options: Namespace) -> int:
    from shardlite.checkpoint import export_weights

    dtype = None if options.dtype is None else dtype_of(options.dtype)
    return _convert(lambda: export_weights(options.path, options.out, dtype=dtype))


def _import(options: Namespace) -> int:
    from shardlite.checkpoint import import_weights

    return _convert(lambda: [import_weights(options.path, options.out)])


def _convert(write: Callable[[], Sequence[Path]]) -> int:
    """Print the paths that `write` returns."""
    try:
        print(*write(), sep="\n")
    except CheckpointError as error:
        print(f"shardlite: {error}", file=sys.stderr)
        return 1
    return 0
