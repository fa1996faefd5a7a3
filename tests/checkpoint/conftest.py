"""Fixtures for tests of checkpoints."""

from pathlib import Path

import pytest


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return an empty folder, under the name that bodies of ranks use."""
    return tmp_path
