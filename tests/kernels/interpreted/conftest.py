"""These items run in a process with `TRITON_INTERPRET=1`, which Triton reads at import.

In a session without it they are collected here and run in a side process (`side_process.py`). In a session with it,
as `TRITON_INTERPRET=1 pytest tests/kernels/interpreted`, they run like any others.
"""

import os
from pathlib import Path

import pytest

from tests.kernels.interpreted.side_process import SideProcess

FOLDER = Path(__file__).parent
ENVIRONMENT = {"TRITON_INTERPRET": "1"}


def pytest_configure(config):
    if not ENVIRONMENT.items() <= os.environ.items():
        config.pluginmanager.register(SideProcess(config, FOLDER, ENVIRONMENT), "interpreter")
    else:
        from tests.kernels.interpreted.language import quicken

        quicken()


@pytest.hookimpl(tryfirst=True)  # `tests/conftest.py` makes groups of what has none
def pytest_itemcollected(item):
    """Keep all these tests on one worker of pytest-xdist: each worker with one starts a side process."""
    item.add_marker(pytest.mark.xdist_group("interpreter"))


@pytest.fixture
def fused():
    """Skip what takes a fused multiply-add, where the interpreter has none."""
    import triton

    from tests.kernels.interpreted.fma import interpreted_fma_rounds_once

    if not interpreted_fma_rounds_once():
        pytest.skip(f"the interpreter of Triton {triton.__version__} rounds a fused multiply-add twice")
