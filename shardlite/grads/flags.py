"""Find gradients with NaNs or infinities, and report their names."""

import warnings
from collections.abc import Iterable, Sequence

import torch
from shardlite_kernels import send
from torch import Tensor

from shardlite.errors import NonFiniteWarning
from shardlite.params import Flat, as_real, as_they_are

_MOST_SENT = 64


class SentNumbers:
    """A cache of tensors of numbers on a device. Calls with the same numbers copy nothing from the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sent: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, numbers: Sequence[int]) -> Tensor:
        """Return `numbers` as an int32 tensor [n] on the device. The caller must not write to the tensor."""
        key = tuple(numbers)
        if key not in self._sent:
            if len(self._sent) > _MOST_SENT:
                self._sent.clear()
            self._sent[key] = send(key, torch.int32, self._device)
        return self._sent[key]


class SoloGradientFlags:
    """The flag for gradients with a NaN or infinity, if there is a single rank.

    The flag is computed at the optimizer's step. The gradients of a single rank are autograd's own tensors.
    """

    def __init__(self, flats: Iterable[Flat], device: torch.device, *, diagnose: bool) -> None:
        self._device = device
        self._diagnose = diagnose
        self._names = {
            shard: slot.name for flat in flats for shard, slot in zip(flat.shards, flat.layout.slots, strict=True)
        }
        self._hooked: set[Tensor] = set()
        # The list holds the flag until the next gradient arrives. Hooks reference only this list, because the garbage
        # collector cannot traverse hooks.
        self._known: list[Tensor] = []

    def nonfinite(self) -> Tensor | None:
        """Return a tensor [], which is 1 if a gradient has a NaN or infinity, else 0.

        If there are no gradients, return `None`. Until the next backward, calls return the same tensor.
        """
        known = self._known
        for shard in self._names:  # finds shards at the first call, and unfrozen ones later
            if shard.requires_grad and shard not in self._hooked:
                known.clear()
                self._hooked.add(shard)
                shard.register_post_accumulate_grad_hook(lambda _: known.clear())  # type: ignore[no-untyped-call]
        grads = {name: shard.grad for shard, name in self._names.items() if shard.grad is not None}
        if not grads:
            self._known.clear()
        elif not self._known:
            values = {name: grad._values() if grad.is_sparse else grad for name, grad in grads.items()}
            bad = any_bad(list(values.values()), self._device)
            self._known.append(bad.to(torch.float32))
            if self._diagnose and bad:
                warn_of([(0, name) for name, value in values.items() if any_bad([value], self._device)][:1])
        return self._known[0] if self._known else None


def warn_of(found: Sequence[tuple[int, str]]) -> None:
    """Warn about gradients that are not finite, given the rank and the parameter name of each."""
    where = ", ".join(f"of {name!r} on rank {rank}" for rank, name in found)
    warnings.warn(
        f"gradients are not finite: {where or 'only in sums and accumulated gradients'}. The step is skipped",
        NonFiniteWarning,
        stacklevel=3,
    )


def largest(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the largest magnitude of each tensor, [], or NaN if the tensor has a NaN. No tensor may be empty."""
    with as_they_are():  # otherwise the library would warn about computations on shards, which are intended here
        if tensors and tensors[0].is_cuda:
            return list(torch._foreach_norm(list(tensors), float("inf")))
        # On a CPU `_foreach_norm` is slow in torch 2.13.
        return [torch.maximum(low.abs(), high.abs()) for low, high in map(torch.aminmax, tensors)]


def any_bad(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return an int32 tensor [], which is 1 if any of the tensors has a NaN or infinity, else 0."""
    found = largest([as_real(tensor) for tensor in tensors if tensor.numel()])
    if not found:
        return torch.zeros((), dtype=torch.int32, device=device)
    alike = len({each.dtype for each in found}) == 1
    return (~torch.stack(found if alike else [each.double() for each in found]).isfinite()).any().to(torch.int32)
