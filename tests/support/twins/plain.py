"""Plain data parallel in one process: the bits that a sharded model has to reproduce.

A `Twin` holds one unsharded replica and averages the gradients of all ranks in a written-out order. Without a group it
computes the gradients of all ranks one after the other, in one process and with no communication. With a group every
rank has a twin, computes the gradients of its own batch, and gloo gathers those of the others.

    master --cast--> parameter -> gradient --cast--> sum of a rank -> sum of all ranks / their number -> master's .grad
    fp32             compute      compute            reduce           reduce, in the end fp32

Legend: `R` replicas of `W` ranks that share a model (`R` is 1 but for hybrid sharding), `S` elements per shard; a flat
[W*S] holds the parameters of one kind in one unit.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from shardlite_kernels import new_stats, stats, stats_total
from torch import Tensor, nn, optim
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR

from shardlite import AdamW, Precision
from shardlite.build.partition import UnitPolicy, partition_module
from shardlite.build.plan import FlatPlan, plan_flats
from shardlite.params.layout import Layout, Slot


@dataclass(frozen=True)
class Sum:
    """The sums of one flat on all ranks, which are to be averaged."""

    flats: Sequence[Tensor]
    """By rank: [W*S], in the dtype in which ranks add up; zero where a rank used nothing."""

    layout: Layout
    """Of the weights. Its dtype is the mean's."""

    kept: Tensor
    """[W*S], bool: what has a place in the sum. Frozen parameters have none."""


Mean = Callable[[Sum], Tensor]
"""From each rank's flat gradient to their mean [W*S]."""


def ring_mean(of: Sum, divisor: int | None = None) -> Tensor:
    """Add segment `k` over the ranks that share a model, then over the replicas; divide by the number of all, once."""
    divisor = divisor or len(of.flats)
    mean = torch.zeros(of.layout.full_numel, dtype=of.layout.dtype)
    ranks, world_size = len(of.flats), of.layout.world_size
    for k in range(world_size):
        own = slice(*of.layout.shard_range(k))
        shards = [flat[own] for flat in of.flats]
        if ranks == world_size:
            mean[own] = add_round(shards, k, divisor, mean.dtype)
        else:
            replicas = [shards[first : first + world_size] for first in range(0, ranks, world_size)]
            sums = [add_round(replica, k, 1, mean.dtype) for replica in replicas]
            mean[own] = _over_replicas(sums, of.kept[own], divisor)
    return mean


def add_round(parts: Sequence[Tensor], k: int, divisor: int, dtype: torch.dtype) -> Tensor:
    """Add the ranks' parts of segment `k` in the order k+1, k+2, ..., k, and divide the sum.

    Every partial sum travels in the dtype of the parts, so it is rounded to that; the last one is divided before it is
    rounded, to `dtype`.
    """
    exact = torch.float64 if parts[0].dtype == torch.float64 else torch.float32
    order = [(k + 1 + i) % len(parts) for i in range(len(parts))]
    total = parts[order[0]]
    for rank in order[1:-1]:
        total = (total.to(exact) + parts[rank].to(exact)).to(total.dtype)
    total = total.to(exact)
    if len(parts) > 1:
        total = total + parts[k].to(exact)
    return (total / divisor).to(dtype)


def _over_replicas(sums: Sequence[Tensor], kept: Tensor, divisor: int) -> Tensor:
    """Add what is kept of a shard over the replicas: equal segments of it, each in an order of its own."""
    mean, places = torch.zeros_like(sums[0]), kept.nonzero().flatten()
    length = max(1, -(-len(places) // len(sums)))
    for k, places_of_segment in enumerate(places.split(length)):
        mean[places_of_segment] = add_round([each[places_of_segment] for each in sums], k, divisor, mean.dtype)
    return mean


def simple_mean(of: Sum) -> Tensor:
    """Average two ranks as one would without a thought: a sum of two commutes."""
    first, second = (flat.to(of.layout.dtype) for flat in of.flats)
    return (first + second) / 2


class Twin:
    """An unsharded replica of a model, trained on the batches of all ranks. It changes `module` in place.

    `masters` are what the optimizer has to step: as the model has them, but trainable ones in fp32 at least. `replicas`
    of the ranks are groups that share a model among themselves. With a `group` each rank computes its own part, and
    `backward` is to be called by all of them. Buffers are each rank's own until `share_buffers`.
    """

    def __init__(
        self,
        module: nn.Module,
        world_size: int,
        units: UnitPolicy = None,
        mean: Mean = ring_mean,
        *,
        precision: Precision = Precision(),  # noqa: B008 (frozen)
        replicas: int = 1,
        group: dist.ProcessGroup | None = None,
    ):
        self.module = module
        self.world_size = world_size
        self._group = group
        self._computed = range(world_size) if group is None else [dist.get_rank(group)]
        shards, device = world_size // replicas, next(module.parameters()).device
        plans = [plan_flats(part, shards, precision, device=device) for part in partition_module(module, units)]
        self._flats = [flat for flats in plans for flat in flats]
        self._own = dict(module.named_parameters())
        self._names = [slot.name for flat in self._flats for slot in flat.layout.slots]
        kinds = {slot.name: flat for flat in self._flats for slot in flat.layout.slots}
        self.masters = {
            name: nn.Parameter(param.detach().to(kinds[name].layout.dtype, copy=True), param.requires_grad)
            for name, param in self._own.items()
        }
        self._mean = mean
        self._handed: dict[str, Tensor] = {}
        self._precision = precision
        for name, param in self._own.items():
            param.data = param.data.to(kinds[name].compute)
        self._buffers = [_copies(module) for _ in range(world_size)]

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """Run the module, with floating-point tensors among the inputs, and the output, cast as `precision` says."""
        output = self.module(*(_cast(each, self._precision.compute) for each in inputs), **options)
        return _cast(output, self._precision.output)

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the masters into the parameters that the module computes with."""
        for name, param in self._own.items():
            param.copy_(self.masters[name])

    def backward(self, run: Callable[[nn.Module, int], Any]) -> list[Any]:
        """Call `run(module, rank)`, which does a rank's backwards, for each rank; return what each call returned.

        The mean gradients are added to the masters' `grad`. What no rank used is left as it was. With a group the
        result is `None` for all ranks but this one.
        """
        self.refresh()
        results: list[Any] = [None] * self.world_size
        packed = []
        for rank in self._computed:
            with self._caught() as sums, self.as_rank(rank):
                results[rank] = run(self.module, rank)
            packed.append(self._packed(sums))
        if self._group is not None:
            mine, packed = packed[0], [torch.empty_like(packed[0]) for _ in range(self.world_size)]
            dist.all_gather(packed, mine, group=self._group)
        fresh = all(master.grad is None for master in self.masters.values())
        self._hand_out([self._unpacked(each) for each in packed])
        grads = {name: master.grad for name, master in self.masters.items() if master.grad is not None}
        self._handed = {name: grad.clone() for name, grad in grads.items()} if fresh else {}
        return results

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
            self._buffers = [self._buffers[0]] * self.world_size
        else:
            own = self._buffers[self._computed[0]]
            for buffer in own.values():
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

    def state_dict(self) -> dict[str, Tensor]:
        """Return the masters and buffers under all of their names."""
        masters = {param: self.masters[name].detach() for name, param in self._own.items()}
        return {name: masters.get(entry, entry) for name, entry in self.module.state_dict(keep_vars=True).items()}

    @contextmanager
    def _caught(self) -> Iterator[dict[str, Tensor]]:
        """Yield one rank's sums of gradients, each rounded to the dtype of the sum whenever a gradient has come."""
        sums: dict[str, Tensor] = {}

        def catch(name: str, dtype: torch.dtype, param: Tensor) -> None:
            grad, param.grad = param.grad.detach(), None
            grad = grad.to_dense() if grad.is_sparse else grad
            sums[name] = (sums[name] + grad if name in sums else grad).to(dtype)

        handles = [
            self._own[slot.name].register_post_accumulate_grad_hook(partial(catch, slot.name, flat.reduce))
            for flat in self._flats
            for slot in flat.layout.slots
            if self._own[slot.name].requires_grad
        ]
        yield sums
        for handle in handles:
            handle.remove()

    def _packed(self, sums: dict[str, Tensor]) -> Tensor:
        """Return one rank's sums as bytes: the flats, and for each parameter whether it has a sum."""
        there = torch.tensor([name in sums for name in self._names], dtype=torch.uint8)
        return torch.cat([*(_flattened(flat, sums, flat.reduce).view(torch.uint8) for flat in self._flats), there])

    def _unpacked(self, packed: Tensor) -> tuple[list[Tensor], set[str]]:
        """Return one rank's flats and the names of the parameters that have a sum."""
        sizes = [flat.layout.full_numel * flat.reduce.itemsize for flat in self._flats]
        *flats, there = packed.split([*sizes, len(self._names)])
        used = {name for name, is_there in zip(self._names, there.tolist(), strict=True) if is_there}
        return [each.clone().view(flat.reduce) for each, flat in zip(flats, self._flats, strict=True)], used

    def _hand_out(self, ranks: Sequence[tuple[list[Tensor], set[str]]]) -> None:
        used = set().union(*(names for _, names in ranks))
        for i, layout in enumerate(flat.layout for flat in self._flats):
            mean = self._mean(Sum([flats[i] for flats, _ in ranks], layout, self._kept(layout)))
            for slot in layout.slots:
                if slot.name in used:
                    master, new = self.masters[slot.name], mean[slot.start : slot.stop].view(slot.shape)
                    master.grad = new.clone() if master.grad is None else master.grad + new

    def _kept(self, layout: Layout) -> Tensor:
        """Return what of a flat is reduced, [W*S]: all, or all of those parameters that have gradients."""
        trainable = [slot for slot in layout.slots if self._own[slot.name].requires_grad]
        if len(trainable) == len(layout.slots):
            return torch.ones(layout.full_numel, dtype=torch.bool)
        kept = torch.zeros(layout.full_numel, dtype=torch.bool)
        for slot in trainable:
            kept[slot.start : slot.start + _padded_numel(slot.numel)] = True
        return kept

    def _as_handed_out(self) -> bool:
        """Whether all gradients came from the last reduction, and are what they were then.

        A rank that is alone reduces nothing, unless there is something to cast.
        """
        casts = any(flat.layout.dtype != flat.compute for flat in self._flats)
        if self.world_size == 1 and not casts:
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
                full = _flattened(flat, {name: g for name, g in grads.items() if g is not None}, flat.layout.dtype)
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


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    casts = dtype is not None and isinstance(value, Tensor) and value.is_floating_point()
    return value.to(dtype) if casts else value


def _flattened(flat: FlatPlan, sums: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Put gradients in their places in a flat [W*S]; where there is none it is zero."""
    full = torch.zeros(flat.layout.full_numel, dtype=dtype)
    for slot in flat.layout.slots:
        if slot.name in sums:
            full[slot.start : slot.stop] = sums[slot.name].reshape(-1)
    return full


def _part(layout: Layout, slot: Slot, full: Tensor, rank: int) -> Tensor:
    start = layout.shard_range(rank)[0] - slot.start
    stop = layout.shard_range(rank)[1] - slot.start
    return full.detach().reshape(-1)[max(0, start) : max(0, stop)]


@dataclass
class _Moments:
    """What the optimizer keeps of one parameter, padded with zeros to a multiple of 32 elements."""

    exp_avg: Tensor
    exp_avg_sq: Tensor
    steps: Tensor


class PaddedAdamW(optim.Optimizer):
    """PyTorch's fused AdamW on padded flat copies of the parameters.

    The padding matters: PyTorch's vector loop rounds the last `numel % 16` elements in another way than the others.
    """

    def __init__(self, params: Any, lr: Any = 1e-3, betas=(0.9, 0.999), eps: float = 1e-8, weight_decay: float = 1e-2):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._moments: dict[Tensor, _Moments] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update every parameter that has a gradient; each counts its own steps."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group)

    def _update(self, param: Tensor, group: dict[str, Any]) -> None:
        flat, grad = _padded(param), _padded(param.grad)
        if param not in self._moments:
            self._moments[param] = _Moments(torch.zeros_like(flat), torch.zeros_like(flat), torch.zeros(()))
        moments = self._moments[param]
        moments.steps += 1
        torch._fused_adamw_(
            *([flat], [grad], [moments.exp_avg], [moments.exp_avg_sq], [], [moments.steps]),
            lr=float(group["lr"]),
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            amsgrad=False,
            maximize=False,
        )
        param.copy_(flat[: param.numel()].view(param.shape))


def _padded(tensor: Tensor) -> Tensor:
    flat = tensor.new_zeros(_padded_numel(tensor.numel()))
    flat[: tensor.numel()] = tensor.reshape(-1)
    return flat


def _padded_numel(numel: int) -> int:
    return -(-numel // 32) * 32


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
