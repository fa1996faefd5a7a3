"""The kernel of fake collectives, with a clock that a test moves."""

import pytest
import torch

from bench.gpu import link as fake
from bench.gpu.link import FakeLink


class Clock:
    """A clock that moves by 10 ns whenever it is read."""

    def __init__(self, now):
        self.now = now

    def __call__(self):
        self.now += 10
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock(5000)
    monkeypatch.setattr(fake, "_now", clock)
    return clock


@pytest.mark.parametrize(("free", "until"), [(0, 5010 + 700), (5300, 5300 + 700)])
def test_a_collective_has_the_link_alone_from_when_it_is_free(clock, free, until):
    link = FakeLink(2, torch.device("cpu"))
    link._link[0] = free
    link._launch(torch.zeros(8), torch.ones(4), 700)
    assert link._link.tolist() == [until, 1]
    assert until <= clock.now < until + 10


def test_an_awake_collective_takes_no_time_and_leaves_the_link_free(clock):
    link, target = FakeLink(2, torch.device("cpu")), torch.zeros(8)
    with link.awake():
        link._launch(target, torch.ones(4), 700)
    assert (link._link[0], clock.now) == (5010, 5020)  # read twice: when it begins, and to see that it need not wait
    assert target.tolist() == [1] * 8
    link._launch(target, torch.ones(4), 700)
    assert link._link[0] == 5030 + 700


@pytest.mark.parametrize("numel", [1, 4096, 3 * 4096 + 5])
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8, torch.float64])
def test_it_fills_what_the_reference_fills(clock, monkeypatch, numel, offset, dtype):
    own = torch.arange(numel + offset).to(dtype)[offset:]
    targets = [torch.full((4 * numel + 2 * offset,), 7, dtype=dtype) for _ in range(4)]
    for number, target in enumerate(targets):
        monkeypatch.setattr(fake, "use_triton", lambda _, number=number: number < 2)
        link = FakeLink(4, torch.device("cpu"))
        inside = target[offset : 4 * numel + offset]
        link._launch(inside if number % 2 else inside[:numel], own, 0)
    assert torch.equal(targets[0], targets[2])
    assert torch.equal(targets[1], targets[3])
    assert torch.equal(targets[1][offset:][: 4 * numel].view(4, -1), own.expand(4, -1))


def test_an_all_gather_in_place_keeps_its_own_part(clock):
    target = torch.zeros(16)
    target[:4] = torch.arange(4)
    FakeLink(4, torch.device("cpu"))("_allgather_base", target, target[:4])
    assert target.tolist() == [0, 1, 2, 3] * 4
