"""States of whole parameters are saved and loaded: at other numbers of ranks and stages, and by plain runs."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from shardlite import CheckpointError, LayoutError, ShardLite, WholeParameters, load, save
from shardlite.checkpoint.contents import Run
from shardlite.checkpoint.in_memory.snapshot import SavedSnapshot, Snapshot, SnapshotMemory
from shardlite.checkpoint.loading import _restore
from shardlite.checkpoint.peers import Peers
from tests.support.models.losses import on_rows
from tests.support.models.small import MLP
from tests.support.twins.sharded import Turn, same_states, some_stages, take_step
from tests.support.twins.whole import REST, Norms, muon_and_adamw, sharded_muon

KINDS = ("norms", "adafactor", "muon")
FULL = StateDictOptions(full_state_dict=True)
STEPS = 3


def net() -> nn.Module:
    """Return a model without biases of odd lengths, which AdamW of PyTorch steps as AdamW of shards does."""
    torch.manual_seed(0)
    return MLP([7, 32, 64, 32])


def optimizer_of(kind: str, params: Any, *, plain: bool = False) -> Any:
    if kind == "muon":
        return muon_and_adamw(params) if plain else sharded_muon(params)
    made, options = (Norms, {"lr": 0.02}) if kind == "norms" else (optim.Adafactor, {"lr": 0.02})
    return made(params, **options) if plain else WholeParameters(params, made, **options)


def train(model: Any, optimizer: Any, steps: Sequence[int]) -> None:
    """Train on a batch that all ranks share, so that the mean of two gradients has the bits of one."""
    for step in steps:
        take_step(optimizer, on_rows(model, Turn(step, 0, 0)))


def wrapped(kind: str, group: Any, **options: Any) -> tuple[ShardLite, Any]:
    model = ShardLite(net(), group=group, **options)
    return model, optimizer_of(kind, model.parameters())


def plain(kind: str, steps: int = 0) -> tuple[nn.Module, Any]:
    model = net()
    optimizer = optimizer_of(kind, model.parameters(), plain=True)
    train(model, optimizer, range(steps))
    return model, optimizer


def follows(kind: str, model: ShardLite, optimizer: Any) -> None:
    """Train on, and compare with a plain run that was never interrupted."""
    train(model, optimizer, range(STEPS, 2 * STEPS))
    same_states(kind, model.full_state_dict(), plain(kind, 2 * STEPS)[0].state_dict())


def folder_of(ranks: Any, path: Path) -> Path:
    """Return the first rank's folder on every rank."""
    found = [path]
    dist.broadcast_object_list(found, dist.get_global_rank(ranks, 0), group=ranks)
    return found[0]


@pytest.mark.ranks(4)
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_is_loaded_at_another_number_of_ranks_and_stage(group: Any, kind: str, tmp_path: Path) -> None:
    path = folder_of(group, tmp_path)
    pair, alone = [0, 1], [[rank] for rank in range(4)]
    two = dist.new_group(pair)
    ones = [dist.new_group(each) for each in alone]
    if dist.get_rank() in pair:
        model, optimizer = wrapped(kind, two)
        train(model, optimizer, range(STEPS))
        save(path, model, optimizer, step=STEPS)
    dist.barrier(group)
    for ranks, stage in ((group, 3), (two, 0), (two, 2), (ones[dist.get_rank()], 3)):
        if dist.get_rank(ranks) >= 0:
            model, optimizer = wrapped(kind, ranks, stage=stage)
            load(path, model, optimizer)
            follows(kind, model, optimizer)
        dist.barrier(group)


@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_run_goes_on_from_a_checkpoint_and_back(group: Any, kind: str, tmp_path: Path) -> None:
    path = folder_of(group, tmp_path)
    model, optimizer = wrapped(kind, group)
    train(model, optimizer, range(STEPS))
    saved = save(path / "ours", model, optimizer)
    twin, theirs = plain(kind)
    optimizers = theirs.optimizers if kind == "muon" else [theirs]
    state = {"model": get_model_state_dict(twin), "optimizer": get_optimizer_state_dict(twin, optimizers)}
    dcp.load(state, checkpoint_id=saved)
    set_model_state_dict(twin, state["model"])
    set_optimizer_state_dict(twin, optimizers, state["optimizer"])
    if kind == "muon":
        optimizers[1].param_groups[0]["fused"] = True  # a checkpoint leaves the choice of kernels open
    train(twin, theirs, range(STEPS, 2 * STEPS))
    same_states("plain", twin.state_dict(), plain(kind, 2 * STEPS)[0].state_dict())

    twin, theirs = plain(kind, STEPS)
    optimizers = theirs.optimizers if kind == "muon" else [theirs]
    state = {"model": get_model_state_dict(twin), "optimizer": get_optimizer_state_dict(twin, optimizers)}
    dcp.save(state, checkpoint_id=path / "plain")
    model, optimizer = wrapped(kind, group)
    load(path / "plain", model, optimizer)
    follows(kind, model, optimizer)


@pytest.mark.parametrize("kind", KINDS)
def test_functions_of_torch_distributed_checkpoint(group: Any, kind: str, tmp_path: Path) -> None:
    path = folder_of(group, tmp_path)
    for stage in some_stages(3):
        model, optimizer = wrapped(kind, group, stage=stage)
        train(model, optimizer, range(STEPS))
        dcp.save({"o": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=path / f"{stage}")
        whole, weights = get_optimizer_state_dict(model, optimizer, options=FULL), model.full_state_dict()
        first = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)

        model, optimizer = wrapped(kind, group, stage=stage)
        model.load_full_state_dict(weights)
        state = {"o": get_optimizer_state_dict(model, optimizer)}
        dcp.load(state, checkpoint_id=path / f"{stage}")
        set_optimizer_state_dict(model, optimizer, state["o"])
        follows(kind, model, optimizer)
        for given, options in ((whole, FULL), (whole if dist.get_rank() == 0 else {}, first)):
            model, optimizer = wrapped(kind, group, stage=stage)
            model.load_full_state_dict(weights)
            set_optimizer_state_dict(model, optimizer, copy.deepcopy(given), options=options)
            follows(kind, model, optimizer)


@pytest.mark.parametrize("kind", KINDS)
def test_copies_in_memory_and_a_state_dict_of_each_rank(group: Any, kind: str) -> None:
    model, optimizer = wrapped(kind, group)
    train(model, optimizer, range(STEPS))
    memory, snapshot = SnapshotMemory.allocate(), Snapshot(Run(model, optimizer, None), group.rank())
    snapshot.copy_into(memory.overwrite_older(snapshot.nbytes))
    memory.mark_complete(snapshot.header(STEPS, group.size()))
    own, weights = copy.deepcopy(optimizer.state_dict()), model.full_state_dict()

    model, optimizer = wrapped(kind, group)
    saved = SavedSnapshot(memory, STEPS, Run(model, optimizer, None))
    _restore(lambda: saved, "memory", Run(model, optimizer, None), Peers(model))
    follows(kind, model, optimizer)
    model, optimizer = wrapped(kind, group)
    model.load_full_state_dict(weights)
    optimizer.load_state_dict(own)
    follows(kind, model, optimizer)


def test_each_owner_takes_its_part_of_a_plain_state(group: Any) -> None:
    twin, theirs = plain("norms", STEPS)
    model, optimizer = wrapped("norms", group)
    model.load_full_state_dict(twin.state_dict())
    optimizer.load_state_dict(theirs.state_dict())
    follows("norms", model, optimizer)


def test_a_state_of_other_owners_is_refused(group: Any) -> None:
    model, optimizer = wrapped("norms", group)
    train(model, optimizer, range(1))
    other = WholeParameters(model.parameters(), optim.Muon, whole=lambda _, shape: len(shape) == 2, elementwise=REST)
    with pytest.raises((LayoutError, ValueError)):
        other.load_state_dict(optimizer.state_dict())
    third = WholeParameters(reversed(list(model.parameters())), Norms)
    with pytest.raises(LayoutError):
        third.load_state_dict(optimizer.state_dict())


def test_a_checkpoint_of_another_class_is_refused(group: Any, tmp_path: Path) -> None:
    path = folder_of(group, tmp_path)
    model, optimizer = wrapped("norms", group)
    train(model, optimizer, range(1))
    save(path, model, optimizer)
    before = model.full_state_dict()
    other = WholeParameters(model.parameters(), optim.Adafactor)
    with pytest.raises(CheckpointError, match="different optimizer: it lacks options"):
        load(path, model, other)
    same_states("nothing was changed", model.full_state_dict(), before)
