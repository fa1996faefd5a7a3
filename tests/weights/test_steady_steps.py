"""A step in which all ranks do the same waits for no negotiation; ranks that diverge are still served."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardlite import AdamW, ShardLite
from tests.support.internals import context, gatherer
from tests.support.models.branching import WIDTH, Branching
from tests.support.patience import seconds
from tests.support.twins.sharded import same_states, take_step


class Trained:
    """A wrapped model on one of two ranks, and signals between the two."""

    def __init__(self, group: dist.ProcessGroup, **options: Any) -> None:
        torch.manual_seed(0)
        self.rank = group.rank()
        self.model = ShardLite(Branching(), group=group, **options)
        self.route = [0, 1, 2, 3]
        self.optimizer = AdamW(self.model.parameters(), lr=0.1)
        self._store = dist.PrefixStore(
            f"signals of {context(self.model).instance}", dist.distributed_c10d._get_default_store()
        )

    def signal(self, what: str) -> None:
        self._store.set(what, "")

    def wait_for(self, what: str) -> None:
        self._store.wait([what], timedelta(seconds=seconds(30)))

    def loss(self) -> Tensor:
        return self.model(torch.ones(2, WIDTH) + self.rank, self.route, False).square().mean()

    def step(self) -> None:
        self.loss().backward()
        self.model.clip_grad_norm_(1.0)
        take_step(self.optimizer)

    def hold_rounds(self, until: Callable[[], None]) -> None:
        """Let each round of negotiation of this rank begin when something has happened."""
        negotiation = gatherer(self.model).passes._negotiation
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
        gatherer(trained.model).passes._collect(lambda _: True)
        trained.hold_rounds(both_are_at_the_end)
    for step in range(3):
        now[0] = step
        trained.step()
        trained.signal(f"{group.rank()} has ended {step}")
        if group.rank() == which:
            gatherer(trained.model).passes._collect(lambda _: True)


def test_no_rank_waits_in_a_step_for_the_rounds_of_another(cluster):
    """Nor for its own. Were one needed before the next pass of its kind, it would be waited for until the timeout."""
    for which in range(2):
        cluster.check(held_body, 2, which)


def test_a_rank_is_served_by_ranks_that_are_a_pass_ahead(group: dist.ProcessGroup) -> None:
    """Rank 1 needs two blocks that the order does not have, while rank 0 is in the backward."""
    gradients = []
    for stage in (3, 2):
        trained = Trained(group, stage=stage)
        trained.route = [0, 3]
        for _ in range(2):
            trained.step()
        if group.rank() == 1:
            trained.route = [0, 1, 2, 3]
            first = trained.model.module.blocks[0]
            first.register_forward_hook(lambda *_: trained.wait_for("the backward"))  # noqa: B023 (called before the next turn)
            trained.loss().backward()
        else:
            loss = trained.loss()
            trained.signal("the backward")
            loss.backward()
        gradients.append(
            {name: shard.grad for name, shard in trained.model.named_parameters() if shard.grad is not None}
        )
    assert gradients[0].keys() == gradients[1].keys()
    assert any("blocks.1" in name and grad.numel() and grad.any() for name, grad in gradients[0].items())
    same_states("state", gradients[0], gradients[1])
