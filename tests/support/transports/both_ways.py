"""Training over messages and over collectives, side by side."""

from typing import Any

import torch.distributed as dist

from shardlite import Route, ShardLite
from tests.support.models.losses import on_tokens
from tests.support.models.small import LanguageModel
from tests.support.twins.duos import Side
from tests.support.twins.sharded import Turn, _seeded, same_states


def train_over_both(
    group: Any, stage: int, algorithm: Any, in_backward: bool, optimizer: dict[str, Any], options: dict[str, Any]
) -> None:
    """Train over messages and over collectives: everything that is kept must be the same."""
    sides = []
    for transport in ("p2p", "collectives"):
        route: Any = Route(transport=transport, algorithm=algorithm)  # type: ignore[arg-type]
        model = ShardLite(_seeded(LanguageModel), group=group, stage=stage, route=route, **options)
        sides.append(Side(model, in_backward=in_backward, **optimizer))
    accumulate = "local" if in_backward else "sharded"
    for step, modes in enumerate((("step",), ("local", "step"), (accumulate, "step"))):
        for side in sides:
            side.backward(on_tokens, [Turn(step, dist.get_rank(), micro) for micro in range(len(modes))], modes)
            side.finish()
        ours, theirs = (side.state() for side in sides)
        assert ours.keys() == theirs.keys()
        same_states(f"step {step}", ours, theirs)
