"""Every module can be imported where only its stated dependencies are installed."""

import importlib
import pkgutil

import pytest
import shardlite_kernels

import bench
import shardlite

OPTIONAL = {"matplotlib", "deepspeed", "transformers", "safetensors", "lightning", "peft", "accelerate"}


def modules():
    for package in (shardlite_kernels, shardlite, bench):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not found.name.endswith(".__main__"):
                yield found.name


def test_there_are_many():
    assert len([*modules()]) > 150


@pytest.mark.parametrize("name", [*modules()])
def test_a_module_can_be_imported(name):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] not in OPTIONAL:
            raise
        pytest.skip(f"{missing.name} is not installed")
