"""Large tensors, late messages and an allocator under pressure reveal results that are right only by timing.

Memory that is used after it was freed, or before a message has come, holds NaN or another value with some likelihood:
messages start late at random, buffers have the sizes that are allocated and filled with NaN all the time beside them,
and released gather buffers are filled with NaN (`SHARDLITE_POISON=1`, see `conftest.py`).

Legend: `W` ranks.
"""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from shardlite import Precision
from tests.support.models.small import Residual
from tests.support.transports.pressure import WIDTH, on_rows, under_pressure
from tests.support.twins.sharded import Pair, slow

BF16 = Precision(compute=torch.bfloat16, reduce=torch.bfloat16)


@pytest.mark.parametrize(
    ("stage", "group", "precision", "options"),
    [
        (3, 2, BF16, {"prefetch": 2}),
        *(
            slow(*case)
            for case in (
                (3, 3, Precision(), {"prefetch": 2}),
                (3, 2, BF16, {}),
                (2, 2, Precision(), {}),
                (0, 3, Precision(), {}),
                (1, 2, Precision(), {}),
                (2, 3, BF16, {}),
                (3, 2, Precision(), {}),
                (3, 2, Precision(), {"prefetch": 0}),
                (0, 2, BF16, {}),
                (1, 3, BF16, {}),
                (3, 3, BF16, {}),
            )
        ),
    ],
    ids=str,
    indirect=["group"],
)
def test_large_units_survive_late_messages_and_reused_memory(group, stage, precision, options):
    """Several steps with all kinds of accumulation, and an evaluation between two of them."""

    def make(module: Callable[[], nn.Module]) -> Pair:
        return Pair(module, group, stage=stage, units=Residual, precision=precision, **options)

    with under_pressure(make, torch.distributed.get_world_size(group), seed=stage) as pair:
        pair.step(on_rows, clip=0.01)
        pair.step(on_rows, ("local", "sharded", "step"))
        with torch.no_grad():
            pair.model(torch.randn(1, WIDTH))
        pair.step(on_rows, ("sharded", "local", "step"), clip=0.01)
        pair.step(on_rows)
