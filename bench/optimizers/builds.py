"""Systems that train with Muon. They are built from the same plain model, and have the same options.

| name | meaning |
|---|---|
| `floor` | forward and backward of the plain model, then Muon and AdamW on `1/W` of the parameters; no communication |
| `ddp` | `DistributedDataParallel`; every rank steps all matrices |
| `dtensor` | FSDP2 and `torch.optim.Muon`, whose operators run on DTensors |
| `dion`, `muon_fsdp2` | FSDP2 and the Muon of that package (`bench.optimizers.peers`) |
| `stage2`, `stage3` | ShardLite and `WholeParameters` of `torch.optim.Muon` |

Muon steps the matrices that `is_hidden_matrix` selects, and fused AdamW steps all other parameters.

Legend: `W` ranks, `n` elements in all parameters that AdamW steps, `r` rows and `c` columns of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Muon, Optimizer

from bench.optimizers.peers import PEERS
from shardlite import ShardLite, WholeParameters
from shardlite.lab.compared import systems
from shardlite.lab.compared.systems import ADAMW, OPTIONS, Build, torch_adamw
from shardlite.lab.compared.trainer import Floor, Trainer, flat, join
from shardlite.lab.compared.workloads import Workload
from shardlite.optimizers.groups import is_hidden_matrix

MUON: dict[str, Any] = {"lr": 0.01, "momentum": 0.95, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
"""Options of `torch.optim.Muon`. This adjustment of the learning rate is the only one that all packages have."""

OPTIMIZER = f"Muon, lr {MUON['lr']:g}, momentum {MUON['momentum']:g}, weight decay {MUON['weight_decay']:g}; {ADAMW}"

MakeMuon = Callable[[Sequence[nn.Parameter]], Optimizer]


class Both(Optimizer):
    """Muon for matrices, and AdamW for all other parameters."""

    def __init__(self, muon: Optimizer, adamw: Optimizer) -> None:
        super().__init__([*muon.param_groups, *adamw.param_groups], {})
        self._parts = muon, adamw

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step all parameters."""
        del closure
        for part in self._parts:
            part.step()


def split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the parameters that Muon steps, and all other parameters."""
    parts: tuple[list[nn.Parameter], list[nn.Parameter]] = [], []
    for name, param in model.named_parameters():
        parts[not is_hidden_matrix(name, param.shape)].append(param)
    return parts


def both(model: nn.Module, muon: MakeMuon) -> Both:
    """Return the optimizer of a model whose matrices `muon` steps."""
    matrices, others = split(model)
    return Both(muon(matrices), torch_adamw(others))


def torch_muon(params: Sequence[nn.Parameter]) -> Optimizer:
    """Return PyTorch's Muon with `MUON`."""
    return Muon(params, **MUON)


def build_floor(workload: Workload, group: dist.ProcessGroup) -> Trainer:
    """Build the plain model, with this rank's share of its matrices and one parameter [n/W] for AdamW."""
    model = workload.model()
    matrices, others = split(model)
    share = nn.Parameter(torch.full((-(-sum(param.numel() for param in others) // group.size()),), 0.02))
    share.grad = torch.full_like(share, 1e-3)
    return Floor(model, Both(torch_muon(shares(matrices, group.size())[group.rank()]), torch_adamw([share])), flat)


def shares(matrices: Sequence[nn.Parameter], ranks: int) -> list[list[nn.Parameter]]:
    """Divide matrices among ranks by Muon's work: the largest first, each to the rank that has the least."""
    parts: list[list[nn.Parameter]] = [[] for _ in range(ranks)]
    for matrix in sorted(matrices, key=work, reverse=True):
        min(parts, key=lambda part: sum(map(work, part))).append(matrix)
    return parts


def work(matrix: Tensor) -> int:
    """Return the multiplications in an iteration of Newton-Schulz: `X X^T` [r r], its square, and its product with X.

    The iteration transposes a matrix [r c] with more rows than columns.
    """
    r, c = sorted(matrix.shape)
    return r * r * (2 * c + r)


def build_ddp(workload: Workload, group: dist.ProcessGroup) -> Trainer:
    """Build `DistributedDataParallel`."""
    model = systems.wrap_ddp(workload.model(), group)
    return Trainer(model, both(model, torch_muon), flat)


def _fsdp2(muon: MakeMuon) -> Build:
    """Return a function that builds FSDP2 whose matrices `muon` steps."""
    return partial(systems.build_fsdp2, optimizer=partial(both, muon=muon))


def build_shardlite(workload: Workload, group: dist.ProcessGroup, *, stage: int) -> Trainer:
    """Build ShardLite at one stage."""
    model = ShardLite(workload.model(), stage=stage, group=group)
    optimizer = WholeParameters(model.named_parameters(), Muon, elementwise=OPTIONS, **MUON)
    return Trainer(model, optimizer, partial(join, group=group))


OF_FSDP2: dict[str, Build] = {
    "dtensor": _fsdp2(torch_muon),
    **{name: _fsdp2(partial(peer.make, options=MUON)) for name, peer in PEERS.items()},
}

OURS: dict[str, Build] = {f"stage{stage}": partial(build_shardlite, stage=stage) for stage in (2, 3)}

SYSTEMS: dict[str, Build] = {"floor": build_floor, "ddp": build_ddp, **OF_FSDP2, **OURS}
