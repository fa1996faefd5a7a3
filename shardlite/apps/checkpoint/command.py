"""`shardlite inspect`, `shardlite export` and `shardlite import` on the command line."""

import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from shardlite.apps.checkpoint import files
from shardlite.apps.checkpoint.reading import Checkpoint
from shardlite.apps.checkpoint.safetensors import export_weights, import_weights
from shardlite.apps.options import DTYPES
from shardlite.errors import CheckpointError


def add_inspect(commands: Any) -> None:
    """Add `shardlite inspect` to the commands."""
    parser: ArgumentParser = commands.add_parser(
        "inspect",
        help="list what a checkpoint holds, and check its files",
        description="Print the step, the number of ranks, and each tensor of a checkpoint, and compare all files with"
        " their checksums. The exit status is 1 if a file is missing or damaged. Executes no code of the checkpoint.",
    )
    parser.set_defaults(run=lambda options, _: _inspect(options))
    parser.add_argument("path", type=Path, metavar="PATH", help="folder of a run, or of one checkpoint")
    parser.add_argument("--no-check", action="store_true", help="do not read the files")


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
    parser.set_defaults(run=lambda options, _: _convert(lambda: [import_weights(options.path, options.out)]))
    parser.add_argument("path", type=Path, metavar="FOLDER", help="with the files")
    parser.add_argument("out", type=Path, metavar="PATH", help="folder of a run: the checkpoint becomes its newest")


def _inspect(options: Namespace) -> int:
    try:
        for line in inspect(options.path, check=not options.no_check):
            print(line)
    except CheckpointError as error:
        print(f"shardlite inspect: {error}")
        return 1
    return 0


def _export(options: Namespace) -> int:
    dtype = None if options.dtype is None else DTYPES[options.dtype]
    return _convert(lambda: export_weights(options.path, options.out, dtype=dtype))


def _convert(write: Callable[[], Sequence[Path]]) -> int:
    """Print the paths that `write` returns."""
    try:
        print(*write(), sep="\n")
    except CheckpointError as error:
        print(f"shardlite: {error}", file=sys.stderr)
        return 1
    return 0


def inspect(path: str | os.PathLike[str], *, check: bool = True) -> Iterator[str]:
    """Yield lines about the newest checkpoint of a run, or about one checkpoint.

    Args:
        path: the folder of the run, or of the checkpoint.
        check: whether to read all files and compare their checksums.

    Raises:
        CheckpointError: there is none, or a file is missing or damaged.
    """
    checkpoint = Checkpoint(files.find(Path(path)))
    told = checkpoint.manifest
    tensors = {name: each for name, each in checkpoint.entries.items() if isinstance(each, TensorStorageMetadata)}
    sizes = {name: each.size.numel() * each.properties.dtype.itemsize for name, each in tensors.items()}
    origin = "written by torch.distributed.checkpoint"
    if told is not None:
        origin = f"step {told['step']}, saved by {told['ranks']} ranks at stage {told['stage']}"
    yield f"{checkpoint.folder}: {origin}, {len(tensors)} tensors, {_amount(sum(sizes.values()))}"
    width = max(map(len, tensors), default=0)
    for name, each in tensors.items():
        dtype, shape = str(each.properties.dtype).removeprefix("torch."), str([*each.size])
        parts = "1 part" if len(each.chunks) == 1 else f"{len(each.chunks)} parts"
        yield f"  {name:{width}}  {shape:16}  {dtype:8}  {_amount(sizes[name]):>9}  {parts}"
    if not check:
        return
    if told is None:
        checkpoint.check(checkpoint.object_items(checkpoint.entries))
        yield "all files have their lengths; there are no checksums"
        return
    for name, sums in told["files"].items():
        files.check_size(checkpoint.folder / name, sums["size"])
        files.check(checkpoint.folder, told, {name: [(0, sums["size"])]})
    yield f"all {len(told['files'])} files have the checksums with which they were written"


def _amount(nbytes: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} B"
