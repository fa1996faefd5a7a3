"""Memory and gathers of each stage, and supported forwards and backwards.

That all stages give the same bits is shown case by case in `test_parity.py`.

Legend: `W` ranks, `P` parameters of the model, here `W*S` for all `W`.
"""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardlite import LayoutError, Precision, ShardLite
from tests.support.models.losses import on_tokens
from tests.support.models.small import MLP, LanguageModel, Residual
from tests.support.twins.sharded import WIDE, Loss, Pair, Turn, same_bits

WORLDS = (2, WIDE)
STAGES = (0, 1, 2, 3)
BF16 = Precision(compute=torch.bfloat16)


def on_rows(width: int) -> Loss:
    """Make the output small, for random rows."""
    return lambda model, turn: model(torch.randn(3, width, generator=turn.generator())).float().square().mean()


# ---- bytes ----------------------------------------------------------------------------------------------------------


P = 4 * 8192


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.ranks(3)
def test_padding_is_all_that_odd_shapes_cost(group: Any, stage: int) -> None:
    """The same of a model of odd shapes. Units and parameters are padded by up to 32 elements."""
    world_size = torch.distributed.get_world_size(group)
    module = LanguageModel()
    numels = [param.numel() for param in module.parameters()]
    model = ShardLite(module, stage=stage, group=group)
    on_tokens(model, Turn(0, 0, 0)).backward()
    found = model.ledger.current()
    padding = 32 * len(numels) + 32 * world_size * len(model.unit_names)
    for what, first in (("parameters", 3), ("gradients", 2)):
        parts = world_size if stage >= first else 1
        arena = 1024 if what == "parameters" else 0
        assert sum(numels) // parts <= found[what] / 4 <= (sum(numels) + padding) / parts + arena, what


# ---- bits -----------------------------------------------------------------------------------------------------------


@pytest.mark.stages(0, 3)
@pytest.mark.ranks(4)
def test_replicas_add_up_after_the_ranks_that_share_a_model(group: Any, stage: int) -> None:
    """Two replicas of two ranks, with clipping, accumulation, and a unit that is frozen meanwhile."""
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("replicate", "shard"))
    pair = Pair(LanguageModel, mesh, replicas=2, stage=stage)
    for step in range(4):
        for module in (pair.model.module, pair.twin.module):
            for name, param in module.named_parameters():
                param.requires_grad_(step % 2 == 0 or not ("blocks.1" in name or "qkv" in name))
        pair.step(on_tokens, ("local", "step") if step > 1 else ("sharded", "step"), 0.01 if step else None)


# ---- weights between steps ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "precision"), [(0, Precision()), (1, Precision()), (2, BF16), (3, Precision())], ids=str
)
def test_weights_cannot_be_read_between_a_step_and_the_next_forward(group, stage, precision):
    """After a step a rank has new weights in its own shard only, and a mixture must not be read."""
    pair = Pair(lambda: MLP([12, 20, 7]), group, stage=stage, units=nn.Linear, precision=precision)
    own = dict(pair.model.module.named_parameters())
    for _ in range(2):
        pair.step(on_rows(12))
        for name, param in own.items():
            if stage:
                with pytest.raises(LayoutError, match=f"parameter {name!r} is sharded"):
                    param.isnan()
            else:
                assert not param.isnan().any(), f"{name} after a step"
            assert param.shape == pair.twin.masters[name].shape
        with torch.no_grad():
            pair.model(torch.randn(2, 12))
        for name, param in own.items():
            if stage < 3:
                same_bits(f"{name} after a forward", param.detach(), pair.twin.masters[name].detach().to(param.dtype))


# ---- what a forward may do ------------------------------------------------------------------------------------------


class Skipping(nn.Module):
    """Blocks of which a forward leaves some out. [B, 6] -> [B, 6]."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Residual(6, 9) for _ in range(4)])

    def forward(self, x: Tensor, skipped: tuple[int, ...]) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = x if i in skipped else block(x)
        return x


@pytest.mark.ranks(*WORLDS)
@pytest.mark.parametrize("stage", [1, 2])
def test_ranks_may_skip_units(group: Any, stage: int) -> None:
    """Ranks skip other blocks at each step, and all skip the last one at the first."""

    def loss(model: Callable[..., Any], turn: Turn) -> Tensor:
        skipped = ((turn.step + 2 * turn.rank) % 4, 3 if turn.step == 0 else -1)
        return model(torch.randn(3, 6, generator=turn.generator()), skipped=skipped).square().mean()

    pair = Pair(Skipping, group, stage=stage, together=False)
    for step in range(4):
        pair.step(loss, ("local", "step") if step % 2 else ("step",), clip=0.01)
        if pair.rank == 0 and step == 1:
            pair.model(torch.randn(1, 6), (0, 1, 2))  # gathers all the same, and the others take part later


class Functional(nn.Module):
    """A model that computes derivatives of its own layers by `torch.func`. [B, 6] -> [B]."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = MLP([6, 9, 5])
        self.outer = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        jacobians = torch.func.vmap(torch.func.jacrev(self.inner))(x)
        slopes = torch.func.vmap(torch.func.grad(lambda row: self.outer(self.inner(row)).sum()))(x)
        tangents = torch.func.jvp(self.inner, (x,), (torch.ones_like(x),))[1]
        return self.outer(tangents).flatten() + jacobians.square().sum(dim=(1, 2)) + slopes.sum(dim=1)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_forward_may_use_function_transforms(group: Any, stage: int) -> None:
    pair = Pair(Functional, group, stage=stage, units=nn.Linear)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`torch.jit")  # PyTorch's own, where it makes tables for `jvp`
        for _ in range(3):
            pair.step(on_rows(6), clip=0.01)
