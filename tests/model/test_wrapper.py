"""The interface of a wrapped model: names, shapes, state dicts, writing full parameters, accumulating."""

import contextlib
import copy
import gc
import threading
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardlite import AdamW, LayoutError, PhaseError, ShardLite
from tests.support.internals import flats, gatherer, units, users
from tests.support.patience import until
from tests.support.twins.sharded import assert_gradients_equal, local_parts

WIDTH = 12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(self.norm(x)))


class Tied(nn.Module):
    """Tied weights, a buffer that is saved and one that is not, an attribute of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.vocabulary = 9
        self.table = nn.Embedding(self.vocabulary, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, self.vocabulary, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


TOKENS = torch.tensor([[1, 4, 2], [8, 0, 4]])


def names_body(group, stage):
    plain = Tied()
    twin = copy.deepcopy(plain)
    model = ShardLite(plain, group=group, stage=stage)
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in twin.named_parameters()]
    assert [n for n, _ in model.named_buffers()] == [n for n, _ in twin.named_buffers()]
    every = dict(model.named_parameters(remove_duplicate=False))
    assert every["head.weight"] is every["table.weight"]
    assert [p.ndim for p in model.parameters()] == [p.ndim for p in twin.parameters()]
    assert model.vocabulary == twin.vocabulary
    with pytest.raises(AttributeError, match="nothing"):
        _ = model.nothing
    parts = local_parts(model, dict(twin.named_parameters()))
    for name, shard in model.named_parameters():
        torch.testing.assert_close(shard.detach(), parts[name], rtol=0, atol=0)
    return sum(shard.numel() for shard in model.parameters()), sum(p.numel() for p in twin.parameters())


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_shards_have_the_original_names_dimensions_and_values(cluster, ranks, stage):
    results = cluster.run(names_body, ranks, stage)
    kept, whole = sum(kept for kept, _ in results), results[0][1]
    assert kept == (whole if stage == 3 else ranks * whole)


def arena_body(group):
    model = ShardLite(Tied(), group=group)
    shards = list(model.parameters())
    assert len({shard.untyped_storage().data_ptr() for shard in shards}) == 1
    assert all(shard.storage_offset() % 32 == 0 for shard in shards if shard.numel())
    return shards[0].untyped_storage().nbytes() // 4 % 1024


def test_shards_are_aligned_views_of_one_arena(cluster):
    assert cluster.run(arena_body, 2) == [0, 0]


def state_dict_body(group, stage):
    plain = Tied()
    twin = copy.deepcopy(plain)
    model = ShardLite(plain, group=group, stage=stage)
    model(TOKENS)
    twin(TOKENS)
    full = model.full_state_dict()
    expected = twin.state_dict()
    assert list(full) == list(expected)
    for name, value in full.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0)
    assert full["head.weight"] is full["table.weight"]
    twin.load_state_dict(full)
    only = model.full_state_dict(rank=0)
    return len(only)


@pytest.mark.parametrize("stage", [0, 3])
def test_full_state_dict_is_that_of_the_unsharded_model(cluster, stage):
    entries = len(Tied().state_dict())
    assert cluster.run(state_dict_body, 2, stage) == [entries, 0]


def load_body(group, stage):
    other = Tied()
    with torch.no_grad():
        for i, param in enumerate(other.parameters()):
            param.fill_(i + 1)
        other.calls.fill_(7)
    model = ShardLite(Tied(), group=group, stage=stage)
    model(TOKENS).backward()  # weights are gathered now, and must not be used again
    model.load_full_state_dict(other.state_dict() if dist.get_rank(group) == 0 else None)
    full = model.full_state_dict()
    for name, value in other.state_dict().items():
        torch.testing.assert_close(full[name], value, rtol=0, atol=0)
    return torch.equal(model(TOKENS), other(TOKENS))


@pytest.mark.parametrize("stage", [0, 3])
def test_loading_takes_what_rank_0_has(cluster, stage):
    assert cluster.run(load_body, 2, stage) == [True, True]


def gathered_body(group):
    plain = Tied()
    twin = copy.deepcopy(plain)
    model = ShardLite(plain, group=group)
    with model.gathered("blocks.1.inner.weight"):
        torch.testing.assert_close(plain.blocks[1].inner.weight, twin.blocks[1].inner.weight, rtol=0, atol=0)
        with torch.no_grad():
            plain.blocks[1].inner.weight.mul_(2)
    with torch.no_grad():
        twin.blocks[1].inner.weight.mul_(2)
    with model.gathered(writeback=False), torch.no_grad():
        for param in plain.parameters():
            param.zero_()
    gatherer(model).finish_prefetched()
    versions = [unit.version() for unit in units(model)]
    with model.gathered():
        pass
    assert versions == [unit.version() for unit in units(model)]  # reading changes nothing
    full = model.full_state_dict()
    return full, twin.state_dict()


def test_gathered_reads_and_writes_full_parameters(cluster):
    for full, expected in cluster.run(gathered_body, 2):
        torch.testing.assert_close(full["blocks.1.inner.weight"], expected["blocks.1.inner.weight"], rtol=0, atol=0)


def discarded_body(group):
    """What was written without `writeback` is gone with the gathered weights, also for the forward that follows."""
    plain = Tied()
    twin = copy.deepcopy(plain)
    model = ShardLite(plain, group=group)
    with model.gathered(writeback=False), torch.no_grad():
        for param in plain.parameters():
            param.zero_()
    return torch.equal(model(TOKENS), twin(TOKENS))


def test_writes_without_writeback_are_discarded(cluster):
    assert cluster.run(discarded_body, 2) == [True, True]


def failing_body(group):
    model = ShardLite(Tied(), group=group)
    before = model.full_state_dict()
    with contextlib.suppress(ZeroDivisionError), model.gathered(), torch.no_grad():
        for param in model.module.parameters():
            param.zero_()
        _ = 1 / 0
    after = model.full_state_dict()
    return all(torch.equal(before[name], after[name]) for name in before), users(model)


def test_an_exception_inside_gathered_writes_nothing_and_holds_nothing(cluster):
    for same, counts in cluster.run(failing_body, 2):
        assert same
        assert set(counts) == {0}


def direct_write_body(group):
    """A shard written by hand is a change of weights like a step."""
    plain = Tied()
    twin = copy.deepcopy(plain)
    model = ShardLite(plain, group=group)
    model(TOKENS)
    with torch.no_grad():
        for shard in model.parameters():
            shard.mul_(0.5)
        for param in twin.parameters():
            param.mul_(0.5)
    return torch.equal(model(TOKENS), twin(TOKENS))


def test_shards_written_by_hand_are_gathered_anew(cluster):
    assert cluster.run(direct_write_body, 2) == [True, True]


def accumulate_body(group, stage):
    plain = Tied()
    twin = copy.deepcopy(plain)
    model = ShardLite(plain, group=group, stage=stage)
    with model.no_sync():
        model(TOKENS).backward()
        assert all(shard.grad is None for shard in model.parameters())
    model(TOKENS).backward()
    for _ in range(2):
        twin(TOKENS).backward()
    assert_gradients_equal(model, twin)
    model(TOKENS).backward()  # without zero_grad: on top
    twin(TOKENS).backward()
    assert_gradients_equal(model, twin)
    with model.no_sync():
        model(TOKENS).backward()
    model.zero_grad()  # drops what was accumulated as well
    twin.zero_grad()
    model(TOKENS).backward()
    twin(TOKENS).backward()
    assert_gradients_equal(model, twin)
    reductions = [event for event in model.trace.take() if event.startswith("reduce")]
    return len(reductions)


@pytest.mark.parametrize("stage", [0, 3])
def test_accumulation_with_and_without_communication(cluster, stage):
    for reductions in cluster.run(accumulate_body, 2, stage):
        assert reductions == 3 * 4  # four units, three backwards that were reduced


def memory_body(group):
    """What a rank holds: 1/W of everything but buffers; gradients go with zero_grad."""
    model = ShardLite(Tied(), group=group)
    optimizer = AdamW(model.parameters())
    model(TOKENS).backward()
    optimizer.step()
    with_gradients = model.ledger.current()
    optimizer.zero_grad()
    after = model.ledger.current()
    padded = sum(flat.layout.full_numel for flat in flats(model)) * 4
    return with_gradients, after, padded


def test_the_ledger_knows_what_is_sharded(cluster):
    for full, after, padded in cluster.run(memory_body, 2):
        assert full["gradients"] == padded // 2
        assert padded // 2 <= full["parameters"] <= padded // 2 + 4096
        assert after["gradients"] == after["gradient buckets"] == 0


@pytest.mark.ranks(2)
def test_two_wrapped_models_in_one_graph(group):
    """Two wrapped models at once do not hear each other's messages."""
    plain = [Tied(), Tied()]
    twins = copy.deepcopy(plain)
    models = [ShardLite(each, group=group) for each in plain]
    (models[0](TOKENS) * models[1](TOKENS)).backward()
    (twins[0](TOKENS) * twins[1](TOKENS)).backward()
    for model, twin in zip(models, twins, strict=True):
        assert_gradients_equal(model, twin)


def freed_body(group):
    """A model that is dropped leaves no threads and no memory behind."""
    gc.collect()  # models of earlier tests, whose threads end by themselves
    earlier = set(threading.enumerate()) - {threading.current_thread()}
    model = ShardLite(Tied(), group=group)
    model(TOKENS).backward()
    ledger = model.ledger
    del model
    gc.collect()
    until(lambda: set(threading.enumerate()) - {threading.current_thread()} <= earlier, "the end of its threads")
    return sum(ledger.current().values())


def test_a_dropped_model_leaves_nothing_behind(cluster):
    assert cluster.run(freed_body, 2) == [0, 0]


def step_inside_body(group):
    """A step inside `gathered()` would be undone by writing back: an error, and the step stays."""
    model = ShardLite(Tied(), group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(TOKENS).backward()
    before = model.full_state_dict()["blocks.0.inner.weight"]
    with pytest.raises(PhaseError, match="changed inside it"), model.gathered():
        optimizer.step()
    return torch.equal(before, model.full_state_dict()["blocks.0.inner.weight"])


def test_a_step_inside_gathered_is_not_undone(cluster):
    assert cluster.run(step_inside_body, 2) == [False, False]


@pytest.mark.ranks(2)
def test_gathered_inside_gathered(group):
    """What an inner `gathered()` forgets is still there for the outer one, and for forwards inside it."""
    plain = Tied()
    twin = copy.deepcopy(plain)
    model = ShardLite(plain, group=group)
    with model.gathered(writeback=False):
        with model.gathered(writeback=False):
            pass
        model(TOKENS).backward()
    twin(TOKENS).backward()
    assert_gradients_equal(model, twin)


def history_body(group, stage):
    plain = Tied()
    twin = copy.deepcopy(plain)
    model = ShardLite(plain, group=group, stage=stage)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns of the cycle that create_graph makes
        model(TOKENS).backward(create_graph=True)
        twin(TOKENS).backward(create_graph=True)
    assert_gradients_equal(model, twin)
    return any(shard.grad.requires_grad for shard in model.parameters())


@pytest.mark.parametrize("stage", [0, 3])
def test_gradients_have_no_history(cluster, stage):
    assert cluster.run(history_body, 2, stage) == [False, False]


def evaluation_body(group):
    """Looking at full parameters between passes is no part of them."""
    model = ShardLite(Tied(), group=group)
    passes = []
    for _ in range(3):
        model.trace.take()
        with torch.no_grad():
            model(TOKENS)
        passes.append([event for event in model.trace.take() if event.startswith("gather")])
        model.full_state_dict()
    return passes


def test_state_dicts_do_not_disturb_the_recorded_order(cluster):
    for passes in cluster.run(evaluation_body, 2):
        assert all(len(gathered) <= 4 for gathered in passes)


def freezing_body(group):
    plain = Tied()
    model = ShardLite(plain, group=group)
    assert model.requires_grad_(False) is model
    frozen = [param.requires_grad for param in plain.parameters()]
    model.requires_grad_(True)
    model(TOKENS).backward()
    plain.extra = nn.Parameter(torch.zeros(3))
    with pytest.raises(LayoutError, match="'extra' was added or replaced after wrapping"):
        list(model.parameters())
    return any(frozen)


def test_the_module_decides_what_is_trained(cluster):
    assert cluster.run(freezing_body, 2) == [False, False]
