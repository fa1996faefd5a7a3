"""What the compiler makes of each kernel for GPUs that are not here: wide accesses, no spills, exact arithmetic."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "aot.py"
KERNELS = ["hop fp32 fp32 fp32", "hop bf16 bf16 bf16", "hop bf16 fp32 fp32", "hop fp32 bf16 fp32"]
KERNELS += ["hop fp64 fp64 fp64", "hop i8 i8 i8", "adamw fp32", "adamw bf16"]


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
    pointers = 3 if kernel.startswith("hop") else 7  # adamw reads four tensors and writes three
    assert len(row["widths"]) == pointers, "one access per thread and tensor"
    assert set(row["widths"]) <= {64, 128}
    assert 128 in row["widths"]
    assert (row["spilled"], row["shared"]) == (0, 0)


@pytest.mark.parametrize("target", ["80", "90", "100"])
@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if "fp64" not in kernel])
def test_division_and_root_are_exact(rows, target, kernel):
    assert rows[target, kernel]["inexact"] == []


@pytest.mark.parametrize("target", ["80", "90", "100", "gfx942"])
def test_an_unknown_length_costs_the_wide_accesses(rows, target):
    """Shards are padded for this reason; and it shows that the tests above would notice."""
    assert set(rows[target, "unhinted"]["widths"]) == {32}
