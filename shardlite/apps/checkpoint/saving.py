"""`save`: each rank writes what it holds, and rank 0 publishes the checkpoint.

    rank 0    agree    write its part    agree    .metadata, shardlite.json, rename    agree
    rank 1    agree    write its part    agree                                         agree

Ranks agree through the store of the process group. No tensor travels: nothing is gathered, and one tensor at a time is
decoded or copied from a GPU.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from copy import copy
from dataclasses import dataclass, replace
from operator import index
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.planner_helpers import _create_write_items
from torch.optim import Optimizer

from shardlite.apps.checkpoint import files
from shardlite.apps.checkpoint.contents import Paths, contents, pickled
from shardlite.apps.checkpoint.lease import Lease, hold
from shardlite.apps.checkpoint.writing import write_part
from shardlite.comm import Ranks, all_gather_json
from shardlite.errors import CheckpointError
from shardlite.model import ShardLite
from shardlite.params import ShardTensor

T = TypeVar("T")


def save(
    path: str | os.PathLike[str],
    model: ShardLite,
    optimizer: Optimizer | None = None,
    extra: Mapping[str, Any] | None = None,
    *,
    step: int | None = None,
    keep: int | None = None,
) -> Path:
    """Save a run into a new checkpoint in the folder `path`. The newest one there is that with the highest step.

    The checkpoint has the weights and buffers, the optimizer's state in fp32 whatever its format, the states of each
    rank's random number generators, and `extra`. `load` takes it at any number of ranks, stage, units and format;
    `torch.distributed.checkpoint` reads it, too. It is written beside its place and published by one rename when all
    of it is on the disk: a crash leaves the earlier checkpoints whole. To be called by every rank, with a folder that
    all of them see.

    Args:
        path: folder of the run's checkpoints. This one becomes `step-<step>` in it.
        model: the wrapped model.
        optimizer: the model's optimizer, ShardLite's or one of PyTorch's.
        extra: what else is to be saved, of this rank: tensors, numbers, strings, and dicts, lists and tuples of these.
            Of objects with `state_dict()` and `load_state_dict()` (schedulers, samplers, `EMA`) the state is saved.
        step: number of the checkpoint; by default one above the newest.
        keep: how many checkpoints stay: this one, and the newest others. `None`: all.

    Returns:
        The path of the checkpoint.

    Raises:
        CheckpointError: on every rank, if any rank cannot write its part, has something in `extra` that loading could
            execute code for, or another job that is running saves into the folder. The earlier checkpoints are as
            they were.
        CommError: a rank did not come to the call.
    """
    return _begin(path, model, optimizer, extra, step, keep, snapshot=False).run()


def async_save(
    path: str | os.PathLike[str],
    model: ShardLite,
    optimizer: Optimizer | None = None,
    extra: Mapping[str, Any] | None = None,
    *,
    step: int | None = None,
    keep: int | None = None,
) -> Future[Path]:
    """Save a run like `save` while the training goes on.

    The call copies what this rank writes into host memory, in the form in which it is kept, and returns. A thread
    decodes and writes the copy. The next `save`, `async_save` or `load` of the model waits for it, and raises if it
    has failed. A process does not end before it is written. To be called by every rank.

    Args:
        path, model, optimizer, extra, step, keep: as for `save`.

    Returns:
        A future of the path of the checkpoint. Its `result()` waits, and raises what `save` would raise.

    Raises:
        CheckpointError: on every rank, if the copy cannot be made on any rank, or the save before has failed.
        CommError: a rank did not come to the call.
    """
    job, future = _begin(path, model, optimizer, extra, step, keep, snapshot=True), Future[Path]()

    def run() -> None:
        try:
            with torch.no_grad():
                future.set_result(job.run())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, name="shardlite-save").start()
    _running[model] = future
    return future


_running: WeakKeyDictionary[ShardLite, Future[Path]] = WeakKeyDictionary()
"""The save of each model that a thread runs, or ran last."""


def wait_for_save(model: ShardLite) -> None:
    """Wait until the model's save in a thread has ended.

    Raises:
        CheckpointError: it has failed.
    """
    if (future := _running.pop(model, None)) is not None:
        future.result()


@torch.no_grad()
def _begin(
    path: str | os.PathLike[str],
    model: ShardLite,
    optimizer: Optimizer | None,
    extra: Mapping[str, Any] | None,
    step: int | None,
    keep: int | None,
    *,
    snapshot: bool,
) -> _Save:
    """Agree on the step, and find out what this rank writes, or copy it."""
    if keep is not None and keep < 1:
        raise ValueError(f"save: keep must be at least 1, got {keep}")
    if step is not None and (step := index(step)) < 0:
        raise ValueError(f"save: step must be at least 0, got {step}")
    wait_for_save(model)
    talk, root = Talk(model), Path(path)

    made: list[Path] = []
    leases: list[Lease] = []

    def prepare() -> tuple[int, _Part]:
        part = _part_of(model, optimizer, extra, talk)
        if snapshot:
            part = part.copied()
        if talk.rank == 0:
            files.check_folder(root)
            root.mkdir(parents=True, exist_ok=True)
            leases.append(hold(root, model))
        chosen = step if step is not None else max(files.folders_in(root), default=-1) + 1
        if talk.rank == 0:
            made.append(files.begin(root, chosen, leases[0]))
        return chosen, part

    try:
        (_, part), told = talk.agree(prepare, "save", tell=lambda prepared: [prepared[0], optimizer is not None])
        steps = [each for each, _ in told]
        if len({has for _, has in told}) > 1:
            raise CheckpointError("save: some ranks were given an optimizer, and others none")
        if step is not None and len(set(steps)) > 1:
            raise CheckpointError(f"save: ranks were given different steps, {steps} by rank")
    except CheckpointError:
        for each, lease in zip(made, leases, strict=True):
            if lease.is_mine():
                files.discard(each)
        raise
    folder = root / f".saving-{files.name_of(steps[0])}"
    facts = {"step": steps[0], "ranks": talk.size, "stage": model.stage}
    if model._parts is not None:
        facts[files.LOOPS] = model._parts.finished
    job = _Save(folder, root, facts, keep, part, talk if not snapshot else talk.on_thread("save"), leases)
    for lease in leases:
        lease.keep_for(job)
    return job


@dataclass(frozen=True, eq=False)
class _Save:
    """A save whose ranks have agreed to begin. It knows no model, which may train on."""

    folder: Path
    root: Path
    facts: Mapping[str, Any]
    keep: int | None
    part: _Part
    talk: Talk
    leases: Sequence[Lease]
    """Rank 0's on the folder of the run."""

    def run(self) -> Path:
        """Write this rank's part and, on rank 0, publish the checkpoint. Return its path."""
        talk = self.talk
        try:
            _, parts = talk.agree(lambda: self.part.write(self.folder, talk.rank), "save", tell=lambda part: part)

            def publish() -> None:
                for lease in self.leases:
                    finish(self.folder, self.root, self.facts, parts, self.keep, lease)

            talk.agree(publish, "save", tell=lambda _: None)
        except BaseException:
            for lease in self.leases:
                if lease.is_mine():
                    files.discard(self.folder)
            raise
        return self.root / files.name_of(self.facts["step"])


@dataclass(frozen=True)
class _Part:
    """What one rank writes."""

    items: Sequence[WriteItem]
    entries: Mapping[str, Any]
    aliases: Mapping[str, str]
    """Names that stand for the same tensor as another one."""

    paths: Paths

    def copied(self) -> _Part:
        """Return a copy in host memory of what is written, in the form in which it is kept."""
        copies: dict[
            int, tuple[Tensor, Tensor]
        ] = {}  # both moments of a parameter may be decoded from the same tensors

        def copy(tensor: Tensor) -> Tensor:
            if id(tensor) not in copies:
                copies[id(tensor)] = tensor, tensor.detach().to("cpu", copy=True)
            return copies[id(tensor)][1]

        entries: dict[str, Any] = {}
        for item in self.items:
            name = item.index.fqn
            value = self.entries[name]
            if name not in entries and isinstance(value, ShardTensor):
                entries[name] = value.snapshot(copy)
            elif name not in entries:
                entries[name] = copy(value) if isinstance(value, Tensor) else pickled(name, value)
        return replace(self, entries=entries)

    def write(self, folder: Path, rank: int) -> dict[str, Any]:
        """Write the file of a rank as DCP does, and return what rank 0 has to know of it.

        DCP's own writer would keep a copy of every tensor until the file is finished.
        """
        told = {name: path for name, path in self.paths.items() if rank == 0 or name.startswith("ranks.")}
        return {**write_part(folder, rank, self.items, self.entries), "aliases": self.aliases, "paths": told}


def _part_of(model: ShardLite, optimizer: Optimizer | None, extra: Mapping[str, Any] | None, talk: Talk) -> _Part:
    entries, paths = contents(model, optimizer, extra, talk.rank)
    equal = {f"model.{name}" for name, param in model.named_parameters() if param not in model._ignored}
    items, aliases = _own_items(entries, paths, talk, equal, sharded=model._placement.rank is not None)
    return _Part(items, entries, aliases, paths)


class Talk:
    """How the ranks of a model agree on checkpoints. They are numbered from 0, those of the first replica first."""

    def __init__(self, model: ShardLite) -> None:
        if not isinstance(model, ShardLite):
            raise TypeError(f"a checkpoint is of a ShardLite model, got {type(model).__name__}: wrap it first")
        self._groups: Ranks = model._groups
        self.timeout = model._context.timeout
        self._missing = model._context.reports.missing_rank
        sizes = [dist.get_world_size(group) for group in self._groups.all]
        numbers = [dist.get_rank(group) for group in self._groups.all]
        self.shards, self.shard = sizes[0], numbers[0]
        self.replica = numbers[1] if len(numbers) > 1 else 0
        self.size = self.shards * (sizes[1] if len(sizes) > 1 else 1)
        self.rank = self.replica * self.shards + self.shard
        self._thread = ""

    def on_thread(self, name: str) -> Talk:
        """Return one for calls from another thread, which all ranks name alike."""
        other = copy(self)
        other._thread = name
        return other

    def agree(self, act: Callable[[], T], what: str, *, tell: Callable[[T], Any]) -> tuple[T, list[Any]]:
        """Let every rank `act`. Return this rank's result, and what all ranks `tell` of theirs, in JSON types.

        Raises:
            CheckpointError: on every rank, if one of them could not act.
        """
        result, problem, error = None, None, None
        try:
            result = act()
        except Exception as caught:
            problem, error = f"{caught}" if isinstance(caught, CheckpointError) else _words(caught), caught
        rows = [[problem, None if error is not None else tell(result)]]  # type: ignore[arg-type]
        for group in self._groups.all:
            told = all_gather_json(group, rows, what, self.timeout, thread=self._thread, missing=self._missing)
            rows = [row for part in told for row in part]
        if isinstance(error, CheckpointError):
            raise error
        troubled = next(((rank, why) for rank, (why, _) in enumerate(rows) if why is not None), None)
        if troubled is not None:
            raise CheckpointError(f"{what}: rank {troubled[0]}: {troubled[1]}") from error
        return result, [told for _, told in rows]  # type: ignore[return-value]


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _own_items(
    entries: Mapping[str, Any], paths: Paths, talk: Talk, equal: Collection[str], *, sharded: bool
) -> tuple[list[WriteItem], dict[str, str]]:
    """Return what this rank writes, and names that stand for the same tensor as another one.

    The first replica's ranks write their shards; a step count is written by the rank with the parameter's first
    element. Of what every rank has whole, parameters (`equal`) and their states are divided among the ranks by size,
    and the rest, of which ranks may have different values, is rank 0's.
    """
    items: list[WriteItem] = []
    seen: dict[Hashable, str] = {}
    aliases: dict[str, str] = {}
    loads = [0] * talk.shards
    for name, value in entries.items():
        if isinstance(value, Tensor) and seen.setdefault(_key(value), name) != name:
            aliases[name] = seen[_key(value)]
            continue
        is_state = name.startswith("optimizer.state.")
        if isinstance(value, ShardTensor) and sharded:
            mine = True
        elif is_state and sharded:
            shard = entries[f"model.{paths[name][2]}"]
            mine = shard.stop > 0 == shard.start if isinstance(shard, ShardTensor) else talk.shard == 0
        elif isinstance(value, Tensor) and (is_state or name in equal):
            writer = min(range(talk.shards), key=loads.__getitem__)
            loads[writer] += value.nbytes
            mine = talk.shard == writer
        else:
            mine = talk.shard == 0
        if (mine and talk.replica == 0) or name.startswith("ranks."):
            items += _create_write_items(name, value)
    return items, aliases


def _key(value: Tensor) -> Hashable:
    """Return what two names of one tensor have in common: tied weights."""
    if isinstance(value, ShardTensor) or value.numel() == 0:
        return id(value)
    return value.data_ptr(), value.dtype, value.shape, value.stride()


def finish(
    folder: Path, root: Path, facts: Mapping[str, Any], parts: Sequence[dict[str, Any]], keep: int | None, lease: Lease
) -> None:
    """Write what describes the parts of all ranks, and publish the checkpoint. `facts` are those of the manifest."""
    files.write_synced(folder / files.METADATA, pickle.dumps(_metadata(parts)))
    sums = {name: told for part in parts for name, told in part["files"].items()}
    files.write_manifest(folder, facts, {**sums, files.METADATA: files.sums_of(folder / files.METADATA)})
    files.publish(folder, root, facts["step"], keep, lease)


def _metadata(parts: Sequence[dict[str, Any]]) -> Metadata:
    """Return DCP's metadata of what all ranks have written."""
    tensors: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for name, where, *data in _rows(parts):
        if not data:
            tensors[name] = BytesStorageMetadata()
            places[MetadataIndex(name)] = _StorageInfo(*where)
            continue
        dtype, size, offsets, sizes = data
        chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        properties = TensorProperties(dtype=getattr(torch, dtype))
        tensors.setdefault(name, TensorStorageMetadata(properties, torch.Size(size), [])).chunks.append(chunk)
        places[MetadataIndex(name, chunk.offsets)] = _StorageInfo(*where)
    paths = {name: tuple(path) for part in parts for name, path in part["paths"].items()}
    return Metadata(tensors, planner_data=paths, storage_data=places, storage_meta=StorageMeta(), version="1.0.0")


def _rows(parts: Sequence[dict[str, Any]]) -> Iterator[list[Any]]:
    """Yield what was written, once more for each other name of a tensor."""
    others: dict[str, list[str]] = {}
    for alias, name in parts[0]["aliases"].items():
        others.setdefault(name, []).append(alias)
    for part in parts:
        for name, *row in part["rows"]:
            yield from ([each, *row] for each in (name, *others.get(name, ())))
