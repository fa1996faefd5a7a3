"""Divide the gradients of a single rank by counts. There is no reduction, so autograd adds them up in the shards."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import local
from weakref import ref

import torch
from torch import Tensor

from shardlite.errors import PhaseError
from shardlite.grads.scale import STATE_NUMEL, UNCOUNTED, Scale, divide, divisor_of, quotient
from shardlite.params import Flat


class SoloScale(Scale):
    """Divides the gradients of a single rank by counts. Autograd adds these gradients up in `.grad` of the shards.

    Each gradient is divided before it is added. When a backward begins, the gradients of earlier backwards are
    rescaled: the new total, which includes the count of this backward, divides them. Inside `no_sync()`, they are
    multiplied by their total.
    """

    def __init__(self, flats: Iterable[Flat], device: torch.device, accumulates: Callable[[], bool]) -> None:
        """Initialize without hooks. `accumulates` returns whether a later backward ends the accumulation."""
        super().__init__(device)
        self._shards = [shard for flat in flats for shard in flat.shards]
        self._complex = [shard for shard in self._shards if shard.is_complex()]
        self._accumulates = accumulates
        self._hooked: set[Tensor] = set()
        self._task = -1  # the latest graph task
        self._divisor: Tensor | None = None  # the divisor of gradients. `None`: they are not divided yet

    def count(self, items: float | Tensor) -> None:
        """Set the number of items in the next backward, as `Scale.count` does."""
        super().count(items)
        for shard in self._shards:
            if shard.requires_grad and shard not in self._hooked:
                self._hooked.add(shard)
                # The reference is weak, because the garbage collector cannot traverse hooks.
                shard.register_hook(partial(_divided, ref(self)))  # type: ignore[no-untyped-call]

    def before_step(self) -> None:
        """Check that gradients are divided. Resolve conjugate views, which PyTorch's optimizers cannot step.

        Raises:
            PhaseError: gradients were counted, but the accumulation has not ended.
        """
        if self.counted and self._divisor is None:
            raise PhaseError(
                "gradients were accumulated with counts, but not divided: run the last backward before a step outside "
                "of no_sync(), or drop the gradients with zero_grad() of the model"
            )
        for shard in self._complex:
            if shard.grad is not None and shard.grad.is_conj():
                shard.grad = shard.grad.resolve_conj()

    def reset(self) -> None:
        """Forget the counts of gradients that were used or dropped."""
        super().reset()
        self._divisor = None

    def divided(self, grad: Tensor) -> Tensor:
        """Return a gradient that autograd is about to add to `.grad`, divided if the accumulation ends.

        Raises:
            PhaseError: earlier backwards of the accumulation were counted, but not this one.
        """
        # Nested backwards have tasks of their own. Their numbers grow, and the outermost task has the lowest number.
        task = torch._C._current_graph_task_id()
        if task > self._task:
            self._task = task
            if self.is_next_counted or not _nesting.depth:
                self._begin()
        return grad if self._divisor is None else quotient(grad, self._divisor)

    def _begin(self) -> None:
        version, graded = sum(shard._version for shard in self._shards), self._graded()
        if not graded or (self._divisor is not None and version != self._version):  # the gradients were dropped or used
            self.reset()
        if self._next is None:
            if self.counted:
                raise PhaseError(UNCOUNTED)
            return
        self.begin_backward(counts=True)
        before, self._divisor, self._version = self._divisor, None, version
        share = self.share()
        assert share.digits is not None, "the backward was counted"
        if not self._accumulates():
            total = share.total(torch.cat([torch.zeros_like(share.digits[:STATE_NUMEL]), share.digits]))
            self._divisor = divisor_of(total)
        if self._backwards > 1 and before is not self._divisor:
            one = torch.ones((), dtype=torch.float64, device=self._device)
            for grad in graded:
                divide(grad, (one if self._divisor is None else self._divisor) / (one if before is None else before))

    def _graded(self) -> list[Tensor]:
        return [shard.grad for shard in self._shards if shard.grad is not None]


def _divided(scale: "ref[SoloScale]", grad: Tensor) -> Tensor:
    there = scale()
    return grad if there is None else there.divided(grad)


class _Nesting(local):
    depth = 0


_nesting = _Nesting()
"""How many backwards of this thread run inside another backward. A nested backward runs on the thread that calls it."""


@contextmanager
def nested_backward() -> Iterator[None]:
    """Mark a backward that runs inside another, as in reentrant checkpointing. Both are one backward of the program."""
    _nesting.depth += 1
    try:
        yield
    finally:
        _nesting.depth -= 1
