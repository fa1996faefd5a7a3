"""Names of units in the traces of `torch.profiler`."""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import profiler
from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shardlite import AdamW, ShardLite
from tests.support.models.residual import WIDTH, Block
from tests.support.twins.sharded import take_step


class Net(nn.Module):
    """Two blocks and, in the root, what is before them; `contexts` are those of activation checkpointing."""

    def __init__(self, contexts=None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.contexts = contexts

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            if self.contexts is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=False, context_fn=self.contexts)
        return x.square().mean()


def plain():
    return nullcontext(), nullcontext()


def selective():
    def policy(context, operator, *args, **options):
        saves = operator is torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def train(model: ShardLite, steps: int) -> list[Tensor]:
    optimizer = AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        take_step(optimizer, model(torch.ones(2, 4)))
    return [param.detach().clone() for param in model.parameters()]


def profiling() -> profile:
    config = _ExperimentalConfig(profile_all_threads=True)  # gathers and reductions run on threads
    return profile(activities=[ProfilerActivity.CPU], experimental_config=config, acc_events=True)  # else 2.11 warns


def profiled(model: ShardLite) -> tuple[dict[str, int], list[Tensor]]:
    """Return how often each of our names is in the profile of a step, and the parameters after it."""
    with profiling() as seen:
        params = train(model, 1)
    ours = [event for event in seen.key_averages() if event.key.startswith("shardlite::")]
    return {event.key.removeprefix("shardlite::"): event.count for event in ours}, params


def names_body(group, stage, contexts):
    names, params = profiled(ShardLite(Net(contexts), stage=stage, group=group))
    unseen = train(ShardLite(Net(contexts), stage=stage, group=group), 1)
    assert all(map(torch.equal, params, unseen))
    return names


def of(action: str, *units: str) -> dict[str, int]:
    return {f"{action} {unit}": 1 for unit in units}


UNITS = ("(root)", "blocks.0", "blocks.1")


def test_each_gather_reduction_and_forward_has_the_name_of_its_unit(cluster):
    for names in cluster.run(names_body, 2, 3, None):
        waits = {name: names.pop(name) for name in list(names) if name.startswith("wait for ")}
        assert names == {
            **of("forward", *UNITS),
            **of("gather", *UNITS),
            **of("reduce", *UNITS),
        }
        # A reduction that is looked at twice counts twice. A gather that has ended is not waited for.
        assert set(waits) - set(of("wait for gather", *UNITS)) == set(of("wait for reduce", *UNITS))


@pytest.mark.parametrize(("stage", "contexts"), [(3, plain), (3, selective), (2, None)])
def test_a_recomputation_is_no_forward(cluster, stage, contexts):
    again = () if contexts is None else UNITS[1:]
    for names in cluster.run(names_body, 2, stage, contexts):
        assert {name for name in names if name.startswith(("forward", "recompute", "reduce"))} == {
            *of("forward", *UNITS),
            *of("reduce", *UNITS),
            *of("recompute", *again),
        }


def test_a_name_ends_with_a_forward_that_raises(group):
    model = ShardLite(Net(), group=group)
    block = model.module.blocks[0].inner
    with profiling() as seen:
        hook = block.register_forward_pre_hook(lambda _, args: (args[0][:, :3],))
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.ones(2, 4))
        hook.remove()
        model(torch.ones(2, 4)).backward()
    assert {event.key: event.count for event in seen.key_averages()}["shardlite::forward blocks.0"] == 2


def test_without_a_profiler_nothing_is_named(group):
    with mock.patch.object(profiler, "record_function", wraps=profiler.record_function) as record:
        train(ShardLite(Net(), group=group), 2)
    names = {call.args[0] for call in record.call_args_list}
    assert names  # PyTorch's own, of optimizers
    assert not [name for name in names if "shardlite" in name]
