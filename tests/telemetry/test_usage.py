"""`traffic()` and `memory()`: exact, against what the transport was given and what tensors there are."""

import gc
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import shardlite.comm.context
from shardlite import AdamW, Precision, ShardLite
from shardlite.comm.traffic import Tally, Traffic
from shardlite.params.layout import ARENA_ALIGN, round_up
from tests.support.ranks.frozen import freeze
from tests.support.transports.delegating import Counted
from tests.support.twins.sharded import slow, take_step

WIDTH = 128
UNITS = 6
BLOCK = sum(-(-numel // 32) * 32 for numel in (WIDTH * WIDTH, WIDTH))
"""Padded elements of one block; a multiple of 128, so that no shard of 2 or 4 ranks is padded further."""


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(UNITS)])


def step(model: ShardLite, optimizer: AdamW) -> None:
    model(torch.ones(2, WIDTH)).pow(2).sum().backward()
    model.clip_grad_norm_(1.0)
    take_step(optimizer)


def totals(model: ShardLite) -> tuple[int, int]:
    sent = [each for purposes in model.traffic().values() for each in purposes.values()]
    return sum(each.messages for each in sent), sum(each.nbytes for each in sent)


def by_stage(*world_sizes: int) -> pytest.MarkDecorator:
    """Run all stages at two ranks, the last at four: at two, the part of a rank is as large as all other parts."""
    cases = [(ranks, stage) for ranks in world_sizes for stage in range(4)]
    fast = [case for case in cases if case[0] == 2 or case == (4, 3)]
    slow = [pytest.param(*case, marks=pytest.mark.slow) for case in cases if case not in fast]
    return pytest.mark.parametrize(("group", "stage"), [*fast, *slow], indirect=["group"])


@by_stage(2, 4)
@pytest.mark.parametrize("compute", [None, slow(torch.bfloat16)])
@pytest.mark.sample(2)
def test_traffic_is_exact_and_as_zero_has_it(group, stage, compute):
    """Per step and rank: `(W-1)/W` of the padded bytes for each time that a unit goes round.

    It is what the transport has sent, once everything agrees with it.
    """
    tally = Tally()
    context = shardlite.comm.context

    def counting(connect):
        return lambda *args, **options: Counted(connect(*args, **options), tally)

    ways = {name: counting(getattr(context, name)) for name in ("connect", "connect_hosts")}
    with mock.patch.multiple(context, **ways):
        model = ShardLite(net(), stage=stage, group=group, precision=Precision(compute=compute))
        optimizer = AdamW(model.parameters())
        for _ in range(2):
            step(model, optimizer)
        before = model.traffic()
        step(model, optimizer)
        after = model.traffic()
        model.full_state_dict()
        assert totals(model) == (tally.messages, tally.nbytes)
    sent = {}
    for unit, purposes in after.items():
        for purpose, each in purposes.items():
            earlier = before[unit][purpose]
            sent[unit, purpose] = each.calls - earlier.calls, each.nbytes - earlier.nbytes
    weight = 4 if compute is None else 2
    share = BLOCK * (group.size() - 1) // group.size()
    for i in range(UNITS):
        rounds = 2 if stage == 0 else 1  # an all-reduce is a reduce-scatter and an all-gather
        assert sent[str(i), "reduce"] == (1, rounds * share * 4)
        # At stage 3 the last blocks are still there when the backward comes, and the first needs no weight in it.
        expected = {0: 0, 1: 1, 2: 1, 3: 1 if i in (0, UNITS - 2, UNITS - 1) else 2}[stage]
        assert sent.get((str(i), "gather"), (0, 0)) == (expected, expected * share * weight)
    assert sent["(no unit)", "gradient flags"][0] == 1
    assert sent["(no unit)", "norm"][0] == 1  # at every stage a rank knows the squares of its own part only
    # Some numbers, whole to each other rank at once.
    assert sum(nbytes for (unit, _), (_, nbytes) in sent.items() if unit == "(no unit)") < 120 * group.size()


def unclipped_step(model: ShardLite, optimizer: AdamW) -> None:
    model(torch.ones(2, WIDTH)).pow(2).sum().backward()
    optimizer.step()


def living() -> int:
    """Return the bytes of all tensors that the garbage collector looks at, each storage once."""
    while gc.collect():  # what finalisers let go is found by the next collection
        pass
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor):
            for tensor in (thing, *([thing.grad] if thing.is_leaf and thing.grad is not None else [])):
                storage = tensor.untyped_storage()
                storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


NOT_OF_ONE_MODEL = ("mailboxes", "idle shared memory", "chunks of a step", "messages")


@by_stage(1, 2, 4)
def test_memory_is_what_there_is_and_as_zero_has_it(group, stage):
    freeze()
    model = ShardLite(net(), stage=stage, group=group, prefetch=0)
    optimizer = AdamW(model.parameters())
    unclipped_step(model, optimizer)
    memory = model.memory()
    counted = sum(held.now for purpose, held in memory.items() if purpose not in NOT_OF_ONE_MODEL)
    small = 8 * 4096  # placeholders, version counts, flags
    assert counted <= (there := living()) <= counted + small, (counted, there)
    optimizer.zero_grad()
    assert model.memory()["gradients"].now == 0
    assert model.memory()["gradients"].peak == memory["gradients"].now
    model.ledger.reset_peak()
    assert model.memory()["gradients"].peak == 0
    held = {purpose: each.now for purpose, each in memory.items()}
    own = UNITS * BLOCK // group.size() * 4
    assert held["parameters"] == round_up(UNITS * BLOCK // (group.size() if stage == 3 else 1), ARENA_ALIGN) * 4
    assert held["gradients"] == (own if stage >= 2 else own * group.size())
    stepped = own if stage >= 1 else own * group.size()
    assert held["optimizer state"] == 2 * stepped + 2 * UNITS * 4  # and the step count of each parameter
    assert held.get("gradient buckets", 0) == 0
    assert held.get("gather buffers", 0) == 0


def test_on_a_gpu_time_counts_from_the_first_question():
    gpu = torch.device("cuda")
    traffic = Traffic(gpu)
    traffic.tally("reduce", "a unit")
    event = mock.Mock(**{"query.return_value": True, "elapsed_time.return_value": 250.0})
    cuda = {"Event": mock.Mock(return_value=event), "is_current_stream_capturing": mock.Mock(return_value=False)}
    with mock.patch.multiple(torch.cuda, **cuda):
        for counted in (0.0, 0.25):
            with traffic.running("reduce", "a unit"), traffic.waiting("reduce", "a unit"):
                assert event.record.called == bool(counted)
            sent = traffic.by_unit()["a unit"]["reduce"]
            assert (sent.calls, sent.seconds, sent.exposed) == (1, counted, counted)
