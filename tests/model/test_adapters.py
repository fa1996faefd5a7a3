"""PEFT adapters are merged and unmerged inside `gathered()`, as on a plain model."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardlite import ShardLite
from tests.support.models.residual import WIDTH
from tests.support.twins.sharded import same_bits, same_states, take_step, with_twin

ROWS = 11


class Net(nn.Module):
    """One of each kind of layer that adapters of peft know."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.mix = nn.Conv1d(WIDTH, WIDTH, 1)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(self.table(x)))
        return self.last(torch.tanh(self.mix(x.mT).mT))


def adapted(*, dora: bool) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    layers = ["table", "first", "mix", "last"]
    return get_peft_model(Net(), LoraConfig(r=4, use_dora=dora, target_modules=layers, init_lora_weights=False))


def merges(group: Any, dora: bool, safe: bool, stage: int) -> None:
    """Body of a rank: train a step, merge, unmerge, train on; every output and the weights are those of a twin."""
    model, twin = with_twin(adapted(dora=dora), group, stage=stage)
    x = torch.arange(ROWS)[None]
    said = [merged_and_unmerged(each, x, safe) for each in (model, twin)]
    for name, got, expected in zip(("trained", "inside", "merged", "unmerged", "later"), *said, strict=True):
        same_bits(name, got, expected)
    full = model.full_state_dict()
    same_states("state", full, twin.state_dict())


def merged_and_unmerged(model: Any, x: Tensor, safe: bool) -> list[Tensor]:
    plain = model.module if isinstance(model, ShardLite) else model
    weights = model.gathered if isinstance(model, ShardLite) else nullcontext
    train(model, x)
    outputs = [model(x)]
    with weights():
        plain.merge_adapter(safe_merge=safe)
        outputs.append(plain(x))
    outputs.append(model(x))
    with weights():
        plain.unmerge_adapter()
    outputs.append(model(x))
    train(model, x)
    return [each.detach() for each in (*outputs, model(x))]


def train(model: nn.Module, x: Tensor) -> None:
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)
    take_step(optimizer, model(x).square().mean())


@pytest.mark.slow
@pytest.mark.stages(1, 3)
@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("dora", [False, True])
def test_adapters_of_peft_merge_and_unmerge(cluster, dora, safe, stage):
    pytest.importorskip("peft", reason="needs peft: `make test-all` installs it", exc_type=ImportError)
    cluster.check(merges, 2, dora, safe, stage)
