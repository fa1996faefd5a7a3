"""`shardlite inspect` as a function: what a checkpoint holds, and whether its files are whole."""

import os
from collections.abc import Iterator
from pathlib import Path

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from shardlite.apps.checkpoint import files
from shardlite.apps.checkpoint.reading import Checkpoint


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
