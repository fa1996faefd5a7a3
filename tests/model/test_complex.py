"""Complex weights, as spectral layers have them: trained as real numbers, and frozen as they are."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn.utils.parametrize import register_parametrization, remove_parametrizations

import shardlite
from shardlite import LayoutError, ShardLite
from tests.support.twins.sharded import same_bits, same_states, take_step

WIDTH = 7


class Spectral(nn.Module):
    """Multiplies spectra. Frozen phases are complex, too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64) / 3)
        self.phases = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64), requires_grad=False)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.fft.ifft(torch.fft.fft(x) * self.phases @ self.weight).real.tanh())


class Parts(nn.Module):
    """The remedy that the error names."""

    def forward(self, real: Tensor, imag: Tensor) -> Tensor:
        return torch.complex(real, imag)

    def right_inverse(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.real.clone(), x.imag.clone()


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Spectral() for _ in range(3)))


@pytest.mark.stages(0, 2, 3)
def test_complex_parameters_are_stored_as_real_numbers(group: Any, tmp_path: Path, stage: int) -> None:
    """With the remedy of the error, weights are those of a plain model with complex parameters."""
    plain = net()
    twin = copy.deepcopy(plain)
    with pytest.raises(LayoutError, match=r"'0\.weight' is torch\.complex64.*register_parametrization"):
        ShardLite(plain, group=group, stage=stage)
    for layer in plain:
        register_parametrization(layer, "weight", Parts())
    model = ShardLite(plain, group=group, stage=stage, units=Spectral)
    optimizers = [optim.Adam([p for p in each.parameters() if p.requires_grad], lr=0.01) for each in (model, twin)]
    for step in range(3):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        losses = [each(x).square().mean() for each in (model, twin)]
        same_bits("loss", losses[0].detach(), losses[1].detach())
        for loss, optimizer in zip(losses, optimizers, strict=True):
            take_step(optimizer, loss)
    shardlite.save(tmp_path / "saved", model, optimizers[0])
    shardlite.load(tmp_path / "saved", model, optimizers[0])
    module = model.unwrap()
    for layer in module:
        remove_parametrizations(layer, "weight")
    states = (each.state_dict() for each in (module, twin))
    numbers = [{k: torch.view_as_real(v) if v.is_complex() else v for k, v in each.items()} for each in states]
    same_states("complex weights", *numbers)
