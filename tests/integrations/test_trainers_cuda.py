"""Trainers on a GPU that two ranks share, over gloo: the bits of `DistributedDataParallel`.

The cases are those of the tests on CPUs.
"""

import importlib
import os

import pytest
import torch

from tests.support.ranks.cluster import Cluster
from tests.support.ranks.forkserver import ForkServer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BOTH_STAGES = pytest.mark.parametrize("stage", [3, 2])


@pytest.fixture(scope="module")
def sharing():
    """Two ranks, which may use CUDA."""
    server = ForkServer(CUBLAS_WORKSPACE_CONFIG=":4096:8")
    ranks = Cluster(server, sizes=[2])
    yield ranks
    ranks.close()
    server.close()


def reproducible():
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)


def case_of(module, name):
    return getattr(importlib.import_module(f"tests.integrations.{module}"), name)


def in_transformers(group, folder, stage, name):
    """Body of a rank."""
    from tests.integrations.test_transformers import assert_same
    from tests.support.trainers import on_both

    reproducible()
    plain, sharded = on_both(group, folder, stage, case_of("test_transformers", name), on_gpu=True)
    assert_same(plain, sharded)


def in_16_bits(group, folder, stage, name, unit):
    """Body of a rank: as on CPUs, with the loss scaler of CUDA."""
    from tests.integrations.test_transformers import close_to_ddp

    reproducible()
    close_to_ddp(group, folder, stage, case_of("test_transformers", name), unit, on_gpu=True)


def in_accelerate(group, folder, stage):
    """Body of a rank: train with accumulation, save, train on, load, and train again."""
    reproducible()
    case_of("test_accelerate", "assert_as_ddp")(group, {"stage": stage}, folder, on_gpu=True)


def in_lightning(group, folder, stage, name):
    """Body of a rank."""
    from tests.support.lightning_runs import assert_same, on_both

    reproducible()
    plain, sharded = on_both(group, folder, stage, case_of("test_lightning", name), on_gpu=True)
    assert_same(plain, sharded)


TRANSFORMERS = [
    "train_evaluate_predict",
    "dropout",
    "accumulation",
    "checkpointing",
    "label_smoothing",
    "autocast",
    "lora",
    "seq2seq",
    "best_model",
    "resumed",
    "optimizer_names",
]


@BOTH_STAGES
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers(sharing, tmp_path, stage, name):
    pytest.importorskip("transformers", "5.23")
    pytest.importorskip("peft")
    sharing.check(in_transformers, 2, tmp_path, stage, name)


@BOTH_STAGES
@pytest.mark.parametrize(("name", "unit"), [("in_bf16", 2**-9), ("in_fp16", 2**-12), ("clipped", 2**-23)])
def test_transformers_in_16_bits_and_clipped(sharing, tmp_path, stage, name, unit):
    pytest.importorskip("transformers", "5.23")
    sharing.check(in_16_bits, 2, tmp_path, stage, name, unit)


@BOTH_STAGES
def test_accelerate(sharing, tmp_path, stage):
    pytest.importorskip("accelerate")
    sharing.check(in_accelerate, 2, tmp_path, stage)


@BOTH_STAGES
@pytest.mark.parametrize("name", ["evaluation", "accumulation", "gan", "clipping_by_value"])
def test_lightning(sharing, tmp_path, stage, name):
    pytest.importorskip("lightning")
    sharing.check(in_lightning, 2, tmp_path, stage, name)
