"""A model that computes with casts of its master weights: the meaning of `Precision` without ShardLite, on one rank.

master --cast--> parameter -> gradient --cast--> sum of this rank
fp32             compute      compute            reduce
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardlite.config import Precision
from shardlite.engine import cast_floats


class Masters(nn.Module):
    """Wrap `module`; `parameters()` are the master weights, under the original names.

    Gradients are added to `sums` instead of the masters, each rounded when it arrives: a parameter gets several in one
    backward if it is used inside and outside of a reentrant checkpoint. With `alone` and nothing to cast nothing is
    summed: gradients are autograd's own.
    """

    def __init__(self, module: nn.Module, precision: Precision, *, alone: bool) -> None:
        super().__init__()
        self._module = module
        self._precision = precision
        self._own = dict(module.named_parameters())
        self._masters = {name: _master(param, precision) for name, param in self._own.items()}
        self.sums: dict[str, Tensor] = {}
        for name, param in self._own.items():
            param.data = param.data.to(precision.compute_of(param.dtype))
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(partial(self._catch, name))  # type: ignore[no-untyped-call]
        casts = any(param.dtype != self._masters[name].dtype for name, param in self._own.items())
        self._adds = casts or not alone

    def forward(self, *batch: Any) -> Any:
        """Run the module with casts of the current masters."""
        with torch.no_grad():
            for name, param in self._own.items():
                param.copy_(self._masters[name])
        compute, output = self._precision.compute, self._precision.output
        result = self._module(*(batch if compute is None else cast_floats(batch, compute)))
        return result if output is None else cast_floats(result, output)

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the masters."""
        yield from self._masters.items()

    def state_dict(self, *_: Any, **__: Any) -> Any:
        """Return masters and buffers under all their names."""
        masters = {self._own[name]: master.detach() for name, master in self._masters.items()}
        return {name: masters.get(entry, entry) for name, entry in self._module.state_dict(keep_vars=True).items()}

    def zeros(self, name: str) -> Tensor:
        """Return a zero gradient sum."""
        return torch.zeros(self._own[name].shape, dtype=self._sum_dtype(name))

    def _sum_dtype(self, name: str) -> torch.dtype:
        return self._precision.reduce_of(self._masters[name].dtype) if self._adds else self._own[name].dtype

    def _catch(self, name: str, param: Tensor) -> None:
        assert param.grad is not None
        grad, param.grad = param.grad.detach(), None
        dense = grad.to_dense() if grad.is_sparse else grad
        self.sums[name] = (self.sums[name] + dense if name in self.sums else dense).to(self._sum_dtype(name))


def _master(param: nn.Parameter, precision: Precision) -> nn.Parameter:
    dtype = precision.master_of(param.dtype, trainable=param.requires_grad)
    return nn.Parameter(param.detach().to(dtype, copy=True), param.requires_grad)
