"""Bodies that train over simulated symmetric memory and compare gradients, norms and weights with a twin."""

from pathlib import Path
from typing import Any

import torch.distributed as dist

from shardlite import Route, ShardLite
from tests.support.models.losses import MODELS
from tests.support.transports.played_symmetric import playing
from tests.support.twins.duos import Side
from tests.support.twins.sharded import Pair, Turn, _seeded, local_parts, same_states

STEPS = 3
SYMMETRIC = {"route": Route(transport="symmetric_memory")}


def train(group: Any, folder: Path, name: str, stage: int, **options: Any) -> None:
    """Train with clipping."""
    make, loss = MODELS[name]
    with playing(folder, group) as memories:
        pair = Pair(make, group, stage=stage, **SYMMETRIC, **options)
        assert "SymmetricMemoryTransport" in repr(pair.model)
        assert len(memories) == 2, "gathers have one, and reductions another"
        for _ in range(STEPS):
            pair.step(loss, clip=0.01)


def train_in_backward(group: Any, folder: Path, name: str, stage: int, **options: Any) -> None:
    """Train beside a pair whose steps are ordinary, over symmetric memory too."""
    make, loss = MODELS[name]
    with playing(folder, group):
        pair = Pair(make, group, stage=stage, **SYMMETRIC, **options)
        side = Side(ShardLite(_seeded(make), group=group, stage=stage, **SYMMETRIC), in_backward=True)
        for step in range(STEPS):
            pair.step(loss)
            side.backward(loss, [Turn(step, dist.get_rank(), 0)], ["step"])
            side.finish()
            shards = dict(side.model.named_parameters())
            same_states(f"step {step}", shards, local_parts(side.model, pair.twin.masters))
