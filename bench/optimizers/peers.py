"""Packages that have a Muon for FSDP2. They are optional: `pip install --no-deps`, because they need only PyTorch.

| package | what a step does |
|---|---|
| `dion` | matrices of one shape travel together, in bf16, by two all-to-alls; functions are compiled |
| `muon_fsdp2` | a matrix is gathered on one rank in fp32 and scattered in fp32; the iteration is compiled |

Both run Newton-Schulz once per matrix, with PyTorch's coefficients. `dion` gets PyTorch's function, because its own
has other coefficients. Its momentum is that of PyTorch times `1 / (1 - momentum)`, and the iteration divides by the
norm, so results differ only by rounding to bf16.

`dtensor-muon` 0.1.0 has no row, because it does not run on a CPU: both of its classes raise `AssertionError` in the
first step, in `gram_` and in `move_tensors_to_device`.

Legend: `b` matrices of one shape, `r` rows, `c` columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

_muon: Any = import_module("torch.optim._muon")  # `torch.optim` may have a function of this name

COEFFICIENTS = _muon.DEFAULT_A, _muon.DEFAULT_B, _muon.DEFAULT_C
STEPS: int = _muon.DEFAULT_NS_STEPS
"""Number of iterations of Newton-Schulz."""


@dataclass(frozen=True)
class Peer:
    """A package and its Muon."""

    make: Callable[..., Optimizer]
    """Function of DTensor matrices and of `options`, which are those of `torch.optim.Muon`."""

    install: str
    """Argument of `pip install --no-deps`."""


def missing(names: Sequence[str]) -> dict[str, str]:
    """Return the command that installs each package that is among `names` and not installed."""
    return {
        name: f"pip install --no-deps {PEERS[name].install}"
        for name in names
        if name in PEERS and find_spec(name) is None
    }


def _dion(params: Sequence[nn.Parameter], options: Mapping[str, Any]) -> Optimizer:
    assert isinstance(params[0], DTensor)
    made: Optimizer = import_module("dion").Muon(
        params,
        distributed_mesh=params[0].device_mesh,
        lr=options["lr"],
        mu=options["momentum"],
        weight_decay=options["weight_decay"],
        nesterov=True,
        adjust_lr="rms_norm",
        newton_schulz_func=_newton_schulz,
    )
    return made


def _newton_schulz(matrices: Tensor, epsilon: Tensor) -> Tensor:
    """Orthogonalize each of the matrices [b r c] as `torch.optim.Muon` does."""
    del epsilon
    return torch.stack([_muon._zeropower_via_newtonschulz(each, COEFFICIENTS, STEPS, _muon.EPS) for each in matrices])


def _muon_fsdp2(params: Sequence[nn.Parameter], options: Mapping[str, Any]) -> Optimizer:
    shared = {name: options[name] for name in ("lr", "momentum", "weight_decay")}
    made: Optimizer = import_module("muon_fsdp2").Muon(
        [{"params": list(params), "use_muon": True, "rms_scale": True, **shared}]
    )
    return made


PEERS = {
    "dion": Peer(_dion, "git+https://github.com/microsoft/dion"),
    "muon_fsdp2": Peer(_muon_fsdp2, "muon-fsdp2"),
}
"""Peers by the name of the module. The distribution `dion` is not on PyPI."""
