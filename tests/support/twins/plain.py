"""What tests add to the plain twin of `shardlite verify`: gradient norms, shared buffers, parts, and optimizers.

Legend: `W` ranks, `S` elements per shard; a flat parameter [W*S] holds the parameters of one kind in one unit.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from shardlite_kernels import new_stats, stats
from shardlite_kernels.stats import stats_total
from torch import Tensor, nn, optim
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR

from shardlite import AdamW
from shardlite.lab.verify.plain import Mean, PaddedAdamW, Sum, add_round, flattened, simple_mean
from shardlite.lab.verify.plain import Twin as PlainTwin
from shardlite.lab.verify.plain import ring_mean as plain_ring_mean
from shardlite.params import ALIGN, Layout, Slot, round_up
from shardlite.wrapping.partition import UnitPolicy

__all__ = ["RECIPES", "Mean", "PaddedAdamW", "Recipe", "Sum", "Twin", "add_round", "ring_mean", "simple_mean"]


@dataclass(frozen=True)
class ReplicatedSum(Sum):
    """Sums of ranks of which some share a model."""

    kept: Tensor
    """[W*S], bool: elements that are reduced. Frozen parameters are not."""

    earlier: Sequence[Sequence[Tensor]] = ()
    """The flats of all ranks in earlier backwards, whose sums the ranks that share a model have kept."""


def ring_mean(of: Sum, divisor: int | None = None) -> Tensor:
    """Add segment `k` over the ranks that share a model, then over the replicas; divide by the number of all, once."""
    ranks, world_size = len(of.flats), of.layout.world_size
    if ranks == world_size and not (isinstance(of, ReplicatedSum) and of.earlier):
        return plain_ring_mean(of, divisor)
    assert isinstance(of, ReplicatedSum)
    mean = torch.zeros(of.layout.full_numel, dtype=of.layout.dtype)
    for k in range(world_size):
        own = slice(*of.layout.shard_range(k))
        sums: list[Tensor] = []
        for flats in (*of.earlier, of.flats):
            shards = [flat[own] for flat in flats]
            replicas = [shards[first : first + world_size] for first in range(0, ranks, world_size)]
            new = [add_round(replica, k, 1, mean.dtype) for replica in replicas]
            sums = [before + each for before, each in zip(sums, new, strict=True)] if sums else new
        mean[own] = _over_replicas(sums, of.kept[own], divisor or ranks)
    return mean


def _over_replicas(sums: Sequence[Tensor], kept: Tensor, divisor: int) -> Tensor:
    """Add the kept elements of a shard over the replicas: equal segments, each in an order of its own."""
    mean, places = torch.zeros_like(sums[0]), kept.nonzero().flatten()
    length = max(1, -(-len(places) // len(sums)))
    for k, segment in enumerate(torch.split(places, length)):
        mean[segment] = add_round([each[segment] for each in sums], k, divisor, mean.dtype)
    return mean


class Twin(PlainTwin):
    """A plain twin that may compute for all ranks, whose gradients can be clipped, and whose ranks can share buffers.

    Without a group this process computes the gradients of all ranks, one after the other. `replicas` are groups of
    ranks that share a model among themselves.
    """

    def __init__(
        self, module: nn.Module, world_size: int, units: UnitPolicy = None, *, replicas: int = 1, **options: Any
    ) -> None:
        super().__init__(module, world_size, units, **{"mean": ring_mean, "shards": world_size // replicas} | options)
        self._computed = range(world_size) if self._group is None else [dist.get_rank(self._group)]
        self._buffers = {rank: _copies(module) for rank in self._computed}
        self._earlier: list[Sequence[Sequence[Tensor]]] = []
        """What `keep` has packed since the last reduction: for each backward, for each rank, its flats."""

        self._handed: dict[str, Tensor] = {}
        """The gradients that came from the last reduction, if there were none before."""

    def backward(self, run: Callable[[nn.Module, int], Any]) -> list[Any]:
        """Call `run(module, rank)` for each rank that is computed here; return what each call returned, or `None`."""
        fresh = all(master.grad is None for master in self.masters.values())
        results, packed = self._run(run)
        self._accumulate(packed)
        self._earlier = []
        grads = {name: master.grad for name, master in self.masters.items() if master.grad is not None}
        self._handed = {name: grad.clone() for name, grad in grads.items()} if fresh else {}
        return results

    def keep(self, run: Callable[[nn.Module, int], Any]) -> list[Any]:
        """Run a backward as `backward` does, but keep its sums for the next reduction. It uses all parameters."""
        results, packed = self._run(run)
        self._earlier.append(packed)
        return results

    def _run(self, run: Callable[[nn.Module, int], Any]) -> tuple[list[Any], Sequence[Sequence[Tensor]]]:
        self.refresh()
        results: list[Any] = [None] * self.world_size
        packed = []
        for rank in self._computed:
            with self.caught() as sums, self.as_rank(rank):
                results[rank] = run(self.module, rank)
            packed.append(self._packed(sums))
        return results, packed if self._group is None else self._gathered(*packed)

    @contextmanager
    def as_rank(self, rank: int) -> Iterator[None]:
        """Context in which the module has a rank's buffers."""
        with torch.no_grad():
            for name, buffer in self.module.named_buffers():
                buffer.copy_(self._buffers[rank][name])
        yield
        self._buffers[rank] = _copies(self.module)

    def share_buffers(self) -> None:
        """Give all ranks the buffers of the first, as `DistributedDataParallel` does before a forward."""
        if self._group is None:
            self._buffers = dict.fromkeys(self._computed, self._buffers[0])
        else:
            for buffer in self._buffers[self._computed[0]].values():
                dist.broadcast(buffer, dist.get_global_rank(self._group, 0), group=self._group)

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for master in self.masters.values():
            master.grad = None

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip to a norm that is made of one partial per rank, []."""
        ranks = self._flats[0].layout.world_size
        of = self._root_of_squares if norm_type == 2 and self._as_handed_out() else partial(self._norm_of, norm_type)
        partials = torch.stack([of(rank) for rank in range(ranks)])
        norm = torch.linalg.vector_norm(partials, norm_type)
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for master in self.masters.values():
            if master.grad is not None:
                master.grad.mul_(factor.to(master.dtype))
        return norm

    def part(self, name: str, full: Tensor, rank: int) -> Tensor:
        """Return the elements of a parameter, or of a tensor like it, that are in a rank's shard, [k]."""
        layouts = [flat.layout for flat in self._flats]
        found = [(layout, slot) for layout in layouts for slot in layout.slots if slot.name == name]
        return _part(*found[0], full, rank % layouts[0].world_size)

    def _mean_of(self, flats: Sequence[Tensor], layout: Layout) -> Tensor:
        place = next(i for i, flat in enumerate(self._flats) if flat.layout is layout)
        earlier = [[of_rank[place] for of_rank in packed] for packed in self._earlier]
        return self._mean(ReplicatedSum(flats, layout, self._kept(layout), earlier))

    def _kept(self, layout: Layout) -> Tensor:
        """Return which elements of a flat [W*S] are reduced: all, or all of parameters that have gradients."""
        trainable = [slot for slot in layout.slots if self._own[slot.name].requires_grad]
        kept = torch.zeros(layout.full_numel, dtype=torch.bool)
        if len(trainable) == len(layout.slots):
            return ~kept
        for slot in trainable:
            kept[slot.start : slot.start + round_up(slot.numel, ALIGN)] = True
        return kept

    def _as_handed_out(self) -> bool:
        """Return whether all gradients came from the last reduction, and are what they were then."""
        if not self.rounds:
            return False
        grads = {name: master.grad for name, master in self.masters.items() if master.grad is not None}
        same = (torch.equal(self._handed[name], grad) for name, grad in grads.items() if name in self._handed)
        return grads.keys() == self._handed.keys() and all(same)

    def _precision_of_norms(self) -> torch.dtype:
        doubles = any(master.dtype == torch.float64 for master in self.masters.values())
        return torch.float64 if doubles else torch.float32

    def _root_of_squares(self, rank: int) -> Tensor:
        """Return the norm of a rank's part of the gradients, from the statistics of each flat; no gradient is zero."""
        totals = []
        for flat in self._flats:
            kept = self._kept(flat.layout)
            if kept.any():
                grads = {slot.name: self.masters[slot.name].grad for slot in flat.layout.slots}
                full = flattened(
                    flat.layout, {name: g for name, g in grads.items() if g is not None}, flat.layout.dtype
                )
                own = slice(*flat.layout.shard_range(rank))
                part = full[own][kept[own]]
                rows = new_stats(part)
                stats(part, rows)
                totals.append(stats_total(rows)[0])
        return torch.stack(totals).sum().sqrt().to(self._precision_of_norms())

    def _norm_of(self, norm_type: float, rank: int) -> Tensor:
        """Return the norm of the norms of a rank's parts of the parameters."""
        precision = self._precision_of_norms()
        norms = []
        for layout in (flat.layout for flat in self._flats):
            for slot in layout.slots:
                grad = self.masters[slot.name].grad
                if grad is not None and (part := _part(layout, slot, grad, rank)).numel():
                    norms.append(torch.linalg.vector_norm(part, norm_type).to(precision))
        return torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.zeros((), dtype=precision)


def _copies(module: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def _part(layout: Layout, slot: Slot, full: Tensor, rank: int) -> Tensor:
    start = layout.shard_range(rank)[0] - slot.start
    stop = layout.shard_range(rank)[1] - slot.start
    return full.detach().reshape(-1)[max(0, start) : max(0, stop)]


@dataclass(frozen=True)
class Recipe:
    """How to make an optimizer: the same for shards and for whole parameters, if `twin` does not say otherwise."""

    make: Callable[..., optim.Optimizer]
    twin: Callable[..., optim.Optimizer] | None = None
    groups: Callable[[Iterable[nn.Parameter]], Any] = list
    schedule: Callable[[optim.Optimizer], Any] | None = None


def of(kind: Callable[..., optim.Optimizer], **options: Any) -> Callable[..., optim.Optimizer]:
    return lambda params: kind(params, **copy.deepcopy(options))  # a scheduler changes a tensor lr in place


def decayed_by_ndim(params: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    params = list(params)
    return [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": 0.3},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]


def ours(**options: Any) -> dict[str, Any]:
    options = {"lr": 0.02, "weight_decay": 0.1, **options}
    return {"make": of(AdamW, **options), "twin": of(PaddedAdamW, **options)}


RECIPES = {
    "sgd": Recipe(of(optim.SGD, lr=0.1, momentum=0.9, foreach=True)),
    "adamw": Recipe(**ours()),
    "adamw-groups": Recipe(**ours(), groups=decayed_by_ndim),
    "adamw-cosine": Recipe(**ours(), schedule=lambda o: CosineAnnealingLR(o, T_max=5)),
    "adamw-tensor-lr": Recipe(**ours(lr=torch.tensor(0.02)), schedule=lambda o: LambdaLR(o, lambda t: 0.5**t)),
    "sgd-plain": Recipe(of(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, foreach=False)),
    "sgd-groups": Recipe(of(optim.SGD, lr=0.1, momentum=0.9), groups=decayed_by_ndim),
    "sgd-one-cycle": Recipe(
        of(optim.SGD, lr=0.1, momentum=0.9), schedule=lambda o: OneCycleLR(o, max_lr=0.2, total_steps=8)
    ),
    "sgd-fused": Recipe(of(optim.SGD, lr=0.1, momentum=0.9, fused=True)),
    "torch-adamw": Recipe(of(optim.AdamW, lr=0.02, foreach=True)),
    "torch-adamw-fused": Recipe(of(optim.AdamW, lr=0.02, fused=True)),
    "torch-adamw-tensor-lr": Recipe(of(optim.AdamW, lr=torch.tensor(0.02), foreach=False), groups=decayed_by_ndim),
    "adam": Recipe(of(optim.Adam, lr=0.02, amsgrad=True, foreach=True)),
    "rmsprop": Recipe(of(optim.RMSprop, lr=0.01, momentum=0.5, centered=True, foreach=True)),
    "adagrad": Recipe(of(optim.Adagrad, lr=0.05, foreach=True)),
    "adadelta": Recipe(of(optim.Adadelta, lr=1.0, foreach=True)),
    "adamax": Recipe(of(optim.Adamax, lr=0.02, foreach=True)),
    "nadam": Recipe(of(optim.NAdam, lr=0.02, foreach=True)),
    "radam": Recipe(of(optim.RAdam, lr=0.02, foreach=True)),
    "rprop": Recipe(of(optim.Rprop, lr=0.01, foreach=True)),
    "asgd": Recipe(of(optim.ASGD, lr=0.1, t0=1.0, foreach=True)),
}
