"""Construction on the meta device."""

import torch
from torch import nn


def on_meta(make: type[nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4))
