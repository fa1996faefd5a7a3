"""Large tensors, late messages and an allocator under pressure: what is right only by timing or luck shows here.

Memory that is used after it was freed, or before a message has come, holds NaN or another value with some likelihood:
messages start late at random, buffers have the sizes that are allocated and filled with NaN all the time beside them,
and released gather buffers are filled with NaN (`SHARDLITE_POISON=1`, see `conftest.py`).

Legend: `W` ranks.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from shardlite import Precision
from shardlite.comm import broadcast, chunking, context
from tests.support.models.small import Residual
from tests.support.transports.delays import Delayed
from tests.support.twins.sharded import Pair, Turn

WIDTH, HIDDEN = 512, 1024
UNITS = 3
LONGEST = 0.006  # seconds of delay of a message


def on_rows(model: Callable[..., Any], turn: Turn) -> Tensor:
    return model(torch.randn(3, WIDTH, generator=turn.generator())).float().square().mean()


@contextmanager
def late_messages(seed: int) -> Iterator[None]:
    """Let models that are wrapped inside have transports with random delays."""
    connect = context.connect
    context.connect = lambda *where, **how: Delayed(connect(*where, **how), seed, longest=LONGEST)
    try:
        yield
    finally:
        context.connect = connect


@contextmanager
def short_messages(nbytes: int) -> Iterator[None]:
    """Let collectives send many messages for each segment, so that they overlap with additions."""
    chunking._cut_of.cache_clear()
    defaults = {"chunk_bytes": nbytes}
    with mock.patch.object(chunking, "CHUNK_BYTES", nbytes), mock.patch.dict(broadcast.__kwdefaults__, defaults):
        yield
    chunking._cut_of.cache_clear()


@contextmanager
def pressed_allocator(module: nn.Module, sizes: list[int]) -> Iterator[None]:
    """Take, fill with NaN and free blocks of these sizes: in a thread all the time, and around each module's passes."""
    over = threading.Event()

    def press(*_: Any) -> None:
        blocks = [torch.full((nbytes // 4,), float("nan")) for nbytes in sizes]
        del blocks

    def press_later(_: nn.Module, __: Any, output: Tensor) -> None:
        press()
        if output.requires_grad:
            output.register_hook(press)

    def press_on() -> None:
        while not over.wait(0.001):
            press()

    thread = threading.Thread(target=press_on, daemon=True)
    with ExitStack() as undo:
        for each in module.modules():
            undo.callback(each.register_forward_pre_hook(press).remove)
            undo.callback(each.register_forward_hook(press_later).remove)
            for param in each.parameters(recurse=False):
                undo.callback(param.register_post_accumulate_grad_hook(press).remove)
        thread.start()
        undo.callback(thread.join)
        undo.callback(over.set)
        yield


def block_sizes(world_size: int) -> list[int]:
    """Return the bytes of a unit's full buffers in fp32 and bf16, and of its shards."""
    full = 4 * (2 * WIDTH * HIDDEN + WIDTH + HIDDEN)
    return [full, full // 2, full // world_size, full // 2 // world_size]


BF16 = Precision(compute=torch.bfloat16, reduce=torch.bfloat16)


@pytest.mark.parametrize(
    ("stage", "group", "precision", "options"),
    [
        (3, 2, BF16, {"prefetch": 2}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
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
def test_large_units_survive_late_messages_and_reused_memory(
    group: Any, stage: int, precision: Precision, options: dict[str, Any]
) -> None:
    """Body of a rank: several steps with all kinds of accumulation, and an evaluation between two of them."""
    world_size = torch.distributed.get_world_size(group)

    def make() -> nn.Module:
        return nn.Sequential(*(Residual(WIDTH, HIDDEN) for _ in range(UNITS)))

    with late_messages(seed=stage), short_messages(1 << 19):
        pair = Pair(make, group, stage=stage, units=Residual, precision=precision, **options)
        with pressed_allocator(pair.model.module, block_sizes(world_size)):
            pair.step(on_rows, clip=0.01)
            pair.step(on_rows, ("local", "sharded", "step"))
            with torch.no_grad():
                pair.model(torch.randn(1, WIDTH))
            pair.step(on_rows, ("sharded", "local", "step"), clip=0.01)
            pair.step(on_rows)
