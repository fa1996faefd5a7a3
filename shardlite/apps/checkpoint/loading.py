"""`load`: each rank reads its part of every tensor, whatever parts they were written in.

    find the newest    agree    plan, compare shapes, check sums    agree    read    agree
                                (nothing has changed so far)

The newest is a checkpoint or copies in memory (`neighbour.py`), which each rank takes up as they are. Of checkpoints
reads go from file to shard, one tensor at a time. A weight or moment that is kept in another form is decoded in full
precision first, and encoded when all of its elements are there.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardlite.apps.checkpoint import files, neighbour
from shardlite.apps.checkpoint.contents import check_keys, names_of, restore, restore_generators
from shardlite.apps.checkpoint.kept import Found
from shardlite.apps.checkpoint.reading import Checkpoint
from shardlite.apps.checkpoint.safetensors import SafetensorsFolder, is_safetensors
from shardlite.apps.checkpoint.saving import Talk, wait_for_save
from shardlite.engine import NUMBERS
from shardlite.errors import CheckpointError, lacking, some_of
from shardlite.model import ShardLite
from shardlite.optim import AdamW, check_loaded
from shardlite.params import ShardTensor

log = logging.getLogger("shardlite")


class Restored(dict[str, Any]):
    """What `load` returns: what `save` was given as `extra`, and where it was found."""

    step: int | None
    """Of the checkpoint or the copies; `None` if it was written by something else than ShardLite."""

    source: str
    """The folder of the checkpoint, "copies in memory", or nothing."""

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
    """Load the newest checkpoint of a run, or one checkpoint, into a wrapped model and its optimizer.

    If `save_in_memory` has made copies that are as new as the newest checkpoint and whole on all ranks, these are
    taken. A line of the log (logger `shardlite`) says why if they cannot be.

    The number of ranks, stage, units and formats may be others than those that it was saved with. With the same ones
    the run goes on with the same bits. A checkpoint that `torch.distributed.checkpoint` has written (of an FSDP2 or an
    unsharded program) is loaded, too, and so are the weights in a folder of safetensors files, as Hugging Face has
    them. No code is executed by loading. To be called by every rank.

    Args:
        path: the folder of a run, as `save` was given it, or of one checkpoint.
        model: a wrapped model with the names and shapes of the saved one.
        optimizer: its optimizer; without one, a saved state is left alone.
        extra: objects with `load_state_dict()`, under the keys under which `save` was given them: their states are
            loaded.
        missing_ok: whether there may be nothing to load, at the begin of a run; then nothing changes. If the newest
            checkpoint lacks a file, the newest whole one is loaded, with a warning that names those passed over.

    Returns:
        What `save` was given as `extra`, with the objects of this call's `extra` in their places. Each rank gets its
        own, and its random number generators are set, if there are as many ranks as then; otherwise all get rank 0's,
        and generators stay as they are. Its attributes `step` and `source` say what was loaded; if there was nothing
        to load, it is empty, and `step` is 0.

    Raises:
        CheckpointError: on every rank, if there is no checkpoint, or it is damaged, or of another model on any rank;
            nothing was changed then.
        CommError: a rank did not come to the call.
    """
    wait_for_save(model)
    talk = Talk(model)
    _, told = talk.agree(lambda: _find(Path(path), missing_ok), "load", tell=lambda found: found)
    folder, step, passed = told[0]
    if passed and talk.rank == 0:
        log.warning("load: damaged checkpoints in %s are passed over: %s", path, passed)
    memory = neighbour.find(path, model, talk)
    if memory is not None and memory.step >= step:
        try:
            return _take_up(memory, model, optimizer, extra)
        except CheckpointError as error:
            memory.leave(str(error))
    if folder is not None:
        return _load(Path(folder), model, optimizer, extra, talk)
    if not missing_ok:
        raise CheckpointError(f"there is no checkpoint in {path}")
    return Restored({}, 0, "")


def _find(path: Path, missing_ok: bool) -> tuple[str | None, int, str]:
    """Return the folder to load, the step of a run's newest checkpoint (else -1), and which ones are passed over.

    Raises:
        CheckpointError: the newest one lacks a file, and with `missing_ok` so do all others; or no folder can be there.
    """
    folders = files.folders_in(path)
    if (path / files.METADATA).is_file() or (path / files.MANIFEST).is_file() or (not folders and is_safetensors(path)):
        return str(files.find(path) if not is_safetensors(path) else path), -1, ""
    if not folders:
        files.check_folder(path)  # with `missing_ok`, too: a run whose disk is not mounted must not begin anew
        return None, -1, ""
    newest, whole = max(folders), files.checkpoints_in(path)
    if newest in whole:
        return str(folders[newest]), newest, ""
    if not (missing_ok and whole):
        files.check_whole(folders[newest])
    passed = [folder for step, folder in folders.items() if step > max(whole)]
    reasons = ", ".join(f"{folder.name} lacks {files.missing_file(folder)}" for folder in passed)
    return str(whole[max(whole)]), max(whole), reasons


@contextmanager
def _changing(model: ShardLite) -> Iterator[None]:
    """Let weights and moments be overwritten inside."""
    model._bridge.in_backward.announce_change()
    model._bridge.gatherer.settle()
    try:
        yield
    finally:
        model._bridge.mark_changed()


def _take_up(
    memory: neighbour.Memory, model: ShardLite, optimizer: Optimizer | None, extra: Mapping[str, Any] | None
) -> Restored:
    """Take up copies in memory. Collective.

    Raises:
        CheckpointError: on every rank, if they do not fit on one of them; nothing was changed then.
    """
    talk = memory.talk
    copies = memory.fetched()

    def prepare() -> Found:
        found = copies.found(memory.step)
        found.check(model, optimizer, extra)
        return found

    found, _ = talk.agree(prepare, "load", tell=lambda _: None)
    with _changing(model):
        found.load_weights(model)
        if optimizer is not None:
            _load_groups(optimizer, found.groups)
            found.load_state(model, optimizer)
    _finish_loops(model, found.loops)
    neighbour.continue_with(model, copies)
    return _finished(found.extra, found.generators, extra, talk, memory.step, neighbour.SOURCE)


def _finished(
    saved: Any, generators: Mapping[str, Any] | None, extra: Mapping[str, Any] | None, talk: Talk, *where: Any
) -> Restored:
    """Restore `extra`, and the generators if there are states of them."""
    restored, _ = talk.agree(lambda: restore(extra or {}, saved), "load: extra", tell=lambda _: None)
    if generators is not None:
        restore_generators(generators)
    if talk.rank == 0:
        log.info("load: step %s, from %s", *where)
    return Restored(restored, *where)


def _load(
    folder: Path, model: ShardLite, optimizer: Optimizer | None, extra: Mapping[str, Any] | None, talk: Talk
) -> Restored:
    """Load one checkpoint. Collective."""

    def prepare() -> tuple[_Plan, Any, Any]:
        source = SafetensorsFolder(folder) if is_safetensors(folder) else Checkpoint(folder)
        plan = _Plan(source, model, optimizer, talk)
        plan.check()
        added = plan.added("extra") or {}
        check_keys(extra or {}, added, folder)
        return plan, added, plan.added("generators")

    (plan, added, generators), has = talk.agree(prepare, "load", tell=lambda _: optimizer is not None)
    if len(set(has)) > 1:
        raise CheckpointError("load: some ranks were given an optimizer, and others none")
    with _changing(model):
        talk.agree(plan.load_weights, "load", tell=lambda _: None)
        plan.load_groups()
        talk.agree(plan.load_moments, "load", tell=lambda _: None)
    _finish_loops(model, plan.loops)
    return _finished(added, generators, extra, talk, plan.step, str(folder))


def _finish_loops(model: ShardLite, loops: int) -> None:
    """Note how many loops over parts are over: random numbers depend on it."""
    if model._parts is not None:
        model._parts.finished = loops


def _load_groups(optimizer: Optimizer, saved: Sequence[Mapping[str, Any]]) -> None:
    """Replace the options of an optimizer, and drop its state. Collective."""
    own = Optimizer.state_dict(optimizer)["param_groups"]  # that of `AdamW` would judge the state that goes
    groups = [{**mine, **each, "params": mine["params"]} for mine, each in zip(own, saved, strict=True)]
    optimizer.load_state_dict({"state": {}, "param_groups": groups})


class _Plan:
    """What is read into what on this rank. Making it changes nothing."""

    def __init__(
        self, checkpoint: Checkpoint | SafetensorsFolder, model: ShardLite, optimizer: Optimizer | None, talk: Talk
    ) -> None:
        self._checkpoint: Any = checkpoint
        self._optimizer = optimizer
        self._params: dict[str, Tensor] = dict(model.named_parameters())
        self._makers = model._bridge.shards.shard_tensors(model._context)
        ours = model.state_dict()
        self._prefix = self._find_prefix(ours)
        named = {f"{self._prefix}{name}": value for name, value in ours.items()}
        found = {id(value) for name, value in named.items() if name in checkpoint.entries}
        # Of tied weights others save one name only.
        self._targets = {n: value for n, value in named.items() if n in checkpoint.entries or id(value) not in found}
        self._compare()
        self._moments: dict[str, dict[str, str]] = {}  # names in the checkpoint by parameter and key
        self._groups: list[dict[str, Any]] = []
        if optimizer is not None:
            self._find_state(names_of(model, optimizer))
        manifest = checkpoint.manifest
        self.loops: int = (manifest or {}).get(files.LOOPS, 0)
        self.step: int | None = manifest["step"] if manifest is not None else None
        same = manifest is not None and manifest["ranks"] == talk.size
        added = {kind: f"ranks.{talk.rank if same else 0}.{kind}" for kind in ("extra", "generators")[: 1 + same]}
        self._added = {kind: name for kind, name in added.items() if name in checkpoint.entries}

    def _find_prefix(self, ours: Mapping[str, Tensor]) -> str:
        """Return what precedes the model's names in the checkpoint: `model.` in ours, anything in others'."""
        entries, first = self._checkpoint.entries, next(iter(ours))
        tensors = {id(value) for value in ours.values()}

        def fits_with(prefix: str) -> bool:
            return {id(value) for name, value in ours.items() if f"{prefix}{name}" in entries} == tensors

        found = {entry.removesuffix(first) for entry in entries if entry.endswith(first)}
        fits = ["model."] if self._checkpoint.manifest is not None else sorted(filter(fits_with, found))
        if len(fits) > 1 and "model." not in fits:
            raise CheckpointError(
                f"{self._checkpoint.folder} has several models with these names, under {', '.join(fits)}: load the "
                "right one by torch.distributed.checkpoint, into model.state_dict()"
            )
        return "model." if not fits or "model." in fits else fits[0]

    def _compare(self) -> None:
        """Raise unless the model has the names and shapes of the checkpoint."""
        folder, entries = self._checkpoint.folder, self._checkpoint.entries
        missing = self._targets.keys() - entries.keys()
        unknown = {name for name in entries if name.startswith("model.")} - self._targets.keys()
        if missing or (unknown and self._prefix == "model."):
            raise CheckpointError(f"{folder} is of another model: it {lacking(missing, unknown)}")
        for name, target in self._targets.items():
            size = self._checkpoint.size_of(name)
            if size != target.shape:
                shape = "is no tensor" if size is None else f"has shape {list(size)}"
                raise CheckpointError(f"{folder}: {name!r} {shape}, the model's has {list(target.shape)}")

    def _find_state(self, names: Sequence[str]) -> None:
        """Find the state of the optimizer by the keys on the way to each entry: `..., state, name, key`."""
        known, groups = set(names), dict[int, dict[str, str]]()
        for entry in self._checkpoint.entries:
            path = self._checkpoint.path_of(entry)
            if len(path) >= 3 and path[-3] == "state" and path[-2] in known:
                self._moments.setdefault(str(path[-2]), {})[str(path[-1])] = entry
            elif len(path) >= 3 and path[-3] == "param_groups" and isinstance(path[-2], int):
                groups.setdefault(path[-2], {})[str(path[-1])] = entry
        if not self._moments and not groups:
            raise CheckpointError(f"{self._checkpoint.folder} has no state of an optimizer: call load without one")
        self._checkpoint.check(
            self._checkpoint.object_items(name for group in groups.values() for name in group.values())
        )
        self._groups = [
            {option: self._checkpoint.object(name) for option, name in groups[i].items()} for i in sorted(groups)
        ]
        self._compare_groups(names)

    def _compare_groups(self, names: Sequence[str]) -> None:
        """Raise unless the saved groups are those of this optimizer, or of one of its kind."""
        assert self._optimizer is not None
        kind, folder = type(self._optimizer).__name__, self._checkpoint.folder
        for saved, group in zip(self._groups, self._optimizer.param_groups, strict=False):
            absent = group.keys() - saved.keys() - {"params", "initial_lr", "max_update"}
            if absent:
                raise CheckpointError(f"{folder} is of another optimizer: {kind} has {some_of(absent)}, it has not")
        keys = {key for entries in self._moments.values() for key in entries}
        if isinstance(self._optimizer, AdamW):
            if keys - {"step", "exp_avg", "exp_avg_sq"}:
                raise CheckpointError(f"{folder} is of another optimizer than AdamW: it has {some_of(keys)}")
            try:
                check_loaded({"state": {}, "param_groups": self._groups})
            except ValueError as error:
                raise CheckpointError(f"{folder}: {error}") from error
        if any(isinstance(name, int) for group in self._groups for name in group.get("params", ())):
            raise CheckpointError(
                f"{folder} has an optimizer's parameters by number, as optimizer.state_dict() gives them: save "
                "get_optimizer_state_dict(model, optimizer) of torch.distributed.checkpoint.state_dict"
            )
        left = iter(names)
        ours = [[next(left) for _ in group["params"]] for group in self._optimizer.param_groups]
        if self._groups and [group.get("params") for group in self._groups] != ours:
            raise CheckpointError(
                f"{self._checkpoint.folder}: the optimizer's groups of parameters are others than the saved ones: "
                f"{[len(group.get('params', ())) for group in self._groups]} parameters in each there, "
                f"{[len(group) for group in ours]} here; group them alike, in the same order"
            )

    def check(self) -> None:
        """Raise unless all that will be read is there and undamaged."""
        checkpoint = self._checkpoint
        whole, items = [], []
        for name, target in self._all_targets():
            reads = checkpoint.items(name, target)
            found, needed = sum(prod(item.lengths) for item in reads), _local_numel(target)
            if found != needed:
                raise CheckpointError(f"{checkpoint.folder} has {found} of {needed} elements of {name!r}")
            items += reads
        for name, entries in self._moments.items():
            whole += [entry for key, entry in entries.items() if not self._is_like(name, key, entry)]
        checkpoint.check([*items, *checkpoint.object_items([*whole, *self._added.values()])])

    def _all_targets(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors to fill, moments without memory."""
        yield from self._targets.items()
        for name, entries in self._moments.items():
            for key, entry in entries.items():
                if self._is_like(name, key, entry):
                    yield entry, self._target(name, torch.empty(self._params[name].shape, device="meta"))

    def _is_like(self, name: str, key: str, entry: str) -> bool:
        """Return whether an entry of a state has one element for each of its parameter's."""
        return key not in NUMBERS and self._checkpoint.size_of(entry) == self._targets[self._prefix + name].shape

    def _target(self, name: str, local: Tensor) -> Tensor:
        """Return this rank's part of a tensor like a parameter, with the memory `local`."""
        make = self._makers.get(self._params[name])
        return make(local) if make is not None else local

    def load_weights(self) -> None:
        """Read weights and buffers."""
        done: set[int] = set()
        for name, target in self._targets.items():
            if id(target) not in done:  # tied weights have several names
                self._checkpoint.read(name, target)
                done.add(id(target))
            if isinstance(target, ShardTensor):
                target.commit()

    def load_groups(self) -> None:
        """Replace the options of the optimizer, and drop its state. Collective."""
        optimizer = self._optimizer
        if optimizer is None:
            return
        _load_groups(optimizer, self._groups or [{} for _ in optimizer.param_groups])

    def load_moments(self) -> None:
        """Read the state of the optimizer, parameter by parameter."""
        optimizer = self._optimizer
        if optimizer is None:
            return
        states = (
            (self._params[name], {key: self._state(name, key, entry) for key, entry in entries.items()})
            for name, entries in self._moments.items()
        )
        if isinstance(optimizer, AdamW):
            optimizer.load_entries(states)
            return
        by_param = {param: group for group in optimizer.param_groups for param in group["params"]}
        for param, state in states:
            if isinstance(step := state.get("step"), Tensor) and (
                by_param[param].get("fused") or by_param[param].get("capturable")
            ):
                state["step"] = step.to(param.device)  # as PyTorch keeps it
            optimizer.state[param] = state

    def _state(self, name: str, key: str, entry: str) -> Any:
        """Read one entry of the state of a parameter."""
        if not self._is_like(name, key, entry):
            return self._checkpoint.object(entry)
        param, dtype = self._params[name], self._checkpoint.entries[entry].properties.dtype
        local = torch.empty(param.shape, dtype=dtype, device=param.device)
        self._checkpoint.read(entry, self._target(name, local))
        return local

    def added(self, kind: str) -> Any:
        """Return what this rank (or rank 0) has added to the checkpoint, or `None`."""
        return self._checkpoint.object(self._added[kind]) if kind in self._added else None


def _local_numel(target: Tensor) -> int:
    return target.stop - target.start if isinstance(target, ShardTensor) else target.numel()
