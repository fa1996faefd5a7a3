"""Tests with `TRITON_INTERPRET=1`, which Triton reads at import: `test_interpreter.py` runs them in another process.

By hand: `TRITON_INTERPRET=1 pytest tests/kernels/interpreted`. Without the variable nothing is collected here.
"""

import os

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if INTERPRETED else ["test_*.py"]


def pytest_configure():
    if INTERPRETED:
        from tests.kernels.interpreted.language import quicken

        quicken()


@pytest.fixture
def fused():
    """Skip what takes a fused multiply-add, where the interpreter has none."""
    import triton

    from tests.kernels.interpreted.fma import interpreted_fma_rounds_once

    if not interpreted_fma_rounds_once():
        pytest.skip(f"the interpreter of Triton {triton.__version__} rounds a fused multiply-add twice")
