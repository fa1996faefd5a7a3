"""Plain data parallel, written out: the bits that a sharded model has to reproduce.

A `Twin` holds one unsharded replica and averages the gradients of all ranks in a written-out order. Each rank has a
twin, computes the gradients of its own batch, and gathers those of the others.

    master --cast--> parameter -> gradient --cast--> sum of a rank -> sum of all ranks / their number -> master's .grad
    fp32             compute      compute            reduce           reduce, in the end fp32

Legend: `W` ranks, `S` elements per shard; a flat [W*S] holds the parameters of one kind in one unit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from shardlite.build import UnitPolicy, partition_module, plan_flats
from shardlite.config import Precision
from shardlite.engine import cast_floats
from shardlite.params import ALIGN, Layout, round_up


@dataclass(frozen=True)
class Sum:
    """The gradient sums of one flat on all ranks, to be averaged."""

    flats: Sequence[Tensor]
    """By rank: [W*S], in the dtype in which ranks add up; zero where a rank used nothing."""

    layout: Layout
    """Layout of the weights. Its dtype is the mean's."""


Mean: TypeAlias = Callable[[Sum], Tensor]
"""From the sums of all ranks to their mean [W*S]."""


def ring_mean(of: Sum, divisor: int | None = None) -> Tensor:
    """Add each segment `k` in the order of a ring, and divide the sum by the number of ranks or by `divisor`, once."""
    mean = torch.zeros(of.layout.full_numel, dtype=of.layout.dtype)
    for k in range(of.layout.world_size):
        own = slice(*of.layout.shard_range(k))
        mean[own] = add_round([flat[own] for flat in of.flats], k, divisor or len(of.flats), mean.dtype)
    return mean


def add_round(parts: Sequence[Tensor], k: int, divisor: int, dtype: torch.dtype) -> Tensor:
    """Add the ranks' parts of segment `k` in the order k+1, k+2, ..., k, and divide the sum.

    Partial sums are sent, and rounded to, the dtype of the parts. The last one is divided before it is rounded, to
    `dtype`.
    """
    exact = torch.promote_types(parts[0].dtype, torch.float32)
    order = [(k + 1 + i) % len(parts) for i in range(len(parts))]
    total = parts[order[0]]
    for rank in order[1:-1]:
        total = (total.to(exact) + parts[rank].to(exact)).to(total.dtype)
    total = total.to(exact)
    if len(parts) > 1:
        total = total + parts[k].to(exact)
    return (total / divisor).to(dtype)


def simple_mean(of: Sum) -> Tensor:
    """Add one rank after the other, and divide once: `(g0 + g1 + ...) / W`."""
    total, *others = (flat.to(of.layout.dtype) for flat in of.flats)
    for other in others:
        total = total + other
    return total / len(of.flats)


class Twin:
    """An unsharded replica of a model, trained on the batches of all ranks. It changes `module` in place.

    Args:
        module: the model.
        world_size: number of ranks whose gradients are averaged.
        units: as in `ShardLite`.
        mean: averages the gradients.
        precision: as in `ShardLite`, except that weights are not split.
        shards: number of ranks that share a model; `None`: all.
        group: the ranks.

    Buffers are each rank's own.
    """

    def __init__(
        self,
        module: nn.Module,
        world_size: int,
        units: UnitPolicy = None,
        mean: Mean = ring_mean,
        *,
        precision: Precision = Precision(),  # noqa: B008 (frozen)
        shards: int | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.module = module
        self.world_size = world_size
        self.unused = False
        """Whether any rank has not used a trainable parameter in some backward."""

        self._group = group
        shards, device = shards or world_size, next(module.parameters()).device
        whole = replace(precision, master=torch.float32)
        plans = [plan_flats(part, shards, whole, device=device) for part in partition_module(module, units)]
        self._flats = [flat for flats in plans for flat in flats]
        self._own = dict(module.named_parameters())
        kinds = {slot.name: flat for flat in self._flats for slot in flat.layout.slots}
        casts = any(flat.layout.dtype != flat.compute for flat in self._flats)
        self.rounds = casts or world_size > 1
        """Whether gradients are summed in the reduce dtype: a single rank that casts no weights sums nothing."""

        self._sum_dtypes = {name: flat.reduce if self.rounds else flat.compute for name, flat in kinds.items()}
        self.masters = {
            name: nn.Parameter(param.detach().to(kinds[name].layout.dtype, copy=True), param.requires_grad)
            for name, param in self._own.items()
        }
        """What the optimizer steps, by name."""

        self._mean = mean
        self._precision = precision
        for name, param in self._own.items():
            param.data = param.data.to(kinds[name].compute)

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """Run the module, with floating-point tensors of the inputs and the output cast as `precision` says."""
        compute, output = self._precision.compute, self._precision.output
        result = self.module(*(inputs if compute is None else cast_floats(inputs, compute)), **options)
        return result if output is None else cast_floats(result, output)

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the masters into the parameters that the module computes with."""
        for name, param in self._own.items():
            param.copy_(self.masters[name])

    def backward(self, run: Callable[[], Any]) -> Any:
        """Call `run()`, which does the backwards of this rank, and average the gradients over the ranks. Collective.

        The means are added to the masters' `grad`; that of a parameter that no rank used stays as it was.

        Returns:
            What `run` returned.
        """
        self.refresh()
        with self.caught() as sums:
            result = run()
        self._accumulate(self._gathered(self._packed(sums)))
        return result

    @contextmanager
    def caught(self) -> Iterator[dict[str, Tensor]]:
        """Yield one rank's gradient sums, by name. Each is rounded to the dtype of the sum when a gradient is added."""
        sums: dict[str, Tensor] = {}

        def catch(name: str, param: Tensor) -> None:
            assert param.grad is not None
            grad, param.grad = param.grad.detach(), None
            grad = grad.to_dense() if grad.is_sparse else grad
            sums[name] = (sums[name] + grad if name in sums else grad).to(self._sum_dtypes[name])

        handles = [
            param.register_post_accumulate_grad_hook(partial(catch, name))  # type: ignore[no-untyped-call]
            for name, param in self._own.items()
            if param.requires_grad
        ]
        yield sums
        for handle in handles:
            handle.remove()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the masters and buffers under all of their names."""
        masters = {param: self.masters[name].detach() for name, param in self._own.items()}
        return {name: masters.get(entry, entry) for name, entry in self.module.state_dict(keep_vars=True).items()}

    def _packed(self, sums: Mapping[str, Tensor]) -> Tensor:
        """Return one rank's sums as bytes: the flats, and for each parameter whether it has a sum."""
        flats = (flattened(flat.layout, sums, self._flat_dtype(flat.layout)) for flat in self._flats)
        there = torch.tensor([name in sums for name in self._own], dtype=torch.uint8)
        return torch.cat([*(flat.view(torch.uint8) for flat in flats), there])

    def _gathered(self, packed: Tensor) -> list[Tensor]:
        """Return the packed sums of all ranks."""
        ranks = [torch.empty_like(packed) for _ in range(self.world_size)]
        dist.all_gather(ranks, packed, group=self._group)
        return ranks

    def _unpacked(self, packed: Tensor) -> tuple[list[Tensor], set[str]]:
        """Return one rank's flats and the names of the parameters that have a sum."""
        dtypes = [self._flat_dtype(flat.layout) for flat in self._flats]
        sizes = [flat.layout.full_numel * dtype.itemsize for flat, dtype in zip(self._flats, dtypes, strict=True)]
        *flats, there = torch.split(packed, [*sizes, len(self._own)])
        used = {name for name, is_there in zip(self._own, there.tolist(), strict=True) if is_there}
        return [each.clone().view(dtype) for each, dtype in zip(flats, dtypes, strict=True)], used

    def _flat_dtype(self, layout: Layout) -> torch.dtype:
        return self._sum_dtypes[layout.slots[0].name]

    def _accumulate(self, packed: Sequence[Tensor]) -> None:
        """Add the means of all ranks' sums to the masters' gradients."""
        ranks = [self._unpacked(each) for each in packed]
        trainable = {name for name, param in self._own.items() if param.requires_grad}
        self.unused |= any(used < trainable for _, used in ranks)
        used = set().union(*(names for _, names in ranks))
        for i, layout in enumerate(flat.layout for flat in self._flats):
            mean = self._mean_of([flats[i] for flats, _ in ranks], layout)
            for slot in layout.slots:
                if slot.name in used:
                    master, new = self.masters[slot.name], mean[slot.start : slot.stop].view(slot.shape)
                    master.grad = new.clone() if master.grad is None else master.grad + new

    def _mean_of(self, flats: Sequence[Tensor], layout: Layout) -> Tensor:
        return self._mean(Sum(flats, layout))


class PaddedAdamW(Optimizer):
    """PyTorch's fused AdamW on flat copies of the parameters, padded with zeros to a multiple of 32 elements.

    The padding matters: PyTorch's vector loop rounds the last `n % 16` elements differently. No parameter is stepped if
    a gradient is not finite, as in ShardLite.
    """

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step every parameter that has a gradient; each counts its own steps."""
        pairs = [(param, group) for group in self.param_groups for param in group["params"] if param.grad is not None]
        if all(bool(param.grad.isfinite().all()) for param, _ in pairs):
            for param, group in pairs:
                self._update(param, group)

    def _update(self, param: Tensor, group: dict[str, Any]) -> None:
        assert param.grad is not None
        flat, grad, state = _padded(param), _padded(param.grad), self.state[param]
        if not state:
            state.update(exp_avg=torch.zeros_like(flat), exp_avg_sq=torch.zeros_like(flat), step=torch.zeros(()))
        state["step"] += 1
        torch._fused_adamw_(
            *([flat], [grad], [state["exp_avg"]], [state["exp_avg_sq"]], [], [state["step"]]),
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
    flat = tensor.new_zeros(round_up(tensor.numel(), ALIGN))
    flat[: tensor.numel()] = tensor.reshape(-1)
    return flat


def flattened(layout: Layout, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Put tensors in their places in a flat [W*S]; where there is none it is zero."""
    full = torch.zeros(layout.full_numel, dtype=dtype)
    for slot in layout.slots:
        if slot.name in tensors:
            full[slot.start : slot.stop] = tensors[slot.name].reshape(-1)
    return full
