"""A model with split weights, and a twin whose weights are cut to 24 bits."""

from collections.abc import Callable
from typing import Any

import torch
from shardlite_kernels import split
from shardlite_kernels.split import join
from torch import Tensor, nn

from shardlite import AdamW, Precision, ShardLite
from tests.support.models.losses import on_tokens
from tests.support.models.small import LanguageModel
from tests.support.twins.plain import PaddedAdamW, Twin
from tests.support.twins.sharded import Pair, Turn, _seeded, same_states

SPLIT = Precision(compute=torch.bfloat16, master="split24")


def parts(whole: Tensor) -> tuple[Tensor, Tensor]:
    """Return both parts of fp32 numbers, in their shape."""
    flat = whole.detach().reshape(-1).contiguous()
    high, low = torch.empty_like(flat, dtype=torch.bfloat16), torch.empty_like(flat, dtype=torch.int8)
    split(high, low, flat)
    return high.view(whole.shape), low.view(whole.shape)


def cut(whole: Tensor) -> Tensor:
    """Round fp32 numbers to 24 bits."""
    high, low = (part.reshape(-1) for part in parts(whole))
    out = torch.empty_like(high, dtype=torch.float32)
    join(out, high, low)
    return out.view(whole.shape)


class CutAdamW(PaddedAdamW):
    """PyTorch's fused AdamW, whose weights are cut to 24 bits after each step."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        super().step(closure)
        for param in (each for group in self.param_groups for each in group["params"] if each.grad is not None):
            param.copy_(cut(param))


class CutTwin(Twin):
    """A twin whose masters have 24 bits, and which computes with their upper part."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        with torch.no_grad():
            for master in self.masters.values():
                if master.requires_grad:
                    master.copy_(cut(master))

    @torch.no_grad()
    def refresh(self) -> None:
        for name, param in self._own.items():
            param.copy_(parts(self.masters[name])[0] if param.requires_grad else self.masters[name])


class SplitPair(Pair):
    """A model with split weights, and its twin."""

    make_twin = CutTwin

    def __init__(self, make: Callable[[], nn.Module], group: Any, **options: Any) -> None:
        super().__init__(make, group, precision=SPLIT, together=False, **options)
        hyper = {"lr": 0.02, "weight_decay": 0.1}
        self.optimizer = AdamW(self.model.parameters(), **hyper)
        self._theirs = CutAdamW(self.twin.masters.values(), **hyper)

    def _compare_states(self) -> None:
        same_states(self._what("full_state_dict()"), self.model.full_state_dict(), self.twin.state_dict())


def trained(
    group: Any, *, steps: int = 3, same_batch: bool = False, options: dict[str, Any] | None = None, **model: Any
) -> tuple[ShardLite, AdamW]:
    """Train a model for some steps."""
    sharded = ShardLite(_seeded(LanguageModel), group=group, **{"precision": SPLIT, **model})
    optimizer = AdamW(sharded.parameters(), lr=0.01, weight_decay=0.1, **(options or {}))
    for step in range(steps):
        on_tokens(sharded, Turn(step, 0 if same_batch else torch.distributed.get_rank(), 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return sharded, optimizer
