"""FSDP2 with our rings: the bits of its own collectives for two ranks, those of the ring's order for more.

`RingOrder` writes that order out. A model trained with our rings must be, to the bit, one that is trained with it.

Legend: `W` ranks, `S` elements per shard, `k` the rank that a shard belongs to.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn import functional

from shardlite import LayoutError, Precision, Route, ShardLite
from shardlite.apps.fsdp2 import Connections, RingAllGather, RingReduceScatter, install
from tests.support.models.small import VOCABULARY, LanguageModel
from tests.support.ranks.cluster import GLOO_TIMEOUT
from tests.support.twins.plain import add_round
from tests.support.twins.sharded import WIDE, Turn, local_parts, same_bits

COLLECTIVES = (  # by which FSDP2 gathers and reduces itself; some versions of PyTorch have only some of them
    "all_gather_single",
    "reduce_scatter_single",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
)


class RingOrder:
    """A reduce-scatter that adds shard `k` in the order k+1, k+2, ..., k and divides the sum once."""

    def __init__(self, divisor: int | None = None) -> None:
        self._divisor = divisor

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        ranks = [torch.empty_like(input_tensor) for _ in range(group.size())]
        dist.all_gather(ranks, input_tensor, group=group)
        shards = [each.chunk(group.size())[group.rank()] for each in ranks]
        divisor = self._divisor or (group.size() if op == ReduceOp.AVG else 1)
        output_tensor.copy_(add_round(shards, group.rank(), divisor, output_tensor.dtype))


@contextmanager
def no_collective_of_torch() -> Iterator[None]:
    """Let FSDP2's own collectives fail."""

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("a collective of PyTorch gathers or reduces")

    names = [name for name in COLLECTIVES if hasattr(dist, name)]
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(dist, name, fail)
        yield


@dataclass(frozen=True)
class Case:
    """How a model is sharded by FSDP2 and trained."""

    policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    reshard: bool | int = True
    micros: int = 1
    """Backwards of a step; all but the last run without a reduction."""

    ahead: bool = False
    """Whether the blocks are gathered beside the computation."""

    dtype: torch.dtype = torch.float32
    mesh: Callable[[Any], tuple[DeviceMesh, DeviceMesh]] | None = None
    """From a group to the meshes of the first block and of the rest."""

    worlds: tuple[int, ...] = (2, 3)
    change: Callable[[FSDPModule], None] = lambda module: None
    """Sets something on each sharded module."""

    route: dict[str, str] = field(default_factory=dict)
    """How messages travel; by default as is best."""

    divisor: int | None = None
    """Of the ring, if it is neither 1 nor the number of ranks."""


def flat_mesh(group: Any) -> DeviceMesh:
    return DeviceMesh.from_group(group, "cpu")


def hybrid(group: Any) -> tuple[DeviceMesh, DeviceMesh]:
    del group
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return mesh, mesh


def pairs_and_all(group: Any) -> tuple[DeviceMesh, DeviceMesh]:
    """Two pairs of ranks, each with a mean of its own, and all of them."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("which", "pair"))["pair"], flat_mesh(group)


def sharded(case: Case, group: Any, *, blocks: int = 2) -> LanguageModel:
    """Make a model, the same on all ranks, and shard its blocks and the rest."""
    torch.manual_seed(0)
    model = LanguageModel(blocks=blocks).to(case.dtype)
    first, rest = case.mesh(group) if case.mesh else (flat_mesh(group),) * 2
    options = {"mp_policy": case.policy, "reshard_after_forward": case.reshard}
    for place, block in enumerate(model.blocks):
        fully_shard(block, mesh=first if place == 0 else rest, **options)
    fully_shard(model, mesh=rest, **options)
    for module in (*model.blocks, model):
        case.change(module)
    return model


def loss_of(model: nn.Module, turn: Turn) -> Tensor:
    tokens = torch.randint(0, VOCABULARY, (2, 8), generator=turn.generator())
    return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


def full(tensor: Any) -> Tensor:
    return tensor.full_tensor().clone()


def trained(model: LanguageModel, case: Case, steps: int = 3) -> dict[str, Tensor]:
    """Train, with clipping where all parameters share a mesh, and return all that there is to compare."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, foreach=False)
    found: dict[str, Tensor] = {}
    for step in range(steps):
        for micro in range(case.micros):
            if case.ahead:
                for block in model.blocks:
                    block.unshard(async_op=True)
            model.set_requires_gradient_sync(micro == case.micros - 1)
            loss = loss_of(model, Turn(step, dist.get_rank(), micro))
            loss.backward()
            found[f"step {step}: loss {micro}"] = loss.detach()
        if case.mesh is not pairs_and_all:
            found[f"step {step}: norm"] = full(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        found |= {f"step {step}: gradient of {n}": full(p.grad) for n, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    return found | {f"weight {n}": full(p.detach()) for n, p in model.named_parameters()}


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for what, tensor in expected.items():
        assert torch.isfinite(tensor).all(), what
        same_bits(what, got[what], tensor)


def in_ring_order(model: LanguageModel, case: Case) -> LanguageModel:
    for module in (*model.blocks, model):
        module.set_custom_reduce_scatter(RingOrder(case.divisor))
    return model


def shard_sizes(model: nn.Module) -> set[int]:
    """Return over how many ranks parameters are sharded."""
    return {p.device_mesh.size(p.device_mesh.ndim - 1) for p in model.parameters()}


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

CASES = {
    "fp32": Case(worlds=(2, 3, 4)),
    "messages": Case(route={"transport": "p2p", "algorithm": "ring"}, worlds=(2, 3, 4)),
    "direct": Case(route={"transport": "p2p", "algorithm": "direct"}, worlds=(3,)),
    "fp64": Case(dtype=torch.float64),  # FSDP2 divides before and after the sum
    "kept": Case(reshard=False),
    "gathered-within-pairs": Case(reshard=2, worlds=(4,)),
    "bf16-fp32-sums": Case(MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)),
    "bf16": Case(MixedPrecisionPolicy(param_dtype=BF16), worlds=(2, 3, 4)),
    "fp16-sums": Case(MixedPrecisionPolicy(reduce_dtype=FP16)),  # FSDP2 divides before and after the sum
    "accumulated": Case(MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32), micros=2),
    "ahead": Case(ahead=True),
    "divided-by-fsdp2": Case(change=lambda module: module.set_force_sum_reduction_for_comms(True)),
    "hybrid": Case(mesh=hybrid, worlds=(4,)),
    "two-groups": Case(mesh=pairs_and_all, worlds=(4,)),
    "divided-by-5": Case(change=lambda module: module.set_gradient_divide_factor(5.0), divisor=5),
}


def training_body(group, name):
    case = CASES[name]
    model = sharded(case, group)
    assert install(model, **case.route).names == ["(root)", "blocks.0", "blocks.1"]
    with no_collective_of_torch():
        ours = trained(model, case)
    assert_same(ours, trained(in_ring_order(sharded(case, group), case), case))
    if shard_sizes(model) == {2} and case.divisor is None:  # gloo has no such sum
        assert_same(ours, trained(sharded(case, group), case))


SLOW = {"bf16", "direct", "fp16-sums", "divided-by-5", "gathered-within-pairs", "two-groups"}
"""What is like another case, or needs four ranks."""

FAST = {
    (name, case.worlds[place % 2 % len(case.worlds)])
    for place, (name, case) in enumerate(CASES.items())
    if name not in SLOW
}


@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        pytest.param(name, size, marks=() if (name, size) in FAST else pytest.mark.slow)
        for name, case in CASES.items()
        for size in case.worlds
    ],
)
@pytest.mark.sample(5)
def test_training_has_the_bits_of_the_rings_order(cluster, name, world_size):
    """And for two ranks those of FSDP2's own collectives."""
    cluster.check(training_body, world_size, name)


def rows_owner(shape: torch.Size, world_size: int) -> Tensor:
    """Return which rank holds each element under FSDP2: rows are cut, and the last ranks may have fewer."""
    rows = torch.arange(shape[0]) // -(-shape[0] // world_size)
    return rows.view(-1, *[1] * (len(shape) - 1)).expand(shape)


def flat_owners(model: ShardLite) -> dict[str, Tensor]:
    """Return which rank holds each element under ShardLite, by parameter."""
    owners = {}
    for layout in (flat.layout for unit in model._units for flat in unit.flats):
        inner = torch.tensor(layout.cuts[1:-1])
        for slot in layout.slots:
            owners[slot.name] = torch.bucketize(torch.arange(slot.start, slot.stop), inner, right=True).view(slot.shape)
    return owners


def mean_by_owner(ranks: list[Tensor], owner: Tensor) -> Tensor:
    """Average gradients, each element in the order of the rank that holds it."""
    mean = torch.zeros_like(ranks[0])
    for k in range(len(ranks)):
        mean[owner == k] = add_round([each[owner == k] for each in ranks], k, len(ranks), mean.dtype)
    return mean


def local_gradients(rank: int, compute: torch.dtype) -> dict[str, Tensor]:
    """Return what a rank's batch alone gives, without any sharding."""
    torch.manual_seed(0)
    model = LanguageModel(blocks=2).to(compute)
    loss_of(model, Turn(0, rank, 0)).backward()
    return {name: param.grad.float() for name, param in model.named_parameters()}


def parity_body(group, compute):
    """Two systems, one ring: only the owners of elements differ, and with them the order of additions."""
    world_size = dist.get_world_size(group)
    turn = Turn(0, dist.get_rank(), 0)
    theirs = sharded(Case(MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=FP32)), group)
    install(theirs)
    torch.manual_seed(0)
    ours = ShardLite(LanguageModel(blocks=2), group=group, precision=Precision(compute=compute))
    losses = [loss_of(model, turn) for model in (ours, theirs)]
    same_bits("loss", *(loss.detach() for loss in losses))
    for loss in losses:
        loss.backward()

    ranks = [local_gradients(rank, compute) for rank in range(world_size)]
    flat = flat_owners(ours)
    expected = {name: mean_by_owner([each[name] for each in ranks], owner) for name, owner in flat.items()}
    parts, shards = local_parts(ours, expected), dict(ours.named_parameters())
    for name, param in theirs.named_parameters():
        gradients = [each[name] for each in ranks]
        owner = rows_owner(param.shape, world_size)
        found = full(param.grad)
        same_bits(f"FSDP2's {name}", found, mean_by_owner(gradients, owner))
        same_bits(f"ShardLite's {name}", shards[name].grad, parts[name])
        alike = owner == flat[name] if world_size > 2 else torch.ones_like(owner, dtype=torch.bool)
        same_bits(f"{name} where the order is one", found[alike], expected[name][alike])
        assert_near(found, expected[name], gradients)


def assert_near(found: Tensor, expected: Tensor, ranks: list[Tensor]) -> None:
    """Each mean is off by W roundings, W-1 additions and a division, of at most the sum of the magnitudes."""
    roundings = len(ranks) * 2.0**-24
    gamma = roundings / (1 - roundings)
    magnitude = sum(each.double().abs() for each in ranks) / len(ranks)
    assert ((found.double() - expected.double()).abs() <= 2 * gamma * magnitude).all()


@pytest.mark.parametrize("world_size", [2, 3, WIDE])
@pytest.mark.parametrize("compute", [FP32, BF16])
def test_shardlite_and_fsdp2_differ_in_the_owners_of_elements_only(cluster, compute, world_size):
    cluster.check(parity_body, world_size, compute)


def premultiplied(factor: float) -> Any:
    """Return the operation by which FSDP2 asks for a divisor of one's own; how it is made depends on the version."""
    make = getattr(dist, "_make_nccl_premul_sum", None) or ReduceOp.PREMUL_SUM
    return make(factor)


def reductions_body(group):
    rank, world_size = group.rank(), group.size()
    again = dist.group.WORLD if world_size == dist.get_world_size() else group  # another one, of the same ranks
    ranks = [torch.randn(world_size, 7, generator=torch.Generator().manual_seed(r)) for r in range(world_size)]
    shards = [each[rank] for each in ranks]
    scatter = RingReduceScatter("a test", Connections("reduce", GLOO_TIMEOUT, route=Route(), apart=True), group)
    for op, factor, divisor in [
        (ReduceOp.SUM, 1.0, 1),
        (ReduceOp(ReduceOp.AVG), 1.0, world_size),
        (premultiplied(1 / 7), 1.0, 7),  # divided once
        (premultiplied(0.3), 0.3, 1),
        (premultiplied(0.0), 0.0, 1),
    ]:
        expected = add_round([each * factor for each in shards], rank, divisor, FP32)
        for beside, over in ((False, group), (True, group), (False, again)):
            out = scatter.allocate((7,), dtype=FP32, device=torch.device("cpu"))
            work = scatter(out, ranks[rank].flatten().clone(), over, op, async_op=beside)
            finish(work, beside)
            same_bits(f"{op}, {beside=}", out, expected)
    with pytest.raises(LayoutError, match=r"reduce-scatter of a test: asked for .*MAX.*, but a ring only adds"):
        scatter(torch.empty(7), torch.empty(7 * world_size), group, ReduceOp.MAX)
    with pytest.raises(LayoutError, match=f"15 elements are not {world_size} shards of 7 elements"):
        scatter(torch.empty(7), torch.empty(15), group, ReduceOp.SUM)


def finish(work: Any, beside: bool) -> None:
    assert isinstance(work, dist.Work) == beside, "FSDP2 waits for a Work, and for nothing else"
    if beside:
        assert work.wait()
        assert work.is_completed()


@pytest.mark.parametrize("world_size", [2, 3, WIDE])
def test_reductions_that_fsdp2_may_ask_for(cluster, world_size):
    cluster.check(reductions_body, world_size)


def gathers_body(group):
    rank, world_size = group.rank(), group.size()
    gather = RingAllGather("a test", Connections("gather", GLOO_TIMEOUT, route=Route()), group)
    for dtype in (FP32, BF16, torch.uint8):  # bytes are what FSDP2 gathers where dtypes are mixed
        shards = [torch.arange(5).add(10 * r).to(dtype) for r in range(world_size)]
        for beside in (False, True):
            for in_place in (False, True):
                full = gather.allocate((5 * world_size,), dtype=dtype, device=torch.device("cpu"))
                shard = full.chunk(world_size)[rank].copy_(shards[rank]) if in_place else shards[rank]
                finish(gather(full, shard, group, async_op=beside), beside)
                assert torch.equal(full, torch.cat(shards))


def test_gathers_that_fsdp2_may_ask_for(cluster):
    cluster.check(gathers_body, 3)


def removed_body(group):
    model = sharded(Case(), group)
    installed = install(model)
    installed.remove()
    with pytest.raises(AssertionError, match="a collective of PyTorch"), no_collective_of_torch():
        loss_of(model, Turn(0, 0, 0))


def test_what_was_installed_can_be_removed(cluster):
    cluster.check(removed_body, 2)


def modules_body(group):
    """Two models at once, one of them with modules that were sharded together and one without parameters."""
    mesh = flat_mesh(group)
    models = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)]
    for model in models:
        fully_shard([model[0], model[1]], mesh=mesh)
        fully_shard(model[2], mesh=mesh)
        fully_shard(model, mesh=mesh)
        assert install(model).names == ["0", "2"]
    for model in models:
        for child in model:
            child.unshard(async_op=True)
    with no_collective_of_torch():
        sum(model(torch.ones(2, 4)).sum() for model in models).backward()
    assert all(full(param.grad).isfinite().all() for model in models for param in model.parameters())
    inside = nn.ModuleDict({"model": models[0], "plain": nn.Linear(2, 2)})
    assert install(inside).names == ["model.0", "model.2"]


def test_every_sharded_module_inside_is_found_once(cluster):
    cluster.check(modules_body, 2)
