"""Late messages, short messages, and an allocator that reuses memory at once, for models of large units."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from shardlite.comm import broadcast, chunking, context
from tests.support.models.small import Residual
from tests.support.transports.delays import Delayed
from tests.support.twins.sharded import Turn

WIDTH, HIDDEN = 512, 1024
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


@contextmanager
def under_pressure(
    make: Callable[[Callable[[], nn.Module]], Any], world_size: int, *, seed: int, blocks: int = 3, hidden: int = HIDDEN
) -> Iterator[Any]:
    """Make a `Pair` or a `Duo` of large blocks by `make(module)`, with late and short messages; press its allocator."""

    def module() -> nn.Module:
        return nn.Sequential(*(Residual(WIDTH, hidden) for _ in range(blocks)))

    full = 4 * (2 * WIDTH * HIDDEN + WIDTH + HIDDEN)
    sizes = [full, full // 2, full // world_size, full // 2 // world_size]  # of fp32 and bf16 buffers, and of shards
    with late_messages(seed), short_messages(1 << 19):
        trained = make(module)
        with pressed_allocator(getattr(trained, "inside", trained).model.module, sizes):
            yield trained
