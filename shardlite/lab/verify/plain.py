"""Plain data parallelism, written out. A sharded model must compute the same bits.

A `Twin` holds one unsharded replica and averages the gradients of all ranks in a written-out order. Each rank has a
twin, computes the gradients of its own batch, and gathers the gradients of the other ranks.

    master --cast--> parameter -> gradient --cast--> sum of a rank -> sum of all ranks / their number -> master's .grad
    fp32             compute      compute            reduce           reduce, in the end fp32

Legend: `W` ranks, `S` elements per shard; a flat is a flat parameter [W*S], which holds the
parameters of one kind in one unit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from shardlite.config import Precision
from shardlite.engine import cast_floats, cast_inputs
from shardlite.params import ALIGN, Layout
from shardlite.wrapping import UnitPolicy, partition_module
from shardlite.wrapping.keep import dtypes_of
from shardlite.wrapping.plan import plan_flats


@dataclass(frozen=True)
class Sum:
    """The gradient sums of one flat on all ranks, to be averaged."""

    flats: Sequence[Tensor]
    """The sum of each rank, [W*S], in the dtype of the sum. Parameters that a rank did not use have zeros."""

    layout: Layout
    """Layout of the weights, with the dtype of the mean."""


Mean: TypeAlias = Callable[[Sum], Tensor]
"""Function that returns the mean [W*S] of the sums of all ranks."""


def ring_mean(of: Sum, divisor: int | None = None) -> Tensor:
    """Add each segment `k` in the order of a ring. Divide the sum once, by `divisor` or else by the number of ranks."""
    mean = torch.zeros(of.layout.full_numel, dtype=of.layout.dtype)
    for k in range(of.layout.world_size):
        own = slice(*of.layout.shard_range(k))
        mean[own] = add_round([flat[own] for flat in of.flats], k, divisor or len(of.flats), mean.dtype)
    return mean


def add_round(parts: Sequence[Tensor], k: int, divisor: int, dtype: torch.dtype) -> Tensor:
    """Add the ranks' parts of segment `k` in the order k+1, k+2, ..., k, and divide the sum.

    Partial sums are rounded to the dtype of the parts, and are sent in that dtype. The final sum is divided and then
    rounded to `dtype`.
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
    """Add the sums in rank order, and divide once: `(g0 + g1 + ...) / W`."""
    total, *others = (flat.to(of.layout.dtype) for flat in of.flats)
    for other in others:
        total = total + other
    return total / len(of.flats)


class Twin:
    """An unsharded replica of a model, trained on the batches of all ranks. Modifies `module` in place.

    Args:
        module: the model.
        world_size: number of ranks whose gradients are averaged.
        units: as in `ShardLite`.
        mean: function that averages the gradients.
        precision: as in `ShardLite`, except that weights are not split.
        shards: number of ranks that share a model; `None` selects all ranks.
        group: the ranks.

    Each rank has its own buffers.
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
        """Whether, in any backward, a rank did not use a trainable parameter."""

        self._group = group
        shards, device = shards or world_size, next(module.parameters()).device
        whole = replace(precision, master=torch.float32)
        parts = partition_module(module, units)
        self._dtypes = dtypes_of(module, precision, [part.module for part in parts if part.params])
        plans = [plan_flats(part, shards, whole, self._dtypes.kept, device=device) for part in parts]
        cast_inputs(self._dtypes.inputs, self._dtypes.outside)
        self._flats = [flat for flats in plans for flat in flats]
        self._own = dict(module.named_parameters())
        kinds = {slot.name: flat for flat in self._flats for slot in flat.layout.slots}
        casts = any(flat.layout.dtype != flat.compute for flat in self._flats)
        self.rounds = casts or world_size > 1
        """Whether sums have the reduce dtype. On a single rank that casts no weights, sums have the compute dtype."""

        self._sum_dtypes = {name: flat.reduce if self.rounds else flat.compute for name, flat in kinds.items()}
        self.masters = {
            name: nn.Parameter(param.detach().to(kinds[name].layout.dtype, copy=True), param.requires_grad)
            for name, param in self._own.items()
        }
        """The parameters that the optimizer updates, by name."""

        self._mean = mean
        self._precision = precision
        for name, param in self._own.items():
            param.data = param.data.to(kinds[name].compute)

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """Run the module. Floating-point tensors in the inputs and the output are cast as `precision` specifies."""
        compute, output = self._dtypes.model, self._precision.output
        result = self.module(*(inputs if compute is None else cast_floats(inputs, compute)), **options)
        return result if output is None else cast_floats(result, output)

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the masters into the parameters of the module."""
        for name, param in self._own.items():
            param.copy_(self.masters[name])

    def backward(self, run: Callable[[], Any]) -> Any:
        """Call `run`, which runs the backwards of this rank, and average the gradients over the ranks. Collective.

        The means are added to the masters' `grad`. If no rank used a parameter, the `grad` of its master does
        not change.

        Returns:
            The result of `run`.
        """
        self.refresh()
        with self.caught() as sums:
            result = run()
        self._accumulate(self._gathered(self._packed(sums)))
        return result

    @contextmanager
    def caught(self) -> Iterator[dict[str, Tensor]]:
        """Catch this rank's gradients, and yield their sums by name. Each addition rounds the sum to its dtype."""
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
        """Return masters and buffers by name. A shared tensor appears under each of its names."""
        masters = {param: self.masters[name].detach() for name, param in self._own.items()}
        return {name: masters.get(entry, entry) for name, entry in self.module.state_dict(keep_vars=True).items()}

    def _packed(self, sums: Mapping[str, Tensor]) -> list[Tensor]:
        """Return one rank's sums: the flats, then a mask (uint8) of the parameters that have a sum."""
        dtypes = (self._sum_dtypes[flat.layout.slots[0].name] for flat in self._flats)
        flats = [flattened(flat.layout, sums, dtype) for flat, dtype in zip(self._flats, dtypes, strict=True)]
        return [*flats, torch.tensor([name in sums for name in self._own], dtype=torch.uint8)]

    def _gathered(self, packed: Sequence[Tensor]) -> list[list[Tensor]]:
        """Return the packed sums of all ranks."""
        ranks = [[torch.empty_like(each) for each in packed] for _ in range(self.world_size)]
        for own, *of_ranks in zip(packed, *ranks, strict=True):  # as bytes, because gloo does not support all dtypes
            dist.all_gather([each.view(torch.uint8) for each in of_ranks], own.view(torch.uint8), group=self._group)
        return ranks

    def _accumulate(self, packed: Sequence[Sequence[Tensor]]) -> None:
        """Add the means of all ranks' sums to the masters' gradients."""
        uses = torch.stack([of_rank[-1] for of_rank in packed])
        used = {name for name, is_used in zip(self._own, uses.any(dim=0).tolist(), strict=True) if is_used}
        trainable = torch.tensor([param.requires_grad for param in self._own.values()])
        self.unused |= not bool(uses[:, trainable].all())
        for i, layout in enumerate(flat.layout for flat in self._flats):
            mean = self._mean_of([of_rank[i] for of_rank in packed], layout)
            for slot in layout.slots:
                if slot.name in used:
                    master, new = self.masters[slot.name], mean[slot.start : slot.stop].view(slot.shape)
                    master.grad = new.clone() if master.grad is None else master.grad + new

    def _mean_of(self, flats: Sequence[Tensor], layout: Layout) -> Tensor:
        return self._mean(Sum(flats, layout))


class PaddedAdamW(torch.optim.AdamW):
    """PyTorch's fused AdamW on flat copies of the parameters, padded with zeros to a multiple of 32 elements.

    PyTorch's vector loop rounds the last `n % 16` elements differently, so padding changes bits. If a gradient is not
    finite, no parameter is updated, as in ShardLite.
    """

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, fused=True, **options)
        self._step_supports_amp_scaling = False  # a `GradScaler` unscales gradients before the step

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update each parameter that has a gradient. Each parameter has its own step count."""
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        whole = [(param, param.data, param.grad) for param in params]
        if all(bool(grad.isfinite().all()) for _, _, grad in whole):
            for param, data, grad in whole:
                param.data, param.grad = _padded(data), _padded(grad)
            super().step()
            for param, data, grad in whole:
                data.copy_(param.data[: data.numel()].view(data.shape))
                param.data, param.grad = data, grad


def _padded(tensor: Tensor) -> Tensor:
    return F.pad(tensor.reshape(-1), (0, -tensor.numel() % ALIGN))


def flattened(layout: Layout, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Return a flat [W*S] that contains the tensors in their slots. Other slots are zero."""
    full = torch.zeros(layout.full_numel, dtype=dtype)
    for slot in layout.slots:
        if slot.name in tensors:
            full[slot.start : slot.stop] = tensors[slot.name].reshape(-1)
    return full
