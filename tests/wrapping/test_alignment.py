"""On GPUs full matrices are aligned so that cuBLAS does not choose a kernel by address."""

from unittest.mock import patch

import pytest
import torch
from torch import nn

from shardlite import Precision
from shardlite.wrapping import plan as planning
from shardlite.wrapping.plan import plan_units
from shardlite.wrapping.validate import Options
from tests.support.twins.sharded import Pair


class Odd(nn.Module):
    """One unit, in which no size is a multiple of 32."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(14))
        self.up = nn.Parameter(torch.randn(5, 14))
        self.scale = nn.Parameter(torch.randn(1))
        self.down = nn.Parameter(torch.randn(14, 3))

    def forward(self, x):
        return (x @ self.up + self.bias).relu() @ self.down * self.scale


def starts(precision, device):
    """Return the bytes at which parameters begin in the full buffer, by the number of their dims."""
    options = Options(precision=precision, device=device)
    flats = [flat for flats in plan_units(Odd(), options, 2, torch.device(device)).flats for flat in flats]
    assert all(flat.layout.cuts[1] % 32 == 0 for flat in flats)
    return [(len(slot.shape), slot.start * flat.compute.itemsize) for flat in flats for slot in flat.layout.slots]


@pytest.mark.parametrize("precision", [Precision(), Precision(compute=torch.bfloat16)], ids=["fp32", "bf16"])
def test_matrices_begin_at_256_bytes_on_gpus(precision):
    begin = starts(precision, "cuda")
    assert [start % 256 for dims, start in begin if dims > 1] == [0, 0]
    assert any(start % 256 for dims, start in begin if dims == 1)
    assert any(start % 256 for dims, start in starts(precision, "cpu") if dims > 1)


def loss(model, turn):
    generator = torch.Generator().manual_seed(100 * turn.step + turn.rank)
    return model(torch.randn(4, 5, generator=generator)).square().mean()


@pytest.mark.stages(1, 3)
def test_the_gaps_change_no_bit(group, stage):
    with patch.object(planning, "_matrix_bytes", lambda device: 256):
        pair = Pair(Odd, group, stage=stage, precision=Precision(compute=torch.bfloat16))
    for _ in range(3):
        pair.step(loss, clip=0.5)
