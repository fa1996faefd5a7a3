"""Triton is imported when a kernel is first launched, and then makes all kernels."""

import sys
from types import ModuleType

import pytest
import torch
from shardlite_kernels import load_triton

from tests.support.ranks.scripts import run_process

pytest.importorskip("triton", reason="has wheels for Linux only")
launching = sys.modules["shardlite_kernels.launch"]


def modules() -> list[ModuleType]:
    return [module for name, module in sys.modules.items() if name.startswith("shardlite_kernels.")]


def test_cpu_tensors_need_no_triton_and_the_first_launch_imports_it():
    program = """
import sys, torch
from shardlite_kernels import hop
out = torch.zeros(4)
hop(out, torch.ones(4), torch.ones(4), 2)
print(out.tolist(), "triton" in sys.modules)
try:
    hop(out.to("meta"), out.to("meta"), out.to("meta"))
finally:
    print("triton" in sys.modules)
"""
    done = run_process("-c", program)
    assert done.out.splitlines() == ["[1.0, 1.0, 1.0, 1.0] False", "True"]


def test_modules_name_what_triton_has_made():
    """One object under each name: kernels find each other, numbers and `tl` by the names of their modules."""
    triton = load_triton()
    for module in modules():
        assert not any(isinstance(each, launching._Late) for each in vars(module).values()), module
        assert vars(module).get("tl", triton.language) is triton.language
    hop, rounding = (sys.modules[f"shardlite_kernels.{name}"] for name in ("hop", "rounding"))
    assert isinstance(hop._hop_kernel, triton.runtime.KernelInterface)
    assert hop.load_fp32 is rounding.load_fp32


def test_a_kernel_that_was_imported_by_name_before_is_launched_all_the_same():
    calls = []

    class Made:
        def __getitem__(self, grid):
            return lambda *args, **options: calls.append((grid, args, options["BLOCK"]))

    early, tensor = launching._Late(lambda triton: Made()), torch.zeros(10)
    launching.launch(early, tensor, n=10, block=4)
    early[(3,)](tensor, 10, BLOCK=4)
    assert [(grid, given[0] is tensor, given[1:], block) for grid, given, block in calls] == [
        ((3,), True, (10,), 4)
    ] * 2
    assert early.finish(load_triton()) is early.finish(load_triton())
