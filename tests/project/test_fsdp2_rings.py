"""The example that runs FSDP2 over our rings: its sums, and the errors that it raises."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from examples.fsdp2_rings import install
from shardlite import LayoutError, Route
from tests.support.models.small import VOCABULARY, LanguageModel
from tests.support.ranks.scripts import run_script
from tests.support.twins.plain import add_round
from tests.support.twins.sharded import Turn, same_states, take_step

SCRIPT = Path(__file__).parents[2] / "examples" / "fsdp2_rings.py"
POLICIES = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "fp16 sums": MixedPrecisionPolicy(reduce_dtype=torch.float16),  # FSDP2 divides before and after the sum
}


class RingOrder:
    """A reduce-scatter that adds shard `k` in the order k+1, k+2, ..., k and divides the sum once."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        ranks = [torch.empty_like(input_tensor) for _ in range(group.size())]
        dist.all_gather(ranks, input_tensor, group=group)
        shards = [each.chunk(group.size())[group.rank()] for each in ranks]
        divisor = group.size() if op == ReduceOp.AVG else 1
        output_tensor.copy_(add_round(shards, group.rank(), divisor, output_tensor.dtype))


def sharded(group: Any, policy: MixedPrecisionPolicy, divisor: float | None = None) -> LanguageModel:
    torch.manual_seed(0)
    model = LanguageModel(blocks=2)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=DeviceMesh.from_group(group, "cpu"), mp_policy=policy)
        if divisor is not None:
            module.set_gradient_divide_factor(divisor)
    return model


def trained(model: LanguageModel) -> dict[str, Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for step in range(2):
        for block in model.blocks:
            block.unshard(async_op=True)
        tokens = torch.randint(0, VOCABULARY, (2, 8), generator=Turn(step, dist.get_rank(), 0).generator())
        take_step(optimizer, model(tokens).float().logsumexp(-1).sum())
    return {name: param.full_tensor().detach() for name, param in model.named_parameters()}


@pytest.mark.ranks(3)
@pytest.mark.parametrize("name", POLICIES)
def test_gradients_are_added_in_the_order_of_the_ring(group: Any, name: str) -> None:
    ours, theirs = sharded(group, POLICIES[name]), sharded(group, POLICIES[name])
    assert install(ours, Route(algorithm="direct" if name == "bf16" else "auto")) == ["(root)", "blocks.0", "blocks.1"]
    for module in (*theirs.blocks, theirs):
        module.set_custom_reduce_scatter(RingOrder())
    got = trained(ours)
    same_states("state", got, trained(theirs))


def test_two_ranks_get_the_bits_of_fsdp2(cluster):
    assert "FSDP2's own collectives and ShardLite's rings give the same bits" in run_script(cluster, SCRIPT)[0].out


def test_gradients_are_divided_as_fsdp2_is_told(group: Any) -> None:
    """Divide once by a whole number, and multiply each part where the divisor is not whole."""
    whole, part = (sharded(group, MixedPrecisionPolicy(), divisor) for divisor in (2.0, 0.5))
    for model in (whole, part):
        install(model)
        model(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
    for one, other in zip(whole.parameters(), part.parameters(), strict=True):
        assert torch.equal(4 * one.grad.full_tensor(), other.grad.full_tensor())


def test_what_a_ring_cannot_serve_is_refused(group: Any) -> None:
    mesh = DeviceMesh.from_group(group, "cpu")
    with pytest.raises(LayoutError, match="Linear has no parameters that fully_shard has sharded: call"):
        install(nn.Linear(2, 2))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float8_e4m3fn)
    with pytest.raises(LayoutError, match=r"'\(root\)' reduces gradients in torch.float8_e4m3fn, which"):
        install(fully_shard(nn.Linear(2, 2), mesh=mesh, mp_policy=policy))
    replicate = pytest.importorskip("torch.distributed._composable.replicate_with_fsdp").replicate
    with pytest.raises(LayoutError, match=r"module '\(root\)' is replicated and not sharded"):
        install(replicate(nn.Linear(2, 2), mesh=mesh))
