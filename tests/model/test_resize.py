"""Embeddings are resized before wrapping; a wrapped model raises an error whose remedy works."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardlite import AdamW, LayoutError, ShardLite, load, save
from tests.support.models.hf import FOREIGN, gpt2, llama, on_next_tokens
from tests.support.models.residual import WIDTH
from tests.support.twins.sharded import Turn, same_bits, same_states, take_step

ROWS, MORE = 53, 60


class Tied(nn.Module):
    """An embedding that is the head, too."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.tanh(self.mix(self.table(tokens))) @ self.table.weight.T

    def resize_token_embeddings(self, rows: int) -> None:
        former = self.table.weight.data
        self.table.weight.data = torch.cat([former, former.mean(0, keepdim=True).expand(rows - len(former), -1)])


class Replaced(Tied):
    def resize_token_embeddings(self, rows: int) -> None:
        former = self.table.weight.detach()
        more = former.mean(0, keepdim=True).expand(rows - len(former), -1)
        self.table.weight = nn.Parameter(torch.cat([former, more]))


def on_rows(model: Any, turn: Turn) -> Tensor:
    return model(torch.randint(ROWS, (2, 5), generator=turn.generator())).square().mean()


CASES = [
    pytest.param(Tied, on_rows, id="by data"),
    pytest.param(Replaced, on_rows, id="by replacement"),
    pytest.param(gpt2, on_next_tokens, marks=FOREIGN, id="gpt2"),
    pytest.param(llama, on_next_tokens, marks=FOREIGN, id="llama"),
]
Make = Callable[[], nn.Module]


def resized(make: Make, state: dict[str, Tensor] | None = None) -> nn.Module:
    """Return a plain model with a larger embedding; equal on all ranks."""
    torch.manual_seed(0)
    plain: Any = make()
    if state is not None:
        plain.load_state_dict(state)
    plain.resize_token_embeddings(MORE)
    return plain


def step(model: Any, loss_of: Any, turn: Turn) -> Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss = loss_of(model, turn)
    take_step(optimizer, loss)
    return loss.detach()


def resize_and_run(model: Any, loss_of: Any) -> None:
    model.resize_token_embeddings(MORE)
    loss_of(model, Turn(1, 0, 1))


INSTEAD = r"load `full_state_dict\(\)` into a new, unwrapped model, change its shapes"


@pytest.mark.stages(1, 3)
@pytest.mark.parametrize(("make", "loss_of"), CASES)
def test_a_wrapped_model_says_how_to_resize(group: Any, make: Make, loss_of: Any, stage: int) -> None:
    """Resize where it does not work, then do what the error says."""
    model = ShardLite(make(), group=group, stage=stage)
    turn = Turn(0, 0, 1)
    step(model, loss_of, turn)
    state = model.full_state_dict()
    with pytest.raises(LayoutError, match=INSTEAD):
        resize_and_run(model, loss_of)
    plain, twin = resized(make, state), resized(make, state)
    larger = ShardLite(plain, group=group, stage=stage)
    same_bits("loss", step(larger, loss_of, turn), step(twin, loss_of, turn))
    full = larger.full_state_dict()
    assert max(len(value) for value in full.values() if value.ndim > 1) >= MORE
    same_states("state", full, twin.state_dict())


@pytest.mark.stages(0, 3)
@pytest.mark.parametrize(("make", "loss_of"), CASES)
def test_a_model_that_was_resized_before_wrapping_loads(group: Any, make: Make, loss_of: Any, tmp_path, stage) -> None:
    """A model that was resized before wrapping loads what one like it has saved."""
    first, second, third = (ShardLite(resized(make), group=group, stage=stage) for _ in range(3))
    optimizer = AdamW(first.parameters(), lr=0.1)
    loss_of(first, Turn(0, 0, 1)).backward()
    optimizer.step()
    save(tmp_path, first, optimizer)
    load(tmp_path, second, AdamW(second.parameters(), lr=0.1))
    third.load_full_state_dict(first.full_state_dict())
    plain = resized(make)
    plain.load_state_dict(first.full_state_dict())
    for each in (second, third, plain):
        same_bits("loss", loss_of(each, Turn(1, 0, 1)).detach(), loss_of(first, Turn(1, 0, 1)).detach())
    smaller = ShardLite(make(), group=group, stage=stage)
    with pytest.raises(LayoutError, match=rf"has shape \[{MORE}, \d+\], the model's is \[{ROWS}, \d+\]"):
        smaller.load_full_state_dict(first.full_state_dict())
