"""`save`: each rank writes the shards that it keeps, and rank 0 publishes the checkpoint.

    rank 0    agree    write its file    agree    .metadata, shardlite.json, rename    agree
    rank 1    agree    write its file    agree                                         agree

Ranks agree through the store of the process group. No tensor is sent or gathered. One tensor at a time is decoded or
copied from a GPU. In a rank's file, tensors follow one another in the format of `torch.save`, which
`torch.distributed.checkpoint` (DCP) reads.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread
from typing import IO, Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.optim import Optimizer
from torch.utils.serialization import config

from shardlite.checkpoint import files
from shardlite.checkpoint.contents import Paths, Run, check_run, contents, pickled
from shardlite.checkpoint.lease import Lease, acquire
from shardlite.checkpoint.peers import Peers
from shardlite.errors import CheckpointError, check_int, check_path
from shardlite.model import ModelState, ShardLite
from shardlite.optimizers import member_of
from shardlite.params import ShardTensor


def save(
    path: str | os.PathLike[str],
    model: ShardLite,
    optimizer: Optimizer | None = None,
    extra: Mapping[str, Any] | None = None,
    *,
    step: int | None = None,
    keep: int | None = None,
) -> Path:
    """Save a run as a new checkpoint in the folder `path`. Collective: every rank must call it.

    A checkpoint has the weights and buffers, the optimizer's state converted to fp32, the states of each rank's random
    number generators, and `extra`. `load` accepts a checkpoint of any number of ranks, stage, units and format.
    `torch.distributed.checkpoint` can also read the checkpoint. When all files are on the disk, the checkpoint is
    published by one rename, so a crash leaves the earlier checkpoints complete. All ranks must see the same folder.

    Args:
        path: folder of the run's checkpoints. The new checkpoint is named `step-<step>`.
        model: the wrapped model.
        optimizer: the model's optimizer, of ShardLite or PyTorch.
        extra: further values of this rank: tensors, numbers, strings, and dicts, lists and tuples of such values. An
            object with `state_dict()` and `load_state_dict()` (scheduler, sampler, `EMA`) is saved as its state.
        step: number of the checkpoint. Default: the number of the newest checkpoint plus one.
        keep: number of checkpoints to keep, including the new checkpoint. Older checkpoints are removed. `None` keeps
            all checkpoints.

    Returns:
        The path of the checkpoint.

    Raises:
        CheckpointError: a rank cannot write its file, `extra` has a value whose loading could execute code, or another
            running job saves into the folder. Raised on every rank. The earlier checkpoints are unchanged.
        DesyncError: a rank has skipped a step. Raised on every rank; nothing is saved.
        CommError: a rank did not call `save`.
        TypeError, ValueError: an argument is invalid, for example a negative `step`. Other ranks raise
            `CheckpointError`.

    Example:
        >>> save("runs/first", model, optimizer, {"schedule": schedule}, step=100, keep=3)
    """
    return _Save(path, Run(model, optimizer, extra), step, keep, copied=False).write()


def async_save(
    path: str | os.PathLike[str],
    model: ShardLite,
    optimizer: Optimizer | None = None,
    extra: Mapping[str, Any] | None = None,
    *,
    step: int | None = None,
    keep: int | None = None,
) -> Future[Path]:
    """Save a run like `save` while the training continues. Collective: every rank must call it.

    The call copies this rank's state into host memory, in the formats in which the rank keeps the state, and returns. A
    thread decodes and writes the copy. The next `save`, `async_save` or `load` of the model waits for the thread, and
    raises if the save failed. The process does not exit before the copy is written.

    Args:
        path, model, optimizer, extra, step, keep: as for `save`.

    Returns:
        A future whose `result()` waits and returns the path of the checkpoint, or raises the errors of `save`.

    Raises:
        CheckpointError: a rank cannot copy its state, or the previous save failed. Raised on every rank.
        DesyncError: a rank has skipped a step. Raised on every rank; nothing is saved.
        CommError: a rank did not call `async_save`.
        TypeError, ValueError: an argument is invalid. Other ranks raise `CheckpointError`.

    Example:
        >>> saved = async_save("runs/first", model, optimizer, step=100)
        >>> path = saved.result()
    """
    job, future = _Save(path, Run(model, optimizer, extra), step, keep, copied=True), Future[Path]()

    def write() -> None:
        try:
            with torch.no_grad():
                future.set_result(job.write())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=write, name="shardlite-save").start()
    _in_progress[model] = future
    return future


_in_progress: WeakKeyDictionary[ShardLite, Future[Path]] = WeakKeyDictionary()
"""The latest asynchronous save of each model."""


def wait_for_save(model: ShardLite) -> None:
    """Wait until the model's asynchronous save has ended.

    Raises:
        CheckpointError: the save failed.
    """
    if (future := _in_progress.pop(model, None)) is not None:
        future.result()


# ---- phases ---------------------------------------------------------------------------------------------------------


class _Save:
    """A save on which all ranks have agreed. The object does not refer to the model, whose training may continue.

    In the constructor, ranks agree on the step. Rank 0 makes the temporary folder, and each rank lists or copies its
    entries.
    """

    @torch.no_grad()
    def __init__(
        self, path: str | os.PathLike[str], run: Run, step: int | None, keep: int | None, *, copied: bool
    ) -> None:
        peers = Peers(run.model)
        self._made: list[tuple[Path, Lease]] = []
        """On rank 0, the temporary folder and the lease on the folder of the run."""

        def check() -> None:
            self._root = check_path("save", path)
            self._keep = None if keep is None else check_int("save: keep", keep, 1)
            if step is not None:
                check_int("save: step", step)
            check_run("save", run)

        def prepare() -> tuple[int, RankFile]:
            wait_for_save(run.model)
            part = _file_of(run, peers).copied() if copied else _file_of(run, peers)
            return self._make_folder(run.model, step) if peers.rank == 0 else -1, part

        def described(result: tuple[int, RankFile]) -> list[Any]:
            return [result[0], step, keep, run.optimizer is not None]

        try:
            (_, self._part), facts = peers.share(prepare, "save", described, check=check)
            chosen, steps, keeps, has_optimizer = zip(*facts, strict=True)
            if len(set(has_optimizer)) > 1:
                raise CheckpointError("save: some ranks were given an optimizer, and others were not")
            if len(set(steps)) > 1:
                raise CheckpointError(f"save: ranks were given different steps, {[*steps]} by rank")
            if len(set(keeps)) > 1:
                raise CheckpointError(
                    f"save: ranks were given different values of keep, {[*keeps]} by rank: pass the same on every rank"
                )
        except BaseException:
            self._discard()
            raise
        self._peers = peers.on_thread("save") if copied else peers
        self._manifest = {
            "step": chosen[0],
            "ranks": peers.size,
            "stage": run.model.stage,
            "kept": run.model.kept_names,
        }
        if (loops := ModelState(run.model).loops) is not None:
            self._manifest[files.LOOPS] = loops.finished

    def _make_folder(self, model: ShardLite, step: int | None) -> int:
        """Make the temporary folder, and return the step of the checkpoint."""
        files.check_folder(self._root)
        self._root.mkdir(parents=True, exist_ok=True)
        lease = acquire(self._root, model)
        lease.holders.add(self)
        step = step if step is not None else files.next_step(self._root)
        self._made.append((files.make_temporary(self._root, step, lease), lease))
        return step

    def write(self) -> Path:
        """Write this rank's file and, on rank 0, publish the checkpoint. Return the checkpoint's path. Collective."""
        step, rank = self._manifest["step"], self._peers.rank
        folder = files.temporary(self._root, step)
        try:
            _, parts = self._peers.share(lambda: self._part.write(folder, rank), "save", lambda part: part)

            def finish() -> None:
                for _, lease in self._made:
                    publish(self._root, self._manifest, parts, self._keep, lease)

            self._peers.agree(finish, "save")
        except BaseException:
            self._discard()
            raise
        return self._root / files.name_of(step)

    def _discard(self) -> None:
        for folder, lease in self._made:
            if lease.is_mine():
                files.discard(folder)


def publish(
    root: Path, manifest: Mapping[str, Any], parts: Sequence[dict[str, Any]], keep: int | None, lease: Lease
) -> Path:
    """Write the metadata and the manifest of the files of all ranks, and publish the checkpoint. Return its path."""
    folder = files.temporary(root, manifest["step"])
    files.write_synced(folder / files.METADATA, pickle.dumps(_metadata(parts)))
    sums = {name: each for part in parts for name, each in part["files"].items()}
    files.write_manifest(folder, manifest, {**sums, files.METADATA: files.sums_of(folder / files.METADATA)})
    return files.publish(root, manifest["step"], keep, lease)


def _metadata(parts: Sequence[dict[str, Any]]) -> dcp.Metadata:
    """Return the metadata, in DCP's format, of the files of all ranks."""
    tensors: dict[str, Any] = {}
    places: dict[dcp.MetadataIndex, _StorageInfo] = {}
    for name, where, *data in _entries(parts):
        if not data:
            tensors[name] = dcp.BytesStorageMetadata()
            places[dcp.MetadataIndex(name)] = _StorageInfo(*where)
            continue
        dtype, size, offsets, sizes = data
        chunk = dcp.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        properties = dcp.TensorProperties(dtype=getattr(torch, dtype))
        tensors.setdefault(name, dcp.TensorStorageMetadata(properties, torch.Size(size), [])).chunks.append(chunk)
        places[dcp.MetadataIndex(name, chunk.offsets)] = _StorageInfo(*where)
    paths = {name: tuple(path) for part in parts for name, path in part["paths"].items()}
    return dcp.Metadata(
        tensors, planner_data=paths, storage_data=places, storage_meta=dcp.StorageMeta(), version="1.0.0"
    )


def _entries(parts: Sequence[dict[str, Any]]) -> Iterator[list[Any]]:
    """Yield the entries of all ranks. An entry of a tied tensor occurs once under each name of the tensor."""
    others: dict[str, list[str]] = {}
    for alias, name in parts[0]["aliases"].items():
        others.setdefault(name, []).append(alias)
    for part in parts:
        for name, *entry in part["entries"]:
            yield from ([each, *entry] for each in (name, *others.get(name, ())))


# ---- the file of a rank ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankFile:
    """The file that one rank writes."""

    entries: Mapping[str, Any]
    """Tensors and objects by name, in the order of the file."""

    aliases: Mapping[str, str]
    """For each additional name of a tied tensor, the name under which the tensor is written."""

    paths: Paths

    def copied(self) -> RankFile:
        """Return a copy in host memory. Tensors have the formats in which this rank keeps them."""
        copies: dict[int, tuple[Tensor, Tensor]] = {}  # by `id`, because two moments may be decoded from one tensor

        def copy(tensor: Tensor) -> Tensor:
            if id(tensor) not in copies:
                copies[id(tensor)] = tensor, tensor.detach().to("cpu", copy=True)
            return copies[id(tensor)][1]

        def copied(name: str, value: Any) -> Any:
            if isinstance(value, ShardTensor):
                return value.snapshot(copy)
            return copy(value) if isinstance(value, Tensor) else pickled(name, value)

        return replace(self, entries={name: copied(name, value) for name, value in self.entries.items()})

    def write(self, folder: Path, rank: int) -> dict[str, Any]:
        """Write the file of a rank, and return its description for the metadata and the manifest, in JSON types.

        DCP's own writer would keep a copy of every tensor until the file is complete.

        Returns:
            `entries`: for each part the name, [file, offset, bytes] and, for a tensor, dtype, shape, offsets and sizes.
            `files`: size and checksums of the file, by the name of the file.
            `aliases`: as in this object. `paths`: the paths of the entries that this rank describes.

        Raises:
            CheckpointError: the file cannot be written, or an object has a value whose loading could execute code.
        """
        file = f"__{rank}_0.distcp"
        # `torch.save` would compute a second checksum of all bytes, which no reader of checkpoints compares.
        no_crc = config.patch("save.compute_crc32", False)  # type: ignore[attr-defined]
        with files.summed(folder / file) as stream, no_crc:
            written = [part for name, value in self.entries.items() for part in _written(stream, file, name, value)]
        mine = self.entries.keys()
        paths = {entry: path for entry, path in self.paths.items() if rank == 0 or entry in mine}
        return {"entries": written, "files": {file: stream.sums()}, "aliases": self.aliases, "paths": paths}


def _written(stream: files.SummedFile, file: str, name: str, value: Any) -> Iterator[list[Any]]:
    """Write an entry, and yield the description of each part. A sharded tensor is decoded once."""
    if not isinstance(value, Tensor):
        start = stream.size
        stream.write((value if isinstance(value, io.BytesIO) else pickled(name, value)).getbuffer())
        yield [name, [file, start, stream.size - start]]
        return
    if isinstance(value, ShardTensor):
        local = value.read()
        parts = [(offsets, sizes, value.box(offsets, local)) for offsets, sizes in value.boxes()]
    else:
        parts = [((0,) * value.ndim, tuple(value.shape), value)]
    for offsets, sizes, part in parts:
        start = stream.size
        torch.save(_with_own_storage(part.detach().cpu()), cast("IO[bytes]", stream))
        dtype = str(value.dtype).removeprefix("torch.")
        yield [name, [file, start, stream.size - start], dtype, [*value.shape], [*offsets], [*sizes]]


def _with_own_storage(tensor: Tensor) -> Tensor:
    """Return a tensor whose storage has only the tensor's elements, because `torch.save` writes complete storages."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == tensor.nbytes:
        return tensor
    if not tensor.is_contiguous():
        return tensor.contiguous()
    start = tensor.storage_offset() * tensor.itemsize
    part = storage[start : start + tensor.nbytes]
    return torch.empty(0, dtype=tensor.dtype).set_(part, 0, tensor.shape, tensor.stride())


def _file_of(run: Run, peers: Peers) -> RankFile:
    """Return the entries that this rank writes.

    Each rank of the first replica writes its shards. The step count of a parameter is written by the rank that has the
    parameter's first element. At stage 0 every rank keeps whole parameters and their states, and at any stage those of
    replicated parameters. These tensors are divided among the ranks by size, and each tensor is written once. The owner
    of a whole parameter (`WholeParameters`) writes the parameter's state. Rank 0 writes all other entries, even if the
    values of other ranks differ.
    """
    state = ModelState(run.model)
    flats = [flat for unit in state.units for flat in unit.flats]
    kept_whole = {slot.name for flat in flats if flat.rank is None for slot in flat.layout.slots}
    entries, paths = contents(run, peers.rank)
    equal = {f"model.{name}" for name, param in run.model.named_parameters() if param not in state.ignored}
    whole = _owned(run)
    loads = [0] * peers.shards

    def is_mine(name: str, value: Any) -> bool:
        is_state = name.startswith("optimizer.state.")
        if is_state and (param := str(paths[name][2])) in whole:
            return whole[param]
        owner = str(paths[name][2]) if is_state else name.removeprefix("model.")
        if is_state and f"model.{owner}" not in entries:  # of a parameter outside of the model
            return peers.shard == 0
        sharded = state.shard is not None and owner not in kept_whole
        if sharded and isinstance(value, ShardTensor):
            return True
        if sharded and is_state:
            shard = entries[f"model.{paths[name][2]}"]
            return shard.stop > 0 == shard.start if isinstance(shard, ShardTensor) else peers.shard == 0
        if not isinstance(value, Tensor) or not (is_state or name in equal):
            return peers.shard == 0
        writer = min(range(peers.shards), key=loads.__getitem__)
        loads[writer] += value.nbytes
        return peers.shard == writer

    own: dict[str, Any] = {}
    aliases: dict[str, str] = {}
    seen: dict[Hashable, str] = {}
    for name, value in entries.items():
        if isinstance(value, Tensor) and (first := seen.setdefault(_key(value), name)) != name:
            aliases[name] = first
        elif name.startswith("ranks.") or (is_mine(name, value) and peers.rank < peers.shards):
            own[name] = value
    return RankFile(own, aliases, paths)


def _owned(run: Run) -> dict[str, bool]:
    """For each parameter whose state is that of the whole parameter, return whether this rank has the state."""
    if run.optimizer is None:
        return {}
    members = ((name, member_of(run.optimizer, param)) for name, param in run.model.named_parameters())
    return {name: member.is_mine for name, member in members if member is not None}


def _key(value: Tensor) -> Hashable:
    """Return a key of an entry. Two entries have the same key only if they are the same tied tensor."""
    if isinstance(value, ShardTensor) or value.numel() == 0:
        return id(value)
    return value.data_ptr(), value.dtype, value.shape, value.stride()
