"""Count the bytes that this rank sends with `torch.distributed` and with ShardLite."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from shardlite.comm.traffic import Tally

_SENT: dict[str, Callable[[int], float]] = {
    "send": lambda ranks: 1,
    "isend": lambda ranks: 1,
    "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "all_gather": lambda ranks: ranks - 1,
    "reduce_scatter": lambda ranks: ranks - 1,
    "all_gather_single": lambda ranks: ranks - 1,
    "all_gather_into_tensor": lambda ranks: ranks - 1,
    "reduce_scatter_single": lambda ranks: ranks - 1,
    "reduce_scatter_tensor": lambda ranks: ranks - 1,
}
"""For each function, the number of times that a call sends its smallest tensor. Collectives are assumed to be rings."""


@dataclass
class Wire:
    """Bytes that this rank has sent so far."""

    sent: float = 0


@contextmanager
def counted() -> Iterator[Wire]:
    """Count the bytes of `torch.distributed` and of ShardLite's messages on all threads within the block."""
    wire, count = Wire(), Tally.count

    def counting(name: str) -> Callable[..., Any]:
        call, times = getattr(dist, name), _SENT[name](dist.get_world_size())

        def run(*args: Any, **kwargs: Any) -> Any:
            tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
            wire.sent += times * min(each.nbytes for each in tensors)
            return call(*args, **kwargs)

        return run

    def count_message(tally: Tally, tensor: Tensor) -> None:
        wire.sent += tensor.nbytes
        count(tally, tensor)

    with ExitStack() as patches:
        for name in _SENT:
            if hasattr(dist, name):
                patches.enter_context(mock.patch.object(dist, name, counting(name)))
        patches.enter_context(mock.patch.object(Tally, "count", count_message))
        yield wire
