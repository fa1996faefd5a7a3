"""These tests need `TRITON_INTERPRET=1` before Triton is imported: `../test_interpreter.py` runs them in a process."""

import os

import pytest

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]


@pytest.fixture
def fused():
    """Skip what takes a fused multiply-add, where the interpreter has none."""
    import triton

    from tests.kernels.interpreted.fma import interpreted_fma_rounds_once

    if not interpreted_fma_rounds_once():
        pytest.skip(f"the interpreter of Triton {triton.__version__} rounds a fused multiply-add twice")
