"""The interface of a wrapped model: names, shapes, state dicts, writing full parameters, accumulating."""

import contextlib
import gc
import threading
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardlite import LayoutError, ShardLite
from tests.support.internals import gatherer, units, users
from tests.support.models.small import run_all
from tests.support.patience import until
from tests.support.twins.sharded import assert_gradients_equal, gathers, local_parts, same_states, with_twin

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
        return self.head(run_all(self.blocks, self.table(tokens))).square().mean()


TOKENS = torch.tensor([[1, 4, 2], [8, 0, 4]])


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.ranks(1, 2, 3)
def test_shards_have_the_original_names_dimensions_and_values(group, stage):
    model, twin = with_twin(Tied(), group, stage=stage)
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in twin.named_parameters()]
    assert [n for n, _ in model.named_buffers()] == [n for n, _ in twin.named_buffers()]
    every = dict(model.named_parameters(remove_duplicate=False))
    assert every["head.weight"] is every["table.weight"]
    assert [p.ndim for p in model.parameters()] == [p.ndim for p in twin.parameters()]
    assert model.vocabulary == twin.vocabulary
    with pytest.raises(AttributeError, match="nothing"):
        _ = model.nothing
    same_states("shards", dict(model.named_parameters()), local_parts(model, dict(twin.named_parameters())))
    kept = torch.tensor(sum(shard.numel() for shard in model.parameters()))
    dist.all_reduce(kept, group=group)
    assert kept == sum(p.numel() for p in twin.parameters()) * (1 if stage == 3 else group.size())


def test_shards_are_aligned_views_of_one_arena(group):
    model = ShardLite(Tied(), group=group)
    shards = list(model.parameters())
    assert len({shard.untyped_storage().data_ptr() for shard in shards}) == 1
    assert all(shard.storage_offset() % 32 == 0 for shard in shards if shard.numel())
    assert shards[0].untyped_storage().nbytes() // 4 % 1024 == 0


@pytest.mark.parametrize("stage", [0, 3])
def test_full_state_dict_is_that_of_the_unsharded_model(group, stage):
    model, twin = with_twin(Tied(), group, stage=stage)
    model(TOKENS)
    twin(TOKENS)
    full = model.full_state_dict()
    assert list(full) == list(twin.state_dict())
    same_states("state", full, twin.state_dict())
    assert full["head.weight"] is full["table.weight"]
    twin.load_state_dict(full)
    assert len(model.full_state_dict(rank=0)) == (0 if group.rank() else len(full))


@pytest.mark.parametrize("stage", [0, 3])
def test_loading_takes_what_rank_0_has(group, stage):
    other = Tied()
    with torch.no_grad():
        for i, param in enumerate(other.parameters()):
            param.fill_(i + 1)
        other.calls.fill_(7)
    model = ShardLite(Tied(), group=group, stage=stage)
    model(TOKENS).backward()  # weights are gathered now, and must not be used again
    model.load_full_state_dict(other.state_dict() if dist.get_rank(group) == 0 else None)
    full = model.full_state_dict()
    same_states("state", full, other.state_dict())
    assert torch.equal(model(TOKENS), other(TOKENS))


def test_gathered_reads_and_writes_full_parameters(group):
    """What was written without `writeback` is gone with the gathered weights, also for the forward that follows."""
    plain = Tied()
    model, twin = with_twin(plain, group)
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
    same_states("state", model.full_state_dict(), twin.state_dict())
    assert torch.equal(model(TOKENS), twin(TOKENS))


def test_an_exception_inside_gathered_writes_nothing_and_holds_nothing(group):
    model = ShardLite(Tied(), group=group)
    before = model.full_state_dict()
    with contextlib.suppress(ZeroDivisionError), model.gathered(), torch.no_grad():
        for param in model.module.parameters():
            param.zero_()
        _ = 1 / 0
    same_states("state", model.full_state_dict(), before)
    assert set(users(model)) == {0}


def test_a_dropped_model_leaves_nothing_behind(group):
    """A model that is dropped leaves no threads and no memory behind."""
    gc.collect()  # models of earlier tests, whose threads end by themselves
    earlier = set(threading.enumerate()) - {threading.current_thread()}
    model = ShardLite(Tied(), group=group)
    model(TOKENS).backward()
    ledger = model.ledger
    del model
    gc.collect()
    until(lambda: set(threading.enumerate()) - {threading.current_thread()} <= earlier, "the end of its threads")
    assert not any(ledger.current().values())


def test_gathered_inside_gathered(group):
    """What an inner `gathered()` forgets is still there for the outer one, and for forwards inside it."""
    model, twin = with_twin(Tied(), group)
    with model.gathered(writeback=False):
        with model.gathered(writeback=False):
            pass
        model(TOKENS).backward()
    twin(TOKENS).backward()
    assert_gradients_equal(model, twin)


@pytest.mark.parametrize("stage", [0, 3])
def test_gradients_have_no_history(group, stage):
    model, twin = with_twin(Tied(), group, stage=stage)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns of the cycle that create_graph makes
        model(TOKENS).backward(create_graph=True)
        twin(TOKENS).backward(create_graph=True)
    assert_gradients_equal(model, twin)
    assert not any(shard.grad.requires_grad for shard in model.parameters())


def test_state_dicts_do_not_disturb_the_recorded_order(group):
    """Looking at full parameters between passes is no part of them."""
    model = ShardLite(Tied(), group=group)
    for _ in range(3):
        model.trace.take()
        with torch.no_grad():
            model(TOKENS)
        assert sum(gathers(model).values()) <= 4
        model.full_state_dict()


def test_a_parameter_that_is_added_later_is_an_error(group):
    plain = Tied()
    model = ShardLite(plain, group=group)
    plain.extra = nn.Parameter(torch.zeros(3))
    with pytest.raises(LayoutError, match="'extra' was added or replaced after wrapping"):
        list(model.parameters())
