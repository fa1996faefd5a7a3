"""Reduced norms need no pass over gradients, as long as gradients are unchanged since the last reduction."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shardlite_kernels import new_stats, stats, stats_block
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grad_norm_
from torch.utils._python_dispatch import TorchDispatchMode

from shardlite import ShardLite
from shardlite.comm.collectives import staging_numel
from shardlite.params.parameters import as_they_are
from tests.support.internals import bridge, reducer, shard_group
from tests.support.transports.calls import reduce_scatter
from tests.support.transports.worlds import run
from tests.support.twins.sharded import WIDE, same_bits, some_stages

WIDTH = 48  # two slots of 2304 elements: nothing else is as long


class Touched(TorchDispatchMode):
    """Notes the operators, other than views, that take or give a tensor as long as a part of a gradient."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self._least = least
        self.operators: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [t for t in torch.utils._pytree.tree_leaves((args, kwargs, result)) if isinstance(t, Tensor)]
        if any(t.numel() >= self._least for t in tensors) and not func.is_view:
            self.operators.append(str(func))
        return result


def net() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False))


def made(group: Any, stage: int, scale: float = 1.0, **options: Any) -> ShardLite:
    """Return a model with gradients."""
    model = ShardLite(net(), stage=stage, group=group, units=nn.Linear, **options)
    backward(model, group, scale)
    return model


def backward(model: ShardLite, group: Any, scale: float = 1.0) -> None:
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank(group)))
    (model(x).square().mean() * scale).backward()


@contextmanager
def touching(operators: bool) -> Iterator[None]:
    """Expect operators over gradients inside, or none."""
    with Touched(256) as mode:
        yield
    assert bool(mode.operators) == operators, mode.operators


def assert_norm(what: str, model: ShardLite) -> None:
    """The norm is that of the gradients as they are, within the bound of `tests/grads/test_clip.py`."""
    with as_they_are():  # sums of parts, which are added up over the ranks
        parts = [shard.grad.reshape(-1).double() for shard in model.parameters() if shard.grad is not None]
        squares = torch.cat([*parts, torch.zeros(1)]).square().sum().reshape(1)
    if model.stage > 0:
        dist.all_reduce(squares, group=shard_group(model))
    rtol = 2 * WIDTH * WIDTH * 2**-24
    torch.testing.assert_close(model.clip_grad_norm_(math.inf).double(), squares[0].sqrt(), rtol=rtol, atol=0, msg=what)


@pytest.mark.ranks(2, WIDE)
def test_neither_a_norm_nor_a_clip_that_does_nothing_touches_gradients(group: Any) -> None:
    for stage in some_stages(1, 3):
        for way in ("ours", "torch's"):
            model = made(group, stage)
            versions = [shard.grad._version for shard in model.parameters()]
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with touching(False):
                if way == "ours":
                    norm = model.clip_grad_norm_(1e9)
                else:
                    norm = clip_grad_norm_(model.parameters(), 1e9)
                bridge(model).before_step(optimizer)  # whether a step is skipped is known by then, too
            assert model.skipped_steps == 0
            assert [shard.grad._version for shard in model.parameters()] == versions
            same_bits("again", model.clip_grad_norm_(1e9), norm)
            assert_norm(f"stage {stage}", model)
            with touching(True):
                model.clip_grad_norm_(norm.item() / 2)
            with touching(True):
                model.clip_grad_norm_(1e9)  # they were scaled
            assert_norm(f"stage {stage}, clipped", model)


# ---- when gradients are no longer what they were --------------------------------------------------------------------


def accumulate(model: ShardLite, group: Any) -> None:
    backward(model, group)


def accumulate_sharded(model: ShardLite, group: Any) -> None:
    model.zero_grad()
    with model.no_sync(sharded=True):
        backward(model, group)
    backward(model, group)


def write(model: ShardLite, group: Any) -> None:
    for shard in model.parameters():
        shard.grad.mul_(3)


def write_foreach(model: ShardLite, group: Any) -> None:
    torch._foreach_mul_([shard.grad for shard in model.parameters()], 3.0)


def write_detached(model: ShardLite, group: Any) -> None:
    for shard in model.parameters():
        shard.grad.detach()[...] = 1.5


def replace(model: ShardLite, group: Any) -> None:
    for shard in model.parameters():
        shard.grad = torch.full_like(shard, 0.5)


def drop_one(model: ShardLite, group: Any) -> None:
    next(iter(model.parameters())).grad = None


def unscale(model: ShardLite, group: Any) -> None:
    """Its operator writes without counting."""
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.0), GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    versions = [shard.grad._version for shard in model.parameters()]
    scaler.unscale_(optimizer)
    assert [shard.grad._version for shard in model.parameters()] == versions


def step_with_scale(model: ShardLite, group: Any) -> None:
    """A fused optimizer divides by the scale in its kernel."""
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.0, fused=True), GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)


CHANGES: dict[str, Callable[[ShardLite, Any], None]] = {
    change.__name__: change
    for change in (
        *(accumulate, accumulate_sharded, write, write_foreach, write_detached, replace, drop_one, unscale),
        step_with_scale,
    )
}


def stale_body(group: Any, name: str) -> Tensor:
    """Return the norm, which has the same bits at all stages."""
    norms = []
    for stage in some_stages(0, 3):
        model = made(group, stage)
        before = model.clip_grad_norm_(math.inf)
        CHANGES[name](model, group)
        norms.append(model.clip_grad_norm_(math.inf))
        assert norms[-1] != before
        assert_norm(f"stage {stage}, {name}", model)
        same_bits(f"stage {stage}, {name}", norms[-1], norms[0])
        model.zero_grad()
        backward(model, group)
        with touching(False):
            same_bits(f"stage {stage}, {name}, anew", model.clip_grad_norm_(1e9), before)
    return norms[0]


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.sample(3)
def test_changed_gradients_have_the_norm_of_now(cluster, name):
    norms = cluster.run(stale_body, 2, name)
    assert norms[0] == norms[1]


@pytest.mark.ranks(3)
def test_ranks_may_differ_in_whether_theirs_still_hold(group: Any) -> None:
    """One rank alone has written to its gradients: the others need not know."""
    for stage in (1, 2, 3):
        model = made(group, stage)
        if dist.get_rank(group) == 1:
            for shard in model.parameters():
                shard.grad.mul_(2)
        assert_norm(f"stage {stage}", model)


class Branches(nn.Module):
    """Only the first layer is used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = net()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x)


def test_what_nobody_used_counts_as_zero(group: Any) -> None:
    """What no rank has used counts as zero."""
    for stage in some_stages(1, 3):
        model = ShardLite(Branches(), stage=stage, group=group)
        backward(model, group)
        assert [name for name, shard in model.named_parameters() if shard.grad is None] == ["layers.1.weight"]
        with touching(False):
            model.clip_grad_norm_(1e9)
        assert_norm(f"stage {stage}", model)


# ---- numbers that are not ordinary ----------------------------------------------------------------------------------


def test_a_huge_gradient_is_not_taken_for_one_that_is_not_finite(group: Any) -> None:
    """Squares overflow, so the norm is infinite, as it is by a pass; but gradients are finite, and the step is made."""
    for stage in some_stages(0, 3):
        model = made(group, stage, scale=1e30)
        assert all(shard.grad.isfinite().all() for shard in model.parameters())
        assert model.clip_grad_norm_(1.0).isinf()
        assert reducer(model).results.nonfinite() == 0
        for bad in (math.nan, math.inf):
            model.zero_grad()
            backward(model, group, bad if dist.get_rank(group) == 1 else 1.0)
            assert reducer(model).results.nonfinite() == 1
            assert not model.clip_grad_norm_(1.0).isfinite()


@pytest.mark.ranks(4)
def test_replicas_have_the_norm_of_the_final_sum(group: Any) -> None:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    norms = []
    for stage in some_stages(0, 3):
        model = ShardLite(net(), stage=stage, group=mesh, units=nn.Linear)
        backward(model, group)
        with touching(False):
            norms.append(model.clip_grad_norm_(1e9))
        same_bits(f"stage {stage}", norms[-1], norms[0])
        assert_norm(f"stage {stage}", model)


# ---- rows -----------------------------------------------------------------------------------------------------------


def rows_body(transport: Any, numel: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Reduce with several sizes of chunks; return this rank's sums and rows."""
    generator = torch.Generator().manual_seed(transport.rank)
    values = torch.randn(numel, generator=generator).to(dtype)
    results = []
    for chunk_bytes in (1, 100_000, 1 << 22):
        for staged in (False, True):
            full, out = values.clone(), torch.empty(numel // transport.world_size)
            rows = new_stats(out).fill_(-7)
            cut = {"chunk_bytes": chunk_bytes, "grain": stats_block(full)}
            needed = staging_numel(numel, transport, dtype, **cut)
            staging = full.new_empty(needed) if staged else None
            reduce_scatter(full, transport, out=out, divisor=3, stats=rows, staging=staging, chunk_bytes=chunk_bytes)
            results.append((out, rows))
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "size"), [("threads", 1), ("threads", 2), ("steps", 2), ("gloo", 3), ("batches", 2)])
def test_rows_depend_neither_on_the_transport_nor_on_the_chunks(cluster, kind, size, dtype):
    numel = size * (3 * stats_block(torch.empty(0)) + 64)
    for results in run(kind, cluster, rows_body, size, numel, dtype):
        for out, rows in results:
            expected = new_stats(out)
            stats(out, expected)
            same_bits("the sum", out, results[0][0])
            same_bits("its rows", rows, expected)
