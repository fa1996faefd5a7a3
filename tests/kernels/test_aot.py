"""What the compiler makes of each kernel for GPUs that are not here: wide accesses, no spills, exact arithmetic."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "aot.py"
KERNELS = ["hop fp32 fp32 fp32", "hop bf16 bf16 bf16", "hop bf16 fp32 fp32", "hop fp32 bf16 fp32"]
KERNELS += ["hop fp64 fp64 fp64", "hop i8 i8 i8"]
KERNELS += ["adamw fp32", "adamw bf16", "adamw fp32 unscale", "adamw bf16 unscale"]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    root = SCRIPT.parents[2]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(root), str(root / "kernels")]),
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
    }
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    parsed = [json.loads(line) for line in done.stdout.splitlines()]
    return {(row["target"], row["kernel"]): row for row in parsed}


@pytest.mark.parametrize("target", ["80", "90", "100", "gfx942"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_accesses_are_wide_and_nothing_is_spilled(rows, target, kernel):
    row = rows[target, kernel]
    # hop reads two tensors and writes one, adamw reads four and writes three, or four if it divides the gradient
    accesses = 3 if kernel.startswith("hop") else 7 + ("unscale" in kernel)
    wide = [width for width in row["widths"] if width > 32]
    assert len(wide) == accesses, "one access per thread and tensor"
    assert 128 in wide
    assert len(row["widths"]) - len(wide) == scalar_reads(target, kernel), "a tensor is accessed number by number"
    assert (row["spilled"], row["shared"]) == (0, 0)


def scalar_reads(target, kernel):
    """Reads of the table of scalars: one per number, except that AMD's scalar unit does them."""
    if kernel.startswith("hop") or target.startswith("gfx"):
        return 0
    return 7 + ("unscale" in kernel)


@pytest.mark.parametrize("target", ["80", "90", "100"])
@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if "fp64" not in kernel])
def test_division_and_root_are_exact(rows, target, kernel):
    assert rows[target, kernel]["inexact"] == []


@pytest.mark.parametrize("target", ["80", "90", "100", "gfx942"])
def test_an_unknown_length_costs_the_wide_accesses(rows, target):
    """Shards are padded for this reason; and it shows that the tests above would notice."""
    assert set(rows[target, "unhinted"]["widths"]) == {32}
