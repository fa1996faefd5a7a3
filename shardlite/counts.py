"""How many steps each parameter has made, and a step that follows from it: on the CPU, and on a device.

A parameter without a gradient keeps its count, and a step that found an infinity counts for none. On the CPU all this
is read where it is needed. A device computes it in the order of its stream and is never waited for: the host then knows
no counts, only which parameters must have equal ones, because they had the same history.

The flag and the scale are those that `torch.amp.GradScaler` hands to a fused optimizer; anybody else may set them too.

Legend: `R` rows, one per parameter on the device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any, TypeAlias

import torch
from shardlite_kernels import Hyper, adamw, adamw_cpu, adamw_scalars, hyper_table, send, use_triton
from torch import Tensor

Group: TypeAlias = dict[str, Any]


class StepCounts(ABC):
    """The step counts of the parameters on one device."""

    history: Sequence[Hashable]
    """By row, during a step: rows with equal entries have equal counts."""

    def __init__(self, group_of: Sequence[int], device: torch.device) -> None:
        self.steps = torch.zeros(len(group_of), dtype=torch.float32, device=device)
        """Steps done [R]."""

    @abstractmethod
    def begin(self, groups: Sequence[Group], found_inf: Tensor | None, grad_scale: Tensor | None) -> None:
        """Prepare a step. It changes nothing if `found_inf` is not zero; gradients are divided by `grad_scale`."""

    @abstractmethod
    def update(self, tensors: tuple[Tensor, Tensor, Tensor, Tensor], row: int, group: int) -> None:
        """Step flat parameters, with their gradients and moments, which all have the count of `row`."""

    @abstractmethod
    def end(self, rows: Sequence[int]) -> None:
        """Count the step for `rows`."""


class HostCounts(StepCounts):
    """For parameters in CPU memory."""

    def begin(self, groups: Sequence[Group], found_inf: Tensor | None, grad_scale: Tensor | None) -> None:
        """Read everything."""
        self.history: list[float] = self.steps.tolist()
        self._hypers = [_hyper(group, float(group["lr"])) for group in groups]
        self._scale = None if grad_scale is None else float(grad_scale)
        self._skip = found_inf is not None and float(found_inf) != 0

    def update(self, tensors: tuple[Tensor, Tensor, Tensor, Tensor], row: int, group: int) -> None:
        """Step by PyTorch's operator."""
        if not self._skip:
            adamw_cpu(*tensors, step=self.history[row] + 1, hyper=self._hypers[group], grad_scale=self._scale)

    def end(self, rows: Sequence[int]) -> None:
        """Count the step for `rows`."""
        if not self._skip:
            if len(rows) == len(self.steps):
                self.steps += 1
            else:
                self.steps[list(rows)] += 1


class DeviceCounts(StepCounts):
    """For parameters that kernels step: the numbers stay where the kernels read them.

    What a step needs of the host is sent only when it has changed, by `send`, which waits for nothing, and single
    numbers are arguments of a fill. Counts are read once after they were set from outside.
    """

    def __init__(self, group_of: Sequence[int], device: torch.device) -> None:
        super().__init__(group_of, device)
        self._group_of = send(group_of, torch.int64, device)
        self._version = -1  # of `steps`, when last written here
        self._sent: list[Hyper] = []
        self._stepped: set[int] = set()

    def begin(self, groups: Sequence[Group], found_inf: Tensor | None, grad_scale: Tensor | None) -> None:
        """Compute the scalars of all rows, and tell rows apart whose counts were set from outside."""
        if self.steps._version != self._version:
            self.history = self.steps.tolist()  # waits: after a state was made, loaded or changed by hand
        device = self.steps.device
        self._found_inf = None if found_inf is None else _on(device, found_inf)
        self._unscale = grad_scale is not None
        self._scalars = adamw_scalars(
            self.steps + 1,
            self._hyper(groups).index_select(0, self._group_of),
            found_inf=self._found_inf,
            grad_scale=None if grad_scale is None else _on(device, grad_scale),
        )

    def update(self, tensors: tuple[Tensor, Tensor, Tensor, Tensor], row: int, group: int) -> None:
        """Step by the kernel, which reads the scalars of `row`."""
        adamw(*tensors, self._scalars[row], unscale=self._unscale)

    def end(self, rows: Sequence[int]) -> None:
        """Count the step for `rows`, if it found no infinity."""
        stepped = set(rows)
        if stepped != self._stepped:
            weights = [float(row in stepped) for row in range(len(self.steps))]
            self._stepped, self._weights = stepped, send(weights, torch.float32, self.steps.device)
        self.steps += self._weights if self._found_inf is None else self._weights * (self._found_inf == 0)
        self._version = self.steps._version
        if len(stepped) < len(self.steps):
            self._part(stepped)

    def _part(self, stepped: set[int]) -> None:
        """Give those who made a step and those who did not another history from now on."""
        names: dict[Hashable, int] = {}
        parted = [(past, row in stepped) for row, past in enumerate(self.history)]
        self.history = [names.setdefault(past, len(names)) for past in parted]

    def _hyper(self, groups: Sequence[Group]) -> Tensor:
        """The hyper-parameters of the groups [G, 5]; a learning rate that is here already is copied here."""
        here = [_is_here(group["lr"], self.steps.device) for group in groups]
        hypers = [
            _hyper(group, 0.0 if is_here else float(group["lr"])) for group, is_here in zip(groups, here, strict=True)
        ]
        if hypers != self._sent:
            self._table, self._sent = hyper_table(hypers, self.steps.device), hypers
        for row, (group, is_here) in enumerate(zip(groups, here, strict=True)):
            if is_here:
                self._table[row, 0].copy_(group["lr"].detach().reshape(()), non_blocking=True)
        return self._table


def counts_for(param: Tensor) -> type[StepCounts]:
    """Which step counts go with parameters like `param`."""
    return DeviceCounts if use_triton(param) else HostCounts


def _hyper(group: Group, lr: float) -> Hyper:
    beta1, beta2 = group["betas"]
    return Hyper(lr, float(beta1), float(beta2), float(group["eps"]), float(group["weight_decay"]))


def _is_here(value: Any, device: torch.device) -> bool:
    """Whether `value` is a tensor that the host would have to wait for."""
    return isinstance(value, Tensor) and (value.device == device or value.device.type != "cpu")


def _on(device: torch.device, value: Any) -> Tensor:
    """A number, or a tensor of one, as a scalar [] in fp32 on `device`, without waiting for it."""
    if _is_here(value, device):
        return value.detach().reshape(()).to(device, torch.float32, non_blocking=True)  # type: ignore[no-any-return]
    return torch.full((), float(value), dtype=torch.float32, device=device)
