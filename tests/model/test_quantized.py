"""The methods of bitsandbytes on the CPU: frozen quantized layers, and optimizers with blocks of 8-bit state.

Its own kernels need a GPU. Two of its habits matter to sharding: a layer keeps its codes for the backward as an
attribute of `ctx`, where no hook of autograd sees them, and an optimizer writes weights through raw pointers, where no
version counter does.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardlite import EscapedViewWarning, ShardLite
from tests.support.twins.sharded import compare, same_bits, same_states, take_step

WIDTH, RANK, BLOCKS = 16, 2, 4


# ---- frozen layers of codes -----------------------------------------------------------------------------------------


class Codes(nn.Parameter):
    """A byte for each weight. How to read them is an attribute, as of `Params4bit`."""

    scale: Tensor

    def __new__(cls, codes: Tensor, scale: Tensor) -> "Codes":
        made = torch.Tensor._make_subclass(cls, codes, False)
        made.scale = scale
        return made

    def __init__(self, *_: Tensor) -> None:
        pass

    def __deepcopy__(self, memo: dict[int, Any]) -> "Codes":
        memo[id(self)] = made = Codes(self.data.clone(), self.scale.clone())
        return made


class DecodeAndMultiply(torch.autograd.Function):
    """x @ decoded.T, keeping the codes and not what they mean, which would be many times as large."""

    @staticmethod
    def forward(ctx, x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
        ctx.tensors, ctx.state = (None, codes), scale
        return x @ (codes.t().float() * scale).t()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        _, codes = ctx.tensors
        return grad @ (codes.t().float() * ctx.state), None, None


class AdaptedLayer(nn.Module):
    """A frozen layer of codes, and an adapter beside it. It hands its function a view of the codes, or `whole` ones."""

    def __init__(self, whole: bool = False) -> None:
        super().__init__()
        self.whole = whole
        self.weight = Codes(torch.randint(0, 16, (WIDTH, WIDTH), dtype=torch.uint8), torch.rand(WIDTH) / WIDTH)
        self.lora_a = nn.Linear(WIDTH, RANK, bias=False)
        self.lora_b = nn.Linear(RANK, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        codes = self.weight if self.whole else self.weight.t()
        return torch.tanh(DecodeAndMultiply.apply(x, codes, self.weight.scale) + self.lora_b(self.lora_a(x)))


def gathered_at_once(group, whole: bool = False, ignore: bool = False, stage: int = 3) -> int:
    """Gradients are right; returns how many blocks of codes were gathered at once."""
    net = nn.Sequential(*(AdaptedLayer(whole) for _ in range(BLOCKS)))
    ignored = [layer.weight for layer in net] if ignore else []
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))
    model, _ = compare(net, lambda m: m(x).square().mean(), group, prefetch=0, ignore=ignored, stage=stage)
    adapters = 4 * 2 * RANK * WIDTH
    peak = model.ledger.peak().get("gather buffers", 0)
    return (peak - adapters) // (WIDTH * WIDTH) if peak else 0


@pytest.mark.parametrize(("stage", "ignore"), [(2, False), (3, True)], ids=["stage 2", "ignored"])
def test_codes_that_every_rank_has_are_trained_around_like_any_frozen_weight(group, stage, ignore):
    assert gathered_at_once(group, ignore=ignore, stage=stage) == 0


def test_codes_may_be_kept_themselves(group) -> None:
    """Codes that are kept themselves are placeholders in the backward, and gathered when they are used."""
    gathered_at_once(group, whole=True)


def test_sharded_codes_are_right_but_stay_gathered_until_the_backward(group):
    with pytest.warns(EscapedViewWarning, match="outlived"):
        assert gathered_at_once(group) >= BLOCKS


# ---- optimizers with 8-bit state ------------------------------------------------------------------------------------


class BlockwiseMomentum(torch.optim.Optimizer):
    """Momentum in 8 bits, with a scale for each block of 32, which no cut divides.

    Weights are written where no version counter sees it.
    """

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group["lr"])

    def _update(self, param: Tensor, lr: float) -> None:
        state, numel = self.state[param], param.numel()
        blocks = -(-numel // 32)
        if not state:
            state["codes"] = torch.zeros(blocks, 32, dtype=torch.int8)
            state["scales"] = torch.zeros(blocks, 1)
        grad = torch.nn.functional.pad(param.grad.flatten(), (0, blocks * 32 - numel)).view(blocks, 32)
        momentum = 0.9 * state["codes"] * state["scales"] / 127 + grad
        state["scales"] = momentum.abs().amax(1, keepdim=True)
        state["codes"] = (momentum / state["scales"].clamp(min=1e-30) * 127).round().to(torch.int8)
        param.numpy()[...] -= lr * momentum.flatten()[:numel].view(param.shape).numpy()


def test_an_optimizer_with_8_bit_blocks_steps_shards_at_every_stage(group):
    """Each forward computes with what the last step wrote."""
    expected, *others = (stepped_by_blocks(group, stage) for stage in (3, 2, 1))
    for other in others:
        same_states("weights", other, expected)


def stepped_by_blocks(group, stage: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)))
    plain = copy.deepcopy(net)
    model = ShardLite(net, group=group, stage=stage)
    optimizer = BlockwiseMomentum(model.parameters())
    for step in range(4):
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
        plain.load_state_dict(model.full_state_dict())
        loss = model(x).square().mean()
        same_bits(f"loss of step {step}", loss.detach(), plain(x).square().mean().detach())
        take_step(optimizer, loss)
    assert model.memory()["optimizer state"].now < model.memory()["parameters"].now
    return model.full_state_dict()
