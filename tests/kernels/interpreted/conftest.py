"""Tests with `TRITON_INTERPRET=1`, which Triton reads at import: `test_interpreter.py` runs them in another process.

By hand: `TRITON_INTERPRET=1 pytest tests/kernels/interpreted tests/kernels/test_hop.py`. Without the variable nothing
is collected here.
"""

import os

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if INTERPRETED else ["test_*.py"]


def pytest_configure():
    if INTERPRETED:
        from tests.kernels.interpreted.language import quicken

        quicken()


def pytest_collection_modifyitems(items):
    """Ignore what numpy warns of, where a GPU just makes an infinity or a NaN."""
    for item in items if INTERPRETED else ():
        item.add_marker(pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero):RuntimeWarning"))


@pytest.fixture
def fused():
    """Skip what takes a fused multiply-add, where the interpreter has none."""
    import triton

    from tests.kernels.interpreted.fma import interpreted_fma_rounds_once

    if not interpreted_fma_rounds_once():
        pytest.skip(f"the interpreter of Triton {triton.__version__} rounds a fused multiply-add twice")
