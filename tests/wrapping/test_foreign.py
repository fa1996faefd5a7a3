"""Models and values that cannot be wrapped or loaded are refused on all ranks before any communication."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from shardlite import ShardLite
from shardlite.errors import LayoutError
from tests.support.twins.sharded import same_states


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def of_fsdp2(group: Any) -> nn.Module:
    return fully_shard(net(), mesh=DeviceMesh.from_group(group, "cpu"))


def of_fsdp2_inside(group: Any) -> nn.Module:
    model = net()
    fully_shard(model[2], mesh=DeviceMesh.from_group(group, "cpu"))
    return model


def of_fsdp1(group: Any) -> nn.Module:
    return FullyShardedDataParallel(net(), process_group=group, device_id=torch.device("cpu"))


def of_ddp(group: Any) -> nn.Module:
    return DistributedDataParallel(net(), process_group=group)


def of_dtensors(group: Any) -> nn.Module:
    model, mesh = net(), DeviceMesh.from_group(group, "cpu")
    model[0].weight = nn.Parameter(distribute_tensor(model[0].weight.detach(), mesh, [Replicate()]))
    return model


def wrapping_body(group: Any, make: Any, everywhere: bool) -> str:
    model = make(group)
    with pytest.raises(LayoutError) as caught:
        ShardLite(model if everywhere or group.rank() == 1 else net(), group=group)
    ShardLite(net(), group=group)(torch.ones(2, 4)).sum().backward()
    return str(caught.value)


@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (of_fsdp2, "'(the module itself)' is wrapped by FSDP (fully_shard)"),
        (of_fsdp2_inside, "'2' is wrapped by FSDP (fully_shard)"),
        (of_fsdp1, "'(the module itself)' is wrapped by FSDP:"),
        (of_ddp, "'(the module itself)' is wrapped by DistributedDataParallel"),
        (of_dtensors, "parameter '0.weight' is a DTensor"),
    ],
)
def test_what_something_else_has_sharded_is_refused(cluster, make, words, everywhere):
    first, second = cluster.run(wrapping_body, 2, make, everywhere)
    assert words in second
    assert words in first
    assert first.startswith("rank 1: ") != everywhere


VALUES = {
    "meta": (lambda value: value.to("meta"), "'2.weight' is on the meta device and has no values"),
    "list": (lambda value: value.tolist(), "'2.weight' is a list, not a tensor"),
    "complex": (lambda value: value.to(torch.complex64), "has dtype torch.complex64, the model's is torch.float32"),
    "integer": (lambda value: value.long(), "has dtype torch.int64, the model's is torch.float32"),
    "bool": (lambda value: value.bool(), "has dtype torch.bool, the model's is torch.float32"),
    "sparse": (lambda value: value.to_sparse(), "has the layout torch.sparse_coo: pass a dense tensor"),
    "shape": (lambda value: value.t(), "has shape [4, 2], the model's is [2, 4]"),
}


def loading_body(group: Any, kind: str) -> str:
    model = ShardLite(net(), group=group)
    before = model.full_state_dict()
    given: Any = {name: torch.zeros_like(value) for name, value in before.items()}
    if kind == "DTensor":
        given["2.weight"] = distribute_tensor(given["2.weight"], DeviceMesh.from_group(group, "cpu"), [Replicate()])
    elif kind == "not a mapping":
        given = list(given.items())
    elif kind == "buffer":
        given["1.num_batches_tracked"] = torch.tensor(1.5)
    else:
        given["2.weight"] = VALUES[kind][0](given["2.weight"])
    with pytest.raises(LayoutError) as caught:
        model.load_full_state_dict(given if group.rank() == 0 else None)
    same_states("state", model.full_state_dict(), before)
    half = {name: value.half() if value.is_floating_point() else value for name, value in before.items()}
    model.load_full_state_dict(half)  # it is rounded, which is not what is refused
    assert torch.equal(model.full_state_dict()["2.weight"], before["2.weight"].half().float())
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        *((kind, words) for kind, (_, words) in VALUES.items()),
        ("DTensor", "'2.weight' is a DTensor, of which this rank has a part: pass its full_tensor()"),
        ("not a mapping", "a state dict is a mapping from names to tensors, got list"),
        ("buffer", "'1.num_batches_tracked' has dtype torch.float32, the model's is torch.int64"),
    ],
)
def test_values_that_do_not_fit_change_nothing(cluster, kind, words):
    first, second = cluster.run(loading_body, 2, kind)
    assert words in first
    assert second == f"rank 0: {first}"
