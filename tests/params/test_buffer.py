"""A buffer knows whether tensors outside of the library view it, and keeps the library's own views."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardlite.params import Buffer


def test_own_views_are_made_once_and_are_no_escape():
    buffer, made = Buffer(torch.empty(64, dtype=torch.uint8)), []

    def halves(memory):
        made.append(memory)
        return [memory[:32], memory[32:]]

    kept = buffer.views("a unit", halves)
    assert buffer.views("a unit", halves) is kept
    assert buffer.views("another unit", halves) is not kept
    assert len(made) == 2
    assert not buffer.escaped()
    outside = kept[0].view(torch.float32)
    assert buffer.escaped()
    del outside
    assert not buffer.escaped()


class Mode(TorchDispatchMode):
    """A mode of the program."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("what", ["a mode", "a transform"])
def test_views_that_may_be_of_another_kind_are_not_kept(what):
    buffer = Buffer(torch.zeros(64, dtype=torch.uint8))

    def whole(memory):
        return [memory.view(torch.float32)]

    if what == "a mode":
        with Mode():
            inside = buffer.views("a unit", whole)
    else:
        inside = []
        torch.func.vmap(lambda x: inside.extend(buffer.views("a unit", whole)) or x)(torch.zeros(2))
    later = buffer.views("a unit", whole)
    assert later is not inside
    assert type(later[0]) is torch.Tensor
    assert buffer.views("a unit", whole) is later
