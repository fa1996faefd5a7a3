"""The order of events, written out: gathers, releases, evictions, reductions and the step."""

import torch
from torch import Tensor, nn

from shardlite import AdamW, ShardLite
from tests.support.models.residual import WIDTH, Chain, net
from tests.support.models.small import run_all


class Three(Chain):
    """Two blocks and, in the root, what is around them."""

    def __init__(self) -> None:
        super().__init__(net(2), first=nn.Linear(4, WIDTH, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


def train_step(model: ShardLite, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Return the events of forward, of backward, and of the step."""
    loss = model(torch.ones(2, 4))
    forward = model.trace.take()
    loss.backward()
    backward = model.trace.take()
    optimizer.step()
    optimizer.zero_grad()
    return [forward, backward, model.trace.take()]


def events_body(group, prefetch):
    model = ShardLite(Three(), group=group, prefetch=prefetch)
    optimizer = AdamW(model.parameters())
    return [train_step(model, optimizer) for _ in range(3)]


def test_without_prefetch_units_share_one_buffer(cluster):
    forward = [
        "gather (root)",
        "wait (root)",
        "gather blocks.0",
        "wait blocks.0",
        "reshard blocks.0",
        "evict blocks.0",
        "gather blocks.1",
        "wait blocks.1",
        "reshard blocks.1",
        "reshard (root)",
    ]
    backward = [
        "reshard blocks.1",  # it was still there: held by its handles, no gather
        "reduce blocks.1",
        "evict blocks.1",
        "gather blocks.0",
        "wait blocks.0",
        "reshard blocks.0",
        "reduce blocks.0",
        "reduce (root)",  # its backward does not need its weight: no gather
        "evict (root)",  # a step will follow: nothing is worth keeping
        "evict blocks.0",
    ]
    # From the second step on it is known which use is the last, and the buffer is freed at once.
    known = [*backward[:6], "evict blocks.0", *backward[6:-1]]
    for first, second, third in cluster.run(events_body, 2, 0):
        assert first == [forward, backward, ["step"]]
        assert second == [forward, known, ["step"]]
        assert third == second


def test_from_the_second_step_on_the_next_unit_is_gathered_ahead(cluster):
    forward = [
        "gather (root)",
        "gather blocks.0",  # ahead, while the root is on its way
        "wait (root)",
        "gather blocks.1",
        "wait blocks.0",
        "reshard blocks.0",
        "wait blocks.1",
        "reshard blocks.1",
        "reshard (root)",
    ]
    backward = [
        "reshard blocks.1",  # both blocks still have their buffers: no gather
        "evict blocks.1",
        "reduce blocks.1",
        "reshard blocks.0",
        "evict blocks.0",
        "reduce blocks.0",
        "reduce (root)",
        "evict (root)",
    ]
    for _, second, third in cluster.run(events_body, 2, 1):
        assert second == [forward, backward, ["step"]]
        assert third == second


def test_leaving_the_recorded_path_is_survived_and_recorded(group):
    """A pass that leaves the recorded path is right, and gathers nothing ahead from there on."""

    class Skips(Three):
        skip = False

        def forward(self, x: Tensor) -> Tensor:
            return run_all(self.blocks[1 if self.skip else 0 :], self.first(x)).square().mean()

    plain = Skips()
    model = ShardLite(plain, group=group, prefetch=1)
    optimizer = AdamW(model.parameters())
    steps = []
    for plain.skip in (False, False, True, True):
        steps.append(train_step(model, optimizer)[0])
    full, short = ["wait (root)", "wait blocks.0", "wait blocks.1"], ["wait (root)", "wait blocks.1"]
    waits = [[event for event in forward if event.startswith("wait")] for forward in steps]
    assert waits[:2] == [full, full]
    assert waits[2:] == [short, short]


def test_the_order_of_reductions_is_learnt_in_the_first_backward(group):
    """The order of reductions is the one in which gradients came in the first backward."""

    class Unusual(Chain):
        def forward(self, x: Tensor) -> Tensor:
            return run_all([self.blocks[2], self.blocks[0], self.blocks[1]], x).square().mean()

    model = ShardLite(Unusual(net()), group=group, prefetch=0)
    reductions = []
    for _ in range(2):
        model(torch.ones(2, WIDTH)).backward()
        reductions.append([event for event in model.trace.take() if event.startswith("reduce")])
    first, second = reductions
    assert sorted(first) == sorted(second)
    assert second == ["reduce blocks.1", "reduce blocks.0", "reduce blocks.2"]


def test_a_backward_that_steps_gathers_nothing_ahead_on_a_cpu(group):
    model = ShardLite(Three(), group=group)
    optimizer = AdamW(model.parameters(), in_backward=True)
    expected = [
        "evict blocks.0",  # what the forward has left, but for the unit that is needed first
        "reshard blocks.1",
        "reduce blocks.1",
        "evict blocks.1",
        "gather blocks.0",
        "wait blocks.0",
        "reshard blocks.0",
        "evict blocks.0",
        "reduce blocks.0",
        "reduce (root)",
        "evict (root)",
    ]
    first, second, third = [train_step(model, optimizer)[1] for _ in range(3)]
    assert "gather blocks.0" not in first, "it is not known yet that this one steps"
    assert second == third == expected
