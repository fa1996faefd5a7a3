"""Plain data parallel in one process: the bits that a sharded model has to reproduce.

A `Twin` holds one unsharded replica. It computes the gradients of all `W` ranks one after the other, and averages them
in a written-out order. So a rank can hold a twin of its own, and needs no communication to know what is right.

Legend: `W` ranks, `S` elements per shard; a flat [W*S] holds the parameters of one kind in one unit.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR

from shardlite import AdamW
from shardlite.layout import Layout, Slot, lay_out
from shardlite.partition import UnitPolicy, cut

Mean = Callable[[Sequence[Tensor]], Tensor]
"""From each rank's flat gradient [W*S] to their mean [W*S]."""


def ring_mean(flats: Sequence[Tensor]) -> Tensor:
    """Add segment `k` in the order k+1, k+2, ..., k and divide it by `W`, once.

    Each addition rounds to the dtype of the gradients; the last one only after the division.
    """
    world_size = len(flats)
    mean = torch.empty_like(flats[0])
    rows = [flat.view(world_size, -1) for flat in flats]
    for k in range(world_size):
        order = [(k + 1 + i) % world_size for i in range(world_size)]
        total = rows[order[0]][k]
        for rank in order[1:]:
            exact = torch.float64 if total.dtype == torch.float64 else torch.float32
            added = total.to(exact) + rows[rank][k].to(exact)
            total = (added / world_size if rank == k else added).to(total.dtype)
        mean.view(world_size, -1)[k] = total
    return mean


def simple_mean(flats: Sequence[Tensor]) -> Tensor:
    """Average two ranks as one would without a thought: a sum of two commutes."""
    first, second = flats
    return (first + second) / 2


class Twin:
    """An unsharded replica of a model, trained on the batches of all ranks. It changes `module` in place."""

    def __init__(self, module: nn.Module, world_size: int, units: UnitPolicy = None, mean: Mean = ring_mean):
        self.module = module
        self.world_size = world_size
        self.params = dict(module.named_parameters())
        self._layouts = list(_layouts(module, world_size, units))
        self._mean = mean

    def backward(self, run: Callable[[nn.Module, int], Any]) -> list[Any]:
        """Call `run(module, rank)`, which does a rank's backwards, for each rank; return what each call returned.

        The mean gradients are added to the parameters' `grad`. What no rank used is left as it was.
        """
        before = self._take_gradients()
        results, local = [], []
        for rank in range(self.world_size):
            results.append(run(self.module, rank))
            local.append(self._take_gradients())
        for name, param in self.params.items():
            param.grad = before.get(name)
        for layout in self._trainable():
            self._hand_out(layout, local)
        return results

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip to a norm that is made of one partial per rank, each of the norms of its parts of the parameters, []."""
        partials = torch.stack([self._norm_of(rank, norm_type) for rank in range(self.world_size)])
        norm = torch.linalg.vector_norm(partials, norm_type)
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for param in self.params.values():
            if param.grad is not None:
                param.grad.mul_(factor.to(param.dtype))
        return norm

    def part(self, name: str, full: Tensor, rank: int) -> Tensor:
        """Return the elements of a parameter, or of a tensor like it, that are in a rank's shard, [k]."""
        found = [(layout, slot) for layout in self._layouts for slot in layout.slots if slot.name == name]
        return _part(*found[0], full, rank)

    def _trainable(self) -> Iterator[Layout]:
        return (layout for layout in self._layouts if layout.trainable)

    def _take_gradients(self) -> dict[str, Tensor]:
        taken = {name: param.grad for name, param in self.params.items() if param.grad is not None}
        for param in self.params.values():
            param.grad = None
        return taken

    def _hand_out(self, layout: Layout, local: Sequence[dict[str, Tensor]]) -> None:
        mean = self._mean([_flattened(layout, grads) for grads in local])
        for slot in layout.slots:
            param = self.params[slot.name]
            if any(slot.name in grads for grads in local):
                new = mean[slot.start : slot.start + param.numel()].view(param.shape)
                param.grad = new.clone() if param.grad is None else param.grad + new

    def _norm_of(self, rank: int, norm_type: float) -> Tensor:
        doubles = any(param.dtype == torch.float64 and param.requires_grad for param in self.params.values())
        precision = torch.float64 if doubles else torch.float32
        norms = []
        for layout in self._trainable():
            for slot in layout.slots:
                grad = self.params[slot.name].grad
                if grad is not None and (part := _part(layout, slot, grad, rank)).numel():
                    norms.append(torch.linalg.vector_norm(part, norm_type).to(precision))
        return torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.zeros((), dtype=precision)


def _layouts(module: nn.Module, world_size: int, units: UnitPolicy) -> Iterator[Layout]:
    """Lay out each unit's parameters, those of each (dtype, trainable) by themselves."""
    for part in cut(module, units):
        kinds: dict[tuple[torch.dtype, bool], list[tuple[str, Sequence[int]]]] = {}
        for param, name in part.params.items():
            kinds.setdefault((param.dtype, param.requires_grad), []).append((name, param.shape))
        for (dtype, trainable), members in kinds.items():
            yield lay_out(members, dtype=dtype, trainable=trainable, world_size=world_size)


def _flattened(layout: Layout, grads: dict[str, Tensor]) -> Tensor:
    """Put a rank's gradients in their places in a flat [W*S]; what it did not use is zero."""
    flat = torch.zeros(layout.world_size * layout.shard_numel, dtype=layout.dtype)
    for slot in layout.slots:
        if slot.name in grads:
            grad = grads[slot.name]
            flat[slot.start : slot.start + grad.numel()] = grad.reshape(-1)
    return flat


def _part(layout: Layout, slot: Slot, full: Tensor, rank: int) -> Tensor:
    start = rank * layout.shard_numel - slot.start
    stop = start + layout.shard_numel
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
    flat = tensor.new_zeros(-(-tensor.numel() // 32) * 32)
    flat[: tensor.numel()] = tensor.reshape(-1)
    return flat


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
