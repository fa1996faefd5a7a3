"""`load`: each rank reads its part of every tensor, however the saving ranks have divided the tensor.

    find the newest    agree    plan, compare shapes, check sums    agree    read    agree
                                (nothing has changed so far)

The newest state is a checkpoint or a snapshot in memory (`in_memory/copies.py`). A rank loads its snapshot unchanged.
From a checkpoint a rank reads one tensor at a time from the file into the shard. If the model keeps a weight or moment
in another format, the rank reads it in full precision, and encodes it when all of its elements are read.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain, count
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint._traverse import set_element
from torch.optim import Optimizer

from shardlite.checkpoint import files
from shardlite.checkpoint.contents import (
    Run,
    check_keys,
    check_run,
    kind_of,
    names_of,
    restore,
    restore_generators,
)
from shardlite.checkpoint.in_memory import copies
from shardlite.checkpoint.in_memory.snapshot import SavedSnapshot
from shardlite.checkpoint.peers import Peers
from shardlite.checkpoint.reading import Checkpoint
from shardlite.checkpoint.safetensors import SafetensorsFolder, is_safetensors
from shardlite.checkpoint.saving import wait_for_save
from shardlite.errors import CheckpointError, check_path, lacking, some_of
from shardlite.model import ModelState, ShardLite
from shardlite.optim import AdamW, check_loaded
from shardlite.optimizers import load_states, member_of, numbers_among
from shardlite.params import ShardTensor

log = logging.getLogger("shardlite")


class Restored(dict[str, Any]):
    """The result of `load`: the saved `extra`, with the step and source of the loaded state."""

    step: int | None
    """Step of the loaded checkpoint or snapshot; `None` if another program has written the checkpoint."""

    source: str
    """Folder of the checkpoint, or `"copies in memory"` for a snapshot; empty if nothing was loaded."""

    def __init__(self, extra: Mapping[str, Any], step: int | None, source: str) -> None:
        super().__init__(extra)
        self.step, self.source = step, source


@torch.no_grad()
def load(
    path: str | os.PathLike[str],
    model: ShardLite,
    optimizer: Optimizer | None = None,
    extra: Mapping[str, Any] | None = None,
    *,
    missing_ok: bool = False,
) -> Restored:
    """Load the newest checkpoint of a run, or one checkpoint, into a wrapped model and its optimizer. Collective.

    If copies of `save_in_memory` are complete on all ranks, and at least as new as the newest checkpoint, the copies
    are loaded. If there are copies that cannot be loaded, rank 0 logs a warning with the reason (logger `shardlite`).

    The number of ranks, stage, units and formats may differ from those of the save. If they are the same, the run
    computes the same bits as without a restart. `load` also accepts checkpoints that `torch.distributed.checkpoint` has
    written for an FSDP2 or an unsharded program, and weights in a folder of Hugging Face's safetensors files. Loading
    executes no code.

    Args:
        path: folder of a run, as passed to `save`, or of one checkpoint.
        model: a wrapped model with the names and shapes of the saved model.
        optimizer: the model's optimizer. If it is `None`, a saved optimizer state is ignored.
        extra: objects with `load_state_dict()`, under the same keys as for `save`. Their states are loaded.
        missing_ok: whether there may be nothing to load, as at the start of a run. If there is nothing, nothing is
            changed. If the newest checkpoint lacks a file, the newest complete checkpoint is loaded, with a warning.

    Returns:
        The saved `extra`, with the objects of this call's `extra` in their places. With the same number of ranks, each
        rank gets its own `extra`, and its random number generators are restored. Otherwise all ranks get rank 0's
        `extra`, and generators are not changed. The attributes `step` and `source` are those of the loaded state. If
        there was nothing to load, the result is empty and `step` is 0.

    Raises:
        CheckpointError: there is no checkpoint, or a rank finds that it is damaged or of a different model. Raised on
            every rank; nothing was changed.
        CommError: a rank did not call `load`.
        TypeError, ValueError: an argument is invalid. Other ranks raise `CheckpointError`.

    Example:
        >>> found = load("runs/first", model, optimizer, {"schedule": schedule}, missing_ok=True)
        >>> for step in range(found.step, steps): ...
    """
    peers, run = Peers(model, loads=True), Run(model, optimizer, extra)

    def check() -> None:
        check_path("load", path)
        check_run("load", run)

    def find() -> tuple[str | None, int, str]:
        wait_for_save(model)
        return _find(Path(path), missing_ok)

    _, found = peers.share(find, "load", lambda each: each, check=check)
    folder, step, skipped = found[0]
    if skipped and peers.rank == 0:
        log.warning("load: damaged checkpoints in %s are skipped: %s", path, skipped)
    copied = copies.load_newest(copies.key_of(path), run, peers, max(step, 0), _restore)
    if copied is not None:
        return copied
    if folder is not None:
        return _restore(lambda: _StateOnDisk(Path(folder), run, peers), folder, run, peers)
    if not missing_ok:
        raise CheckpointError(f"there is no checkpoint in {path}")
    return Restored({}, 0, "")


def _find(path: Path, missing_ok: bool) -> tuple[str | None, int, str]:
    """Return the folder to load, the step of this checkpoint, and a list of skipped checkpoints with the reasons.

    The step is -1 unless `path` is the folder of a run that has a checkpoint.

    Raises:
        CheckpointError: the newest checkpoint (if `missing_ok` is set: every checkpoint) lacks a file, or `path` cannot
            be a folder.
    """
    folders = files.folders_in(path)
    if not folders and is_safetensors(path):
        return str(path), -1, ""
    if (path / files.METADATA).is_file() or (path / files.MANIFEST).is_file():
        return str(files.find(path)), -1, ""
    if not folders:
        # The check also applies if `missing_ok` is set: a run whose disk is not mounted must not start from scratch.
        files.check_folder(path)
        return None, -1, ""
    newest = max((files.checkpoints_in(path) if missing_ok else {}) or folders)
    files.check_complete(folders[newest])
    skipped = [folder for step, folder in folders.items() if step > newest]
    reasons = ", ".join(f"{folder.name} lacks {files.missing_file(folder)}" for folder in skipped)
    return str(folders[newest]), newest, reasons


def _restore(prepare: Callable[[], _StateOnDisk | SavedSnapshot], source: str, run: Run, peers: Peers) -> Restored:
    """Load the checked state that `prepare` returns. Collective."""
    model, optimizer, extra = run
    saved, has_optimizer = peers.share(prepare, "load", lambda _: optimizer is not None)
    if len(set(has_optimizer)) > 1:
        raise CheckpointError("load: some ranks were given an optimizer, and others were not")
    state = ModelState(model)
    with state.changing(peers.newest):
        peers.agree(lambda: saved.load_weights(model), "load")
        if optimizer is not None:
            _load_groups(optimizer, saved.groups)
            peers.agree(lambda: load_states(optimizer, saved.states(model)), "load")
    if state.loops is not None:
        state.loops.finished = saved.loops
    restored = peers.agree(lambda: restore(extra or {}, saved.extra), "load: extra")
    if saved.generators is not None:
        restore_generators(saved.generators)
    if peers.rank == 0:
        log.info("load: step %s, from %s", saved.step, source)
    return Restored(restored, saved.step, source)


def _load_groups(optimizer: Optimizer, saved: Sequence[Mapping[str, Any]]) -> None:
    """Replace the options of an optimizer, and drop its state. Collective."""
    numbers, groups = count(), list[dict[str, Any]]()  # `state_dict()` would convert the state that is dropped
    for mine, each in zip(optimizer.param_groups, saved, strict=True):
        groups.append({**mine, **each, "params": [next(numbers) for _ in mine["params"]]})
    optimizer.load_state_dict({"state": {}, "param_groups": groups})


class _StateOnDisk:
    """The state of this rank in a checkpoint: the entries to read, and their targets. The constructor changes nothing.

    Raises:
        CheckpointError: the checkpoint is damaged, or of a different model or optimizer.
    """

    def __init__(self, folder: Path, run: Run, peers: Peers) -> None:
        model, optimizer, extra = run
        checkpoint = self._checkpoint = SafetensorsFolder(folder) if is_safetensors(folder) else Checkpoint(folder)
        self._params: dict[str, Tensor] = dict(model.named_parameters())
        ours = model.state_dict()
        self._prefix = self._find_prefix(ours)
        named = {f"{self._prefix}{name}": value for name, value in ours.items()}
        found = {id(value) for name, value in named.items() if name in checkpoint.entries}
        # Other programs save a tied weight under only one of its names.
        self._targets = {n: value for n, value in named.items() if n in checkpoint.entries or id(value) not in found}
        self._check_model()
        self._moments: dict[str, dict[tuple[str | int, ...], str]] = {}
        """Names of entries, by the parameter's name and by the keys in the parameter's state, which may be nested."""
        self._wholes: set[str] = set()
        """Parameters whose state is that of the whole parameter."""
        self._numbers: set[str] = set()
        """Values that the optimizer keeps once per parameter."""
        self.groups: list[dict[str, Any]] = []
        if optimizer is not None:
            names = names_of(model, optimizer)
            held = (param for group in optimizer.param_groups for param in group["params"])
            self._params = {**self._params, **dict(zip(chain.from_iterable(names), held, strict=True))}
            self._find_state(set(chain.from_iterable(names)))
            self._find_wholes(optimizer)
            self._check_optimizer(optimizer, names)
            self._find_numbers()
        manifest = checkpoint.manifest or {}
        self.step: int | None = manifest.get("step")
        self.loops: int = manifest.get(files.LOOPS, 0)
        same = manifest.get("ranks") == peers.size
        prefix = f"ranks.{peers.rank if same else 0}"
        added = [f"{prefix}.extra", *([f"{prefix}.generators"] if same else [])]
        self._check_data([name for name in added if name in checkpoint.entries])
        self.extra = self._object(f"{prefix}.extra") or {}
        self.generators = self._object(f"{prefix}.generators") if same else None
        check_keys(extra or {}, self.extra, checkpoint.folder)

    def _object(self, name: str) -> Any:
        return self._checkpoint.object(name) if name in self._checkpoint.entries else None

    def _find_prefix(self, ours: Mapping[str, Tensor]) -> str:
        """Return the prefix of the model's names in the checkpoint.

        The prefix is `model.` if ShardLite has written the checkpoint. Other programs may use any prefix.
        """
        entries, first = self._checkpoint.entries, next(iter(ours))
        tensors = {id(value) for value in ours.values()}

        def fits_with(prefix: str) -> bool:
            return {id(value) for name, value in ours.items() if f"{prefix}{name}" in entries} == tensors

        found = {entry.removesuffix(first) for entry in entries if entry.endswith(first)}
        fits = ["model."] if self._checkpoint.manifest is not None else sorted(filter(fits_with, found))
        if len(fits) > 1 and "model." not in fits:
            raise CheckpointError(
                f"{self._checkpoint.folder} has several models with these names, under {', '.join(fits)}: load the "
                "intended one with torch.distributed.checkpoint, into model.state_dict()"
            )
        return "model." if not fits or "model." in fits else fits[0]

    def _check_model(self) -> None:
        """Check that the model has the names and shapes of the checkpoint."""
        folder, entries = self._checkpoint.folder, self._checkpoint.entries
        missing = self._targets.keys() - entries.keys()
        unknown = {name for name in entries if name.startswith("model.")} - self._targets.keys()
        if missing or (unknown and self._prefix == "model."):
            raise CheckpointError(f"{folder} is of a different model: it {lacking(missing, unknown)}")
        for name, target in self._targets.items():
            size = self._checkpoint.size_of(name)
            if size != target.shape:
                shape = "is not a tensor" if size is None else f"has shape {list(size)}"
                raise CheckpointError(f"{folder}: {name!r} {shape}, but the model's has {list(target.shape)}")

    def _find_state(self, known: Collection[str]) -> None:
        """Find the state of the optimizer and its groups by the keys of each entry: `..., state, name, key`."""
        checkpoint, groups = self._checkpoint, dict[int, dict[str, str]]()
        for entry in checkpoint.entries:
            path = checkpoint.path_of(entry)
            place = next((i for i, key in enumerate(path[:-2]) if key == "state" and path[i + 1] in known), -1)
            if place >= 0:
                self._moments.setdefault(str(path[place + 1]), {})[path[place + 2 :]] = entry
            elif len(path) >= 3 and path[-3] == "param_groups" and isinstance(path[-2], int):
                groups.setdefault(path[-2], {})[str(path[-1])] = entry
        if not self._moments and not groups:
            raise CheckpointError(f"{checkpoint.folder} has no optimizer state: call load without an optimizer")
        checkpoint.check(checkpoint.object_items(name for group in groups.values() for name in group.values()))
        self.groups = [{option: checkpoint.object(name) for option, name in groups[i].items()} for i in sorted(groups)]

    def _find_wholes(self, optimizer: Optimizer) -> None:
        """Find the parameters whose state is that of the whole parameter. Drop states that other ranks own."""
        for name, param in self._params.items():
            if (member := member_of(optimizer, param)) is not None:
                self._wholes.add(name)
                if not member.is_mine:
                    self._moments.pop(name, None)

    def _find_numbers(self) -> None:
        """Find the values that the optimizer keeps once per parameter."""
        entries = [(name, key, entry) for name, each in self._moments.items() for key, entry in each.items()]
        sizes = [(name, _name(key), self._checkpoint.size_of(entry)) for name, key, entry in entries]
        self._numbers = numbers_among(
            (key, self._like(name).numel(), size.numel()) for name, key, size in sizes if size is not None
        )

    def _check_optimizer(self, optimizer: Optimizer, names: Sequence[Sequence[str]]) -> None:
        """Check that the saved groups belong to an optimizer of this kind, with the same parameters."""
        kind, folder = kind_of(optimizer), self._checkpoint.folder
        for saved, group in zip(self.groups, optimizer.param_groups, strict=False):
            absent = group.keys() - saved.keys() - {"params", "initial_lr", "max_update"}
            if absent:
                raise CheckpointError(
                    f"{folder} is of a different optimizer: it lacks options {some_of(absent)} of {kind}"
                )
        keys = {str(key) for entries in self._moments.values() for key, *_ in entries}
        if isinstance(optimizer, AdamW):
            if keys - {"step", "exp_avg", "exp_avg_sq"}:
                raise CheckpointError(f"{folder} is of an optimizer other than AdamW: it has {some_of(keys)}")
            try:
                check_loaded({"state": {}, "param_groups": self.groups})
            except ValueError as error:
                raise CheckpointError(f"{folder}: {error}") from error
        if any(isinstance(name, int) for group in self.groups for name in group.get("params", ())):
            raise CheckpointError(
                f"{folder} has an optimizer's parameters by number, as in optimizer.state_dict(): save "
                "get_optimizer_state_dict(model, optimizer) of torch.distributed.checkpoint.state_dict"
            )
        if self.groups and [group.get("params") for group in self.groups] != names:
            raise CheckpointError(
                f"{folder}: the optimizer's groups of parameters differ from the saved ones: the saved groups have "
                f"{[len(group.get('params', ())) for group in self.groups]} parameters, the optimizer's have "
                f"{[len(group) for group in names]}. Build the same groups, with parameters in the same order"
            )
        self.groups = self.groups or [{} for _ in optimizer.param_groups]

    def _check_data(self, added: Sequence[str]) -> None:
        """Check that all data to read exists and is undamaged."""
        checkpoint, targets, whole = self._checkpoint, dict(self._targets), [*added]
        for name, entries in self._moments.items():
            for key, entry in entries.items():
                if self._is_like(name, key, entry):
                    targets[entry] = self._target(name, torch.empty(self._params[name].shape, device="meta"))
                else:
                    whole.append(entry)
        items = [*checkpoint.object_items(whole)]
        for name, target in targets.items():
            reads = checkpoint.items(name, target)
            found = sum(prod(item.lengths) for item in reads)
            needed = target.stop - target.start if isinstance(target, ShardTensor) else target.numel()
            if found != needed:
                raise CheckpointError(f"{checkpoint.folder} has {found} of {needed} elements of {name!r}")
            items += reads
        checkpoint.check(items)

    def _is_like(self, name: str, key: tuple[str | int, ...], entry: str) -> bool:
        """Return whether a rank reads only its part of an entry, which has the shape of the parameter."""
        return (
            _name(key) not in self._numbers
            and name not in self._wholes
            and self._checkpoint.size_of(entry) == self._like(name).shape
        )

    def _like(self, name: str) -> Tensor:
        """Return a tensor of the shape of a whole parameter, which may be outside of the model."""
        found: Tensor = self._targets.get(self._prefix + name, self._params[name])
        return found

    def _target(self, name: str, local: Tensor) -> Tensor:
        """Return a tensor of the parameter's shape. This rank's part of the tensor is `local`."""
        mine = self._like(name)
        return ShardTensor(local, mine.shape, mine.start) if isinstance(mine, ShardTensor) else local

    def load_weights(self, _: ShardLite) -> None:
        """Read weights and buffers."""
        # A tied tensor is read once, although it has several names.
        for name, target in {id(each): (name, each) for name, each in self._targets.items()}.values():
            self._checkpoint.read(name, target)
            if isinstance(target, ShardTensor):
                target.commit()

    def states(self, _: ShardLite) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """Read the state of the optimizer, parameter by parameter."""
        for name, entries in self._moments.items():
            state: dict[str, Any] = {}
            for key, entry in entries.items():
                set_element(state, key, self._value(name, key, entry))
            yield self._params[name], state

    def _value(self, name: str, key: tuple[str | int, ...], entry: str) -> Any:
        """Read one entry of the state of a parameter."""
        if not self._is_like(name, key, entry):
            return self._checkpoint.object(entry)
        param, dtype = self._params[name], self._checkpoint.entries[entry].properties.dtype
        local = torch.empty(param.shape, dtype=dtype, device=param.device)
        self._checkpoint.read(entry, self._target(name, local))
        return local


def _name(key: tuple[str | int, ...]) -> str:
    """Return the name of a value in a state: keys and indices, joined by dots."""
    return ".".join(map(str, key))
