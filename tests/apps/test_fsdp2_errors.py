"""What `install` refuses, and what an error says when FSDP2 gathers or reduces by our rings."""

import os
import re
import subprocess
import sys
from datetime import timedelta

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from shardlite import CommError, LayoutError
from shardlite.apps.fsdp2 import install
from tests.apps.test_fsdp2 import flat_mesh, pairs_and_all
from tests.support.patience import seconds


def refused_body(group):
    mesh = flat_mesh(group)
    with pytest.raises(LayoutError, match=r"Linear has no parameters that fully_shard has sharded: call"):
        install(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"timeout must be a datetime\.timedelta, got 3"):
        install(nn.Linear(2, 2), timeout=3)
    with pytest.raises(ValueError, match="algorithm must be one of 'auto', 'ring'"):
        install(fully_shard(nn.Linear(2, 2), mesh=mesh), algorithm="circle")
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float8_e4m3fn)
    with pytest.raises(
        LayoutError, match=r"'\(root\)' reduces the gradients of 'weight' in torch.float8_e4m3fn, which"
    ):
        install(fully_shard(nn.Linear(2, 2), mesh=mesh, mp_policy=policy))
    frozen = fully_shard(nn.Linear(2, 2).requires_grad_(False), mesh=mesh, mp_policy=policy)
    assert install(frozen).names == ["(root)"]
    replicate = pytest.importorskip("torch.distributed._composable.replicate_with_fsdp").replicate
    with pytest.raises(LayoutError, match=r"module '\(root\)' is replicated and not sharded"):
        install(replicate(nn.Linear(2, 2), mesh=mesh))


def test_what_a_ring_cannot_serve_is_refused(cluster):
    cluster.check(refused_body, 2)


def two_meshes_body(group):
    common = pytest.importorskip("torch.distributed.fsdp._fully_shard._fsdp_common")
    if not hasattr(common, "ShardPlacementResult"):
        return  # this PyTorch has one mesh per module
    pairs, everyone = (common.FSDPMeshInfo(mesh, shard_mesh_dim=0) for mesh in pairs_and_all(group))
    module = fully_shard(
        nn.Linear(2, 2),
        mesh=everyone.mesh,
        shard_placement_fn=lambda param: common.ShardPlacementResult(Shard(0), pairs if param.ndim == 1 else everyone),
    )
    with pytest.raises(LayoutError, match=r"'\(root\)' shards its parameters over 2 meshes"):
        install(module)


def test_a_module_has_one_mesh(cluster):
    cluster.check(two_meshes_body, 4)


@pytest.mark.slow
def test_who_does_not_use_fsdp2_does_not_import_it():
    """(PyTorch's compiler imports PyTorch's part of it.)"""
    code = "import sys, shardlite; sys.exit('shardlite.apps.fsdp2' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


def test_there_must_be_a_process_group():
    with pytest.raises(LayoutError, match="there is no process group"):
        install(nn.Linear(2, 2))


def different_body(group):
    model = nn.Linear(4, 4 + group.rank())
    install(fully_shard(model, mesh=flat_mesh(group)))


def different_route_body(group):
    model = fully_shard(nn.Linear(4, 4), mesh=flat_mesh(group))
    install(model, algorithm=("ring", "direct")[group.rank()])


def test_ranks_that_install_different_routes_are_told(cluster):
    for kind, message in cluster.failures(different_route_body, 2):
        assert kind == "LayoutError"
        assert re.search("rank 0 has Route.*algorithm='ring'.*, rank 1 has Route.*algorithm='direct'", message)


def test_ranks_that_install_different_models_are_told(cluster):
    for kind, message in cluster.failures(different_body, 2):
        assert kind == "LayoutError"
        assert message == (
            "ranks wrapped different models: rank 0 has (root) (weight [4, 4], bias [4]) on cpu, "
            "rank 1 has (root) (weight [5, 4], bias [5]) on cpu"
        )


def late_body(group):
    model = nn.Sequential(nn.Linear(4, 4))
    for module in (model[0], model):
        fully_shard(module, mesh=flat_mesh(group))
    install(model, timeout=timedelta(seconds=seconds(4)))
    loss = model(torch.ones(2, 4)).sum()
    if group.rank() == 0:
        with pytest.raises(CommError, match=r"all-gather of FSDP2 module '0' of model \d+ from rank 0 \(operation 2, "):
            loss.backward()
        raise ArithmeticError


def test_an_error_names_the_module(cluster):
    assert cluster.failures(late_body, 2)[0][0] == "ArithmeticError"
