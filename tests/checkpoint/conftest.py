"""Fixtures for tests of checkpoints."""

from pathlib import Path

import pytest


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """An empty folder, for bodies of ranks."""
    return tmp_path
