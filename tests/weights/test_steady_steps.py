"""A step in which all ranks do the same waits for no round of negotiation; ranks that part are served all the same."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardlite import AdamW, ShardLite
from tests.support.models.small import Residual
from tests.support.patience import seconds

WIDTH = 8


class Blocks(nn.Module):
    """Residual blocks; some of them may be left out, and something may be done between the first two."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Residual(WIDTH, 12) for _ in range(4)])
        self.skipped: set[int] = set()
        self.between: Callable[[], None] = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for place, block in enumerate(self.blocks):
            if place == 1:
                self.between()
            if place not in self.skipped:
                x = block(x)
        return x.square().mean()


class Trained:
    """A wrapped model on one of two ranks, and signals between the two."""

    def __init__(self, group: dist.ProcessGroup, **options: Any) -> None:
        torch.manual_seed(0)
        self.rank = group.rank()
        self.model = ShardLite(Blocks(), group=group, **options)
        self.optimizer = AdamW(self.model.parameters(), lr=0.1)
        self._store = dist.PrefixStore(
            f"signals of {self.model._context.instance}", dist.distributed_c10d._get_default_store()
        )

    def signal(self, what: str) -> None:
        self._store.set(what, "")

    def wait_for(self, what: str) -> None:
        self._store.wait([what], timedelta(seconds=seconds(30)))

    def step(self) -> None:
        self.model(torch.ones(2, WIDTH) + self.rank).backward()
        self.model.clip_grad_norm_(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def hold_rounds(self, until: Callable[[], None]) -> None:
        """Let each round of negotiation of this rank begin when something has happened."""
        negotiation = self.model._bridge.gatherer._negotiation
        agree = negotiation.agree

        def held(*arguments: Any) -> Any:
            until()
            return agree(*arguments)

        negotiation.agree = held


def held_body(group: dist.ProcessGroup, which: int) -> None:
    """Rank `which` joins the rounds of a step when both ranks have ended that step."""
    trained = Trained(group)
    for _ in range(2):
        trained.step()
    now = [0]  # of the step whose rounds are held: those of the last one are over when it begins

    def both_are_at_the_end() -> None:
        for rank in range(2):
            trained.wait_for(f"{rank} has ended {now[0]}")

    if group.rank() == which:
        trained.model._bridge.gatherer._collect(lambda _: True)
        trained.hold_rounds(both_are_at_the_end)
    for step in range(3):
        now[0] = step
        trained.step()
        trained.signal(f"{group.rank()} has ended {step}")
        if group.rank() == which:
            trained.model._bridge.gatherer._collect(lambda _: True)


def test_no_rank_waits_in_a_step_for_the_rounds_of_another(cluster):
    """Nor for its own. Were one needed before the next pass of its kind, it would be waited for until the timeout."""
    for which in range(2):
        cluster.check(held_body, 2, which)


def behind_body(group: dist.ProcessGroup) -> None:
    """Rank 1 needs two blocks that the order does not have, while rank 0 is in the backward."""
    gradients = []
    for stage in (3, 2):
        trained = Trained(group, stage=stage)
        model = trained.model
        model.module.skipped = {1, 2}
        for _ in range(2):
            trained.step()
        if group.rank() == 1:
            model.module.skipped = set()
            model.module.between = lambda: trained.wait_for("the backward")  # noqa: B023 (called before the next turn)
            model(torch.ones(2, WIDTH)).backward()
        else:
            loss = model(torch.ones(2, WIDTH))
            trained.signal("the backward")
            loss.backward()
        gradients.append({name: shard.grad for name, shard in model.named_parameters()})
    assert gradients[0].keys() == gradients[1].keys()
    assert any("blocks.1" in name and grad.numel() and grad.any() for name, grad in gradients[0].items())
    for name, grad in gradients[0].items():
        assert torch.equal(grad, gradients[1][name]), name


def test_a_rank_is_served_by_ranks_that_are_a_pass_ahead(cluster):
    cluster.check(behind_body, 2)
