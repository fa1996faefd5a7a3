"""`AdamW(max_norm=...)` makes the steps of clipping by hand, to the bit; gradients stay as they are."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from shardlite import AdamW, LayoutError, ShardLite
from tests.support.twins.sharded import WIDE, same_bits, same_states, some_stages

LIMIT = 0.5


def make() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(13, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 5))


def loss(model: nn.Module, seed: int) -> Tensor:
    """Large at odd seeds, so that every other step is clipped."""
    x = torch.randn(8, 13, generator=torch.Generator().manual_seed(seed))
    return (model(x) * (4 if seed % 2 else 0.1)).square().mean()


def params_of(model: nn.Module, part: str) -> list[nn.Parameter]:
    return [param for name, param in model.named_parameters() if part in name]


def trained(group: Any, stage: int, *, by_hand: bool, part: str = "") -> tuple[dict[str, Tensor], list[Tensor]]:
    """Return the weights after four steps of the parameters with `part` in their names, and the norms."""
    model, norms = ShardLite(make(), stage=stage, group=group), []
    params = params_of(model, part)
    optimizer = AdamW(params, lr=1e-2, max_norm=None if by_hand else LIMIT)
    for step in range(4):
        loss(model, 10 * dist.get_rank(group) + step).backward()
        if by_hand:
            norms.append(torch.nn.utils.clip_grad_norm_(params, LIMIT))
        optimizer.step()
        norms += [] if by_hand else [optimizer.grad_norm]
        model.zero_grad()
    return model.full_state_dict(), norms


@pytest.mark.ranks(1, 2, WIDE)
@pytest.mark.parametrize("part", ["", "2."])
def test_steps_are_those_of_clipping_by_hand(group: Any, part: str) -> None:
    """Of all parameters, and of one layer by the norm of that layer."""
    for stage in some_stages(1, 3):
        mine, norms = trained(group, stage, by_hand=False, part=part)
        theirs, expected = trained(group, stage, by_hand=True, part=part)
        assert torch.equal(torch.stack(norms), torch.stack(expected))
        assert min(norms) < LIMIT < max(norms)
        same_states("state", mine, theirs)


def test_with_a_gradient_scaler(group: Any) -> None:
    """The scale is a power of two, so it changes no bit of gradients or of their norm."""
    weights = []
    for by_hand in (True, False):
        model = ShardLite(make(), group=group)
        optimizer = AdamW(model.parameters(), lr=1e-2, max_norm=None if by_hand else LIMIT)
        scaler = GradScaler("cpu", init_scale=64.0)
        for step in range(4):
            scaler.scale(loss(model, 10 * dist.get_rank(group) + step)).backward()
            if by_hand:
                scaler.unscale_(optimizer)
                model.clip_grad_norm_(LIMIT)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        weights.append(model.full_state_dict())
    same_states("state", weights[1], weights[0])


def test_a_norm_of_different_things_is_refused(group: Any) -> None:
    model, other = ShardLite(make(), group=group), nn.Linear(3, 3)
    optimizer = AdamW([*model.parameters(), *other.parameters()], max_norm=LIMIT)
    loss(model, 1).backward()
    with pytest.raises(LayoutError, match="clips by the norm of one wrapped model, but holds parameters outside"):
        optimizer.step()


def test_plain_parameters():
    ours, theirs = make(), make()
    mine, torchs = AdamW(ours.parameters(), lr=1e-2, max_norm=LIMIT), AdamW(theirs.parameters(), lr=1e-2)
    for step in range(4):
        for model, optimizer in ((ours, mine), (theirs, torchs)):
            optimizer.zero_grad()
            loss(model, step).backward()
        before = [param.grad.clone() for param in ours.parameters()]
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), LIMIT)
        mine.step()
        torchs.step()
        assert torch.equal(mine.grad_norm, norm)
        for param, grad in zip(ours.parameters(), before, strict=True):
            same_bits("a gradient", param.grad, grad)
    for param, twin in zip(ours.parameters(), theirs.parameters(), strict=True):
        same_bits("a parameter", param.detach(), twin.detach())


@pytest.mark.parametrize("options", [{"max_norm": 0.0}, {"max_norm": 1.0, "in_backward": True}])
def test_norms_that_cannot_be(options):
    with pytest.raises(ValueError, match="max_norm must be above 0 and cannot be combined with in_backward"):
        AdamW(make().parameters(), **options)
